"""What the training process measures."""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.errors import DeadlineError, UnavailableError
from paceline.lag.clock import ClockOffset
from paceline.learner.row_metrics import NonFiniteUpdates, StarvedTime, TrainedRows
from paceline.telemetry import SECONDS_BUCKETS

ACTIVITIES = ("starting", "waiting", "updating", "publishing", "checkpointing", "recording", "finishing")
USUAL_CUTS = (UnavailableError, DeadlineError)
"""Why a stream of rows is cut as a rule: replay is away, or its limiter held the stream back for too long."""


class LearnerMetrics:
    """Metrics of one training process, in a registry of its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.updates = Counter(
            "paceline_learner_updates_total",
            "Optimiser updates since this process started. Bad: a rate of 0 while rows arrive.",
            registry=registry,
        )
        self.passed_over_batches = Counter(
            "paceline_learner_passed_over_batches_total",
            "Batches not trained on: the run's steps did not ask for an update yet. Bad: growing while no shard of "
            "replay is behind the others.",
            registry=registry,
        )
        self.rows = TrainedRows(registry)
        self.non_finite = NonFiniteUpdates(registry)
        self.starved = StarvedTime(registry)
        self.publish_seconds = Histogram(
            "paceline_learner_snapshot_publish_seconds",
            "Seconds that the training loop spends on one snapshot. Bad: above a tenth of the time between two.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.checkpoint_seconds = Histogram(
            "paceline_learner_checkpoint_seconds",
            "Seconds that one checkpoint takes. Bad: above the grace period of a stop.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.activity_seconds = Counter(
            "paceline_learner_activity_seconds_total",
            "Seconds of the training loop by what it did. Bad: waiting above a third while updates are wanted.",
            ["activity"],
            registry=registry,
        )
        self.sample_failures = Counter(
            "paceline_learner_sample_failures_total",
            "Times that a stream of rows from replay was cut and opened again, by reason. Bad: a steady rate.",
            ["reason"],
            registry=registry,
        )
        for error in USUAL_CUTS:
            self.sample_failures.labels(error.__name__)  # served as 0: the first one is no growth otherwise
        self.shard_skips = Counter(
            "paceline_learner_shard_skips_total",
            "Batches put together without rows of a shard, since it was away. Bad: growing for longer than the shard "
            "takes to start again.",
            ["shard"],
            registry=registry,
        )
        self.priority_updates = Counter(
            "paceline_learner_priority_updates_total",
            "Rows whose new priority replay took. Bad: a rate of 0 while a learner of a prioritised table updates.",
            registry=registry,
        )
        self.priority_updates_dropped = Counter(
            "paceline_learner_priority_updates_dropped_total",
            "Rows whose new priority was dropped, since replay was away or slower than the learner. Bad: a steady "
            "rate; these rows keep a priority that is out of date.",
            registry=registry,
        )
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}
        self._making = threading.Lock()

    def set_environment_steps(self, value: int) -> None:
        """Environment steps of the whole run, known once replay answered."""
        self._gauge("environment_steps", "Environment steps of the run, as stored by replay.").set(value)

    def set_learner_step(self, value: int) -> None:
        """Updates of the whole run."""
        self._gauge("step", "Updates of the run, over all incarnations.").set(value)

    def set_policy_version(self, value: int) -> None:
        """Version of the newest snapshot handed to the endpoint."""
        self._gauge("policy_version", "Version of the newest snapshot. Bad: unchanged while updates go on.").set(value)

    def set_update_ratio(self, value: float) -> None:
        """Updates per environment step, achieved."""
        self._gauge(
            "update_ratio", "Updates per environment step since learning started. Bad: off learner.updates_per_step."
        ).set(value)

    def set_replay_rows(self, value: int) -> None:
        """Rows in the table, as of the last batch."""
        self._gauge("replay_rows", "Rows in the table that is learned from, as of the last batch.").set(value)

    def set_max_lag_versions(self, value: int) -> None:
        """The bound on the lag, of a run that has one."""
        self.starved.set_bound(value)
        self._gauge(
            "max_lag_versions", "The bound, lag.max_lag_versions. Bad: below the publish lag: collectors pause."
        ).set(value)

    def set_replay_clock(self, shard: str, offset: ClockOffset) -> None:
        """How far the clock of a shard of replay is from the learner's."""
        self._gauge(
            "replay_clock_offset_seconds",
            "Replay's clock minus the learner's, estimated. Bad: seconds; attribution corrects for it, logs do not.",
            ("shard",),
        ).labels(shard).set(offset.seconds)
        self._gauge(
            "replay_clock_uncertainty_seconds",
            "How far the estimated offset may be off. Bad: above the time between two snapshots: parts blur.",
            ("shard",),
        ).labels(shard).set(offset.uncertainty_seconds)

    def set_followed(self, shard: str, *, behind: int, ring_rows: int) -> None:
        """How far a follower is behind its table, and what it holds of it."""
        self._gauge(
            "follow_behind_rows",
            "Rows that replay stored and the learner, which follows the table, has not received. Bad: growing.",
            ("shard",),
        ).labels(shard).set(behind)
        self._gauge(
            "ring_rows",
            "Rows that the learner, which follows the table, holds itself. Bad: far below the rows of replay's table.",
            ("shard",),
        ).labels(shard).set(ring_rows)

    def _gauge(self, thing: str, documentation: str, labels: tuple[str, ...] = ()) -> Gauge:
        # Made at the first value: a gauge that is not known yet is absent, not 0.
        with self._making:
            if thing not in self._gauges:
                self._gauges[thing] = Gauge(f"paceline_learner_{thing}", documentation, labels, registry=self._registry)
            return self._gauges[thing]
