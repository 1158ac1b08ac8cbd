"""ParameterService: conditional, chunked, long-polled snapshots."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio

from paceline.errors import InvalidInputError, PacelineError, ProtocolMismatchError, UnavailableError
from paceline.identity import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, PolicyIdentity, is_newer, require_same_run
from paceline.lag.clock import ClockOffset
from paceline.process import own_time
from paceline.rpc.wire import identity_from_wire, timestamp
from paceline.serving.metrics import PollMetrics
from paceline.serving.publication import Publication, ServedSnapshot
from paceline.v1 import parameters_pb2 as pb
from paceline.v1 import times_pb2

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ParameterService"].full_name
MAX_WAIT_SECONDS = 60.0
MAX_REPORTS = 4_096
"""In one request; the most that `collector.max_count` may be."""
_ANSWER_SECONDS = 0.5
"""A waiting poll is answered so long before the caller's deadline, or a quarter of what is left, if that is less."""


def require_protocol(theirs: int) -> None:
    """Raise ProtocolMismatchError unless the caller speaks this protocol, or that of the release before."""
    if not OLDEST_PROTOCOL_VERSION <= theirs <= PROTOCOL_VERSION:
        oldest = "" if OLDEST_PROTOCOL_VERSION == PROTOCOL_VERSION else f"{OLDEST_PROTOCOL_VERSION} or "
        raise ProtocolMismatchError(
            f"the caller speaks protocol version {theirs}: expected {oldest}{PROTOCOL_VERSION}; run the same release "
            "of Paceline on both sides, or the next one on this side first"
        )


class ReplicaReports(Protocol):
    """Where it goes what polls tell of collectors. Both raise InvalidInputError when a report is malformed."""

    def hear(self, reports: Sequence[pb.ReplicaReport]) -> None:
        """These collectors act with that, as a poll that has just come says."""

    def hear_again(self, report: pb.ReplicaReport) -> None:
        """The collector whose poll is held still lives."""


OWN_CLOCK = ClockOffset(0.0, 0.0)


class ParameterService:
    """Wire in, publication out. Answers are bytes that were serialised once, whoever asks for them; only their times,
    which say when this one was made, are put behind the first message."""

    def __init__(
        self,
        run_id: str,
        publication: Publication,
        reports: ReplicaReports,
        metrics: PollMetrics,
        *,
        silence_seconds: float,
        clock: Callable[[], float] = own_time,
        clock_offset: Callable[[], ClockOffset | None] = lambda: OWN_CLOCK,
    ) -> None:
        """Serve what is published.

        Args:
            silence_seconds: a collector whose poll is held is heard more often than that.
            clock: this process's, in seconds since 1970.
            clock_offset: the learner's clock minus that one; None while unknown: then answers tell no times.
        """
        self._clock, self._clock_offset = clock, clock_offset
        self._run_id, self._publication, self._reports, self._metrics = run_id, publication, reports, metrics
        self._sign_of_life_seconds = silence_seconds / 3

    def register(self, server: Any) -> None:
        """Add the service to a server. Its messages are plain protobuf, only made elsewhere."""
        handler = grpc.unary_stream_rpc_method_handler(
            self.GetSnapshot, request_deserializer=pb.GetSnapshotRequest.FromString, response_serializer=None
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"GetSnapshot": handler}),))

    async def GetSnapshot(
        self, request: pb.GetSnapshotRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Give the newest snapshot if the caller may want it, or say that there is none.

        A finished run is said at once, also to those who would wait.
        """
        received_at = self._clock()
        # The caller may go away at any await, or while it is sent a chunk.
        result = "cancelled"
        try:
            snapshot = await self._wait(request, context)
            if snapshot is None:
                answer = self._publication.not_modified()
                result = "not_modified"
                yield answer + self._times(received_at)
                return
            yield snapshot.header_message(self._publication.run_state) + self._times(received_at)
            with self._metrics.sending_polls.track_inprogress():
                heard_at = self._clock()
                for chunk in snapshot.chunks:
                    yield chunk
                    self._metrics.sent_bytes.inc(len(chunk))
                    # Who takes chunks is there, however long all of them take.
                    if abs(self._clock() - heard_at) >= self._sign_of_life_seconds:
                        heard_at = self._clock()
                        for report in _reports_of(request):
                            self._reports.hear_again(report)
            result = "snapshot"
        except UnavailableError:
            result = "unavailable"
            raise
        except PacelineError:
            result = "refused"
            raise
        finally:
            self._metrics.count_poll(result)

    def _times(self, received_at: float) -> bytes:
        """The times of an answer that is sent now. Messages of protobuf may be put together as bytes."""
        offset = self._clock_offset()
        if offset is None:
            return b""
        # Both by one offset: a caller takes their difference for the time that its call was held.
        times = times_pb2.AnswerTimes(
            received_at=timestamp(offset.to_peer(received_at)), answered_at=timestamp(offset.to_peer(self._clock()))
        )
        if offset.uncertainty_seconds > 0:
            times.uncertainty.FromNanoseconds(math.ceil(offset.uncertainty_seconds * 1e9))
        return pb.GetSnapshotResponse(times=times).SerializeToString()

    async def _wait(self, request: pb.GetSnapshotRequest, context: grpc.aio.ServicerContext) -> ServedSnapshot | None:
        """The snapshot to send; None when there is nothing newer."""
        require_same_run(self._run_id, request.run_id)
        require_protocol(request.protocol_version)
        have = identity_from_wire(request.have) if request.HasField("have") else None
        if len(request.below) > MAX_REPORTS:
            raise InvalidInputError(
                f"a poll carries the reports of {len(request.below)} collectors: expected at most {MAX_REPORTS}"
            )
        self._reports.hear(_reports_of(request))
        ready = self._ready(have, request.at_least_version)
        seconds = _wait_seconds(request, context)
        if ready is not None or seconds <= 0:
            return ready
        with self._metrics.waiting_polls.track_inprogress():
            loop = asyncio.get_running_loop()
            deadline = loop.time() + seconds
            while (
                ready is None
                and self._publication.run_state != pb.RUN_STATE_FINISHED
                and (left := deadline - loop.time()) > 0
            ):
                await self._publication.wait_for_change(min(left, self._sign_of_life_seconds))
                if request.HasField("replica"):
                    self._reports.hear_again(request.replica)
                ready = self._ready(have, request.at_least_version)
        return ready

    def _ready(self, have: PolicyIdentity | None, at_least_version: int) -> ServedSnapshot | None:
        self._publication.require_serving()
        newest = self._publication.newest
        if newest is None or newest.identity.version < at_least_version or not is_newer(newest.identity, have):
            return None
        return newest


def _reports_of(request: pb.GetSnapshotRequest) -> list[pb.ReplicaReport]:
    """Of who polls, and of those below a relay."""
    return [*([request.replica] if request.HasField("replica") else []), *request.below]


def _wait_seconds(request: pb.GetSnapshotRequest, context: grpc.aio.ServicerContext) -> float:
    wait = min(request.wait.seconds + request.wait.nanos * 1e-9, MAX_WAIT_SECONDS)
    if wait <= 0:
        return 0.0
    left = context.time_remaining()
    return wait if left is None else min(wait, left - min(_ANSWER_SECONDS, left / 4))
