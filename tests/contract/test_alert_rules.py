"""Each alert fires on series made for it and on no others: promtool's unit tests, written from the tables below."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from observability import ROOT, RULES, alert_rules, panel_queries, tool
from paceline.schema import SERIES
from promql import FROM_PROMETHEUS

RUNBOOK = ROOT / "docs/runbook.md"

MINUTES = 40
OF_RUN = {"namespace": "n", "release": "r"}


def series(name: str, values: str, labels: str = "") -> dict[str, str]:
    """A series of the run, one value each minute, in promtool's notation."""
    inside = ", ".join(filter(None, ('namespace="n", release="r"', labels)))
    return {"series": f"{name}{{{inside}}}", "values": values}


def steady(start: float, each_minute: float = 0.0) -> str:
    return f"{start}+{each_minute}x{MINUTES}" if each_minute >= 0 else f"{start}{each_minute}x{MINUTES}"


HEALTHY = {
    "published": series("paceline_endpoint_published_version", steady(10, 2)),
    "applied": series("paceline_endpoint_applied_version", steady(9, 2), 'collector="0"'),
    "publish_lag": series("paceline_endpoint_publish_lag_versions", f"1 0 2x{MINUTES}", 'collector="0"'),
    "snapshot_age": series("paceline_endpoint_snapshot_age_seconds", steady(30)),
    "known_age": series("paceline_collector_snapshot_age_seconds", steady(30)),
    "collectors": series("paceline_endpoint_collectors", steady(2)),
    "steps": series("paceline_collector_environment_steps_total", steady(0, 6000)),
    "collected": series("paceline_collector_rows_appended_total", steady(0, 6000)),
    "collector_drops": series("paceline_collector_rows_dropped_total", steady(0, 60)),
    "appended": series("paceline_replay_appended_rows_total", steady(0, 6000), 'table="t"'),
    "queue_drops": series("paceline_replay_dropped_rows_total", steady(0, 60), 'table="t"'),
    "rows": series("paceline_replay_table_rows", steady(1000), 'table="t"'),
    "capacity": series("paceline_replay_table_capacity_rows", steady(1000), 'table="t"'),
    "insert_wait": series("paceline_replay_limiter_wait_seconds_total", steady(0, 55), 'table="t", side="insert"'),
    "refused": series("paceline_replay_refused_blocks_total", steady(0), 'reason="store_full"'),
    "read_only": series("paceline_replay_refused_blocks_total", steady(0), 'reason="store_read_only"'),
    "redis": series("paceline_replay_redis_available", steady(1), 'instance="0"'),
    "redis_of_another_shard": series("paceline_replay_redis_available", steady(1), 'instance="1"'),
    "limiter": series("paceline_replay_refused_blocks_total", steady(0, 60), 'reason="limiter"'),
    "lag_sum": series("paceline_learner_training_lag_versions_sum", steady(0, 600_000)),
    "lag_count": series("paceline_learner_training_lag_versions_count", steady(0, 6000)),
    "trained": series("paceline_learner_trained_rows_total", steady(0, 6000)),
    "masked": series("paceline_learner_masked_rows_total", steady(0, 30)),
    "queue_part": series("paceline_learner_training_lag_part_versions_total", steady(0, 12_000), 'part="queue"'),
    "residence": series("paceline_learner_training_lag_part_versions_total", steady(0, 588_000), 'part="residence"'),
    "starved": series("paceline_learner_starved_seconds_total", steady(0)),
    "non_finite": series("paceline_learner_non_finite_total", steady(0)),
    "waiting": series("paceline_learner_activity_seconds_total", steady(0, 20), 'activity="waiting"'),
    "updating": series("paceline_learner_activity_seconds_total", steady(0, 38), 'activity="updating"'),
    "publishing": series("paceline_learner_activity_seconds_total", steady(0, 2), 'activity="publishing"'),
    "acting": series("paceline_collector_activity_seconds_total", steady(0, 58), 'activity="acting"'),
    "build": series(
        "paceline_build_info", steady(1), 'version="0.1.0", service="collector", job="collector", instance="c:9104"'
    ),
    "up": series("up", steady(1), 'job="collector", instance="c:9104"'),
    "up_otherwise": series("up", steady(0), 'job="another", instance="c:9104"'),
    "applying": series("paceline_collector_activity_seconds_total", steady(0, 2), 'activity="snapshot_apply"'),
}
"""A run in which nothing is wrong: its lag is large but level, its table full, its collectors held back at times."""


def growing_counter(each_minute: float) -> str:
    """A counter whose growth grows: values of n * (n + 1) / 2 steps."""
    return " ".join(str(each_minute * n * (n + 1) / 2) for n in range(MINUTES + 1))


@dataclass(frozen=True)
class Case:
    """What is changed in the healthy run, and which alerts fire then, with which labels."""

    name: str
    changes: Mapping[str, str | None]
    """Series by their key above and their values; None leaves the series out."""
    fires: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    quiet_at: int = 1
    """A minute at which nothing fires yet."""


COLLECTOR_0 = {"collector": "0"}

CASES = [
    Case("a healthy run", {}),
    Case("a run whose bound masks one row in a hundred", {"masked": steady(0, 60)}),
    Case(
        "a bound that masks two rows in a hundred",
        {"masked": steady(0, 123)},
        {"PacelineLagBoundExceeded": [{"where": "bound"}]},
    ),
    Case(
        "a collector that stands still while versions are published",
        {"applied": steady(9), "publish_lag": f"{steady(1, 2)}"},
        {
            "PacelineCollectorNotApplying": [COLLECTOR_0],
            "PacelineLagGrowing": [{"kind": "publish"}],
        },
    ),
    Case("a collector that stands still as nothing is published", {"applied": steady(9), "published": steady(10)}),
    Case("a publish lag that has risen for ten minutes", {"publish_lag": f"1x{MINUTES - 10} 3+2x10"}),
    Case("a publish lag that swings", {"publish_lag": "0 3 9 1 " * (MINUTES // 4)}),
    Case(
        "a queue before replay that grows",
        {"queue_part": growing_counter(12_000)},
        {"PacelineLagGrowing": [{"kind": "pipeline"}]},
        quiet_at=10,
    ),
    Case("rows that grow older while the table fills up", {"lag_sum": growing_counter(60_000), "rows": steady(10, 50)}),
    Case(
        "rows that grow older in a full table",
        {"lag_sum": growing_counter(60_000)},
        {"PacelineLagGrowing": [{"kind": "training"}]},
        quiet_at=10,
    ),
    Case("a snapshot of just five minutes", {"snapshot_age": steady(300), "known_age": steady(300)}),
    Case("a snapshot of six minutes", {"snapshot_age": steady(360)}, {"PacelineLearnerStuck": [{}]}, quiet_at=0),
    Case("an old snapshot that nobody acts with", {"snapshot_age": steady(360), "collectors": None, "known_age": None}),
    Case(
        "a learner that is gone",
        {
            "known_age": steady(0, 60),
            **dict.fromkeys(("published", "snapshot_age", "collectors", "publish_lag", "applied", "trained")),
        },
        {"PacelineLearnerStuck": [{}]},
    ),
    Case(
        "a learner whose collectors are all gone",
        {"collectors": steady(0)},
        {"PacelineNoCollectors": [{"cause": "none_alive"}]},
    ),
    Case(
        "a learner without a collector's page",
        dict.fromkeys(("steps", "collectors")),
        {"PacelineNoCollectors": [{"cause": "none_scraped"}]},
    ),
    Case(
        "a collector that does not answer",
        {"build": f"1x10 stale _x{MINUTES - 11}", "up": f"1x10 0x{MINUTES}"},
        {"PacelineTargetDown": [{"service": "collector", "job": "collector", "instance": "c:9104"}]},
        quiet_at=11,
    ),
    Case(
        "a collector that is no target any more",
        {"build": f"1x10 stale _x{MINUTES - 11}", "up": f"1x10 stale _x{MINUTES - 11}"},
    ),
    Case(
        "a run that has ended but for replay",
        {
            "build": f"1x10 stale _x{MINUTES - 11}",
            "up": f"1x10 0x{MINUTES}",
            **dict.fromkeys(
                ("published", "steps", "snapshot_age", "known_age", "collectors", "publish_lag", "applied")
            ),
        },
    ),
    Case("a target that was never of Paceline", {"build": None, "up": steady(0)}),
    Case("no run at all", dict.fromkeys(HEALTHY)),
    Case("a run without a bound", dict.fromkeys(("masked", "starved"))),
    Case(
        "a bound that no batch meets",
        {"starved": steady(0, 30)},
        {"PacelineReplayStarved": [{"cause": "bound"}]},
    ),
    Case(
        "a learner that waits while nothing is stored",
        {
            "waiting": steady(0, 59),
            "updating": steady(0, 1),
            "publishing": steady(0, 0),
            "appended": steady(500),
            **dict.fromkeys(("insert_wait", "queue_drops")),
        },
        {"PacelineReplayStarved": [{"cause": "no_rows"}]},
    ),
    Case(
        "a learner that waits while replay is gone",
        {
            "waiting": steady(0, 59),
            "updating": steady(0, 1),
            "publishing": steady(0, 0),
            **dict.fromkeys(("appended", "rows", "capacity", "insert_wait", "queue_drops")),
            **dict.fromkeys(("refused", "read_only", "limiter", "redis", "redis_of_another_shard")),
        },
        {"PacelineReplayStarved": [{"cause": "no_rows"}]},
    ),
    Case(
        "a learner that is the faster side",
        {"waiting": steady(0, 59), "updating": steady(0, 1), "publishing": steady(0, 0)},
    ),
    Case("a store that is full", {"refused": steady(0, 1)}, {"PacelineReplayFull": [{"cause": "store"}]}),
    Case(
        "a store that refuses writes and answers",
        {"read_only": steady(0, 1)},
        {"PacelineReplayFull": [{"cause": "read_only"}]},
    ),
    Case("a store that refused writes once, long ago", {"read_only": f"0x10 1x{MINUTES}"}),
    Case(
        "the Redis of one shard gone",
        {"redis": f"1x10 0x{MINUTES}"},
        {"PacelineReplayFull": [{"cause": "redis_away"}]},
        quiet_at=11,
    ),
    Case("a Redis that was restarted within a minute", {"redis": f"1x{MINUTES - 2} 0 1"}),
    Case(
        "a full table that takes nothing",
        {"appended": steady(500), "queue_drops": steady(0)},
        {"PacelineReplayFull": [{"cause": "table", "table": "t"}]},
    ),
    Case("a table with room that takes nothing", {"appended": steady(500), "rows": steady(900), "queue_drops": None}),
    Case(
        "rows dropped at a rate of just below 5 %", {"queue_drops": steady(0, 299), "collector_drops": steady(0, 300)}
    ),
    Case(
        "a queue that drops a tenth",
        {"queue_drops": steady(0, 600)},
        {"PacelineRowsDropped": [{"where": "queue"}]},
    ),
    Case(
        "an environment that breaks",
        {"collector_drops": steady(0, 600)},
        {"PacelineRowsDropped": [{"where": "environment"}]},
    ),
    Case(
        "a bound that masks a tenth",
        {"masked": steady(0, 700)},
        {"PacelineRowsDropped": [{"where": "bound"}], "PacelineLagBoundExceeded": [{"where": "bound"}]},
    ),
    Case("one update that is not finite", {"non_finite": f"0x30 1x{MINUTES}"}, {"PacelineNonFinite": [{}]}),
    Case("an update that was not finite, long ago", {"non_finite": f"0x10 1x{MINUTES}"}),
    Case(
        "a learner that publishes an eighth of its time",
        {"publishing": steady(0, 10)},
        {"PacelineWeightSyncShare": [{"side": "learner"}]},
    ),
    Case(
        "collectors that apply an eighth of their time",
        {"applying": steady(0, 10)},
        {"PacelineWeightSyncShare": [{"side": "collectors"}]},
    ),
    Case("a learner that publishes just below a tenth of its time", {"publishing": steady(0, 6)}),
]


def changed(changes: Mapping[str, str | None]) -> list[dict[str, str]]:
    """The series of the healthy run, with other values for some."""
    assert changes.keys() <= HEALTHY.keys()
    return [
        {**entry, "values": changes.get(key) or entry["values"]}
        for key, entry in HEALTHY.items()
        if key not in changes or changes[key] is not None
    ]


def run_promtool(folder: Path, given: list[dict[str, str]], **tests: list[dict[str, Any]]) -> None:
    """Check what the rules make of the given series."""
    path = folder / "tests.yaml"
    content = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": given, **tests}],
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    result = subprocess.run(
        [tool("promtool"), "test", "rules", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def sample(name: str, value: float, **labels: str) -> dict[str, Any]:
    inside = ", ".join(f'{label}="{value}"' for label, value in labels.items())
    return {"labels": f"{name}{{{inside}}}", "value": value}


def firing(minute: int, fires: Mapping[str, Sequence[Mapping[str, str]]]) -> dict[str, Any]:
    """That these alerts fire at that minute, and no others."""
    rules = alert_rules()
    expected = [
        sample("ALERTS", 1, alertname=name, alertstate="firing", **OF_RUN, **rules[name]["labels"], **labels)
        for name, instances in fires.items()
        for labels in instances
    ]
    return {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{minute}m", "exp_samples": expected}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_the_alerts_of_a_case_fire_and_no_others(case: Case, tmp_path: Path) -> None:
    checks = [firing(case.quiet_at, {}), firing(MINUTES, case.fires)]
    run_promtool(tmp_path, changed(case.changes), promql_expr_test=checks)


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    assert {name for case in CASES for name in case.fires} == alert_rules().keys()
    assert not CASES[0].fires


def test_the_recorded_figures_of_a_healthy_run_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    figures = [
        (100, {"kind": "training"}),
        (2, {"kind": "pipeline"}),
        (2, {"kind": "publish"}),
        (30 / 6030, {"where": "bound"}),
        (0.01, {"where": "queue"}),
        (60 / 6060, {"where": "environment"}),
        (2 / 60, {"side": "learner"}),
        (2 / 60, {"side": "collectors"}),
    ]
    expected = [sample("", round(figure * 1e6) / 1e6, **OF_RUN, **labels) for figure, labels in figures]
    recorded = {
        # Rounding leaves the labels alone, which tell the figures apart.
        "expr": 'round({__name__=~"paceline:.+"}, 0.000001)',
        "eval_time": f"{MINUTES}m",
        "exp_samples": expected,
    }
    run_promtool(tmp_path, changed({}), promql_expr_test=[recorded])


def test_the_quantiles_are_taken_over_all_processes_of_a_run(tmp_path: Path) -> None:
    buckets = {"1": 10, "2": 20, "+Inf": 20}
    name = "paceline_collector_acting_lag_versions_bucket"
    given = [
        series(name, steady(0, count), f'instance="{instance}", le="{bound}"')
        for instance in ("a", "b")
        for bound, count in buckets.items()
    ]
    p99 = {
        "expr": "paceline:acting_lag_versions:p99_5m",
        "eval_time": f"{MINUTES}m",
        "exp_samples": [sample("paceline:acting_lag_versions:p99_5m", 1.98, **OF_RUN)],
    }
    run_promtool(tmp_path, given, promql_expr_test=[p99])


def test_a_description_names_the_figure_and_what_it_is_about(tmp_path: Path) -> None:
    name = "PacelineRowsDropped"
    labels = {**OF_RUN, **alert_rules()[name]["labels"], "where": "queue"}
    annotations = {
        **alert_rules()[name]["annotations"],
        "description": "10% of the rows are lost to this cause: queue.",
    }
    alert = {
        "eval_time": f"{MINUTES}m",
        "alertname": name,
        "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations}],
    }
    run_promtool(tmp_path, changed({"queue_drops": steady(0, 600)}), alert_rule_test=[alert])


@pytest.mark.parametrize(
    ("changes", "labels", "description"),
    [
        ({"refused": steady(0, 1)}, {"cause": "store"}, "Redis has no room: blocks are refused as store_full."),
        (
            {"read_only": steady(0, 1)},
            {"cause": "read_only"},
            "Redis refuses writes, as with a full disk: blocks are refused as store_read_only.",
        ),
        ({"redis": steady(0)}, {"cause": "redis_away"}, "Redis does not answer, and appends wait for it."),
        (
            {"appended": steady(500), "queue_drops": steady(0)},
            {"cause": "table", "table": "t"},
            "Table t is full, appends wait, and nothing is stored.",
        ),
    ],
    ids=["store", "read_only", "redis_away", "table"],
)
def test_a_replay_that_takes_no_rows_says_why(
    changes: Mapping[str, str], labels: Mapping[str, str], description: str, tmp_path: Path
) -> None:
    name = "PacelineReplayFull"
    rule = alert_rules()[name]
    expected = {
        "exp_labels": {**OF_RUN, **rule["labels"], **labels},
        "exp_annotations": {**rule["annotations"], "description": description},
    }
    alert = {"eval_time": f"{MINUTES}m", "alertname": name, "exp_alerts": [expected]}
    run_promtool(tmp_path, changed(changes), alert_rule_test=[alert])


@pytest.mark.parametrize("entry", HEALTHY.values(), ids=HEALTHY.keys())
def test_the_made_up_series_are_series_of_the_schema(entry: Mapping[str, str]) -> None:
    name, _, labels = entry["series"].partition("{")
    given = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    of_target = {*OF_RUN, "job", "instance"}
    if name in FROM_PROMETHEUS:
        assert given.keys() <= of_target
        return
    metric = SERIES[name]
    assert given.keys() - of_target == {label.name for label in metric.labels}
    for label in metric.labels:
        assert not label.values or given[label.name] in label.values


@pytest.mark.parametrize("name", alert_rules())
def test_an_alert_has_a_summary_and_a_runbook_entry_that_says_what_to_do(name: str) -> None:
    rule = alert_rules()[name]
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]
    assert rule["labels"]["severity"] in {"warning", "critical"}
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert ROOT / page == RUNBOOK
    entries = re.split(r"^## ", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    entry = next(entry for entry in entries if entry.splitlines()[0].lower() == anchor)
    for part in ("**What it means.**", "**How to see why.**", "**What to do.**"):
        assert part in entry


def test_the_runbook_has_no_entry_without_an_alert() -> None:
    headings = re.findall(r"^## (\w+)$", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings == list(alert_rules())


def test_panels_that_the_runbook_names_are_on_the_dashboard() -> None:
    titles = {query.panel for query in panel_queries()}
    text = " ".join(RUNBOOK.read_text(encoding="utf-8").split())
    named = re.findall(r'"([A-Z][^"]+?),?"', text)
    assert len(named) > 10
    assert [title for title in named if title not in titles] == []
