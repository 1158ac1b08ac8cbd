"""An environment whose steps call a server and a Redis, registered as `calling_environment:Calling-v0`."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from paceline.config import RpcConfig
from paceline.replay.link import RedisLink
from paceline.rpc.client import open_channel

ECHO = "/test.Test/Echo"


class Calling(gymnasium.Env[Any, Any]):
    """Asks both for an echo of its seed and step; the observation is what they said, and its process."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as Gymnasium declares it
    action_space = Box(-1.0, 1.0, (1,), np.float32)
    observation_space = Box(0, np.inf, (3,), np.float64)

    def __init__(self, address: str, redis_url: str) -> None:
        self._echo = open_channel(address, RpcConfig()).unary_unary(ECHO)
        self._link = RedisLink(redis_url, deadline_seconds=10)
        self._next = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._next = 1000 * (seed or 0)
        return np.zeros(3), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._next += 1
        asked = b"%d" % self._next
        said = [float(self._echo(asked, timeout=10)), float(self._link.command("ECHO", asked)), float(os.getpid())]
        return np.array(said), 1.0, False, False, {}


if "Calling-v0" not in gymnasium.registry:
    gymnasium.register("Calling-v0", entry_point="calling_environment:Calling")
