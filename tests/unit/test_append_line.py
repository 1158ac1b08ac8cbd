"""Appends that come while a step is under way share the next one, and each is answered as if it had come alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from contract.memory_log import MemoryLog, Shelf
from integration.waiting import wait_until
from paceline.config import build
from paceline.errors import (
    LimiterTimeoutError,
    ReplacedError,
    StoreFullError,
    StoreReadOnlyError,
    UnavailableError,
)
from paceline.replay import table as table_module
from paceline.replay import tiers as tiers_module
from paceline.replay.logged import BlockWrite
from paceline.replay.metrics import APPEND_ACTIVITIES, ReplayMetrics, TableMetrics
from paceline.replay.settings import limiter_settings, memory_settings
from paceline.replay.table import Appended, Table
from paceline.rows import Block, Column, RowSpec
from paceline.rpc.wire import SentBlock
from paceline.tables.limiter import LimiterSettings
from paceline.telemetry import ActivityClock
from paceline.v1 import rows_pb2

TABLE = "transitions"
SPEC = RowSpec((Column("value", "float64"),))
ROWS = 4
"""Of each block."""
SECONDS = 20.0


class HeldLog(MemoryLog):
    """A record that takes a step only when the test lets it. `faults`: what the next steps do instead."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.steps: list[list[tuple[int, int]]] = []
        """Collector and sequence of each block of each step, as they were asked for."""
        self.faults: list[str] = []
        self.entered, self.passing, self.is_held = threading.Semaphore(0), threading.Semaphore(0), False

    def append(self, writes: Sequence[BlockWrite]) -> int:
        self.steps.append([(write.header.collector_index, write.header.sequence) for write in writes])
        self.entered.release()
        while self.is_held and not self.passing.acquire(timeout=0.01):
            pass
        fault = self.faults.pop(0) if self.faults else None
        if fault == "full":
            raise StoreFullError("no room")
        if fault == "away":
            raise UnavailableError("no connection")
        if fault == "read only":
            raise StoreReadOnlyError("the disk is full")
        stored = super().append(writes)
        if fault == "reply lost":
            raise UnavailableError("the connection was cut")
        return stored


class Bench:
    """A table, and a thread for each append."""

    def __init__(
        self,
        *,
        capacity_rows: int = 1000,
        row_limit: int | None = None,
        limiter: LimiterSettings | None = None,
        **table,
    ) -> None:
        config = build(
            {
                "learner": {"updates": "learner_bound", "batch_size": 1},
                "collector": {"block_rows": ROWS},
                "replay": {"tables": {TABLE: {"capacity_rows": capacity_rows, "limiter": {"min_rows": 1}, **table}}},
            }
        )
        self.shelf = Shelf()
        self.log, self.metrics = HeldLog(self.shelf), ReplayMetrics(CollectorRegistry())
        self.table = Table(
            TABLE,
            SPEC,
            config.replay.tables[TABLE],
            self.log,  # type: ignore[arg-type]
            TableMetrics(self.metrics, TABLE),
            capacity_rows=capacity_rows,
            memory=memory_settings(config, TABLE, SPEC),
            limiter=limiter or limiter_settings(config, TABLE),
            row_limit=row_limit,
            settings_json="{}",
        )
        self.table.begin()
        self.threads = ThreadPoolExecutor(16)

    def append(self, collector: int, *sequences: int, incarnation: int = 1, is_gone: bool = False) -> list[Appended]:
        """What became of a message of these blocks. `is_gone`: its caller is, when it could wait."""
        why_ended = UnavailableError("the caller went away") if is_gone else None
        sent = [self._block(collector, sequence, incarnation) for sequence in sequences]
        clock = ActivityClock(self.metrics.activity_seconds, APPEND_ACTIVITIES, "receive")
        parts = list(self.table.append(sent, lambda: why_ended, clock))
        assert all(parts), "an answer acknowledges a block or more"
        return [done for part in parts for done in part]

    def start(self, collector: int, *sequences: int, **settings: Any) -> Future[list[Appended]]:
        """The same on a thread; it has begun its step, or waits in line, when this returns."""
        waiting, entered = len(self.table._line), len(self.log.steps)
        future = self.threads.submit(self.append, collector, *sequences, **settings)
        wait_until(lambda: len(self.table._line) > waiting or len(self.log.steps) > entered or future.done())
        return future

    def hold(self) -> Future[list[Appended]]:
        """A step of collector 99 that stays under way until `release`."""
        self.log.is_held = True
        return self.start(99, 1)

    def release(self) -> None:
        self.log.is_held = False

    def pass_one(self) -> None:
        """Let the step that is under way go on, and wait for the next one, which is held."""
        steps = len(self.log.steps)
        self.log.passing.release()
        wait_until(lambda: len(self.log.steps) > steps)

    @property
    def stored(self) -> list[tuple[int, int]]:
        """Collector and sequence of each block of the record, in order; memory is checked to hold the same rows."""
        headers = [rows_pb2.BlockHeader.FromString(block.header) for block in self.shelf.blocks]
        values = b"".join(bytes(block.payload) for block in self.shelf.blocks)
        first, rows, _ = self.table.memory.read(0, 10**6)
        assert (first, rows.tobytes()) == (0, values)
        return [(header.collector_index, header.sequence) for header in headers]

    def require_settled(self) -> None:
        """Nothing waits, no row is set aside, and the limiter knows how many there are."""
        limiter = self.table.limiter
        assert not self.table._line
        assert (limiter._reserved, limiter.inserted) == (0, self.table.inserted)

    def _block(self, collector: int, sequence: int, incarnation: int) -> SentBlock:
        block = Block.empty(SPEC, ROWS)
        block.columns["value"] = np.arange(ROWS) + 1000 * collector + 10 * sequence
        header = rows_pb2.BlockHeader(
            collector_index=collector,
            collector_incarnation=incarnation,
            sequence=sequence,
            row_count=ROWS,
            row_spec_digest=SPEC.digest,
            checksum=block.checksum(),
        )
        return SentBlock(header, block.data.data.cast("B"))


@pytest.fixture
def bench():
    made: list[Bench] = []

    def make(**settings: Any) -> Bench:
        made.append(Bench(**settings))
        return made[-1]

    yield make
    for each in made:
        each.release()
        each.threads.shutdown()


def sequences_of(future: Future[list[Appended]]) -> list[int]:
    done = future.result(SECONDS)
    assert all(each.stored_row_count == ROWS and not each.complete for each in done)
    return [each.sequence for each in done]


def test_what_comes_while_a_step_is_under_way_shares_the_next_one_in_the_order_in_which_it_came(bench):
    table = bench()
    first = table.hold()
    waiting = [table.start(0, 1, 2), table.start(1, 1), table.start(2, 1, 2, 3)]
    table.release()
    assert sequences_of(first) == [1]
    assert [sequences_of(each) for each in waiting] == [[1, 2], [1], [1, 2, 3]]
    assert not any(done.duplicate for each in waiting for done in each.result())
    assert table.log.steps[1:] == [[(0, 1), (0, 2), (1, 1), (2, 1), (2, 2), (2, 3)]]
    assert table.stored == [(99, 1), *table.log.steps[1]]
    table.require_settled()


def test_whoever_is_taken_along_is_told_at_the_end_of_that_step_and_waits_for_no_other(bench):
    table = bench()
    table.hold()
    waiting = [table.start(collector, 1) for collector in range(3)]
    table.pass_one()
    later = [table.start(collector, 1) for collector in range(3, 6)]
    table.pass_one()
    assert [sequences_of(each) for each in waiting] == [[1]] * 3
    assert not any(each.done() for each in later)
    table.release()
    assert [sequences_of(each) for each in later] == [[1]] * 3
    assert [len(step) for step in table.log.steps] == [1, 3, 3]
    table.require_settled()


@pytest.mark.parametrize(("limit", "value"), [("TOGETHER_BLOCKS", 4), ("TOGETHER_BYTES", 4 * ROWS * SPEC.row_bytes)])
def test_a_step_has_a_limit_and_what_is_beyond_it_takes_the_next(bench, monkeypatch, limit, value):
    monkeypatch.setattr(table_module, limit, value)
    table = bench()
    table.hold()
    waiting = [table.start(collector, 1, 2) for collector in range(3)]
    table.release()
    assert [sequences_of(each) for each in waiting] == [[1, 2]] * 3
    assert [len(step) for step in table.log.steps] == [1, 4, 2]
    table.require_settled()


def test_a_message_of_more_than_a_step_takes_of_others_goes_in_one(bench, monkeypatch):
    monkeypatch.setattr(table_module, "TOGETHER_BLOCKS", 2)
    table = bench()
    assert [done.sequence for done in table.append(0, 1, 2, 3)] == [1, 2, 3]
    assert table.log.steps == [[(0, 1), (0, 2), (0, 3)]]


def test_a_redis_that_is_full_for_one_is_not_for_those_that_came_along_who_then_go_alone(bench):
    table = bench()
    table.hold()
    waiting = [table.start(collector, 1) for collector in range(4)]
    table.log.faults = ["", "full", "full"]  # all of them, and the first alone
    table.release()
    assert isinstance(waiting[0].exception(SECONDS), StoreFullError)
    assert [sequences_of(each) for each in waiting[1:]] == [[1]] * 3
    assert [len(step) for step in table.log.steps] == [1, 4, 1, 1, 1, 1]
    assert not any(done.duplicate for each in waiting[1:] for done in each.result())
    assert table.stored[0] == (99, 1)
    assert sorted(table.stored[1:]) == [(1, 1), (2, 1), (3, 1)]
    table.require_settled()


@pytest.mark.parametrize(("seconds", "sizes"), [(30.0, [1, 1, 1, 1]), (0.0, [1, 1, 2])], ids=["soon", "later"])
def test_where_redis_was_full_steps_are_shared_some_time_later(bench, monkeypatch, seconds, sizes):
    table = bench()
    table.log.faults = ["full"]
    with pytest.raises(StoreFullError):
        table.append(0, 1)
    monkeypatch.setattr(tiers_module, "FULL_SECONDS", seconds)
    table.hold()
    waiting = [table.start(collector, 1) for collector in range(2)]
    table.release()
    assert [sequences_of(each) for each in waiting] == [[1]] * 2
    assert [len(step) for step in table.log.steps] == sizes


@pytest.mark.parametrize(("fault", "error"), [("away", UnavailableError), ("read only", StoreReadOnlyError)])
def test_what_keeps_redis_from_storing_anything_is_told_to_all_whose_step_it_was(bench, fault, error):
    table = bench()
    table.hold()
    waiting = [table.start(collector, 1) for collector in range(3)]
    table.log.faults = ["", fault]
    table.release()
    assert [type(each.exception(SECONDS)) for each in waiting] == [error] * 3
    assert [len(step) for step in table.log.steps] == [1, 3]
    assert table.stored == [(99, 1)]
    table.require_settled()


def test_a_reply_that_is_lost_costs_no_row_and_doubles_none(bench):
    table = bench()
    table.hold()
    waiting = [table.start(collector, 1, 2) for collector in range(3)]
    table.log.faults = ["", "reply lost"]
    table.release()
    assert [type(each.exception(SECONDS)) for each in waiting] == [UnavailableError] * 3
    for collector in range(3):
        # They were stored, as those learn who ask again.
        done = table.append(collector, 1, 2)
        assert done == [Appended(sequence, ROWS, duplicate=True, complete=False) for sequence in (1, 2)]
    assert table.stored == [(99, 1), *((collector, sequence) for collector in range(3) for sequence in (1, 2))]
    table.require_settled()


def test_samples_run_free_though_the_reply_to_the_last_block_was_lost(bench):
    table = bench(row_limit=ROWS)
    table.log.faults = ["reply lost"]
    with pytest.raises(UnavailableError):
        table.append(0, 1)
    table.table.keep_record()
    assert table.table.complete
    assert table.table.limiter.is_complete


@pytest.mark.parametrize("limit", [64, 1], ids=["in one step", "in several"])
def test_a_block_that_waits_twice_is_stored_once(bench, monkeypatch, limit):
    monkeypatch.setattr(table_module, "TOGETHER_BLOCKS", limit)
    table = bench()
    table.hold()
    waiting = [table.start(0, 1, 2), table.start(0, 1), table.start(0, 1, 2, 3)]
    table.release()
    assert [sequences_of(each) for each in waiting] == [[1, 2], [1], [1, 2, 3]]
    assert table.stored == [(99, 1), (0, 1), (0, 2), (0, 3)]
    assert sum(not done.duplicate for each in waiting for done in each.result()) == 3
    assert table.log.epoch == 1, "nothing had to be brought together"
    table.require_settled()


def test_a_collector_that_was_replaced_while_it_waited_is_refused_and_holds_up_nobody(bench):
    table = bench()
    table.hold()
    waiting = [table.start(0, 1, incarnation=2), table.start(0, 7), table.start(1, 1)]
    table.release()
    assert sequences_of(waiting[0]) == sequences_of(waiting[2]) == [1]
    assert isinstance(waiting[1].exception(SECONDS), ReplacedError)
    assert table.stored == [(99, 1), (0, 1), (1, 1)]
    table.require_settled()


def test_what_is_known_already_is_answered_though_its_turn_has_come(bench, monkeypatch):
    monkeypatch.setattr(table_module, "TOGETHER_BLOCKS", 1)
    table = bench()
    table.hold()
    waiting = [table.start(0, 1), table.start(0, 1, 2), table.start(1, 1)]
    table.release()
    assert [sequences_of(each) for each in waiting] == [[1], [1, 2], [1]]
    assert table.stored[:2] == [(99, 1), (0, 1)]
    assert sorted(table.stored[2:]) == [(0, 2), (1, 1)]
    table.require_settled()


def test_the_last_rows_of_a_run_go_to_whoever_comes_first_and_the_others_learn_that_it_is_complete(bench):
    table = bench(row_limit=3 * ROWS - 1)
    table.hold()
    waiting = [table.start(collector, 1) for collector in range(4)]
    table.release()
    done = [each.result(SECONDS)[0] for each in waiting]
    assert sorted(each.stored_row_count for each in done) == [0, 0, ROWS - 1, ROWS]
    assert all(each.complete for each in done if each.stored_row_count < ROWS)
    assert table.table.complete
    assert table.table.limiter.is_complete
    table.require_settled()


def test_blocks_that_share_a_step_never_have_each_other_leave(bench):
    table = bench(capacity_rows=3 * ROWS)
    table.hold()
    waiting = [table.start(collector, 1) for collector in range(5)]
    table.release()
    assert [sequences_of(each) for each in waiting] == [[1]] * 5
    assert [len(step) for step in table.log.steps[:2]] == [1, 3]
    headers = [rows_pb2.BlockHeader.FromString(block.header) for block in table.shelf.blocks]
    assert [header.first_row for header in headers] == [3 * ROWS, 4 * ROWS, 5 * ROWS]
    first, rows, _ = table.table.memory.read(0, 10**6)
    assert (first, rows.tobytes()) == (3 * ROWS, b"".join(bytes(block.payload) for block in table.shelf.blocks))
    table.require_settled()


def test_one_that_waits_too_long_leaves_the_line_and_is_not_stored(bench, monkeypatch):
    table = bench()
    first = table.hold()
    monkeypatch.setattr(table_module, "LOCK_SECONDS", 0.3)
    hasty = table.start(0, 1)
    monkeypatch.setattr(table_module, "LOCK_SECONDS", 30.0)
    patient = [table.start(1, 1), table.start(2, 1)]
    with pytest.raises(UnavailableError, match="have waited"):
        hasty.result(SECONDS)
    table.release()
    assert [sequences_of(each) for each in (first, *patient)] == [[1]] * 3
    assert table.stored == [(99, 1), (1, 1), (2, 1)]
    table.require_settled()
    assert [done.duplicate for done in table.append(0, 1)] == [False]


def test_one_that_waits_too_long_for_the_step_that_has_taken_it_is_stored_and_counted_once(bench, monkeypatch):
    table = bench()
    table.hold()
    patient = table.start(0, 1)
    monkeypatch.setattr(table_module, "LOCK_SECONDS", 2.0)
    hasty = table.start(1, 1)
    table.pass_one()
    assert table.log.steps[1] == [(0, 1), (1, 1)]
    with pytest.raises(UnavailableError, match="have waited"):
        hasty.result(SECONDS)
    table.release()
    assert sequences_of(patient) == [1]
    assert [done.duplicate for done in table.append(1, 1)] == [True]
    assert table.stored == [(99, 1), (0, 1), (1, 1)]
    table.require_settled()


def test_the_room_of_a_queue_and_the_band_of_a_ratio_are_kept_and_given_back(bench):
    soon = LimiterSettings(min_rows=1, samples_per_insert=None, window_rows=None, deadline_seconds=0.1)
    queue = bench(capacity_rows=4 * ROWS, limiter=soon, queue=True, overflow="block")
    ratio = bench(limiter=replace(soon, samples_per_insert=1, window_rows=8 * ROWS))
    for table in (queue, ratio):
        table.hold()
        waiting = [table.start(collector, 1) for collector in range(3)]
        table.log.faults = ["", "away"]
        # 99's block and three more are set aside, which is all that may come.
        with pytest.raises(LimiterTimeoutError):
            table.append(5, 1)
        table.release()
        assert [type(each.exception(SECONDS)) for each in waiting] == [UnavailableError] * 3
        assert [table.append(collector, 1)[0].duplicate for collector in range(3)] == [False] * 3
        with pytest.raises(LimiterTimeoutError):
            table.append(5, 1)
        table.require_settled()


def test_an_append_whose_caller_is_gone_does_not_go_again(bench):
    table = bench()
    table.hold()
    first, second = table.start(0, 1), table.start(1, 1, is_gone=True)
    table.log.faults = ["", "full", "full"]
    table.release()
    assert isinstance(first.exception(SECONDS), StoreFullError)
    with pytest.raises(UnavailableError, match="the caller went away"):
        second.result(SECONDS)
    assert table.stored == [(99, 1)]
    table.require_settled()


def test_whatever_fails_every_block_is_stored_once_and_in_order_and_answered_as_it_is(bench, monkeypatch):
    monkeypatch.setattr(tiers_module, "FULL_SECONDS", 0.001)
    chance = random.Random(7)
    table = bench(capacity_rows=100_000)
    table.log.faults = chance.choices(["", "full", "away", "reply lost"], weights=[8, 1, 1, 1], k=2000)
    table.log.is_held = True

    def collect(collector: int) -> int:
        """Sends blocks in messages of some, again from the oldest that was not acknowledged; how many were."""
        own, acknowledged = random.Random(collector), 0
        while acknowledged < 60:
            last = min(60, acknowledged + own.randint(1, 4))
            try:
                for done in table.append(collector, *range(acknowledged + 1, last + 1)):
                    assert done.sequence == acknowledged + 1
                    acknowledged += 1
            except (UnavailableError, StoreFullError):
                pass
        return acknowledged

    collecting = [table.threads.submit(collect, collector) for collector in range(8)]
    while not all(each.done() for each in collecting):
        if table.log.entered.acquire(timeout=0.01):
            # Any number of the others may have come by then.
            awaited, until = chance.randint(0, 7), time.monotonic() + 0.02
            while len(table.table._line) < awaited and time.monotonic() < until:
                time.sleep(0.001)
            table.log.passing.release()
    assert [each.result() for each in collecting] == [60] * 8
    for collector in range(8):
        assert [sequence for sender, sequence in table.stored if sender == collector] == list(range(1, 61))
    assert max(len({sender for sender, _ in step}) for step in table.log.steps) > 2
    table.require_settled()
