"""The whole on one machine: learns, survives the death of each service, stops, resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable

import numpy as np
import pytest
import redis
import yaml

from e2e.harness import PACELINE, ROOT, Training
from paceline.local.embedded import EmbeddedRedis
from paceline.rows import Column, transition_spec
from redis_record import read_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BATCHES_AHEAD = 3
"""Half of the limiter's window in these runs: so far the learner may be ahead when the last rows come late."""


def test_a_short_run_on_pendulum_improves_and_leaves_its_report(train: Callable[..., Training]):
    rates = [f"learner.algorithm.{part}_learning_rate=1e-3" for part in ("actor", "critic", "temperature")]
    training = train("run.environment_steps=4500", "evaluator.every_versions=25", "learner.batch_size=128", *rates)
    assert training.wait(240) == 0, training.text()
    returns = [record["mean_return"] for record in training.records("evaluation")]
    # Four seeds tried: -900 and less at first, -95 and more at best.
    assert returns[0] < -700
    assert max(returns) > -400
    finish = training.records("finish")[-1]
    assert finish["environment_steps"] == 4500
    assert 0 <= finish["learner_step"] - 4400 <= BATCHES_AHEAD
    assert training.records("evaluation")[-1]["environment_steps"] == 4500
    report = (training.folder / "report.html").read_text()
    assert "Pendulum-v1" in report
    assert {"replay", "learner", "collector-0", "evaluator"} <= set(
        json.loads((training.folder / "process_time.json").read_text())
    )
    assert (training.folder / "tensorboard").is_dir()
    assert yaml.safe_load((training.folder / "config.yaml").read_text())["run"]["environment_steps"] == 4500


def test_a_run_survives_the_death_of_each_service_and_loses_nothing(train: Callable[..., Training], tmp_path):
    store = EmbeddedRedis.start(tmp_path / "store")
    try:
        training = train(
            "run.environment_steps=4000", "collector.count=2", f"replay.redis_url={store.url}", run_id="hard"
        )
        training.wait_for_steps(400)
        training.kill("replay")
        training.wait_for_steps(training.environment_steps() + 300)
        training.kill("collector", "1")
        training.wait_for_steps(training.environment_steps() + 300)
        training.kill("learner")
        steps = training.environment_steps()
        training.wait_for(lambda: training.environment_steps() > steps + 300, "progress after the learner's death")
        training.kill("evaluator")
        assert training.wait(240) == 0, training.text()
        versions = [(r["incarnation"], r["version"]) for r in training.records("evaluation")]
        assert versions == sorted(versions)
        assert {incarnation for incarnation, _ in versions} >= {1, 2} or versions[-1][0] == 2
        assert training.records("evaluation")[-1]["environment_steps"] == 4000
        _check_log(store, "hard", row_count=4000)
    finally:
        store.stop()


def test_a_killed_embedded_store_runs_again_and_the_run_goes_on(train: Callable[..., Training]):
    training = train("run.environment_steps=1200", "evaluator.enabled=false")
    training.wait_for_steps(300)
    server = training.child_of("valkey")
    os.kill(server, signal.SIGKILL)
    training.wait_for(lambda: training.child_of("valkey") not in (None, server), "another server")
    assert training.wait(120) == 0, training.text()
    assert "runs again" in training.text()
    finish = training.records("finish")[-1]
    assert finish["environment_steps"] == 1200
    assert 0 <= finish["learner_step"] - 1100 <= BATCHES_AHEAD


def _check_log(store: EmbeddedRedis, run_id: str, row_count: int) -> None:
    """Every collector's blocks are there once, in order, without a gap, and versions never go back."""
    spec = transition_spec(Column("observation", "float32", (3,)), Column("action", "float32", (1,)))
    sequences: dict[tuple[int, int], list[int]] = {}
    versions: dict[int, list[tuple[int, int]]] = {}
    rows = 0
    with redis.Redis.from_url(store.url) as client:
        for header, payload in read_record(client, run_id):
            sequences.setdefault((header.collector_index, header.collector_incarnation), []).append(header.sequence)
            rows += header.row_count
            block = np.frombuffer(payload, spec.dtype)
            identities = versions.setdefault(header.collector_index, [])
            identities += zip(block["policy_incarnation"].tolist(), block["policy_version"].tolist(), strict=True)
    assert rows == row_count
    for who, numbers in sequences.items():
        assert numbers == list(range(1, len(numbers) + 1)), who
    for index, identities in versions.items():
        # Each incarnation of a collector begins with the newest snapshot, so this holds across its death too.
        assert identities == sorted(identities), index


def test_ctrl_c_stops_within_15_seconds_and_resume_goes_on_where_it_stopped(train: Callable[..., Training]):
    first = train("run.environment_steps=1500")
    first.wait_for_steps(500)
    began = time.monotonic()
    first.interrupt()
    assert first.wait(15) == 0, first.text()
    assert time.monotonic() - began < 15
    assert "--resume" in first.text()
    stopped = json.loads(max((first.folder / "checkpoints").glob("*.json")).read_text())

    second = train("run.environment_steps=1500", "--resume")
    assert second.wait(240) == 0, second.text()
    start = second.records("start")[-1]
    assert start["resumed"]
    assert start["learner_step"] == stopped["counters"]["learner_step"]
    after = [r for r in second.records("training") if r["time"] > start["time"]]
    assert after[0]["learner_step"] >= start["learner_step"]
    assert after[0]["policy_version"] > stopped["counters"]["policy_version"]
    assert second.records("evaluation")[-1]["environment_steps"] == 1500
    finish = second.records("finish")[-1]
    assert finish["environment_steps"] == 1500
    assert 0 <= finish["learner_step"] - 1400 <= BATCHES_AHEAD


def test_a_service_that_fails_ends_the_run_with_its_last_lines(train: Callable[..., Training]):
    training = train("env.id=Pendulum-v1", "env.kwargs={g: nonsense}")
    assert training.wait(90) != 0
    assert "learner" in training.text() or "collector" in training.text()
    assert "nonsense" in training.text() or "Pendulum-v1" in training.text()


def test_a_killed_launcher_leaves_no_process_behind(train: Callable[..., Training]):
    training = train("run.environment_steps=100000")
    training.wait_for_steps(150)
    children = [training.child(role) for role in ("replay", "learner", "collector", "evaluator")]
    os.kill(training.process.pid, signal.SIGKILL)
    training.process.wait()
    deadline = time.monotonic() + 20
    while any(_is_alive(pid) for pid in children):
        assert time.monotonic() < deadline, [pid for pid in children if _is_alive(pid)]
        time.sleep(0.05)  # between two looks at a condition that has a deadline


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_id_in_use_is_refused_at_once(train: Callable[..., Training]):
    first = train("run.environment_steps=100000")
    first.wait_for(lambda: (first.folder / "config.yaml").exists(), "the folder of the run")
    second = subprocess.run(
        [
            *PACELINE,
            "train",
            "configs/pendulum-sac.yaml",
            "run.id=trial",
            f"run.directory={first.folder.parent}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert second.returncode == 2
    assert "--resume" in second.stderr
