"""A ring of packed rows in memory, filled and emptied by whole blocks.

Rows have absolute numbers that only grow; row `a` lies at physical row `a % physical_rows`. There are more physical
rows than the ring may hold: the difference is a gap ahead of the write position in which rows that have just left stay
intact for a while. A gather runs without a lock, so it checks afterwards that no row it read could have been
overwritten meanwhile, and draws again if one could. A torn row is therefore never returned.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.errors import BlockError, NotFoundError
from paceline.rows import ByteMatrix

Draw = Callable[[int, int], npt.NDArray[np.int64]]
"""`draw(row_count, n)` gives n offsets of rows, 0 (the oldest) to row_count - 1."""

GAP_ROWS = 8192
"""Smallest gap of a large ring: several blocks, so that a gather of a millisecond is hardly ever overtaken."""
GAP_SHARE = 32
"""The gap is at least this fraction (1/32) of the capacity."""
LOCKED_AFTER = 8
"""After so many overtaken gathers the next one holds writers back, so that a gather always ends."""


@dataclass(frozen=True)
class _Held:
    number: int
    start: int
    row_count: int


class Ring:
    """The newest blocks that fit `capacity_rows` together. One writer at a time, any number of readers."""

    def __init__(self, row_bytes: int, capacity_rows: int, gap_rows: int | None = None) -> None:
        if gap_rows is None:
            gap_rows = min(capacity_rows, max(GAP_ROWS, capacity_rows // GAP_SHARE))
        self.capacity_rows = capacity_rows
        self._physical_rows = capacity_rows + gap_rows
        self._rows: ByteMatrix = np.empty((self._physical_rows, row_bytes), np.uint8)
        self._lock = threading.Lock()
        self._blocks: deque[_Held] = deque()
        self._first = self._end = 0
        self._written_to = 0
        """End of the rows that a write has touched or announced; ahead of `_end` while one is under way."""

    @property
    def row_count(self) -> int:
        """Rows that can be drawn now."""
        with self._lock:
            return self._end - self._first

    @property
    def block_count(self) -> int:
        """Blocks held now."""
        return len(self._blocks)

    @property
    def first_block(self) -> int | None:
        """Number of the oldest block, or None when there is none."""
        with self._lock:
            return self._blocks[0].number if self._blocks else None

    @property
    def memory_bytes(self) -> int:
        """Bytes set aside for rows, gap included."""
        return self._rows.nbytes

    def removed_by(self, row_count: int) -> int:
        """How many of the oldest blocks leave when a block of `row_count` rows comes.

        Raises:
            BlockError: it would not fit an empty ring.
        """
        if row_count > self.capacity_rows:
            raise BlockError(f"a block of {row_count} rows: expected at most capacity_rows, {self.capacity_rows}")
        excess, count = self._end - self._first + row_count - self.capacity_rows, 0
        for held in self._blocks:
            if excess <= 0:
                break
            excess -= held.row_count
            count += 1
        return count

    def first_block_after(self, row_count: int) -> int | None:
        """Number of the block that will be the oldest when a block of `row_count` rows has come; None: the new one."""
        removed = self.removed_by(row_count)
        return self._blocks[removed].number if removed < len(self._blocks) else None

    def append(self, number: int, rows: ByteMatrix) -> list[int]:
        """Add a block, `[n, row_bytes]`; gives the numbers of the blocks that left for it.

        Raises:
            BlockError: it has more rows than the capacity, or its number does not follow.
        """
        row_count = len(rows)
        if self._blocks and number <= self._blocks[-1].number:
            raise BlockError(f"block {number} after block {self._blocks[-1].number}: numbers must grow")
        with self._lock:
            removed = [self._blocks.popleft() for _ in range(self.removed_by(row_count))]
            if removed:
                self._first = removed[-1].start + removed[-1].row_count
            start = self._end
            self._written_to = start + row_count
        self._copy_in(start, rows)
        with self._lock:
            self._end = start + row_count
            self._blocks.append(_Held(number, start, row_count))
        return [held.number for held in removed]

    def sample(self, draw: Draw, out: ByteMatrix) -> None:
        """Fill `out`, `[n, row_bytes]`, with rows that `draw` chooses, each whole and live when it was drawn.

        Raises:
            NotFoundError: the ring is empty.
        """
        for _ in range(LOCKED_AFTER):
            with self._lock:
                first, row_count = self._first, self._end - self._first
            lowest = self._gather(first, row_count, draw, out)
            with self._lock:
                intact = lowest >= self._written_to - self._physical_rows
            if intact:
                return
        with self._lock:
            # No write is announced while the lock is held, but one may be under way: rows that it can touch are out.
            first = max(self._first, self._written_to - self._physical_rows)
            self._gather(first, self._end - first, draw, out)

    def blocks_after(self, number: int) -> Iterator[tuple[int, ByteMatrix]]:
        """Number and a copy of the rows of every block after `number`, oldest first. Call where no write can be."""
        for held in list(self._blocks):
            if held.number > number:
                index = np.arange(held.start, held.start + held.row_count) % self._physical_rows
                yield held.number, self._rows[index]

    def _gather(self, first: int, row_count: int, draw: Draw, out: ByteMatrix) -> int:
        if row_count < 1:
            raise NotFoundError("the ring is empty")
        offsets = draw(row_count, len(out))
        index = offsets + first % self._physical_rows
        index -= (index >= self._physical_rows) * self._physical_rows
        # mode="clip" spares numpy a second, checked buffer; it lets the interpreter lock go.
        np.take(self._rows, index, axis=0, out=out, mode="clip")
        return first + int(offsets.min())

    def _copy_in(self, start: int, rows: ByteMatrix) -> None:
        begin = start % self._physical_rows
        until_wrap = min(len(rows), self._physical_rows - begin)
        self._rows[begin : begin + until_wrap] = rows[:until_wrap]
        self._rows[: len(rows) - until_wrap] = rows[until_wrap:]
