"""`paceline lag` on recorded pages: what it works out, and how it says it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline import config
from paceline.errors import NotFoundError
from paceline.local.lag_data import LagData, read_folder
from paceline.local.lag_text import show, to_json
from paceline.local.lag_view import LagView, make_view
from paceline.local.scrape import Page, merge

Sample = tuple[str, dict[str, str], float]


def histogram(name: str, counts: Mapping[str, float], mean: float) -> list[Sample]:
    """`counts` are accumulated."""
    whole = max(counts.values())
    buckets = [(f"{name}_bucket", {"le": bound}, count) for bound, count in counts.items()]
    return [*buckets, (f"{name}_sum", {}, mean * whole), (f"{name}_count", {}, whole)]


def parts(name: str, **values: float) -> list[Sample]:
    return [(name, {"part": part}, value) for part, value in values.items()]


def activities(service: str, **seconds: float) -> list[Sample]:
    name = f"paceline_{service}_activity_seconds_total"
    return [(name, {"activity": activity}, value) for activity, value in seconds.items()]


# 1,000 rows of a mean lag of 4 versions; two collectors.
TOTALS = [
    *histogram("paceline_learner_training_lag_versions", {"0.0": 0, "2.0": 400, "8.0": 980, "+Inf": 1000}, 4.0),
    *histogram("paceline_learner_training_lag_updates", {"0.0": 0, "20.0": 400, "80.0": 1000, "+Inf": 1000}, 40.0),
    *histogram("paceline_collector_acting_lag_versions", {"0.0": 900, "1.0": 990, "2.0": 1000, "+Inf": 1000}, 0.11),
    ("paceline_learner_trained_rows_total", {}, 1000.0),
    *parts(
        "paceline_learner_training_lag_part_versions_total",
        transfer=1000, rollout=200, queue=300, residence=2500, unattributed=0,
    ),
    *parts(
        "paceline_learner_row_part_seconds_total",
        transfer=100, rollout=20, queue=30, residence=250, unattributed=0,
    ),
    *activities("learner", starting=5.0, waiting=20.0, updating=75.0, publishing=5.0),
    *activities("collector", acting=120.0, environment=60.0, append_wait=10.0, snapshot_apply=4.0, lag_pause=6.0),
    ("paceline_learner_skipped_rows_total", {}, 12.0),
    ("paceline_learner_masked_rows_total", {}, 3.0),
    ("paceline_replay_skipped_rows_total", {"table": "transitions"}, 40.0),
    ("paceline_learner_starved_seconds_total", {}, 2.0),
    ("paceline_collector_pauses_total", {}, 7.0),
]  # fmt: skip
GAUGES: dict[str, list[Sample]] = {
    "learner": [
        ("paceline_learner_max_lag_versions", {}, 4.0),
        ("paceline_learner_workable_lag_versions", {}, 9.0),
        ("paceline_learner_replay_clock_offset_seconds", {"shard": "0"}, -0.25),
        ("paceline_learner_replay_clock_uncertainty_seconds", {"shard": "0"}, 0.001),
    ],
    "endpoint": [
        ("paceline_endpoint_publish_lag_versions", {"collector": "0"}, 1.0),
        ("paceline_endpoint_publish_lag_versions", {"collector": "10"}, 0.0),
        ("paceline_endpoint_publish_lag_versions", {"collector": "2"}, 3.0),
        ("paceline_endpoint_publish_lag_updates", {"collector": "0"}, 10.0),
        ("paceline_endpoint_paused_collectors", {}, 1.0),
    ],
    "collector-0": [
        ("paceline_collector_clock_offset_seconds", {}, 1.5),
        ("paceline_collector_clock_uncertainty_seconds", {}, 0.002),
    ],
}
CONFIG = config.build({"run": {"id": "trial"}, "lag": {"max_lag_versions": 4}})


def view_of(
    totals: list[Sample] = TOTALS,
    gauges: Mapping[str, list[Sample]] = GAUGES,
    settings: config.Config | None = CONFIG,
) -> LagView:
    pages = {name: Page(samples) for name, samples in gauges.items()}
    return make_view(LagData("trial", "here", merge([Page(totals), *pages.values()]), pages, settings, goes_on=False))


def text_of(view: LagView) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False, record=True)
    show(view, console)
    return console.export_text()


def test_the_parts_are_of_a_row_and_their_sum_is_the_mean_lag():
    view = view_of()
    assert {part.name: part.versions for part in view.parts} == {
        "transfer": 1.0,
        "rollout": 0.2,
        "queue": 0.3,
        "residence": 2.5,
        "unattributed": 0.0,
    }
    training = view.training["versions"]
    assert training is not None
    assert view.part_sum == pytest.approx(training.mean)
    assert sum(part.seconds_share or 0 for part in view.parts) == pytest.approx(1)


def test_the_quantiles_are_the_upper_bounds_of_their_buckets():
    view = view_of()
    training, acting = view.training["versions"], view.acting["versions"]
    assert training is not None
    assert acting is not None
    assert [training.quantile(q) for q in (0.4, 0.5, 0.9)] == [2, 8, 8]
    assert (training.quantile(0.99), training.largest) == (math.inf, math.inf)
    assert (acting.quantile(0.5), acting.quantile(0.99), acting.largest) == (0, 1, 2)


def test_the_shares_of_a_loop_sum_to_one_without_its_start_and_name_weight_synchronisation():
    view = view_of()
    for loop, sync in ((view.learner, 0.05), (view.collector, 0.02)):
        assert loop is not None
        assert sum(loop.shares.values()) == pytest.approx(1)
        assert loop.sync_share == pytest.approx(sync)
    assert view.learner is not None
    assert view.learner.beside == {"starting": 5.0}


def test_what_a_person_reads_has_every_figure():
    text = text_of(view_of())
    for line in (
        "mean 4  p50 <=8  p90 <=8  p99 > 8  max > 8 versions; 1,000 rows",
        "mean 0.11  p50 0  p90 0  p99 1  max 2 versions; 1,000 steps",
        "mean lag",
        "weight synchronisation: 5.0%",
        "weight synchronisation: 2.0%",
        "sum 100.0% of 100.0 s, beside starting 5.0 s",
        "4 versions",
        "7 times, 3.0% of the time of collectors; now 1",
        "52 of rows beyond it; a row counts once for each draw",  # the learner's and replay's
        "3 of rows beyond it were made and had weight 0",
        "2.0 s; less than 1 % of the time with lag.max_lag_versions=9",
        "-1500.0 ms",
        "-250.0 ms",
    ):
        assert line in text, text
    # What limits the run, and which setting to change.
    assert "62% of the lag is residence" in " ".join(text.split())
    assert "Set replay.tables.transitions.capacity_rows=800000 (now 1000000)." in " ".join(text.split())


def test_a_run_that_its_bound_starves_is_told_the_bound_that_would_work():
    starved = [
        ("paceline_learner_starved_seconds_total", {}, 30.0) if "starved" in each[0] else each for each in TOTALS
    ]
    view = view_of(starved, GAUGES)
    assert view.explanation.limit.rule == "starved_by_bound"
    assert (view.explanation.limit.setting, view.explanation.limit.value) == ("lag.max_lag_versions", "9")
    assert json.loads(to_json(view))["bound"]["workable_versions"] == 9


def test_collectors_are_in_the_order_of_their_numbers_and_what_none_told_is_unknown():
    publish = view_of().publish
    assert [(each.collector, each.versions, each.updates) for each in publish] == [
        ("0", 1.0, 10.0),
        ("2", 3.0, None),
        ("10", 0.0, None),
    ]


def test_of_a_run_that_told_nothing_everything_is_unknown_and_nothing_is_nought():
    view = view_of([], {}, config.build({"run": {"id": "trial"}}))
    text = text_of(view)
    assert text.count("unknown") >= 9
    assert "0.0" not in text
    assert "none is set" in text
    tree = json.loads(to_json(view))
    assert tree["training_lag"] == {"versions": None, "updates": None, "seconds": None}
    assert tree["loops"] == {"collector": None, "learner": None}
    assert (tree["parts"], tree["publish_lag"], tree["clocks"]) == ([], [], [])
    assert set(tree["bound"].values()) == {None}


def test_a_bound_whose_effect_nobody_counted_is_not_said_to_have_none():
    text = text_of(view_of([], {"learner": GAUGES["learner"][:1]}))
    words = " ".join(text.split())
    for line in ("unknown of rows beyond it;", "unknown of rows beyond it were made", "learner starved unknown"):
        assert line in words


def test_without_the_settings_the_advice_names_the_setting_and_no_value():
    view = view_of(settings=None)
    assert "(now " in view_of().advice
    assert "(now " not in view.advice
    assert "The setting to change is replay.tables.transitions.capacity_rows." in view.advice
    assert "--config" in view.advice
    assert json.loads(to_json(view))["advice"]["settings_known"] is False


def test_the_json_says_the_same_and_infinity_in_words():
    tree = json.loads(to_json(view_of()))
    versions = tree["training_lag"]["versions"]
    assert (versions["mean"], versions["p50"], versions["p99"], versions["max_bucket"]) == (4.0, 8.0, "+Inf", "+Inf")
    assert [(bucket["up_to"], bucket["count"]) for bucket in versions["buckets"]] == [(2, 400), (8, 580), ("+Inf", 20)]
    assert tree["parts_sum_versions"] == pytest.approx(versions["mean"])
    assert tree["clocks"] == [
        {"peer": "replay 0", "seconds": -0.25, "uncertainty_seconds": 0.001},
        {"peer": "collector-0", "seconds": -1.5, "uncertainty_seconds": 0.002},
    ]


def test_a_long_tail_is_shown_in_few_bars_that_sum_to_the_whole():
    bounds = [*range(30), math.inf]
    counts = {str(float(bound)): float(index + 1) for index, bound in enumerate(bounds)}
    text = text_of(view_of(histogram("paceline_learner_training_lag_versions", counts, 15.0), {}))
    bars = [line.split() for line in text.splitlines() if line.rstrip().endswith("%") and "█" in line]
    assert len(bars) <= 12
    assert bars[0][0] == "0"
    assert bars[-1][0].endswith("+")
    assert sum(float(bar[-1].rstrip("%")) for bar in bars) == pytest.approx(100, abs=0.5)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "config.yaml").write_text(config.dump(CONFIG))
    return folder


def as_json(samples: list[Sample]) -> list[dict[str, Any]]:
    return [{"name": name, "labels": labels, "value": value} for name, labels, value in samples]


def write_lag(folder: Path, **changes: Any) -> None:
    tree: dict[str, Any] = {
        "run_id": "trial",
        "written_at": 1.0,
        "ended": True,
        "complete": True,
        "seconds": 100.0,
        "totals": as_json(TOTALS),
        "gauges": {name: as_json(samples) for name, samples in GAUGES.items()},
        "watched": {
            "collector-0": {"seconds": 60.0, "activity_seconds": 60.0},
            "collector-1": {"seconds": 40.0, "activity_seconds": 39.0},
            "learner": {"seconds": 3.0, "activity_seconds": 9.0},
        },
    }
    (folder / "lag.json").write_text(json.dumps({**tree, **changes}))


def test_the_folder_of_a_run_says_what_its_pages_said(run_folder):
    write_lag(run_folder)
    view = make_view(read_folder(str(run_folder), {}))
    assert view.parts == view_of().parts
    assert view.clocks == view_of().clocks
    assert view.advice == view_of().advice
    assert view.collector is not None
    assert view.learner is not None
    assert view.collector.accounted == pytest.approx(0.99)
    assert view.learner.accounted is None  # three seconds say nothing
    assert "at the end of the run" in text_of(view)


def test_a_run_that_goes_on_is_said_to(run_folder):
    write_lag(run_folder, ended=False, complete=False)
    assert "run trial, which goes on" in text_of(make_view(read_folder(str(run_folder), {})))


@pytest.mark.parametrize(
    ("ending", "problem", "words"),
    [
        ("complete", "", ("run trial, which is complete", "written at the end of the run")),
        ("stopped", "", ("run trial, which was stopped before its end", "written when the run was stopped")),
        ("failed", "the port is taken", ("run trial, which failed", "when the run failed", "It failed: the port is")),
    ],
)
def test_how_a_run_ended_is_said(run_folder, ending, problem, words):
    write_lag(run_folder, complete=ending == "complete", ending=ending, problem=problem)
    view = make_view(read_folder(str(run_folder), {}))
    text = text_of(view)
    for each in words:
        assert each in text
    assert json.loads(to_json(view))["ending"] == {"how": ending, "problem": problem}


@pytest.mark.parametrize("ending", ["stopped", "failed"])
def test_a_run_that_was_cut_short_with_few_rows_gets_no_advice(run_folder, ending):
    write_lag(run_folder, complete=False, ending=ending)  # 1,000 rows
    view = make_view(read_folder(str(run_folder), {}))
    assert view.explanation.limit.rule == "too_short"
    assert view.explanation.limit.setting is None
    assert "trained on 1,000 rows, expected at least 25,600" in view.advice
    enough = {"name": "paceline_learner_trained_rows_total", "labels": {}, "value": 25_600.0}
    totals = [entry for entry in as_json(TOTALS) if entry["name"] != enough["name"]]
    write_lag(run_folder, complete=False, ending=ending, totals=[*totals, enough])
    assert make_view(read_folder(str(run_folder), {})).explanation.limit.rule != "too_short"


def test_a_run_that_failed_before_anything_was_counted_gets_no_advice(run_folder):
    write_lag(run_folder, complete=False, ending="failed", problem="no", totals=[], gauges={}, watched={})
    assert "trained on 0 rows" in make_view(read_folder(str(run_folder), {})).advice


@pytest.mark.parametrize("damage", [None, "", '{"totals": 1}', '{"totals": [], "gauges": 3}'])
def test_without_lag_json_the_older_files_are_told_and_the_rest_is_unknown(run_folder, damage):
    if damage is not None:
        (run_folder / "lag.json").write_text(damage)
    record = {"kind": "training", "time": 1.0, "training_lag_counts": {"1": 30, "4": 10}}
    (run_folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (run_folder / "process_time.json").write_text(json.dumps({"learner": {"updating": 9, "waiting": 1}}))
    view = make_view(read_folder(str(run_folder), {}))
    training = view.training["versions"]
    assert training is not None
    assert (training.count, training.quantile(0.5), training.mean) == (40, 1, None)
    assert view.learner is not None
    assert view.learner.shares == {"updating": 0.9, "waiting": 0.1}
    assert view.acting["versions"] is None
    text = text_of(view)
    assert "mean unknown" in text
    assert "acting lag, the parts of the lag and clocks are unknown" in " ".join(text.split())


def test_a_run_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError, match="no run 'absent' here"):
        read_folder("absent", {})
