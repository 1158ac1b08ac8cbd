"""Appends that come while a step is under way share the next one, and each is answered as if it had come alone."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from contract.memory_log import MemoryLog, Shelf
from integration.waiting import wait_until
from paceline.config import build
from paceline.errors import ReplacedError, StoreFullError, UnavailableError
from paceline.replay import table as table_module
from paceline.replay.logged import BlockWrite
from paceline.replay.metrics import APPEND_ACTIVITIES, ReplayMetrics, TableMetrics
from paceline.replay.settings import limiter_settings, memory_settings
from paceline.replay.table import Appended, Table
from paceline.rows import Block, Column, RowSpec
from paceline.rpc.wire import SentBlock
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
        self.entered, self.gate = threading.Semaphore(0), threading.Event()
        self.gate.set()

    def append(self, writes: Sequence[BlockWrite]) -> int:
        self.steps.append([(write.header.collector_index, write.header.sequence) for write in writes])
        self.entered.release()
        assert self.gate.wait(SECONDS)
        fault = self.faults.pop(0) if self.faults else None
        if fault == "full":
            raise StoreFullError("no room")
        if fault == "away":
            raise UnavailableError("no connection")
        stored = super().append(writes)
        if fault == "reply lost":
            raise UnavailableError("the connection was cut")
        return stored


class Bench:
    """A table, and a thread for each append."""

    def __init__(self, *, capacity_rows: int = 1000, row_limit: int | None = None) -> None:
        tables = {TABLE: {"capacity_rows": capacity_rows, "limiter": {"min_rows": 1}}}
        config = build(
            {
                "learner": {"updates": "learner_bound", "batch_size": 1},
                "collector": {"block_rows": ROWS},
                "replay": {"tables": tables},
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
            limiter=limiter_settings(config, TABLE),
            row_limit=row_limit,
            settings_json="{}",
        )
        self.table.begin()
        self.threads = ThreadPoolExecutor(16)

    def append(self, collector: int, *sequences: int, incarnation: int = 1) -> list[Appended]:
        """What became of a message of these blocks."""
        sent = [self._block(collector, sequence, incarnation) for sequence in sequences]
        clock = ActivityClock(self.metrics.activity_seconds, APPEND_ACTIVITIES, "receive")
        parts = list(self.table.append(sent, lambda: None, clock))
        assert all(parts), "an answer acknowledges a block or more"
        return [done for part in parts for done in part]

    def start(self, collector: int, *sequences: int, incarnation: int = 1) -> Future[list[Appended]]:
        """The same on a thread; it has begun its step, or waits in line, when this returns."""
        waiting, entered = len(self.table._line), len(self.log.steps)
        future = self.threads.submit(self.append, collector, *sequences, incarnation=incarnation)
        wait_until(lambda: len(self.table._line) > waiting or len(self.log.steps) > entered or future.done())
        return future

    def hold(self) -> Future[list[Appended]]:
        """A step of collector 99 that stays under way until `release`."""
        self.log.gate.clear()
        return self.start(99, 1)

    def release(self) -> None:
        self.log.gate.set()

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

    def make(**settings: int) -> Bench:
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
    in_line = [[(0, 1), (0, 2)], [(1, 1)], [(2, 1), (2, 2), (2, 3)]]
    # Whoever gets its turn comes first; the others keep their order.
    orders = [[own, *(each for each in in_line if each is not own)] for own in in_line]
    assert table.log.steps[1:] in [[list(itertools.chain(*order))] for order in orders]
    assert table.stored == [(99, 1), *table.log.steps[1]]
    table.require_settled()


@pytest.mark.parametrize(
    ("limit", "value", "sizes"),
    [("TOGETHER_BLOCKS", 4, {2, 4}), ("TOGETHER_BYTES", 4 * ROWS * SPEC.row_bytes, {2, 4})],
)
def test_a_step_has_a_limit_and_what_is_beyond_it_takes_the_next(bench, monkeypatch, limit, value, sizes):
    monkeypatch.setattr(table_module, limit, value)
    table = bench()
    table.hold()
    waiting = [table.start(collector, 1, 2) for collector in range(3)]
    table.release()
    assert [sequences_of(each) for each in waiting] == [[1, 2]] * 3
    assert {len(step) for step in table.log.steps[1:]} == sizes
    table.require_settled()


def test_a_message_of_more_than_a_step_takes_of_others_goes_in_one(bench, monkeypatch):
    monkeypatch.setattr(table_module, "TOGETHER_BLOCKS", 2)
    table = bench()
    assert [done.sequence for done in table.append(0, 1, 2, 3)] == [1, 2, 3]
    assert table.log.steps == [[(0, 1), (0, 2), (0, 3)]]


def test_a_failure_is_told_to_the_append_whose_turn_it_was_and_the_others_are_stored(bench):
    table = bench()
    table.hold()
    waiting = [table.start(collector, 1) for collector in range(3)]
    table.log.faults = ["", "full", "full"]  # all of them, and the first alone
    table.release()
    outcomes = [each.exception(SECONDS) for each in waiting]
    (failed,) = (number for number, error in enumerate(outcomes) if error is not None)
    assert isinstance(outcomes[failed], StoreFullError)
    assert sorted(table.stored) == sorted([(99, 1), *((number, 1) for number in range(3) if number != failed)])
    assert all(not each.result()[0].duplicate for number, each in enumerate(waiting) if number != failed)
    table.require_settled()


def test_a_reply_that_is_lost_costs_no_row_and_doubles_none(bench):
    table = bench()
    table.hold()
    waiting = [table.start(collector, 1, 2) for collector in range(3)]
    table.log.faults = ["", "reply lost"]
    table.release()
    outcomes = [each.exception(SECONDS) for each in waiting]
    (failed,) = (number for number, error in enumerate(outcomes) if error is not None)
    assert isinstance(outcomes[failed], UnavailableError)
    for number, each in enumerate(waiting):
        # They were stored; the one that was told of the failure finds that out as it asks again.
        done = table.append(number, 1, 2) if number == failed else each.result()
        assert [(one.sequence, one.duplicate, one.stored_row_count) for one in done] == [
            (1, True, ROWS),
            (2, True, ROWS),
        ]
    assert sorted(table.stored) == [(collector, sequence) for collector in range(3) for sequence in (1, 2)] + [(99, 1)]
    table.require_settled()


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
    # Whether the older one came first or not; what it is told then is that it was stored.
    refused = waiting[1].exception(SECONDS)
    assert refused is None or isinstance(refused, ReplacedError)
    assert (0, 7) in table.stored if refused is None else (0, 7) not in table.stored
    with pytest.raises(ReplacedError):
        table.append(0, 8)
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
    monkeypatch.setattr(table_module, "LOCK_SECONDS", 0.2)
    table = bench()
    first = table.hold()
    with pytest.raises(UnavailableError, match=r"have waited 0\.2 s for Redis"):
        table.append(0, 1)
    table.release()
    assert sequences_of(first) == [1]
    table.require_settled()
    assert table.stored == [(99, 1)]
    assert [done.duplicate for done in table.append(0, 1)] == [False]


def test_one_that_waits_too_long_for_a_step_that_has_taken_it_is_stored_and_counted_once(bench, monkeypatch):
    table = bench()
    first = table.hold()
    patient = table.start(0, 1)
    monkeypatch.setattr(table_module, "LOCK_SECONDS", 1.0)
    hasty = table.start(1, 1)
    assert table.log.entered.acquire(timeout=SECONDS)  # collector 99's step
    # The next step, which has both, is held as well.
    table.log.gate.set()
    table.log.gate.clear()
    assert table.log.entered.acquire(timeout=SECONDS)
    assert sequences_of(first) == [1]
    assert len(table.log.steps[1]) == 2
    if table.log.steps[1][0] == (0, 1):
        assert isinstance(hasty.exception(SECONDS), UnavailableError)
        table.release()
        assert sequences_of(patient) == [1]
        wait_until(lambda: len(table.stored) == 3)
        assert [done.duplicate for done in table.append(1, 1)] == [True]
    else:  # the hasty one has got its turn, and the step is its own
        table.release()
        assert sequences_of(hasty) == sequences_of(patient) == [1]
    assert sorted(table.stored) == [(0, 1), (1, 1), (99, 1)]
    table.require_settled()


def test_whatever_fails_every_block_is_stored_once_and_in_order_and_answered_as_it_is(bench):
    chance = random.Random(7)
    table = bench(capacity_rows=100_000)

    table.log.faults = chance.choices(["", "full", "away", "reply lost"], weights=[8, 1, 1, 1], k=2000)

    def collect(collector: int) -> int:
        """Sends blocks in messages of some, again from the oldest that was not acknowledged; how many were."""
        own, acknowledged = random.Random(collector), 0
        while acknowledged < 120:
            last = min(120, acknowledged + own.randint(1, 4))
            try:
                for done in table.append(collector, *range(acknowledged + 1, last + 1)):
                    assert done.sequence == acknowledged + 1
                    acknowledged += 1
            except (UnavailableError, StoreFullError):
                pass
        return acknowledged

    assert list(table.threads.map(collect, range(8))) == [120] * 8
    for collector in range(8):
        assert [sequence for sender, sequence in table.stored if sender == collector] == list(range(1, 121))
    assert max(len({sender for sender, _ in step}) for step in table.log.steps) > 1
    table.require_settled()
