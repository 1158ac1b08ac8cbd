"""What a relay measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.identity import PolicyIdentity
from paceline.lag.clock import ClockOffset
from paceline.process import own_time
from paceline.serving.metrics import PollMetrics
from paceline.telemetry import SECONDS_BUCKETS

UPSTREAM_RESULTS = ("snapshot", "not_modified", "older", "damaged", "failed")
"""older: nothing newer than what is served, though that was asked for, so it is not taken; damaged: a snapshot that
broke off, or whose bytes are not those of its header."""


class RelayMetrics(Collector):
    """Metrics of one relay, in a registry of its own. What is not known is absent.

    The relay's event loop writes; whoever serves /metrics reads.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        collector_count: Callable[[], int],
        clock_offset: Callable[[], ClockOffset | None],
        clock: Callable[[], float] = own_time,
    ) -> None:
        """Begin with nothing known.

        Args:
            collector_count: collectors below that live.
            clock_offset: the learner's clock minus `clock`; None while unknown.
            clock: this process's, in seconds since 1970.
        """
        self._collector_count, self._clock_offset, self._clock = collector_count, clock_offset, clock
        self._served: tuple[PolicyIdentity, float] | None = None
        self._known: PolicyIdentity | None = None
        self._answered_at: float | None = None
        self.polls = PollMetrics(registry, "relay")
        upstream = Counter(
            "paceline_relay_upstream_polls_total",
            "Polls that this relay made, by what came of them. Bad: damaged, or failed for long.",
            ["result"],
            registry=registry,
        )
        self._upstream = {result: upstream.labels(result) for result in UPSTREAM_RESULTS}
        self.received_bytes = Counter(
            "paceline_relay_received_bytes_total",
            "Bytes of snapshots received, damaged ones included. Bad: near what the network carries.",
            registry=registry,
        )
        self.fetch_seconds = Histogram(
            "paceline_relay_fetch_seconds",
            "Seconds from a snapshot's header until it is verified. Bad: near the time between two snapshots.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.publish_delay_seconds = Histogram(
            "paceline_relay_publish_delay_seconds",
            "Seconds from a snapshot's publication, by the learner's clock, until it is served here. "
            "Bad: near the time between two snapshots.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        registry.register(self)

    def count_upstream(self, result: str) -> None:
        """Count a poll that this relay made, by one of `UPSTREAM_RESULTS`."""
        self._upstream[result].inc()

    def upstream_answered(self, newest: PolicyIdentity | None) -> None:
        """Upstream answered just now, and told of that snapshot."""
        self._answered_at = time.monotonic()
        if newest is not None and (self._known is None or newest > self._known):
            self._known = newest

    def serves(self, identity: PolicyIdentity, published_at: float) -> None:
        """That snapshot is served from now on; `published_at` by the learner's clock, in seconds since 1970."""
        self._served = (identity, published_at)
        age = self._age()
        if age is not None:
            self.publish_delay_seconds.observe(age)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """For the registry: every family, without samples."""
        yield from self._families().values()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """For the registry: the families that have a value now."""
        served, known, answered_at, offset = self._served, self._known, self._answered_at, self._clock_offset()
        values: dict[str, float | None] = {
            "served_version": None if served is None else served[0].version,
            "served_incarnation": None if served is None else served[0].incarnation,
            "behind_versions": None if served is None or known is None else max(known.version - served[0].version, 0),
            "snapshot_age_seconds": self._age(),
            "upstream_silence_seconds": None if answered_at is None else time.monotonic() - answered_at,
            "collectors": self._collector_count(),
            "clock_offset_seconds": None if offset is None else offset.seconds,
            "clock_uncertainty_seconds": None if offset is None else offset.uncertainty_seconds,
        }
        for name, family in self._families().items():
            if (value := values[name]) is not None:
                family.add_metric([], value)
                yield family

    def _age(self) -> float | None:
        offset = self._clock_offset()
        if self._served is None or offset is None:
            return None
        return max(offset.to_peer(self._clock()) - self._served[1], 0.0)

    def _families(self) -> dict[str, GaugeMetricFamily]:
        return {name: GaugeMetricFamily(f"paceline_relay_{name}", text) for name, text in _GAUGES.items()}


_GAUGES = {
    "served_version": "Policy version served now. Bad: below the published one for long.",
    "served_incarnation": "Incarnation of the learner that published it. Bad: below the published one.",
    "behind_versions": "Newest version that upstream told of minus the one served. Bad: above 1 for long.",
    "snapshot_age_seconds": (
        "Seconds since the served snapshot was published, by the learner's clock. Bad: growing far beyond the publish "
        "interval."
    ),
    "upstream_silence_seconds": "Seconds since upstream answered. Bad: above two relay.poll_seconds: it is away.",
    "collectors": "Collectors below this relay, heard within learner.silence_seconds. Bad: fewer than were started.",
    "clock_offset_seconds": "The learner's clock minus this host's. Bad: changing by leaps: a host slept, or one of "
    "the two began anew by another clock.",
    "clock_uncertainty_seconds": "How far that offset may be off. Bad: above the delays that it serves to measure.",
}
