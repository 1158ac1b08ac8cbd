"""Follow streams: each row of a table once, in the order of keys, as far as the follower wants them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

from paceline.errors import InvalidInputError
from paceline.replay.followers import Follower
from paceline.replay.streams import Requests, Stream
from paceline.replay.table import Table
from paceline.rows import ByteMatrix
from paceline.rpc.bulk import Bulk
from paceline.rpc.shared_memory import Bytes
from paceline.telemetry import ActivityClock, get_logger
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import rows_pb2

MAX_COUNT = 1 << 53
"""Above this a count is no row's: Redis' scripts could not tell neighbours apart."""

_COUNTS = (
    "from_row",
    "received_end_row",
    "sampled_row_count",
    "consumed_row",
    "wanted_before",
    "waived_before",
    "released_before",
)


class LentMemory:
    """A follower's memory, in which rows lie from when they are sent until it releases them."""

    def __init__(self, memory: Bytes, row_bytes: int) -> None:
        """Raises InvalidInputError if `memory` has no room for a row."""
        if len(memory) < row_bytes:
            raise InvalidInputError(
                f"the stream offers {len(memory)} bytes of memory: expected room for a row or more, of {row_bytes} "
                "bytes each"
            )
        self._rows: ByteMatrix = memory[: len(memory) // row_bytes * row_bytes].reshape(-1, row_bytes)
        self._next, self._free = 0, len(self._rows)
        self._held: collections.deque[tuple[int, int]] = collections.deque()
        """First and end key of the rows that lie there, oldest first, neighbours joined."""

    def release(self, before: int) -> int:
        """Rows before the key `before` need not stay; how many rows there is room for now."""
        while self._held and self._held[0][0] < before:
            first, end = self._held.popleft()
            if before < end:
                self._held.appendleft((before, end))
            self._free += min(end, before) - first
        return self._free

    def find(self, most: int) -> ByteMatrix | None:
        """Room for the next rows, `[n, row_bytes]`: `most` or fewer; None where there is none."""
        room = self._rows[self._next : self._next + min(most, self._free)]
        return room if len(room) else None

    def keep(self, first_row: int, count: int) -> rows_pb2.MemoryRange:
        """So many rows, with keys from `first_row` on, are in the room that `find` gave: they stay. Where they lie."""
        row_bytes, position = self._rows.shape[1], self._next
        begin = first_row
        if self._held and self._held[-1][1] == first_row:
            begin, _ = self._held.pop()
        self._held.append((begin, first_row + count))
        self._free -= count
        self._next = (position + count) % len(self._rows)
        return rows_pb2.MemoryRange(position=position * row_bytes, byte_count=count * row_bytes)

    def close(self) -> None:
        """No further row comes: let go of the memory."""
        self._rows = self._rows[:0].copy()


def check_progress(request: pb.FollowRequest) -> None:
    """Raise InvalidInputError unless every count of the request is in range."""
    for name in _COUNTS:
        value = getattr(request, name)
        if not 0 <= value < MAX_COUNT:
            raise InvalidInputError(f"{name} {value}: expected 0 to {MAX_COUNT - 1}")
    if request.HasField("received_end_row") and request.received_end_row > request.from_row:
        raise InvalidInputError(
            f"received_end_row {request.received_end_row}: expected from_row, which is {request.from_row}, or less"
        )
    if not 0 <= request.limiter_wait_seconds < MAX_COUNT:  # false for what is no number
        raise InvalidInputError(f"limiter_wait_seconds {request.limiter_wait_seconds}: expected 0 or more seconds")


def follow_messages(
    table: Table,
    first: pb.FollowRequest,
    requests: Iterator[bytes],
    parse: Callable[[bytes], pb.FollowRequest],
    stream: Stream,
    clock: ActivityClock,
    message_rows: int,
    lent: LentMemory | None = None,
) -> Iterator[Bulk[pb.FollowResponse]]:
    """The messages of a Follow stream: news at the start and when the table is complete, rows as they come.

    Blocks that lie ready share a message of up to `message_rows` rows; a follower that is slow to read them gets fuller
    ones. It ends when the caller sends no more requests and nothing that it wants can come any more.

    Args:
        parse: gives a later request, checked against the first one.
        lent: where rows are put instead of in messages; None: nowhere.
    """
    follower = Follower(
        wanted_before=first.wanted_before if first.HasField("wanted_before") else None,
        limiter_wait_seconds=first.limiter_wait_seconds,
    )

    def take(request: pb.FollowRequest) -> None:
        if request.HasField("wanted_before"):
            follower.want(request.wanted_before)
        follower.release(request.released_before)
        if table.config.queue or request.HasField("sampled_row_count"):
            table.followers.take_over(follower)
            table.wake()  # the one that it takes over from ends
        if request.HasField("sampled_row_count"):
            table.limiter.raise_sampled(request.sampled_row_count)
            table.metrics.count_wait("sample", follower.count_wait(request.limiter_wait_seconds))
        if request.HasField("waived_before"):
            table.limiter.waive_before(request.waived_before)
        if request.HasField("consumed_row"):
            table.consume(request.consumed_row)

    try:
        if _has_lost_rows(table, first, stream):
            yield Bulk(_head(table, table.memory.first_row, 0, complete=False, rows_lost=True))
            return
        # Where the follower names none, the first that is there: rows before `consumed` have left, of a queue alone.
        cursor = first.from_row if first.HasField("from_row") else table.tiers.consumed
        take(first)
        table.deliver_from(cursor)
        later = Requests(stream, requests, lambda data: take(parse(data)), on_change=table.wake)
        yield from _rows_as_they_come(table, follower, cursor, later, clock, message_rows, lent)
    finally:
        # The frames of an error that ends the stream stay for a while; the follower's memory should not.
        if lent is not None:
            lent.close()
        table.followers.leave(follower)


def _rows_as_they_come(
    table: Table,
    follower: Follower,
    cursor: int,
    later: Requests,
    clock: ActivityClock,
    message_rows: int,
    lent: LentMemory | None,
) -> Iterator[Bulk[pb.FollowResponse]]:
    memory = table.memory
    told_complete = table.complete
    yield Bulk(_head(table, max(cursor, memory.first_row), 0, told_complete, lent))
    while True:
        with table.changed:
            while True:
                later.require_going()
                table.followers.require_current(follower)
                # Looked at before the rest: then all counts that was ever released, and room that was missed once is
                # not found later.
                closed = later.closed
                complete, wanted = table.complete, follower.wanted_rows(cursor, message_rows)
                free = wanted if lent is None else min(wanted, lent.release(follower.released_before))
                # Who sends no more requests releases no more either: what finds no room then goes in messages.
                if closed:
                    free = wanted
                if (free and cursor < memory.end_row) or complete != told_complete:
                    break
                if closed and (not wanted or (complete and cursor >= table.inserted)):
                    return
                # Rows without room wait for the follower, as a message does that it does not read.
                clock.switch("send" if wanted and not free and cursor < memory.end_row else "idle")
                table.changed.wait()
        clock.switch("read")
        answer = _read(table, follower, cursor, free, complete, lent)
        first_row, count = answer.head.first_row, answer.head.row_count
        # Told of a gap, a follower can want more: the keys in it used up what it had wanted.
        passed_over, cursor = first_row > cursor, first_row + count
        if count == 0 and complete == told_complete and not passed_over:
            continue
        told_complete = complete
        clock.switch("send")
        table.metrics.followed_rows.inc(count)
        table.metrics.followed_bytes.inc(count * table.spec.row_bytes)
        yield answer


def _read(
    table: Table, follower: Follower, cursor: int, most: int, complete: bool, lent: LentMemory | None
) -> Bulk[pb.FollowResponse]:
    """A message of up to `most` rows from `cursor` on, which are in `lent` if there is room."""
    room = None if lent is None else lent.find(most)
    first_row, rows, stored_at = table.read(cursor, most if room is None else len(room), out=room)
    # Where rows have left, the first one that is there may lie beyond those that are wanted.
    count = min(len(rows), follower.wanted_rows(first_row, most))
    answer = Bulk(_head(table, first_row, count, complete, lent), arrays={"stored_at": stored_at[:count]})
    if lent is None or room is None:
        answer.payload = rows[:count]
    elif count:
        answer.head.rows_in_memory.CopyFrom(lent.keep(first_row, count))
    return answer


def _has_lost_rows(table: Table, first: pb.FollowRequest, stream: Stream) -> bool:
    """Whether rows that the follower has got are gone from the record, as can be seen of the last one of them.

    That is when Redis and replay died together, and Redis had not yet written its last second down. The keys of those
    rows are given anew, so a key alone does not tell; the time at which the row was stored does, and so does a row
    where there was none.
    """
    if not first.HasField("from_row"):
        return False
    lost = first.from_row > table.inserted
    received_end = first.received_end_row if first.HasField("received_end_row") else first.from_row
    if not lost and (first.HasField("last_stored_at") or received_end < first.from_row):
        with table.changed:
            while not (table.memory.end_row >= first.from_row or table.is_whole):
                if (error := stream.why_ended()) is not None:
                    raise error
                table.changed.wait()
        if first.HasField("last_stored_at"):
            found, _, stored_at = table.memory.read(received_end - 1, 1)
            # A row that has left, or is damaged now, tells nothing; one that left for newer ones was given long before.
            lost = found == received_end - 1 and len(stored_at) == 1 and stored_at[0] != first.last_stored_at
        if not lost and received_end < first.from_row:
            found, rows, _ = table.memory.read(received_end, 1)
            lost = len(rows) == 1 and found < first.from_row
    if lost:
        get_logger().warning(
            "follower_ahead",
            table=table.name,
            wanted_row=first.from_row,
            inserted_rows=table.inserted,
            meaning="rows that the follower has got are gone from the record and their keys are given anew; it is told "
            "to begin anew",
        )
    return lost


def _head(
    table: Table,
    first_row: int,
    row_count: int,
    complete: bool,
    lent: LentMemory | None = None,
    *,
    rows_lost: bool = False,
) -> pb.FollowResponse:
    return pb.FollowResponse(
        first_row=first_row,
        row_count=row_count,
        table_first_row=table.memory.first_row,
        inserted_row_count=table.inserted,
        sampled_row_count=table.limiter.sampled,
        complete=complete,
        row_spec_digest=table.spec.digest,
        rows_lost=rows_lost,
        reads_memory=lent is not None,
    )
