"""A relay's way to what it polls: asks for newer snapshots, verifies them, hands them over."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.duration_pb2 import Duration

from paceline.config import RpcConfig
from paceline.errors import InvalidInputError, PacelineError, SnapshotError
from paceline.identity import PROTOCOL_VERSION, PolicyIdentity, is_newer, require_same_run
from paceline.process import StopSignal, own_time
from paceline.relay.reports import PendingReports
from paceline.rpc.client import Backoff
from paceline.rpc.polls import SnapshotPolls
from paceline.rpc.wire import identity_from_wire, identity_to_wire, snapshot_header_from_wire
from paceline.serving.publication import ServedSnapshot, pack_chunk
from paceline.telemetry import get_logger
from paceline.v1 import parameters_pb2 as pb
from paceline.v1 import times_pb2

MAX_POLL_SHARE = 1 / 6
"""Of `learner.silence_seconds`. A collector whose poll is held here is heard each third of the silence; that the news
of it waits for so long on each of up to four relays leaves it within the silence."""


@dataclass(frozen=True)
class RoundTrip:
    """A poll's times: sent and received by this process's clock, the others as the answer tells them."""

    sent: float
    times: times_pb2.AnswerTimes
    received: float


@dataclass(frozen=True)
class Events:
    """What a poll brings, told on the polling thread, in order."""

    answered: Callable[[PolicyIdentity | None, RoundTrip | None], None]
    """Upstream answered and told of that snapshot; before anything else of an answer."""
    fetched: Callable[[ServedSnapshot, float, float], None]
    """A verified snapshot, newer than all before, whose header says where the run stands; when it was published, by
    the learner's clock; seconds to fetch it."""
    run_state: Callable[[pb.RunState], None]
    """Where the run stands, from an answer that brought no snapshot."""
    received: Callable[[int], None]
    """So many bytes of a snapshot came."""
    counted: Callable[[str], None]
    """What came of the poll: one of `metrics.UPSTREAM_RESULTS`."""


class Upstream:
    """Polls `ParameterService` on a thread of its own, with the reports of the collectors below.

    Whatever goes wrong, nothing is handed over that was not verified, and nothing older than what was. What no repeat
    would mend (another run or protocol version) ends the thread, with `failure`.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        events: Events,
        reports: PendingReports,
        *,
        run_id: str,
        rpc: RpcConfig,
        poll_seconds: float,
        clock: Callable[[], float] = own_time,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Poll what `channel` leads to.

        Args:
            poll_seconds: how long a poll may be held there; reports wait for so long at most.
            clock: this process's, in seconds since 1970.
            on_failure: called on the polling thread when it ended with a `failure`.
        """
        self._polls = SnapshotPolls(channel, rpc, peer="the relay's upstream", poll_seconds=poll_seconds)
        self._events, self._reports, self._run_id = events, reports, run_id
        self._poll_seconds, self._clock, self._on_failure = poll_seconds, clock, on_failure
        self._backoff, self._log = Backoff(rpc), get_logger()
        self._closing = StopSignal()
        self._held: PolicyIdentity | None = None
        self._outage = self._is_older = False
        self._thread = threading.Thread(target=self._run, name="upstream", daemon=True)
        self.failure: PacelineError | None = None

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def close(self) -> None:
        """End the poll in progress, and the thread."""
        self._closing.set()
        self._polls.close()
        if self._thread.is_alive():
            self._thread.join(self._polls.longest_wait_seconds)

    def _run(self) -> None:
        with self._polls:
            self._keep_polling()

    def _keep_polling(self) -> None:
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                fetched = self._poll()
            except PacelineError as error:
                if self._closing.is_set():
                    return
                damaged = isinstance(error, SnapshotError)
                self._events.counted("damaged" if damaged else "failed")
                if not damaged and isinstance(error, InvalidInputError):
                    self._fail(error)
                    return
                self._note_outage(error)
                self._closing.wait(self._backoff.next_seconds(error))
                continue
            except Exception as error:
                # The one boundary of this thread: its end must end the process, not freeze what it serves unnoticed.
                self._log.error("upstream_failed", exc_info=error)
                self._fail(PacelineError(f"the relay's poller failed: {type(error).__name__}: {error}"))
                return
            self._note_success()
            if not fetched:
                # Answered early without news, as when the run is finished: ask again when the wait would have ended.
                self._closing.wait(self._poll_seconds - (time.monotonic() - began))

    def _poll(self) -> bool:
        """Ask once; whether a snapshot was handed over."""
        wait = Duration()
        wait.FromNanoseconds(round(self._poll_seconds * 1e9))
        reports = self._reports.take()
        request = pb.GetSnapshotRequest(
            run_id=self._run_id, protocol_version=PROTOCOL_VERSION, wait=wait, below=reports
        )
        if self._held is not None:
            request.have.CopyFrom(identity_to_wire(self._held))
        sent = self._clock()
        try:
            with self._polls.ask(request) as messages:
                first = next(messages, None)
                reports = []
                return self._read(first, messages, sent)
        finally:
            self._reports.give_back(reports)

    def _read(self, first: pb.GetSnapshotResponse | None, rest: Iterable[pb.GetSnapshotResponse], sent: float) -> bool:
        received = self._clock()
        if first is None:
            raise SnapshotError("upstream ended its answer before it began: expected a header or not_modified")
        trip = None
        if first.times.HasField("received_at") and first.times.HasField("answered_at"):
            trip = RoundTrip(sent, first.times, received)
        if first.WhichOneof("part") == "not_modified":
            newest = None
            if first.not_modified.HasField("newest"):
                newest = identity_from_wire(first.not_modified.newest)
            self._events.answered(newest, trip)
            if newest is not None and self._goes_back(newest):
                self._events.counted("older")
                return False
            self._events.counted("not_modified")
            self._events.run_state(first.not_modified.run_state)
            return False
        began = time.perf_counter()
        header = snapshot_header_from_wire(first.header)
        require_same_run(self._run_id, header.run_id)
        self._events.answered(header.identity, trip)
        if self._goes_back(header.identity) or not is_newer(header.identity, self._held):
            self._events.counted("older")
            return False
        snapshot = self._receive(first.header, rest)
        self._held = header.identity
        self._events.counted("snapshot")
        self._events.fetched(snapshot, header.published_at, time.perf_counter() - began)
        return True

    def _receive(self, header: pb.SnapshotHeader, rest: Iterable[pb.GetSnapshotResponse]) -> ServedSnapshot:
        """The whole snapshot, verified. Raises SnapshotError when it is not what its header says."""
        name = f"snapshot {header.identity.incarnation}.{header.identity.version}"
        digest, size = hashlib.sha256(), 0
        chunks: list[bytes] = []
        for part in rest:
            size += len(part.chunk)
            self._events.received(len(part.chunk))
            if size > header.payload_bytes or len(chunks) == header.chunk_count:
                raise SnapshotError(
                    f"{name} goes on after the {header.payload_bytes} bytes and {header.chunk_count} chunks of its "
                    "header; it is fetched again"
                )
            digest.update(part.chunk)
            chunks.append(pack_chunk(part.chunk))
        if size != header.payload_bytes:
            raise SnapshotError(f"{name} has {size} bytes: expected {header.payload_bytes}; it is fetched again")
        if digest.digest() != header.payload_sha256:
            raise SnapshotError(
                f"{name} has SHA-256 {digest.hexdigest()}: expected {header.payload_sha256.hex()}; its bytes were "
                "damaged on the way, it is fetched again"
            )
        return ServedSnapshot.of(header, tuple(chunks))

    def _goes_back(self, newest: PolicyIdentity) -> bool:
        """Whether upstream is behind this relay; what it says of the run is out of date, too."""
        older = self._held is not None and newest < self._held
        if older and not self._is_older:
            self._log.warning("upstream_is_behind", upstream=str(newest), serving=str(self._held))
        self._is_older = older
        return older

    def _note_outage(self, error: PacelineError) -> None:
        if not self._outage:
            self._outage = True
            self._log.warning("upstream_polls_failing", reason=str(error), serving=str(self._held))

    def _note_success(self) -> None:
        self._backoff.reset()
        if self._outage:
            self._outage = False
            self._log.info("upstream_polls_recovered", serving=str(self._held))

    def _fail(self, error: PacelineError) -> None:
        self.failure = error
        self._on_failure()
