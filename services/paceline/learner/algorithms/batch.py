"""A batch of transitions as an algorithm reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from paceline.actors import flatten_observation
from paceline.rows import RowSpec, torch_columns

_COLUMNS = ("observation", "action", "reward", "next_observation", "terminated")


@dataclass(frozen=True)
class TransitionBatch:
    """N transitions. A truncated one is not terminated: its value goes on from `next_observation`, its last one."""

    observation: Tensor
    """[N, observation_dim]"""
    action: Tensor
    """[N, action_dim] in environment units"""
    reward: Tensor
    """[N]"""
    next_observation: Tensor
    """[N, observation_dim]"""
    terminated: Tensor
    """[N] bool: the task ended here, nothing follows."""

    @classmethod
    def from_rows(cls, spec: RowSpec, rows: Tensor) -> Self:
        """View packed rows, `[N, row_bytes]` uint8 on any device, as a batch.

        Observations and actions are flattened to vectors and read as float32; a column that is float32 is not copied.
        """
        columns = torch_columns(spec, rows, _COLUMNS)
        return cls(
            observation=flatten_observation(columns["observation"]),
            action=flatten_observation(columns["action"]),
            reward=columns["reward"].to(torch.float32),
            next_observation=flatten_observation(columns["next_observation"]),
            terminated=columns["terminated"],
        )
