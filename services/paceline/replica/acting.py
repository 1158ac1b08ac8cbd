"""One forward of the actor for one step of all environments."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.actors import Actor, flatten_observation


def act(
    actor: Actor,
    observation: npt.NDArray[Any],
    *,
    deterministic: bool,
    generator: torch.Generator | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Actions [N, action_dim] in environment units for observations [N, *shape], and their log-densities [N]."""
    with torch.inference_mode():
        action, log_prob = actor.explore(flatten_observation(torch.from_numpy(observation)), deterministic, generator)
        return action.numpy(), log_prob.numpy()
