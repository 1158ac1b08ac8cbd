"""The rows of one table in both tiers, Redis and memory, kept equal.

Blocks go to Redis first, then to memory. Where the two differ afterwards (a reply was lost, Redis came back without
its last second), `bring_together` mends it. One caller at a time writes; memory may be sampled meanwhile.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from paceline.errors import BlockError, PacelineError, ReplacedError, StoreFullError, UnavailableError
from paceline.replay.blocks import HeldBlock, HeldBlocks
from paceline.replay.log import OutOfStepError, RedisLog
from paceline.replay.logged import BlockWrite, LoggedBlock, LogState, Position, RecordView
from paceline.replay.metrics import TableMetrics
from paceline.replay.pages import Pages
from paceline.replay.positions import Positions
from paceline.replay.skipping import oldest_versions
from paceline.rows import Block, ByteMatrix, RowSpec, block_from_wire, checksum_of
from paceline.rpc.wire import seconds_of, timestamp
from paceline.tables.memory import MemorySettings, TableMemory
from paceline.telemetry import ActivityClock, get_logger
from paceline.v1 import rows_pb2

MAX_RUNS = 1024
"""Of rows that left with a follower that had got them: one that consumes nothing and asks for more could make any
number. Those beyond are forgotten, the oldest first."""
FULL_SECONDS = 10.0
"""For so long after Redis had no room for a step it is taken to be about full."""


@dataclass(frozen=True)
class CheckedBlock:
    """A block that may be stored: header and payload as they were sent, and its rows."""

    header: rows_pb2.BlockHeader
    payload: memoryview
    block: Block

    @property
    def row_count(self) -> int:
        """Rows as they were sent."""
        return self.block.row_count


@dataclass(frozen=True)
class _Planned:
    """A block on its way into both tiers, cut at the limit of rows, and what leaves for it."""

    write: BlockWrite
    block: Block
    leaving: list[HeldBlock]
    epoch: int

    @property
    def held(self) -> HeldBlock:
        logged = self.write.block
        return HeldBlock(logged.first_row, logged.row_count, len(logged.payload), logged.header, self.epoch)


class Tiers:
    """Memory and record of one table."""

    def __init__(
        self,
        name: str,
        spec: RowSpec,
        log: RedisLog,
        metrics: TableMetrics,
        *,
        settings: MemorySettings,
        queue: bool,
        row_limit: int | None,
        settings_json: str,
    ) -> None:
        """`row_limit`: rows that are ever inserted; None: no limit. `settings_json` is kept in the record."""
        self.memory = TableMemory(settings, spec.row_bytes)
        self.inserted = 0
        """Rows ever inserted: the key of the next row."""
        self.consumed = self.dropped = self.delivered = 0
        """Of a queue: keys before which all rows were consumed and were given to a follower, and rows that left though
        no follower had got them."""
        self.positions = Positions(name, metrics)
        self._stored_positions: Mapping[int, Position] = {}
        self._name, self._spec, self._log, self._metrics = name, spec, log, metrics
        self._queue, self._row_limit, self._settings_json = queue, row_limit, settings_json
        self._pages = Pages(name, self.memory, metrics)
        self._recorded = 0
        """What the record says of `inserted`; less where its newest blocks were damaged and then lost by Redis."""
        self._blocks = HeldBlocks()
        self._left_delivered: deque[tuple[int, int]] = deque(maxlen=MAX_RUNS)
        """First and end keys of a queue's rows that left, and that a follower has got and nobody has consumed."""
        self._said_too_large = False
        self._full_at = -math.inf  # monotonic
        metrics.capacity_rows.set(settings.capacity_rows)
        metrics.memory_bytes.set(self.memory.memory_bytes)
        self._show()

    @property
    def complete(self) -> bool:
        """Whether every row that the run asked for is here."""
        return self._row_limit is not None and self.inserted >= self._row_limit

    @property
    def is_full(self) -> bool:
        """Whether Redis had no room just now: it counts what is sent to it as well, so less at once may still fit."""
        return time.monotonic() - self._full_at < FULL_SECONDS

    @property
    def block_count(self) -> int:
        """Blocks in the record."""
        return len(self._blocks)

    @property
    def log_bytes(self) -> int:
        """Bytes of the payloads in the record."""
        return self._blocks.payload_bytes

    @property
    def epoch(self) -> int:
        """Of the record, in which this process writes; 0: it has not begun one."""
        return self._log.epoch

    def begin(self) -> None:
        """Make the record of a new table."""
        self._log.begin(self._state(inserted=0, sampled=0))

    def load(self, state: LogState) -> None:
        """Take over the counters of the record; `restore` brings the rows."""
        self._recorded = self.inserted = state.inserted
        self.consumed = self.delivered = state.consumed
        self.dropped = min(state.dropped, state.inserted)  # it was once counted again at each start of a learner
        self._stored_positions = state.positions
        self.positions.update(state.positions)

    def restore(self) -> Iterator[None]:
        """Fill memory from the record, one block in each step, oldest first.

        A block that is damaged, missing or half-written is named, counted and left out. Another call goes on where one
        that failed ended.
        """
        for logged in self._log.read_blocks(self._blocks.end_row):
            if logged.end_row > self.inserted:
                break  # none of ours
            self._take_in(logged)
            self._show()
            yield
        # The newest block of a collector may have been left out, and is known all the same.
        self.positions.update(self._stored_positions)
        self.memory.set_end(self.inserted)
        for page, data in self._log.read_pages():
            self._pages.restore(page, data)
        self._show()

    def store(self, blocks: Sequence[CheckedBlock], clock: ActivityClock, *, sampled: int) -> list[int]:
        """Store the first block, and those after it that can be stored together with it, in Redis and in memory.

        How many rows of each block that was stored: the last one may be cut at the limit of rows. Why no further one
        was, another call finds out.

        Raises:
            OutOfStepError: the two differ; `bring_together`, and see whether the block is there already.
            ReplacedError, StoreFullError, StoreReadOnlyError: nothing was stored.
            UnavailableError: how many Redis has is not known; the next call finds out.
        """
        planned = self._plan(blocks, sampled)
        began = time.perf_counter()
        try:
            stored = self._append(planned)
        except ReplacedError as error:
            raise (_moved(error) if self._log.replaced else error) from error
        if not stored:
            raise OutOfStepError(f"the record of table {self._name!r} has a block that memory does not know of, retry")
        redis_seconds = time.perf_counter() - began
        clock.switch("memory")
        done = planned[:stored]
        for each in done:
            self._store_in_memory(each)
        self._metrics.count_appended(
            redis_seconds,
            blocks=stored,
            rows=sum(each.block.row_count for each in done),
            rows_bytes=sum(each.block.data.nbytes for each in done),
            payload_bytes=sum(len(each.write.block.payload) for each in done),
        )
        self._show()
        return [each.block.row_count for each in done]

    def _append(self, planned: Sequence[_Planned]) -> int:
        """Have Redis store blocks; how many it did. Raises as `RedisLog.append`."""
        writes = [each.write for each in planned]
        try:
            return self._log.append(writes)
        except StoreFullError:
            self._full_at = time.monotonic()
            if len(writes) == 1:
                raise
            # All together they need more room at once than the first alone, for which others may leave.
            return self._log.append(writes[:1])

    def _plan(self, blocks: Sequence[CheckedBlock], sampled: int) -> list[_Planned]:
        """What stores the first block, and those after it for which no other of them must leave."""
        planned: list[_Planned] = []
        inserted, recorded, left, dropped = self.inserted, self._recorded, 0, self.dropped
        for checked in blocks:
            header, payload, block = rows_pb2.BlockHeader(), checked.payload, checked.block
            header.CopyFrom(checked.header)  # what is planned and does not come about leaves no trace
            room = None if self._row_limit is None else self._row_limit - inserted
            come = inserted - self.inserted + block.row_count
            if planned and (room == 0 or come > self.memory.settings.capacity_rows):
                break
            if room is not None and block.row_count > room:
                block = block.first(room)
                payload = block.data.data.cast("B")
                header.row_count, header.checksum, header.compact_stride = room, block.checksum(), 0
                come = inserted - self.inserted + room
            header.first_row = inserted
            header.stored_at.CopyFrom(timestamp())
            # The oldest ones first, so with those that leave for the blocks before this one.
            leaving = self._leaving(self.memory.first_row_after(come), inserted + block.row_count)[left:]
            dropped += sum(self._undelivered(held) for held in leaving)
            write = BlockWrite(
                LoggedBlock(inserted, block.row_count, header.SerializeToString(), payload),
                header,
                removed=leaving,
                sampled=sampled,
                consumed=self.consumed,
                dropped=dropped,
                after=recorded,
            )
            planned.append(_Planned(write, block, leaving, self._log.epoch))
            left += len(leaving)
            inserted = recorded = write.block.end_row
        return planned

    def _store_in_memory(self, planned: _Planned) -> None:
        """Redis has the block."""
        block, header, held = planned.block, planned.write.header, planned.held
        self.positions.note_gap(header)
        self._blocks.remove(planned.leaving)
        for leaving in planned.leaving:
            self._note_delivered(leaving)
        self._count_dropped(planned.write.dropped)
        self._add(held, header, block)
        self._recorded = self.inserted = held.end_row

    def keep(self, *, sampled: int, all_pages: bool = False) -> None:
        """Write the counters, some changed pages (`all_pages`: every one), and what has left, to the record.

        Raises as `store` does.
        """
        leaving = self._leaving(self.memory.first_row, self.inserted)
        with self._pages.changed(everything=all_pages) as pages:
            size = self._blocks.payload_bytes - sum(held.payload_bytes for held in leaving)
            self._save(inserted=self._recorded, sampled=sampled, removed=leaving, payload_bytes=size, pages=pages)
        self._blocks.remove(leaving)
        self._show()

    def consume(self, row: int) -> None:
        """Have every row before `row` leave; `keep` writes it down."""
        if row > self.consumed:
            self._metrics.consumed_rows.inc(row - self.consumed)
            self.consumed = row
            self.delivered = max(self.delivered, row)
            self.memory.drop_before(row)
            while self._left_delivered and self._left_delivered[0][1] <= row:
                self._left_delivered.popleft()

    def deliver_from(self, row: int) -> None:
        """A follower goes on at `row`: from there on rows of a queue are given again that an earlier one had got.

        Those of them that have left meanwhile were learned from by nobody, so they count as dropped.
        """
        first, runs = max(row, self.consumed), self._left_delivered.copy()
        self._left_delivered.clear()
        for begin, end in runs:
            kept = min(end, first)
            if max(begin, self.consumed) < kept:  # the follower has them
                self._left_delivered.append((begin, kept))
            self._count_dropped(self.dropped + end - max(begin, kept))
        self.delivered = first

    def bring_together(self, *, sampled: int) -> None:
        """Make the record and memory agree again; `inserted` may grow by it.

        What the record has and memory lacks (a reply was lost) goes into memory. What memory has and the record lacks
        (Redis came back without its last second, or empty) is written again: rows that were acknowledged stay. All of
        it in a new epoch of the record.
        """
        try:
            view = self._log.view()
            if view is None:
                self._write_anew(None, sampled)
                return
            state, differs = view.state, self._blocks.compare(view.index)
            if differs is not None or state.inserted < self._recorded:
                self._write_again(view, state.inserted if differs is None else differs, sampled)
                return
            self._log.settle(view, state)
            self._remove_stale(view, state.inserted, sampled)
            if state.inserted > self._recorded:
                # The counters first: a failure in the midst is then mended by the next try, from the block it got to.
                self.inserted = max(self.inserted, state.inserted)
                self._count_dropped(max(self.dropped, state.dropped))
                for logged in self._log.read_blocks(self._recorded):
                    if logged.end_row > state.inserted:
                        break  # none of ours
                    self._take_in(logged)
                    self._recorded = logged.end_row
                self.memory.set_end(self.inserted)
                self._recorded = state.inserted
                self._show()
                get_logger().info("record_caught_up", table=self._name, inserted_rows=state.inserted)
            self.positions.update(state.positions)
        except ReplacedError as error:
            raise _moved(error) from error

    def _take_in(self, logged: LoggedBlock) -> None:
        """Put a block of the record into memory, or leave it out when it is damaged."""
        data: bytes | None = logged.header
        if logged.end_row <= self.consumed:  # the process ended before it could remove it
            self._blocks.add(HeldBlock(logged.first_row, logged.row_count, len(logged.payload), None, logged.epoch))
            return
        try:
            header = rows_pb2.BlockHeader.FromString(logged.header)
            if (header.first_row, header.row_count) != (logged.first_row, logged.row_count):
                raise BlockError(
                    f"its header says {header.row_count} rows from {header.first_row}: expected {logged.row_count}"
                )
            if not len(logged.payload):
                raise BlockError("its payload is missing")
            block = block_from_wire(self._spec, header, logged.payload)
        except (PacelineError, DecodeError) as error:
            data = None
            self._metrics.damaged_blocks.inc()
            get_logger().error(
                "block_damaged", table=self._name, block=logged.first_row, rows=logged.row_count, error=str(error)
            )
        held = HeldBlock(logged.first_row, logged.row_count, len(logged.payload), data, logged.epoch)
        if data is None:
            self._blocks.add(held)
            return
        self._add(held, header, block)
        if logged.first_row < self.consumed:
            self.memory.drop_before(self.consumed)

    def _add(self, held: HeldBlock, header: rows_pb2.BlockHeader, block: Block) -> None:
        before = self.memory.row_count
        rows = block.data[-self.memory.settings.capacity_rows :]
        if len(rows) < block.row_count:
            self._say_too_large(held)
        self.memory.append(
            held.end_row - len(rows),
            rows,
            stored_at=seconds_of(header.stored_at),
            versions=self._versions(rows),
        )
        self._metrics.removed_rows.inc(max(0, before + held.row_count - self.memory.row_count))
        self.positions.note(header)
        self._blocks.add(held)

    def _say_too_large(self, held: HeldBlock) -> None:
        """The record has a block of more rows than the table holds now: once is enough."""
        if not self._said_too_large:
            self._said_too_large = True
            settings = self.memory.settings
            get_logger().warning(
                "block_exceeds_capacity",
                table=self._name,
                block=held.first_row,
                rows=held.row_count,
                capacity_rows=settings.capacity_rows,
                meaning=f"it was stored while the table held more rows: of it, and of others like it, the newest stay; "
                f"raise {settings.capacity_setting} of the table to keep the others",
            )

    def _versions(self, rows: ByteMatrix) -> npt.NDArray[np.int64] | None:
        """The policy version of each row, where the sampler asks for it; of an unroll that of its oldest step."""
        if self.memory.settings.sampler != "recent":
            return None
        return oldest_versions(self._spec, rows)

    def _leaving(self, stays: int, inserted: int) -> list[HeldBlock]:
        horizon = inserted - self.memory.settings.held_rows
        return self._blocks.leaving(stays=stays, horizon=horizon, consumed=self.consumed)

    def _undelivered(self, held: HeldBlock) -> int:
        """Rows of a queue's block that leave though no follower got them."""
        if held.header is None or not self._queue:
            return 0
        return max(0, held.end_row - max(held.first_row, self.delivered))

    def _note_delivered(self, held: HeldBlock) -> None:
        """A block has left: what of it a follower has got counts as dropped only if that one ends without it."""
        begin, end = max(held.first_row, self.consumed), min(held.end_row, self.delivered)
        if held.header is None or not self._queue or begin >= end:
            return
        runs = self._left_delivered
        runs.append((runs.pop()[0] if runs and runs[-1][1] == begin else begin, end))

    def _count_dropped(self, dropped: int) -> None:
        if dropped > self.dropped:
            self._metrics.dropped_rows.inc(dropped - self.dropped)
            self.dropped = dropped

    def _write_again(self, view: RecordView, agreed: int, sampled: int) -> None:
        """Write every block from row `agreed` on, up to which the record is right."""
        intact = self._blocks.intact
        if agreed < (max(intact[0].first_row, self.memory.first_row) if intact else self.inserted):
            self._write_anew(view, sampled)
            return
        self._log.settle(view, self._state(inserted=agreed, sampled=sampled))
        self._remove_stale(view, agreed, sampled)
        self._write_blocks_again(agreed, sampled)

    def _write_anew(self, view: RecordView | None, sampled: int) -> None:
        """Make the record anew, of every block that can be written."""
        intact = self._blocks.intact
        first = max(intact[0].first_row, self.memory.first_row) if intact else self.inserted
        self._log.begin(self._state(inserted=first, sampled=sampled), view)
        self._write_blocks_again(first, sampled)

    def _remove_stale(self, view: RecordView, inserted: int, sampled: int) -> None:
        """Have blocks leave that had left, and that Redis has again."""
        first_row = self._blocks.first_row
        oldest = self._recorded if first_row is None else first_row
        stale = takewhile(lambda entry: entry.end_row <= oldest, view.index)
        removed = [HeldBlock(each.first_row, each.end_row - each.first_row, 0, None, each.epoch) for each in stale]
        if removed:
            self._save(inserted=inserted, sampled=sampled, removed=removed)

    def _write_blocks_again(self, recorded: int, sampled: int) -> None:
        """Write what the record lacks, which ends before row `recorded`.

        After a failure in the midst the next try goes on from where it got to.
        """

        def write(held: HeldBlock) -> HeldBlock:
            nonlocal recorded
            again = self._write_block_again(held, recorded, sampled)
            recorded = again.end_row
            return again

        self._pages.were_lost()
        self._blocks.drop_damaged_after(recorded)
        count = self._blocks.rewrite(max(recorded, self.memory.first_row), write)
        self._recorded = recorded
        self._metrics.rewritten_blocks.inc(count)
        get_logger().warning("record_written_again", table=self._name, blocks=count, inserted_rows=recorded)

    def _write_block_again(self, held: HeldBlock, recorded: int, sampled: int) -> HeldBlock:
        """Gives the block as the record, whose next row was `recorded`, has it then."""
        # In plain form, whatever it came in; of a block whose first rows were consumed, or did not fit, the others.
        begin = max(held.first_row, self.memory.first_row)
        first_row, rows, _ = self.memory.read_block(begin, held.end_row - begin)
        rows = rows[: held.end_row - first_row]
        header = rows_pb2.BlockHeader.FromString(held.header or b"")
        header.first_row, header.row_count, header.compact_stride = first_row, len(rows), 0
        header.checksum = checksum_of(rows.data)
        again = HeldBlock(first_row, len(rows), rows.nbytes, header.SerializeToString(), self._log.epoch)
        write = BlockWrite(
            LoggedBlock(first_row, len(rows), again.header or b"", rows.data.cast("B")),
            header,
            sampled=sampled,
            consumed=self.consumed,
            dropped=self.dropped,
            again=True,
            after=recorded,
        )
        self._log.append([write])
        return again

    def _save(
        self,
        *,
        inserted: int,
        sampled: int,
        removed: Sequence[HeldBlock],
        payload_bytes: int | None = None,
        pages: Mapping[int, bytes] | None = None,
    ) -> None:
        try:
            self._log.save(
                inserted=inserted,
                sampled=sampled,
                consumed=self.consumed,
                dropped=self.dropped,
                removed=removed,
                payload_bytes=payload_bytes,
                pages=pages,
                first_page=self.memory.first_page,
            )
        except ReplacedError as error:
            raise _moved(error) from error

    def _state(self, *, inserted: int, sampled: int) -> LogState:
        return LogState(
            row_spec=self._spec,
            limiter_json=self._settings_json,
            inserted=inserted,
            sampled=sampled,
            consumed=self.consumed,
            dropped=self.dropped,
            positions=dict(self.positions.items()),
        )

    def _show(self) -> None:
        self._metrics.rows.set(self.memory.row_count)
        self._metrics.log_bytes.set(self.log_bytes)


def _moved(error: ReplacedError) -> UnavailableError:
    # The caller should come again, and will find the process that took over.
    return UnavailableError(str(error))
