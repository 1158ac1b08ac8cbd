"""Ctrl-C at any moment: everything stops in time, nothing is left behind, and the run can go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.harness import Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _launched(training: Training) -> bool:
    return (training.folder / "logs" / "replay.log").exists()


def _redis_made(training: Training) -> bool:
    return (training.folder / "redis").exists()


def _learner_holds_the_run(training: Training) -> bool:
    return (training.folder / "learner" / "incarnation.json").exists()


def _first_record(training: Training) -> bool:
    return bool(training.records("start"))


@pytest.mark.parametrize("moment", [_redis_made, _launched, _learner_holds_the_run, _first_record])
def test_an_interrupt_at_any_moment_stops_everything_in_time(
    train: Callable[..., Training], moment: Callable[[Training], bool]
):
    training = train("run.environment_steps=100000")
    training.wait_for(lambda: moment(training), moment.__name__)
    children = training.children()
    began = time.monotonic()
    training.interrupt()
    assert training.wait(15) == 0, training.text()
    assert time.monotonic() - began < 15
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def test_a_run_that_was_interrupted_before_it_began_can_go_on(train: Callable[..., Training]):
    first = train("run.environment_steps=400")
    first.wait_for(lambda: _launched(first), "the first process")
    first.interrupt()
    assert first.wait(15) == 0, first.text()
    second = train("run.environment_steps=400", "--resume")
    assert second.wait(120) == 0, second.text()
    assert second.records("evaluation")[-1]["environment_steps"] == 400


def test_a_second_interrupt_changes_nothing(train: Callable[..., Training]):
    training = train("run.environment_steps=100000")
    training.wait_for_steps(200)
    training.interrupt()
    training.interrupt()
    os.kill(training.process.pid, 15)
    assert training.wait(15) == 0, training.text()
    assert list((training.folder / "checkpoints").glob("*.json"))
    assert not list((training.folder / "checkpoints").glob("*.tmp"))
