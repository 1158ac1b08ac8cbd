"""One table: what it takes, what it knows already, and when the limiter lets it pass.

An append goes to Redis first, then to memory, then it is acknowledged, one step at a time. What other appends bring
meanwhile waits in line, and the next step stores it together. Sampling touches memory alone, so it goes on while Redis
is away.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np
import numpy.typing as npt

from paceline.config import TableConfig
from paceline.errors import (
    BlockError,
    ConflictError,
    InvalidInputError,
    PacelineError,
    ReplacedError,
    StoreReadOnlyError,
    UnavailableError,
)
from paceline.replay.draws import Draws
from paceline.replay.followers import Followers
from paceline.replay.log import OutOfStepError, RedisLog
from paceline.replay.logged import LogState
from paceline.replay.metrics import TableMetrics
from paceline.replay.tiers import CheckedBlock, Tiers
from paceline.rows import ByteMatrix, RowSpec, block_from_wire, find_non_finite
from paceline.rpc.bulk import MESSAGE_BYTES
from paceline.rpc.wire import SentBlock
from paceline.tables.limiter import Ended, Limiter, LimiterSettings
from paceline.tables.memory import MemorySettings
from paceline.telemetry import ActivityClock, get_logger
from paceline.v1 import rows_pb2

LOCK_SECONDS = 30.0
"""An append waits so long for its turn, or for the step that takes it along, and for the table to be whole; then the
caller is told to come again."""
LOOK_SECONDS = 0.2
"""How often a wait for the whole table looks whether its caller is still there."""
TOGETHER_BLOCKS = 64
TOGETHER_BYTES = MESSAGE_BYTES
"""What one step in Redis takes of blocks that wait at once, whoever sent them: with more of them, what a step costs no
longer counts. What does not fit ends it, though smaller ones may wait behind."""


@dataclass(frozen=True)
class Appended:
    """What became of a block."""

    sequence: int
    stored_row_count: int
    duplicate: bool
    complete: bool


class _InLine:
    """Blocks of one message that the limiter let pass, waiting for the step in which they are stored."""

    def __init__(self, blocks: Sequence[CheckedBlock]) -> None:
        self.blocks = blocks
        self.reserved = sum(block.row_count for block in blocks)
        """Rows that the limiter has set aside, to be settled by whoever takes the blocks out of the line."""
        self.called = threading.Event()
        """Its turn has come, or a step has taken it along, and what follows says how that went."""
        self.is_taken = False
        self.done: list[Appended] = []
        """What became of the first blocks; of those after these nothing did."""
        self.failure: PacelineError | None = None
        """Why the step failed, where that holds for all that it had."""


class Table:
    """One open table. Any number of threads may append, sample and follow."""

    def __init__(
        self,
        name: str,
        spec: RowSpec,
        config: TableConfig,
        log: RedisLog,
        metrics: TableMetrics,
        *,
        capacity_rows: int,
        memory: MemorySettings,
        limiter: LimiterSettings,
        row_limit: int | None,
        settings_json: str,
    ) -> None:
        """Begin with no row; `begin` or `load` and `restore` come next.

        Args:
            capacity_rows: rows that the table is to hold; memory has room for more while a queue has more.
            row_limit: rows that are ever inserted; None: no limit.
            settings_json: kept in the record, to notice when other settings hold.
        """
        self.name, self.spec, self.config = name, spec, config
        self.capacity_rows = capacity_rows
        self._tiers = Tiers(
            name,
            spec,
            log,
            metrics,
            settings=memory,
            queue=config.queue,
            row_limit=row_limit,
            settings_json=settings_json,
        )
        self.memory = self._tiers.memory
        self.followers = Followers(name, metrics)
        self.limiter = Limiter(name, limiter, room=self._room, drawable=self.memory.drawable)
        self.changed = threading.Condition()
        """Notified when rows came, rows left, priorities changed, or followers made progress."""
        self.metrics = metrics
        self._appending = threading.Lock()
        self._line: deque[_InLine] = deque()
        self._line_changing = threading.Lock()
        self._whole = threading.Event()
        metrics.whole.set(0)
        self.draws = Draws(name, self.memory, self.limiter, self.changed, metrics, self._whole.is_set)

    @property
    def inserted(self) -> int:
        """Rows ever inserted."""
        return self._tiers.inserted

    @property
    def complete(self) -> bool:
        """Whether every row that the run asked for is here."""
        return self._tiers.complete

    @property
    def tiers(self) -> Tiers:
        """Its rows in memory and Redis; to look at."""
        return self._tiers

    def append(self, sent: Iterable[SentBlock], ended: Ended, clock: ActivityClock) -> Iterator[list[Appended]]:
        """Store blocks in Redis and in memory, in order.

        Gives what became of each, of as many at once as could be stored without a wait between them. Where one fails,
        what became of those before it is given first, and none after it is stored.

        Args:
            sent: what it raises itself counts as the failure of the block that would come next.

        Raises:
            RowSpecError, BlockError: it is not a block of this table, or holds what the table refuses.
            ReplacedError: a newer incarnation of its collector sent blocks.
            LimiterTimeoutError: the limiter, or a full queue, held it back for longer than its deadline.
            StoreFullError, StoreReadOnlyError: Redis refused it; nothing was stored.
            UnavailableError: Redis is away; whether it was stored is not known, and a repeat finds out.
        """
        blocks: list[CheckedBlock] = []
        failure: PacelineError | None = None
        try:
            blocks.extend(map(self._check, sent))
        except PacelineError as error:
            failure = error
        while blocks:
            done = self._append_some(blocks, ended, clock)
            if done:
                yield done
                del blocks[: len(done)]
            elif (why := ended()) is not None:
                raise why
        if failure is not None:
            raise failure

    def update_priorities(self, keys: npt.NDArray[np.int64], priorities: npt.NDArray[np.float32]) -> int:
        """Set priorities of rows; how many of the keys are of rows that are there.

        Raises:
            InvalidInputError: keys and priorities differ in number, or a priority is out of range.
            ConflictError: the table's rows have no priorities.
            UnavailableError: the table is still being restored.
        """
        if self.config.sampler != "prioritised":
            raise ConflictError(
                f"table {self.name!r} has sampler {self.config.sampler!r}, whose rows have no priorities: expected "
                f"'prioritised'; set replay.tables.{self.name}.sampler"
            )
        if not self._whole.is_set():
            # The rows may be those that are not here yet.
            raise UnavailableError(f"table {self.name!r} is still being restored; retry")
        found = self.memory.update_priorities(keys, priorities)
        self.metrics.updated_priorities.inc(found)
        self.metrics.unknown_priorities.inc(len(keys) - found)
        self.wake()
        return found

    def read(
        self, first_row: int, max_rows: int, *, out: ByteMatrix | None = None
    ) -> tuple[int, ByteMatrix, npt.NDArray[np.float64]]:
        """A copy of rows for a follower, as `TableMemory.read`; those of a queue count as delivered."""
        if not self.config.queue:
            return self.memory.read(first_row, max_rows, out=out)
        with self._one_at_a_time():  # no row both counts as dropped and is delivered
            found = self.memory.read(first_row, max_rows, out=out)
            self._tiers.delivered = max(self._tiers.delivered, found[0] + len(found[1]))
            return found

    def deliver_from(self, row: int) -> None:
        """A follower begins at `row`; what it gets of a queue, and an earlier one had got, is not delivered yet."""
        if self.config.queue:
            with self._one_at_a_time():
                self._tiers.deliver_from(row)

    def consume(self, row: int) -> None:
        """The rows of a queue before `row` were consumed: they leave memory now, and the record at once or soon.

        Raises:
            InvalidInputError: the table is no queue, or has no such row.
        """
        if not self.config.queue:
            raise InvalidInputError(
                f"consumed_row {row} of table {self.name!r}, which is no queue: expected none; only queues are consumed"
            )
        if row > self.inserted:
            raise InvalidInputError(
                f"consumed_row {row} of queue {self.name!r}: expected at most {self.inserted}, the rows ever inserted"
            )
        with self._one_at_a_time():
            before = self._tiers.consumed
            self._tiers.consume(row)
            if self._whole.is_set() and self._tiers.consumed != before:
                # Whoever takes the room writes it down with his block; otherwise the keeper of the record comes again.
                with suppress(PacelineError):
                    self._keep()
        self.limiter.wake()
        self.wake()

    def begin(self) -> None:
        """Make the record of a new table in Redis."""
        self._tiers.begin()
        self._set_whole()

    def load(self, state: LogState) -> None:
        """Take over the counters of the record; `restore` brings the rows."""
        self._tiers.load(state)
        self.limiter.restore(inserted=state.inserted, sampled=state.sampled)
        if self.complete:
            self.limiter.complete()

    def restore(self) -> Iterator[None]:
        """Fill memory from the record, a block in each step. At the end the table is whole and takes blocks.

        Rows may be sampled and followed meanwhile. Another call goes on where one that failed ended.
        """
        steps, is_over = self._tiers.restore(), False
        while not is_over:
            with self._one_at_a_time():  # a follower may consume meanwhile
                is_over = next(steps, self) is self
            self.limiter.wake()
            self.wake()
            yield
        self._set_whole()
        get_logger().info(
            "table_restored",
            table=self.name,
            rows=self.memory.row_count,
            blocks=self._tiers.block_count,
            inserted_rows=self.inserted,
            sampled_rows=self.limiter.sampled,
        )

    @property
    def is_whole(self) -> bool:
        """Whether all its rows are in memory, as they are in the record."""
        return self._whole.is_set()

    @property
    def is_readable(self) -> bool:
        """Whether the rows needed before the first sample are in memory, or all that the record has.

        Where draws are counted or weighed by priority the first one comes when all are there, and what is known of
        them: else a row might be given more often than it may.
        """
        if self.memory.settings.keeps_state:
            return self.is_whole
        return self.is_whole or self.memory.row_count >= self.limiter.settings.min_rows

    def require_readable(self) -> None:
        """Raise UnavailableError while rows that the record has are still missing for the first sample."""
        if not self.is_readable:
            raise UnavailableError(
                f"table {self.name!r} is still being restored from Redis, {self.memory.row_count} of the "
                f"{self.limiter.settings.min_rows} rows needed before the first sample are in memory; retry"
            )

    def keep_record(self, *, all_pages: bool = False) -> None:
        """Write counters and changed pages to Redis, and mend the record if it differs from memory.

        Raises:
            UnavailableError: Redis is away.
        """
        if self._whole.is_set():
            with self._one_at_a_time():
                self._keep(all_pages=all_pages)

    def wake(self) -> None:
        """Have every wait look at what has changed."""
        with self.changed:
            self.changed.notify_all()

    def _append_some(self, blocks: Sequence[CheckedBlock], ended: Ended, clock: ActivityClock) -> list[Appended]:
        """Store the first block, and those after it that need not wait; what became of them.

        One that fails after the first is left for the next call, which finds out why; so are all of them where the
        append whose turn it was took them along in a step that did not get so far: then the answer is empty.
        """
        self._wait_until_whole(ended)
        known = self._answer_known(blocks)
        if known:
            return known
        clock.switch("limiter")
        with self.metrics.waiting_for_limiter("insert"):
            self.limiter.reserve_insert(blocks[0].row_count, ended)
        own = _InLine([blocks[0], *takewhile(self._passes_at_once, blocks[1:])])
        clock.switch("store")
        until = time.monotonic() + LOCK_SECONDS
        self._join_line(own)
        try:
            if not own.called.wait(LOCK_SECONDS):
                raise self._waited_too_long()
            if not own.is_taken:
                with self._one_at_a_time(until):
                    self._store_line(own, clock)
                if self._tiers.complete:
                    self.limiter.complete()
                self.wake()
        finally:
            if self._leave_line(own):
                self.limiter.settle_insert(own.reserved, 0)
        if own.failure is not None:
            raise type(own.failure)(str(own.failure)) from own.failure
        return own.done

    def _store_line(self, own: _InLine, clock: ActivityClock) -> None:
        """Store `own`, whose turn it is, and what shares a step with it."""
        # The same blocks may have come by another stream meanwhile.
        own.done = self._answer_known(own.blocks)
        if own.done:
            return
        line, done, failure = self._take_line(), [], None
        try:
            done = self._store([block for each in line for block in each.blocks], clock)
        except (UnavailableError, StoreReadOnlyError) as error:
            failure = error
        finally:
            # Any other error is about the first block alone; those that came along go again by themselves.
            stored = sum(each.stored_row_count for each in done if not each.duplicate)
            self.limiter.settle_insert(sum(each.reserved for each in line), stored)
            rest = iter(done)
            for each in line:
                each.done, each.failure = list(islice(rest, len(each.blocks))), failure
                each.is_taken = True
                each.called.set()

    def _join_line(self, own: _InLine) -> None:
        with self._line_changing:
            self._line.append(own)
            self._line[0].called.set()

    def _take_line(self) -> list[_InLine]:
        """Out of the line: its first one, and those after it that share a step with that."""
        taken: list[_InLine] = []
        count = size = 0
        with self._line_changing:
            while self._line:
                blocks = self._line[0].blocks
                count += len(blocks)
                size += sum(len(block.payload) for block in blocks)
                if taken and (self._tiers.is_full or count > TOGETHER_BLOCKS or size > TOGETHER_BYTES):
                    self._line[0].called.set()
                    break
                taken.append(self._line.popleft())
        return taken

    def _leave_line(self, own: _InLine) -> bool:
        """Wait no longer; False: a step has taken the blocks."""
        with self._line_changing:
            if own not in self._line:
                return False
            self._line.remove(own)
            if self._line:
                self._line[0].called.set()
            return True

    def _passes_at_once(self, block: CheckedBlock) -> bool:
        """Whether the limiter lets a block pass without a wait; then its rows are set aside."""
        try:
            self.limiter.reserve_insert(block.row_count, ended=_not_now)
        except PacelineError:
            return False
        return True

    def _check(self, sent: SentBlock) -> CheckedBlock:
        header, payload = sent.header, memoryview(sent.payload)  # type: ignore[arg-type]
        self.memory.require_fits(header.row_count)
        block = block_from_wire(self.spec, header, payload)
        if not self.config.allow_non_finite:
            column = find_non_finite(block)
            if column is not None:
                raise BlockError(
                    f"column {column!r} of block {header.sequence} of collector {header.collector_index} holds a NaN "
                    "or an infinity: expected finite values; mend the environment, or set allow_non_finite of the table"
                )
        return CheckedBlock(header, payload, block)

    def _answer_known(self, blocks: Sequence[CheckedBlock]) -> list[Appended]:
        """What became of the first of these blocks, as many as need no storing. Raises ReplacedError for the first."""
        known: list[Appended] = []
        for block in blocks:
            try:
                done = self._find_known(block.header)
            except ReplacedError:
                if known:
                    break
                raise
            if done is None:
                break
            known.append(done)
        return known

    def _find_known(self, header: rows_pb2.BlockHeader) -> Appended | None:
        """The answer to a block that needs no storing, or None."""
        last = self._tiers.positions.find(header)
        if last is not None:
            self.metrics.duplicate_blocks.inc()
            is_last = header.sequence == last.sequence
            row_count = last.stored_row_count if is_last else header.row_count
            return Appended(header.sequence, row_count, True, self.complete)
        return Appended(header.sequence, 0, False, True) if self.complete else None

    def _store(self, blocks: Sequence[CheckedBlock], clock: ActivityClock) -> list[Appended]:
        try:
            stored = self._tiers.store(blocks, clock, sampled=self.limiter.sampled)
        except OutOfStepError as why:
            self._bring_together(why)
            known = self._answer_known(blocks)
            if known:
                return known
            stored = self._tiers.store(blocks, clock, sampled=self.limiter.sampled)
        return [
            Appended(block.header.sequence, row_count, False, self.complete)
            for block, row_count in zip(blocks, stored, strict=False)
        ]

    def _keep(self, *, all_pages: bool = False) -> None:
        try:
            self._tiers.keep(sampled=self.limiter.sampled, all_pages=all_pages)
        except OutOfStepError as why:
            self._bring_together(why)
            self._tiers.keep(sampled=self.limiter.sampled, all_pages=all_pages)

    def _bring_together(self, why: OutOfStepError) -> None:
        try:
            self._tiers.bring_together(sampled=self.limiter.sampled)
        finally:
            self.limiter.restore(inserted=self.inserted)
            if self.complete:
                self.limiter.complete()
        get_logger().info("record_epoch_begun", table=self.name, epoch=self._tiers.epoch, reason=str(why))

    def _room(self) -> int | None:
        """Rows that fit before others leave, where appends wait for that."""
        if not self.config.queue or self.config.overflow != "block":
            return None
        return self.capacity_rows - (self.memory.end_row - self.memory.first_row)

    def _set_whole(self) -> None:
        self._whole.set()
        self.metrics.whole.set(1)
        self.wake()

    def _wait_until_whole(self, ended: Ended) -> None:
        until = time.monotonic() + LOCK_SECONDS
        while not self._whole.wait(LOOK_SECONDS):
            error = ended()
            if error is not None:
                raise error
            if time.monotonic() > until:
                raise UnavailableError(
                    f"table {self.name!r} is still being restored from Redis, {self.memory.row_count} rows are in "
                    "memory: it takes blocks when it is whole; retry"
                )

    def _waited_too_long(self) -> UnavailableError:
        return UnavailableError(
            f"table {self.name!r}: the appends before this one, or the step that it shares with others, have waited "
            f"{LOCK_SECONDS:g} s for Redis; retry"
        )

    @contextmanager
    def _one_at_a_time(self, until: float | None = None) -> Iterator[None]:
        """The time within is one step's; until a time of the monotonic clock it is waited for."""
        seconds = LOCK_SECONDS if until is None else max(0.0, until - time.monotonic())
        if not self._appending.acquire(timeout=seconds):
            raise self._waited_too_long()
        try:
            yield
        finally:
            self._appending.release()


def _not_now() -> PacelineError:
    """Ends a wait before it begins."""
    return UnavailableError("the limiter does not let the block pass now")
