"""What the training process measures of the rows that it trains on."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from paceline.lag.attribution import PARTS, Attribution
from paceline.process import StopSignal
from paceline.telemetry import LAG_BUCKETS, BulkHistogram

UPDATE_LAG_BUCKETS = tuple(bound * 10 for bound in LAG_BUCKETS)
WORKABLE_SHARE = 0.01
"""A bound is workable that leaves the learner without rows for less than this share of its time."""
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
            "Draws of rows over lag.max_lag_versions that were made and got no weight. Bad: above a hundredth of those "
            "trained on.",
            labels=(),
        )
        self._skipped = self._counter(
            "skipped_rows",
            "Draws, not distinct rows: how many draws of rows over lag.max_lag_versions would have come with those "
            "that were made, if the bound did not keep them from it; so one row counts again and again. Bad: a rate "
            "above that of the rows trained on.",
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
        self._by_part: dict[str, tuple[Counter, Counter]] = {}
        """Versions and seconds of each part; empty: lag is not split."""
        self._trained_rows = self._masked_rows = 0
        self._skipped_rows = 0.0
        self._versions, self._seconds = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0.0)
        registry.register(self)

    def split(self) -> None:
        """Lag will be split: the parts are there from now on, as 0."""
        self._by_part = {part: (self._part_versions.labels(part), self._part_seconds.labels(part)) for part in PARTS}

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
                versions, seconds = trained.attribution.version_totals(), trained.attribution.second_totals()
                for part, (version_counter, second_counter) in self._by_part.items():
                    self._versions[part] += versions[part]
                    self._seconds[part] += seconds[part]
                    version_counter.inc(versions[part])
                    second_counter.inc(seconds[part])

    def totals(self) -> dict[str, Any]:
        """All rows so far, as `metrics.jsonl` has them; the parts are left out where lag is not split."""
        with self._lock:
            totals: dict[str, Any] = {
                "trained_rows": self._trained_rows,
                "skipped_rows": round(self._skipped_rows),
                "masked_rows": self._masked_rows,
            }
            if self._by_part:
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


class StarvedTime:
    """How long the bound on the lag left no row to train on, and under which bound that would hardly have been."""

    _SECONDS = "paceline_learner_starved_seconds"
    _WORKABLE = "paceline_learner_workable_lag_versions"

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._lock, self._clock, self._began = threading.Lock(), clock, clock()
        self._bound = 0
        self._seconds = 0.0
        self._by_bound: dict[float, float] = {}
        """Seconds by the smallest bound under which a batch could have been drawn then; infinity: it is not known."""
        registry.register(self)

    def set_bound(self, max_lag_versions: int) -> None:
        """The bound in force."""
        self._bound = max_lag_versions

    def add(self, seconds: float, smallest_bound: int | None) -> None:
        """There was no batch for so long, and with this bound there would have been one; None: that is not known."""
        needed = math.inf if smallest_bound is None else _rounded_up(smallest_bound)
        with self._lock:
            self._seconds += seconds
            self._by_bound[needed] = self._by_bound.get(needed, 0.0) + seconds

    def find_workable_bound(self) -> int | None:
        """The smallest bound, not below the one in force, under which less than WORKABLE_SHARE of the time so far would
        have been without a batch; None where it was never starved, or that is not known."""
        with self._lock:
            most = WORKABLE_SHARE * max(self._clock() - self._began, 0.0)
            left, workable = 0.0, math.inf
            for bound in sorted(self._by_bound, reverse=True):
                left += self._by_bound[bound]
                if left >= most:
                    workable = bound
                    break
            else:
                workable = self._bound if self._by_bound else math.inf
        return None if math.isinf(workable) else max(int(workable), self._bound)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        yield CounterMetricFamily(
            self._SECONDS,
            "Seconds without a batch that lag.max_lag_versions lets through. Bad: growing.",
            self._seconds,
        )
        workable = self.find_workable_bound()
        if workable is not None:
            yield GaugeMetricFamily(
                self._WORKABLE,
                "The smallest lag.max_lag_versions under which less than 1 % of the time so far would have been "
                "starved, if nothing else changed; absent where the bound never starved. Bad: above that in force.",
                workable,
            )

    def describe(self) -> Iterator[Metric]:
        """For the registry: the names."""
        yield CounterMetricFamily(self._SECONDS, "")
        yield GaugeMetricFamily(self._WORKABLE, "")


def _rounded_up(bound: int) -> int:
    """To two digits, so that there are few different ones however long a run is."""
    unit: int = max(10 ** (len(str(bound)) - 2), 1)
    return -(-bound // unit) * unit


class NonFiniteUpdates:
    """A counter of errors that end the process. It goes on over restarts, and knows whether anybody reads it."""

    _NAME = "paceline_learner_non_finite"
    _DOCUMENTATION = (
        "Updates of the run whose loss, gradient or weights were NaN or infinite; each ends the learner. Bad: above 0."
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        self._count: int | None = None
        self._has_readers = threading.Event()
        registry.register(self)

    def go_on_from(self, count: int) -> None:
        """So many were noted by earlier processes of the run."""
        self._count = count

    def note(self) -> None:
        """There was one."""
        self._count = (self._count or 0) + 1

    def wait_for_readers(self, seconds: float, stop: StopSignal) -> None:
        """Stay for so long, unless nobody ever read /metrics, or the process is asked to stop.

        The whole time, whoever reads meanwhile: there may be several readers, and they are not told apart.
        """
        if self._has_readers.is_set():
            stop.wait(seconds)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """For the registry. Absent until it is known how many there were: a 0 before would make them new."""
        self._has_readers.set()
        if self._count is not None:
            yield CounterMetricFamily(self._NAME, self._DOCUMENTATION, value=self._count)

    def describe(self) -> Iterator[CounterMetricFamily]:
        """For the registry: the name."""
        yield CounterMetricFamily(self._NAME, self._DOCUMENTATION)
