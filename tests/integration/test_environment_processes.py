"""Environments in processes of their own: the same transitions, and faults that end nothing but the episode."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from counting_environment import build, require_whole_episodes
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
