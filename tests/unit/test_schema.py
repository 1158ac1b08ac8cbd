"""The metric schema and the services agree: names, kinds, labels and their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase

from paceline.collector import metrics as collector
from paceline.collector.append_metrics import APPEND_FAILURES
from paceline.evaluator import metrics as evaluator
from paceline.identity import PolicyIdentity
from paceline.lag.clock import ClockOffset
from paceline.learner import endpoint_metrics as endpoint
from paceline.learner import metrics as learner
from paceline.learner.registry import COLLECTOR, RunRegistry
from paceline.relay import metrics as relay
from paceline.replay import metrics as replay
from paceline.schema import METRICS, SERIES, Metric, markdown
from paceline.serving import metrics as serving
from paceline.telemetry import serve_metrics

UNITS_IN_NAMES = {"seconds", "bytes", "versions", "rows", "blocks", "pages", "steps", "episodes", "polls"}


def replay_page(registry: CollectorRegistry) -> None:
    replay.ReplayMetrics(registry)


def learner_page(registry: CollectorRegistry) -> None:
    metrics = learner.LearnerMetrics(registry)
    for setter in (name for name in dir(metrics) if name.startswith("set_")):
        if setter == "set_followed":
            metrics.set_followed("0", behind=1, ring_rows=1)
        elif setter == "set_replay_clock":
            metrics.set_replay_clock("0", ClockOffset(0.0, 0.0))
        else:
            getattr(metrics, setter)(1)


def endpoint_page(registry: CollectorRegistry) -> None:
    run = RunRegistry({}, max_collectors=8, silence_seconds=30.0, warmup_steps=0, collector_count=1)
    endpoint.EndpointMetrics(registry, run)


def relay_page(registry: CollectorRegistry) -> None:
    relay.RelayMetrics(registry, collector_count=lambda: 0, clock_offset=lambda: None)


def collector_page(registry: CollectorRegistry) -> None:
    metrics = collector.CollectorMetrics(registry)
    metrics.replica.set_known_version(1)
    metrics.replica.set_applied_version(1)


def evaluator_page(registry: CollectorRegistry) -> None:
    metrics = evaluator.EvaluatorMetrics(registry)
    metrics.set_mean_return(1.0)
    metrics.replica.set_known_version(1)
    metrics.replica.set_applied_version(1)


PAGES: dict[str, Callable[[CollectorRegistry], None]] = {
    "replay": replay_page,
    "learner": learner_page,
    "endpoint": endpoint_page,
    "relay": relay_page,
    "collector": collector_page,
    "evaluator": evaluator_page,
}


def served_by(owner: str) -> dict[str, tuple[str, tuple[str, ...] | None]]:
    """Kind and label names of each metric that a service registers; None where only its samples would tell."""
    registry = CollectorRegistry()
    PAGES[owner](registry)
    served: dict[str, tuple[str, tuple[str, ...] | None]] = {}
    # The registry's own record: labelled metrics without samples, and custom ones before their first, are in it too.
    sources: list[Any] = list(registry._collector_to_names)
    for source in sources:
        for family in source.describe():
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = source._labelnames if isinstance(source, MetricWrapperBase) else None
            served[name] = (family.type, labels)
    return served


@pytest.mark.parametrize("owner", PAGES)
def test_what_a_service_serves_is_in_the_schema_with_its_kind_and_labels(owner: str) -> None:
    served = served_by(owner)
    assert len(served) > 10
    for name, (kind, labels) in served.items():
        assert name in METRICS, f"{name} of the {owner} is not in paceline/schema.py: describe it there"
        metric = METRICS[name]
        assert (metric.owner, metric.kind) == (owner, kind), name
        if labels is not None:
            assert tuple(label.name for label in metric.labels) == labels, name


def test_what_is_in_the_schema_is_served() -> None:
    served = {name for owner in PAGES for name in served_by(owner)}
    assert [name for name, metric in METRICS.items() if metric.owner in PAGES and name not in served] == []


def test_labels_of_the_endpoint_are_those_of_the_schema() -> None:
    run = RunRegistry({}, max_collectors=8, silence_seconds=30.0, warmup_steps=0, collector_count=1)
    registry = CollectorRegistry()
    metrics = endpoint.EndpointMetrics(registry, run)
    metrics.published(PolicyIdentity(1, 2), 20, 0.0)
    place = run.join(COLLECTOR, None, "a")
    run.polled(place.index, place.incarnation, PolicyIdentity(1, 2))
    gauges = [sample for family in registry.collect() for sample in family.samples if family.type == "gauge"]
    assert any(sample.labels for sample in gauges)
    for sample in gauges:
        assert sample.labels.keys() == {label.name for label in METRICS[sample.name].labels}, sample.name


def test_every_process_serves_what_the_schema_says_of_every_process() -> None:
    registry = CollectorRegistry()
    serve_metrics(registry, "127.0.0.1:0", "learner").close()
    names = {sample.name for family in registry.collect() for sample in family.samples}
    assert {name for name, metric in METRICS.items() if metric.owner == "every process"} == names
    assert any(isinstance(source, ProcessCollector) for source in registry._collector_to_names)


@pytest.mark.parametrize(
    ("metric", "label", "values"),
    [
        ("paceline_learner_activity_seconds_total", "activity", learner.ACTIVITIES),
        ("paceline_endpoint_activity_seconds_total", "activity", endpoint.ACTIVITIES),
        ("paceline_collector_activity_seconds_total", "activity", collector.ACTIVITIES),
        ("paceline_evaluator_activity_seconds_total", "activity", evaluator.ACTIVITIES),
        (
            "paceline_replay_activity_seconds_total",
            "activity",
            {*replay.APPEND_ACTIVITIES, *replay.SAMPLE_ACTIVITIES, *replay.FOLLOW_ACTIVITIES},
        ),
        ("paceline_endpoint_polls_total", "result", serving.POLL_RESULTS),
        ("paceline_relay_polls_total", "result", serving.POLL_RESULTS),
        ("paceline_relay_upstream_polls_total", "result", relay.UPSTREAM_RESULTS),
        ("paceline_replay_refused_blocks_total", "reason", replay.REFUSALS),
        ("paceline_collector_append_failures_total", "reason", APPEND_FAILURES),
        ("paceline_replay_limiter_wait_seconds_total", "side", replay.SIDES),
    ],
)
def test_the_values_of_a_closed_label_are_those_of_the_service(metric: str, label: str, values: object) -> None:
    found = next(found for found in METRICS[metric].labels if found.name == label)
    assert set(found.values) == set(values)  # type: ignore[call-overload]


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS.keys())
def test_a_metric_says_what_it_is_and_has_few_series(metric: Metric) -> None:
    prefix = "(process|paceline)" if metric.owner == "every process" else f"paceline_{metric.owner}"
    assert re.fullmatch(rf"{prefix}_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    thing = metric.name.removesuffix("_total")
    for unit in UNITS_IN_NAMES:
        if thing.endswith(f"_{unit}"):
            assert metric.unit == unit
    for text in (metric.meaning, metric.bad, metric.remedy):
        assert text
        assert "|" not in text
    assert metric.meaning.endswith(".")
    assert not metric.bad.endswith(".")
    assert not metric.remedy.endswith(".")
    for label in metric.labels:
        assert bool(label.values) != bool(label.bound), f"{label.name} needs a closed set or a bound, and not both"


def test_a_series_belongs_to_one_metric() -> None:
    assert len(SERIES) == sum(len(metric.series) for metric in METRICS.values())
    assert SERIES["paceline_learner_training_lag_versions_bucket"].kind == "histogram"


def test_the_markdown_has_every_metric_once_and_says_what_to_do() -> None:
    text = markdown()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(METRICS)
    assert "| `paceline_learner_row_part_seconds_total{part}` | counter | seconds |" in text
    assert all(line.count("|") == 7 for line in rows)


def test_the_page_of_metrics_is_what_the_schema_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert page.endswith(markdown()), "write docs/metrics.md anew: its tables are paceline.schema.markdown()"
