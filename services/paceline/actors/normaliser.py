"""Observations brought to mean 0 and standard deviation 1 by running statistics that travel with the actor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EPSILON = 1e-2
"""Added to the standard deviation, as Holosoma does: a constant input is not blown up."""


class RunningNormaliser(nn.Module):
    """(x - mean) / (std + EPSILON). The statistics are buffers: only `update` changes them, never `forward`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        # float64: after 10^8 rows a float32 mean no longer takes up what a batch adds.
        self.mean: Tensor
        self.variance: Tensor
        self.count: Tensor
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(dim, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, observation: Tensor) -> Tensor:
        """The normalised observation [N, dim], in its own dtype."""
        return ((observation - self.mean) / (self.variance.sqrt() + EPSILON)).to(observation.dtype)

    @torch.no_grad()
    def update(self, observation: Tensor) -> None:
        """Take `[N, dim]` rows into the statistics.

        Chan et al. 1979: the cross term has the distance of the batch's mean to the mean *before* this update. (Some
        published code takes the mean after it, and so under-estimates the variance while the mean drifts.)
        """
        rows = observation.to(torch.float64)
        old, new = self.count, len(rows)
        total = old + new
        distance = rows.mean(0) - self.mean
        squares = self.variance * old + rows.var(0, unbiased=False) * new + distance.square() * (old * new / total)
        self.mean += distance * (new / total)
        self.variance.copy_(squares / total)
        self.count.copy_(total)
