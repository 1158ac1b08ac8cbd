"""The endpoint's metrics: absent until known, gone with their collector, bounded however often it restarts."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from paceline.identity import PolicyIdentity
from paceline.learner.endpoint_metrics import EndpointMetrics
from paceline.learner.registry import COLLECTOR, RunRegistry

SILENCE_SECONDS = 30.0


class Page:
    """One endpoint's state and what its /metrics say."""

    def __init__(self) -> None:
        self.now = 5000.0
        self.run = RunRegistry(
            {}, max_collectors=8, silence_seconds=SILENCE_SECONDS, warmup_steps=0, collector_count=1, clock=self.clock
        )
        self.registry = CollectorRegistry()
        self.metrics = EndpointMetrics(self.registry, self.run, clock=self.clock)

    def clock(self) -> float:
        return self.now

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"paceline_endpoint_{name}", labels)

    def collectors_of(self, name: str) -> list[str]:
        return sorted(
            sample.labels["collector"]
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == f"paceline_endpoint_{name}"
        )

    def series_count(self) -> int:
        return sum(not line.startswith(b"#") for line in generate_latest(self.registry).splitlines())

    def join_and_poll(self, version: int, index: int | None = None, process: str = "a") -> int:
        place = self.run.join(COLLECTOR, index, process)
        self.run.polled(place.index, place.incarnation, PolicyIdentity(1, version))
        self.metrics.observe_poll(PolicyIdentity(1, version))
        return place.index


@pytest.fixture
def page() -> Page:
    return Page()


def test_before_the_first_snapshot_there_is_no_version_age_or_lag(page: Page) -> None:
    page.join_and_poll(4)
    for name in ("published_version", "snapshot_age_seconds", "episode_return_mean", "evaluation_return_mean"):
        assert page.value(name) is None
    for lag in ("publish_lag_versions", "publish_lag_updates", "publish_lag_seconds"):
        assert page.value(lag, collector="0") is None
    assert page.value("poll_lag_versions_count") == 0
    assert page.value("applied_version", collector="0") == 4


def test_a_collector_without_a_snapshot_has_no_lag(page: Page) -> None:
    page.metrics.published(PolicyIdentity(1, 3), 30, page.now)
    place = page.run.join(COLLECTOR, None, "a")
    page.run.polled(place.index, place.incarnation, None)
    assert page.collectors_of("publish_lag_versions") == []
    assert page.value("collectors") == 1


def test_lag_is_the_published_version_minus_the_applied_one_in_versions_and_updates(page: Page) -> None:
    for version in (1, 2, 3, 4):
        page.metrics.published(PolicyIdentity(1, version), version * 50, page.now)
    page.join_and_poll(2)
    assert page.value("publish_lag_versions", collector="0") == 2
    assert page.value("publish_lag_updates", collector="0") == 100
    page.now += 3
    assert page.value("snapshot_age_seconds") == 3


def test_lag_in_seconds_counts_from_the_first_version_that_the_collector_does_not_act_with(page: Page) -> None:
    for version in (1, 2, 3, 5):
        page.metrics.published(PolicyIdentity(1, version), version * 50, page.now)
        page.now += 10
    for version, seconds in ((1, 30), (2, 20), (3, 10), (4, 10), (5, 0), (6, 0)):
        page.join_and_poll(version, index=0)
        assert page.value("publish_lag_seconds", collector="0") == seconds


def test_what_was_published_longer_ago_than_is_remembered_has_no_lag_in_updates_and_seconds(page: Page) -> None:
    for version in range(1, 4 * 2_000 + 2):
        page.metrics.published(PolicyIdentity(1, version), version, page.now)
    page.join_and_poll(1)
    assert page.value("publish_lag_versions", collector="0") == 8_000
    assert page.value("publish_lag_updates", collector="0") is None
    assert page.value("publish_lag_seconds", collector="0") is None


def test_collectors_that_pause_are_counted_by_their_last_poll(page: Page) -> None:
    places = [page.run.join(COLLECTOR, None, f"process {number}") for number in range(3)]
    for place in places:
        page.run.polled(place.index, place.incarnation, PolicyIdentity(1, 1), paused=place.index != 1)
    assert page.value("paused_collectors") == 2
    page.run.polled(0, places[0].incarnation, None)
    assert page.value("paused_collectors") == 1
    page.now += SILENCE_SECONDS + 1
    assert page.value("paused_collectors") == 0


def test_a_lag_is_never_negative(page: Page) -> None:
    page.metrics.published(PolicyIdentity(2, 3), 30, page.now + 10)
    page.join_and_poll(9)
    assert page.value("publish_lag_versions", collector="0") == 0
    assert page.value("snapshot_age_seconds") == 0


def test_a_lag_of_37_falls_into_a_finite_bucket(page: Page) -> None:
    page.metrics.published(PolicyIdentity(1, 40), 400, page.now)
    page.join_and_poll(3)
    buckets = [
        float(sample.labels["le"])
        for family in page.registry.collect()
        for sample in family.samples
        if sample.name == "paceline_endpoint_poll_lag_versions_bucket" and sample.value == 1
    ]
    assert math.isfinite(min(buckets))


def test_the_series_of_a_silent_collector_disappear(page: Page) -> None:
    page.metrics.published(PolicyIdentity(1, 3), 30, page.now)
    for number in range(3):
        page.join_and_poll(3, process=f"process {number}")
    page.now += SILENCE_SECONDS - 1
    for index in (0, 2):
        page.run.polled(index, 1, PolicyIdentity(1, 3))
    assert page.collectors_of("publish_lag_versions") == ["0", "1", "2"]
    page.now += 2
    for lag in ("publish_lag_versions", "publish_lag_updates", "publish_lag_seconds"):
        assert page.collectors_of(lag) == ["0", "2"]
    assert page.collectors_of("applied_version") == ["0", "2"]
    assert page.value("collectors") == 2


def test_500_restarts_of_a_collector_never_grow_the_number_of_series(page: Page) -> None:
    page.metrics.published(PolicyIdentity(1, 3), 30, page.now)
    page.join_and_poll(3, index=0)
    count = page.series_count()
    for number in range(500):
        page.join_and_poll(3, index=0, process=f"restart {number}")
        assert page.series_count() == count


def test_restarts_without_a_named_index_stay_within_the_live_ones_and_one(page: Page) -> None:
    page.metrics.published(PolicyIdentity(1, 3), 30, page.now)
    for number in range(50):
        page.join_and_poll(3, process=f"restart {number}")
        assert len(page.collectors_of("applied_version")) <= 2
        page.now += SILENCE_SECONDS / 2 + 1


def test_two_endpoints_in_one_process_do_not_clash() -> None:
    first, second = Page(), Page()
    first.metrics.published(PolicyIdentity(1, 3), 30, first.now)
    assert (first.value("published_version"), second.value("published_version")) == (3, None)


def test_returns_are_means_once_there_are_any(page: Page) -> None:
    page.metrics.count_episodes([-100.0, -50.0])
    page.metrics.set_evaluation(PolicyIdentity(1, 5), -120.0)
    page.metrics.set_evaluation(PolicyIdentity(1, 4), -500.0)
    assert page.value("episodes_total") == 2
    assert page.value("episode_return_mean") == -75
    assert (page.value("evaluation_version"), page.value("evaluation_return_mean")) == (5, -120)
