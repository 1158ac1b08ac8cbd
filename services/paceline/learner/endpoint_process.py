"""The endpoint process: parameter server, run registry and record of a learner. It imports no torch.

    python -m paceline.learner.endpoint_process SOCKET_DESCRIPTOR MEMORY_DESCRIPTOR

Started by `paceline.learner.endpoint`. It ignores SIGTERM and SIGINT: a Ctrl-C reaches every process of a terminal, and
the training process still has a last checkpoint to write and things to record. The endpoint ends when the training
process tells it to, or when their socket closes because that one died.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from paceline.config import Config
from paceline.errors import PacelineError, UnavailableError
from paceline.health import Health
from paceline.identity import PolicyIdentity
from paceline.learner import run_service
from paceline.learner.collector_reports import CollectorReports
from paceline.learner.control import Message, read_message
from paceline.learner.endpoint_metrics import ACTIVITIES, EndpointMetrics
from paceline.learner.ledger import EndpointLedger, Members
from paceline.learner.recorder import Recorder
from paceline.learner.registry import RunRegistry
from paceline.learner.run_service import Records, RunDescription, RunService
from paceline.learner.snapshot_memory import SnapshotMemory
from paceline.process import adopt_epoch, die_with_parent, tune_allocator
from paceline.rpc.server import AioServer
from paceline.rpc.wire import seconds_of
from paceline.serving import parameter_service
from paceline.serving.parameter_service import ParameterService
from paceline.serving.publication import Publication, ServedSnapshot
from paceline.telemetry import ActivityClock, MetricsServer, configure_logging, get_logger, serve_metrics
from paceline.v1 import parameters_pb2, rows_pb2, run_pb2_grpc

ORPHAN_DRAIN_SECONDS = 1.0
"""When the training process died, calls in progress may finish for so long: a new learner wants the port."""

TURN_SECONDS = 1.0
"""How often the event loop shows that it turns."""


class EndpointProcess:
    """Serves until it is told to end."""

    def __init__(
        self,
        start: Message,
        writer: asyncio.StreamWriter,
        memory: SnapshotMemory,
        cleanup: contextlib.ExitStack,
    ) -> None:
        """Open everything that needs no event loop call; `cleanup` closes it again.

        Raises:
            ConflictError, InvalidInputError: by the ledger. PortTakenError: /metrics or the services cannot listen.
        """
        fields = start.fields
        self._config = config = Config.model_validate(fields["config"])
        self._writer, self._memory = writer, memory
        # Never closed: the next learner of the run waits until this process is gone, and its ports with it.
        self._ledger = EndpointLedger.open(config.run_folder)
        self._registry = RunRegistry(
            self._ledger.members,
            max_collectors=config.collector.max_count,
            silence_seconds=config.learner.silence_seconds,
            warmup_steps=config.collector.warmup_steps,
            collector_count=config.collector.count,
            resumed_environment_steps=fields["resumed_environment_steps"],
            resumed=self._ledger.last_version > 0,
        )
        self._recorder = Recorder(config.run_folder)
        cleanup.callback(self._recorder.close)
        self._recall()
        self._publication = Publication("the learner")
        # One thread each, so that what they do stays in order: versions and places, records, copies of snapshots.
        self._disk, self._records, self._copies = (cleanup.enter_context(ThreadPoolExecutor(1)) for _ in range(3))
        self._pending: ServedSnapshot | None = None
        self._pending_changed = asyncio.Condition()
        self._health = Health(config.run.stuck_seconds, unready="no snapshot is served yet")
        self._serving_version = 0

        prometheus = CollectorRegistry()
        self._metrics = EndpointMetrics(prometheus, self._registry)
        parameters = ParameterService(
            config.run_id,
            self._publication,
            CollectorReports(self._registry, self._metrics),
            self._metrics.polls,
            silence_seconds=config.learner.silence_seconds,
        )
        run = RunService(
            RunDescription.of(config, rows_pb2.RowSpec.FromString(start.body), fields["actor_semantics_json"]),
            self._publication,
            self._registry,
            self._metrics,
            keep=self._keep,
            record=self._record,
            evaluated=self._tell_evaluated,
            was_published=lambda policy: policy.version <= self._ledger.last_version,
        )
        self._server = AioServer(
            config.learner.listen,
            config.rpc,
            services=[parameter_service.SERVICE_NAME, run_service.SERVICE_NAME],
            register=[parameters.register, partial(run_pb2_grpc.add_RunServiceServicer_to_server, run)],
            security=config.security,
        )
        self._metrics_server: MetricsServer = serve_metrics(
            prometheus, config.learner.endpoint_metrics_listen, "endpoint", self._health
        )
        cleanup.callback(self._metrics_server.close)
        self._clock = ActivityClock(self._metrics.activity_seconds, ACTIVITIES, "waiting")

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answer, and do what the training process says, until it says to end or is gone."""
        await self._server.start()
        self._send(
            "started",
            port=self._server.port,
            metrics_port=self._metrics_server.port,
            last_version=self._ledger.last_version,
        )
        log = get_logger()
        log.info("endpoint_started", port=self._server.port, metrics_port=self._metrics_server.port)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._obey(reader)),
            asyncio.create_task(self._serve_pending()),
            asyncio.create_task(self._turn()),
        ]
        reason, seconds = "the endpoint failed", ORPHAN_DRAIN_SECONDS
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.result():
                    reason, seconds = "the learner is stopping", self._config.rpc.drain_seconds + 1
                else:
                    reason = "the learner died"
        finally:
            self._health.set_unready(reason)
            self._publication.end(reason)
            await self._server.set_serving(False)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.stop(), seconds)
            log.info("endpoint_ended", reason=reason)

    async def _turn(self) -> None:
        """Tell, each second, that this event loop turns."""
        while True:
            self._health.turn()
            await asyncio.sleep(TURN_SECONDS)

    async def _obey(self, reader: asyncio.StreamReader) -> bool:
        """Do what the training process says; whether it said to end (otherwise it is gone)."""
        while (message := await read_message(reader)) is not None:
            match message.kind:
                case "publish":
                    with self._clock.during("taking_snapshot"):
                        await self._take_snapshot(message)
                case "record":
                    with self._clock.during("recording"):
                        await self._record([(message.fields["kind"], message.fields["fields"])])
                case "finish":
                    async with self._pending_changed:
                        await self._pending_changed.wait_for(lambda: self._pending is None)
                    self._publication.finish()
                    get_logger().info("run_finished")
                case "fail":
                    await self._server.set_serving(False)
                    self._health.set_unready(message.fields["reason"])
                    self._publication.end(message.fields["reason"])
                    get_logger().info("learner_failed")  # which says why itself, once
                case "close":
                    return True
        return False

    async def _take_snapshot(self, message: Message) -> None:
        """Copy a snapshot out of the shared memory, and give the slot back before anything slow is done."""
        slot = message.fields["slot"]
        header = parameters_pb2.SnapshotHeader.FromString(message.body)
        self._memory.attach(message.fields["slot_bytes"])

        def copy() -> ServedSnapshot:
            with self._memory.view(slot, header.payload_bytes) as payload:
                return ServedSnapshot.copy(header, payload, self._config.learner.chunk_bytes)

        snapshot = await asyncio.get_running_loop().run_in_executor(self._copies, copy)
        self._send("taken", slot=slot)
        async with self._pending_changed:
            if self._pending is not None and self._pending.identity.version != self._serving_version:
                self._metrics.skipped_snapshots.inc()
            self._pending = snapshot
            self._pending_changed.notify_all()

    async def _serve_pending(self) -> None:
        """Make the version of each snapshot durable, then serve it; of several that wait, the newest."""
        while True:
            async with self._pending_changed:
                await self._pending_changed.wait_for(lambda: self._pending is not None)
                snapshot = self._pending
                if snapshot is None:
                    continue
                self._serving_version = snapshot.identity.version
            with self._metrics.durable_seconds.time():
                await asyncio.get_running_loop().run_in_executor(
                    self._disk,
                    self._ledger.write_version,
                    snapshot.identity.incarnation,
                    snapshot.identity.version,
                )
            header = snapshot.header
            self._registry.published(header.environment_step_count)
            self._metrics.published(snapshot.identity, header.learner_step, seconds_of(header.published_at))
            first = self._publication.newest is None
            self._publication.serve(snapshot)
            if first and self._publication.is_serving:
                await self._server.set_serving(True)
                self._health.set_ready()
            async with self._pending_changed:
                if self._pending is snapshot:
                    self._pending = None
                self._pending_changed.notify_all()

    def _keep(self, members: Members) -> Awaitable[None]:
        return asyncio.get_running_loop().run_in_executor(self._disk, self._ledger.write_members, members)

    def _record(self, records: Records) -> Awaitable[None]:
        def write() -> None:
            for kind, fields in records:
                self._recorder.write(kind, fields)

        return asyncio.get_running_loop().run_in_executor(self._records, write)

    def _recall(self) -> None:
        """Know what was recorded before, so that a report that is repeated after a restart is recorded once."""
        for record in self._recorder.recall():
            with contextlib.suppress(KeyError, TypeError, ValueError):
                if record["kind"] == "episode":
                    self._registry.recall_report(
                        record["collector_index"], record["collector_incarnation"], record["sequence"]
                    )
                elif record["kind"] == "evaluation":
                    self._registry.begin_evaluation(PolicyIdentity(record["incarnation"], record["version"]))

    def _tell_evaluated(self, policy: PolicyIdentity) -> None:
        self._send("evaluated", incarnation=policy.incarnation, version=policy.version)

    def _send(self, kind: str, **fields: Any) -> None:
        self._writer.write(Message(kind, fields).encode())


async def _run(connection: socket.socket, memory: SnapshotMemory) -> int:
    reader, writer = await asyncio.open_connection(sock=connection)
    start = await read_message(reader)
    if start is None:
        return 0
    configure_logging("endpoint", run_id=start.fields["config"]["run"]["id"])
    adopt_epoch(start.fields["epoch_ns"])  # ages count from when the training process published
    try:
        with contextlib.ExitStack() as cleanup:
            process = EndpointProcess(start, writer, memory, cleanup)
            await process.serve(reader)
        return 0
    except PacelineError as error:
        failure: Mapping[str, str] = {"error": type(error).__name__, "message": str(error)}
    except Exception as error:
        get_logger().error("endpoint_failed", exc_info=error)
        failure = {
            "error": UnavailableError.__name__,
            "message": f"the endpoint process failed: {type(error).__name__}: {error}; its log says more",
        }
    writer.write(Message("failed", dict(failure)).encode())
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    return 1


def main(arguments: list[str]) -> int:
    """Serve; the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)  # one that is stopped cannot see the end of its socket
    tune_allocator()
    connection, memory = (int(argument) for argument in arguments)
    return asyncio.run(_run(socket.socket(fileno=connection), SnapshotMemory(memory)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
