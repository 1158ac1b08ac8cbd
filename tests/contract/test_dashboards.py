"""Dashboards and rules ask for what is there, rightly: checked by a real Prometheus over every metric of the schema."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from integration.waiting import wait_until
from observability import (
    DASHBOARDS,
    ROOT,
    RULES,
    Prometheus,
    Query,
    QueryError,
    hurried,
    panel_queries,
    panels,
    rule_queries,
    tool,
)
from paceline import schema
from paceline.learner.main import LAST_READ_SECONDS
from promql import problems

BOARDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(DASHBOARDS.glob("*.json"))}
RECORDED = {
    rule["record"]
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "record" in rule
}
SCRAPES = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text(encoding="utf-8"))
QUERIES = [*panel_queries(), *rule_queries()]


class MadeUpPage:
    """A /metrics with every metric of an owner and every value of its labels; counters grow with each look."""

    def __init__(self, owner: str) -> None:
        self._metrics = [m for m in schema.METRICS.values() if m.owner in (owner, "every process")]
        self._looks = 0

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        self._looks += 1
        for metric in self._metrics:
            names = [label.name for label in metric.labels]
            family = self._family(metric, names)
            for values in itertools.product(*(label.values or ("0",) for label in metric.labels)):
                self._add(family, values)
            yield family

    def describe(self) -> Iterator[Metric]:
        """For the registry, which would look at the values otherwise."""
        return iter(())

    @staticmethod
    def _family(metric: schema.Metric, labels: list[str]) -> Metric:
        families: dict[str, Callable[..., Metric]] = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
            "summary": SummaryMetricFamily,
        }
        return families[metric.kind](metric.name, metric.meaning, labels=labels)

    def _add(self, family: Metric, labels: tuple[str, ...]) -> None:
        if isinstance(family, HistogramMetricFamily):
            family.add_metric(labels, [("1.0", self._looks), ("+Inf", 2 * self._looks)], sum_value=3 * self._looks)
        elif isinstance(family, SummaryMetricFamily):
            family.add_metric(labels, count_value=self._looks, sum_value=3 * self._looks)
        elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
            family.add_metric(labels, self._looks)


@pytest.fixture(scope="module")
def parser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A server that reads queries and has nothing to show."""
    with Prometheus(tmp_path_factory.mktemp("parser"), {}) as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A server that has seen every metric of the schema grow, and whose rules fire. It finds its targets after 5 s."""
    with ExitStack() as stack:
        targets: dict[str, list[str]] = {}
        for owner in schema.OWNERS[1:]:
            registry = CollectorRegistry()
            registry.register(MadeUpPage(owner))
            page, thread = start_http_server(0, "127.0.0.1", registry=registry)
            stack.callback(thread.join, 5)
            stack.callback(page.server_close)
            stack.callback(page.shutdown)
            targets[owner] = [f"127.0.0.1:{page.server_port}"]
        rules = hurried(RULES.read_text(encoding="utf-8"))
        folder = tmp_path_factory.mktemp("prometheus")
        server = stack.enter_context(Prometheus(folder, targets, rules=rules, interval="250ms"))
        server.wait_for_scrapes(4)
        wait_until(server.firing)
        yield server


def name_of(query: Query) -> str:
    return f"{query.board}: {query.panel}: {query.expression[:60]}"


@pytest.mark.parametrize("query", QUERIES, ids=name_of)
def test_a_query_names_what_the_schema_has_and_takes_rates_of_what_counts(parser: Prometheus, query: Query) -> None:
    assert problems(parser.formatted(query.expression), RECORDED) == []


@pytest.mark.slow
@pytest.mark.parametrize("query", list(panel_queries()), ids=name_of)
def test_the_query_of_a_panel_returns_data(prometheus: Prometheus, query: Query) -> None:
    samples = prometheus.query(query.expression)
    assert samples, query.expression
    assert all(math.isfinite(sample.value) for sample in samples)


@pytest.mark.slow
@pytest.mark.parametrize("query", list(rule_queries()), ids=name_of)
def test_the_expression_of_a_rule_can_be_evaluated(prometheus: Prometheus, query: Query) -> None:
    prometheus.query(query.expression)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("paceline_learner_no_such_thing", "not in the schema"),
        ("rate(paceline_learner_step[1m])", "of the gauge"),
        ("sum(paceline_learner_updates_total)", "counts"),
        ("sum by (le) (paceline_learner_training_lag_versions_bucket)", "counts"),
        ("paceline_learner_training_lag_versions", "not in the schema"),
        ("histogram_quantile(0.5, sum(rate(paceline_learner_training_lag_versions_bucket[1m])))", "by le"),
        ("histogram_quantile(0.5, sum by (le) (rate(paceline_learner_training_lag_versions_sum[1m])))", "no buckets"),
        ("sum by (tabel) (paceline_replay_table_rows)", "label tabel"),
        ('paceline_replay_table_rows{tabel="t"}', "no label tabel"),
        ('rate(paceline_replay_refused_blocks_total{reason="full"}[1m])', "never full"),
        ("(sum(rate((paceline_learner_updates_total)[1m:1s])) - on () paceline_learner_no) * 1e3", "learner_no "),
    ],
)
def test_a_wrong_query_is_found(parser: Prometheus, expression: str, problem: str) -> None:
    assert problem in " ".join([*problems(parser.formatted(expression)), ""])


def test_what_does_not_parse_is_refused_with_its_place(parser: Prometheus) -> None:
    with pytest.raises(QueryError, match="parse error"):
        parser.formatted("sum by (le (paceline_learner_step)")


def test_the_files_are_what_the_script_writes(tmp_path: Path) -> None:
    script = ROOT / "deploy/grafana/dashboards.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True, timeout=60)
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text(encoding="utf-8") for path in DASHBOARDS.iterdir()}
    assert written == kept, "run deploy/grafana/dashboards.py and commit what it writes"


def test_there_are_five_boards_with_names_that_stay() -> None:
    assert set(BOARDS) == {"overview", "lag", "replay", "learner", "collectors"}
    assert {board["uid"] for board in BOARDS.values()} == {f"paceline-{name}" for name in BOARDS}


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_takes_its_data_source_from_a_variable_and_its_window_from_grafana(name: str) -> None:
    board = BOARDS[name]
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "job", "instance"]
    text = json.dumps(board)
    assert "${DS_" not in text
    assert "__inputs" not in board
    for panel in panels(board):
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
        for target in panel["targets"]:
            assert "[" not in target["expr"].replace("[$__rate_interval]", "")
            chosen = 'job=~"$job", instance=~"$instance"' in target["expr"]
            assert chosen or target["expr"].startswith("sum by (alertname")


def test_grafana_is_given_the_source_that_the_boards_take_and_their_folder() -> None:
    provisioning = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == BOARDS["overview"]["templating"]["list"][0]["query"]
    assert source["isDefault"]  # what the variable of a board takes
    assert source["jsonData"]["timeInterval"] == SCRAPES["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/paceline.yaml").read_text())["providers"]
    assert provider["folder"] == "Paceline"
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    mounts = [mount for mount in compose["grafana"]["volumes"] if isinstance(mount, str)]
    assert f"../{DASHBOARDS.relative_to(ROOT)}:{provider['options']['path']}:ro" in mounts
    assert "./grafana/provisioning:/etc/grafana/provisioning:ro" in mounts
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose


def test_prometheus_finds_every_process_of_compose_by_its_name(tmp_path: Path) -> None:
    found = {
        job["job_name"]: (each["names"], each["type"], each["port"])
        for job in SCRAPES["scrape_configs"]
        for each in job["dns_sd_configs"]
    }
    assert found == {
        "replay": (["replay"], "A", 9101),
        "learner": (["learner"], "A", 9102),
        "endpoint": (["learner"], "A", 9103),
        "collector": (["collector"], "A", 9104),
        "evaluator": (["evaluator"], "A", 9105),
        "relay": (["relay"], "A", 9106),
    }
    assert SCRAPES["rule_files"] == ["/etc/prometheus/rules/*.yaml"]
    checked = tmp_path / "prometheus.yaml"
    checked.write_text(yaml.safe_dump({**SCRAPES, "rule_files": [str(RULES.parent / "*.yaml")]}))
    result = subprocess.run(
        [tool("promtool"), "check", "config", str(checked)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 rule files found" in result.stdout


def test_a_learner_that_diverged_keeps_its_page_for_longer_than_between_two_scrapes() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "paceline" / "values.yaml").read_text())
    for interval in (SCRAPES["global"]["scrape_interval"], chart["monitoring"]["podMonitor"]["interval"]):
        number, unit = re.fullmatch(r"(\d+)(s)", interval).groups()  # type: ignore[union-attr]
        assert unit == "s"
        assert int(number) < LAST_READ_SECONDS
    assert all("scrape_interval" not in job for job in SCRAPES["scrape_configs"])


@pytest.mark.parametrize("name", BOARDS)
def test_a_panel_has_a_quantity_for_a_title_a_unit_and_says_what_is_bad_and_what_to_do(name: str) -> None:
    shown = list(panels(BOARDS[name]))
    for panel in shown:
        assert panel["title"]
        assert "paceline_" not in panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["fieldConfig"]["defaults"]["noValue"] == "no traffic"
        assert "Bad: " in panel["description"]
        assert "Do: " in panel["description"]
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(legends)) == len(legends), panel["title"]
    titles = [panel["title"] for panel in shown]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", BOARDS)
def test_panels_lie_beside_each_other_and_never_over_each_other(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[name]["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in BOARDS[name]["panels"]}) == len(BOARDS[name]["panels"])
