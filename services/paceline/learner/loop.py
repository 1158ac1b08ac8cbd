"""The training loop: take a batch, update, measure, publish, checkpoint. It knows nothing about losses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.config import Config
from paceline.errors import DeadlineError, StarvedError, StarvedForGoodError
from paceline.health import Doing
from paceline.identity import PolicyIdentity
from paceline.lag.bound import Starvation
from paceline.learner.algorithms import Algorithm, TransitionBatch
from paceline.learner.importance import importance_weights, usable_priorities
from paceline.learner.metrics import ACTIVITIES, LearnerMetrics
from paceline.learner.sources import Batch, BatchSource, RowsEndedError
from paceline.learner.training_lag import TrainingLag
from paceline.process import StopSignal
from paceline.rows import RowSpec
from paceline.telemetry import ActivityClock, get_logger

WAIT_SLICE_SECONDS = 0.5
"""A wait for rows looks up this often, to see a stop signal or a dead endpoint."""
PASS_OVER_SECONDS = 0.005
"""Between batches that are passed over: collectors need the processor more."""
REPORT_WAIT_SECONDS = 10.0
"""A wait for rows that lasts so long is said in the log, with its reason."""
STARVED_SECONDS = 5.0
"""A wait that the bound on the lag makes is said after so long, with the bound that would do."""


@dataclass(frozen=True)
class Progress:
    """How far the run has come, over all incarnations."""

    learner_step: int = 0
    environment_steps: int = 0
    policy_version: int = 0
    step_offset: int = 0
    """Environment steps whose rows the replay service no longer counts, because its store was lost."""
    ratio_from_steps: int = 0
    """Environment steps from which on updates are owed: where the table had the rows that the first batch needs."""
    ratio_from_updates: int = 0
    """Updates done by then."""

    def beside(self, inserted_row_count: int, min_rows: int) -> Progress:
        """This progress beside a table that counts so many rows ever inserted.

        If rows were lost with the store, nothing is owed for the steps so far: paying it with the first few rows of an
        empty table would overfit them.
        """
        missing = self.environment_steps - inserted_row_count
        if missing <= self.step_offset:
            return self if self.learner_step else replace(self, ratio_from_steps=self.step_offset + min_rows)
        return replace(
            self,
            step_offset=missing,
            ratio_from_steps=max(self.environment_steps, missing + min_rows),
            ratio_from_updates=self.learner_step,
        )


@dataclass(frozen=True)
class Budget:
    """How many updates the environment steps of a run ask for."""

    environment_steps: int
    """The run ends there."""
    updates_per_step: float | None
    """None: the ratio runs free."""

    def is_spent(self, progress: Progress) -> bool:
        """Whether the run is at its end: all environment steps are stored and, if held to a ratio, learned from."""
        if progress.environment_steps < self.environment_steps:
            return False
        return progress.learner_step >= self.updates_due(progress, self.environment_steps)

    def allows_update(self, progress: Progress, *, most_ahead: int) -> bool:
        """Whether another update is asked for by the steps of the whole run, and by those so far, give or take some."""
        if self.updates_per_step is None:
            return True
        whole = self.updates_due(progress, self.environment_steps)
        so_far = self.updates_due(progress, progress.environment_steps)
        return progress.learner_step < min(whole, so_far + most_ahead)

    def updates_due(self, progress: Progress, environment_steps: int) -> int:
        """Updates of the whole run that so many environment steps ask for; 0 where the ratio runs free."""
        if self.updates_per_step is None:
            return 0
        steps = max(environment_steps - progress.ratio_from_steps, 0)
        return progress.ratio_from_updates + math.floor(steps * self.updates_per_step)

    def ratio(self, progress: Progress) -> float | None:
        """Updates per environment step since they were owed; None before."""
        steps = progress.environment_steps - progress.ratio_from_steps
        return (progress.learner_step - progress.ratio_from_updates) / steps if steps > 0 else None


class Loop:
    """Trains until the budget is spent or the process is asked to stop."""

    def __init__(
        self,
        config: Config,
        *,
        algorithm: Algorithm,
        source: BatchSource,
        spec: RowSpec,
        start: Progress,
        incarnation: int,
        metrics: LearnerMetrics,
        lag: TrainingLag,
        publish: Callable[[Progress], None],
        checkpoint: Callable[[Progress], None],
        record: Callable[[Mapping[str, Any]], None],
        check_endpoint: Callable[[], None],
    ) -> None:
        """Go on from `start`.

        `publish`, `checkpoint` and `record` hand their argument on; `check_endpoint` raises when it is gone.
        """
        self._settings = config.learner
        self._algorithm, self._source, self._spec = algorithm, source, spec
        self._budget = Budget(
            config.run.environment_steps,
            self._settings.updates_per_step if self._settings.updates == "strict" else None,
        )
        table = config.replay.tables[self._settings.table]
        self._is_queue, self._rows_ended = table.queue, False
        self._has_priorities = table.sampler == "prioritised"
        self._importance_exponent = table.prioritised.importance_exponent
        # As far as the limiter lets samples run ahead of inserts, and the batch that is on its way meanwhile.
        window = config.limiter_window_rows() or 0
        self._most_ahead = math.ceil(window / 2 / self._settings.batch_size) + 1
        self._metrics, self._lag = metrics, lag
        self._starved_since: float | None = None
        self._starvation_said = False
        self._publish_snapshot, self._write_checkpoint, self._record = publish, checkpoint, record
        self._check_endpoint = check_endpoint
        self._incarnation = incarnation
        self._clock = ActivityClock(metrics.activity_seconds, ACTIVITIES, "starting")
        self._log = get_logger()
        self._last_record = time.monotonic()
        self._last_recorded = start
        self._replay_rows = 0
        self.progress = start

    def run(self, stop: StopSignal) -> bool:
        """Train; whether the run reached its end. Ends with a record and a checkpoint, and at its end with a snapshot.

        Raises:
            NonFiniteError: a loss, gradient or weight is not finite; nothing of it was published.
        """
        figures: Mapping[str, torch.Tensor] = {}
        while not self._is_at_end() and not stop.is_set():
            began = time.monotonic()
            batch = self._wait_for_batch(stop)
            if batch is None:
                continue
            self._clock.switch("updating")
            self._count_steps(batch)
            if not self._budget.allows_update(self.progress, most_ahead=self._most_ahead):
                # A shard that is complete gives samples freely while another still owes its rows. To be passed over
                # counts as sampled there, which lets it take them.
                self._metrics.passed_over_batches.inc()
                stop.wait(PASS_OVER_SECONDS)
                continue
            counting = self._lag.take(
                batch, policy_version=self.progress.policy_version, learner_step=self.progress.learner_step
            )
            if isinstance(counting, Starvation):
                stop.wait(PASS_OVER_SECONDS)
                self._lag.count()
                self._metrics.starved.add(time.monotonic() - began, counting.smallest_bound)
                self._note_starvation(str(counting), began)
                continue
            self._starved_since, self._starvation_said = None, False
            figures = self._update(counting)
            self._count_update()
            if self.progress.learner_step % self._settings.publish_every_updates == 0:
                self.publish()
            if self.progress.learner_step % self._settings.checkpoint.every_updates == 0:
                self.checkpoint()
            if time.monotonic() - self._last_record >= self._settings.record_every_seconds:
                self._record_figures(figures)
            self._clock.switch("waiting")
        finished = self._is_at_end()
        self._clock.switch("finishing")
        self._lag.count()
        if figures and self.progress.learner_step > self._last_recorded.learner_step:
            self._record_figures(figures)  # so that the record holds every row that was trained on
        if finished:
            self.publish()
        self.checkpoint()
        return finished

    def publish(self) -> None:
        """Publish the actor as the next version, if it is finite."""
        with self._clock.during("publishing"), self._metrics.publish_seconds.time():
            self._algorithm.check_finite()
            following = replace(self.progress, policy_version=self.progress.policy_version + 1)
            self._publish_snapshot(following)
            self.progress = following
            self._source.set_policy_version(following.policy_version)

    def checkpoint(self) -> None:
        """Write a checkpoint, if the state is finite."""
        with self._clock.during("checkpointing"), self._metrics.checkpoint_seconds.time():
            self._algorithm.check_finite()
            self._write_checkpoint(self.progress)

    def doing(self) -> Doing:
        """What the loop does, and since how many seconds. From any thread."""
        return self._clock.doing()

    def identity(self) -> PolicyIdentity:
        """The newest published policy."""
        return PolicyIdentity(self._incarnation, self.progress.policy_version)

    def _is_at_end(self) -> bool:
        """Whether all is learned that the run asks for: of a queue each row, which comes later than it is stored."""
        return self._rows_ended or (not self._is_queue and self._budget.is_spent(self.progress))

    def _wait_for_batch(self, stop: StopSignal) -> Batch | None:
        """The next batch, or None when the process is asked to stop first, or no batch will come any more."""
        self._clock.switch("waiting")
        since, said = time.monotonic(), False
        while not stop.is_set():
            self._clock.turn()
            self._check_endpoint()
            began = time.monotonic()
            try:
                return self._source.next_batch(WAIT_SLICE_SECONDS)
            except RowsEndedError:
                self._rows_ended = True
                return None
            except DeadlineError as error:
                self._lag.count()  # no update will have it done for a while
                if isinstance(error, StarvedForGoodError):
                    self._leave_out_the_rest(str(error))
                    return None
                if isinstance(error, StarvedError):
                    self._note_starvation(str(error), began)
                elif not said and time.monotonic() - since >= REPORT_WAIT_SECONDS:
                    self._log.info("waiting_for_rows", reason=str(error))
                    said = True
        return None

    def _note_starvation(self, reason: str, since: float) -> None:
        """There was no row to train on, because of the bound on the lag, from `since` until now."""
        self._starved_since = since if self._starved_since is None else self._starved_since
        seconds = time.monotonic() - self._starved_since
        if not self._starvation_said and seconds >= STARVED_SECONDS:
            self._log.warning("starved_by_lag_bound", reason=reason, starved_seconds=round(seconds, 1))
            self._starvation_said = True

    def _leave_out_the_rest(self, reason: str) -> None:
        """Every row of the run is there, and all are beyond the bound on the lag: it holds, and the ratio cannot."""
        steps = self._budget.environment_steps
        self.progress = replace(self.progress, environment_steps=steps)
        self._rows_ended = True
        self._log.warning(
            "updates_left_out",
            updates=max(0, self._budget.updates_due(self.progress, steps) - self.progress.learner_step),
            reason=reason,
        )

    def _update(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Improve the actor by the batch, and have the priorities of its rows follow."""
        if not self._has_priorities or batch.keys is None or batch.probabilities is None:
            return self._algorithm.update(TransitionBatch.from_rows(self._spec, batch.rows)).figures
        weight = importance_weights(batch.probabilities, batch.table_row_count, self._importance_exponent)
        update = self._algorithm.update(
            TransitionBatch.from_rows(self._spec, batch.rows, weight=torch.from_numpy(weight).to(batch.rows.device))
        )
        if update.priorities is not None:
            usable, priorities = usable_priorities(update.priorities.cpu().numpy())
            self._source.update_priorities(batch.keys[usable], priorities)
        return update.figures

    def _count_steps(self, batch: Batch) -> None:
        """Take over what the batch says of the run: its environment steps so far."""
        steps = batch.inserted_row_count + self.progress.step_offset
        if steps > self.progress.environment_steps:
            self.progress = replace(self.progress, environment_steps=steps)
        self._replay_rows = batch.table_row_count

    def _count_update(self) -> None:
        self.progress = replace(self.progress, learner_step=self.progress.learner_step + 1)
        self._metrics.updates.inc()
        self._metrics.set_learner_step(self.progress.learner_step)
        self._metrics.set_environment_steps(self.progress.environment_steps)
        self._metrics.set_replay_rows(self._replay_rows)

    def _record_figures(self, figures: Mapping[str, torch.Tensor]) -> None:
        with self._clock.during("recording"):
            now = time.monotonic()
            seconds, self._last_record = now - self._last_record, now
            before, self._last_recorded = self._last_recorded, self.progress
            self._lag.count()
            lag = self._metrics.rows.lag_versions
            fields: dict[str, Any] = {
                "learner_step": self.progress.learner_step,
                "environment_steps": self.progress.environment_steps,
                "policy_version": self.progress.policy_version,
                "updates_per_second": (self.progress.learner_step - before.learner_step) / seconds,
                "steps_per_second": (self.progress.environment_steps - before.environment_steps) / seconds,
                "replay_rows": self._replay_rows,
                "training_lag_p50": lag.quantile(0.5),
                "training_lag_p99": lag.quantile(0.99),
                "training_lag_counts": lag.counts(),
                **self._metrics.rows.totals(),
                **{name: float(value) for name, value in figures.items()},
            }
            ratio = self._budget.ratio(self.progress)
            if ratio is not None:
                fields["achieved_ratio"] = ratio
                self._metrics.set_update_ratio(ratio)
            self._record(fields)
