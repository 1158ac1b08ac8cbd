"""What the launcher reads from /metrics, and how it shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from rich.console import Console

from paceline import config
from paceline.local import status as status_module
from paceline.local.display import _figures, open_display
from paceline.local.scrape import Page, read_page
from paceline.local.status import StatusReader, Watched
from paceline.telemetry import BulkHistogram, MetricsServer, serve_metrics

CONFIG = config.build({"run": {"id": "trial", "environment_steps": 1000}})
TRIAL = Watched.of(CONFIG, "trial: sac on Pendulum-v1", began=100.0)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def server(registry: CollectorRegistry) -> Iterator[MetricsServer]:
    server = serve_metrics(registry, "127.0.0.1:0", "learner")
    yield server
    server.close()


def test_a_page_gives_values_sums_and_quantiles_of_a_real_metrics_page(registry, server):
    Gauge("paceline_learner_step", "x", registry=registry).set(7)
    seconds = Counter("paceline_learner_activity_seconds_total", "x", ["activity"], registry=registry)
    seconds.labels("updating").inc(3)
    seconds.labels("waiting").inc(1)
    lag = BulkHistogram("paceline_learner_lag", "x", (0, 1, 2, 4), registry)
    lag.observe(np.array([0] * 50 + [2] * 49 + [9]))
    page = read_page(server.port)
    assert page.value("paceline_learner_step") == 7
    assert page.value("paceline_learner_absent") is None
    assert page.activity_seconds() == {"updating": 3, "waiting": 1}
    assert page.quantile("paceline_learner_lag", 0.5) == 0
    assert page.quantile("paceline_learner_lag", 0.99) == 2
    assert page.quantile("paceline_learner_lag", 1.0) == float("inf")
    assert page.quantile("paceline_learner_absent", 0.5) is None


def test_a_port_that_does_not_answer_gives_an_empty_page(server):
    port = server.port
    server.close()
    assert read_page(port).samples == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_cpu_seconds_of_the_process_are_on_every_page(server):
    assert (read_page(server.port).value("process_cpu_seconds_total") or 0) > 0


class Pages:
    """Pages of a run, one for each look, one second apart."""

    def __init__(self, *looks: Mapping[str, list[tuple[str, dict[str, str], float]]]) -> None:
        self.looks = list(looks)

    def __call__(self) -> dict[str, Page]:
        return {name: Page(samples) for name, samples in self.looks.pop(0).items()}


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100, 200))
    monkeypatch.setattr(status_module.time, "monotonic", lambda: next(now))


@pytest.mark.usefixtures("seconds")
def test_rates_shares_and_time_left_follow_from_two_looks():
    def look(steps: float, updates: float) -> dict[str, list[tuple[str, dict[str, str], float]]]:
        return {
            "learner": [
                ("paceline_learner_environment_steps", {}, steps),
                ("paceline_learner_step", {}, updates),
                ("paceline_learner_activity_seconds_total", {"activity": "updating"}, 9.0),
                ("paceline_learner_activity_seconds_total", {"activity": "publishing"}, 1.0),
            ],
            "endpoint": [("paceline_endpoint_applied_version", {"collector": "3"}, 41.0)],
            "collector-3": [
                ("paceline_collector_activity_seconds_total", {"activity": "acting"}, 3.0),
                ("paceline_collector_activity_seconds_total", {"activity": "snapshot_apply"}, 1.0),
            ],
        }

    reader = StatusReader(TRIAL, Pages(look(100, 50), look(200, 140)))
    first, second = reader.read(), reader.read()
    assert first.steps_per_second is None
    assert second.steps_per_second == 100
    assert second.updates_per_second == 90
    assert second.share_done == 0.2
    assert second.seconds_left == 8
    assert second.learner_sync_share == pytest.approx(0.1)
    assert second.collector_sync_share == pytest.approx(0.25)
    assert second.applied_versions == {"3": 41}


@pytest.mark.usefixtures("seconds")
def test_the_figures_of_a_process_that_has_ended_stay():
    steps = [("paceline_learner_environment_steps", {}, 1000.0)]
    reader = StatusReader(TRIAL, Pages({"learner": steps}, {"learner": []}))
    assert [reader.read().environment_steps for _ in range(2)] == [1000, 1000]


@pytest.mark.usefixtures("seconds")
def test_the_side_that_the_limiter_held_back_most_is_named():
    def look(insert: float, sample: float) -> dict[str, list[tuple[str, dict[str, str], float]]]:
        name = "paceline_replay_limiter_wait_seconds_total"
        return {"replay": [(name, {"side": "insert"}, insert), (name, {"side": "sample"}, sample)]}

    reader = StatusReader(TRIAL, Pages(look(5, 5), look(5.9, 5.1), look(5.9, 5.1)))
    assert [reader.read().waiting for _ in range(3)] == [None, "insert", None]


@pytest.mark.usefixtures("seconds")
def test_the_rows_of_all_shards_are_counted_together():
    def rows(count: float) -> list[tuple[str, dict[str, str], float]]:
        return [("paceline_replay_table_rows", {"table": "transitions"}, count)]

    settings = config.build({"run": {"id": "trial"}, "replay": {"shards": 2}, "collector": {"count": 2}})
    status = StatusReader(Watched.of(settings, "trial"), Pages({"replay-0": rows(300), "replay-1": rows(200)})).read()
    assert (status.replay_rows, status.replay_capacity) == (500, 2_000_000)


@pytest.mark.usefixtures("seconds")
def test_what_is_not_known_is_shown_as_a_dash_and_not_as_nought():
    status = StatusReader(TRIAL, Pages({})).read()
    figures = dict(_figures(status))
    assert figures["environment steps"] == "-/1000 (-/s)"
    assert figures["lag p50/p99"] == "- training, - acting"
    assert figures["lag by part"] == "-"
    assert "lag bound" not in figures
    assert figures["ratio"] == "-"


@pytest.mark.usefixtures("seconds")
def test_the_live_table_names_every_figure(monkeypatch: pytest.MonkeyPatch):
    console = Console(force_terminal=True, width=100, record=True)
    monkeypatch.setattr("paceline.local.display.Console", lambda: console)
    status = StatusReader(TRIAL, Pages({"learner": [("paceline_learner_environment_steps", {}, 250.0)]})).read()
    with open_display(TRIAL.title, plain=False) as display:
        display.show(status)
    shown = console.export_text()
    for word in ("trial", "Pendulum-v1", "250/1000", "ratio", "lag p50/p99", "weight sync", "replay", "25%"):
        assert word in shown


@pytest.mark.usefixtures("seconds")
def test_without_a_terminal_each_look_is_one_line(capsys: pytest.CaptureFixture[str]):
    status = StatusReader(TRIAL, Pages({})).read()
    with open_display(TRIAL.title, plain=False) as display:
        display.show(status)
        display.say("done")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "environment steps" in lines[0]


def histogram(name: str, counts: Mapping[str, float]) -> list[tuple[str, dict[str, str], float]]:
    return [(f"{name}_bucket", {"le": bound}, count) for bound, count in counts.items()]


@pytest.mark.usefixtures("seconds")
def test_both_lags_their_parts_and_the_bound_are_shown():
    part = "paceline_learner_training_lag_part_versions_total"
    acting = "paceline_collector_acting_lag_versions"
    pages = {
        "learner": [
            *histogram("paceline_learner_training_lag_versions", {"1.0": 50, "4.0": 98, "8.0": 100, "+Inf": 100}),
            (part, {"part": "transfer"}, 30.0),
            (part, {"part": "rollout"}, 0.0),
            (part, {"part": "residence"}, 70.0),
            ("paceline_learner_max_lag_versions", {}, 8.0),
            ("paceline_learner_skipped_rows_total", {}, 120.0),
        ],
        # Each of two collectors has its own; the quantiles are of both together.
        "collector-0": histogram(acting, {"0.0": 90, "1.0": 90, "+Inf": 90}),
        "collector-1": histogram(acting, {"0.0": 0, "1.0": 10, "+Inf": 10}),
    }
    figures = dict(_figures(StatusReader(TRIAL, Pages(pages)).read()))
    assert figures["lag p50/p99"] == "1/8 training, 0/1 acting"
    assert figures["lag by part"] == "transfer 30%, residence 70%"
    assert figures["lag bound"] == "8: - paused, 120 draws skipped, - masked"


@pytest.mark.usefixtures("seconds")
def test_starting_and_finishing_are_no_part_of_a_step():
    name = "paceline_learner_activity_seconds_total"
    spent = {"starting": 80.0, "updating": 8.0, "publishing": 2.0, "finishing": 10.0}
    pages = {"learner": [(name, {"activity": activity}, value) for activity, value in spent.items()]}
    assert StatusReader(TRIAL, Pages(pages)).read().learner_sync_share == pytest.approx(0.2)


@pytest.mark.usefixtures("seconds")
def test_of_a_run_whose_settings_nobody_knows_limit_and_time_left_are_unknown():
    pages = {
        "learner": [
            ("paceline_learner_environment_steps", {}, 250.0),
            ("paceline_learner_activity_seconds_total", {"activity": "updating"}, 90.0),
        ],
        "replay": [
            ("paceline_replay_table_rows", {"table": "transitions"}, 200.0),
            ("paceline_replay_table_capacity_rows", {"table": "transitions"}, 5000.0),
        ],
    }
    status = StatusReader(Watched("somewhere"), Pages(pages)).read()
    figures = dict(_figures(status))
    assert figures["environment steps"] == "250 (-/s)"
    assert figures["replay"] == "200/5000 rows"
    assert (status.share_done, status.seconds_left, status.seconds) == (None, None, 90.0)


@pytest.mark.usefixtures("seconds")
def test_a_process_whose_place_another_took_is_none_of_the_run_any_more():
    rows = [("paceline_replay_table_rows", {"table": "transitions"}, 200.0)]
    reader = StatusReader(TRIAL, Pages({"replay a:1": rows}, {"replay b:1": rows}, {}))
    assert [reader.read().replay_rows for _ in range(3)] == [200, 200, 200]
