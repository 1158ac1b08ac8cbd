"""What the training process measures."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.telemetry import LAG_BUCKETS, SECONDS_BUCKETS, BulkHistogram

ACTIVITIES = ("starting", "waiting", "updating", "publishing", "checkpointing", "recording", "finishing")

UPDATE_LAG_BUCKETS = tuple(bound * 10 for bound in LAG_BUCKETS)
AGE_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400)


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
            "Batches not trained on: the run's steps did not ask for an update yet. Bad: growing while no shard of replay "
            "is behind the others.",
            registry=registry,
        )
        self.training_lag_versions = BulkHistogram(
            "paceline_learner_training_lag_versions",
            "Learner's version minus the row's version, for each row trained on. Bad: a p99 that grows without end.",
            LAG_BUCKETS,
            registry,
        )
        self.training_lag_updates = BulkHistogram(
            "paceline_learner_training_lag_updates",
            "Updates between the policy that acted and the one in training, for each row trained on. "
            "Bad: growing without end.",
            UPDATE_LAG_BUCKETS,
            registry,
        )
        self.row_age_seconds = BulkHistogram(
            "paceline_learner_row_age_seconds",
            "Seconds since a row was collected, by the collector's clock, when it is trained on. "
            "Bad: far above capacity divided by the insert rate.",
            AGE_BUCKETS,
            registry,
        )
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
        if thing not in self._gauges:
            self._gauges[thing] = Gauge(f"paceline_learner_{thing}", documentation, labels, registry=self._registry)
        return self._gauges[thing]
