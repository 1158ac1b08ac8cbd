"""What a collector measures."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.collector.append_metrics import AppendMetrics
from paceline.replica import LearnerClock, ReplicaMetrics
from paceline.telemetry import LAG_BUCKETS, SECONDS_BUCKETS, BulkHistogram

_UPDATE_LAG_BUCKETS = tuple(bound * 10 for bound in LAG_BUCKETS)
_LAG_SECONDS_BUCKETS = (0, *SECONDS_BUCKETS, 300, 1800, 7200)

ACTIVITIES = (
    "starting",
    "waiting",
    "snapshot_apply",
    "acting",
    "environment",
    "filling",
    "append_wait",
    "lag_pause",
    "finishing",
)
"""waiting: for the first snapshot; append_wait: for replay to acknowledge a block, which is the back-pressure;
lag_pause: for a snapshot within lag.max_lag_versions."""


class CollectorMetrics:
    """Metrics of one collector process, in a registry of its own."""

    def __init__(self, registry: CollectorRegistry, learner_clock: LearnerClock | None = None) -> None:
        """`learner_clock`: what is known of it is served too."""
        self.replica = ReplicaMetrics(registry, "collector")
        registry.register(_ClockGauges(learner_clock or LearnerClock()))
        self.appends = AppendMetrics(registry)
        self.environment_steps = Counter(
            "paceline_collector_environment_steps_total",
            "Environment steps taken; steps that only reset do not count. Bad: a rate of 0 while the run goes on.",
            registry=registry,
        )
        self.acting_lag_versions = BulkHistogram(
            "paceline_collector_acting_lag_versions",
            "Newest known version minus the one that acts, at each environment step. Bad: a p99 above a few.",
            LAG_BUCKETS,
            registry,
        )
        self.acting_lag_updates = BulkHistogram(
            "paceline_collector_acting_lag_updates",
            "Learner updates between the newest known version and the one that acts, at each environment step. "
            "Bad: a p99 above a few times learner.publish_every_updates.",
            _UPDATE_LAG_BUCKETS,
            registry,
        )
        self.acting_lag_seconds = BulkHistogram(
            "paceline_collector_acting_lag_seconds",
            "Seconds since a version newer than the one that acts was known, at each environment step; 0 while none "
            "is. Bad: a p99 above the time between two snapshots.",
            _LAG_SECONDS_BUCKETS,
            registry,
        )
        self.paused = Gauge(
            "paceline_collector_paused",
            "1 while the collector pauses, over lag.max_lag_versions. Bad: 1 for longer than a fetch takes.",
            registry=registry,
        )
        self.pauses = Counter(
            "paceline_collector_pauses_total",
            "Times that the collector paused over lag.max_lag_versions. Bad: a rate near that of snapshots.",
            registry=registry,
        )
        self.episodes = Counter(
            "paceline_collector_episodes_total",
            "Episodes that ended. Bad: none, for many times their length.",
            registry=registry,
        )
        self.episode_return = Summary(
            "paceline_collector_episode_return",
            "Returns of finished episodes, under the exploring policy. Bad: a falling mean.",
            registry=registry,
        )
        self.environment_faults = Counter(
            "paceline_collector_environment_faults_total",
            "Times that an environment raised or returned nonsense. Bad: anything above 0.",
            registry=registry,
        )
        self.rows_dropped = Counter(
            "paceline_collector_rows_dropped_total",
            "Unsealed rows and open windows of episodes that an environment fault ended. Bad: growing.",
            registry=registry,
        )
        self.report_failures = Counter(
            "paceline_collector_report_failures_total",
            "Reports of episodes that the learner did not take at once. Bad: growing, the learner is away.",
            registry=registry,
        )
        self.episodes_unreported = Counter(
            "paceline_collector_episodes_unreported_total",
            "Episodes left out of the reports because too many waited. Bad: anything above 0.",
            registry=registry,
        )
        self.activity_seconds = Counter(
            "paceline_collector_activity_seconds_total",
            "Seconds of the collecting loop by what it did. Bad: append_wait or snapshot_apply above a tenth.",
            ["activity"],
            registry=registry,
        )


class _ClockGauges(Collector):
    """What is known of the learner's clock, worked out when it is read; absent while nothing is."""

    def __init__(self, clock: LearnerClock) -> None:
        self._clock = clock

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """For the registry."""
        if (offset := self._clock.offset()) is not None:
            families = list(self.describe())
            for family, value in zip(families, (offset.seconds, offset.uncertainty_seconds), strict=True):
                family.add_metric([], value)
            yield from families

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """For the registry: every family, without samples."""
        yield GaugeMetricFamily(
            "paceline_collector_clock_offset_seconds",
            "The learner's clock minus this host's, estimated from polls. Bad: seconds, rows are stamped by estimate.",
            labels=(),
        )
        yield GaugeMetricFamily(
            "paceline_collector_clock_uncertainty_seconds",
            "How far the estimated offset may be off. Bad: above the time between two snapshots.",
            labels=(),
        )
