"""Which blocks the record of a table holds, as this process knows it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True)
class HeldBlock:
    """A block of the record. `header`: to write it to Redis again if Redis loses it; None where it is damaged."""

    first_row: int
    row_count: int
    payload_bytes: int
    header: bytes | None
    epoch: int
    """Of the record, in which it was written."""

    @property
    def end_row(self) -> int:
        """Key of the row after the last one."""
        return self.first_row + self.row_count


class HeldBlocks:
    """Every block of the record, oldest first."""

    def __init__(self) -> None:
        self.payload_bytes = 0
        """Of all of them."""
        self._blocks: deque[HeldBlock] = deque()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def first_row(self) -> int | None:
        """First key of the oldest block; None when there is none."""
        return self._blocks[0].first_row if self._blocks else None

    @property
    def end_row(self) -> int:
        """Key of the row after the newest block; 0 when there is none."""
        return self._blocks[-1].end_row if self._blocks else 0

    @property
    def intact(self) -> list[HeldBlock]:
        """Those that are not damaged."""
        return [held for held in self._blocks if held.header is not None]

    def add(self, held: HeldBlock) -> None:
        """The record has got a block."""
        self._blocks.append(held)
        self.payload_bytes += held.payload_bytes

    def leaving(self, *, stays: int, horizon: int, consumed: int) -> list[HeldBlock]:
        """The oldest blocks, which may leave the record.

        Args:
            stays: key of memory's oldest row; blocks that end before it leave.
            horizon: damaged blocks leave when they end before it, when they would have left memory: whoever wants to
                look at one has that long.
            consumed: whatever ends before it leaves.
        """

        def leaves(held: HeldBlock) -> bool:
            return held.end_row <= max(consumed, horizon if held.header is None else stays)

        return list(takewhile(leaves, self._blocks))

    def remove(self, leaving: list[HeldBlock]) -> None:
        """The record has removed what `leaving` gave."""
        for _ in leaving:
            self.payload_bytes -= self._blocks.popleft().payload_bytes

    def drop_damaged_after(self, row: int) -> None:
        """The record lost every block that ends after `row`; those that are damaged nobody can write again."""
        kept = [held for held in self._blocks if held.header is not None or held.end_row <= row]
        self._blocks = deque(kept)
        self.payload_bytes = sum(held.payload_bytes for held in kept)

    def replace(self, held: HeldBlock, again: HeldBlock) -> None:
        """A block was written again, in another form."""
        self._blocks[self._blocks.index(held)] = again
        self.payload_bytes += again.payload_bytes - held.payload_bytes
