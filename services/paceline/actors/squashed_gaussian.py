"""The built-in actor: a multilayer perceptron with a tanh-squashed Gaussian head."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.actors.contract import SCHEMA_VERSION, Actor, ActorInfo, ActorSemantics
from paceline.actors.normaliser import RunningNormaliser
from paceline.actors.tanh_gaussian import log_prob_of_noise, squash
from paceline.errors import ActorSemanticsError

KIND = "squashed_gaussian"
BUILDER = "paceline.actors.squashed_gaussian:SquashedGaussianActor"
ACTION_TRANSFORM = "tanh_affine"

MIN_LOG_STD, MAX_LOG_STD = -20.0, 2.0
"""Clamp of the log standard deviation, as in Stable-Baselines3 and in Haarnoja et al.'s own code."""


class SquashedGaussianActor(Actor):
    """Hidden layers with ReLU, then mean and log standard deviation from one linear layer; PyTorch's initial weights.

    The action range may be asymmetric and differ between dimensions; it is part of the semantics, and kept in buffers.
    """

    action_transform_id = ACTION_TRANSFORM

    def __init__(
        self,
        observation_dim: int,
        action_dim: int,
        *,
        hidden: Sequence[int],
        action_low: Sequence[float],
        action_high: Sequence[float],
        normalise_observation: bool = False,
    ) -> None:
        super().__init__()
        _check_range(action_low, action_high, action_dim)
        low, high = torch.tensor(action_low, dtype=torch.float64), torch.tensor(action_high, dtype=torch.float64)
        self.centre: Tensor
        self.half_range: Tensor
        # Halves before the sum: a range near the largest float must not overflow.
        self.register_buffer("centre", (low / 2 + high / 2).to(torch.get_default_dtype()))
        self.register_buffer("half_range", (high / 2 - low / 2).to(torch.get_default_dtype()))
        self.normaliser = RunningNormaliser(observation_dim) if normalise_observation else None
        layers: list[nn.Module] = []
        width = observation_dim
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        self.trunk = nn.Sequential(*layers)
        self.head = nn.Linear(width, 2 * action_dim)

    def forward(
        self, observation: Tensor, training: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, ActorInfo]:
        """A reparameterised action [N, A] in environment units and its log-density [N]; the same in both modes."""
        mean, log_std = self._distribution(observation)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        pre_tanh = torch.addcmul(mean, log_std.exp(), noise)
        action = squash(pre_tanh, self.centre, self.half_range)
        return action, ActorInfo(log_prob_of_noise(noise, pre_tanh, log_std, self.half_range))

    def get_mean_and_std(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [N, A] of the Gaussian before the squash."""
        mean, log_std = self._distribution(observation)
        return mean, log_std.exp()

    @torch.no_grad()
    def explore(
        self, observation: Tensor, deterministic: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """An action [N, A] in environment units and its log-density [N]; deterministic: the squashed mean."""
        if not deterministic:
            action, info = self(observation, False, generator)
            return action, info.log_prob
        mean, log_std = self._distribution(observation)
        density = log_prob_of_noise(torch.zeros_like(mean), mean, log_std, self.half_range)
        return squash(mean, self.centre, self.half_range), density

    def as_export_module(self) -> nn.Module:
        """A module of observation [N, D] -> deterministic action [N, A]; it shares this actor's weights."""
        return _DeterministicPolicy(self)

    def update_statistics(self, observation: Tensor) -> None:
        """Take a training batch into the normaliser, if there is one."""
        if self.normaliser is not None:
            self.normaliser.update(observation)

    def _distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        if self.normaliser is not None:
            observation = self.normaliser(observation)
        mean, log_std = self.head(self.trunk(observation)).chunk(2, dim=-1)
        return mean, log_std.clamp(MIN_LOG_STD, MAX_LOG_STD)


class _DeterministicPolicy(nn.Module):
    def __init__(self, actor: SquashedGaussianActor) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, observation: Tensor) -> Tensor:
        mean, _ = self.actor.get_mean_and_std(observation)
        return squash(mean, self.actor.centre, self.actor.half_range)


def squashed_gaussian_semantics(
    observation_dim: int,
    *,
    hidden: Sequence[int],
    action_low: Sequence[float],
    action_high: Sequence[float],
    normalise_observation: bool = False,
) -> ActorSemantics:
    """The record of a built-in actor; bounds in environment units, one of each per action dimension."""
    _check_range(action_low, action_high, len(action_low))
    return ActorSemantics(
        schema_version=SCHEMA_VERSION,
        kind=KIND,
        builder=BUILDER,
        kwargs={
            "hidden": [int(size) for size in hidden],
            "action_low": [float(bound) for bound in action_low],
            "action_high": [float(bound) for bound in action_high],
            "normalise_observation": normalise_observation,
        },
        observation_dim=observation_dim,
        action_dim=len(action_low),
        action_transform=ACTION_TRANSFORM,
    )


def _check_range(low: Sequence[float], high: Sequence[float], action_dim: int) -> None:
    if not len(low) == len(high) == action_dim >= 1:
        raise ActorSemanticsError(
            f"action_low has {len(low)} and action_high {len(high)} values: expected {action_dim}, one per dimension"
        )
    for index, (lowest, highest) in enumerate(zip(low, high, strict=True)):
        if not (math.isfinite(lowest) and math.isfinite(highest) and lowest < highest):
            raise ActorSemanticsError(
                f"dimension {index} of the action has the range [{lowest}, {highest}]: expected finite bounds, the "
                "lower one below the upper one; wrap the environment in gymnasium.wrappers.RescaleAction"
            )
