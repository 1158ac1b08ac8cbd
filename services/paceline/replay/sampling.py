"""Sample streams: what each owes, and the messages that pay it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from paceline.errors import InvalidInputError
from paceline.lag.bound import LearnerVersion
from paceline.replay.streams import Requests, Stream
from paceline.replay.table import Table
from paceline.rows import ByteMatrix
from paceline.rpc.bulk import NO_ARRAYS, SAMPLE_RESPONSE, Arrays, Bulk, Draft
from paceline.rpc.shared_memory import Bytes
from paceline.tables.memory import Drawn
from paceline.telemetry import ActivityClock
from paceline.v1 import replay_pb2 as pb

MESSAGE_BYTES = 2 << 20
"""Rows in one answer: large batches are cut, small ones share a message.

A bare stream is at its best at 1 MiB, but here each message costs a draw and its bookkeeping too: 2 MiB carry a fifth
more rows a second, 4 MiB no more than that.
"""
MEMORY_BYTES = 4 << 20
"""Rows that one answer says of that they are in memory: a message without rows costs as much as any other. 2 MiB carry
a fifth fewer rows a second, 8 MiB as many as 4."""
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


class RowsInMessages:
    """Rows travel in the messages that say what they are."""

    def __init__(self, row_bytes: int, max_message_bytes: int) -> None:
        """`max_message_bytes`: what a client takes."""
        self.message_rows = message_rows_of(row_bytes, max_message_bytes)
        """Rows of one message at most."""
        self._row_bytes = row_bytes
        self._draft: Draft | None = None
        self._rest = b""
        """Of the last message: that of the next one is as long as a rule."""

    def begin(self, row_count: int) -> ByteMatrix:
        """Room for the rows of the next message, `[n, row_bytes]`: `row_count`, or fewer."""
        self._draft = SAMPLE_RESPONSE.draft(row_count * self._row_bytes, len(self._rest))
        return self._draft.payload.reshape(row_count, self._row_bytes)

    def finish(self, head: pb.SampleResponse, arrays: Arrays) -> bytes:
        """The message of the rows that the room has now."""
        if self._draft is None:
            raise RuntimeError("finish comes after begin")
        self._rest = SAMPLE_RESPONSE.serialize(Bulk(head, arrays=arrays))
        return self._draft.finish(self._rest)

    def close(self) -> None:
        """No further message comes."""
        self._draft = None


class RowsInMemory:
    """Rows are put into the client's memory; messages say where."""

    def __init__(self, memory: Bytes, row_bytes: int, batch_size: int, max_message_bytes: int) -> None:
        """Raises InvalidInputError if `memory` has no room for a batch. `max_message_bytes`: what a client takes."""
        self.message_rows = max(1, min(MEMORY_BYTES // row_bytes, max_message_bytes // 2 // DETAIL_BYTES))
        """Rows that one message speaks of at most."""
        batches = len(memory) // (batch_size * row_bytes)
        if not batches:
            raise InvalidInputError(
                f"the stream offers {len(memory)} bytes of memory: expected room for a batch or more, of {batch_size} "
                f"rows of {row_bytes} bytes"
            )
        self._rows: ByteMatrix = memory[: batches * batch_size * row_bytes].reshape(-1, row_bytes)
        self._begin = self._end = 0

    def begin(self, row_count: int) -> ByteMatrix:
        """Room for the rows of the next message, `[n, row_bytes]`: `row_count`, or fewer."""
        self._begin = self._end % len(self._rows)
        self._end = min(len(self._rows), self._begin + row_count)
        return self._rows[self._begin : self._end]

    def finish(self, head: pb.SampleResponse, arrays: Arrays) -> bytes:
        """The message of the rows that the room has now."""
        row_bytes = self._rows.shape[1]
        head.rows_in_memory.position = self._begin * row_bytes
        head.rows_in_memory.byte_count = (self._end - self._begin) * row_bytes
        return SAMPLE_RESPONSE.serialize(Bulk(head, arrays=arrays))

    def close(self) -> None:
        """No further message comes: let go of the memory."""
        self._rows = self._rows[:0].copy()


def sample_messages(
    table: Table,
    first: pb.SampleRequest,
    credit: Credit,
    stream: Stream,
    clock: ActivityClock,
    room: RowsInMessages | RowsInMemory,
) -> Iterator[bytes]:
    """The messages that a Sample stream owes, serialised, until the client asks for no more; rows go into `room`."""
    batch_size, message_rows = first.batch_size, room.message_rows
    random = np.random.default_rng(first.seed if first.HasField("seed") else None)
    rows: ByteMatrix | None = None
    granted = 0  # rows that the limiter has let pass and that are not sampled yet
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
            rows = room.begin(min(granted, message_rows))
            drawn = table.draws.draw(
                random,
                rows,
                stream.why_ended,
                spec=table.spec,
                policy_version=credit.policy_version,
                details=first.row_details,
            )
            granted -= len(rows)
            head = pb.SampleResponse(
                row_count=len(rows),
                table_row_count=table.memory.row_count,
                inserted_row_count=table.inserted,
                row_spec_digest=table.spec.digest,
            )
            message = room.finish(head, _arrays(drawn) if drawn is not None and first.row_details else NO_ARRAYS)
            clock.switch("send")
            yield message
    finally:
        # An error that ends the stream keeps this frame for a while, but not the client's memory.
        rows = None
        room.close()
        table.draws.give_back(granted)


def _arrays(drawn: Drawn) -> Arrays:
    return {
        "keys": drawn.keys,
        "probabilities": drawn.probabilities,
        "times_sampled": drawn.times_sampled,
        "stored_at": drawn.stored_at,
    }
