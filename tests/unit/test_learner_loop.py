"""The budget of updates, and the loop against a scripted source and a tiny algorithm."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from paceline import config as settings
from paceline.errors import DeadlineError, NonFiniteError, StarvedError, StarvedForGoodError
from paceline.lag.attribution import PARTS
from paceline.lag.bound import LagBound
from paceline.lag.publications import Publication, Publications
from paceline.learner import loop as loop_module
from paceline.learner.algorithms import TransitionBatch, Update
from paceline.learner.loop import Budget, Loop, Progress
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import Batch, RowsEndedError
from paceline.learner.training_lag import TrainingLag
from paceline.process import StopSignal
from paceline.rows import Block, Column, numpy_columns, transition_spec

UNBOUNDED = LagBound(None)
SPEC = transition_spec(Column("observation", "float32", (3,)), Column("action", "float32", (1,)))


class ScriptedSource:
    """Batches of rows stamped with the given version, one new row for each batch."""

    def __init__(self, inserted: int, version: int = 1) -> None:
        self.inserted, self.version = inserted, version
        self.details: dict[str, Any] = {}
        self.priorities: list[tuple[list[int], list[float]]] = []
        self.policy_versions: list[int] = []
        self.stored_until, self.batches_until_more = 10**9, 0
        """No row more is stored above that number until so many batches were taken."""

    def next_batch(self, seconds: float) -> Batch:
        if self.inserted < 0:
            raise DeadlineError(f"no batch within {seconds} s: the limiter holds samples back")
        block = Block.empty(SPEC, 4)
        block.columns["policy_version"] = self.version
        batch = Batch(
            torch.from_numpy(block.data),
            table_row_count=self.inserted,
            inserted_row_count=self.inserted,
            **self.details,
        )
        if self.inserted < self.stored_until or self.batches_until_more == 0:
            self.inserted += 1
        else:
            self.batches_until_more -= 1
        return batch

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        self.priorities.append((keys.tolist(), priorities.tolist()))

    def set_policy_version(self, version: int) -> None:
        self.policy_versions.append(version)

    def close(self) -> None: ...


class CountingAlgorithm:
    def __init__(self) -> None:
        self.update_count, self.finite = 0, True
        self.weights: list[torch.Tensor | None] = []
        self.errors: torch.Tensor | None = None

    def update(self, batch: TransitionBatch) -> Update:
        self.update_count += 1
        self.weights.append(batch.weight)
        return Update({"critic_loss": torch.tensor(1.0)}, self.errors)

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
        table: Mapping[str, Any] | None = None,
        learner: Mapping[str, Any] | None = None,
        bound: LagBound = UNBOUNDED,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self.publications = Publications()
        if start is not None and start.policy_version:
            self.publications.add(Publication(start.policy_version, clock(), start.learner_step))
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
                    "replay": {"tables": {"transitions": {"limiter": {"min_rows": 1}, **(table or {})}}},
                    "learner": {"publish_every_updates": 5, "checkpoint": {"every_updates": 20}, **(learner or {})},
                }
            ),
            algorithm=self.algorithm,
            source=source,
            spec=SPEC,
            start=start or Progress(),
            incarnation=1,
            metrics=self.metrics,
            lag=TrainingLag(SPEC, bound=bound, publications=self.publications, metrics=self.metrics, clock=clock),
            publish=self._publish,
            checkpoint=self.checkpoints.append,
            record=self.records.append,
            check_endpoint=lambda: None,
        )

    def value(self, thing: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"paceline_learner_{thing}", labels)

    def _publish(self, progress: Progress) -> None:
        self.published.append(progress)
        self.publications.add(Publication(progress.policy_version, self.clock(), progress.learner_step))


def test_a_run_ends_when_its_steps_are_stored_and_every_update_they_ask_for_is_done():
    run = Run(ScriptedSource(inserted=100), steps=110, start=Progress().beside(0, min_rows=100))
    # The source stores a row for each batch, up to 110 and beyond: ten steps ask for ten updates.
    assert run.loop.run(StopSignal())
    assert run.algorithm.update_count == 10
    assert run.loop.progress.environment_steps == 110


def test_a_run_that_learns_from_a_queue_ends_when_every_row_was_learned_from(monkeypatch):
    source = ScriptedSource(inserted=110)  # all are stored before the first batch
    batches = iter(range(7))

    def next_batch(seconds: float) -> Batch:
        if next(batches, None) is None:
            raise RowsEndedError("every row that the run asked for was taken")
        return ScriptedSource.next_batch(source, seconds)

    monkeypatch.setattr(source, "next_batch", next_batch)
    run = Run(source, steps=110, table={"queue": True}, learner={"updates": "learner_bound"})
    assert run.loop.run(StopSignal())
    assert run.algorithm.update_count == 7
    assert run.checkpoints[-1].learner_step == 7


def test_a_run_whose_last_steps_are_late_is_not_trained_beyond_what_they_ask_for(monkeypatch):
    monkeypatch.setattr(loop_module, "PASS_OVER_SECONDS", 0.0)
    source = ScriptedSource(inserted=100)
    source.stored_until, source.batches_until_more = 105, 30
    run = Run(source, steps=110, start=Progress().beside(0, min_rows=100))
    assert run.loop.run(StopSignal())
    assert run.algorithm.update_count == 10
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
    assert [progress.learner_step for progress in run.published] == [5, 10, 12]
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
    # Version 1 while updates 1-5 ran, then 2 for 6 and 7: 5 batches of 4 rows at lag 0, 2 batches at lag 1. A batch
    # that came when all was done was not trained on, and does not count.
    assert run.metrics.rows.lag_versions.counts() == {"0": 20, "1": 8}


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


def test_rows_without_probabilities_train_without_weights():
    run = Run(ScriptedSource(inserted=0), steps=3)
    run.loop.run(StopSignal())
    assert set(run.algorithm.weights) == {None}
    assert run.loop._source.priorities == []


def test_prioritised_rows_are_weighted_against_the_bias_of_their_draw():
    source = ScriptedSource(inserted=400)
    source.details = {
        "keys": np.arange(4),
        "probabilities": np.array([0.01, 0.02, 0.04, 0.16], np.float32),
        "stored_at": np.zeros(4),
    }
    run = Run(source, steps=400, table={"sampler": "prioritised", "prioritised": {"importance_exponent": 0.5}})
    run.loop.run(StopSignal())
    # (400 P)^-0.5 is 0.5, 0.35, 0.25, 0.125, over the largest.
    assert run.algorithm.weights[0] is not None
    torch.testing.assert_close(run.algorithm.weights[0], torch.tensor([1.0, 0.5**0.5, 0.5, 0.25]))


def test_priorities_follow_the_errors_of_their_rows_and_what_is_not_finite_stays_here():
    source = ScriptedSource(inserted=100)
    source.details = {"keys": np.array([5, 6, 7, 8]), "probabilities": np.full(4, 0.1, np.float32)}
    algorithm = CountingAlgorithm()
    algorithm.errors = torch.tensor([0.5, float("nan"), 0.0, 2.0])
    Run(source, steps=100, algorithm=algorithm, table={"sampler": "prioritised"}).loop.run(StopSignal())
    keys, priorities = source.priorities[0]
    assert keys == [5, 7, 8]
    # A row that surprises no more is drawn again some time: priority 0 would be for ever.
    assert priorities == pytest.approx([0.5, 1e-6, 2.0])


def test_the_source_is_told_each_new_policy_version():
    source = ScriptedSource(inserted=0)
    Run(source, steps=12, start=Progress(policy_version=1)).loop.run(StopSignal())
    assert source.policy_versions == [2, 3, 4]


class StarvedSource(ScriptedSource):
    """Has rows for three updates, and those that are left are beyond the bound for good."""

    def next_batch(self, seconds: float) -> Batch:
        if self.inserted >= 3:
            raise StarvedForGoodError("no batch within 1 s: rows are beyond the bound")
        return super().next_batch(seconds)


def test_a_run_whose_last_rows_are_all_beyond_the_bound_ends_and_says_what_it_left_out():
    run = Run(StarvedSource(inserted=0), steps=12)
    with structlog.testing.capture_logs() as events:
        assert run.loop.run(StopSignal())
    assert (run.loop.progress.environment_steps, run.loop.progress.learner_step) == (12, 3)
    assert [event["updates"] for event in events if event["event"] == "updates_left_out"] == [9]
    assert run.checkpoints[-1] == run.loop.progress


class LaggingSource(ScriptedSource):
    """Gives four rows of these versions over and over; the clock goes on by a second for each batch."""

    def __init__(self, versions: list[int], **stamps: Any) -> None:
        super().__init__(inserted=0)
        self.versions, self.stamps, self.now = versions, stamps, 1000.0
        self.starved: list[str] = []

    def next_batch(self, seconds: float) -> Batch:
        if self.starved:
            raise StarvedError(self.starved.pop())
        self.now += 1
        batch = super().next_batch(seconds)
        columns = numpy_columns(SPEC, batch.rows.numpy())
        columns["policy_version"] = self.versions
        for name, values in self.stamps.items():
            columns[name] = values
        return replace(batch, stored_at=np.array([1002.0, 1002.0, 0.0, 1002.0]), drawable_row_count=1)


def test_the_parts_of_the_lag_are_exact_where_every_time_is_known():
    # Version 1 is published at 1000, the batches come at 1001, 1002, ..., and a version after each fifth of them.
    source = LaggingSource([1, 1, 1, 2], policy_applied_at=1001.0, sealed_at=[1001.5, 1006.0, 1001.5, 1001.5])
    run = Run(source, steps=12, start=Progress(policy_version=1), clock=lambda: source.now)
    run.loop.run(StopSignal())
    assert [progress.policy_version for progress in run.published] == [2, 3, 4]
    parts = {part: run.value("training_lag_part_versions_total", part=part) for part in PARTS}
    # Updates 6-10 see version 2, published at 1005, and 11-12 version 3, published at 1010. Of the rows of version 1,
    # the first lags by residence; the second was sealed after version 2 (rollout); of the third nobody knows when it
    # was stored, so that what came after its sealing is no part's. The row of version 2 lags at updates 11 and 12 only.
    assert parts == {"transfer": 0, "rollout": 5 + 2, "queue": 0, "residence": 5 + 2 * 2 + 2 + 2, "unattributed": 5 + 4}
    assert run.value("training_lag_versions_sum") == sum(parts.values()) == 3 * 5 + 2 * (3 * 2 + 1)
    assert run.value("trained_rows_total") == run.value("training_lag_versions_count") == 48


def test_the_record_of_training_has_the_totals_of_its_moment():
    source = LaggingSource([1, 1, 1, 1])
    run = Run(source, steps=12, start=Progress(policy_version=1), clock=lambda: source.now)
    run.loop._last_record = -1e9
    run.loop.run(StopSignal())
    first = run.records[0]
    assert first["trained_rows"] == 4
    assert (first["skipped_rows"], first["masked_rows"]) == (0, 0)
    assert list(first["lag_part_versions"]) == list(first["lag_part_seconds"]) == list(PARTS)
    assert sum(first["training_lag_counts"].values()) == first["trained_rows"]


def test_the_last_record_holds_every_row_that_was_trained_on():
    run = Run(ScriptedSource(inserted=100), steps=110, start=Progress().beside(0, min_rows=100))
    run.loop.run(StopSignal())
    assert run.records[-1]["learner_step"] == run.algorithm.update_count == 10
    assert run.records[-1]["trained_rows"] == run.value("trained_rows_total")


def test_rows_beyond_the_bound_are_left_out_and_counted():
    source = LaggingSource([1, 4, 9, 10])
    source.inserted = 1
    source.details = {"keys": np.arange(4), "probabilities": np.array([0.1, 0.1, 0.1, 0.4], np.float32)}
    algorithm = CountingAlgorithm()
    algorithm.errors = torch.tensor([2.0, 3.0])
    run = Run(
        source,
        steps=3,
        start=Progress(policy_version=10),
        bound=LagBound(5),
        algorithm=algorithm,
        table={"sampler": "prioritised", "prioritised": {"importance_exponent": 1.0}},
    )
    run.loop.run(StopSignal())
    assert run.value("max_lag_versions") == 5
    assert run.value("masked_rows_total") == 6
    assert run.value("trained_rows_total") == 6
    assert run.metrics.rows.lag_versions.counts() == {"0": 3, "1": 3}
    # As in a batch of these two alone: (N P)^-1 over the largest, and no priority of the others is touched.
    torch.testing.assert_close(algorithm.weights[0], torch.tensor([1.0, 0.25]))
    assert source.priorities == [([2, 3], [2.0, 3.0])] * 3


def test_after_a_restore_old_rows_count_as_if_they_were_of_the_version_restored():
    source = LaggingSource([1, 20, 39, 41])
    run = Run(source, steps=12, start=Progress(policy_version=41), bound=LagBound(2, base_version=40))
    run.loop.run(StopSignal())
    # At 41 and 42 all are within two versions of 40; when 43 was published, three updates before the end, none of
    # them but the last.
    assert run.value("masked_rows_total") == 3 * 2
    assert run.value("trained_rows_total") == 4 * 12 - 6


def test_a_run_that_the_bound_starves_says_so_with_the_bound_that_would_do(monkeypatch):
    monkeypatch.setattr(loop_module, "STARVED_SECONDS", 0.0)
    monkeypatch.setattr(loop_module, "PASS_OVER_SECONDS", 0.0)
    source, stop = LaggingSource([1, 1, 2, 1]), StopSignal()
    source.starved = ["no batch can be drawn: ... with lag.max_lag_versions=9 they would do"]
    source.set_policy_version(10)
    run = Run(source, steps=100, start=Progress(policy_version=10), bound=LagBound(5))
    batches = iter(range(6))
    run.loop._check_endpoint = lambda: stop.set() if next(batches, None) is None else None
    with capture_logs() as logs:
        run.loop.run(stop)
    assert run.algorithm.update_count == 0
    assert [log["event"] for log in logs] == ["starved_by_lag_bound"]  # once for all of it
    assert "lag.max_lag_versions=9 they would do" in logs[0]["reason"]
    assert run.value("masked_rows_total") > 0
    assert run.value("starved_seconds_total") > 0
    assert run.value("workable_lag_versions") == 8  # of the rows that came, 2 is the newest


def test_rows_that_the_bound_kept_from_being_drawn_are_counted_with_those_drawn():
    source = LaggingSource([1, 1, 1, 1])
    run = Run(source, steps=12, start=Progress(policy_version=1), bound=LagBound(5))
    run.loop.run(StopSignal())
    # With n rows in the table and one of them within the bound, each of a batch's four stands for n - 1 others.
    assert run.value("skipped_rows_total") == sum(4 * (rows - 1) for rows in range(1, 12))
