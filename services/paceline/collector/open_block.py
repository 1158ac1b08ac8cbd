"""The block that rows are written into, until it is full or old."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.replica import LearnerClock
from paceline.rows import Block, ByteMatrix, RowSpec

Columns = Mapping[str, npt.NDArray[Any]]


class OpenBlock:
    """Takes rows in order, and seals them into blocks.

    Stamps are columns with one value for all rows from now on: they are written ahead, once for a block and a change,
    not once for each row.
    """

    def __init__(
        self,
        spec: RowSpec,
        *,
        block_rows: int,
        block_seconds: float,
        stamps: Mapping[str, float],
        clock: LearnerClock,
    ) -> None:
        """Seal blocks of `block_rows` rows; one that is `block_seconds` old is due with fewer.

        `clock` gives the times that rows are stamped with, here and in the fillers.
        """
        self.spec, self.clock = spec, clock
        self._block_rows, self._block_seconds = block_rows, block_seconds
        self._stamps = dict(stamps)
        self._end, self._due_at = 0, 0.0
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._open()

    @property
    def row_count(self) -> int:
        """Rows in the open block."""
        return self._end

    def stamp(self, stamps: Mapping[str, float]) -> None:
        """Give these columns these values, in all rows from now on."""
        self._stamps.update(stamps)
        self._stamp_rest()

    def make_rows(self, row_count: int) -> Block:
        """Rows like those of the block, with its stamps, to be filled elsewhere and taken by `take_rows`."""
        made = Block.empty(self.spec, row_count)
        for name, value in self._stamps.items():
            made.columns[name][:] = value
        return made

    def add_columns(self, columns: Columns, row_count: int) -> list[Block]:
        """Take rows by their columns that are no stamps; the blocks that they filled."""
        sealed, taken = [], 0
        while taken < row_count:
            begin, end = self._reserve(row_count - taken)
            size = end - begin
            for name, values in columns.items():
                self._columns[name][begin:end] = values if size == row_count else values[taken : taken + size]
            taken += size
            if end == self._block_rows:
                sealed.append(self._seal())
        return sealed

    def add_rows(self, rows: ByteMatrix) -> list[Block]:
        """Take whole rows, whose own stamps they keep; the blocks that they filled."""
        sealed, taken = [], 0
        while taken < len(rows):
            begin, end = self._reserve(len(rows) - taken)
            self._block.data[begin:end] = rows[taken : taken + end - begin]
            taken += end - begin
            if end == self._block_rows:
                sealed.append(self._seal())
        return sealed

    def take_due(self) -> Block | None:
        """The open block if it is due by time."""
        return self.take() if time.monotonic() >= self._due_at else None

    def take(self) -> Block | None:
        """The rows of the open block, however few; None if there are none."""
        return self._seal() if self._end else None

    def drop_episode(self, episode: int) -> int:
        """Take the rows that hold steps of an episode out; how many there were."""
        holds = self._columns["episode"][: self._end] == episode
        kept = ~holds.reshape(self._end, -1).any(axis=1) if self._end else holds
        count = int(np.count_nonzero(kept))
        dropped = self._end - count
        if dropped:
            self._block.data[:count] = self._block.data[: self._end][kept]
            self._end = count
            self._stamp_rest()
        return dropped

    def _reserve(self, row_count: int) -> tuple[int, int]:
        """Begin and end of the next rows of the open block, at most so many."""
        begin = self._end
        if begin == 0:
            self._due_at = time.monotonic() + self._block_seconds
        self._end = min(begin + row_count, self._block_rows)
        return begin, self._end

    def _seal(self) -> Block:
        self._columns["sealed_at"][: self._end] = self.clock.stamp()
        block = self._block if self._end == self._block_rows else self._block.first(self._end)
        self._open()
        return block

    def _open(self) -> None:
        self._block, self._end, self._due_at = Block.empty(self.spec, self._block_rows), 0, 0.0
        records = self._block.columns
        self._columns = {name: records[name] for name in records.dtype.names or ()}
        self._stamp_rest()

    def _stamp_rest(self) -> None:
        for name, value in self._stamps.items():
            self._columns[name][self._end :] = value
