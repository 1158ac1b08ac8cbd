"""Which blocks the record of a table holds, as this process knows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from paceline.replay.index import IndexEntry, header_of
from paceline.v1 import rows_pb2


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

    def is_at(self, entry: IndexEntry) -> bool:
        """Whether an entry of the record's index is of this block, in whatever form it was written."""
        if entry.first_row != self.first_row or entry.end_row != self.end_row:
            return False
        if self.header is None or self.header == entry.header:
            return True
        found = header_of(entry)
        return found is not None and _sender(found) == _sender(rows_pb2.BlockHeader.FromString(self.header))


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

    def rewrite(self, after: int, write: Callable[[HeldBlock], HeldBlock]) -> int:
        """Have `write` write every intact block that ends after row `after` again, in order; how many it did.

        It gives what the record has then, which is noted at once: it may fail in the midst.
        """
        count = 0
        for place, held in enumerate(list(self._blocks)):
            if held.header is not None and held.end_row > after:
                again = write(held)
                self._blocks[place] = again
                self.payload_bytes += again.payload_bytes - held.payload_bytes
                count += 1
        return count

    def compare(self, index: Sequence[IndexEntry]) -> int | None:
        """Note where the record has each block now; the key from which on it lacks one, or has others than these.

        Those that it lacks and that nobody can write again are held no more: damaged ones, and the oldest, which were
        leaving when a step was cut. None: it has all.
        """
        entries = {entry.first_row: entry for entry in index}
        oldest = index[0].first_row if index else None
        kept: deque[HeldBlock] = deque()
        differs: int | None = None
        for held in self._blocks:
            entry = entries.get(held.first_row)
            if entry is not None and held.is_at(entry):
                kept.append(held if held.epoch == entry.epoch else replace(held, epoch=entry.epoch))
            elif held.header is not None and (entry is not None or oldest is None or held.first_row > oldest):
                differs = held.first_row if differs is None else differs
                kept.append(held)
        self._blocks, self.payload_bytes = kept, sum(held.payload_bytes for held in kept)
        return differs


def _sender(header: rows_pb2.BlockHeader) -> tuple[int, int, int]:
    return header.collector_index, header.collector_incarnation, header.sequence
