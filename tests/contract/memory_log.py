"""The double of replay's log: the same promises, in a dictionary that stands for Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.errors import PacelineError, ReplacedError
from paceline.replay.blocks import HeldBlock
from paceline.replay.index import IndexEntry
from paceline.replay.log import OutOfStepError
from paceline.replay.logged import BlockWrite, LoggedBlock, LogState, Position, RecordView


@dataclass
class Shelf:
    """What a Redis would hold of one table."""

    owner: int | None = None
    epoch: int = 0
    state: LogState | None = None
    blocks: list[LoggedBlock] = field(default_factory=list)
    pages: dict[int, bytes] = field(default_factory=dict)

    def lose(self) -> None:
        """As a Redis that comes back empty."""
        self.owner, self.state, self.blocks, self.pages = None, None, [], {}


class MemoryLog:
    """As RedisLog; each one claims the shelf when it is made, as a replay process claims its run."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.replaced = False
        self.epoch = 0
        shelf.owner = id(self)

    def read_state(self) -> LogState | None:
        return None if self._shelf.owner is None else self._shelf.state

    def begin(self, state: LogState, view: RecordView | None = None) -> None:
        if self._shelf.owner not in (None, id(self)):
            self._fence()
        if self._shelf.state is not None and self._shelf.epoch > max(self.epoch, int(view.epoch) if view else 0):
            raise OutOfStepError("an epoch that is not known")
        self._shelf.owner, self._shelf.state, self._shelf.blocks, self._shelf.pages = id(self), state, [], {}
        self._begin_epoch()

    def view(self) -> RecordView | None:
        state = self.read_state()
        if state is None:
            return None
        return RecordView("", b"%d" % self._shelf.epoch, b"%d" % state.inserted, state, self.read_index(), 0, ())

    def settle(self, view: RecordView, state: LogState) -> None:
        if (view.epoch, view.next_row) != (
            b"%d" % self._shelf.epoch,
            b"%d" % self._require(None, begun=False).inserted,
        ):
            raise OutOfStepError("another record")
        self._restate(state)

    def append(self, writes: Sequence[BlockWrite]) -> int:
        for number, write in enumerate(writes):
            try:
                stored = self._append_one(write)
            except PacelineError:
                if number == 0:
                    raise
                stored = False
            if not stored:
                return number
        return len(writes)

    def _append_one(self, write: BlockWrite) -> bool:
        block, header = write.block, write.header
        state = self._require(block.first_row if write.after is None else write.after)
        known = state.positions.get(header.collector_index, Position(0, 0, 0))
        if header.collector_incarnation < known.incarnation and not write.again:
            raise ReplacedError(f"collector {header.collector_index}: a newer incarnation took over")
        is_known = header.collector_incarnation == known.incarnation and header.sequence <= known.sequence
        if is_known and not write.again:
            return False
        # What an earlier epoch had from there on, it takes the place of.
        self._shelf.blocks = [each for each in self._shelf.blocks if each.end_row <= block.first_row]
        self._shelf.blocks.append(replace(block, payload=bytes(block.payload), epoch=self.epoch))
        self._remove(write.removed)
        position = Position(header.collector_incarnation, header.sequence, header.row_count)
        self._shelf.state = replace(
            state,
            inserted=block.end_row,
            sampled=write.sampled,
            consumed=write.consumed,
            dropped=write.dropped,
            positions={**state.positions, header.collector_index: position},
        )
        return True

    def save(
        self,
        *,
        inserted: int,
        sampled: int,
        consumed: int = 0,
        dropped: int = 0,
        removed: Sequence[HeldBlock] = (),
        payload_bytes: int | None = None,
        pages: Mapping[int, bytes] | None = None,
        first_page: int = 0,
    ) -> None:
        state = self._require(inserted)
        self._remove(removed)
        kept = {page: data for page, data in self._shelf.pages.items() if page >= first_page}
        self._shelf.pages = {**kept, **{page: bytes(data) for page, data in (pages or {}).items()}}
        self._shelf.state = replace(state, sampled=sampled, consumed=consumed, dropped=dropped)

    def restate(self, state: LogState, inserted: int) -> None:
        self._require(inserted)
        self._restate(state)

    def _restate(self, state: LogState) -> None:
        kept = self._require(None, begun=False)
        self._begin_epoch()
        self._shelf.state = replace(state, row_spec=kept.row_spec, limiter_json=kept.limiter_json)

    def read_blocks(self, first_row: int = 0) -> Iterator[LoggedBlock]:
        yield from [block for block in self._shelf.blocks if block.end_row > first_row]

    def read_index(self, first_row: int = 0) -> list[IndexEntry]:
        return [
            IndexEntry(block.first_row, block.end_row, block.header, block.epoch)
            for block in self.read_blocks(first_row)
        ]

    def read_oldest_row(self) -> int | None:
        return next((entry.first_row for entry in self.read_index()), None)

    def read_pages(self) -> Iterator[tuple[int, bytes]]:
        yield from list(self._shelf.pages.items())

    def block_count(self) -> int:
        return len(self._shelf.blocks)

    def payload_bytes(self) -> int:
        return sum(len(block.payload) for block in self._shelf.blocks)

    def _remove(self, removed: Sequence[HeldBlock]) -> None:
        if removed:
            last = removed[-1].first_row
            self._shelf.blocks = [block for block in self._shelf.blocks if block.first_row > last]

    def _require(self, inserted: int | None, *, begun: bool = True) -> LogState:
        shelf = self._shelf
        if shelf.owner not in (None, id(self)):
            self._fence()
        if shelf.owner is None or shelf.state is None:
            raise OutOfStepError("lost")
        if begun and not self.epoch:
            raise OutOfStepError("no epoch")
        if inserted is not None and shelf.state.inserted != inserted:
            raise OutOfStepError("out of step")
        return shelf.state

    def _begin_epoch(self) -> None:
        self._shelf.epoch += 1
        self.epoch = self._shelf.epoch

    def _fence(self) -> None:
        self.replaced = True
        raise ReplacedError("another process owns the run")
