"""What a replica measures, in the collector and in the evaluator alike."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily

from paceline.telemetry import SECONDS_BUCKETS


class ReplicaMetrics:
    """Metrics of one replica, under its service's name, in the registry of its process."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        self._registry, self._prefix = registry, f"paceline_{service}"
        self._gauges: dict[str, Gauge] = {}
        self.fetch_seconds = self._histogram(
            "snapshot_fetch_seconds",
            "Seconds from a snapshot's header to its last chunk. Bad: near the time between two snapshots.",
        )
        self.stage_seconds = self._histogram(
            "snapshot_stage_seconds",
            "Seconds to verify a snapshot and lay it ready, beside acting. Bad: near the time between two snapshots.",
        )
        self.apply_seconds = self._histogram(
            "snapshot_apply_seconds",
            "Seconds that acting stands still for one snapshot. Bad: above a tenth of an environment step.",
        )
        self.apply_failures = Counter(
            f"{self._prefix}_snapshot_apply_failures_total",
            "Snapshots that broke off, were damaged or did not fit; the last good one acts on. Bad: any steady rate.",
            registry=registry,
        )
        self.poll_failures = Counter(
            f"{self._prefix}_snapshot_poll_failures_total",
            "Polls that brought no valid answer. Bad: growing, the learner is away.",
            registry=registry,
        )
        self._age = _SnapshotAge(f"{self._prefix}_snapshot_age_seconds")
        registry.register(self._age)

    def set_known_version(self, version: int) -> None:
        """The newest version that the learner told of."""
        self._age.began = time.monotonic()
        self._gauge("known_version", "Newest policy version that the learner told of.").set(version)

    def set_applied_version(self, version: int) -> None:
        """The version that acts from now on."""
        self._gauge("applied_version", "Policy version that acts. Bad: standing still below the known one.").set(
            version
        )

    def _histogram(self, thing: str, documentation: str) -> Histogram:
        return Histogram(f"{self._prefix}_{thing}", documentation, buckets=SECONDS_BUCKETS, registry=self._registry)

    def _gauge(self, thing: str, documentation: str) -> Gauge:
        # Made at the first value: a gauge that is not known yet is absent, not 0.
        if thing not in self._gauges:
            self._gauges[thing] = Gauge(f"{self._prefix}_{thing}", documentation, registry=self._registry)
        return self._gauges[thing]


class _SnapshotAge:
    """Seconds since a newer snapshot was heard of, worked out when it is read; absent before the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.began: float | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """For the registry."""
        if self.began is not None:
            yield GaugeMetricFamily(self._name, self._documentation, value=time.monotonic() - self.began)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """For the registry: the name, so that a second metric of that name is refused."""
        yield GaugeMetricFamily(self._name, self._documentation)

    _documentation = (
        "Seconds since the learner told of a newer snapshot, by this process's clock. "
        "Bad: growing while the run goes on, the learner is away or no longer advances."
    )
