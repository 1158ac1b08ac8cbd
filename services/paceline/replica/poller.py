"""Keeps a replica near the learner: asks for newer snapshots, verifies them, lays them ready for the acting thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
from google.protobuf.duration_pb2 import Duration

from paceline.config import RpcConfig
from paceline.errors import (
    ActorSemanticsError,
    InvalidInputError,
    PacelineError,
    SnapshotError,
)
from paceline.identity import PROTOCOL_VERSION, PolicyIdentity, is_newer, require_same_run
from paceline.process import StopSignal
from paceline.replica.clock import LearnerClock
from paceline.replica.metrics import ReplicaMetrics
from paceline.replica.staging import NewestStaging, Staging
from paceline.replica.standing import Standing, Standings
from paceline.rpc.client import Backoff
from paceline.rpc.polls import SnapshotPolls
from paceline.rpc.wire import identity_from_wire, identity_to_wire, snapshot_header_from_wire
from paceline.snapshot import SnapshotHeader, StagedActor
from paceline.telemetry import get_logger
from paceline.v1 import parameters_pb2

_TRIES_AFTER_FINISH = 5
"""Polls of a finished run that may fail before the learner counts as gone."""

_STOP_CHECK_SECONDS = 0.2
"""How late a wait may notice the stop signal, which wakes nobody."""


@dataclass(frozen=True)
class ReplicaOwner:
    """The collector whose lag the learner watches, from RunService.Join."""

    collector_index: int
    collector_incarnation: int


class SnapshotPoller:
    """Polls ParameterService on a thread of its own; the acting thread calls `apply_if_ready` between two steps.

    Weights and version change together, whole or not at all, and only forwards. Whatever goes wrong on the way, the
    last good snapshot acts on; what no repeat would mend (another run, protocol version or actor) is raised to the
    acting thread.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        staged: StagedActor,
        *,
        run_id: str,
        rpc: RpcConfig,
        poll_seconds: float,
        metrics: ReplicaMetrics,
        owner: ReplicaOwner | None = None,
        every_versions: int = 1,
        clock: LearnerClock | None = None,
        standings: Standings | None = None,
        staging: Staging | None = None,
    ) -> None:
        """Poll for snapshots of `staged`.

        Args:
            poll_seconds: how long the learner may hold a poll until there is something newer.
            owner: None for a replica that is not a collector's.
            every_versions: ask for each n-th version only; the last one of a finished run comes in any case.
            clock: what the polls tell of the learner's clock goes there.
            standings: what is known and applied goes there.
            staging: where snapshots lie until they are applied; None: the newest does, in `staged`.
        """
        self._polls = SnapshotPolls(channel, rpc, peer="the learner's parameter service", poll_seconds=poll_seconds)
        self._staged, self._run_id, self._metrics, self._owner = staged, run_id, metrics, owner
        self._standings = standings or Standings()
        self._staging: Staging = staging or NewestStaging(staged)
        self._poll_seconds, self._every = poll_seconds, every_versions
        self._backoff, self._log = Backoff(rpc), get_logger()
        self._closing = StopSignal()
        self._changed = threading.Condition()
        self._failure: PacelineError | None = None
        self._held: PolicyIdentity | None = None
        self._finished = self._outage = False
        self._failures_since_finished = 0
        self._thread = threading.Thread(target=self._run, name="snapshot-poller", daemon=True)
        self.clock = clock or LearnerClock()
        """The learner's, as the polls tell it."""
        self.applied_at = 0.0
        """When what acts was applied, by the learner's clock; 0: not known."""
        self.paused = False
        """Set by the acting thread, for the learner to know: it waits for a newer snapshot."""

    @property
    def known(self) -> PolicyIdentity | None:
        """The newest snapshot that the learner told of."""
        return self._standings.known

    @property
    def applied(self) -> SnapshotHeader | None:
        """The snapshot that acts; changes in `apply_if_ready` only."""
        return self._standings.applied

    @property
    def standing(self) -> Standing | None:
        """How far what acts is behind what is known; None: nothing acts yet."""
        return self._standings.now

    @property
    def finished(self) -> bool:
        """Whether the learner said that the run reached its end."""
        return self._finished

    def is_ready(self, environment_steps: int = 0) -> bool:
        """Whether there is something for `apply_if_ready`: a snapshot or a failure."""
        return self._failure is not None or self._staging.is_ready(environment_steps)

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def close(self) -> None:
        """End the poll in progress, and the thread."""
        self._closing.set()
        self._polls.close()
        if self._thread.is_alive():
            self._thread.join(self._polls.longest_wait_seconds)

    def apply_if_ready(self, environment_steps: int = 0) -> bool:
        """Bring what is laid ready into the live actor; whether there was something. Never waits.

        Args:
            environment_steps: that the caller has taken; a lag that is injected may follow them.

        Raises:
            RunMismatchError, ProtocolMismatchError, ActorSemanticsError: no snapshot will ever fit.
        """
        if self._failure is not None:
            raise self._failure
        if not self._staging.is_ready(environment_steps):
            return False
        began = time.perf_counter()
        header = self._staging.apply()
        if header is None:
            return False
        self.applied_at = self.clock.stamp()
        self._standings.note_applied(header)
        self._metrics.apply_seconds.observe(time.perf_counter() - began)
        self._metrics.set_applied_version(header.identity.version)
        return True

    def wait_and_apply(self, stop: StopSignal) -> bool:
        """Wait for a snapshot that does not act yet, and apply it; False when the run ended or the stop came first.

        As long as the learner is away only the stop ends it; the thread's log line says why. Raises as
        `apply_if_ready` does.
        """
        while not stop.is_set():
            ended = not self._thread.is_alive()
            if self.apply_if_ready():
                return True
            if ended:
                return False
            self.wait_until_ready(_STOP_CHECK_SECONDS)
        return False

    def wait_until_ready(self, seconds: float, environment_steps: int = 0) -> None:
        """Wait until something is ready, or for so long."""
        with self._changed:
            if not self.is_ready(environment_steps):
                self._changed.wait(seconds)

    def _run(self) -> None:
        with self._polls:
            self._keep_polling()

    def _keep_polling(self) -> None:
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                changed = self._poll()
            except PacelineError as error:
                if self._closing.is_set():
                    return
                if isinstance(error, ActorSemanticsError) or (
                    isinstance(error, InvalidInputError) and not isinstance(error, SnapshotError)
                ):
                    self._fail(error)
                    return
                self._note_outage(error)
                self._failures_since_finished += self._finished
                if self._failures_since_finished > _TRIES_AFTER_FINISH:
                    return  # the learner ended with the run
                self._closing.wait(self._backoff.next_seconds(error))
                continue
            except Exception as error:
                # The one boundary of this thread: its end must end the process, not freeze the policy unnoticed.
                self._log.error("snapshot_poller_failed", exc_info=error)
                self._fail(PacelineError(f"the snapshot poller failed: {type(error).__name__}: {error}"))
                return
            self._note_success()
            if self._finished and not changed:
                with self._changed:
                    self._changed.notify_all()
                return
            if not changed and time.monotonic() - began < self._poll_seconds / 2:
                # Answered early without news: never ask in a tight loop.
                self._closing.wait(self._backoff.next_seconds())

    def _poll(self) -> bool:
        """Ask once; whether a newer snapshot was laid ready, or the end of the run became known."""
        wait = Duration()
        wait.FromNanoseconds(0 if self._finished else round(self._poll_seconds * 1e9))
        request = parameters_pb2.GetSnapshotRequest(
            run_id=self._run_id,
            protocol_version=PROTOCOL_VERSION,
            wait=wait,
            at_least_version=self._next_wanted(),
        )
        if self._held is not None:
            request.have.CopyFrom(identity_to_wire(self._held))
        if self._owner is not None:
            request.replica.collector_index = self._owner.collector_index
            request.replica.collector_incarnation = self._owner.collector_incarnation
            request.replica.paused = self.paused
            if self.applied is not None:
                request.replica.applied.CopyFrom(identity_to_wire(self.applied.identity))
        sent = self.clock.own()
        with self._polls.ask(request) as messages:
            return self._read(messages, sent)

    def _read(self, messages: Iterator[parameters_pb2.GetSnapshotResponse], sent: float) -> bool:
        first = next(messages, None)
        received = self.clock.own()
        if first is None:
            raise SnapshotError("the learner ended its answer before it began: expected a header or not_modified")
        if first.times.HasField("received_at") and first.times.HasField("answered_at"):
            self.clock.note_poll(sent, first.times, received)
        if first.WhichOneof("part") == "not_modified":
            if first.not_modified.HasField("newest"):
                self._note_known(identity_from_wire(first.not_modified.newest), None)
            return self._note_state(first.not_modified.run_state)
        try:
            return self._take(first.header, messages)
        except (PacelineError, grpc.RpcError):
            if not self._closing.is_set():
                self._metrics.apply_failures.inc()
            raise

    def _take(self, message: parameters_pb2.SnapshotHeader, rest: Iterator[parameters_pb2.GetSnapshotResponse]) -> bool:
        """Receive, verify and stage one snapshot; whether anything changed."""
        header = snapshot_header_from_wire(message)
        require_same_run(self._run_id, header.run_id)
        self._note_known(header.identity, header.learner_step)
        # Before its bytes are received: what cannot fit is not worth a transfer.
        self._staged.require_fits(header)
        if is_newer(header.identity, self._held):
            began = time.perf_counter()
            payload = bytearray()
            for part in rest:
                payload += part.chunk
                if len(payload) > header.payload_bytes:
                    raise SnapshotError(
                        f"snapshot {header.identity} goes on after the {header.payload_bytes} bytes of its header"
                    )
            received = time.perf_counter()
            self._staging.lay(header, payload)
            self._metrics.fetch_seconds.observe(received - began)
            self._metrics.stage_seconds.observe(time.perf_counter() - received)
            with self._changed:
                self._held = header.identity
                self._changed.notify_all()
            self._note_state(message.run_state)
            return True
        return self._note_state(message.run_state)

    def _next_wanted(self) -> int:
        """The lowest version worth sending; 0: any."""
        if self._every == 1 or self._finished:
            return 0
        return ((0 if self._held is None else self._held.version) // self._every + 1) * self._every

    def _note_known(self, identity: PolicyIdentity, learner_step: int | None) -> None:
        if self._standings.note_known(identity, learner_step, self.clock.own()):
            self._metrics.set_known_version(identity.version)

    def _note_state(self, run_state: parameters_pb2.RunState) -> bool:
        """Whether the end of the run became known now."""
        if run_state != parameters_pb2.RUN_STATE_FINISHED or self._finished:
            return False
        self._finished = True
        self._log.info("run_finished", known=str(self.known))
        return True

    def _note_outage(self, error: PacelineError) -> None:
        self._metrics.poll_failures.inc()
        if not self._outage:
            self._outage = True
            self._log.warning("snapshot_polls_failing", reason=str(error), acting_with=str(self._held))

    def _note_success(self) -> None:
        self._backoff.reset()
        if self._outage:
            self._outage = False
            self._log.info("snapshot_polls_recovered", known=str(self.known))

    def _fail(self, error: PacelineError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
