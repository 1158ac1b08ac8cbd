"""The double of replay's log: the same promises, in a dictionary that stands for Redis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from paceline.errors import ReplacedError
from paceline.replay.log import LoggedBlock, LogState, OutOfStepError, Position
from paceline.v1 import rows_pb2


@dataclass
class Shelf:
    """What a Redis would hold of one table."""

    owner: int | None = None
    state: LogState | None = None
    blocks: list[LoggedBlock] = field(default_factory=list)


class MemoryLog:
    """As RedisLog; each one claims the shelf when it is made, as a replay process claims its run."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.replaced = False
        shelf.owner = id(self)

    def read_state(self) -> LogState | None:
        return None if self._shelf.owner is None else self._shelf.state

    def begin(self, state: LogState) -> None:
        if self._shelf.owner not in (None, id(self)):
            self._fence()
        self._shelf.owner, self._shelf.state, self._shelf.blocks = id(self), state, []

    def append(
        self,
        block: LoggedBlock,
        header: rows_pb2.BlockHeader,
        *,
        previous: int,
        oldest: int,
        inserted: int,
        sampled: int,
    ) -> bool:
        state = self._require(previous)
        known = state.positions.get(header.collector_index, Position(0, 0, 0))
        if header.collector_incarnation < known.incarnation:
            raise ReplacedError(f"collector {header.collector_index}: a newer incarnation took over")
        if header.collector_incarnation == known.incarnation and header.sequence <= known.sequence:
            return False
        self._shelf.blocks.append(replace(block, rows=bytes(block.rows)))
        self.trim(oldest)
        position = Position(header.collector_incarnation, header.sequence, header.row_count)
        self._shelf.state = replace(
            state,
            last_block=block.number,
            inserted=inserted,
            sampled=sampled,
            positions={**state.positions, header.collector_index: position},
        )
        return True

    def save(self, *, last_block: int, sampled: int) -> None:
        self._shelf.state = replace(self._require(last_block), sampled=sampled)

    def trim(self, oldest: int) -> None:
        self._require(None)
        self._shelf.blocks = [block for block in self._shelf.blocks if block.number >= oldest]

    def read_blocks(self, after: int = 0) -> Iterator[LoggedBlock]:
        yield from [block for block in self._shelf.blocks if block.number > after]

    def block_count(self) -> int:
        return len(self._shelf.blocks)

    def _require(self, last_block: int | None) -> LogState:
        shelf = self._shelf
        if shelf.owner not in (None, id(self)):
            self._fence()
        if shelf.owner is None or shelf.state is None:
            raise OutOfStepError("lost")
        if last_block is not None and shelf.state.last_block != last_block:
            raise OutOfStepError("out of step")
        return shelf.state

    def _fence(self) -> None:
        self.replaced = True
        raise ReplacedError("another process owns the run")
