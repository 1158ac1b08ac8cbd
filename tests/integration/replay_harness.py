"""A replay service on a real Redis, and a client of plain protobuf messages."""

from __future__ import annotations

import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import grpc
import numpy as np
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from free_ports import free_port
from integration.replay_program import start_replay
from paceline.config import Config, build
from paceline.process import StopSignal
from paceline.replay.main import run
from paceline.replay.service import SERVICE
from paceline.rows import Block, Column, RowSpec, block_from_wire
from paceline.rpc.client import open_channel
from paceline.rpc.status import raising
from paceline.rpc.wire import row_spec_to_wire
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import replay_pb2_grpc, rows_pb2
from redis_record import keys_of_payloads, read_record

SECONDS = 30.0
"""The bound of every wait; nothing normally takes a tenth of it."""

SPEC = RowSpec((Column("value", "float64"), Column("observation", "float32", (4,)), Column("flag", "bool")))
TABLE = "transitions"
RUN = "first-run"

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, seconds: float = SECONDS) -> T:
    """The first true value of `condition`."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, f"not within {seconds:g} s: {what}"
        threading.Event().wait(0.02)
    return value


def make_config(
    redis_url: str,
    *,
    run_id: str = RUN,
    port: int | None = None,
    capacity: int = 10_000,
    limiter: dict[str, Any] | None = None,
    table: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Config:
    """A configuration with a free ratio and a minimum of one row, unless it says otherwise."""
    address = f"127.0.0.1:{port or free_port()}"
    tree: dict[str, Any] = {
        "run": {"id": run_id, "environment_steps": 1_000_000},
        "rpc": {"drain_seconds": 5},
        "learner": {"updates": "learner_bound"},
        "collector": {"block_rows": 10},
        "replay": {
            "redis_url": redis_url,
            "listen": address,
            "address": address,
            "metrics_listen": f"127.0.0.1:{free_port()}",
            "tables": {
                TABLE: {
                    "capacity_rows": capacity,
                    "limiter": {"min_rows": 1, "deadline_seconds": SECONDS, **(limiter or {})},
                    **(table or {}),
                }
            },
        },
    }
    for section, values in sections.items():
        tree.setdefault(section, {}).update(values)
    return build(tree)


def block(first: int, count: int, spec: RowSpec = SPEC) -> Block:
    """Rows whose value is first, first + 1, ..."""
    made = Block.empty(spec, count)
    made.columns["value"] = np.arange(first, first + count)
    return made


def request(
    sequence: int, rows: Block, *, collector: int = 0, incarnation: int = 1, run_id: str = RUN, table: str = TABLE
) -> pb.AppendRequest:
    header = rows_pb2.BlockHeader(
        collector_index=collector,
        collector_incarnation=incarnation,
        sequence=sequence,
        row_count=rows.row_count,
        row_spec_digest=rows.spec.digest,
        checksum=rows.checksum(),
    )
    return pb.AppendRequest(run_id=run_id, table=table, header=header, rows=rows.data.tobytes())


def together(*requests: pb.AppendRequest) -> pb.AppendRequest:
    """One request of the blocks of several."""
    first, *further = requests
    message = pb.AppendRequest(
        run_id=first.run_id,
        table=first.table,
        header=first.header,
        further_headers=[request.header for request in further],
        rows=b"".join(request.rows for request in requests),
    )
    for header, request in zip((message.header, *message.further_headers), requests, strict=True):
        header.payload_byte_count = len(request.rows)
    return message


def one_by_one(answers: Iterable[pb.AppendResponse]) -> list[pb.AppendResponse]:
    """The acknowledgement of each block, whatever answer it came in."""
    singles = []
    for answer in answers:
        for each in (answer, *answer.further):
            single = pb.AppendResponse()
            single.CopyFrom(each)
            single.ClearField("further")
            singles.append(single)
    return singles


class Client:
    """Calls of one peer."""

    def __init__(self, config: Config, run_id: str = RUN, shard: int = 0) -> None:
        self.channel = open_channel(config.replay.shard_addresses()[shard], config.rpc)
        self.stub = replay_pb2_grpc.ReplayServiceStub(self.channel)
        self._health = health_pb2_grpc.HealthStub(self.channel)
        self.run_id = run_id

    def open(self, spec: RowSpec = SPEC, table: str = TABLE) -> pb.OpenTableResponse:
        message = pb.OpenTableRequest(run_id=self.run_id, table=table, row_spec=row_spec_to_wire(spec))
        with raising("replay"):
            return self.stub.OpenTable(message, timeout=SECONDS)

    def append(self, *requests: pb.AppendRequest) -> list[pb.AppendResponse]:
        with raising("replay"):
            return list(self.stub.Append(iter(requests), timeout=SECONDS))

    def append_rows(self, count: int, block_rows: int = 10, first: int = 0) -> None:
        """Blocks 1 to `count` of collector 0, all rows numbered through."""
        blocks = (
            request(number + 1, block(number * block_rows, block_rows), run_id=self.run_id)
            for number in range(first, first + count)
        )
        with raising("replay"):
            assert len(list(self.stub.Append(blocks, timeout=SECONDS))) == count

    def sample(self, batch_size: int, batch_count: int = 1, *, seed: int | None = 1) -> list[pb.SampleResponse]:
        with raising("replay"):
            return list(self.stub.Sample(iter([self.sample_request(batch_size, batch_count, seed)]), timeout=SECONDS))

    def sample_values(self, batch_size: int, seed: int = 1) -> np.ndarray:
        rows = b"".join(message.rows for message in self.sample(batch_size, seed=seed))
        return np.frombuffer(rows, SPEC.dtype)["value"]

    def sample_request(self, batch_size: int, batch_count: int = 1, seed: int | None = 1) -> pb.SampleRequest:
        return pb.SampleRequest(
            run_id=self.run_id, table=TABLE, batch_size=batch_size, batch_count=batch_count, seed=seed
        )

    def follow(self, rows: int, *, table: str = TABLE, **first: int) -> list[pb.FollowResponse]:
        """The answers of a Follow stream until so many rows have come; then it is cut."""
        answers: list[pb.FollowResponse] = []
        with Following(self, table, **first) as following:
            while sum(answer.row_count for answer in answers) < rows:
                answers.append(following.next())
        return answers

    def describe(self, table: str = TABLE) -> pb.TableDescription:
        with raising("replay"):
            answer = self.stub.DescribeTables(pb.DescribeTablesRequest(run_id=self.run_id), timeout=SECONDS)
        return {described.name: described for described in answer.tables}[table]

    def health(self, service: str = SERVICE) -> str:
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=SECONDS)
        except grpc.RpcError as error:
            return error.code().name
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def wait_until_serving(self) -> None:
        wait_until(lambda: self.health() == "SERVING", "replay serves")

    def close(self) -> None:
        self.channel.close()


class Following:
    """An open Follow stream, for the time of a `with`."""

    def __init__(self, client: Client, table: str = TABLE, **first: Any) -> None:
        self._run_id, self._table = client.run_id, table
        self._requests: queue.SimpleQueue[pb.FollowRequest | None] = queue.SimpleQueue()
        self.report(**first)
        self.stream = client.stub.Follow(iter(self._requests.get, None), timeout=2 * SECONDS)

    def report(self, **progress: Any) -> None:
        self._requests.put(pb.FollowRequest(run_id=self._run_id, table=self._table, **progress))

    def end(self) -> None:
        """Ask for no more."""
        self._requests.put(None)

    def next(self) -> pb.FollowResponse:
        with raising("replay"):
            return next(self.stream)

    def values(self, count: int) -> list[float]:
        """The values of the next `count` rows; no more may come with them."""
        values: list[float] = []
        while len(values) < count:
            values += values_of(self.next())
        assert len(values) == count
        return values

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.cancel()
        self.end()


class ReplayThread:
    """The service in this process."""

    def __init__(self, config: Config, *, resume: bool = False, shard: int = 0) -> None:
        self.config = config
        self.stop_signal = StopSignal()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(resume, shard), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.stop_signal.set()
        self.join()

    def join(self) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "replay did not stop"

    def metrics(self) -> dict[str, float]:
        return read_metrics(self.config)

    def _run(self, resume: bool, shard: int) -> None:
        try:
            run(self.config, resume=resume, stop=self.stop_signal, shard=shard)
        except BaseException as error:
            self.error = error


class ReplayProcess:
    """The service in a process of its own, to be killed."""

    def __init__(self, config: Config, *, resume: bool = False) -> None:
        self.config = config
        tree = config.model_dump(mode="json")
        assert config.replay.redis_url is not None
        tree["replay"]["redis_url"] = config.replay.redis_url.get_secret_value()
        self.process = start_replay(tree, resume=resume)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(SECONDS)

    def metrics(self) -> dict[str, float]:
        return read_metrics(self.config)

    def stop(self) -> None:
        self.process.terminate()
        self.process.join(SECONDS)
        assert self.process.exitcode == 0


def read_metrics(config: Config) -> dict[str, float]:
    """Every series of /metrics that begins with paceline_replay, by name and labels."""
    with urllib.request.urlopen(f"http://{config.replay.metrics_listen}/metrics", timeout=SECONDS) as page:
        lines = page.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("paceline_replay"))
    return {name: float(value) for name, value in pairs}


def wait_until_whole(replay: ReplayThread | ReplayProcess) -> None:
    """Wait until the tables of a service that serves hold all their rows: it serves before."""
    wait_until(
        lambda: all(
            value for name, value in replay.metrics().items() if name.startswith("paceline_replay_table_whole")
        ),
        "the tables are whole",
    )


def values_of(answer: pb.FollowResponse | pb.SampleResponse) -> list[float]:
    """The values of the rows of an answer."""
    return np.frombuffer(answer.rows, SPEC.dtype)["value"].tolist()


def retry(call: Callable[[], T], accepted: tuple[type[Exception], ...]) -> T:
    """The answer of a call that may fail with `accepted` for a while."""

    def attempt() -> list[T] | None:
        try:
            return [call()]
        except accepted:
            return None

    return wait_until(attempt, "the call succeeds")[0]


def values_in_redis(client: redis.Redis, table: str = TABLE) -> list[float]:
    """The values of all rows of the record, in order. Checks that every block has its payload and the reverse."""
    values: list[float] = []
    first_rows = set()
    for header, payload in read_record(client, RUN, table):
        first_rows.add(header.first_row)
        values += block_from_wire(SPEC, header, payload).columns["value"].tolist()
    assert keys_of_payloads(client, RUN, table) == first_rows
    return values
