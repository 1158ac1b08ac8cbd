"""The relay's entry: polls upstream, serves what it has, and ends in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from threading import Lock

from prometheus_client import CollectorRegistry

from paceline.config import Config
from paceline.errors import ConfigError
from paceline.health import Health
from paceline.identity import PolicyIdentity
from paceline.lag.clock import ClockOffset, PeerClock
from paceline.process import StopSignal, own_time
from paceline.relay.metrics import RelayMetrics
from paceline.relay.reports import PendingReports
from paceline.relay.upstream import MAX_POLL_SHARE, Events, RoundTrip, Upstream
from paceline.rpc.client import open_channel
from paceline.rpc.server import AioServer
from paceline.rpc.tokens import READER
from paceline.rpc.wire import seconds_of
from paceline.serving import parameter_service
from paceline.serving.parameter_service import ParameterService
from paceline.serving.publication import Publication, ServedSnapshot
from paceline.telemetry import get_logger, serve_metrics
from paceline.v1 import parameters_pb2 as pb

TURN_SECONDS = 1.0
"""How often the event loop shows that it turns."""


def run(config: Config, *, stop: StopSignal, clock: Callable[[], float] = own_time) -> None:
    """Serve snapshots until the stop; a run that is finished may go on, so its end is no reason to end.

    Args:
        clock: this host's, in seconds since 1970.

    Raises:
        ConfigError: it would poll itself.
        PortTakenError: it cannot listen.
        RunMismatchError, ProtocolMismatchError: upstream belongs to another run, or speaks another protocol.
    """
    upstream = config.relay.upstream or config.learner.address
    if upstream == config.relay.listen:
        raise ConfigError(
            f"relay.listen is {config.relay.listen}, where the relay would also fetch snapshots: expected another "
            "address there, or in relay.upstream"
        )
    asyncio.run(_serve(config, stop, clock))


async def _serve(config: Config, stop: StopSignal, clock: Callable[[], float]) -> None:
    with ExitStack() as cleanup:
        await _Relay(config, clock, cleanup).serve(stop)


class _Relay:
    """What a relay knows. Made and used within the event loop; /metrics looks from a thread."""

    def __init__(self, config: Config, clock: Callable[[], float], cleanup: ExitStack) -> None:
        self._config, self._clock, self._log = config, clock, get_logger()
        silence = config.learner.silence_seconds
        self._learner_clock, self._clock_lock = PeerClock(), Lock()
        self._publication = Publication("the relay")
        self._reports = PendingReports(max_collectors=config.collector.max_count, silence_seconds=silence)
        registry = CollectorRegistry()
        self._metrics = RelayMetrics(
            registry,
            collector_count=lambda: self._reports.collector_count,
            clock_offset=self._clock_offset,
            clock=clock,
        )
        self._health = Health(config.run.stuck_seconds, unready="no snapshot is served yet")
        metrics_server = serve_metrics(registry, config.relay.metrics_listen, "relay", self._health)
        cleanup.callback(metrics_server.close)
        self._metrics_port = metrics_server.port
        self._channel = open_channel(
            config.relay.upstream or config.learner.address, config.rpc, config.security, READER
        )
        cleanup.callback(self._channel.close)
        service = ParameterService(
            config.run_id,
            self._publication,
            self._reports,
            self._metrics.polls,
            silence_seconds=silence,
            clock=clock,
            clock_offset=self._clock_offset,
        )
        self._server = AioServer(
            config.relay.listen,
            config.rpc,
            services=[parameter_service.SERVICE_NAME],
            register=[service.register],
            security=config.security,
        )

    async def serve(self, stop: StopSignal) -> None:
        """Poll and answer until the stop; raise what ended the polls for good."""
        config = self._config
        await self._server.start()
        self._log.info("relay_started", port=self._server.port, metrics_port=self._metrics_port)
        # Waited for on a thread: a signal wakes no event loop.
        stopped = asyncio.create_task(asyncio.to_thread(stop.wait))
        upstream = Upstream(
            self._channel,
            self._events(asyncio.get_running_loop()),
            self._reports,
            run_id=config.run_id,
            rpc=config.rpc,
            poll_seconds=min(config.relay.poll_seconds, config.learner.silence_seconds * MAX_POLL_SHARE),
            clock=self._clock,
            on_failure=stop.set,
        )
        upstream.start()
        try:
            while not stopped.done():
                self._health.turn()
                await asyncio.wait([stopped], timeout=TURN_SECONDS)
        finally:
            stop.set()  # or the thread that waits for it would never end
            self._health.set_unready("the relay is stopping")
            self._publication.end("the relay is stopping")
            await asyncio.to_thread(upstream.close)
            await self._server.stop()
            self._log.info("relay_ended", failed=upstream.failure is not None)
        if upstream.failure is not None:
            raise upstream.failure

    def _events(self, loop: asyncio.AbstractEventLoop) -> Events:
        """What the polling thread tells, as it is taken in on the event loop, in order."""

        def on_loop(take: Callable[..., None]) -> Callable[..., None]:
            return lambda *arguments: loop.call_soon_threadsafe(take, *arguments)  # type: ignore[return-value]

        return Events(
            answered=on_loop(self._answered),
            fetched=on_loop(self._fetched),
            run_state=on_loop(self._take_run_state),
            received=self._metrics.received_bytes.inc,
            counted=self._metrics.count_upstream,
        )

    def _answered(self, newest: PolicyIdentity | None, trip: RoundTrip | None) -> None:
        self._metrics.upstream_answered(newest)
        if trip is None:
            return
        received_there, answered = seconds_of(trip.times.received_at), seconds_of(trip.times.answered_at)
        with self._clock_lock:
            was_set = self._learner_clock.add(
                trip.sent,
                answered,
                trip.received,
                held_seconds=answered - received_there,
                peer_uncertainty_seconds=seconds_of(trip.times.uncertainty),
            )
        if was_set:
            self._log.warning("clock_was_set")

    def _fetched(self, snapshot: ServedSnapshot, published_at: float, seconds: float) -> None:
        first = self._publication.newest is None
        self._publication.serve(snapshot, snapshot.header.run_state or None)
        self._metrics.serves(snapshot.identity, published_at)
        self._metrics.fetch_seconds.observe(seconds)
        if first:
            self._health.set_ready()
            self._log.info("relay_serves", first=str(snapshot.identity))
            self._serving = asyncio.get_running_loop().create_task(self._server.set_serving(True))

    def _take_run_state(self, run_state: pb.RunState) -> None:
        if run_state != pb.RUN_STATE_UNSPECIFIED:
            self._publication.set_run_state(run_state)

    def _clock_offset(self) -> ClockOffset | None:
        """The learner's clock minus this process's."""
        with self._clock_lock:
            return self._learner_clock.offset(self._clock())
