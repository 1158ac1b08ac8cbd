"""Environments in processes of their own: the same transitions, and faults that end nothing but the episode."""

from __future__ import annotations

import multiprocessing
import os
import signal

import numpy as np
import pytest

from counting_environment import build, require_whole_episodes
from mortal_environment import killed_in_its_step
from paceline.envs import stepping
from paceline.errors import EnvironmentFaultError


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_no_transition_from_another_process_crosses_the_end_of_an_episode(mode):
    require_whole_episodes(build("Counting", (0, 1), autoreset=mode, vectorization="async"))


def test_a_fault_in_another_process_names_environment_number_step_and_seed():
    environments = build("Faulty", (11, 12), fault="step raises", step=2, vectorization="async")
    action = np.zeros((2, 1), np.float32)
    environments.step(action)
    with pytest.raises(EnvironmentFaultError, match="a 100 % broken simulator") as caught:
        environments.step(action)
    environments.close()
    assert "number 0 (seed 11) at its step 2" in str(caught.value)


def test_a_dead_environment_process_is_a_fault_and_not_a_hang():
    environments = build("Counting", (0, 1), vectorization="async")
    action = np.zeros((2, 1), np.float32)
    environments.step(action)
    process = environments._vector.processes[1]
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    with pytest.raises(EnvironmentFaultError, match="died"):
        environments.step(action)
    environments.close()


@pytest.mark.parametrize("count", [1, 2])
def test_a_process_that_dies_in_a_step_is_a_fault_and_all_of_them_end(tmp_path, count):
    tells = tmp_path / "tells"
    environments = build("mortal_environment:Mortal-v0", range(count), vectorization="async", tells=str(tells))
    with killed_in_its_step(tells), pytest.raises(EnvironmentFaultError, match="died"):
        environments.step(np.zeros((count, 1), np.float32))
    environments.close()
    require_ended(environments)
    assert [process.exitcode for process in environments._vector.processes] == [-signal.SIGKILL, 0][:count]
    environments.close()  # once more is nothing


def test_a_process_that_hangs_in_a_step_and_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    for name in ("STEP_DEADLINE_SECONDS", "CLOSE_DEADLINE_SECONDS", "_SIGNAL_SECONDS"):
        monkeypatch.setattr(stepping, name, 1.0)
    tells = tmp_path / "tells"
    environments = build(
        "mortal_environment:Mortal-v0", (0, 1), vectorization="async", tells=str(tells), is_stubborn=True
    )
    os.mkfifo(tells)  # and nobody reads it
    with pytest.raises(EnvironmentFaultError, match="does not answer within 1 s"):
        environments.step(np.zeros((2, 1), np.float32))
    environments.close()
    require_ended(environments)
    assert [process.exitcode for process in environments._vector.processes] == [-signal.SIGKILL, 0]


def test_processes_whose_first_reset_fails_end_while_its_error_is_still_at_hand():
    before = set(multiprocessing.active_children())
    with pytest.raises(EnvironmentFaultError, match="no 100 % free disk") as caught:
        build("Faulty", (3,), fault="reset raises", vectorization="async")
    assert set(multiprocessing.active_children()) <= before
    del caught


def require_ended(environments):
    """No process is left, no zombie either, and no pipe is open."""
    vector = environments._vector
    assert all(pipe.closed for pipe in vector.parent_pipes)
    for process in vector.processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
