"""Runs that are resumed, or started again, and must not be: what is refused leaves the run as it was."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.harness import PACELINE, ROOT, Training, processes_of
from integration.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ALONE = "evaluator.enabled=false"


def paceline(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PACELINE, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def text_of(result: subprocess.CompletedProcess[str]) -> str:
    return result.stdout + result.stderr


def lag_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "lag.json").read_text()))


def test_a_resume_that_is_refused_leaves_a_run_that_can_be_resumed(train: Callable[..., Training]):
    first = train("run.environment_steps=100000", ALONE)
    first.wait_for_steps(150)
    first.interrupt()
    assert first.wait(30) == 0, first.text()
    files = [first.folder / name for name in ("config.yaml", "lag.json", "report.html")]
    before = [path.read_bytes() for path in files]

    refused = paceline("train", first.folder, "--resume", "learner.algorithm.hidden=[32,32]")
    assert refused.returncode == 2, text_of(refused)
    assert "hidden" in text_of(refused)
    assert [path.read_bytes() for path in files] == before

    limit = first.environment_steps() + 200
    accepted = paceline("train", first.folder, "--resume", f"run.environment_steps={limit}")
    assert accepted.returncode == 0, text_of(accepted)
    assert "hidden" not in text_of(accepted)
    assert yaml.safe_load(files[0].read_text())["run"]["environment_steps"] == limit
    assert first.records("finish")[-1]["environment_steps"] == limit
    assert lag_of(first.folder)["ending"] == "complete"
    assert not (first.folder / "resumed.yaml").exists()


def test_a_launcher_that_is_killed_before_the_learner_took_the_settings_leaves_those_of_before(
    train: Callable[..., Training],
):
    first = train("run.environment_steps=100000", ALONE)
    first.wait_for_steps(150)
    first.interrupt()
    assert first.wait(30) == 0, first.text()
    before = (first.folder / "config.yaml").read_bytes()
    second = train("run.environment_steps=100000", ALONE, "learner.algorithm.hidden=[32,32]", "--resume")
    second.wait_for((second.folder / "resumed.yaml").exists, "the settings of the services")
    os.kill(second.process.pid, signal.SIGKILL)
    second.process.wait()
    assert (first.folder / "config.yaml").read_bytes() == before
    wait_until(lambda: not processes_of(second.folder))  # what it was about to start as well


def test_a_second_launcher_on_a_live_run_is_refused_and_the_run_goes_on(train: Callable[..., Training]):
    first = train("run.environment_steps=100000", ALONE)
    first.wait_for_steps(150)
    before = (first.folder / "config.yaml").read_bytes()
    second = paceline("train", first.folder, "--resume", "run.seed=9")
    assert second.returncode == 2, text_of(second)
    assert f"process {first.process.pid} on" in second.stderr
    assert "works there now" in second.stderr
    assert (first.folder / "config.yaml").read_bytes() == before
    assert not (first.folder / "report.html").exists()
    assert lag_of(first.folder)["ended"] is False
    first.wait_for_steps(first.environment_steps() + 100)


def test_whatever_somebody_else_ends_of_a_run_is_started_again(train: Callable[..., Training]):
    training = train("run.environment_steps=2500", ALONE, "replay.read=sample")
    training.wait_for_steps(150)
    for end in (
        lambda: os.kill(training.child("collector"), signal.SIGTERM),
        lambda: os.kill(training.child("replay"), signal.SIGTERM),
        lambda: os.kill(training.child("learner"), signal.SIGTERM),
        lambda: os.kill(training.helper("receiver_process"), signal.SIGKILL),
        lambda: os.kill(training.helper("endpoint_process"), signal.SIGKILL),
    ):
        end()
        training.wait_for_steps(training.environment_steps() + 100)
    assert training.wait(120) == 0, training.text()
    assert "the run is complete" in training.text()
    assert lag_of(training.folder)["ending"] == "complete"
    assert training.records("finish")[-1]["environment_steps"] == 2500


def test_a_start_that_fails_tells_why_and_the_same_command_works_when_that_is_mended(train: Callable[..., Training]):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        settings = ("run.environment_steps=300", ALONE, f"learner.listen={address}")
        first = train(*settings)
        assert first.wait(90) == 2, first.text()
    told = lag_of(first.folder)
    assert told["ending"] == "failed"
    assert address in told["problem"]
    shown = " ".join(paceline("lag", first.folder).stdout.split())
    assert "run trial, which failed" in shown
    assert address in shown
    assert "collector.count=" not in shown
    assert address in (first.folder / "report.html").read_text()

    second = train(*settings)
    assert second.wait(120) == 0, second.text()
    assert second.records("finish")[-1]["environment_steps"] == 300
    assert lag_of(second.folder)["ending"] == "complete"
