"""Watches one environment from within its process."""

from __future__ import annotations

import math
import multiprocessing
import signal
import traceback
from typing import Any

import gymnasium
import numpy as np

from paceline.telemetry import get_logger

FAULT = "paceline_fault"
"""The key of a fault in the infos of a step or reset."""
TRACEBACK = "paceline_traceback"
"""The key of where it was raised, beside FAULT; empty where nothing was."""


class Guard(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Turns what an environment raises, or returns against its spaces, into an entry of its infos.

    Gymnasium's own way from a worker's exception to the parent loses the environment's number, and fails on some texts.
    The environment's infos end here: nothing reads them, and merging unequal ones is what vector environments fail at.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        space = env.observation_space
        self._shape = space.shape
        self._floating = space.dtype is not None and np.issubdtype(space.dtype, np.floating)
        self._placeholder = np.zeros(space.shape or (), space.dtype)
        if multiprocessing.parent_process() is not None:
            # Ctrl-C reaches the whole process group; the collector decides when its workers end.
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset; a fault comes as an entry of the infos."""
        raised = ""
        try:
            observation, _ = self.env.reset(seed=seed, options=options)
            fault = self._fault_of(observation)
        except Exception as error:
            fault, raised = f"reset raised {type(error).__name__}: {error}", traceback.format_exc()
        return (self._placeholder, {FAULT: fault, TRACEBACK: raised}) if fault else (observation, {})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step; a fault comes as an entry of the infos, beside zeros."""
        raised = ""
        try:
            observation, raw_reward, terminated, truncated, _ = self.env.step(action)
            reward = float(raw_reward)
            fault = self._fault_of(observation)
            if fault is None and not math.isfinite(reward):
                fault = f"the reward is {reward}: expected a finite number"
        except Exception as error:
            fault, raised = f"step raised {type(error).__name__}: {error}", traceback.format_exc()
        if fault:
            return self._placeholder, 0.0, False, False, {FAULT: fault, TRACEBACK: raised}
        return observation, reward, bool(terminated), bool(truncated), {}

    def close(self) -> None:
        """Close; what that raises is only a line of the log: it ends here anyway, and the others are still to close."""
        try:
            self.env.close()
        except Exception as error:
            get_logger().warning("environment_close_failed", reason=f"{type(error).__name__}: {error}")

    def _fault_of(self, observation: Any) -> str | None:
        shape = np.shape(observation)
        if shape != self._shape:
            return f"the observation has shape {shape}: expected {self._shape}, as its space says"
        if self._floating and not np.isfinite(observation).all():
            return "the observation has a NaN or an infinity: expected finite numbers"
        return None
