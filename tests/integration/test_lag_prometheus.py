"""`paceline lag URL` and `paceline top URL` through a real Prometheus that scrapes real pages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from integration.waiting import wait_until
from observability import Prometheus as Server
from paceline import config
from paceline.errors import ConfigError, InvalidInputError, NotFoundError, UnavailableError
from paceline.local.lag_data import read_prometheus
from paceline.local.lag_metrics import KEPT, SHOWN
from paceline.local.lag_view import LagView, _settings, make_view
from paceline.local.prometheus import Prometheus
from paceline.local.status import StatusReader, Watched
from paceline.local.top import follow
from paceline.process import StopSignal
from paceline.telemetry import LAG_BUCKETS, BulkHistogram, MetricsServer, serve_metrics


class Served:
    """A process that only serves a page, of metrics by their names in the schema."""

    def __init__(self, service: str, **seconds: float) -> None:
        self._registry = CollectorRegistry()
        self._prefix = f"paceline_{service}_"
        spent = Counter(f"{self._prefix}activity_seconds_total", "x", ["activity"], registry=self._registry)
        for activity, value in seconds.items():
            spent.labels(activity).inc(value)
        self.server: MetricsServer = serve_metrics(self._registry, "127.0.0.1:0", service)

    def set(self, name: str, value: float) -> None:
        Gauge(self._prefix + name, "x", registry=self._registry).set(value)

    def set_each(self, name: str, label: str, values: dict[str, float]) -> None:
        gauge = Gauge(self._prefix + name, "x", [label], registry=self._registry)
        for value, number in values.items():
            gauge.labels(value).set(number)

    def count(self, name: str, value: float) -> None:
        Counter(self._prefix + name, "x", registry=self._registry).inc(value)

    def lag(self, name: str, values: list[int]) -> BulkHistogram:
        histogram = BulkHistogram(self._prefix + name, "x", LAG_BUCKETS, self._registry)
        histogram.observe(np.array(values))
        return histogram

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"


class Scraped:
    """A learner and two collectors, and the Prometheus that scrapes them."""

    def __init__(self, folder: Path) -> None:
        self.learner = Served("learner", updating=9, publishing=1)
        self.learner.set("step", 100)
        self.learner.set("environment_steps", 250)
        self.training_lag = self.learner.lag("training_lag_versions", [1] * 50 + [4] * 50)
        self.collectors = [Served("collector", acting=4, snapshot_apply=1) for _ in range(2)]
        for collector, lag in zip(self.collectors, (0, 2), strict=True):
            collector.lag("acting_lag_versions", [lag] * 10)
        targets = {"learner": [self.learner.address], "collector": [each.address for each in self.collectors]}
        self.prometheus = Server(folder, targets, labels={"run": "trial"})
        self.prometheus.wait_for_scrapes(1)
        self.url = f"http://127.0.0.1:{self.prometheus.port}"

    def view(self, **options: str | None) -> LagView:
        since = options.pop("since", None)
        return make_view(read_prometheus(Prometheus(self.url, **options), since=since, config=None))

    def close(self) -> None:
        self.prometheus.stop()
        for process in (self.learner, *self.collectors):
            process.server.close()


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    run = Scraped(tmp_path_factory.mktemp("prometheus"))
    yield run
    run.close()


def test_a_run_is_read_through_the_prometheus_that_scrapes_it(scraped):
    view = scraped.view()
    training, acting = view.training["versions"], view.acting["versions"]
    assert training is not None
    assert acting is not None
    assert (training.count, training.mean, training.quantile(0.5), training.quantile(0.99)) == (100, 2.5, 1, 4)
    # Of both collectors together.
    assert (acting.count, acting.mean, acting.largest) == (20, 1.0, 2)
    assert view.learner is not None
    assert view.collector is not None
    assert (view.learner.sync_share, view.collector.sync_share) == (0.1, 0.2)
    assert view.clocks == ()
    assert view.bound.versions is None
    assert view.data.run.endswith(str(scraped.prometheus.port))


def test_only_what_was_counted_since_is_shown_where_that_is_asked_for(scraped):
    whole = scraped.view(since="1h").training["versions"]
    assert whole is not None
    assert whole == scraped.view().training["versions"]
    wait_until(lambda: scraped.view(since="3s").training["versions"] is None)
    scraped.training_lag.observe(np.array([8] * 7))

    def lately() -> float | None:
        spread = scraped.view(since="3s").training["versions"]
        return None if spread is None else spread.count

    wait_until(lambda: lately() == 7)
    now = scraped.view().training["versions"]
    assert now is not None
    assert now.count == whole.count + 7


@pytest.mark.parametrize("options", [{"job": "learner|collector"}, {"run": "trial"}, {"job": "lea.+", "run": "trial"}])
def test_a_run_is_chosen_by_its_labels(scraped, options):
    assert scraped.view(**options).training["versions"] is not None


@pytest.mark.parametrize("options", [{"job": "absent"}, {"run": 'a"b\\'}])
def test_labels_that_nothing_has_are_named(scraped, options):
    with pytest.raises(NotFoundError, match="has no metric of Paceline with"):
        scraped.view(**options)


def test_a_wrong_duration_or_expression_is_refused_in_the_words_of_prometheus(scraped):
    with pytest.raises(InvalidInputError, match="answers 400"):
        scraped.view(since="soon")
    with pytest.raises(InvalidInputError, match="answers 400"):
        scraped.view(job="(")


@pytest.mark.slow
def test_two_runs_under_one_prometheus_are_not_mixed(scraped, tmp_path):
    other = Served("learner")
    other.set("step", 1)
    targets = {"one": [scraped.learner.address], "other": [other.address]}
    try:
        with Server(tmp_path / "prometheus", targets) as prometheus:
            prometheus.wait_for_scrapes(1)
            url = f"http://127.0.0.1:{prometheus.port}"
            with pytest.raises(ConfigError, match=r'scrapes 2 runs.*--job.*job="one".*job="other"'):
                Prometheus(url).read_pages(KEPT)
            assert list(Prometheus(url, job="one").read_pages(KEPT)) == ["learner"]
    finally:
        other.server.close()


def test_an_address_that_is_no_prometheus_is_told_apart_from_one_that_is_away(scraped):
    page = f"http://{scraped.learner.address}"
    with pytest.raises((InvalidInputError, UnavailableError), match=r"expected the (URL|address) of"):
        Prometheus(page).read_pages(KEPT)
    with pytest.raises(UnavailableError, match="does not answer"):
        Prometheus("http://127.0.0.1:9").read_pages(KEPT)
    with pytest.raises(InvalidInputError, match="is no URL"):
        Prometheus("localhost:9090")


def test_a_password_in_the_url_is_sent_and_never_shown():
    server = Prometheus("http://me:secret@127.0.0.1:9/prefix/")
    assert server._headers["Authorization"] == "Basic bWU6c2VjcmV0"
    assert server._url == "http://127.0.0.1:9/prefix/api/v1/query"
    with pytest.raises(UnavailableError) as error:
        server.read_pages(KEPT)
    assert "secret" not in str(error.value)


def test_top_shows_a_run_until_it_is_stopped(scraped, capsys):
    stop = StopSignal()
    settings = config.build({"run": {"id": "trial", "environment_steps": 1000}})
    follower = threading.Thread(
        target=follow, args=(Prometheus(scraped.url), settings), kwargs={"plain": True, "stop": stop}
    )
    follower.start()
    shown: list[str] = []

    def seen() -> bool:
        shown.append(capsys.readouterr().out)
        return "environment steps" in "".join(shown)

    try:
        wait_until(seen)
    finally:
        stop.set()
        follower.join(20)
    line = "".join(shown)
    for words in (
        "25%",
        "environment steps 250/1000",
        "updates 100",
        "0/2 acting",
        "20.0% of collecting",
        "10.0% of le",
    ):
        assert words in line


@pytest.mark.slow
def test_top_goes_on_with_the_last_figures_while_prometheus_is_away(tmp_path, monkeypatch, capsys):
    run = Scraped(tmp_path)
    stop = StopSignal()
    monkeypatch.setattr("paceline.local.display.LINE_SECONDS", 0.1)
    monkeypatch.setattr("paceline.local.display._Lines.interval_seconds", 0.1)
    follower = threading.Thread(target=follow, args=(Prometheus(run.url), None), kwargs={"plain": True, "stop": stop})
    follower.start()
    shown: list[str] = []

    def seen(words: str, count: int) -> bool:
        shown.append(capsys.readouterr().out)
        return "".join(shown).count(words) >= count

    try:
        wait_until(lambda: seen("environment steps 250", 1))
        run.prometheus.stop()
        wait_until(lambda: seen("does not answer", 1))
        shown.clear()
        wait_until(lambda: seen("environment steps 250", 3))
        assert seen("does not answer", 2) is False  # said once
    finally:
        stop.set()
        follower.join(20)
        run.close()


class Cluster:
    """Two shards of replay, a learner with its endpoint, and three collectors, as a cluster has them: pods of jobs."""

    def __init__(self, folder: Path) -> None:
        learner, endpoint = Served("learner", updating=60, waiting=30, publishing=10), Served("endpoint")
        learner.set("step", 100)
        learner.set("environment_steps", 250)
        learner.set("max_lag_versions", 8)
        learner.set("workable_lag_versions", 13)
        learner.count("trained_rows_total", 100)
        learner.count("skipped_rows_total", 30)
        learner.count("starved_seconds_total", 20)
        learner.lag("training_lag_versions", [1] * 50 + [4] * 50)
        learner.set_each("replay_clock_offset_seconds", "shard", {"0": 0.5, "1": -0.25})
        learner.set_each("replay_clock_uncertainty_seconds", "shard", {"0": 0.001, "1": 0.002})
        endpoint.set("published_version", 9)
        endpoint.set("collectors", 3)
        endpoint.set("paused_collectors", 1)
        endpoint.set_each("applied_version", "collector", {"0": 9, "1": 8, "2": 5})
        endpoint.set_each("publish_lag_versions", "collector", {"0": 0, "1": 1, "2": 4})
        shards = [Served("replay") for _ in range(2)]
        for shard, rows, skipped in zip(shards, (300, 500), (5, 7), strict=True):
            shard.set_each("table_rows", "table", {"transitions": rows})
            shard.set_each("table_capacity_rows", "table", {"transitions": 1000})
            shard.count("skipped_rows_total", skipped)
        collectors = [
            Served("collector", acting=6, snapshot_apply=1, lag_pause=1),
            Served("collector", acting=10, snapshot_apply=2),
            Served("collector", acting=14, snapshot_apply=1, lag_pause=5),
        ]
        for collector, lags in zip(collectors, ([0] * 10, [0, 1] * 10, [2] * 10), strict=True):
            collector.lag("acting_lag_versions", lags)
            collector.set("clock_offset_seconds", 0.125)
            collector.set("clock_uncertainty_seconds", 0.001)
        self._served = [learner, endpoint, *shards, *collectors]
        targets = {
            "paceline/learner": [learner.address, endpoint.address],
            "paceline/replay": [shard.address for shard in shards],
            "paceline/collector": [collector.address for collector in collectors],
        }
        self.prometheus = Server(folder, targets)
        self.prometheus.wait_for_scrapes(1)
        self.server = Prometheus(f"http://127.0.0.1:{self.prometheus.port}")

    def close(self) -> None:
        self.prometheus.stop()
        for process in self._served:
            process.server.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    run = Cluster(tmp_path_factory.mktemp("cluster"))
    yield run
    run.close()


def test_several_shards_and_collectors_are_summed_or_told_apart_as_each_figure_is(cluster):
    view = make_view(read_prometheus(cluster.server, since=None, config=None))
    acting = view.acting["versions"]
    assert acting is not None
    assert (acting.count, acting.sum, acting.quantile(0.5), acting.largest) == (40, 30, 0, 2)
    assert view.collector is not None
    assert view.learner is not None
    assert view.collector.seconds == 8 + 12 + 20
    assert view.collector.shares == {"acting": 30 / 40, "lag_pause": 6 / 40, "snapshot_apply": 4 / 40}
    assert (view.learner.seconds, view.learner.sync_share) == (100, 0.1)
    assert [(each.collector, each.versions) for each in view.publish] == [("0", 0), ("1", 1), ("2", 4)]
    assert (view.bound.versions, view.bound.paused_collectors, view.bound.paused_share) == (8, 1, 6 / 40)
    assert (view.bound.skipped_rows, view.bound.workable_versions) == (30 + 5 + 7, 13)
    # A collector says by how much the learner is ahead of it, the learner by how much replay is ahead of itself.
    assert sorted(clock.seconds for clock in view.clocks) == [-0.25, -0.125, -0.125, -0.125, 0.5]
    assert {clock.peer for clock in view.clocks} >= {"replay 0", "replay 1"}
    limit = view.explanation.limit
    assert (limit.rule, limit.setting, limit.value) == ("starved_by_bound", "lag.max_lag_versions", "13")


def test_the_advice_knows_how_many_shards_and_collectors_there_are(cluster):
    settings = _settings(read_prometheus(cluster.server, since=None, config=None))
    assert (settings.shards, settings.collector_count, settings.capacity_rows) == (2, 3, 1000)
    assert settings.max_lag_versions == 8


def test_the_live_table_of_a_sharded_run_sums_its_shards_and_lists_its_collectors(cluster):
    status = StatusReader(Watched("cluster"), lambda: cluster.server.read_pages(SHOWN)).read()
    assert (status.replay_rows, status.replay_capacity) == (800, 2000)
    assert status.applied_versions == {"0": 9, "1": 8, "2": 5}
    assert (status.published_version, status.acting_lag, status.training_lag) == (9, (0, 2), (1, 4))
    assert status.collector_sync_share == 4 / 40
    assert status.bound is not None
    assert (status.bound.paused_collectors, status.bound.skipped_rows) == (1, 42)
