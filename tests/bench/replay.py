"""Replay's throughput, each figure beside what it is measured against, in interleaved rounds of one run.

insert: durable blocks of 1,024 rows through the real service (gRPC, checks, Redis' append-only file, ring, then the
    acknowledgement), against a prototype of the same way with nothing but its copies: identity serialisers, one SET
    over the Unix socket, a ring write. Both writers pack columns into rows and keep four blocks in flight.
sample: batches of 8,192 rows into a buffer of the client, against raw TCP over loopback in messages of 1 MiB.

    python tests/bench/replay.py [--quick] [--rounds N] [--seconds S]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import redis

from paceline.config import Config, build
from paceline.local.embedded import EmbeddedRedis
from paceline.process import StopSignal, tune_allocator
from paceline.replay.main import run as run_replay
from paceline.replay.service import SERVICE
from paceline.rows import Block, Column, RowSpec
from paceline.rpc.bulk import APPEND_REQUEST, SAMPLE_RESPONSE, Bulk
from paceline.rpc.client import open_channel
from paceline.rpc.server import server_options
from paceline.rpc.wire import row_spec_to_wire
from paceline.telemetry import configure_logging
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import replay_pb2_grpc, rows_pb2

ROOT = Path(__file__).resolve().parents[2]

SPEC = RowSpec(
    (
        Column("observation", "float32", (48,)),
        Column("action", "float32", (12,)),
        Column("reward", "float32"),
        Column("next_observation", "float32", (48,)),
        Column("policy_version", "uint32"),
        Column("terminated", "bool"),
        Column("truncated", "bool"),
    )
)
BLOCK_ROWS = 1024
BATCH_ROWS = 8192
CAPACITY_ROWS = 500_000
"""224 MB: larger than any cache."""
IN_FLIGHT = 4
MESSAGE_BYTES = 1 << 20
RUN = "bench"


def make_config(redis_url: str, port: int) -> Config:
    return build(
        {
            "run": {"id": RUN, "environment_steps": 1 << 40},
            "learner": {"updates": "learner_bound"},
            "collector": {"block_rows": BLOCK_ROWS},
            "replay": {
                "redis_url": redis_url,
                "listen": f"127.0.0.1:{port}",
                "metrics_listen": "127.0.0.1:0",
                "tables": {"transitions": {"capacity_rows": CAPACITY_ROWS}},
            },
        }
    )


# Servers, each in a process of its own.


def serve_product(redis_url: str, port: int) -> None:
    configure_logging("replay")
    run_replay(make_config(redis_url, port), resume=False, stop=StopSignal.install())


def serve_prototype(redis_url: str, port: int) -> None:
    store = redis.Redis.from_url(redis_url)
    ring = np.empty((CAPACITY_ROWS, SPEC.row_bytes), np.uint8)
    blocks = CAPACITY_ROWS // BLOCK_ROWS

    def append(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for number, data in enumerate(requests):
            slot = number % blocks
            store.set(f"block:{slot}", data)
            ring[slot * BLOCK_ROWS : (slot + 1) * BLOCK_ROWS] = np.frombuffer(data, np.uint8).reshape(BLOCK_ROWS, -1)
            yield b"stored"

    server = grpc.server(futures.ThreadPoolExecutor(8), options=server_options(make_config(redis_url, port).rpc))
    handlers = {"Append": grpc.stream_stream_rpc_method_handler(append)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Prototype", handlers)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    StopSignal.install().wait()
    server.stop(0).wait()


def serve_tcp(port: int) -> None:
    payload = bytes(MESSAGE_BYTES)
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    while True:
                        connection.sendall(payload)
                except OSError:
                    pass  # the client has seen enough


# Clients, in this process.


class Columns:
    """What a collector has before it packs a block."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._values = {
            "observation": random.standard_normal((BLOCK_ROWS, 48), np.float32),
            "action": random.standard_normal((BLOCK_ROWS, 12), np.float32),
            "reward": random.standard_normal(BLOCK_ROWS, np.float32),
            "next_observation": random.standard_normal((BLOCK_ROWS, 48), np.float32),
            "policy_version": np.ones(BLOCK_ROWS, np.uint32),
            "terminated": np.zeros(BLOCK_ROWS, np.bool_),
            "truncated": np.zeros(BLOCK_ROWS, np.bool_),
        }

    def pack(self) -> Block:
        block = Block.empty(SPEC, BLOCK_ROWS)
        columns = block.columns
        for name, values in self._values.items():
            columns[name] = values
        return block


class Product:
    """A writer and a sampler of the real service."""

    def __init__(self, config: Config) -> None:
        self._channel = open_channel(config.replay.listen, config.rpc)
        self._append = self._channel.stream_stream(
            f"/{SERVICE}/Append", APPEND_REQUEST.serialize, pb.AppendResponse.FromString
        )
        self._sample = self._channel.stream_stream(
            f"/{SERVICE}/Sample", pb.SampleRequest.SerializeToString, SAMPLE_RESPONSE.deserialize
        )
        self._sequence = 0
        stub = replay_pb2_grpc.ReplayServiceStub(self._channel)
        request = pb.OpenTableRequest(run_id=RUN, table="transitions", row_spec=row_spec_to_wire(SPEC))
        wait_until_served(lambda: stub.OpenTable(request, timeout=10))

    def insert(self, columns: Columns, enough: Callable[[int], bool]) -> float:
        return rate_of_inserts(
            lambda requests: self._append(requests, timeout=600), lambda: self._request(columns), enough
        )

    def sample(self, enough: Callable[[int], bool]) -> float:
        """MB/s of whole batches in the client's buffer."""
        batch, credit = np.empty((BATCH_ROWS, SPEC.row_bytes), np.uint8), threading.Semaphore(0)
        done = threading.Event()

        def requests() -> Iterator[pb.SampleRequest]:
            yield pb.SampleRequest(run_id=RUN, table="transitions", batch_size=BATCH_ROWS, batch_count=4, seed=1)
            while credit.acquire() and not done.is_set():
                yield pb.SampleRequest(run_id=RUN, table="transitions", batch_size=BATCH_ROWS, batch_count=1)

        filled, batches, began = 0, 0, time.perf_counter()
        stream = self._sample(requests(), timeout=600)
        for bulk in stream:
            rows = np.frombuffer(bulk.payload, np.uint8).reshape(-1, SPEC.row_bytes)
            while len(rows):
                part = rows[: BATCH_ROWS - filled]
                batch[filled : filled + len(part)] = part
                filled, rows = filled + len(part), rows[len(part) :]
                if filled == BATCH_ROWS:
                    filled, batches = 0, batches + 1
                    credit.release()
            if enough(batches):
                break
        seconds = time.perf_counter() - began
        done.set()
        credit.release()
        stream.cancel()
        return batches * batch.nbytes / seconds / 1e6

    def _request(self, columns: Columns) -> Bulk[pb.AppendRequest]:
        self._sequence += 1
        block = columns.pack()
        header = rows_pb2.BlockHeader(
            collector_index=0,
            collector_incarnation=1,
            sequence=self._sequence,
            row_count=BLOCK_ROWS,
            row_spec_digest=SPEC.digest,
            checksum=block.checksum(),
        )
        return Bulk(pb.AppendRequest(run_id=RUN, table="transitions", header=header), block.data)


class Prototype:
    """A writer of the prototype."""

    def __init__(self, config: Config, port: int) -> None:
        self._append = open_channel(f"127.0.0.1:{port}", config.rpc).stream_stream("/Prototype/Append")

    def insert(self, columns: Columns, enough: Callable[[int], bool]) -> float:
        def append(requests: Iterator[bytes]) -> Iterator[bytes]:
            return self._append(requests, timeout=600, wait_for_ready=True)

        return rate_of_inserts(append, lambda: columns.pack().data.tobytes(), enough)


def rate_of_inserts(append: Callable, request: Callable, enough: Callable[[int], bool]) -> float:
    """Rows/s acknowledged, with `IN_FLIGHT` blocks unacknowledged at most."""
    window, done = threading.Semaphore(IN_FLIGHT), threading.Event()

    def requests() -> Iterator:
        while window.acquire() and not done.is_set():
            yield request()

    began, seconds, counted = time.perf_counter(), 0.0, 0
    for blocks, _ in enumerate(append(requests()), start=1):
        if not done.is_set() and enough(blocks):
            seconds, counted = time.perf_counter() - began, blocks
            done.set()
        window.release()
    return counted * BLOCK_ROWS / seconds


def rate_of_tcp(port: int, enough: Callable[[int], bool]) -> float:
    """MB/s of raw TCP."""
    buffer, messages, began = bytearray(MESSAGE_BYTES), 0, time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        view = memoryview(buffer)
        while not enough(messages):
            got = 0
            while got < MESSAGE_BYTES:
                got += connection.recv_into(view[got:])
            messages += 1
        return messages * MESSAGE_BYTES / (time.perf_counter() - began) / 1e6


def for_seconds(seconds: float) -> Callable[[int], bool]:
    until = time.perf_counter() + seconds
    return lambda _: time.perf_counter() > until


def wait_until_served(call: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            call()
            return
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                raise
            threading.Event().wait(0.1)


# The run.


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def spawn(stack: ExitStack, *arguments: str | int) -> None:
    child = subprocess.Popen([sys.executable, __file__, *map(str, arguments)])
    stack.callback(child.wait, 30)
    stack.callback(child.terminate)


def measure(rounds: int, seconds: float, folder: Path, binary: Path | None) -> dict[str, list[float]]:
    with ExitStack() as stack:
        ports = [free_port() for _ in range(3)]
        servers = [EmbeddedRedis.start(folder / name, binary=binary) for name in ("product", "prototype")]
        for server in servers:
            stack.callback(server.stop)
        spawn(stack, "--serve", "product", servers[0].url, ports[0])
        spawn(stack, "--serve", "prototype", servers[1].url, ports[1])
        spawn(stack, "--serve", "tcp", "-", ports[2])
        config, columns = make_config(servers[0].url, ports[0]), Columns()
        product, prototype = Product(config), Prototype(config, ports[1])
        full = CAPACITY_ROWS // BLOCK_ROWS + 1
        for target in (product, prototype):  # first the rings are filled, so that every later block removes one
            target.insert(columns, lambda blocks: blocks >= full)
        figures: dict[str, list[float]] = {
            "insert_product_rows_per_s": [],
            "insert_prototype_rows_per_s": [],
            "sample_product_mb_per_s": [],
            "raw_tcp_mb_per_s": [],
        }
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            turns = [
                ("insert_product_rows_per_s", lambda: product.insert(columns, for_seconds(seconds))),
                ("insert_prototype_rows_per_s", lambda: prototype.insert(columns, for_seconds(seconds))),
                ("sample_product_mb_per_s", lambda: product.sample(for_seconds(seconds))),
                ("raw_tcp_mb_per_s", lambda: rate_of_tcp(ports[2], for_seconds(seconds))),
            ]
            for name, turn in turns if number % 2 == 0 else reversed(turns):
                figures[name].append(turn())
    return figures


def ratios(figures: dict[str, list[float]]) -> dict[str, list[float]]:
    def per_round(a: str, b: str) -> list[float]:
        return [x / y for x, y in zip(figures[a], figures[b], strict=True)]

    return {
        "insert_of_prototype": per_round("insert_product_rows_per_s", "insert_prototype_rows_per_s"),
        "sample_of_raw_tcp": per_round("sample_product_mb_per_s", "raw_tcp_mb_per_s"),
    }


def describe_machine() -> dict[str, str]:
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "unknown")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "cpu": cpu.partition(": ")[2],
        "cores": str(len(os.sched_getaffinity(0))),
        "system": platform.platform(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "numpy": np.__version__,
        "redis-py": redis.__version__,
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 1 s, to see that it runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn in a round")
    parser.add_argument("--redis-binary", type=Path, help="a redis-server to use instead of the bundled one")
    parser.add_argument("--serve", nargs=3, metavar=("WHAT", "URL", "PORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tune_allocator()
    if arguments.serve:
        what, url, port = arguments.serve
        serve = {"product": serve_product, "prototype": serve_prototype, "tcp": lambda _, port: serve_tcp(port)}
        serve[what](url, int(port))
        return
    rounds, seconds = (2, 1.0) if arguments.quick else (arguments.rounds, arguments.seconds)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        figures = measure(rounds, seconds, Path(folder), arguments.redis_binary)
    machine, compared = describe_machine(), ratios(figures)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for name, values in {**figures, **compared}.items():
        digits = 2 if name in compared else 0
        median, low, high = statistics.median(values), min(values), max(values)
        print(f"{name:32} {median:12,.{digits}f}  [{low:,.{digits}f} .. {high:,.{digits}f}]")
    results = ROOT / "bench-results"
    results.mkdir(exist_ok=True)
    (results / "replay.json").write_text(
        json.dumps({"machine": machine, "rounds": rounds, "seconds": seconds, "figures": figures, "ratios": compared})
    )


if __name__ == "__main__":
    main()
