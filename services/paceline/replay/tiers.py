"""The rows of one table in both tiers, Redis and memory, kept equal.

A block goes to Redis first, then to memory. Where the two differ afterwards (a reply was lost, Redis came back without
its last second), `bring_together` mends it. One caller at a time writes; the ring may be sampled meanwhile.
"""

from __future__ import annotations

import time

from google.protobuf.message import DecodeError

from paceline.errors import PacelineError, ReplacedError, UnavailableError
from paceline.replay.log import LoggedBlock, LogState, OutOfStepError, Position, RedisLog
from paceline.replay.metrics import ReplayMetrics
from paceline.rows import Block, RowSpec
from paceline.rpc.wire import timestamp
from paceline.tables.limiter import Ended
from paceline.tables.ring import Ring
from paceline.telemetry import ActivityClock, get_logger
from paceline.v1 import rows_pb2


class Tiers:
    """Ring and record of one table."""

    def __init__(
        self,
        name: str,
        spec: RowSpec,
        log: RedisLog,
        metrics: ReplayMetrics,
        *,
        capacity_rows: int,
        row_limit: int | None,
        limiter_json: str,
    ) -> None:
        """`row_limit`: rows that are ever inserted; None: no limit. `limiter_json` is kept in the record."""
        self.ring = Ring(spec.row_bytes, capacity_rows)
        self.inserted = 0
        """Rows ever inserted."""
        self.positions: dict[int, Position] = {}
        """The last block of each collector, by its index."""
        self._name, self._spec, self._log, self._metrics = name, spec, log, metrics
        self._row_limit, self._limiter_json = row_limit, limiter_json
        self._last_block = 0
        self._headers: dict[int, bytes] = {}
        """Header of every block in the ring, to write it to Redis again if Redis loses it."""
        metrics.capacity_rows.labels(name).set(capacity_rows)
        metrics.memory_bytes.labels(name).set(self.ring.memory_bytes)
        self._count_rows(0)

    @property
    def complete(self) -> bool:
        """Whether every row that the run asked for is here."""
        return self._row_limit is not None and self.inserted >= self._row_limit

    def begin(self) -> None:
        """Make the record of a new table."""
        self._log.begin(self._state(last_block=0, sampled=0))

    def restore(self, state: LogState, ended: Ended) -> None:
        """Fill the ring from the record, whose state is `state`. Raises what `ended` gives."""
        if state.limiter_json != self._limiter_json:
            get_logger().warning(
                "limiter_settings_differ",
                table=self._name,
                stored=state.limiter_json,
                used=self._limiter_json,
                meaning="the current configuration holds",
            )
        for logged in self._log.read_blocks():
            error = ended()
            if error is not None:
                raise error
            self._take_in(logged)
        # After the blocks: the last one of a collector may have been left out, and is known all the same.
        self.positions.update(state.positions)
        self._last_block, self.inserted = state.last_block, state.inserted
        if self.ring.first_block is not None:
            self._log.trim(self.ring.first_block)
        get_logger().info(
            "table_restored",
            table=self._name,
            rows=self.ring.row_count,
            blocks=self.ring.block_count,
            inserted_rows=state.inserted,
            sampled_rows=state.sampled,
        )

    def store(self, header: rows_pb2.BlockHeader, block: Block, clock: ActivityClock, *, sampled: int) -> int:
        """Store a block, cut at the limit of rows, in Redis and in memory; how many of its rows.

        Raises:
            OutOfStepError: the two differ; `bring_together`, and see whether the block is there already.
            ReplacedError, StoreFullError, StoreReadOnlyError: nothing was stored.
            UnavailableError: whether Redis has it is not known; the next call finds out.
        """
        if self._row_limit is not None and self.inserted + block.row_count > self._row_limit:
            block = block.first(self._row_limit - self.inserted)
            header.row_count, header.checksum = block.row_count, block.checksum()
        number = self._last_block + 1
        header.stored_at.CopyFrom(timestamp())
        oldest = self.ring.first_block_after(block.row_count)
        logged = LoggedBlock(number, header.SerializeToString(), block.data.data.cast("B"))
        began = time.perf_counter()
        try:
            stored = self._log.append(
                logged,
                header,
                previous=self._last_block,
                oldest=number if oldest is None else oldest,
                inserted=self.inserted + block.row_count,
                sampled=sampled,
            )
        except ReplacedError as error:
            raise (_moved(error) if self._log.replaced else error) from error
        if not stored:
            raise OutOfStepError(f"the record of table {self._name!r} has a block that memory does not know of, retry")
        self._metrics.redis_append_seconds.observe(time.perf_counter() - began)
        clock.switch("memory")
        self._note_gap(header)
        self._add(logged, header, block)
        self._last_block = number
        self.inserted += block.row_count
        self._metrics.appended_rows.labels(self._name).inc(block.row_count)
        self._metrics.appended_blocks.labels(self._name).inc()
        self._metrics.appended_bytes.labels(self._name).inc(block.data.nbytes)
        return block.row_count

    def keep(self, *, sampled: int) -> None:
        """Write the counter of sampled rows to the record. Raises as `store` does."""
        try:
            self._log.save(last_block=self._last_block, sampled=sampled)
        except ReplacedError as error:
            raise _moved(error) from error

    def bring_together(self, *, sampled: int) -> None:
        """Make the record and memory agree again; `inserted` may grow by it.

        What the record has and memory lacks (a reply was lost) goes into memory. What memory has and the record lacks
        (Redis came back without its last second, or empty) is written again: rows that were acknowledged stay.
        """
        try:
            state = self._log.read_state()
            if state is not None and state.last_block > self._last_block:
                # The counters first: a failure in the midst is then mended by the next try, from the block it got to.
                self.inserted = state.inserted
                for logged in self._log.read_blocks(self._last_block):
                    self._take_in(logged)
                self._last_block = state.last_block
                get_logger().info("record_caught_up", table=self._name, last_block=state.last_block)
            if state is None or state.last_block < self._last_block:
                self._write_again(state, sampled)
            else:
                self.positions.update(state.positions)
        except ReplacedError as error:
            raise _moved(error) from error

    def _add(self, logged: LoggedBlock, header: rows_pb2.BlockHeader, block: Block) -> None:
        before = self.ring.row_count
        for number in self.ring.append(logged.number, block.data):
            del self._headers[number]
        self._headers[logged.number] = logged.header
        self.positions[header.collector_index] = Position(
            header.collector_incarnation, header.sequence, header.row_count
        )
        self._count_rows(before + block.row_count - self.ring.row_count)

    def _take_in(self, logged: LoggedBlock) -> None:
        """Put a block of the record into the ring, or leave it out when it is damaged."""
        try:
            header = rows_pb2.BlockHeader.FromString(logged.header)
            block = Block.from_bytes(
                self._spec,
                logged.rows,
                row_count=header.row_count,
                digest=header.row_spec_digest,
                checksum=header.checksum,
            )
            self._add(logged, header, block)
            self._last_block = logged.number
        except (PacelineError, DecodeError) as error:
            self._metrics.damaged_blocks.labels(self._name).inc()
            get_logger().error("block_damaged", table=self._name, block=logged.number, error=str(error))

    def _write_again(self, state: LogState | None, sampled: int) -> None:
        known = 0 if state is None else state.last_block
        first = self._last_block + 1 if self.ring.first_block is None else self.ring.first_block
        if state is None or known < first - 1:
            known = first - 1
            self._log.begin(self._state(last_block=known, sampled=sampled))
        count = 0
        for number, rows in self.ring.blocks_after(known):
            data = self._headers[number]
            self._log.append(
                LoggedBlock(number, data, rows.data.cast("B")),
                rows_pb2.BlockHeader.FromString(data),
                previous=known,
                oldest=first,
                inserted=self.inserted,
                sampled=sampled,
            )
            known, count = number, count + 1
        self._last_block = known  # lower than it was where the newest blocks had been damaged and left out
        self._metrics.rewritten_blocks.labels(self._name).inc(count)
        get_logger().warning("record_written_again", table=self._name, blocks=count, last_block=self._last_block)

    def _state(self, *, last_block: int, sampled: int) -> LogState:
        return LogState(
            row_spec=self._spec,
            limiter_json=self._limiter_json,
            last_block=last_block,
            inserted=self.inserted,
            sampled=sampled,
        )

    def _note_gap(self, header: rows_pb2.BlockHeader) -> None:
        position = self.positions.get(header.collector_index)
        same = position is not None and position.incarnation == header.collector_incarnation
        expected = position.sequence + 1 if position is not None and same else 1
        if header.sequence > expected:
            self._metrics.sequence_gaps.labels(self._name).inc()
            get_logger().warning(
                "sequence_gap",
                table=self._name,
                collector_index=header.collector_index,
                expected_sequence=expected,
                sequence=header.sequence,
                meaning="blocks that were acknowledged are gone; Redis lost them in a crash",
            )

    def _count_rows(self, removed: int) -> None:
        self._metrics.rows.labels(self._name).set(self.ring.row_count)
        self._metrics.removed_rows.labels(self._name).inc(removed)


def _moved(error: ReplacedError) -> UnavailableError:
    # The caller should come again, and will find the process that took over.
    return UnavailableError(str(error))
