"""The rows of one table in memory: what replay samples, and what a learner that follows samples by itself.

A ring holds the rows, a sampler chooses among them. One writer at a time; any number of threads sample, read and
update priorities meanwhile. Draws take a lock for microseconds, copies of rows take none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import BlockError, ConfigError, ConflictError, InvalidInputError
from paceline.lag.bound import LagBound, Starvation
from paceline.rows import ByteMatrix
from paceline.tables.bounded import BoundedSampler
from paceline.tables.pages import PAGE_ROWS, Pages
from paceline.tables.prioritised import PrioritisedSampler
from paceline.tables.recent import RecentSampler
from paceline.tables.ring import At, HostRows, Keys, Ring, RowStore, gap_rows_of
from paceline.tables.samplers import OrderedSampler, UniformSampler, WeightedSampler
from paceline.tables.stored_times import Seconds

EVICTED_SHARE = 64
"""Rows of lowest priority leave by this fraction (1/64) of the capacity: finding them takes a look at every row."""


@dataclass(frozen=True)
class MemorySettings:
    """What a table's memory holds and how it draws; `TableConfig` says what each means."""

    capacity_rows: int
    sampler: str = "uniform"
    exponent: float = 0.6
    max_lag_versions: int | None = None
    half_life_versions: float | None = None
    remover: str = "fifo"
    max_times_sampled: int | None = None
    bound_setting: str = "recent.max_lag_versions"
    """Where `max_lag_versions` comes from, for messages."""
    capacity_setting: str = "capacity_rows"
    """Where `capacity_rows` comes from, for messages."""

    def bounded(self, max_lag_versions: int | None) -> MemorySettings:
        """The same, with no row drawn that is further behind: what is drawn uniformly is drawn so among the others.

        The smaller of both bounds holds. Draws by priority or age stay as they are: what they give is masked.
        """
        if max_lag_versions is None or self.sampler not in ("uniform", "recent"):
            return self
        if self.sampler == "recent" and self.max_lag_versions is not None and self.max_lag_versions <= max_lag_versions:
            return self
        # Without a half-life, which is no setting of a uniform table.
        half_life = self.half_life_versions if self.sampler == "recent" else None
        return replace(
            self,
            sampler="recent",
            max_lag_versions=max_lag_versions,
            half_life_versions=half_life,
            bound_setting="lag.max_lag_versions",
        )

    @property
    def keeps_state(self) -> bool:
        """Whether rows have priorities or counts that a restart must not lose: what pages hold."""
        return self.sampler == "prioritised" or self.max_times_sampled is not None

    @property
    def held_rows(self) -> int:
        """Rows that blocks may have in the ring, and in the record: those that `lowest_priority` evicted stay so long.

        A block leaves when its first key is further than this behind the key of the next row.
        """
        return self.capacity_rows * (2 if self.remover == "lowest_priority" else 1)

    @property
    def physical_rows(self) -> int:
        """Places that the rows need: those that may be held, and the gap ahead of the write position."""
        needed = self.held_rows + gap_rows_of(self.held_rows)
        if self.sampler == "uniform" and self.max_times_sampled is None:
            return needed
        # Whole pages, and one more: then no page of places has rows of both its ends.
        return (-(-needed // PAGE_ROWS) + 1) * PAGE_ROWS


@dataclass(frozen=True)
class Drawn:
    """What is known of each row of a batch, `[n]` each."""

    keys: Keys
    probabilities: npt.NDArray[np.float32]
    """That one draw gave the row, when it was drawn."""
    times_sampled: npt.NDArray[np.uint32]
    """After this batch. Where neither priorities nor `max_times_sampled` are at work, only batches that were drawn with
    details are counted: counting would cost the plain draw a tenth of its speed."""
    stored_at: Seconds
    """Seconds, as `append` was told."""


class TableMemory:
    """The rows of one table."""

    def __init__(
        self, settings: MemorySettings, row_bytes: int, *, rows: RowStore | None = None, base_version: int = 0
    ) -> None:
        """Begin with no row.

        Args:
            rows: `settings.physical_rows` places of `row_bytes` bytes each; None: in the process's own memory.
            base_version: rows of an earlier policy version count for the bound on the lag as if they were of this one.
        """
        self.settings = settings
        physical_rows = settings.physical_rows
        self._ring = Ring(
            HostRows(physical_rows, row_bytes) if rows is None else rows,
            physical_rows,
            settings.held_rows,
            on_leave=lambda first_row, end_row: self._sampler.remove(first_row, end_row),
        )
        self._sampler = _make_sampler(settings, self._ring, base_version)
        self._pages: Pages | None = None
        if settings.keeps_state and isinstance(self._sampler, WeightedSampler):
            self._pages = Pages(self._ring, self._sampler)

    @property
    def first_row(self) -> int:
        """Key of the oldest row held; `end_row` when there is none."""
        return self._ring.first_row

    @property
    def end_row(self) -> int:
        """Key of the next row: rows ever inserted."""
        return self._ring.end_row

    @property
    def row_count(self) -> int:
        """Rows held: neither holes, nor rows that were evicted or sampled as often as they may be."""
        return self._sampler.row_count

    @property
    def memory_bytes(self) -> int:
        """Bytes set aside for rows and what is known of them."""
        return self._ring.memory_bytes + self._sampler.memory_bytes

    @property
    def first_page(self) -> int:
        """Pages before it are of rows that have left."""
        return self.first_row // PAGE_ROWS

    def require_fits(self, row_count: int) -> None:
        """Raise BlockError if a block of `row_count` rows is larger than the table."""
        if row_count > self.settings.capacity_rows:
            raise BlockError(
                f"a block of {row_count} rows: expected at most {self.settings.capacity_setting}, "
                f"{self.settings.capacity_rows}"
            )

    def first_row_after(self, row_count: int) -> int:
        """Key of the oldest row that stays when a block of `row_count` rows has come. Raises as `require_fits`."""
        self.require_fits(row_count)
        return self._ring.first_row_after(row_count)

    def append(
        self,
        first_row: int,
        rows: ByteMatrix,
        *,
        stored_at: float | Seconds,
        versions: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Add a block, `[n, row_bytes]`; what must leave for it leaves.

        Args:
            first_row: `end_row`, or above it: the keys between are a hole.
            stored_at: seconds, of the block or of each row.
            versions: `[n]` policy version of each row; `recent` needs it.

        Raises:
            BlockError: it is larger than the table, its keys are known, or `recent` lacks versions.
        """
        row_count = len(rows)
        self.require_fits(row_count)
        if versions is None and self.settings.sampler != "recent":
            versions = np.zeros(row_count, np.int64)
        if versions is None or len(versions) != row_count:
            raise BlockError(
                f"a block of {row_count} rows with {0 if versions is None else len(versions)} policy versions: "
                "expected one for each row"
            )
        come = versions

        def then() -> None:
            self._sampler.add(first_row, row_count, come)
            if self._pages is not None:
                self._note(np.arange(first_row, first_row + row_count))

        self._ring.append(first_row, rows, stored_at=stored_at, then=then)
        if self.settings.remover == "lowest_priority":
            self._evict()

    def set_end(self, row: int) -> None:
        """Have the next block begin at `row` or above: the record counts rows up to here, and some were damaged."""
        self._ring.set_end(row)

    def drop_before(self, row: int) -> None:
        """Have every row before `row` leave: they were consumed."""
        self._ring.drop_before(row)

    def sample(
        self,
        random: np.random.Generator,
        out: Any,
        *,
        policy_version: int = 0,
        details: bool = False,
        stored_at: Seconds | None = None,
    ) -> Drawn | None:
        """Fill `out`, `[n, row_bytes]`, with rows that the table's sampler draws.

        Args:
            random: of the caller alone.
            out: a matrix of bytes, or what the `rows` of this memory gather to.
            policy_version: the newest that the caller knows of.
            details: whether to say what is known of each row.
            stored_at: `[n]`, filled with the seconds of each row where it is given and `details` is false: a part of
                the details that costs next to nothing.

        Raises:
            UnavailableError: not so many rows can be drawn now, and why; none was drawn.
        """
        sampler, n = self._sampler, len(out)
        bounded = self.settings.max_times_sampled is not None

        def draw(count: int, at: At) -> Keys:
            keys = sampler.draw(random, count, policy_version)
            if bounded:
                self._note(keys)
            return keys

        if not details:
            self._ring.sample(draw, out, stored_at)
            return None
        probabilities, times = np.empty(n, np.float32), np.empty(n, np.uint32)

        def describe(count: int, at: At) -> Keys:
            chosen = sampler.draw_with_details(random, count, policy_version)
            probabilities[at], times[at] = chosen.probabilities, chosen.times_sampled
            if bounded:
                self._note(chosen.keys)
            return chosen.keys

        seconds = np.empty(n, np.float64)
        keys = self._ring.sample(describe, out, seconds)
        return Drawn(keys, probabilities, times, seconds)

    def drawable(self) -> int | None:
        """Draws left, of all rows together, where `max_times_sampled` bounds them; None: any number."""
        return self._sampler.drawable

    def within_bound(self, policy_version: int) -> int | None:
        """Rows that the bound on the lag lets be drawn; None where there is no such bound, or rows differ in weight."""
        sampler = self._sampler
        if self.settings.max_lag_versions is None or not isinstance(sampler, BoundedSampler | RecentSampler):
            return None
        with self._ring.lock:
            return sampler.within_bound(policy_version)

    def find_starvation(self, row_count: int, policy_version: int) -> Starvation | None:
        """What to report when the bound on the lag alone keeps `row_count` rows from being drawn; None: it does not."""
        sampler = self._sampler
        if self.settings.max_lag_versions is None or not isinstance(sampler, BoundedSampler | RecentSampler):
            return None
        with self._ring.lock:
            return sampler.find_starvation(row_count, policy_version)

    def update_priorities(self, keys: Keys, priorities: npt.NDArray[np.float32]) -> int:
        """Set the priority of each row; how many of the keys are of rows that are held.

        Where a key comes twice, the last counts. Priorities are 0 or more, and finite.

        Raises:
            InvalidInputError: keys and priorities differ in number, or a priority is out of range.
            ConflictError: the table's rows have no priorities.
        """
        sampler = self._sampler
        if not isinstance(sampler, PrioritisedSampler):
            raise ConflictError(
                f"the table's sampler is {self.settings.sampler!r}: expected 'prioritised', no other has priorities"
            )
        if len(keys) != len(priorities):
            raise InvalidInputError(f"{len(keys)} keys and {len(priorities)} priorities: expected as many of both")
        with self._ring.lock:
            places = sampler.set_priorities(keys.astype(np.int64), priorities.astype(np.float32))
            if self._pages is not None:
                self._pages.mark(places)
        return len(places)

    def read(self, first_row: int, max_rows: int, *, out: ByteMatrix | None = None) -> tuple[int, ByteMatrix, Seconds]:
        """A copy of up to `max_rows` rows with consecutive keys, from the first one held at or after `first_row`.

        Args:
            out: memory for the copy, `[max_rows or more, row_bytes]`; None: it is new.

        Returns:
            The key of the first of them, the rows, and when each was stored. No rows: the key of the next one to come.
        """
        return self._ring.read(first_row, max_rows, self._sampler.find_alive, out=out)

    def read_block(self, first_row: int, row_count: int) -> tuple[int, ByteMatrix, Seconds]:
        """As `read`, rows among them that were evicted or sampled as often as they may be: a block as it came."""
        return self._ring.read(first_row, row_count)

    def take_changed_pages(self) -> dict[int, bytes]:
        """State of rows (priorities, times sampled) that changed since the last call, by page: key // PAGE_ROWS.

        They count as unchanged from now on, so the caller keeps them until they are in the record. Empty where
        `settings.keeps_state` is false.
        """
        return {} if self._pages is None else dict(self._pages.take_changed())

    def mark_pages(self) -> None:
        """Have every page count as changed: the record lost them."""
        if self._pages is not None:
            with self._ring.lock:
                self._pages.mark(np.arange(self._ring.physical_rows))

    def restore_page(self, page: int, data: bytes) -> None:
        """Set the state of a page's rows, after they were appended and before the first draw.

        Rows that no page speaks of are given the highest priority of those restored. Does nothing where
        `settings.keeps_state` is false.

        Raises:
            BlockError: the page is damaged; nothing of it was restored.
        """
        if self._pages is not None:
            self._pages.restore(page, data)

    def _note(self, keys: Keys) -> None:
        if self._pages is not None:
            self._pages.mark(keys % self._ring.physical_rows)

    def _evict(self) -> None:
        """Have the rows of lowest priority leave, some more than must, when more than the capacity are there."""
        sampler, capacity = self._sampler, self.settings.capacity_rows
        excess = sampler.row_count - capacity
        if excess <= 0 or not isinstance(sampler, PrioritisedSampler):
            return
        places = sampler.find_lowest(excess + capacity // EVICTED_SHARE)
        with self._ring.lock:
            sampler.kill(places)
            if self._pages is not None:
                self._pages.mark(places)


def _make_sampler(settings: MemorySettings, ring: Ring, base_version: int) -> UniformSampler | WeightedSampler:
    bound = settings.max_times_sampled
    match settings.sampler:
        case "uniform":
            return UniformSampler(ring) if bound is None else WeightedSampler(ring, bound)
        case "prioritised":
            return PrioritisedSampler(ring, bound, exponent=settings.exponent)
        case "recent":
            lag = LagBound(settings.max_lag_versions, base_version, settings.bound_setting)
            if bound is None and settings.half_life_versions is None:
                return BoundedSampler(ring, lag)
            return RecentSampler(ring, bound, bound=lag, half_life_versions=settings.half_life_versions)
        case "fifo" | "lifo" if bound is not None:
            return OrderedSampler(ring, bound, newest_first=settings.sampler == "lifo")
    raise ConfigError(
        f"sampler is {settings.sampler!r} with max_times_sampled {bound}: expected uniform, prioritised or recent, "
        "or fifo or lifo with a bound"
    )
