"""The training rate beside polling collectors, relative to the rate beside none.

A real SAC (batch 256, networks of 256x256) trains on core 0 and publishes as the learner does, through the real
endpoint process. The endpoint and one process with all the collectors' clients share core 1. Each client polls at
20 Hz and asks for an answer at once, which is the dearest way to poll: nearly every answer is "not modified". Each has
a connection of its own and fetches every snapshot that it sees. Settings alternate within each round; a figure is
compared with the rate beside none in the same round.

    .venv/bin/python tests/bench/endpoint.py --quick
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# Before numpy and torch read it.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import grpc
import grpc.aio
import numpy as np

from paceline.config import RpcConfig, load
from paceline.identity import PROTOCOL_VERSION, PolicyIdentity
from paceline.learner.endpoint import Endpoint
from paceline.process import tune_allocator
from paceline.rows import Block, Column, transition_spec
from paceline.rpc.client import channel_options
from paceline.v1 import parameters_pb2, parameters_pb2_grpc

RUN_ID = "bench"
POLLS_PER_SECOND = 20
TARGETS = {16: 0.97, 64: 0.93}
BATCH_SIZE, BUFFER_ROWS = 256, 100_000
OBSERVATION_DIM, ACTION_DIM = 17, 6


@dataclass(frozen=True)
class Window:
    """What was done in one stretch of time."""

    updates_per_second: float
    updates_per_cpu_second: float
    cpu_share: float
    polls_per_second: float
    snapshots_per_second: float


@dataclass(frozen=True)
class Figures:
    """Rates beside so many collectors: medians over rounds, and ratios to none with their quartiles.

    `cpu_share` is how much of its core the training had. Where it differs between the settings, others used the
    machine, and `cpu_ratio`, by updates per second on the processor, says more than `ratio`.
    """

    collectors: int
    rounds: int
    updates_per_second: float
    polls_per_second: float
    snapshots_per_second: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    cpu_ratio: float
    cpu_share: float
    target: float | None


class Pollers:
    """The clients, in a process of their own."""

    def __init__(self, port: int, most: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--poller", str(port), str(most)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, count: int) -> tuple[int, int]:
        """From now on `count` clients poll; polls and snapshots of all clients so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        polls, snapshots = map(int, self._process.stdout.readline().split())
        return polls, snapshots

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


async def poll_for_ever(port: int, most: int) -> None:
    """The other process: client i polls while i is below the number read last from standard input."""
    polls = snapshots = 0
    active, changed = 0, asyncio.Event()

    async def client(number: int) -> None:
        nonlocal polls, snapshots
        options = [*channel_options(RpcConfig()), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)
        stub = parameters_pb2_grpc.ParameterServiceStub(channel)
        request = parameters_pb2.GetSnapshotRequest(run_id=RUN_ID, protocol_version=PROTOCOL_VERSION)
        following = time.monotonic() + number / most / POLLS_PER_SECOND
        while True:
            while number >= active:
                await changed.wait()
                following = time.monotonic() + number / most / POLLS_PER_SECOND
            await asyncio.sleep(max(following - time.monotonic(), 0))
            following = max(following + 1 / POLLS_PER_SECOND, time.monotonic())
            async for response in stub.GetSnapshot(request, timeout=30):
                if response.HasField("header"):
                    request.have.CopyFrom(response.header.identity)
                    snapshots += 1
            polls += 1

    clients = [asyncio.create_task(client(number)) for number in range(most)]
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        active = int(line)
        changed.set()
        changed = asyncio.Event()
        print(polls, snapshots, flush=True)
    for task in clients:
        task.cancel()


class Training:
    """SAC on a full buffer, publishing as the learner does."""

    def __init__(self, folder: Path, publish_every_updates: int) -> None:
        # Here: the process of the clients needs no torch.
        import torch

        from paceline.actors import build_actor, squashed_gaussian_semantics
        from paceline.learner.algorithms import TransitionBatch, build_algorithm
        from paceline.snapshot import make_header, pack_state

        self._torch, self._batch_of = torch, TransitionBatch.from_rows
        self._make_header, self._pack_state = make_header, pack_state
        spec = transition_spec(
            Column("observation", "float32", (OBSERVATION_DIM,)), Column("action", "float32", (ACTION_DIM,))
        )
        generator = np.random.default_rng(0)
        block = Block.empty(spec, BUFFER_ROWS)
        for name in ("observation", "next_observation", "action", "reward"):
            shape = block.columns[name].shape
            block.columns[name] = np.tanh(generator.standard_normal(shape, np.float32))
        torch.manual_seed(0)
        semantics = squashed_gaussian_semantics(
            OBSERVATION_DIM, hidden=(256, 256), action_low=[-1.0] * ACTION_DIM, action_high=[1.0] * ACTION_DIM
        )
        self._actor = build_actor(semantics)
        self._algorithm = build_algorithm({"name": "sac"}, self._actor, seed=0)
        self._spec, self._data, self._generator = spec, block.data, generator
        self._rows = np.empty((BATCH_SIZE, spec.row_bytes), np.uint8)
        self._publish_every_updates, self._updates, self._version = publish_every_updates, 0, 0
        config = load(
            None,
            [
                f"run.id={RUN_ID}",
                f"run.directory={folder}",
                "learner.listen=127.0.0.1:0",
                "learner.endpoint_metrics_listen=127.0.0.1:0",
            ],
        )
        self.endpoint = Endpoint.start(
            config,
            incarnation=1,
            row_spec=spec,
            actor_semantics_json=semantics.to_json(),
            resumed_environment_steps=0,
        )

    def publish(self) -> int:
        """Publish the actor; bytes of the snapshot."""
        self._version += 1
        payload = self._pack_state(self._actor)
        header = self._make_header(
            self._actor,
            payload,
            run_id=RUN_ID,
            identity=PolicyIdentity(1, self._version),
            learner_step=self._updates,
            environment_step_count=self._updates,
            published_at=time.time(),
        )
        self.endpoint.publish(header, payload)
        return len(payload)

    def train(self, seconds: float) -> tuple[int, float, float]:
        """Train for so long; updates, seconds, and seconds on the processor."""
        began, cpu_began, updates = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < seconds:
            index = self._generator.integers(0, BUFFER_ROWS, BATCH_SIZE)
            np.take(self._data, index, axis=0, out=self._rows, mode="clip")
            self._algorithm.update(self._batch_of(self._spec, self._torch.from_numpy(self._rows)))
            self._updates += 1
            updates += 1
            if self._updates % self._publish_every_updates == 0:
                self._algorithm.check_finite()
                self.endpoint.check()
                self.publish()
        return updates, time.perf_counter() - began, time.process_time() - cpu_began


def measure(training: Training, pollers: Pollers, counts: list[int], rounds: int, seconds: float) -> list[Figures]:
    """Alternate the settings, each round beginning with another one."""
    windows: dict[int, list[Window]] = {count: [] for count in counts}
    for number in range(rounds):
        shift = number % len(counts)
        for count in [*counts[shift:], *counts[:shift]]:
            pollers.run(count)
            training.train(0.3)
            polls_before, snapshots_before = pollers.run(count)
            updates, wall, cpu = training.train(seconds)
            polls, snapshots = pollers.run(count)
            windows[count].append(
                Window(
                    updates / wall,
                    updates / cpu,
                    cpu / wall,
                    (polls - polls_before) / wall,
                    (snapshots - snapshots_before) / wall,
                )
            )
    pollers.run(0)
    return [_figures(count, windows[count], windows[0]) for count in counts]


def _figures(count: int, windows: list[Window], alone: list[Window]) -> Figures:
    pairs = list(zip(windows, alone, strict=True))
    ratios = [mine.updates_per_second / other.updates_per_second for mine, other in pairs]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return Figures(
        collectors=count,
        rounds=len(windows),
        updates_per_second=round(statistics.median(window.updates_per_second for window in windows), 1),
        polls_per_second=round(statistics.median(window.polls_per_second for window in windows)),
        snapshots_per_second=round(statistics.median(window.snapshots_per_second for window in windows)),
        ratio=round(statistics.median(ratios), 3),
        ratio_quartiles=(round(quartiles[0], 3), round(quartiles[2], 3)),
        cpu_ratio=round(
            statistics.median(mine.updates_per_cpu_second / other.updates_per_cpu_second for mine, other in pairs), 3
        ),
        cpu_share=round(statistics.median(window.cpu_share for window in windows), 2),
        target=TARGETS.get(count),
    )


def main() -> None:
    """Measure and print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three short rounds: a look, not a figure")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each setting in each round")
    parser.add_argument("--collectors", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--publish-every", type=int, default=10, help="updates between two snapshots")
    parser.add_argument("--poller", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tune_allocator()
    if arguments.poller:
        asyncio.run(poll_for_ever(*arguments.poller))
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("two cores are needed: one for training, one for everything else")
    rounds, seconds = (3, 1.5) if arguments.quick else (arguments.rounds, arguments.seconds)
    with tempfile.TemporaryDirectory() as folder:
        # Children keep the core that they were started on.
        os.sched_setaffinity(0, {cores[1]})
        training = Training(Path(folder), arguments.publish_every)
        pollers = Pollers(training.endpoint.port, max(arguments.collectors))
        os.sched_setaffinity(0, {cores[0]})
        payload_bytes = training.publish()
        training.train(1.0)
        machine = {
            "machine": platform.processor() or platform.machine(),
            "cores": len(cores),
            "load": round(os.getloadavg()[0], 2),
            "commit": _commit(),
            "payload_bytes": payload_bytes,
            "publish_every_updates": arguments.publish_every,
            "seconds": seconds,
        }
        print(json.dumps(machine), flush=True)
        for figures in measure(training, pollers, [0, *arguments.collectors], rounds, seconds):
            print(json.dumps(asdict(figures)), flush=True)
        pollers.close()
        training.endpoint.close()


def _commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
