"""What the training process measures of the rows that it trains on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from paceline.lag.attribution import PARTS, Attribution
from paceline.telemetry import LAG_BUCKETS, BulkHistogram

UPDATE_LAG_BUCKETS = tuple(bound * 10 for bound in LAG_BUCKETS)
AGE_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400)


@dataclass(frozen=True)
class Trained:
    """Rows trained on, in arrays of one length, and what belongs to them."""

    lag_versions: npt.NDArray[np.int64]
    lag_updates: npt.NDArray[np.int64]
    age_seconds: npt.NDArray[np.float64]
    """Of the rows of which it is known."""
    attribution: Attribution | None
    """None: lag is not split."""
    masked_rows: int
    """Rows that were drawn with these and were beyond the bound."""
    skipped_rows: float
    """`Batch.skipped_row_count`."""


class TrainedRows:
    """What is known of the rows trained on. A page shows all of it as of one moment, so that the parts of the lag sum
    to the lag."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock, self._members = threading.Lock(), CollectorRegistry()
        self.lag_versions = BulkHistogram(
            "paceline_learner_training_lag_versions",
            "Learner's version minus the row's version, for each row trained on. Bad: a p99 that grows without end.",
            LAG_BUCKETS,
            self._members,
        )
        self._lag_updates = BulkHistogram(
            "paceline_learner_training_lag_updates",
            "Updates between the policy that acted and the one in training, for each row trained on. "
            "Bad: growing without end.",
            UPDATE_LAG_BUCKETS,
            self._members,
        )
        self._age_seconds = BulkHistogram(
            "paceline_learner_row_age_seconds",
            "Seconds since a row was collected, by the learner's clock, when it is trained on; rows whose collector "
            "did not know it are left out. Bad: far above capacity divided by the insert rate.",
            AGE_BUCKETS,
            self._members,
        )
        self._trained = self._counter("trained_rows", "Rows trained on. Bad: a rate of 0 while rows arrive.", labels=())
        self._masked = self._counter(
            "masked_rows",
            "Rows over lag.max_lag_versions that were drawn and got no weight. Bad: above a hundredth of those "
            "trained on.",
            labels=(),
        )
        self._skipped = self._counter(
            "skipped_rows",
            "Rows over lag.max_lag_versions that would have been drawn with those that were, if the bound did not keep "
            "them from it. Bad: a rate above that of the rows trained on.",
            labels=(),
        )
        self._part_versions = self._counter(
            "training_lag_part_versions",
            "Training lag of all rows trained on, by what its versions were published during. Bad: transfer or queue "
            "above residence.",
            labels=("part",),
        )
        self._part_seconds = self._counter(
            "row_part_seconds",
            "Seconds from publication to training of all rows trained on, by where they passed. Bad: transfer or queue "
            "above residence.",
            labels=("part",),
        )
        self._counters: list[Counter] = [
            self._trained, self._masked, self._skipped, self._part_versions, self._part_seconds,
        ]  # fmt: skip
        self._is_split = False
        self._trained_rows = self._masked_rows = 0
        self._skipped_rows = 0.0
        self._versions, self._seconds = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0.0)
        registry.register(self)

    def split(self) -> None:
        """Lag will be split: the parts are there from now on, as 0."""
        self._is_split = True
        for part in PARTS:
            self._part_versions.labels(part)
            self._part_seconds.labels(part)

    def add(self, trained: Trained) -> None:
        """Count rows."""
        with self._lock:
            self.lag_versions.observe(trained.lag_versions)
            self._lag_updates.observe(trained.lag_updates)
            self._age_seconds.observe(trained.age_seconds)
            self._trained.inc(len(trained.lag_versions))
            self._masked.inc(trained.masked_rows)
            self._skipped.inc(trained.skipped_rows)
            self._trained_rows += len(trained.lag_versions)
            self._masked_rows += trained.masked_rows
            self._skipped_rows += trained.skipped_rows
            if trained.attribution is not None:
                for part, versions in trained.attribution.version_totals().items():
                    self._versions[part] += versions
                    self._part_versions.labels(part).inc(versions)
                for part, seconds in trained.attribution.second_totals().items():
                    self._seconds[part] += seconds
                    self._part_seconds.labels(part).inc(seconds)

    def totals(self) -> dict[str, Any]:
        """All rows so far, as `metrics.jsonl` has them; the parts are left out where lag is not split."""
        with self._lock:
            totals: dict[str, Any] = {
                "trained_rows": self._trained_rows,
                "skipped_rows": round(self._skipped_rows),
                "masked_rows": self._masked_rows,
            }
            if self._is_split:
                totals |= {"lag_part_versions": dict(self._versions), "lag_part_seconds": dict(self._seconds)}
            return totals

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        with self._lock:
            metrics = list(self._members.collect())
        yield from metrics

    def describe(self) -> Iterator[Metric]:
        """For the registry: the names."""
        for histogram in (self.lag_versions, self._lag_updates, self._age_seconds):
            yield from histogram.describe()
        for counter in self._counters:
            yield from counter.describe()

    def _counter(self, thing: str, documentation: str, *, labels: tuple[str, ...]) -> Counter:
        return Counter(f"paceline_learner_{thing}_total", documentation, labels, registry=self._members)


class NonFiniteUpdates:
    """A counter that knows whether somebody has read of an error which ends the process."""

    _NAME = "paceline_learner_non_finite"
    _DOCUMENTATION = (
        "Updates whose loss, gradient or weights were NaN or infinite; the learner ends with the first. Bad: above 0."
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        self._count = 0
        self._has_readers, self._was_read = threading.Event(), threading.Event()
        registry.register(self)

    def note(self) -> None:
        """There was one."""
        self._count += 1

    def wait_until_read(self, seconds: float) -> bool:
        """Wait until /metrics was read since `note`; at most so long, and not at all where nobody ever read it."""
        return self._has_readers.is_set() and self._was_read.wait(seconds)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """For the registry."""
        yield CounterMetricFamily(self._NAME, self._DOCUMENTATION, value=self._count)
        self._has_readers.set()
        if self._count:
            self._was_read.set()

    def describe(self) -> Iterator[CounterMetricFamily]:
        """For the registry: the name."""
        yield CounterMetricFamily(self._NAME, self._DOCUMENTATION)
