"""What the endpoint process measures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Lock

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.identity import PolicyIdentity
from paceline.lag.publications import Publication, Publications
from paceline.learner.registry import CollectorState, RunRegistry
from paceline.process import own_time
from paceline.serving.metrics import PollMetrics
from paceline.telemetry import LAG_BUCKETS, SECONDS_BUCKETS

ACTIVITIES = ("waiting", "taking_snapshot", "recording")
_KEPT_VERSIONS = 2_000
_KEPT_RETURNS = 100


class EndpointMetrics(Collector):
    """Metrics of one endpoint, in a registry of its own.

    What is known only at times (versions, lags, ages, returns) is read from the state when somebody looks, and is
    absent until it is known; so are the series of a collector that fell silent.
    """

    def __init__(self, registry: CollectorRegistry, run: RunRegistry, clock: Callable[[], float] = own_time) -> None:
        """`clock` gives seconds since 1970."""
        self._run, self._clock = run, clock
        self._published: PolicyIdentity | None = None
        self._publications = Publications(kept=_KEPT_VERSIONS)
        # Publishing and looking are on two threads.
        self._lock = Lock()
        self._returns: deque[float] = deque(maxlen=_KEPT_RETURNS)
        self._evaluation: tuple[PolicyIdentity, float] | None = None
        self.polls = PollMetrics(registry, "endpoint")
        self.poll_lag_versions = Histogram(
            "paceline_endpoint_poll_lag_versions",
            "Versions between the published one and the one a collector acts with, at each of its polls, or as often "
            "as a relay tells of it. "
            "Bad: above 1 or 2 for long: snapshots come faster than collectors apply them.",
            buckets=LAG_BUCKETS,
            registry=registry,
        )
        self.durable_seconds = Histogram(
            "paceline_endpoint_snapshot_durable_seconds",
            "Seconds until a published version is on disk, before it is served. Bad: above the time between two.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.skipped_snapshots = Counter(
            "paceline_endpoint_skipped_snapshots_total",
            "Snapshots that a newer one replaced before they were served. Bad: growing: the disk is too slow.",
            registry=registry,
        )
        self.episodes = Counter(
            "paceline_endpoint_episodes_total",
            "Finished episodes that collectors reported. Bad: a rate of 0.",
            registry=registry,
        )
        self.activity_seconds = Counter(
            "paceline_endpoint_activity_seconds_total",
            "Seconds of the loop that serves the training process, by what it did. Bad: little waiting.",
            ["activity"],
            registry=registry,
        )
        registry.register(self)

    def observe_poll(self, applied: PolicyIdentity | None) -> None:
        """Observe how far a polling collector is behind; nothing while either side has no snapshot."""
        if self._published is not None and applied is not None:
            self.poll_lag_versions.observe(_lag(self._published, applied))

    def published(self, identity: PolicyIdentity, learner_step: int, published_at: float) -> None:
        """Note the snapshot that is served from now on; `published_at` in seconds since 1970."""
        with self._lock:
            self._publications.add(Publication(identity.version, published_at, learner_step))
            self._published = identity

    def count_episodes(self, returns: Sequence[float]) -> None:
        """Count finished episodes and note their returns."""
        self.episodes.inc(len(returns))
        self._returns.extend(returns)

    def set_evaluation(self, policy: PolicyIdentity, mean_return: float) -> None:
        """Note an evaluation."""
        if self._evaluation is None or policy > self._evaluation[0]:
            self._evaluation = (policy, mean_return)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """For the registry: every family, without samples."""
        yield from self._families().values()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """For the registry: the families that have a value now."""
        families = self._families()
        alive = self._run.alive()
        families["collectors"].add_metric([], len(alive))
        families["environment_steps"].add_metric([], self._run.environment_steps())
        families["paused_collectors"].add_metric([], sum(collector.paused for collector in alive))
        with self._lock:
            self._add_versions(families, alive)
        returns = list(self._returns)
        if returns:
            families["episode_return_mean"].add_metric([], sum(returns) / len(returns))
        if self._evaluation is not None:
            families["evaluation_version"].add_metric([], self._evaluation[0].version)
            families["evaluation_return_mean"].add_metric([], self._evaluation[1])
        yield from (family for family in families.values() if family.samples)

    def _add_versions(self, families: dict[str, GaugeMetricFamily], alive: Sequence[CollectorState]) -> None:
        published, newest, now = self._published, self._publications.newest, self._clock()
        if published is not None and newest is not None:
            families["published_version"].add_metric([], published.version)
            families["published_incarnation"].add_metric([], published.incarnation)
            families["snapshot_age_seconds"].add_metric([], max(now - newest.published_at, 0.0))
        for collector in alive:
            if collector.applied is None:
                continue
            label, applied = [str(collector.index)], np.asarray(collector.applied.version)
            families["applied_version"].add_metric(label, collector.applied.version)
            if published is None:
                continue
            families["publish_lag_versions"].add_metric(label, _lag(published, collector.applied))
            for name, value in (
                ("publish_lag_updates", self._publications.updates_between(applied, published.version)),
                ("publish_lag_seconds", self._publications.seconds_behind(applied, now)),
            ):
                if np.isfinite(value):
                    families[name].add_metric(label, float(value))

    def _families(self) -> dict[str, GaugeMetricFamily]:
        return {
            name: GaugeMetricFamily(f"paceline_endpoint_{name}", documentation, labels=labels)
            for name, (documentation, labels) in _GAUGES.items()
        }


_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "published_version": ("Policy version served now. Bad: standing still while rows arrive.", ()),
    "published_incarnation": ("Incarnation of the learner that published it. Bad: growing often.", ()),
    "snapshot_age_seconds": (
        "Seconds since the served snapshot was published. Bad: growing far beyond the publish interval: "
        "the training process is stuck.",
        (),
    ),
    "applied_version": (
        "Policy version that a collector acts with, by its last poll. Bad: standing still.",
        ("collector",),
    ),
    "publish_lag_versions": (
        "Published version minus the one a collector acts with. Bad: above 2 for long, or growing.",
        ("collector",),
    ),
    "publish_lag_updates": (
        "Learner updates between the published snapshot and the one a collector acts with; absent when that one is "
        "older than the endpoint remembers. Bad: growing.",
        ("collector",),
    ),
    "publish_lag_seconds": (
        "Seconds since a version newer than the one that a collector acts with was published, 0 where none was; absent "
        "when that is longer ago than the endpoint remembers. Bad: above the time between two snapshots.",
        ("collector",),
    ),
    "paused_collectors": (
        "Collectors that were over lag.max_lag_versions and took no steps, at their last poll. Bad: above 0 for long.",
        (),
    ),
    "collectors": ("Collectors heard within learner.silence_seconds. Bad: fewer than were started.", ()),
    "environment_steps": ("Environment steps of the run, by snapshots and reports. Bad: standing still.", ()),
    "episode_return_mean": (f"Mean return of the last {_KEPT_RETURNS} episodes, explored ones. Bad: falling.", ()),
    "evaluation_version": ("Policy version of the newest evaluation. Bad: far behind the published one.", ()),
    "evaluation_return_mean": ("Mean return of the newest evaluation. Bad: falling.", ()),
}


def _lag(published: PolicyIdentity, applied: PolicyIdentity) -> int:
    return max(published.version - applied.version, 0)
