"""One table: what it takes, what it knows already, and when the limiter lets it pass.

An append goes to Redis first, then to memory, then it is acknowledged, one block at a time. Sampling touches memory
alone, so it goes on while Redis is away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.config import TableConfig
from paceline.errors import BlockError, LimiterTimeoutError, ReplacedError, UnavailableError
from paceline.replay.log import LogState, OutOfStepError, Position, RedisLog
from paceline.replay.metrics import ReplayMetrics
from paceline.replay.tiers import Tiers
from paceline.rows import Block, ByteMatrix, RowSpec, find_non_finite
from paceline.tables.limiter import Ended, Limiter, LimiterSettings
from paceline.tables.samplers import UniformSampler
from paceline.telemetry import ActivityClock
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
        self._tiers = Tiers(
            name,
            spec,
            log,
            metrics,
            capacity_rows=config.capacity_rows,
            row_limit=row_limit,
            limiter_json=settings.to_json(),
        )
        self.ring = self._tiers.ring
        self._config, self._metrics = config, metrics
        self._appending = threading.Lock()

    @property
    def positions(self) -> dict[int, Position]:
        """The last block of each collector, by its index."""
        return dict(self._tiers.positions)

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
        if self._tiers.complete:
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
        self._tiers.begin()

    def restore(self, state: LogState, ended: Ended) -> None:
        """Fill the ring from the record, whose state is `state`. Raises what `ended` gives."""
        self._tiers.restore(state, ended)
        self.limiter.restore(inserted=state.inserted, sampled=state.sampled)
        if self._tiers.complete:
            self.limiter.complete()

    def keep_record(self) -> None:
        """Write the counter of sampled rows to Redis, and mend the record if it differs from memory.

        Raises:
            UnavailableError: Redis is away.
        """
        with self._one_at_a_time():
            try:
                self._tiers.keep(sampled=self.limiter.sampled)
            except OutOfStepError:
                self._bring_together()

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
        position = self._tiers.positions.get(header.collector_index)
        if position is not None:
            if header.collector_incarnation < position.incarnation:
                raise ReplacedError(
                    f"collector {header.collector_index} sent a block as incarnation {header.collector_incarnation}, "
                    f"and incarnation {position.incarnation} took over: this process should end"
                )
            if header.collector_incarnation == position.incarnation and header.sequence <= position.sequence:
                self._metrics.duplicate_blocks.labels(self.name).inc()
                last = header.sequence == position.sequence
                return Appended(position.stored_row_count if last else header.row_count, True, self._tiers.complete)
        return Appended(0, False, True) if self._tiers.complete else None

    def _store(self, header: rows_pb2.BlockHeader, block: Block, clock: ActivityClock) -> Appended:
        try:
            stored = self._tiers.store(header, block, clock, sampled=self.limiter.sampled)
        except OutOfStepError:
            self._bring_together()
            done = self._find_known(header)
            if done is not None:
                return done
            stored = self._tiers.store(header, block, clock, sampled=self.limiter.sampled)
        return Appended(stored, False, self._tiers.complete)

    def _bring_together(self) -> None:
        try:
            self._tiers.bring_together(sampled=self.limiter.sampled)
        finally:
            self.limiter.restore(inserted=self._tiers.inserted)

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
