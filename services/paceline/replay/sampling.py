"""Sample streams: what each owes, and the messages that pay it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from paceline.lag.bound import LearnerVersion
from paceline.replay.streams import Requests, Stream
from paceline.replay.table import Table
from paceline.rpc.bulk import NO_ARRAYS, SAMPLE_RESPONSE, Arrays, Bulk
from paceline.tables.memory import Drawn
from paceline.telemetry import ActivityClock
from paceline.v1 import replay_pb2 as pb

MESSAGE_BYTES = 2 << 20
"""Rows in one answer: large batches are cut, small ones share a message.

A bare stream is at its best at 1 MiB, but here each message costs a draw and its bookkeeping too: 2 MiB carry a fifth
more rows a second, 4 MiB no more than that.
"""
DETAIL_BYTES = 24
"""Of each row, beside itself: what an answer says of it at most."""


def message_rows_of(row_bytes: int, max_message_bytes: int) -> int:
    """Rows that one answer has at most, so that no peer need refuse it."""
    return max(1, min(MESSAGE_BYTES // row_bytes, max_message_bytes // 2 // (row_bytes + DETAIL_BYTES)))


class Credit:
    """Batches that a stream owes, and the newest policy version that its caller knows of.

    Requests are read ahead, so that one that comes early is a prefetch.
    """

    def __init__(
        self,
        stream: Stream,
        requests: Iterator[bytes],
        parse: Callable[[bytes], pb.SampleRequest],
        first: pb.SampleRequest,
    ) -> None:
        """`parse` gives a later request, checked against the first one."""
        self.policy_version = LearnerVersion(
            first.policy_version, incarnation=first.learner_incarnation, base_version=first.base_version
        )
        self._stream, self._parse = stream, parse
        self._owed = first.batch_count
        self._requests = Requests(stream, requests, self._take_in, on_change=stream.wake)

    @property
    def owed(self) -> int:
        """Batches owed now."""
        return self._owed

    def wait(self) -> int:
        """Batches owed, as soon as there is one; 0 when the client asks for no more.

        Ends with the call, whose deadline is the client's.

        Raises:
            PacelineError: the service stops, the caller went away, or a request was malformed.
        """
        with self._stream.changed:
            while True:
                self._requests.require_going()
                if self._owed or self._requests.closed:
                    return self._owed
                self._stream.changed.wait()

    def take(self, batches: int) -> None:
        """So many are no longer owed."""
        with self._stream.changed:
            self._owed -= batches

    def _take_in(self, data: bytes) -> None:
        request = self._parse(data)
        with self._stream.changed:
            self._owed += request.batch_count
            self.policy_version = self.policy_version.raised_to(request.policy_version)


def sample_messages(
    table: Table, first: pb.SampleRequest, credit: Credit, stream: Stream, clock: ActivityClock, message_rows: int
) -> Iterator[bytes]:
    """The messages that a Sample stream owes, serialised, until the client asks for no more.

    Each has `message_rows` rows at most.
    """
    batch_size = first.batch_size
    random = np.random.default_rng(first.seed if first.HasField("seed") else None)
    granted = 0  # rows that the limiter has let pass and that are not sampled yet
    rest = b""  # of the last message: that of the next one is as long as a rule
    try:
        while True:
            if granted < message_rows:
                clock.switch("credit")
                owed = credit.wait() if granted == 0 else credit.owed
                if owed == 0 and granted == 0:
                    return
                clock.switch("limiter")
                # What is granted never waits for more: only the first batch of a message may wait.
                wanted = min(owed, -(-(message_rows - granted) // batch_size))
                batches = table.draws.grant(batch_size, wanted, stream.why_ended, wait=granted == 0) if wanted else 0
                credit.take(batches)
                granted += batches * batch_size
            clock.switch("gather")
            row_count = min(granted, message_rows)
            draft = SAMPLE_RESPONSE.draft(row_count * table.spec.row_bytes, len(rest))
            rows = draft.payload.reshape(row_count, table.spec.row_bytes)
            drawn = table.draws.draw(
                random,
                rows,
                stream.why_ended,
                spec=table.spec,
                policy_version=credit.policy_version,
                details=first.row_details,
            )
            granted -= row_count
            head = pb.SampleResponse(
                row_count=row_count,
                table_row_count=table.memory.row_count,
                inserted_row_count=table.inserted,
                row_spec_digest=table.spec.digest,
            )
            arrays = _arrays(drawn) if drawn is not None and first.row_details else NO_ARRAYS
            rest = SAMPLE_RESPONSE.serialize(Bulk(head, arrays=arrays))
            clock.switch("send")
            yield draft.finish(rest)
    finally:
        table.draws.give_back(granted)


def _arrays(drawn: Drawn) -> Arrays:
    return {
        "keys": drawn.keys,
        "probabilities": drawn.probabilities,
        "times_sampled": drawn.times_sampled,
        "stored_at": drawn.stored_at,
    }
