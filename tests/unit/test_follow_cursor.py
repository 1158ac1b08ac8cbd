"""A follower's cursor against a slow oracle: whatever befalls table and record, it knows each row that is there."""

from __future__ import annotations

import copy
import itertools
import queue
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from prometheus_client import CollectorRegistry

from contract.memory_log import MemoryLog, Shelf
from paceline.config import build
from paceline.replay.following import LentMemory, follow_messages
from paceline.replay.metrics import APPEND_ACTIVITIES, FOLLOW_ACTIVITIES, ReplayMetrics, TableMetrics
from paceline.replay.settings import limiter_settings, memory_settings
from paceline.replay.table import Table
from paceline.rows import Block, Column, RowSpec
from paceline.rpc.shared_memory import part_of
from paceline.rpc.wire import SentBlock
from paceline.telemetry import ActivityClock
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import rows_pb2

TABLE = "transitions"
SPEC = RowSpec((Column("value", "float64"),))
CAPACITY = 40
CONFIG = build(
    {
        "learner": {"updates": "learner_bound", "batch_size": 1},
        "collector": {"block_rows": 8},
        "replay": {"tables": {TABLE: {"capacity_rows": CAPACITY, "limiter": {"min_rows": 1}}}},
    }
)


class OpenStream:
    """A stream whose caller stays."""

    def why_ended(self) -> None:
        return None


Way = tuple[int, int, bool]
"""Rows that a memory has room for, how many its follower leaves there before it releases them, and whether it sends its
last request, which releases none, at the start."""

WAYS = st.integers(1, 30).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(0, rows - 1), st.booleans()))


class Memory:
    """Memory of a follower that looks at rows no sooner than it must."""

    def __init__(self, rows: int, lag: int, closes: bool) -> None:
        self.rows, self.lag, self.closes = rows, lag, closes
        self._bytes = np.zeros(rows * SPEC.row_bytes, np.uint8)
        self.lent = LentMemory(self._bytes, SPEC.row_bytes)
        self._held: list[tuple[int, np.ndarray]] = []

    def hold(self, head: pb.FollowResponse) -> None:
        part = part_of(self._bytes, head.rows_in_memory).reshape(head.row_count, SPEC.row_bytes)
        self._held += enumerate(part, head.first_row)
        assert len(self._held) <= self.rows

    def let_go(self, before: int, take: Callable[[int, np.ndarray], None]) -> None:
        for key, row in self._held:
            if key < before:
                take(key, row.copy())
                row[:] = 0xFF  # replay reads none of it
        self._held = [held for held in self._held if held[0] >= before]


class Cursor(RuleBasedStateMachine):
    """One table of a process that is restarted, and a follower that reads up to some key each time.

    `believed` is what the follower has, by key; the oracle is the table itself, which the other tests prove.
    """

    def __init__(self) -> None:
        super().__init__()
        self.metrics = ReplayMetrics(CollectorRegistry())
        self.shelf, self.saved = Shelf(), Shelf()
        self.values, self.sequences = itertools.count(), itertools.count(1)
        self.believed: dict[int, float] = {}
        self.next_row: int | None = None
        self.last_stored_at: float | None = None
        self.received_end: int | None = None
        self.is_rolled_back = False
        self.table = self._open()

    def _open(self) -> Table:
        table = Table(
            TABLE,
            SPEC,
            CONFIG.replay.tables[TABLE],
            MemoryLog(self.shelf),  # type: ignore[arg-type]
            TableMetrics(self.metrics, TABLE),
            capacity_rows=CAPACITY,
            memory=memory_settings(CONFIG, TABLE, SPEC),
            limiter=limiter_settings(CONFIG, TABLE),
            row_limit=None,
            settings_json="{}",
        )
        if self.shelf.state is None:
            table.begin()
        else:
            table.load(self.shelf.state)
            for _ in table.restore():
                pass
        return table

    @rule(row_count=st.integers(1, 8))
    def append(self, row_count: int) -> None:
        block = Block.empty(SPEC, row_count)
        block.columns["value"] = np.array([next(self.values) for _ in range(row_count)])
        header = rows_pb2.BlockHeader(
            collector_incarnation=1,
            sequence=next(self.sequences),
            row_count=row_count,
            row_spec_digest=SPEC.digest,
            checksum=block.checksum(),
        )
        clock = ActivityClock(self.metrics.activity_seconds, APPEND_ACTIVITIES, "receive")
        sent = SentBlock(header, block.data.data.cast("B"))
        assert [done.duplicate for part in self.table.append([sent], lambda: None, clock) for done in part] == [False]

    @rule()
    def save(self) -> None:
        """Redis writes its file to the disk."""
        self.saved = copy.deepcopy(self.shelf)

    @rule()
    def restart(self) -> None:
        self.table = self._open()

    @precondition(lambda self: self.saved.state is not None)
    @rule()
    def roll_back(self) -> None:
        """Redis and replay die together, and Redis comes back with what it had saved."""
        self.shelf = copy.deepcopy(self.saved)
        self.table = self._open()
        self.is_rolled_back = True

    @precondition(lambda self: self.shelf.blocks and not self.is_rolled_back)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        first_row = data.draw(st.sampled_from([block.first_row for block in self.shelf.blocks]))
        for shelf in (self.shelf, self.saved):  # a roll-back brings back what was lost at the end, not what is damaged
            shelf.blocks = [
                replace(block, payload=b"") if block.first_row == first_row else block for block in shelf.blocks
            ]
        self.table = self._open()

    @rule(ahead=st.integers(0, 60), message_rows=st.integers(1, 20), way=st.one_of(st.none(), WAYS))
    def read(self, ahead: int, message_rows: int, way: Way | None) -> None:
        while not self._read(ahead, message_rows, Memory(*way) if way else None):
            self.believed, self.next_row, self.last_stored_at, self.received_end = {}, None, None, None
        self.is_rolled_back = False
        memory = self.table.memory
        found = {}
        row = memory.first_row
        while row < memory.end_row:
            first, rows, _ = memory.read(row, CAPACITY)
            found.update(
                zip(range(first, first + len(rows)), rows.view(SPEC.dtype)["value"][:, 0].tolist(), strict=True)
            )
            row = first + max(1, len(rows))
        wanted = {key: value for key, value in found.items() if key < (self.next_row or 0)}
        assert {key: self.believed.get(key) for key in wanted} == wanted

    def _read(self, ahead: int, message_rows: int, memory: Memory | None) -> bool:
        """Read up to `ahead` keys further; False: rows were lost, and the follower has to begin anew."""
        cursor = self.next_row or 0
        # Without further requests the stream ends when what is wanted was sent; more than there is would be waited for.
        first = pb.FollowRequest(
            run_id="run",
            table=TABLE,
            from_row=self.next_row,
            wanted_before=max(cursor, min(cursor + ahead, self.table.inserted)),
            last_stored_at=self.last_stored_at,
            received_end_row=self.received_end,
        )
        clock = ActivityClock(self.metrics.activity_seconds, FOLLOW_ACTIVITIES, "idle")
        stream: Any = OpenStream()
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if memory is None or memory.closes:
            requests.put(None)
        for message in follow_messages(
            self.table,
            first,
            iter(requests.get, None),
            lambda request: request,
            stream,
            clock,
            message_rows,
            None if memory is None else memory.lent,
        ):
            head = message.head
            if head.rows_lost:
                requests.put(None)
                return False
            assert head.first_row >= cursor
            assert head.row_count <= message_rows
            cursor = head.first_row + head.row_count
            if head.HasField("rows_in_memory"):
                assert memory is not None
                memory.hold(head)
            else:
                self._believe(head.first_row, np.frombuffer(message.payload, np.uint8))
            if head.row_count:
                self.last_stored_at = float(message.arrays["stored_at"][-1])
            if head.row_count or self.received_end is None:
                self.received_end = cursor
            if memory is not None and not memory.closes:
                memory.let_go(cursor - memory.lag, self._believe)
                requests.put(pb.FollowRequest(released_before=max(0, cursor - memory.lag)))
                if min(first.wanted_before, self.table.memory.end_row) - cursor <= memory.rows - memory.lag:
                    requests.put(None)
        if memory is not None:
            memory.let_go(cursor, self._believe)
        assert cursor >= min(first.wanted_before, self.table.memory.end_row)
        self.next_row = cursor
        return True

    def _believe(self, first_row: int, payload: np.ndarray) -> None:
        for key, value in enumerate(payload.view(np.float64).tolist(), first_row):
            assert key not in self.believed
            self.believed[key] = value


@settings(max_examples=300, deadline=None)
@given(
    blocks=st.lists(st.integers(1, 8), min_size=1, max_size=8),
    ahead=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    message_rows=st.integers(1, 20),
    way=WAYS,
)
def test_rows_stay_in_memory_until_they_are_released(
    blocks: list[int], ahead: list[int], message_rows: int, way: Way
) -> None:
    cursor = Cursor()
    for row_count in blocks:
        cursor.append(row_count)
    for rows in ahead:
        cursor.read(rows, message_rows, way)


TestCursor = Cursor.TestCase
TestCursor.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
