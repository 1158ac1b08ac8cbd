"""Environments whose every step is known, registered as `counting_environment:Counting-v0` and so on."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from paceline.config import EnvConfig
from paceline.envs import Environments, describe_environment, make_vector_environment


class Counting(gymnasium.Env[Any, Any]):
    """The n-th episode begins at 100 n, each step adds 1, every reward is 1.

    By the remainder of its seed by 3: 0 terminates after 2 steps; 1 is truncated after 3; 2 does both, after 2 steps.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as Gymnasium declares it
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, dtype: str = "float32") -> None:
        self.observation_space = Box(0, 255 if dtype == "uint8" else 10_000, (1,), np.dtype(dtype).type)
        self._episode = self._steps = self._kind = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._kind, self._episode = seed % 3, 0
        self._episode += 1
        self._steps = 0
        return self._observation(), {"episode": self._episode}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        terminated = self._kind in (0, 2) and self._steps == 2
        truncated = (self._kind == 1 and self._steps == 3) or (self._kind == 2 and self._steps == 2)
        return self._observation(), 1.0, terminated, truncated, {"steps": self._steps}

    def _observation(self) -> Any:
        return np.array([100 * self._episode + self._steps], self.observation_space.dtype)


class Echo(gymnasium.Env[Any, Any]):
    """Observes the action that it was given."""

    observation_space = Box(-100.0, 100.0, (2,), np.float64)
    action_space = Box(np.array([-1.0, -2.0]), np.array([1.0, 3.0]), dtype=np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.asarray(action), 0.0, False, False, {}


class Faulty(gymnasium.Env[Any, Any]):
    """Episodes of 5 steps; at its `step`-th step of all it does what `fault` says, and so on every `step` steps."""

    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, fault: str, step: int = 8) -> None:
        self._fault, self._at, self._steps, self._episode_steps = fault, step, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode_steps = 0
        if self._fault == "reset raises":
            raise OSError("no 100 % free disk")
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._episode_steps += 1
        observation, reward = np.zeros(2, np.float32), 0.5
        if self._steps % self._at == 0:
            if self._fault == "step raises":
                raise ZeroDivisionError("a 100 % broken simulator")
            if self._fault == "observation is NaN":
                observation[1] = np.nan
            if self._fault == "observation has a wrong shape":
                observation = np.zeros(3, np.float32)
            if self._fault == "reward is infinite":
                reward = float("inf")
        return observation, reward, self._episode_steps == 5, False, {}


class Sour(Counting):
    """Counting, less that it fails at its second step where it began with the seed `bad`."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self._bad, self._is_bad = bad, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._is_bad = self._is_bad if seed is None else seed == self._bad
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        found = super().step(action)
        if self._is_bad and self._steps == 2:
            raise ValueError("this seed is sour")
        return found


class Spaces(gymnasium.Env[Any, Any]):
    """Has the spaces that its arguments name, and nothing else."""

    def __init__(self, observation: str = "float32", action: str = "bounded") -> None:
        image = Box(0, 255, (4, 4, 3), np.uint8)
        self.observation_space = image if observation == "uint8" else Box(-1, 1, (2,), np.dtype(observation).type)
        self.action_space = {
            "bounded": Box(-1.0, 1.0, (3, 2), np.float32),
            "discrete": Discrete(4),
            "unbounded": Box(-np.inf, np.inf, (2,), np.float32),
            "integers": Box(0, 4, (2,), np.int32),
        }[action]


for _name in ("Counting", "Echo", "Faulty", "Sour", "Spaces"):
    if f"{_name}-v0" not in gymnasium.registry:
        gymnasium.register(f"{_name}-v0", entry_point=f"counting_environment:{_name}")


def build(
    env_id: str, seeds: Any, *, autoreset: Any = "next_step", vectorization: Any = "sync", **kwargs: Any
) -> Environments:
    """Environments of a class above, or of a Gymnasium id, one for each seed."""
    config = EnvConfig(
        id=env_id if "-v" in env_id else f"counting_environment:{env_id}-v0",
        kwargs=kwargs,
        autoreset=autoreset,
        vectorization=vectorization,
    )
    description = describe_environment(config)
    return Environments(make_vector_environment(config, len(seeds)), description, seeds)


def collect_until(environments: Environments, episodes: int) -> tuple[dict[int, Any], dict[int, Any], int]:
    """Transitions of each environment as (observation, next, terminated, truncated), and its finished episodes."""
    action = np.zeros(environments.action_shape, np.float32)
    transitions: dict[int, Any] = {number: [] for number in range(environments.count)}
    finished: dict[int, Any] = {number: [] for number in range(environments.count)}
    steps = 0
    while any(len(each) < episodes for each in finished.values()):
        step = environments.step(action)
        steps += 1
        for number in np.flatnonzero(step.valid):
            assert step.reward[number] == 1
            transitions[number].append(
                (
                    float(step.observation[number, 0]),
                    float(step.next_observation[number, 0]),
                    bool(step.terminated[number]),
                    bool(step.truncated[number]),
                    int(step.episode[number]),
                )
            )
        for episode in step.finished:
            finished[episode.environment].append(episode)
    return transitions, finished, steps


def require_whole_episodes(environments: Environments) -> None:
    """Run counting environments seeded with 0 and 1 for three episodes each, and check every transition of theirs."""
    transitions, finished, _ = collect_until(environments, 3)
    environments.close()
    for each in transitions.values():
        assert all(after - before == 1 for before, after, *_ in each)
    terminating = [each[:4] for each in transitions[0]]
    assert (101, 102, True, False) in terminating
    assert not any(before == 102 for before, *_ in terminating)
    truncating = [each[:4] for each in transitions[1]]
    assert (102, 103, False, True) in truncating
    assert not any(before == 103 for before, *_ in truncating)
    assert [(each.length, each.episode_return, each.terminated) for each in finished[0][:3]] == [(2, 2.0, True)] * 3
    assert [(each.length, each.episode_return, each.terminated) for each in finished[1][:3]] == [(3, 3.0, False)] * 3
