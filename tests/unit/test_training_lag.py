"""Lag of the rows trained on: against scripted times, masked, scraped meanwhile, and remembered over a resume."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from paceline.actors import build_actor, squashed_gaussian_semantics
from paceline.lag.attribution import PARTS
from paceline.lag.bound import LagBound, Starvation
from paceline.lag.publications import Publication, Publications
from paceline.learner.algorithms import Algorithm, TransitionBatch, build_algorithm
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.published import PublishedVersions
from paceline.learner.sources import Batch
from paceline.learner.training_lag import ROWS_AT_ONCE, TrainingLag
from paceline.process import StopSignal
from paceline.rows import Block, Column, transition_spec

UNBOUNDED = LagBound(None)
SPEC = transition_spec(Column("observation", "float32", (3,)), Column("action", "float32", (1,)))


def batch_of(count: int, *, stored_at: Any = None, drawable: int | None = None, **stamps: Any) -> Batch:
    block = Block.empty(SPEC, count)
    for name, values in stamps.items():
        block.columns[name] = values
    times = None if stored_at is None else np.broadcast_to(np.float64(stored_at), count)
    return Batch(torch.from_numpy(block.data), 100, 100, stored_at=times, drawable_row_count=drawable)


def published(*times: float) -> Publications:
    """Versions 1, 2, ... at these times, ten updates apart."""
    publications = Publications()
    for version, seconds in enumerate(times, 1):
        publications.add(Publication(version, seconds, 10 * version))
    return publications


class Learner:
    """The lag of a learner whose clock stands where the test sets it."""

    def __init__(self, publications: Publications | None, bound: LagBound = UNBOUNDED) -> None:
        self.now = 1000.0
        self.registry = CollectorRegistry()
        self.metrics = LearnerMetrics(self.registry)
        self.lag = TrainingLag(
            SPEC, bound=bound, publications=publications, metrics=self.metrics, clock=lambda: self.now
        )

    def value(self, thing: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"paceline_learner_{thing}", labels)

    def parts(self, thing: str = "training_lag_part_versions_total") -> dict[str, float | None]:
        return {part: self.value(thing, part=part) for part in PARTS}


def test_each_version_counts_for_the_part_that_it_was_published_in():
    # Version 1 at 10, applied at 20, sealed at 30, stored at 40, trained on at 60.
    learner = Learner(published(10, 15, 20, 21, 31, 35, 39, 41, 60))
    rows = batch_of(
        3, policy_version=[1, 4, 9], policy_applied_at=[20, 22, 60], sealed_at=[30, 30, 60], stored_at=[40, 40, 60]
    )
    learner.now = 60.0
    learner.lag.take(rows, policy_version=9, learner_step=95)
    learner.lag.count()
    assert learner.parts() == {"transfer": 2, "rollout": 1, "queue": 6, "residence": 4, "unattributed": 0}
    assert learner.value("training_lag_versions_sum") == 8 + 5 + 0
    # 10 to 20 to 30 to 40 to 60; 21 to 22 to 30 to 40 to 60; 60 to 60.
    seconds = {"transfer": 10 + 1, "rollout": 10 + 8, "queue": 20, "residence": 40, "unattributed": 0}
    assert learner.parts("row_part_seconds_total") == seconds


def test_what_is_not_known_is_no_parts_lag_and_no_age():
    learner = Learner(published(10, 20, 30))
    learner.now = 40.0
    learner.lag.take(batch_of(5, policy_version=1), policy_version=3, learner_step=30)
    learner.lag.count()
    assert learner.parts() == {**dict.fromkeys(PARTS, 0), "unattributed": 10}
    assert learner.value("training_lag_versions_sum") == 10
    assert learner.value("row_age_seconds_count") is None
    assert learner.value("training_lag_updates_sum") == 5 * 30


def test_lag_that_is_not_split_has_no_parts():
    learner = Learner(None)
    learner.lag.take(batch_of(5, policy_version=1, stored_at=3.0), policy_version=3, learner_step=30)
    learner.lag.count()
    assert set(learner.parts().values()) == {None}
    assert learner.value("training_lag_versions_sum") == 10
    assert "lag_part_versions" not in learner.metrics.rows.totals()


def test_rows_of_several_updates_are_each_counted_as_of_their_own():
    times = [100 + 0.1 * version for version in range(1, 30)]
    publications = published(*times[:5])
    learner, one_by_one = Learner(publications), Learner(publications)
    random = np.random.default_rng(1)
    for number in range(20):
        if number % 3 == 2:
            version = len(publications) + 1
            publications.add(Publication(version, times[version - 1], 10 * version))
        learner.now = one_by_one.now = times[len(publications) - 1] + 1
        # A batch that goes on being written to, as a source does with the next one.
        rows = batch_of(
            4,
            policy_version=random.integers(1, len(publications) + 1, 4),
            policy_applied_at=random.uniform(99, 104, 4),
            sealed_at=random.uniform(99, 104, 4),
            collected_at=random.uniform(99, 104, 4),
            stored_at=random.uniform(99, 104),
        )
        for each in (learner, one_by_one):
            each.lag.take(rows, policy_version=len(publications), learner_step=number)
        one_by_one.lag.count()
        rows.rows.zero_()
    learner.lag.count()
    assert learner.parts() == one_by_one.parts()
    assert learner.parts("row_part_seconds_total") == pytest.approx(one_by_one.parts("row_part_seconds_total"))
    for thing in ("training_lag_versions_sum", "training_lag_updates_sum", "row_age_seconds_count"):
        assert learner.value(thing) == one_by_one.value(thing)


@pytest.mark.parametrize("size", [1, 1000, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, 3 * ROWS_AT_ONCE + 1])
def test_batches_of_any_size_are_counted_with_every_row_that_is_not_masked(size):
    learner = Learner(published(10, 20, 30, 40, 50), LagBound(2))
    for number in range(5):
        versions = np.where(np.arange(size) % 7 == number + 1, 1, 3 + number % 3)
        taken = learner.lag.take(batch_of(size, policy_version=versions), policy_version=5, learner_step=50)
        assert isinstance(taken, Batch)
        assert len(taken.rows) == np.count_nonzero(versions > 1)
    learner.lag.count()
    masked = sum(np.count_nonzero(np.arange(size) % 7 == number + 1) for number in range(5))
    assert learner.value("masked_rows_total") == masked
    assert learner.value("trained_rows_total") == 5 * size - masked
    lags = [2 - number % 3 for number in range(5)]
    expected = sum(lag * np.count_nonzero(np.arange(size) % 7 != number + 1) for number, lag in enumerate(lags))
    assert learner.value("training_lag_versions_sum") == expected


def test_the_parts_sum_to_the_lag_on_every_page_that_is_read_meanwhile():
    learner, done = Learner(published(10, 20, 30, 40, 50)), threading.Event()
    rows = batch_of(3, policy_version=[1, 2, 4], policy_applied_at=15.0, sealed_at=33.0, stored_at=41.0)

    def train() -> None:
        while not done.is_set():
            learner.lag.take(rows, policy_version=5, learner_step=50)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        sums = set()
        while len(sums) < 30:
            page = {
                sample.name + str(sample.labels): sample.value
                for family in learner.registry.collect()
                for sample in family.samples
            }
            parts = [page[f"paceline_learner_training_lag_part_versions_total{{'part': {part!r}}}"] for part in PARTS]
            whole = page.get("paceline_learner_training_lag_versions_sum{}", 0)
            assert sum(parts) == whole
            assert page["paceline_learner_trained_rows_total{}"] * 8 / 3 == whole
            sums.add(whole)
    finally:
        done.set()
        thread.join()


def sac() -> Algorithm:
    semantics = squashed_gaussian_semantics(3, hidden=(16, 16), action_low=(-1.0,), action_high=(1.0,))
    torch.manual_seed(3)
    return build_algorithm({"name": "sac", "hidden": (16, 16)}, build_actor(semantics, "cpu"), seed=3)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_with_half_of_its_rows_masked_trains_as_its_other_half_does(weighted):
    whole, half = sac(), sac()
    random = np.random.default_rng(5)
    lag = Learner(None, LagBound(3)).lag
    for _ in range(5):
        within = random.permutation(np.repeat([True, False], 32))
        block = Block.empty(SPEC, 64)
        for name in ("observation", "next_observation", "reward"):
            block.columns[name] = random.standard_normal(block.columns[name].shape)
        block.columns["action"] = random.uniform(-1, 1, (64, 1))
        block.columns["terminated"] = random.random(64) < 0.1
        block.columns["policy_version"] = np.where(within, 7, 6)
        masked = lag.take(Batch(torch.from_numpy(block.data), 64, 64), policy_version=10, learner_step=0)
        assert isinstance(masked, Batch)
        others = torch.from_numpy(block.data[within])
        weight = torch.rand(32) if weighted else None
        for algorithm, rows in ((whole, masked.rows), (half, others)):
            algorithm.update(TransitionBatch.from_rows(SPEC, rows, weight=weight))
    state = half.state_dict()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_a_batch_of_which_no_row_is_within_the_bound_names_the_bound_that_would_do():
    learner = Learner(published(10), LagBound(3))
    starvation = learner.lag.take(batch_of(3, policy_version=[1, 5, 4]), policy_version=10, learner_step=0)
    assert isinstance(starvation, Starvation)
    assert starvation.smallest_bound == 5
    learner.lag.count()
    assert learner.value("masked_rows_total") == 3
    assert learner.value("trained_rows_total") == 0


def test_skipped_rows_are_those_that_a_draw_without_the_bound_would_have_given_besides():
    learner = Learner(None, LagBound(3))
    for _ in range(3):  # 75 of 100 rows are beyond the bound: to each row drawn belong three
        learner.lag.take(batch_of(16, policy_version=10, drawable=25), policy_version=10, learner_step=0)
    learner.lag.take(batch_of(16, policy_version=10), policy_version=10, learner_step=0)
    learner.lag.count()
    assert learner.value("skipped_rows_total") == 3 * 48
    assert learner.metrics.rows.totals()["skipped_rows"] == 144


def test_a_learner_that_resumes_knows_when_the_versions_before_were_published(tmp_path: Path):
    path = tmp_path / "learner" / "publications.jsonl"
    before = PublishedVersions(path)
    for version in (1, 2, 3):
        before.note(version, 10.0 * version, version)
    before.close()
    after = PublishedVersions(path)
    after.note(4, 40.0, 3)
    learner = Learner(after.publications)
    learner.now = 45.0
    learner.lag.take(
        batch_of(1, policy_version=1, policy_applied_at=11, sealed_at=25, stored_at=26),
        policy_version=4,
        learner_step=3,
    )
    learner.lag.count()
    assert learner.parts() == {"transfer": 0, "rollout": 1, "queue": 0, "residence": 2, "unattributed": 0}
    after.close()


def test_a_disk_that_takes_no_publication_is_reported_once_and_training_goes_on(tmp_path: Path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "publications.jsonl"
    published_versions = PublishedVersions(path)
    published_versions.note(1, 10.0, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    try:
        with capture_logs() as logs:
            for version in (2, 3, 4):
                published_versions.note(version, 10.0 * version, version)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [log["event"] for log in logs] == ["publications_not_written"]
    assert [each.version for each in published_versions.publications] == [1, 2, 3, 4]
    published_versions.close()


def test_a_folder_that_cannot_be_written_to_is_reported_and_training_goes_on(tmp_path: Path):
    (tmp_path / "learner").write_text("not a folder")
    with capture_logs() as logs:
        published_versions = PublishedVersions(tmp_path / "learner" / "publications.jsonl")
        published_versions.note(1, 10.0, 0)
    assert [log["event"] for log in logs] == ["publications_not_written"]
    assert len(published_versions.publications) == 1


def test_how_many_updates_were_not_finite_is_absent_until_it_is_known_of_the_whole_run():
    registry = CollectorRegistry()
    non_finite = LearnerMetrics(registry).non_finite
    assert b"non_finite_total" not in generate_latest(registry)
    non_finite.go_on_from(2)
    assert b"paceline_learner_non_finite_total 2.0" in generate_latest(registry)
    non_finite.note()
    assert b"paceline_learner_non_finite_total 3.0" in generate_latest(registry)


def test_nobody_is_waited_for_where_nobody_reads_the_metrics():
    non_finite = LearnerMetrics(CollectorRegistry()).non_finite
    non_finite.note()
    non_finite.wait_for_readers(60, StopSignal())  # at once, or the test is too slow


def test_every_reader_is_waited_for_and_a_stop_ends_the_wait():
    registry = CollectorRegistry()
    non_finite, stop = LearnerMetrics(registry).non_finite, StopSignal()
    generate_latest(registry)
    non_finite.note()
    waiting = threading.Thread(target=non_finite.wait_for_readers, args=(60, stop))
    waiting.start()
    for _ in range(2):
        assert b"paceline_learner_non_finite_total 1.0" in generate_latest(registry)
        assert waiting.is_alive()
    stop.set()
    waiting.join(10)
    assert not waiting.is_alive()
