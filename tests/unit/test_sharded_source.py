"""Batches of several shards, from sources that a test makes come and go."""

from __future__ import annotations

import collections
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from paceline.errors import DeadlineError, NotFoundError, StarvedError
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import SHARD_BITS, Batch, ShardedSource, sharded


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

    def close(self) -> None: ...


def join(*shards: Shard, batch_size: int = 30, registry: CollectorRegistry | None = None) -> ShardedSource:
    metrics = LearnerMetrics(registry or CollectorRegistry())
    return ShardedSource(shards, batch_size=batch_size, seed=3, metrics=metrics)


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


def test_a_shard_that_has_no_rows_yet_is_waited_for():
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
