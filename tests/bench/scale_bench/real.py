"""Real endpoints, relays and pollers on this machine, and what they take of its processors."""

from __future__ import annotations

import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from paceline.config import load
from paceline.identity import PROTOCOL_VERSION, PolicyIdentity
from paceline.learner.endpoint import Endpoint
from paceline.rows import Column, transition_spec
from paceline.rpc.client import open_channel
from paceline.snapshot import SnapshotHeader, TensorDescription
from paceline.v1 import parameters_pb2, parameters_pb2_grpc
from scale_bench.model import Cost, Costs, Outcome, Setting, layers_of
from scale_bench.pollers import RUN_ID

START_SECONDS = 60.0
SMALL_BYTES, LARGE_BYTES = 64 << 10, 4 << 20
READERS = 16
"""Of one server, when its costs are measured."""


@dataclass(frozen=True)
class Window:
    """What a setting did while it was watched."""

    seconds: float
    outcome: Outcome
    endpoint_seconds: float
    relay_seconds: tuple[float, ...]
    collector_seconds: float
    """Of processor time."""
    snapshots: int
    received: int


class Stage:
    """Processes of one setting; servers on one core, collectors on another."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self._cleanup = setting, ExitStack()
        self._payload = random.Random(0).randbytes(setting.snapshot_bytes)
        self._digest = hashlib.sha256(self._payload).digest()
        self._version = 0

    def __enter__(self) -> Self:
        servers_core, collectors_core = sorted(os.sched_getaffinity(0))[:2]
        cores = os.sched_getaffinity(0)
        self._cleanup.callback(os.sched_setaffinity, 0, cores)
        folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory()))
        settings = [
            f"run.id={RUN_ID}",
            f"run.directory={folder}",
            f"learner.chunk_bytes={self.setting.chunk_bytes}",
            "learner.listen=127.0.0.1:0",
            "learner.endpoint_metrics_listen=127.0.0.1:0",
            "relay.listen=127.0.0.1:0",
            "relay.metrics_listen=127.0.0.1:0",
        ]
        os.sched_setaffinity(0, {servers_core})
        config = load(None, settings)
        self.endpoint = Endpoint.start(
            config,
            incarnation=1,
            row_spec=transition_spec(Column("observation", "float32", (3,)), Column("action", "float32", (1,))),
            actor_semantics_json="{}",
            resumed_environment_steps=0,
        )
        self._cleanup.callback(self.endpoint.close)
        self.relays: list[subprocess.Popen[bytes]] = []
        above = [self.endpoint.port]
        for layer, count in enumerate(reversed(layers_of(self.setting))):
            above = [
                self._start_relay(folder / f"relay-{layer}-{number}.log", settings, above[number % len(above)])
                for number in range(count)
            ]
        os.sched_setaffinity(0, {collectors_core})
        self._pollers: subprocess.Popen[str] | None = None
        self.publish()
        if self.setting.collectors:
            counts = [len(range(place, self.setting.collectors, len(above))) for place in range(len(above))]
            self._pollers = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "scale_bench.pollers",
                    *(f"{port}:{count}" for port, count in zip(above, counts, strict=True)),
                ],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._cleanup.callback(self._end_pollers)
            assert self._pollers.stdout is not None
            assert self._pollers.stdout.readline() == "started\n"
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def publish(self) -> float:
        """Publish the next version; when."""
        self._version += 1
        size = len(self._payload)
        published_at = time.time()
        header = SnapshotHeader(
            run_id=RUN_ID,
            identity=PolicyIdentity(1, self._version),
            learner_step=self._version,
            environment_step_count=self._version,
            published_at=published_at,
            payload_bytes=size,
            payload_sha256=self._digest,
            tensors=(TensorDescription("weight", "uint8", (size - 64,)),),
            actor_semantics_json="{}",
        )
        self.endpoint.publish(header, self._payload)
        return published_at

    def play(self) -> Window:
        """Publish as the setting says, and watch."""
        processes = [self.endpoint.pid, *(relay.pid for relay in self.relays)]
        pollers = [] if self._pollers is None else [self._pollers.pid]
        before = [cpu_seconds(pid) for pid in [*processes, *pollers]]
        began = following = time.monotonic()
        published: dict[int, float] = {}
        for _ in range(self.setting.snapshots):
            moment = self.publish()
            published[self._version] = moment
            following += self.setting.publish_seconds
            time.sleep(max(following - time.monotonic(), 0))
        seconds = time.monotonic() - began
        used = [cpu_seconds(pid) - start for pid, start in zip([*processes, *pollers], before, strict=True)]
        delays = [at - published[version] for version, at in self._end_pollers() if version in published]
        collectors = self.setting.collectors
        expected = collectors * self.setting.snapshots
        endpoint, relays = used[0], used[1 : 1 + len(self.relays)]
        direct = collectors if not relays else layers_of(self.setting)[-1]
        outcome = Outcome(
            delays=delays,
            endpoint_cpu_share=endpoint / seconds,
            endpoint_bytes_per_second=0.0
            if not expected
            else len(delays) / expected * direct * self.setting.snapshots * self.setting.snapshot_bytes / seconds,
            relay_cpu_share=max(relays, default=0.0) / seconds,
            relays=len(relays),
            skipped_share=1 - len(delays) / expected if expected else 0.0,
        )
        return Window(
            seconds, outcome, endpoint, tuple(relays), sum(used[1 + len(relays) :]), self.setting.snapshots, len(delays)
        )

    def durable_seconds(self) -> float:
        """From the hand-over until a snapshot is served, in the mean, the disk's part."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.endpoint.metrics_port}/metrics", timeout=10) as page:
            text = page.read().decode()
        name = "paceline_endpoint_snapshot_durable_seconds"
        samples = [line.split(" ") for line in text.splitlines() if line.startswith((f"{name}_sum ", f"{name}_count "))]
        total, count = (float(value) for _, value in sorted(samples, reverse=True))
        return total / count

    def _start_relay(self, log_path: Path, settings: list[str], upstream: int) -> int:
        command = [sys.executable, "-m", "paceline", "relay", *settings, f"relay.upstream=127.0.0.1:{upstream}"]
        with log_path.open("wb") as log:
            relay = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._cleanup.callback(relay.wait, 30)
        self._cleanup.callback(relay.terminate)
        self.relays.append(relay)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and relay.poll() is None:
            for line in log_path.read_text().splitlines():
                if '"relay_started"' in line and line.endswith("}"):
                    return int(json.loads(line)["port"])
            time.sleep(0.02)
        raise RuntimeError(f"a relay did not start:\n{log_path.read_text()}")

    def _end_pollers(self) -> list[tuple[int, float]]:
        pollers, self._pollers = self._pollers, None
        if pollers is None:
            return []
        assert pollers.stdin is not None
        assert pollers.stdout is not None
        pollers.stdin.close()
        applied = json.loads(pollers.stdout.readline())
        pollers.wait(30)
        return [(version, at) for version, at in applied]


def cpu_seconds(pid: int) -> float:
    """Seconds that the threads of a process have had a processor; those of threads that ended are missing."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:
            continue
    return total * 1e-9


def measure_costs(chunk_bytes: int, snapshots: int) -> Costs:
    """What each step costs on this machine: two sizes of snapshots give what is fixed and what each byte adds."""
    sizes = (SMALL_BYTES, LARGE_BYTES)

    def play(size: int, collectors: int, depth: int) -> tuple[Window, float]:
        setting = Setting(
            collectors=collectors,
            depth=depth,
            fan_out=max(collectors, 1),
            snapshot_bytes=size,
            chunk_bytes=chunk_bytes,
            publish_seconds=0.2,
            snapshots=snapshots,
        )
        with Stage(setting) as stage:
            window = stage.play()
            return window, stage.durable_seconds()

    publish, send, take, relay_take, relay_send, waits = [], [], [], [], [], []
    for size in sizes:
        alone, wait = play(size, 0, 0)
        waits.append(wait)
        publish.append(alone.endpoint_seconds / alone.snapshots)
        direct, _ = play(size, READERS, 0)
        send.append((direct.endpoint_seconds - publish[-1] * direct.snapshots) / direct.received)
        take.append(direct.collector_seconds / direct.received)
        # One reader and many: the difference is what each further one costs.
        one, _ = play(size, 1, 1)
        many, _ = play(size, READERS, 1)
        per_one, per_many = (window.relay_seconds[0] / window.snapshots for window in (one, many))
        relay_send.append((per_many - per_one) / (READERS - 1))
        relay_take.append(per_one - relay_send[-1])
    return Costs(
        publish=_line(sizes, publish),
        publish_wait_seconds=statistics.mean(waits),
        endpoint_send=_line(sizes, send),
        relay_take=_line(sizes, relay_take),
        relay_send=_line(sizes, relay_send),
        collector_take=_line(sizes, take),
    )


def measure_poll(polls: int) -> float:
    """Processor seconds of the endpoint for one poll that is answered with `not_modified`."""
    setting = Setting(0, 0, 1, SMALL_BYTES, 1 << 20, 0.2, 1)
    with Stage(setting) as stage, open_channel(f"127.0.0.1:{stage.endpoint.port}", load(None, []).rpc) as channel:
        stub = parameters_pb2_grpc.ParameterServiceStub(channel)
        request = parameters_pb2.GetSnapshotRequest(run_id=RUN_ID, protocol_version=PROTOCOL_VERSION)
        request.have.incarnation, request.have.version = 1, 1 << 40
        request.replica.collector_incarnation = 1
        for _ in range(50):
            list(stub.GetSnapshot(request, timeout=10))
        before = cpu_seconds(stage.endpoint.pid)
        for _ in range(polls):
            list(stub.GetSnapshot(request, timeout=10))
        return (cpu_seconds(stage.endpoint.pid) - before) / polls


def _line(sizes: tuple[int, int], seconds: list[float]) -> Cost:
    """The straight line through two sizes; nothing costs less than nothing."""
    per_byte = max((seconds[1] - seconds[0]) / (sizes[1] - sizes[0]), 0.0)
    return Cost(max(seconds[0] - per_byte * sizes[0], 0.0), per_byte)


def quantile_ms(delays: list[float], fraction: float) -> float:
    """Of delays, in milliseconds."""
    return float(np.quantile(delays, fraction)) * 1e3 if delays else float("nan")
