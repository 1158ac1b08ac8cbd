"""A run whose true lag is known: a real endpoint and a real collector over sockets, by a script and by its clock."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from free_ports import free_port
from gated_environment import GATE
from integration.peers import RUN_ID, Replay, make_actor, serve
from integration.waiting import wait_until
from paceline.actors import squashed_gaussian_semantics
from paceline.collector import main as collector
from paceline.config import RpcConfig, build
from paceline.envs import describe_environment
from paceline.identity import PolicyIdentity
from paceline.learner import run_service
from paceline.learner.collector_reports import CollectorReports
from paceline.learner.endpoint_metrics import EndpointMetrics
from paceline.learner.registry import RunRegistry
from paceline.learner.run_service import RunDescription, RunService
from paceline.process import StopSignal, own_time
from paceline.rows import transition_spec
from paceline.rpc.server import AioServer
from paceline.rpc.wire import row_spec_to_wire, snapshot_header_to_wire
from paceline.serving import parameter_service
from paceline.serving.parameter_service import ParameterService
from paceline.serving.publication import Publication, ServedSnapshot
from paceline.snapshot import make_header, pack_state
from paceline.v1 import parameters_pb2, run_pb2_grpc

ENV = {"id": "gated_environment:Gated-v0", "autoreset": "same_step"}
UPDATES_PER_VERSION = 10
SEMANTICS = squashed_gaussian_semantics(1, hidden=(8,), action_low=(-1.0,), action_high=(1.0,))


class ScriptedClock:
    """Stands still until the script moves it; so no way of a message takes any time."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def ahead(self, seconds: float) -> Callable[[], float]:
        """The clock of another host, which is so many seconds ahead."""
        return lambda: self.now + seconds


class HeldParameterService(ParameterService):
    """Keeps answers back where the script asks for it, in front of their chunks; or breaks them off there."""

    holds_chunks = breaks_off = False

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.released = asyncio.Event()

    async def GetSnapshot(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        is_first = True
        async for message in super().GetSnapshot(request, context):
            if not is_first:
                if self.breaks_off:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken off")
                while self.holds_chunks:
                    await self.released.wait()
            is_first = False
            yield message


class LagEndpoint:
    """The endpoint's services on a thread, with what they need and no training process."""

    def __init__(self, clock: Callable[[], float], description: RunDescription) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        self.members = RunRegistry({}, max_collectors=8, silence_seconds=30.0, warmup_steps=0, collector_count=1)
        self.metrics = EndpointMetrics(self.registry, self.members, clock)
        self._description, self._ready = description, threading.Event()
        self.incarnation = 1
        """Of the learner that publishes from now on."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._ready.wait(20)

    async def _serve(self) -> None:
        self.publication, self._ended = Publication("the learner"), asyncio.Event()
        self.parameters = HeldParameterService(
            RUN_ID,
            self.publication,
            CollectorReports(self.members, self.metrics),
            self.metrics.polls,
            silence_seconds=30.0,
            clock=self.clock,
        )

        async def done(_: object) -> None:
            pass

        run = RunService(
            self._description,
            self.publication,
            self.members,
            self.metrics,
            keep=done,
            record=done,
            evaluated=lambda _: None,
            was_published=lambda _: True,
        )
        server = AioServer(
            "127.0.0.1:0",
            RpcConfig(drain_seconds=0.1),
            services=[parameter_service.SERVICE_NAME, run_service.SERVICE_NAME],
            register=[
                self.parameters.register,
                lambda server: run_pb2_grpc.add_RunServiceServicer_to_server(run, server),
            ],
        )
        await server.start()
        self.port = server.port
        self._ready.set()
        await self._ended.wait()
        self.publication.end("the test is over")
        self.parameters.released.set()
        await server.stop()

    def publish(self, *versions: int) -> None:
        """Publish these versions at one moment: who waits gets the last one only."""
        served = [self._serve_version(version) for version in versions]

        def serve_all() -> None:
            for version, snapshot in zip(versions, served, strict=True):
                self.metrics.published(snapshot.identity, version * UPDATES_PER_VERSION, self.clock())
                self.publication.newest = snapshot
            self.publication.serve(served[-1])

        self._call(serve_all)

    def hold(self, holds: bool) -> None:
        """Keep chunks back, or let them go."""

        def change() -> None:
            self.parameters.holds_chunks = holds
            if not holds:
                self.parameters.released.set()
                self.parameters.released = asyncio.Event()

        self._call(change)

    def break_off(self, breaks_off: bool) -> None:
        """Whether transfers end after their header."""
        self.parameters.breaks_off = breaks_off

    def finish(self) -> None:
        self._call(self.publication.finish)

    def value(self, thing: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"paceline_endpoint_{thing}", labels)

    def close(self) -> None:
        self.parameters.holds_chunks = False
        self._call(self._ended.set)
        self._thread.join(20)
        self._loop.close()

    def _serve_version(self, version: int) -> ServedSnapshot:
        actor = make_actor(version, SEMANTICS)
        payload = pack_state(actor)
        header = make_header(
            actor,
            payload,
            run_id=RUN_ID,
            identity=PolicyIdentity(self.incarnation, version),
            learner_step=version * UPDATES_PER_VERSION,
            environment_step_count=0,
            published_at=self.clock(),
        )
        message = snapshot_header_to_wire(header, 0, parameters_pb2.RUN_STATE_RUNNING)
        return ServedSnapshot.copy(message, memoryview(payload), 1 << 10)

    def _call(self, function: Callable[[], None]) -> None:
        done = threading.Event()

        def call() -> None:
            function()
            done.set()

        self._loop.call_soon_threadsafe(call)
        assert done.wait(20)


class LagRun:
    """An endpoint, a replay service in memory, and a collector of one gated environment whose blocks have one row.

    With `replay_address` rows go to the service there instead.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = own_time,
        learner_clock: Callable[[], float] | None = None,
        lag: dict[str, Any] | None = None,
        n_step: int = 1,
        block_rows: int = 1,
        poll_seconds: float = 0.2,
        replay_address: str | None = None,
    ) -> None:
        GATE.reset()
        description = describe_environment(build({"env": ENV}).env)
        self.spec = spec = transition_spec(description.observation, description.action)
        self.endpoint = LagEndpoint(
            learner_clock or clock,
            RunDescription(RUN_ID, 7, "transitions", row_spec_to_wire(spec), SEMANTICS.to_json()),
        )
        self.replay, self._clock = Replay(), clock
        self._replay_server, replay_port = serve(self.replay)
        self._metrics_address = f"127.0.0.1:{free_port()}"
        self.config = build(
            {
                "run": {"id": RUN_ID, "directory": str(folder)},
                "env": ENV,
                "rpc": {"deadline_seconds": 5, "backoff_initial_seconds": 0.01, "backoff_max_seconds": 0.05},
                "learner": {
                    "address": f"127.0.0.1:{self.endpoint.port}",
                    "algorithm": {"name": "sac", "n_step": n_step},
                },
                "replay": {"address": replay_address or f"127.0.0.1:{replay_port}"},
                "collector": {
                    "environments": 1,
                    "block_rows": block_rows,
                    "block_seconds": 1000,
                    "poll_seconds": poll_seconds,
                    "metrics_listen": self._metrics_address,
                },
                "lag": lag or {},
            }
        )
        self.stop, self.error = StopSignal(), None
        self._thread = threading.Thread(target=self._collect)
        self.newest, self._is_closed = 0, False

    def start(self) -> None:
        """Publish version 1, and wait until the first action is chosen by it."""
        self.publish_unseen(1)
        self._thread.start()
        GATE.wait_for_choice()
        self.newest = 1

    def publish_unseen(self, *versions: int) -> None:
        """Publish, and go on at once."""
        self.endpoint.publish(*versions)
        self.newest = versions[-1]

    def publish(self, *versions: int) -> None:
        """Publish, and wait until the collector knows of the last one."""
        self.publish_unseen(*versions)
        wait_until(lambda: self.value("known_version") == versions[-1])

    def publish_through(self, *versions: int) -> None:
        """Publish one after another, each when the collector has the one before."""
        for version in versions:
            staged = self.value("snapshot_stage_seconds_count")
            self.publish(version)
            wait_until(lambda staged=staged: self.value("snapshot_stage_seconds_count") == staged + 1)

    def release(self, snapshots: int = 1) -> None:
        """Let a transfer go that was held, and wait until its snapshot, and those after it, lie ready."""
        staged = self.value("snapshot_stage_seconds_count")
        self.endpoint.hold(False)
        wait_until(lambda: self.value("snapshot_stage_seconds_count") == staged + snapshots)

    def page(self) -> dict[str, float]:
        """Every sample of the collector's /metrics, by its name and labels as written there."""
        with urllib.request.urlopen(f"http://{self._metrics_address}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def value(self, thing: str) -> float | None:
        return self.page().get(f"paceline_collector_{thing}")

    def histogram(self, thing: str) -> tuple[dict[float, int], float]:
        """Observations by the upper bound of their bucket, without the empty ones; and their sum."""
        page, prefix = self.page(), f"paceline_collector_{thing}"
        counts, before = {}, 0.0
        for name, value in page.items():
            if name.startswith(f"{prefix}_bucket"):
                if value > before:
                    counts[float(name.partition('le="')[2].rstrip('"}'))] = int(value - before)
                before = value
        return counts, page.get(f"{prefix}_sum", 0.0)

    def trace(self) -> list[tuple[int, int]]:
        """Environment steps and lag of each application that was recorded."""
        path = self.config.run_folder / "lag-trace" / "collector-0.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [(line["environment_steps"], line["known_version"] - line["applied_version"]) for line in lines]

    def rows(self, count: int) -> Any:
        """The rows that replay has, once there are so many."""
        self.replay.wait_for(lambda replay: replay.row_count >= count)
        return self.replay.columns()

    def join(self) -> None:
        """Wait for the collector's end; raises what ended it."""
        self._thread.join(20)
        assert not self._thread.is_alive(), "the collector did not end"
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.stop.set()
        GATE.open()
        if self._thread.ident is not None:
            self._thread.join(20)
        if self._is_closed:
            return
        self._is_closed = True
        self.endpoint.close()
        self._replay_server.stop(0).wait()

    def _collect(self) -> None:
        try:
            collector.run(self.config, index=None, stop=self.stop, clock=self._clock)
        except Exception as error:
            self.error = error
