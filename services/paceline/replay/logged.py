"""What the record of one table says, as values: its blocks, its counters, and the last block of each collector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.replay.blocks import HeldBlock
from paceline.replay.index import IndexEntry
from paceline.rows import RowSpec
from paceline.v1 import rows_pb2


@dataclass(frozen=True)
class Position:
    """The last block of one collector."""

    incarnation: int
    sequence: int
    stored_row_count: int


@dataclass(frozen=True)
class LogState:
    """Everything that the record says beside blocks and pages."""

    row_spec: RowSpec
    limiter_json: str
    inserted: int = 0
    """Rows ever inserted: the key of the next row."""
    sampled: int = 0
    consumed: int = 0
    """Of a queue: key of the first row that was not consumed."""
    dropped: int = 0
    """Of a queue: rows that left before any follower got them."""
    positions: Mapping[int, Position] = field(default_factory=dict)
    """By the collector's index."""


@dataclass(frozen=True)
class LoggedBlock:
    """A block as the record holds it; nothing in it has been checked when it was read."""

    first_row: int
    row_count: int
    header: bytes
    payload: bytes | memoryview
    epoch: int = field(default=0, compare=False)
    """In which it was written, where it was read."""

    @property
    def end_row(self) -> int:
        """Key of the row after the last one."""
        return self.first_row + self.row_count


@dataclass(frozen=True)
class BlockWrite:
    """A block to store, and what changes with it."""

    block: LoggedBlock
    """The record's next row becomes its `end_row`."""
    header: rows_pb2.BlockHeader
    """What `block.header` says."""
    removed: Sequence[HeldBlock] = ()
    """The blocks that leave, in order: the oldest ones of the record, without a gap, those that were read and found
    damaged among them."""
    sampled: int = 0
    consumed: int = 0
    dropped: int = 0
    """The counters with this block."""
    again: bool = False
    """Whether it was stored before, as its collector's position may say; it is stored all the same."""
    after: int | None = None
    """Key of the row that the record believes comes next, where a hole lies between it and the block; None: it is the
    block's first row."""


@dataclass(frozen=True)
class RecordView:
    """What the record says and which blocks it has, as one process read it of one run of the server."""

    server: str
    epoch: bytes
    """Its latest; empty where it has none."""
    next_row: bytes
    """What it gave for `state.inserted`, which takes in blocks that came about in part of a step."""
    state: LogState
    index: Sequence[IndexEntry]
    """In order, up to `state.inserted`."""
    uncounted_bytes: int
    """Of payloads that it has not counted yet."""
    orphans: Sequence[int]
    """First rows of payloads that no block has."""
