"""Batches of several shards, from sources that a test makes come and go."""

from __future__ import annotations

import collections
import time
from contextlib import suppress

import numpy as np
import pytest
import structlog
import torch
from prometheus_client import CollectorRegistry

from chi_squared import assert_as_likely_as
from paceline.errors import DeadlineError, NotFoundError, StarvedError, StarvedForGoodError, UnavailableError
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import SHARD_BITS, Batch, RowCounts, ShardedSource, sharded
from paceline.tables.memory import MemorySettings, TableMemory


class Shard:
    """Gives batches of 4 rows, all of the shard's number, with keys counted through."""

    def __init__(self, number: int, row_count: int, *, has_details: bool = False) -> None:
        self.number, self.row_count, self.has_details = number, row_count, has_details
        self.is_away = False
        self.is_held_back = False
        self.refusal: Exception | None = None
        self.given = 0
        self.options: dict[str, object] = {}
        self.priorities: dict[int, float] = {}
        self.counts: RowCounts | None = None
        self.given_back = 0
        self.version = 0
        self._rows = torch.full((4, 8), number, dtype=torch.uint8)

    def next_batch(self, seconds: float) -> Batch:
        if self.refusal is not None:
            raise self.refusal
        if self.is_away or self.is_held_back:
            if seconds:
                time.sleep(seconds)
            raise DeadlineError(f"no batch within {seconds:g} s: the limiter holds samples back")
        keys = np.arange(self.given, self.given + 4)
        self.given += 4
        details = (keys, np.full(4, 0.5, np.float32), np.full(4, 7.0)) if self.has_details else ()
        return Batch(self._rows, self.row_count, 10 * self.row_count, *details, **self.options)

    def update_priorities(self, keys, priorities) -> None:
        self.priorities.update(zip(keys.tolist(), priorities.tolist(), strict=True))

    def set_policy_version(self, version: int) -> None:
        self.version = version

    def give_back(self, row_count: int) -> None:
        self.given_back += row_count

    def close(self) -> None: ...


class TableShard:
    """Draws from a table in memory; a row is its number in 8 bytes.

    `is_live`: it knows its table at any time, as a source that follows does. Another one only says what it knew when it
    drew a batch.
    """

    is_away = False

    def __init__(self, *, rows_at_once: int, is_live: bool = False, **settings: object) -> None:
        self.memory = TableMemory(MemorySettings(10_000, **settings), 8)
        self.version = 0
        self.given_back = 0
        self.waits: list[float] = []
        self._is_live = is_live
        self._random = np.random.default_rng(5)
        self._rows = torch.empty((rows_at_once, 8), dtype=torch.uint8)

    def append(self, *numbers: int, version: int = 0) -> None:
        rows = np.array(numbers, np.int64).view(np.uint8).reshape(-1, 8)
        versions = np.full(len(rows), version)
        self.memory.append(self.memory.end_row, rows, stored_at=1.0, versions=versions)

    @property
    def counts(self) -> RowCounts | None:
        return self._count() if self._is_live else None

    def next_batch(self, seconds: float) -> Batch:
        self.waits.append(seconds)
        drawable, starvation = self.memory.drawable(), self.memory.find_starvation(len(self._rows), self.version)
        if starvation is not None:
            raise StarvedError(str(starvation))
        if drawable is not None and drawable < len(self._rows):
            raise DeadlineError(f"{drawable} draws are left")
        try:
            self.memory.sample(self._random, self._rows.numpy(), policy_version=self.version)
        except UnavailableError as error:
            raise DeadlineError(str(error)) from error
        counts = self._count()
        return Batch(
            self._rows,
            counts.table_row_count,
            counts.inserted_row_count,
            drawable_row_count=counts.drawable_row_count,
        )

    def give_back(self, row_count: int) -> None:
        self.given_back += row_count

    def update_priorities(self, keys, priorities) -> None: ...

    def set_policy_version(self, version: int) -> None:
        self.version = version

    def close(self) -> None: ...

    def _count(self) -> RowCounts:
        return RowCounts(self.memory.row_count, self.memory.end_row, self.memory.within_bound(self.version))


def join(
    *shards: Shard | TableShard,
    batch_size: int = 30,
    registry: CollectorRegistry | None = None,
    counts_draws: bool = False,
) -> ShardedSource:
    metrics = LearnerMetrics(registry or CollectorRegistry())
    return ShardedSource(shards, batch_size=batch_size, seed=3, metrics=metrics, counts_draws=counts_draws)


def row_numbers(batch: Batch) -> np.ndarray:
    return batch.rows.numpy().copy().view(np.int64)[:, 0]


def count_rows(source: ShardedSource, batch_count: int, row_count: int) -> np.ndarray:
    """How often each of the rows 0, 1, ... is in the next batches."""
    drawn = np.concatenate([row_numbers(source.next_batch(1)) for _ in range(batch_count)])
    return np.bincount(drawn, minlength=row_count)


def numbers(batch: Batch) -> list[int]:
    return batch.rows[:, 0].tolist()


def skips(registry: CollectorRegistry, shard: int) -> float:
    return registry.get_sample_value("paceline_learner_shard_skips_total", {"shard": str(shard)}) or 0


def test_rows_come_from_each_shard_in_proportion_to_its_rows():
    source = join(Shard(0, 100), Shard(1, 300), batch_size=50)
    counted: collections.Counter[int] = collections.Counter()
    for _ in range(400):
        counted.update(numbers(source.next_batch(1)))
    # 20,000 rows: 4 standard deviations are 245.
    assert abs(counted[0] - 5000) < 245


def test_a_shard_that_has_no_rows_yet_is_waited_for(monkeypatch):
    monkeypatch.setattr(sharded, "HELD_BACK_SECONDS", 0.0)
    late = Shard(1, 50)
    late.is_held_back = True
    source = join(Shard(0, 100), late)
    with pytest.raises(DeadlineError, match="shard 1: no batch within"):
        source.next_batch(0.01)
    late.is_held_back = False
    assert set(numbers(source.next_batch(1))) == {0, 1}


def test_a_shard_that_is_held_back_for_long_is_left_out_and_counted_until_it_gives_rows(monkeypatch):
    monkeypatch.setattr(sharded, "HELD_BACK_SECONDS", 0.01)
    registry, held = CollectorRegistry(), Shard(1, 100)
    source = join(Shard(0, 100), held, registry=registry)
    assert set(numbers(source.next_batch(5))) == {0, 1}
    held.is_held_back = True
    batches = []
    while len(batches) < 3:
        with suppress(DeadlineError):  # the learner asks for a fraction of the time that a shard is waited for
            batches.append(numbers(source.next_batch(0.002)))
    assert batches[-1] == [0] * 30
    assert skips(registry, 1) >= 2
    held.is_held_back = False
    assert set(numbers(source.next_batch(5))) == {0, 1}


def test_of_shards_that_are_all_held_back_the_first_that_gives_rows_again_is_used(monkeypatch):
    monkeypatch.setattr(sharded, "HELD_BACK_SECONDS", 0.01)
    shards = [Shard(0, 100), Shard(1, 100)]
    source = join(*shards)
    source.next_batch(5)
    for shard in shards:
        shard.is_held_back = True
    for _ in range(3):
        with pytest.raises(DeadlineError, match="the limiter holds samples back"):
            source.next_batch(0.2)
    for back, gone in ((0, 1), (1, 0)):
        shards[back].is_held_back, shards[gone].is_held_back = False, True
        batches = [numbers(source.next_batch(5)) for _ in range(3)]
        assert batches[-1] == [back] * 30


def test_a_batch_mixes_shards_and_counts_the_rows_of_all():
    batch = join(Shard(0, 100), Shard(1, 100)).next_batch(1)
    assert set(numbers(batch)) == {0, 1}
    assert len(batch.rows) == 30
    assert (batch.table_row_count, batch.inserted_row_count) == (200, 2000)


def test_no_row_of_a_shard_is_left_out_or_given_twice():
    shards = Shard(0, 100, has_details=True), Shard(1, 250, has_details=True)
    source, keys = join(*shards), []
    for _ in range(20):
        keys += source.next_batch(1).keys.tolist()
    for number in (0, 1):
        mine = [key - (number << SHARD_BITS) for key in keys if key >> SHARD_BITS == number]
        assert mine == list(range(len(mine)))


def test_a_shard_that_is_away_is_left_out_and_counted_until_it_is_back():
    registry = CollectorRegistry()
    here, away = Shard(0, 100), Shard(1, 100)
    source = join(here, away, registry=registry)
    source.next_batch(1)
    away.is_away = True
    for _ in range(10):  # the first may still have rows that came before
        batch = source.next_batch(1)
    assert set(numbers(batch)) == {0}
    assert batch.inserted_row_count == 2000
    assert 9 <= skips(registry, 1) <= 11
    away.is_away = False
    source.next_batch(1)
    assert set(numbers(source.next_batch(1))) == {0, 1}
    assert skips(registry, 0) == 0


def test_a_shard_that_is_away_from_the_start_counts_with_what_it_had_until_it_says_more():
    shards = [Shard(0, 100), Shard(1, 40), Shard(2, 30)]  # of which 1,000, 400 and 300 were ever inserted
    source = join(*shards)
    source.go_on_from([1000, None, None], 1600)
    shards[1].is_away = shards[2].is_away = True
    assert source.next_batch(1).inserted_row_count == 1600
    shards[0].row_count = 110
    assert wait_for_count(source, 1700) == 1700
    shards[1].is_away = False
    assert wait_for_count(source, 1700) == 1700
    shards[2].is_away = False
    assert wait_for_count(source, 1800) == 1800


def test_a_batch_that_was_drawn_before_its_shard_was_asked_counts_nothing_twice():
    shards = [Shard(0, 50), Shard(1, 40)]
    source = join(*shards)
    source.go_on_from([1500, None], 2000)  # of which the first batch knows 500
    shards[1].is_away = True
    assert source.next_batch(1).inserted_row_count == 1000
    shards[0].row_count = 150
    assert wait_for_count(source, 2000) == 2000


def test_a_shard_that_comes_back_with_fewer_rows_than_it_had_is_told_of():
    shards = [Shard(0, 100), Shard(1, 1)]
    source = join(*shards)
    source.go_on_from([1000, None], 1600)
    with structlog.testing.capture_logs() as events:
        counts = [source.next_batch(1).inserted_row_count for _ in range(5)]
    assert counts[-1] == 1010
    (warning,) = [event for event in events if event["event"] == "shard_lost_rows"]
    assert warning["rows"] == 590


def wait_for_count(source: ShardedSource, expected: int) -> int:
    """Rows ever inserted as a batch has them that was drawn when each shard was asked anew."""
    counts = [source.next_batch(1).inserted_row_count for _ in range(10)]
    assert max(counts) == expected
    return counts[-1]


def test_a_shard_that_goes_away_amid_a_batch_is_made_up_for_by_the_others():
    shards = Shard(0, 100), Shard(1, 100), Shard(2, 100)
    source = join(*shards, batch_size=60)
    source.next_batch(1)
    for shard in source._shards:
        shard.used = 4
    shards[2].is_held_back = True
    with pytest.raises(DeadlineError, match="shard 2: no batch within"):
        source.next_batch(0.01)
    shards[2].is_away = True
    batch = source.next_batch(1)
    assert set(numbers(batch)) == {0, 1}


def test_what_was_gathered_before_a_deadline_is_part_of_the_next_batch():
    first, second = Shard(0, 100, has_details=True), Shard(1, 100, has_details=True)
    source = join(first, second)
    source.next_batch(1)
    second.is_held_back = True
    for _ in range(5):
        with pytest.raises(DeadlineError):
            source.next_batch(0.01)
    given = first.given
    assert given <= 60
    second.is_held_back = False
    source.next_batch(1)
    assert first.given == given


def test_without_any_shard_it_waits_and_says_so():
    shards = Shard(0, 100), Shard(1, 100)
    source = join(*shards)
    source.next_batch(1)
    for shard in shards:
        shard.is_away = True
    for shard in source._shards:
        shard.used = 4
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="no shard of replay has rows to give"):
        source.next_batch(0.1)
    assert time.monotonic() - began >= 0.1


def test_a_refusal_of_one_shard_ends_it():
    shards = Shard(0, 100), Shard(1, 100)
    shards[1].refusal = NotFoundError("no table")
    with pytest.raises(NotFoundError):
        join(*shards).next_batch(1)


def test_probabilities_are_those_of_shard_and_row_together():
    batch = join(Shard(0, 100, has_details=True), Shard(1, 300, has_details=True)).next_batch(1)
    expected = np.where(batch.keys >> SHARD_BITS == 1, 0.5 * 0.75, 0.5 * 0.25)
    np.testing.assert_allclose(batch.probabilities, expected)
    np.testing.assert_array_equal(batch.stored_at, 7.0)


def test_priorities_and_versions_go_to_the_shards_they_belong_to():
    shards = Shard(0, 100, has_details=True), Shard(1, 300, has_details=True)
    source = join(*shards)
    batch = source.next_batch(1)
    source.update_priorities(batch.keys, (batch.keys >> SHARD_BITS).astype(np.float32) + 1)
    source.set_policy_version(9)
    count = int((batch.keys >> SHARD_BITS == 1).sum())
    assert shards[1].priorities == dict.fromkeys(range(count), 2.0)
    assert shards[0].priorities == dict.fromkeys(range(30 - count), 1.0)
    assert [shard.version for shard in shards] == [9, 9]


def test_a_shard_that_the_lag_bound_starves_says_so():
    starved = Shard(1, 50)
    starved.refusal = StarvedError("with lag.max_lag_versions=8 they would do")
    with pytest.raises(StarvedError, match=r"shard 1: with lag\.max_lag_versions=8"):
        join(Shard(0, 100), starved).next_batch(0.01)


@pytest.mark.parametrize("drawn", [0, 1])
def test_shards_that_are_all_starved_for_good_end_it_and_not_before_the_last_one_is(drawn):
    shards = [Shard(0, 100), Shard(1, 50)]
    for shard in shards:
        shard.options = {"drawable_row_count": 10}
    source = join(*shards, batch_size=4)
    for _ in range(drawn):
        source.next_batch(1)
    shards[1].refusal = StarvedForGoodError("of shard 1, with lag.max_lag_versions=8 they would do")
    for _ in range(20):
        batch = source.next_batch(1)
    assert set(numbers(batch)) == {0}
    assert batch.drawable_row_count == 10
    shards[0].refusal = DeadlineError("the limiter holds samples back")
    for _ in range(3):
        with pytest.raises(DeadlineError, match=r"shard 0: the limiter") as raised:
            source.next_batch(0.01)
        assert not isinstance(raised.value, StarvedError)
    shards[0].refusal = StarvedForGoodError("of shard 0")
    with pytest.raises(StarvedForGoodError, match=r"shard 1: of shard 1, with lag\.max_lag_versions=8"):
        source.next_batch(5)
    shards[1].refusal = None  # it lost the end of its record, and got rows anew
    assert set(numbers(source.next_batch(1))) == {1}
    shards[0].refusal = None
    assert {0, 1} == {number for _ in range(10) for number in numbers(source.next_batch(1))}


def test_times_come_without_keys_and_rows_within_the_bound_are_counted_over_all_shards():
    shards = Shard(0, 100), Shard(1, 300)
    for shard in shards:
        shard.options = {"stored_at": np.full(4, 7.0 + shard.number), "drawable_row_count": 10}
    batch = join(*shards).next_batch(1)
    assert batch.keys is None
    assert batch.stored_at.tolist() == [7.0 + number for number in numbers(batch)]
    assert (batch.table_row_count, batch.drawable_row_count) == (400, 20)
    shards[1].options = {}
    assert join(*shards).next_batch(1).drawable_row_count is None


@pytest.mark.parametrize("sampler", ["uniform", "fifo", "lifo"])
def test_each_row_that_may_be_drawn_once_is_given_though_every_draw_empties_its_shard(monkeypatch, sampler):
    monkeypatch.setattr(sharded, "HELD_BACK_SECONDS", 0.0)
    shards = [TableShard(rows_at_once=4, sampler=sampler, max_times_sampled=1) for _ in range(2)]
    source, given = join(*shards, batch_size=8, counts_draws=True), []
    for first in range(0, 400, 8):
        shards[0].append(*range(first, first + 4))
        shards[1].append(*range(first + 4, first + 8))
        given += row_numbers(source.next_batch(1)).tolist()
    assert sorted(given) == list(range(400))
    with pytest.raises(DeadlineError, match=r"shard 1: 0 draws are left"):
        source.next_batch(0.01)


def test_a_shard_that_was_just_drawn_empty_is_not_waited_for_while_another_has_rows():
    shards = [TableShard(rows_at_once=4, sampler="fifo", max_times_sampled=1) for _ in range(2)]
    source = join(*shards, batch_size=4, counts_draws=True)
    for shard in shards:
        shard.append(1, 2, 3, 4)
    for _ in range(2):
        source.next_batch(1)
    shards[1].append(*range(5, 25))
    source.next_batch(1)  # the first may not have been asked before
    shards[0].waits.clear()
    for _ in range(4):
        assert row_numbers(source.next_batch(1)).min() > 4
    assert set(shards[0].waits) == {0}


@pytest.mark.parametrize("is_live", [False, True])
def test_each_row_within_the_lag_bound_is_as_likely_as_every_other_of_all_shards(is_live):
    settings = MemorySettings(10_000).bounded(10)
    shards = [
        TableShard(rows_at_once=16, is_live=is_live, sampler=settings.sampler, max_lag_versions=10) for _ in range(2)
    ]
    shards[0].append(*range(1000, 2000), version=1)
    shards[0].append(*range(10), version=100)
    shards[1].append(*range(10, 110), version=100)
    source = join(*shards, batch_size=32)
    source.set_policy_version(100)
    counts = count_rows(source, 1000, 110)
    assert_as_likely_as(counts, np.full(110, 1 / 110))
    assert source.next_batch(1).drawable_row_count == 110


def test_a_shard_whose_rows_the_lag_bound_has_passed_gives_none_until_it_has_newer_ones():
    shards = [TableShard(rows_at_once=64, is_live=True, sampler="recent", max_lag_versions=10) for _ in range(2)]
    for number, shard in enumerate(shards):
        shard.append(number, version=100)
    source = join(*shards, batch_size=8)
    source.set_policy_version(100)
    assert set(row_numbers(source.next_batch(1)).tolist()) == {0, 1}
    source.set_policy_version(200)
    with pytest.raises(StarvedError, match=r"shard 1: no batch can be drawn"):
        source.next_batch(0.01)
    shards[1].append(2, version=200)
    for _ in range(50):
        assert set(row_numbers(source.next_batch(1)).tolist()) == {2}


def test_a_held_back_shard_that_gave_nothing_yet_is_left_out_where_it_is_known_to_have_rows(monkeypatch):
    monkeypatch.setattr(sharded, "HELD_BACK_SECONDS", 0.0)
    registry, held = CollectorRegistry(), Shard(1, 50)
    held.is_held_back, held.counts = True, RowCounts(50, 500)
    source = join(Shard(0, 100), held, registry=registry)
    for _ in range(3):
        batch = source.next_batch(5)
        assert numbers(batch) == [0] * 30
        assert (batch.table_row_count, batch.inserted_row_count) == (150, 1500)
    assert skips(registry, 1) == 3
    held.is_held_back, held.counts = False, None
    assert set(numbers(source.next_batch(5))) == {0, 1}


@pytest.mark.parametrize("is_live", [False, True])
def test_a_shard_that_grows_soon_gives_each_row_as_often_as_every_other(is_live):
    shards = [TableShard(rows_at_once=64, is_live=is_live) for _ in range(2)]
    shards[0].append(*range(100))
    shards[1].append(100)
    source = join(*shards, batch_size=8)
    source.next_batch(1)
    shards[1].append(*range(101, 200))
    for _ in range(2 * sharded.RENEWED_AFTER):
        source.next_batch(1)
    assert_as_likely_as(count_rows(source, 2500, 200), np.full(200, 1 / 200))


def test_a_source_that_knows_its_rows_at_any_time_gives_its_share_from_the_next_batch_on():
    small = Shard(1, 1)
    source = join(Shard(0, 1000), small, batch_size=8)
    source.next_batch(1)
    small.row_count, small.counts = 1_000_000, RowCounts(1_000_000, 1_000_000)
    batch = source.next_batch(1)
    assert numbers(batch) == [1] * 8
    assert batch.table_row_count == 1_001_000


def test_rows_of_a_small_shard_are_given_soon_after_they_were_drawn_and_what_is_left_goes_back():
    small = TableShard(rows_at_once=64)
    source, drawn_before = join(Shard(0, 990), small, batch_size=8), []
    small.append(*range(10))
    for _ in range(200):
        source.next_batch(1)
        drawn_before.append(len(small.waits))
    used = 64 * len(small.waits) - small.given_back - source._shards[1].left
    assert (np.diff(np.flatnonzero(np.diff(drawn_before))) <= sharded.RENEWED_AFTER + 1).all()
    assert len(small.waits) >= 200 // (sharded.RENEWED_AFTER + 1)
    assert 0 < used < 40  # of 1,600 rows one in a hundred


def test_where_replay_counts_draws_rows_are_used_up_however_old():
    small = Shard(1, 10, has_details=True)
    source, keys = join(Shard(0, 990, has_details=True), small, batch_size=8, counts_draws=True), []
    for _ in range(400):
        keys += source.next_batch(1).keys.tolist()
    mine = [key - (1 << SHARD_BITS) for key in keys if key >> SHARD_BITS]
    assert mine == list(range(len(mine)))
    assert len(mine) > 8
    assert small.given_back == 0


def test_old_rows_are_given_while_no_others_come():
    small = Shard(1, 10, has_details=True)
    source = join(Shard(0, 990, has_details=True), small, batch_size=8)
    while not small.given:
        source.next_batch(1)
    given = small.given
    small.is_held_back = True
    keys: list[int] = []
    while source._shards[1].left > 1:
        keys += source.next_batch(1).keys.tolist()
    mine = [key - (1 << SHARD_BITS) for key in keys if key >> SHARD_BITS]
    assert mine == list(range(given - 1 - len(mine), given - 1))
    assert small.given_back == 0


def test_a_shard_is_not_held_back_for_a_time_in_which_it_had_no_rows_yet(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(sharded.time, "monotonic", lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", pass_time)
    late = Shard(1, 100)
    late.is_held_back = True
    source = join(Shard(0, 100), late)
    with pytest.raises(DeadlineError, match="shard 1: no batch"):
        source.next_batch(2 * sharded.HELD_BACK_SECONDS)
    late.counts = RowCounts(100, 1000)
    with pytest.raises(DeadlineError, match="shard 1: no batch"):
        source.next_batch(0.5 * sharded.HELD_BACK_SECONDS)
    late.is_held_back = False
    assert set(numbers(source.next_batch(1))) == {0, 1}
