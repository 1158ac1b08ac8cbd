"""An environment of one's own: a point that should find the middle."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

Observation = npt.NDArray[np.float32]


class Mine(gymnasium.Env[Observation, Observation]):
    """Observes where the point is, and moves it by the action."""

    observation_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-0.1, 0.1, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin anywhere."""
        super().reset(seed=seed)
        self._place = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self._place, {}

    def step(self, action: Observation) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Move; the nearer to the middle, the better."""
        self._place = np.clip(self._place + action, -2, 2).astype(np.float32)
        return self._place, -float(abs(self._place[0])), False, False, {}


gymnasium.register("Mine-v0", Mine, max_episode_steps=100)
