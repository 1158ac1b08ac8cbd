"""What the launcher keeps of the pages it reads: over restarts, over processes, over a stop and a resume."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from structlog.testing import capture_logs

from paceline.local.lag_metrics import KEPT, SHOWN, SUMMED
from paceline.local.scrape import Page, read_last_page
from paceline.local.tally import Ending, Tally
from paceline.schema import METRICS, SERIES
from paceline.telemetry import MetricsServer, serve_metrics

STEPS = "paceline_collector_environment_steps_total"
ACTIVITY = "paceline_collector_activity_seconds_total"


def page(
    *samples: tuple[str, dict[str, str], float], started: float | None = 1.0, read_at: float = 0.0, **activities: float
) -> Page:
    start = [] if started is None else [("process_start_time_seconds", {}, started)]
    spent = [(ACTIVITY, {"activity": activity}, seconds) for activity, seconds in activities.items()]
    return Page([*start, *samples, *spent], read_at=read_at)


def steps(count: float) -> tuple[str, dict[str, str], float]:
    return STEPS, {}, count


def written(folder: Path, tally: Tally) -> dict[str, Any]:
    tally.write()
    tree: dict[str, Any] = json.loads((folder / "lag.json").read_text())
    return tree


def total(tree: dict[str, Any], name: str, **labels: str) -> float | None:
    found = [entry["value"] for entry in tree["totals"] if entry["name"] == name and entry["labels"] == labels]
    assert len(found) < 2
    return found[0] if found else None


def test_counters_add_up_over_processes_and_over_their_restarts(tmp_path):
    tally = Tally(tmp_path, "trial")
    tally.see({"collector-0": page(steps(5)), "collector-1": page(steps(70))})
    tally.see({"collector-0": page(steps(30)), "collector-1": page(steps(100))})
    # Started again: less than before, then more.
    tally.see({"collector-0": page(steps(2), started=2.0)})
    tally.see({"collector-0": page(steps(60), started=2.0)})
    assert total(written(tmp_path, tally), STEPS) == 30 + 60 + 100


def test_where_no_start_time_is_told_a_counter_that_fell_is_one_that_began_anew(tmp_path):
    tally = Tally(tmp_path, "trial")
    for count in (30, 2, 3):
        tally.see({"collector-0": page(steps(count), started=None)})
    assert total(written(tmp_path, tally), STEPS) == 33


def test_histograms_add_up_bucket_by_bucket(tmp_path):
    name = "paceline_collector_acting_lag_versions_bucket"
    tally = Tally(tmp_path, "trial")
    for process, counts in {"collector-0": (4, 6), "collector-1": (0, 1)}.items():
        tally.see({process: page((name, {"le": "0.0"}, counts[0]), (name, {"le": "+Inf"}, counts[1]))})
    tree = written(tmp_path, tally)
    assert (total(tree, name, le="0.0"), total(tree, name, le="+Inf")) == (4, 7)


def test_gauges_stay_as_last_seen_and_are_never_summed(tmp_path):
    name = "paceline_endpoint_publish_lag_versions"
    tally = Tally(tmp_path, "trial")
    tally.see({"endpoint": page((name, {"collector": "0"}, 3.0), (name, {"collector": "1"}, 4.0))})
    tally.see({"endpoint": page((name, {"collector": "0"}, 2.0))})
    tree = written(tmp_path, tally)
    assert total(tree, name, collector="0") is None
    assert [(entry["labels"], entry["value"]) for entry in tree["gauges"]["endpoint"]] == [
        ({"collector": "0"}, 2.0),
        ({"collector": "1"}, 4.0),
    ]


def test_a_resumed_run_goes_on_with_what_its_earlier_part_counted(tmp_path):
    first = Tally(tmp_path, "trial")
    first.see({"collector-0": page(steps(30), acting=3.0)})
    seconds = written(tmp_path, first)["seconds"]
    second = Tally(tmp_path, "trial")
    second.see({"collector-0": page(steps(12), acting=1.0, environment=4.0)})
    tree = written(tmp_path, second)
    assert total(tree, STEPS) == 42
    assert tree["seconds"] > seconds
    assert json.loads((tmp_path / "process_time.json").read_text()) == {
        "collector-0": {"acting": 4.0, "environment": 4.0}
    }
    # Written again, nothing is counted twice.
    assert total(written(tmp_path, second), STEPS) == 42


@pytest.mark.parametrize("damage", ["", "[1]", '{"totals": 3, "seconds": 1}', '{"totals": [{}], "seconds": 1}'])
def test_damaged_files_of_an_earlier_part_do_not_keep_a_run_from_going_on(tmp_path, damage):
    for name in ("lag.json", "process_time.json"):
        (tmp_path / name).write_text(damage)
    tally = Tally(tmp_path, "trial")
    tally.see({"collector-0": page(steps(30))})
    assert total(written(tmp_path, tally), STEPS) == 30


def test_the_time_of_every_process_is_kept_and_lag_json_has_that_of_learner_and_collectors(tmp_path):
    tally = Tally(tmp_path, "trial")
    name = "paceline_replay_activity_seconds_total"
    tally.see({"replay": Page([(name, {"activity": "store"}, 3.0)]), "collector-0": page(acting=2.0)})
    tree = written(tmp_path, tally)
    assert {entry["name"] for entry in tree["totals"]} == {ACTIVITY}
    assert json.loads((tmp_path / "process_time.json").read_text()) == {
        "replay": {"store": 3.0},
        "collector-0": {"acting": 2.0},
    }


def test_what_was_never_seen_is_absent_and_what_is_no_number_is_left_out(tmp_path):
    tally = Tally(tmp_path, "trial")
    tally.see({"collector-0": page(steps(float("nan"))), "learner": Page()})
    tree = written(tmp_path, tally)
    assert (tree["totals"], tree["gauges"]) == ([], {})


def test_the_watched_time_begins_with_the_first_turn_and_leaves_restarts_out(tmp_path):
    tally = Tally(tmp_path, "trial")
    looks = [
        page(starting=8.0, read_at=10.0),
        page(starting=9.0, acting=1.0, read_at=12.0),
        page(starting=9.0, acting=4.0, environment=3.9, read_at=19.0),
        page(starting=1.0, acting=0.5, started=2.0, read_at=30.0),
        page(starting=1.0, acting=2.5, started=2.0, read_at=32.0),
    ]
    for look in looks:
        tally.see({"collector-0": look})
    watched = written(tmp_path, tally)["watched"]["collector-0"]
    assert watched["seconds"] == 7.0 + 2.0
    assert watched["activity_seconds"] == pytest.approx(6.9 + 2.0)


def test_what_a_process_left_at_its_end_counts_and_the_time_of_its_end_is_not_watched(tmp_path):
    tally = Tally(tmp_path, "trial")
    tally.see({"collector-0": page(steps(10), acting=1.0, read_at=10.0)})
    tally.see({"collector-0": page(steps(20), acting=3.0, read_at=12.0), "evaluator": Page()})
    tally.see({"collector-0": page(steps(27), acting=3.5, read_at=20.0), "evaluator": Page()}, last=True)
    tree = written(tmp_path, tally)
    assert total(tree, STEPS) == 27
    assert tree["watched"]["collector-0"] == {"seconds": 2.0, "activity_seconds": 2.0}
    assert json.loads((tmp_path / "process_time.json").read_text()) == {"collector-0": {"acting": 3.5}}


def test_the_page_that_a_process_leaves_has_what_it_counted_until_its_end(tmp_path, monkeypatch):
    registry, left = CollectorRegistry(), tmp_path / "collector-0.metrics"
    counted = Counter(STEPS, "x", registry=registry)
    monkeypatch.setattr(MetricsServer, "last_page", left)
    server = serve_metrics(registry, "127.0.0.1:0", "collector")
    counted.inc(30)
    assert read_last_page(left).samples == []
    server.close()
    page = read_last_page(left)
    assert page.value(STEPS) == 30
    assert page.value("process_start_time_seconds") is not None
    assert 0 <= time.monotonic() - page.read_at < 60
    assert [path.name for path in tmp_path.iterdir()] == [left.name]


def test_a_process_whose_last_page_cannot_be_written_ends_none_the_less(tmp_path, monkeypatch):
    monkeypatch.setattr(MetricsServer, "last_page", tmp_path / "absent" / "collector-0.metrics")
    server = serve_metrics(CollectorRegistry(), "127.0.0.1:0", "collector")
    with capture_logs() as logs:
        server.close()
    assert [line["event"] for line in logs] == ["last_page_not_written"]


def test_the_file_is_replaced_whole(tmp_path):
    tally = Tally(tmp_path, "trial")
    written(tmp_path, tally)
    assert {path.name for path in tmp_path.iterdir()} == {"lag.json", "process_time.json"}


def test_how_the_run_ended_is_told_and_with_which_error(tmp_path):
    tally = Tally(tmp_path, "trial")

    def told(ending: Ending | None) -> tuple[object, ...]:
        tally.write(ending)
        tree = json.loads((tmp_path / "lag.json").read_text())
        return tree["ended"], tree["complete"], tree["ending"], tree["problem"]

    assert told(None) == (False, False, None, "")
    assert told(Ending("stopped")) == (True, False, "stopped", "")
    assert told(Ending("failed", "the port is taken")) == (True, False, "failed", "the port is taken")
    assert told(Ending("complete")) == (True, True, "complete", "")


def test_every_metric_of_lag_is_kept_and_every_name_is_of_the_schema():
    assert {name for name in METRICS if "_lag_" in name} <= {metric.name for metric in KEPT.values()}
    assert KEPT.keys() | SHOWN <= SERIES.keys()
    assert all(SERIES[series].kind in ("counter", "histogram") for series in SUMMED)
