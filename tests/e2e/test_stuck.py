"""A process that makes no progress is named, with what it does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.harness import Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_HANGING = """
import gymnasium
from pathlib import Path
from gymnasium.envs.classic_control.pendulum import PendulumEnv

class Hanging(PendulumEnv):
    def __init__(self, gate, render_mode=None):
        super().__init__()
        self._gate = Path(gate)

    def step(self, action):
        if self._gate.exists():
            self._gate.read_text()
        return super().step(action)

gymnasium.register("Hanging-v0", entry_point=Hanging, max_episode_steps=200)
"""


def test_an_environment_that_hangs_is_told_and_that_it_goes_on(train: Callable[..., Training], tmp_path: Path):
    (tmp_path / "hanging_environment.py").write_text(_HANGING)
    gate = tmp_path / "gate"
    training = train(
        "run.environment_steps=1500",
        "evaluator.enabled=false",
        "run.stuck_seconds=2",
        "env.id=hanging_environment:Hanging-v0",
        f"env.kwargs={{gate: {gate}}}",
    )
    training.wait_for_steps(150)
    os.mkfifo(gate)
    training.wait_for(lambda: "collector-0 is stuck: its loop is in 'environment'" in training.text(), "it is named")
    with gate.open("w"):
        gate.unlink()
    assert training.wait(120) == 0, training.text()
    assert "collector-0 goes on" in training.text()
