"""Environments that misbehave in a whole run: what a person is told, and what is kept."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from e2e.harness import Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

MODULE = """
import os

import gymnasium
from gymnasium.envs.classic_control import PendulumEnv


class Explosive(PendulumEnv):
    '''Rewards that are finite, and whose squares are not.'''

    def step(self, action):
        observation, _, terminated, truncated, infos = super().step(action)
        return observation, -3e30, terminated, truncated, infos


class Fragile(PendulumEnv):
    '''Raises once, in its 300th step.'''

    steps = 0

    def step(self, action):
        Fragile.steps += 1
        if Fragile.steps == 300:
            raise RuntimeError("the joint came off")
        return super().step(action)


gymnasium.register("Explosive-v0", Explosive, max_episode_steps=200)
gymnasium.register("Fragile-v0", Fragile, max_episode_steps=200)
"""


@pytest.fixture
def module(tmp_path: Path) -> None:
    (tmp_path / "misbehaving.py").write_text(textwrap.dedent(MODULE))


@pytest.mark.usefixtures("module")
def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_only_finite_checkpoints(train: Callable[..., Training]):
    training = train("env.id=misbehaving:Explosive-v0", "learner.checkpoint.every_updates=1")
    assert training.wait(120) == 2, training.text()
    assert "learner ended with exit code 2" in training.text()
    assert "holds a NaN or an infinity" in training.text()
    log = (training.folder / "logs" / "learner.log").read_text()
    assert log.count("holds a NaN or an infinity") == 1
    checkpoints = list((training.folder / "checkpoints").glob("*.safetensors"))
    assert checkpoints
    for path in checkpoints:
        assert all(
            bool(tensor.isfinite().all()) for tensor in load_file(path).values() if tensor.dtype == torch.float32
        )
    # Nothing of it was served: a replica refuses such a snapshot, and says so.
    for name in ("collector-0", "evaluator"):
        text = (training.folder / "logs" / f"{name}.log").read_text()
        assert not re.search(r"snapshot \d+\.\d+: tensor .* a NaN or an infinity", text)


@pytest.mark.usefixtures("module")
def test_an_environment_that_raises_ends_the_run_and_is_named_with_its_step_and_seed(train: Callable[..., Training]):
    training = train("env.id=misbehaving:Fragile-v0", "run.environment_steps=800", "evaluator.enabled=false")
    assert training.wait(120) == 2, training.text()
    for word in ("collector-0 ended with exit code 2", "Fragile-v0", "the joint came off", "step", "seed"):
        assert word in training.text()
    assert training.records("training")


@pytest.mark.usefixtures("module")
def test_a_run_goes_on_over_an_environment_that_raises_if_it_may(train: Callable[..., Training]):
    training = train(
        "env.id=misbehaving:Fragile-v0",
        "run.environment_steps=800",
        "collector.on_environment_error=reset",
        "evaluator.enabled=false",
    )
    assert training.wait(120) == 0, training.text()
    assert training.records("finish")[-1]["environment_steps"] == 800
    events = [json.loads(line) for line in (training.folder / "logs" / "collector-0.log").read_text().splitlines()]
    assert [event["event"] for event in events].count("environments_rebuilt") == 1
