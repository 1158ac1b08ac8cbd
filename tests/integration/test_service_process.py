"""Services as child processes of the launcher: which end is mended by a restart, and which is told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import structlog

from integration.waiting import wait_until
from paceline.errors import ServiceFailedError
from paceline.local.processes import ServiceProcess


def start(tmp_path: Path, *arguments: str, restart_arguments: tuple[str, ...] = (), **settings: int) -> ServiceProcess:
    return ServiceProcess(
        "trial",
        arguments,
        restart_arguments=restart_arguments,
        environment=os.environ,
        log_path=tmp_path / "trial.log",
        metrics_ports={},
        **settings,
    )


@pytest.fixture
def waiting(tmp_path: Path):
    """A collector that waits for a learner that never comes."""
    arguments = ("collector", "--parent", str(os.getpid()), "run.id=trial", "learner.address=127.0.0.1:9")
    process = start(tmp_path, *arguments, max_restarts=1)
    wait_until(lambda: "waiting_for_learner" in process.tail(), seconds=30)
    yield process
    process.terminate()
    process.wait(time.monotonic() + 10)


def test_a_process_that_did_its_work_is_left_alone(tmp_path):
    process = start(tmp_path, "version")
    wait_until(process.has_ended_well, seconds=30)
    assert not process.keep_alive()


def test_a_process_that_ended_with_an_error_is_told_with_its_last_lines(tmp_path):
    process = start(tmp_path, "config", "--check", "run.sed=1")
    wait_until(lambda: not process.is_running(), seconds=30)
    with pytest.raises(ServiceFailedError, match=r"trial ended with exit code 2(.|\n)*run\.sed(.|\n)*run\.seed"):
        process.keep_alive()


def test_lines_of_an_earlier_launcher_are_not_told_with_those_of_this_one(tmp_path):
    (tmp_path / "trial.log").write_text("paceline: an error of the attempt before\n")
    process = start(tmp_path, "config", "--check", "run.sed=1")
    wait_until(lambda: not process.is_running(), seconds=30)
    assert "run.sed" in process.tail()
    assert "attempt before" not in process.tail()
    assert "attempt before" in (tmp_path / "trial.log").read_text()


def test_a_process_that_a_signal_ended_runs_again_but_not_for_ever(waiting):
    old = waiting.pid
    os.kill(old, signal.SIGKILL)
    wait_until(waiting.keep_alive, seconds=10)
    assert waiting.pid != old
    assert waiting.is_running()
    os.kill(waiting.pid, signal.SIGKILL)
    with pytest.raises(ServiceFailedError, match="was ended 2 times"):
        wait_until(waiting.keep_alive, seconds=10)


def test_a_process_that_somebody_else_asked_to_stop_runs_again(waiting):
    old = waiting.pid
    os.kill(old, signal.SIGTERM)
    with structlog.testing.capture_logs() as events:
        wait_until(waiting.keep_alive, seconds=30)
    assert [event["reason"] for event in events] == ["asked to stop by somebody else"]
    assert waiting.pid != old
    assert waiting.is_running()


def test_a_process_that_is_asked_to_stop_does(waiting):
    waiting.terminate()
    assert waiting.wait(time.monotonic() + 10)


def test_a_process_that_does_not_stop_is_killed_at_the_deadline(waiting):
    os.kill(waiting.pid, signal.SIGSTOP)
    waiting.terminate()
    assert not waiting.wait(time.monotonic() + 0.2)
    assert not waiting.is_running()
