"""A batch of transitions as an algorithm reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from paceline.actors import flatten_observation
from paceline.rows import RowSpec, torch_columns

_COLUMNS = ("observation", "action", "reward", "next_observation", "terminated", "step_count")


@dataclass(frozen=True)
class TransitionBatch:
    """N transitions, each of one step or of several in a row.

    A truncated one is not terminated: its value goes on from `next_observation`, its last one.
    """

    observation: Tensor
    """[N, observation_dim]"""
    action: Tensor
    """[N, action_dim] in environment units"""
    reward: Tensor
    """[N] of all its steps, each discounted by the steps before it"""
    next_observation: Tensor
    """[N, observation_dim] after its last step"""
    terminated: Tensor
    """[N] bool: the task ended here, nothing follows."""
    step_count: Tensor | None = None
    """[N] steps between the two observations; None: one each."""
    weight: Tensor | None = None
    """[N] importance weights that undo the bias of prioritised sampling; None: all count alike."""

    @classmethod
    def from_rows(cls, spec: RowSpec, rows: Tensor, *, weight: Tensor | None = None) -> Self:
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
            step_count=columns["step_count"],
            weight=weight,
        )
