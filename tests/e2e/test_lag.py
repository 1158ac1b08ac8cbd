"""A real run explains its lag: from its folder, while it goes on and after, and through a real Prometheus."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import PACELINE, ROOT, SMALL, Training
from integration.waiting import wait_until
from observability import Prometheus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SPEED = "learner.updates_per_step=0.5"


def explain(*arguments: str) -> dict[str, Any]:
    result = subprocess.run(
        [*PACELINE, "lag", *arguments, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


def check_whole(told: dict[str, Any]) -> None:
    """What holds for every run that trained: parts sum to the lag, shares to the whole."""
    training, acting = told["training_lag"]["versions"], told["acting_lag"]["versions"]
    assert training["count"] > 0
    assert acting["count"] > 0
    assert 0 <= acting["p50"] <= acting["p99"]
    for loop in told["loops"].values():
        assert sum(loop["shares"].values()) == pytest.approx(1, abs=0.02)
        assert 0 < loop["sync_share"] < 1
    if told["parts"]:  # attribution may be off
        assert told["parts_sum_versions"] == pytest.approx(training["mean"], rel=1e-6)
    assert told["advice"]["paragraph"]


def test_a_run_is_explained_from_its_folder_and_through_prometheus(train: Callable[..., Training], tmp_path):
    training = train("run.environment_steps=100000", "collector.count=2", SPEED)
    training.wait_for_steps(500)
    targets = training.metrics_addresses()
    assert {name: len(addresses) for name, addresses in targets.items()} == {
        "replay": 1,
        "learner": 1,
        "endpoint": 1,
        "collector": 2,
        "evaluator": 1,
    }
    with Prometheus(tmp_path / "prometheus", targets) as prometheus:
        prometheus.wait_for_scrapes(3)
        url = f"http://127.0.0.1:{prometheus.port}"
        check_whole(remote := explain(url))
        assert {each["collector"] for each in remote["publish_lag"]} == {"0", "1"}
        assert remote["advice"]["settings_known"] is False
        settings = str(training.folder / "config.yaml")
        with subprocess.Popen(
            [*PACELINE, "top", url, "--config", settings, "--plain"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as top:
            assert top.stdout is not None
            line = top.stdout.readline()
            top.send_signal(signal.SIGINT)
            assert top.wait(20) == 0
        assert "/100000" in line
        assert "- acting" not in line
        wait_until(lambda: (training.folder / "lag.json").exists())
        check_whole(explain(str(training.folder)))
    training.interrupt()
    assert training.wait(30) == 0, training.text()
    told = explain(str(training.folder))
    check_whole(told)
    assert not told["goes_on"]
    check_totals(training)
    for loop in told["loops"].values():
        if loop["accounted"] is not None:
            assert loop["accounted"] == pytest.approx(1, abs=0.05)
    assert "What the training lag is made of" in (training.folder / "report.html").read_text()


def check_totals(training: Training) -> None:
    """What lag.json sums up is what the record's last line says, to the row: nothing of the end is missing."""
    last = training.records("training")[-1]
    totals: dict[str, dict[str, float]] = {}
    for entry in json.loads((training.folder / "lag.json").read_text())["totals"]:
        totals.setdefault(entry["name"], {})[",".join(entry["labels"].values())] = entry["value"]
    for name in ("trained_rows", "masked_rows", "skipped_rows"):
        assert totals[f"paceline_learner_{name}_total"] == {"": last[name]}
    assert last["trained_rows"] > 0
    assert totals["paceline_learner_training_lag_part_versions_total"] == last["lag_part_versions"]
    assert totals["paceline_learner_row_part_seconds_total"] == pytest.approx(last["lag_part_seconds"])
    assert totals["paceline_learner_updates_total"] == {"": last["learner_step"]}
    accumulated, counts = 0.0, {}
    buckets = totals["paceline_learner_training_lag_versions_bucket"]
    for bound in sorted(buckets, key=float):
        counts[bound], accumulated = buckets[bound] - accumulated, buckets[bound]
    assert {float(bound): count for bound, count in counts.items() if count} == {
        float(bound): count for bound, count in last["training_lag_counts"].items()
    }
    steps = totals["paceline_collector_environment_steps_total"][""]
    assert totals["paceline_collector_acting_lag_versions_count"] == {"": steps}


def test_what_a_run_counted_outlives_its_launcher_and_a_resumed_run_adds_to_it(train: Callable[..., Training]):
    first = train("run.environment_steps=800", SPEED, "evaluator.enabled=false")
    first.wait_for_steps(300)
    first.wait_for(lambda: _acted(first.folder) > 100, "lag.json")
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    before = _acted(first.folder)
    # It may have been nearly over: a longer one has something to add in any case.
    second = train("run.environment_steps=1200", SPEED, "evaluator.enabled=false", "--resume")
    assert second.wait(240) == 0, second.text()
    assert _acted(second.folder) > before + 300
    check_whole(explain(str(second.folder)))


def _acted(folder: Path) -> float:
    try:
        tree = json.loads((folder / "lag.json").read_text())
    except FileNotFoundError:
        return 0.0
    name = "paceline_collector_acting_lag_versions_count"
    return sum(float(entry["value"]) for entry in tree["totals"] if entry["name"] == name)


def test_a_study_that_was_stopped_goes_on_and_draws_what_it_found(tmp_path):
    command = [
        *PACELINE, "study", "lag", "configs/pendulum-sac.yaml", *SMALL, SPEED, "run.environment_steps=600",
        "learner.publish_every_updates=10", "evaluator.every_versions=10", "evaluator.episodes=2",
        "--versions", "0,3", "--seeds", "0", "--folder", str(tmp_path / "sweep"),
    ]  # fmt: skip
    output = tmp_path / "first.out"
    with output.open("wb") as log:
        first = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    begun = tmp_path / "sweep/sweep-lag-0-seed-0/metrics.jsonl"
    wait_until(begun.exists, seconds=90)
    os.killpg(first.pid, signal.SIGINT)
    assert first.wait(60) == 0, output.read_text()
    assert "the same command goes on" in output.read_text()
    assert json.loads((tmp_path / "sweep/study.json").read_text())["complete_runs"] == 0

    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert second.returncode == 0, second.stdout + second.stderr
    study = json.loads((tmp_path / "sweep/study.json").read_text())
    assert study["complete_runs"] == 2
    none, three = study["by_versions"]
    # What was asked for is what was held; at the start nothing older is there yet.
    assert none["acting_lag"] < 0.5
    assert 1 < three["acting_lag"] < 3.5
    assert three["training_lag"] > none["training_lag"]
    assert (tmp_path / "sweep/study.html").read_text().count("data:image/svg+xml") == 2
    assert "The threshold is a return of" in second.stdout
