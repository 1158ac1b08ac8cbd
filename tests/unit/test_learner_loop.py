"""The budget of updates, and the loop against a scripted source and a tiny algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from paceline import config as settings
from paceline.errors import DeadlineError, NonFiniteError
from paceline.learner.algorithms import TransitionBatch
from paceline.learner.loop import Budget, Loop, Progress
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import Batch
from paceline.process import StopSignal
from paceline.rows import Block, Column, transition_spec

SPEC = transition_spec(Column("observation", "float32", (3,)), Column("action", "float32", (1,)))


class ScriptedSource:
    """Batches of rows stamped with the given version, one new row for each batch."""

    def __init__(self, inserted: int, version: int = 1) -> None:
        self.inserted, self.version = inserted, version

    def next_batch(self, seconds: float) -> Batch:
        if self.inserted < 0:
            raise DeadlineError(f"no batch within {seconds} s: the limiter holds samples back")
        block = Block.empty(SPEC, 4)
        block.columns["policy_version"] = self.version
        batch = Batch(block.data, table_row_count=self.inserted, inserted_row_count=self.inserted)
        self.inserted += 1
        return batch

    def close(self) -> None: ...


class CountingAlgorithm:
    def __init__(self) -> None:
        self.update_count, self.finite = 0, True

    def update(self, batch: TransitionBatch) -> Mapping[str, torch.Tensor]:
        self.update_count += 1
        return {"critic_loss": torch.tensor(1.0)}

    def check_finite(self) -> None:
        if not self.finite:
            raise NonFiniteError("actor.weight has a NaN")


class Run:
    """A loop with everything that it hands on."""

    def __init__(
        self,
        source: ScriptedSource,
        steps: int,
        start: Progress | None = None,
        algorithm: CountingAlgorithm | None = None,
    ) -> None:
        self.published: list[Progress] = []
        self.checkpoints: list[Progress] = []
        self.records: list[Mapping[str, Any]] = []
        self.registry = CollectorRegistry()
        self.metrics = LearnerMetrics(self.registry)
        self.algorithm = algorithm or CountingAlgorithm()
        self.loop = Loop(
            settings.build(
                {
                    "run": {"environment_steps": steps},
                    "replay": {"tables": {"transitions": {"limiter": {"min_rows": 1}}}},
                    "learner": {"publish_every_updates": 5, "checkpoint": {"every_updates": 20}},
                }
            ),
            algorithm=self.algorithm,
            source=source,
            spec=SPEC,
            start=start or Progress(),
            incarnation=1,
            metrics=self.metrics,
            publish=self.published.append,
            checkpoint=self.checkpoints.append,
            record=self.records.append,
            check_endpoint=lambda: None,
        )


def test_a_run_ends_when_its_steps_are_stored_and_every_update_they_ask_for_is_done():
    run = Run(ScriptedSource(inserted=100), steps=110, start=Progress().beside(0, min_rows=100))
    # The source stores a row for each batch, up to 110 and beyond: ten steps ask for ten updates.
    assert run.loop.run(StopSignal())
    assert run.algorithm.update_count == 11
    assert run.loop.progress.environment_steps == 110


def test_a_fractional_ratio_rounds_down():
    begun = Progress().beside(0, min_rows=100)
    assert Budget(1000, 0.25).updates_due(begun, 103) == 0
    assert Budget(1000, 0.25).updates_due(begun, 104) == 1


def test_a_run_resumed_with_an_empty_replay_owes_nothing_for_the_steps_before():
    start = Progress(learner_step=4000, environment_steps=5000).beside(0, min_rows=500)
    assert start.step_offset == 5000
    assert Budget(6000, 0.8).updates_due(start, 5500) == 4000
    assert Budget(6000, 0.8).updates_due(start, 6000) == 4400


def test_a_run_resumed_beside_its_full_replay_still_owes_what_it_owed():
    stopped = Progress(learner_step=3990, environment_steps=5000, ratio_from_steps=100)
    start = stopped.beside(5200, min_rows=100)
    assert start == stopped
    assert Budget(6000, 1.0).updates_due(start, 6000) == 5900


def test_steps_lost_with_a_store_stay_counted_over_two_resumes():
    once = Progress(learner_step=4000, environment_steps=5000).beside(0, min_rows=500)
    twice = replace(once, learner_step=4400, environment_steps=6000).beside(1000, min_rows=500)
    assert twice.step_offset == 5000
    assert Budget(7000, 0.8).updates_due(twice, 7000) == 5200


def test_the_reported_step_goes_on_from_the_checkpoint_after_the_store_was_lost():
    start = Progress(learner_step=4000, environment_steps=5000).beside(0, min_rows=500)
    run = Run(ScriptedSource(inserted=500), steps=5510, start=start)
    assert run.loop.run(StopSignal())
    assert run.loop.progress.environment_steps == 5510


def test_snapshots_come_after_every_fifth_update_and_at_the_end():
    run = Run(ScriptedSource(inserted=0), steps=12, start=Progress(policy_version=1))
    run.loop.run(StopSignal())
    assert [progress.learner_step for progress in run.published] == [5, 10, 13]
    assert [progress.policy_version for progress in run.published] == [2, 3, 4]


def test_versions_go_on_above_the_last_durable_one():
    run = Run(ScriptedSource(inserted=0), steps=6, start=Progress(policy_version=41))
    run.loop.run(StopSignal())
    assert run.published[0].policy_version == 42


def test_nothing_that_is_not_finite_is_published_or_saved():
    algorithm = CountingAlgorithm()
    algorithm.finite = False
    run = Run(ScriptedSource(inserted=0), steps=12, algorithm=algorithm)
    with pytest.raises(NonFiniteError, match=r"actor\.weight"):
        run.loop.run(StopSignal())
    assert run.published == []
    assert run.checkpoints == []


def test_a_stop_while_no_rows_come_ends_the_loop_with_a_checkpoint_at_the_last_update():
    run = Run(ScriptedSource(inserted=-1), steps=12)
    stop = StopSignal()
    stop.set()
    assert not run.loop.run(stop)
    assert run.checkpoints[-1] == run.loop.progress


def test_training_lag_counts_every_row_by_the_version_behind():
    run = Run(ScriptedSource(inserted=0, version=1), steps=7, start=Progress(policy_version=1))
    run.loop.run(StopSignal())
    # Versions 1 while updates 1-5 ran, then 2 for 6-8: 5 batches of 4 rows at lag 0, 3 batches at lag 1.
    assert run.metrics.training_lag_versions.counts() == {"0": 20, "1": 12}


def test_lag_is_absent_before_the_first_row():
    registry = CollectorRegistry()
    LearnerMetrics(registry)
    assert registry.get_sample_value("paceline_learner_training_lag_versions_count") is None
    assert registry.get_sample_value("paceline_learner_policy_version") is None


def test_time_spent_sums_to_the_time_that_passed():
    run = Run(ScriptedSource(inserted=0), steps=50)
    run.loop.run(StopSignal())
    seconds = [
        sample.value
        for metric in run.registry.collect()
        for sample in metric.samples
        if sample.name == "paceline_learner_activity_seconds_total"
    ]
    assert np.sum(seconds) > 0
    assert all(value >= 0 for value in seconds)
