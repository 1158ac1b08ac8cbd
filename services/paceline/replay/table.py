"""One table: its rows in memory, its record in Redis, its limiter.

An append goes to Redis first, then to memory, then it is acknowledged, one block at a time. Sampling touches memory
alone, so it goes on while Redis is away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from paceline.config import TableConfig
from paceline.errors import BlockError, LimiterTimeoutError, PacelineError, ReplacedError, UnavailableError
from paceline.replay.log import LoggedBlock, LogState, OutOfStepError, Position, RedisLog
from paceline.replay.metrics import ReplayMetrics
from paceline.rows import Block, ByteMatrix, RowSpec, find_non_finite
from paceline.rpc.wire import timestamp
from paceline.tables.limiter import Ended, Limiter, LimiterSettings
from paceline.tables.ring import Ring
from paceline.tables.samplers import UniformSampler
from paceline.telemetry import ActivityClock, get_logger
from paceline.v1 import rows_pb2

LOCK_SECONDS = 30.0
"""An append waits so long for those before it; then the caller is told to come again."""


@dataclass(frozen=True)
class Appended:
    """What became of a block."""

    stored_row_count: int
    duplicate: bool
    complete: bool


class Table:
    """One open table. Any number of threads may append and sample."""

    def __init__(
        self,
        name: str,
        spec: RowSpec,
        config: TableConfig,
        settings: LimiterSettings,
        log: RedisLog,
        metrics: ReplayMetrics,
        *,
        row_limit: int | None = None,
    ) -> None:
        """`row_limit`: rows that are ever inserted; None: no limit."""
        self.name, self.spec = name, spec
        self.limiter = Limiter(name, settings)
        self.ring = Ring(spec.row_bytes, config.capacity_rows)
        self._config, self._log, self._metrics, self._row_limit = config, log, metrics, row_limit
        self._appending = threading.Lock()
        self._inserted = 0
        self._last_block = 0
        self._headers: dict[int, bytes] = {}
        """Header of every block in the ring, to write it to Redis again if Redis loses it."""
        self._positions: dict[int, Position] = {}
        metrics.capacity_rows.labels(name).set(config.capacity_rows)
        metrics.memory_bytes.labels(name).set(self.ring.memory_bytes)
        self._count_rows(0)

    @property
    def complete(self) -> bool:
        """Whether the table has all the rows that the run asked for."""
        return self._row_limit is not None and self._inserted >= self._row_limit

    @property
    def positions(self) -> dict[int, Position]:
        """The last block of each collector, by its index."""
        return dict(self._positions)

    def append(
        self, header: rows_pb2.BlockHeader, rows: bytes | memoryview, ended: Ended, clock: ActivityClock
    ) -> Appended:
        """Store a block in Redis and in memory.

        Raises:
            RowSpecError, BlockError: it is not a block of this table, or holds what the table refuses.
            ReplacedError: a newer incarnation of its collector sent blocks.
            LimiterTimeoutError: the limiter held it back for longer than its deadline.
            StoreFullError, StoreReadOnlyError: Redis refused it; nothing was stored.
            UnavailableError: Redis is away; whether it was stored is not known, and a repeat finds out.
        """
        block = self._check(header, rows)
        done = self._find_known(header)
        if done is not None:
            return done
        clock.switch("limiter")
        with self._limited("insert"):
            self.limiter.reserve_insert(block.row_count, ended)
        reserved = block.row_count
        try:
            clock.switch("store")
            with self._one_at_a_time():
                done = self._find_known(header)  # the same block may have come by another stream meanwhile
                if done is None:
                    done = self._store(header, block, clock)
                self.limiter.settle_insert(reserved, 0 if done.duplicate else done.stored_row_count)
                reserved = 0
        finally:
            self.limiter.settle_insert(reserved, 0)
        if self.complete:
            self.limiter.complete()
        return done

    def grant_samples(self, batch_size: int, batch_count: int, ended: Ended, *, wait: bool) -> int:
        """How many batches may be sampled now. Raises as `Limiter.grant_samples`."""
        with self._limited("sample"):
            return self.limiter.grant_samples(batch_size, batch_count, ended, wait=wait)

    def sample(self, sampler: UniformSampler, out: ByteMatrix) -> None:
        """Fill `out`, `[n, row_bytes]`, with rows that `sampler` draws. Raises UnavailableError if there are none."""
        if not self.ring.row_count:
            raise UnavailableError(
                f"table {self.name!r} has no rows in memory: every block of its record was damaged; "
                "sampling goes on when collectors have appended new ones"
            )
        self.ring.sample(sampler.draw, out)
        self._metrics.sampled_rows.labels(self.name).inc(len(out))
        self._metrics.sampled_bytes.labels(self.name).inc(out.nbytes)

    def begin(self) -> None:
        """Make the record of a new table in Redis."""
        self._log.begin(self._state())

    def restore(self, state: LogState, ended: Ended) -> None:
        """Fill the ring from the record, whose state is `state`. Raises what `ended` gives."""
        if state.limiter_json != self.limiter.settings.to_json():
            get_logger().warning(
                "limiter_settings_differ",
                table=self.name,
                stored=state.limiter_json,
                used=self.limiter.settings.to_json(),
                meaning="the current configuration holds",
            )
        self._positions.update(state.positions)
        for logged in self._log.read_blocks():
            error = ended()
            if error is not None:
                raise error
            self._take_in(logged)
        self._last_block, self._inserted = state.last_block, state.inserted
        self.limiter.restore(inserted=state.inserted, sampled=state.sampled)
        if self.complete:
            self.limiter.complete()
        if self.ring.first_block is not None:
            self._log.trim(self.ring.first_block)
        get_logger().info(
            "table_restored",
            table=self.name,
            rows=self.ring.row_count,
            blocks=self.ring.block_count,
            inserted_rows=state.inserted,
            sampled_rows=state.sampled,
        )

    def keep_record(self) -> None:
        """Write the counter of sampled rows to Redis, and mend the record if it differs from memory.

        Raises:
            UnavailableError: Redis is away.
        """
        with self._one_at_a_time():
            try:
                self._log.save(last_block=self._last_block, sampled=self.limiter.sampled)
            except OutOfStepError:
                self._bring_together()
            except ReplacedError as error:
                raise _moved(error) from error

    def _check(self, header: rows_pb2.BlockHeader, rows: bytes | memoryview) -> Block:
        block = Block.from_bytes(
            self.spec, rows, row_count=header.row_count, digest=header.row_spec_digest, checksum=header.checksum
        )
        self.ring.removed_by(block.row_count)  # refuses a block larger than the table
        if not self._config.allow_non_finite:
            column = find_non_finite(block)
            if column is not None:
                raise BlockError(
                    f"column {column!r} of block {header.sequence} of collector {header.collector_index} holds a NaN "
                    "or an infinity: expected finite values; mend the environment, or set allow_non_finite of the table"
                )
        return block

    def _find_known(self, header: rows_pb2.BlockHeader) -> Appended | None:
        """The answer to a block that needs no storing, or None."""
        position = self._positions.get(header.collector_index)
        if position is not None:
            if header.collector_incarnation < position.incarnation:
                raise ReplacedError(
                    f"collector {header.collector_index} sent a block as incarnation {header.collector_incarnation}, "
                    f"and incarnation {position.incarnation} took over: this process should end"
                )
            if header.collector_incarnation == position.incarnation and header.sequence <= position.sequence:
                self._metrics.duplicate_blocks.labels(self.name).inc()
                last = header.sequence == position.sequence
                return Appended(position.stored_row_count if last else header.row_count, True, self.complete)
        return Appended(0, False, True) if self.complete else None

    def _store(self, header: rows_pb2.BlockHeader, block: Block, clock: ActivityClock) -> Appended:
        try:
            stored = self._write(header, block, clock)
        except OutOfStepError:
            self._bring_together()
            done = self._find_known(header)
            if done is not None:
                return done
            stored = self._write(header, block, clock)
        return Appended(stored, False, self.complete)

    def _write(self, header: rows_pb2.BlockHeader, block: Block, clock: ActivityClock) -> int:
        if self._row_limit is not None and self._inserted + block.row_count > self._row_limit:
            block = block.first(self._row_limit - self._inserted)
            header.row_count, header.checksum = block.row_count, block.checksum()
        number = self._last_block + 1
        header.stored_at.CopyFrom(timestamp())
        oldest = self.ring.first_block_after(block.row_count)
        logged = LoggedBlock(number, header.SerializeToString(), block.data.data.cast("B"))
        began = time.perf_counter()
        try:
            self._log.append(
                logged,
                header,
                previous=self._last_block,
                oldest=number if oldest is None else oldest,
                inserted=self._inserted + block.row_count,
                sampled=self.limiter.sampled,
            )
        except ReplacedError as error:
            raise (_moved(error) if self._log.replaced else error) from error
        self._metrics.redis_append_seconds.observe(time.perf_counter() - began)
        clock.switch("memory")
        self._note_gap(header)
        self._add(logged, header, block)
        self._last_block = number
        self._inserted += block.row_count
        self._metrics.appended_rows.labels(self.name).inc(block.row_count)
        self._metrics.appended_blocks.labels(self.name).inc()
        self._metrics.appended_bytes.labels(self.name).inc(block.data.nbytes)
        return block.row_count

    def _add(self, logged: LoggedBlock, header: rows_pb2.BlockHeader, block: Block) -> None:
        before = self.ring.row_count
        for number in self.ring.append(logged.number, block.data):
            del self._headers[number]
        self._headers[logged.number] = logged.header
        self._positions[header.collector_index] = Position(
            header.collector_incarnation, header.sequence, header.row_count
        )
        self._count_rows(before + block.row_count - self.ring.row_count)

    def _take_in(self, logged: LoggedBlock) -> None:
        """Put a block of the record into the ring, or leave it out when it is damaged."""
        try:
            header = rows_pb2.BlockHeader.FromString(logged.header)
            block = Block.from_bytes(
                self.spec,
                logged.rows,
                row_count=header.row_count,
                digest=header.row_spec_digest,
                checksum=header.checksum,
            )
            self._add(logged, header, block)
            self._last_block = logged.number
        except (PacelineError, DecodeError) as error:
            self._metrics.damaged_blocks.labels(self.name).inc()
            get_logger().error("block_damaged", table=self.name, block=logged.number, error=str(error))

    def _bring_together(self) -> None:
        """Make the record and memory agree again.

        What the record has and memory lacks (a reply was lost) goes into memory. What memory has and the record lacks
        (Redis came back without its last second, or empty) is written again: rows that were acknowledged stay.
        """
        try:
            state = self._log.read_state()
            if state is not None and state.last_block > self._last_block:
                # The counters first: a failure in the midst is then mended by the next try, from the block it got to.
                self._inserted = state.inserted
                self._positions.update(state.positions)
                self.limiter.restore(inserted=state.inserted, sampled=self.limiter.sampled)
                for logged in self._log.read_blocks(self._last_block):
                    self._take_in(logged)
                self._last_block = state.last_block
                get_logger().info("record_caught_up", table=self.name, last_block=state.last_block)
            elif state is None or state.last_block < self._last_block:
                self._write_again(state)
        except ReplacedError as error:
            raise _moved(error) from error

    def _write_again(self, state: LogState | None) -> None:
        known = 0 if state is None else state.last_block
        first = self._last_block + 1 if self.ring.first_block is None else self.ring.first_block
        if state is None or known < first - 1:
            known = first - 1
            self._log.begin(self._state(last_block=known, positions={}))
        count = 0
        for number, rows in self.ring.blocks_after(known):
            data = self._headers[number]
            self._log.append(
                LoggedBlock(number, data, rows.data.cast("B")),
                rows_pb2.BlockHeader.FromString(data),
                previous=known,
                oldest=first,
                inserted=self._inserted,
                sampled=self.limiter.sampled,
            )
            known, count = number, count + 1
        self._metrics.rewritten_blocks.labels(self.name).inc(count)
        get_logger().warning("record_written_again", table=self.name, blocks=count, last_block=self._last_block)

    def _state(self, last_block: int = 0, positions: dict[int, Position] | None = None) -> LogState:
        return LogState(
            row_spec=self.spec,
            limiter_json=self.limiter.settings.to_json(),
            last_block=last_block,
            inserted=self._inserted,
            sampled=self.limiter.sampled,
            positions=positions or {},
        )

    def _note_gap(self, header: rows_pb2.BlockHeader) -> None:
        position = self._positions.get(header.collector_index)
        same = position is not None and position.incarnation == header.collector_incarnation
        expected = position.sequence + 1 if position is not None and same else 1
        if header.sequence > expected:
            self._metrics.sequence_gaps.labels(self.name).inc()
            get_logger().warning(
                "sequence_gap",
                table=self.name,
                collector_index=header.collector_index,
                expected_sequence=expected,
                sequence=header.sequence,
                meaning="blocks that were acknowledged are gone; Redis lost them in a crash",
            )

    def _count_rows(self, removed: int) -> None:
        self._metrics.rows.labels(self.name).set(self.ring.row_count)
        self._metrics.removed_rows.labels(self.name).inc(removed)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._appending.acquire(timeout=LOCK_SECONDS):
            raise UnavailableError(
                f"table {self.name!r}: the appends before this one have waited {LOCK_SECONDS:g} s for Redis; retry"
            )
        try:
            yield
        finally:
            self._appending.release()

    @contextmanager
    def _limited(self, side: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except LimiterTimeoutError:
            self._metrics.limiter_timeouts.labels(self.name, side).inc()
            raise
        finally:
            self._metrics.limiter_wait_seconds.labels(self.name, side).inc(time.perf_counter() - began)


def _moved(error: ReplacedError) -> UnavailableError:
    # The caller should come again, and will find the process that took over.
    return UnavailableError(str(error))
