"""A ring of packed rows, filled and emptied by whole blocks.

A row's key is how many rows its table had ever got before it; row `key` lies at place `key % physical_rows`. Keys that
a block skips are a hole: rows that exist nowhere. There are more places than rows that the ring may hold: the
difference is a gap ahead of the write position in which rows that have just left stay intact for a while. A gather runs
without a lock, so it checks afterwards that no row it read could have been overwritten meanwhile, and draws others for
those that could. A torn row is therefore never returned.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import BlockError
from paceline.rows import ByteMatrix
from paceline.tables.stored_times import Seconds, StoredTimes

Keys = npt.NDArray[np.int64]
At = slice | npt.NDArray[np.int64]

Draw = Callable[[int, At], Keys]
"""`draw(n, at)` gives n keys of rows that the ring holds, for the places `at` of a batch. Called with the lock held."""

GAP_ROWS = 8192
"""Smallest gap of a large ring: several blocks, so that a gather of a millisecond is hardly ever overtaken."""
GAP_SHARE = 32
"""The gap is at least this fraction (1/32) of the capacity."""
LOCKED_AFTER = 8
"""After so many overtaken gathers the next one holds writers back, so that a gather always ends."""


class RowStore(Protocol):
    """Places for rows, in host memory or elsewhere. A write never runs beyond the last place."""

    @property
    def nbytes(self) -> int:
        """Bytes set aside."""

    @property
    def row_bytes(self) -> int:
        """Of one row."""

    def write(self, position: int, rows: ByteMatrix) -> None:
        """Put `rows` at `position` and the places after it."""

    def gather(self, index: npt.NDArray[np.int64], out: Any) -> None:
        """Copy the rows at the places `index`, `[n]`, to `out`, `[n, row_bytes]`, of the store's kind of array."""

    def read(self, position: int, out: ByteMatrix) -> None:
        """Copy the rows from `position` on to `out`, `[n, row_bytes]`, in host memory."""


class HostRows:
    """Rows in the process's own memory."""

    def __init__(self, row_count: int, row_bytes: int) -> None:
        self._rows: ByteMatrix = np.empty((row_count, row_bytes), np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes set aside."""
        return self._rows.nbytes

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return int(self._rows.shape[1])

    def write(self, position: int, rows: ByteMatrix) -> None:
        """Put `rows` at `position` and the places after it."""
        self._rows[position : position + len(rows)] = rows

    def gather(self, index: npt.NDArray[np.int64], out: ByteMatrix) -> None:
        """Copy the rows at the places `index` to `out`."""
        # mode="clip" spares numpy a second, checked buffer; it lets the interpreter lock go.
        self._rows.take(index, axis=0, out=out, mode="clip")

    def read(self, position: int, out: ByteMatrix) -> None:
        """Copy the rows from `position` on to `out`."""
        out[:] = self._rows[position : position + len(out)]


def gap_rows_of(capacity_rows: int) -> int:
    """Places that a ring of `capacity_rows` rows has beyond them."""
    return min(capacity_rows, max(GAP_ROWS, capacity_rows // GAP_SHARE))


def _stay(first_row: int, end_row: int) -> None:
    pass


class Ring:
    """The newest blocks whose keys span at most `capacity_rows`. One writer at a time, any number of readers."""

    def __init__(
        self,
        rows: RowStore,
        physical_rows: int,
        capacity_rows: int,
        *,
        on_leave: Callable[[int, int], None] = _stay,
    ) -> None:
        """`on_leave(first_row, end_row)` is told, with the lock held, of rows that leave."""
        self.capacity_rows, self.physical_rows = capacity_rows, physical_rows
        self.lock = threading.Lock()
        """Held for draws and for changes of what the ring holds, never for a copy of rows."""
        self._rows, self._on_leave = rows, on_leave
        self._stored_at = StoredTimes(physical_rows)
        self._blocks: deque[tuple[int, int]] = deque()
        """First and end key of each block held."""
        self._runs: deque[tuple[int, int]] = deque()
        """The same, neighbours joined: more than one where there are holes."""
        self.first_row = 0
        """Key of the oldest row held; `end_row` when there is none."""
        self.end_row = 0
        """Key of the next row."""
        self.row_count = 0
        """Rows held."""
        self._written_to = 0
        """End of the keys whose places a write has touched or announced; ahead of `end_row` while one is under way."""

    @property
    def memory_bytes(self) -> int:
        """Bytes set aside, gap included."""
        return self._rows.nbytes + self._stored_at.nbytes

    def require_fits(self, row_count: int) -> None:
        """Raise BlockError if a block of `row_count` rows would not fit an empty ring."""
        if row_count > self.capacity_rows:
            raise BlockError(f"a block of {row_count} rows: expected at most capacity_rows, {self.capacity_rows}")

    def first_row_after(self, row_count: int) -> int:
        """Key of the oldest row when a block of `row_count` rows has come at `end_row`. Raises as `require_fits`."""
        self.require_fits(row_count)
        with self.lock:
            horizon = self.end_row + row_count - self.capacity_rows
            return next((first for first, _ in self._blocks if first >= horizon), self.end_row)

    def append(
        self,
        first_row: int,
        rows: ByteMatrix,
        *,
        stored_at: float | Seconds,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Add a block, `[n, row_bytes]`, whose keys begin at `first_row`; the oldest blocks leave for it.

        Args:
            first_row: `end_row`, or above it where keys are skipped.
            stored_at: seconds, of the block or of each row.
            then: called with the lock held as the rows become drawable.

        Raises:
            BlockError: it has more rows than the capacity, or its keys do not follow.
        """
        row_count = len(rows)
        self.require_fits(row_count)
        if first_row < self.end_row:
            raise BlockError(
                f"a block with first row {first_row}: expected {self.end_row} or above, the rows before it are known"
            )
        end = first_row + row_count
        with self.lock:
            self._leave_before(end - self.capacity_rows, whole_blocks=True)
            self._written_to = end
        self._copy_in(first_row, rows, stored_at)
        with self.lock:
            if row_count:
                self.row_count += row_count
                self._blocks.append((first_row, end))
                joined = self._runs and self._runs[-1][1] == first_row
                self._runs.append((self._runs.pop()[0] if joined else first_row, end))
            self.end_row = end
            self.first_row = self._blocks[0][0] if self._blocks else end
            if then is not None:
                then()

    def set_end(self, row: int) -> None:
        """Have the next block begin at `row` or above it: the keys from `end_row` to it are a hole."""
        with self.lock:
            if row > self.end_row:
                self._leave_before(row - self.capacity_rows, whole_blocks=True)
                self.end_row = self._written_to = row
                self.first_row = self._blocks[0][0] if self._blocks else row

    def drop_before(self, row: int) -> None:
        """Have every row before `row` leave, from within a block too."""
        with self.lock:
            self._leave_before(row, whole_blocks=False)

    def sample(self, draw: Draw, out: Any, stored_at: Seconds | None = None) -> Keys:
        """Fill `out`, `[n, row_bytes]`, with rows that `draw` chooses, each whole and held when it was drawn.

        Args:
            stored_at: `[n]`, filled with the seconds of each row where it is given.

        Returns:
            Their keys. Raises what `draw` does.
        """
        with self.lock:
            keys, base, first_row = draw(len(out), slice(None)), self._base(), self.first_row
        for _ in range(LOCKED_AFTER):
            self._gather(keys, base, out, stored_at)
            with self.lock:
                # All that was held is intact as a rule, and then no key need be looked at.
                if first_row >= self._written_to - self.physical_rows or not self._replace_overtaken(draw, keys):
                    return keys
                base, first_row = self._base(), int(keys.min())
        with self.lock:
            # No write is announced while the lock is held, and one that is under way touches no row that is held.
            self._replace_overtaken(draw, keys)
            self._gather(keys, self._base(), out, stored_at)
            return keys

    def read(
        self,
        first_row: int,
        max_rows: int,
        narrow: Callable[[int, int], tuple[int, int]] | None = None,
        *,
        out: ByteMatrix | None = None,
    ) -> tuple[int, ByteMatrix, Seconds]:
        """A copy of up to `max_rows` rows with consecutive keys, from the first one held at or after `first_row`.

        Args:
            out: memory for the copy, `[max_rows or more, row_bytes]`; None: it is new.
            narrow: gives the first run of rows, as first and end key, that are to be read of those between two keys;
                called with the lock held.

        Returns:
            The key of the first of them, the rows, and when each was stored. No rows: the key of the next one to come.
        """
        for _ in range(LOCKED_AFTER):
            with self.lock:
                first, end = self._find_run(first_row, max_rows, narrow)
            found = self._copy_out(first, end, out)
            with self.lock:
                if first >= self._written_to - self.physical_rows:
                    return first, *found
        with self.lock:
            first, end = self._find_run(first_row, max_rows, narrow)
            return first, *self._copy_out(first, end, out)

    def held(self, first_row: int, row_count: int) -> npt.NDArray[np.bool_]:
        """Which of so many keys are of rows that are held. Call with the lock held."""
        held = np.zeros(row_count, np.bool_)
        for first, end in self._runs:
            held[max(0, first - first_row) : max(0, end - first_row)] = True
        return held

    def draw_evenly(self, random: np.random.Generator, n: int) -> Keys:
        """`[n]` keys of rows that are held, each with the same probability. Call with the lock held."""
        if len(self._runs) == 1:
            # The same draws as below; numpy adds the first key to them for nothing.
            return random.integers(self.first_row, self.first_row + self.row_count, n)
        return self.keys_at(random.integers(0, self.row_count, n))

    def keys_at(self, offsets: Keys) -> Keys:
        """Keys of the rows that so many held rows are older than. Call with the lock held."""
        firsts = np.array([first for first, _ in self._runs], np.int64)
        ends = np.cumsum([end - first for first, end in self._runs])
        run = np.searchsorted(ends, offsets, side="right")
        # A row's offset within its run, added to the key that the run begins with.
        keys: Keys = offsets - (ends - np.diff(ends, prepend=0))[run] + firsts[run]
        return keys

    def _leave_before(self, row: int, *, whole_blocks: bool) -> None:
        """Have rows before `row` leave; of the block that it lies in, `whole_blocks`: all of them."""
        blocks, first = self._blocks, self.first_row
        leave = first
        while blocks and blocks[0][0] < row:
            begin, end = blocks.popleft()
            leave = end if whole_blocks else min(end, row)
            self.row_count -= leave - begin
            if leave < end:
                blocks.appendleft((leave, end))
        while self._runs and self._runs[0][0] < leave:
            _, end = self._runs.popleft()
            if end > leave:
                self._runs.appendleft((leave, end))
        if leave > first:
            self._on_leave(first, leave)
            self.first_row = blocks[0][0] if blocks else self.end_row

    def _base(self) -> int:
        """A multiple of `physical_rows` at most as many rows below every intact key."""
        lowest = max(0, self._written_to - self.physical_rows)
        return lowest - lowest % self.physical_rows

    def _replace_overtaken(self, draw: Draw, keys: Keys) -> bool:
        """Draw other rows for those whose places a write may have touched; whether there were any."""
        overtaken = np.flatnonzero(keys < self._written_to - self.physical_rows)
        if len(overtaken):
            keys[overtaken] = draw(len(overtaken), overtaken)
        return len(overtaken) > 0

    def _gather(self, keys: Keys, base: int, out: Any, stored_at: Seconds | None) -> None:
        index = keys - base
        # Below 2 * physical_rows. As unsigned numbers, what would be negative is large: the smaller one is the place.
        wrapped = index - self.physical_rows
        np.minimum(index.view(np.uint64), wrapped.view(np.uint64), out=index.view(np.uint64))
        self._rows.gather(index, out)
        if stored_at is not None:
            self._stored_at.gather(index, stored_at)

    def _find_run(
        self, first_row: int, max_rows: int, narrow: Callable[[int, int], tuple[int, int]] | None
    ) -> tuple[int, int]:
        at = bisect_right(self._runs, first_row, key=lambda run: run[1])
        for first, end in list(self._runs)[at:]:
            first = max(first, first_row)
            if narrow is not None:
                first, end = narrow(first, end)
            if first < end:
                return first, min(end, first + max_rows)
        none = max(first_row, self.end_row)
        return none, none

    def _pieces(self, first: int, end: int) -> list[tuple[int, int]]:
        """Position and count of the places of rows with consecutive keys: two pieces where they wrap."""
        begin, count = first % self.physical_rows, end - first
        until_wrap = min(count, self.physical_rows - begin)
        return [(begin, until_wrap)] if until_wrap == count else [(begin, until_wrap), (0, count - until_wrap)]

    def _copy_in(self, first_row: int, rows: ByteMatrix, stored_at: float | Seconds) -> None:
        done = 0
        for position, count in self._pieces(first_row, first_row + len(rows)):
            part = slice(done, done + count)
            self._rows.write(position, rows[part])
            times = stored_at[part] if isinstance(stored_at, np.ndarray) else stored_at
            self._stored_at.write(position, count, times)
            done += count

    def _copy_out(self, first: int, end: int, out: ByteMatrix | None) -> tuple[ByteMatrix, Seconds]:
        rows = np.empty((end - first, self._rows.row_bytes), np.uint8) if out is None else out[: end - first]
        pieces, done = self._pieces(first, end), 0
        for position, count in pieces:
            self._rows.read(position, rows[done : done + count])
            done += count
        return rows, np.concatenate([self._stored_at.read(position, count) for position, count in pieces])
