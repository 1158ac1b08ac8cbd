"""An actor of one's own: layers with normalisation, and an action that stays small where nothing asks for more."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.actors import Actor, ActorInfo
from paceline.actors.tanh_gaussian import log_prob_of_noise, squash


class MyActor(Actor):
    """A squashed Gaussian whose actions lie within `action_limit` of 0."""

    action_transform_id = "tanh_limit"

    def __init__(
        self,
        observation_dim: int,
        action_dim: int,
        *,
        device: str | torch.device,
        action_limit: float,
        width: int = 32,
        size_cost: float = 0.0,
    ) -> None:
        """`size_cost`: weight of the mean square of what is squashed, which is added to the actor's loss."""
        super().__init__()
        self.size_cost = size_cost
        self.trunk = nn.Sequential(nn.Linear(observation_dim, width), nn.LayerNorm(width), nn.SiLU())
        self.mean, self.log_std = nn.Linear(width, action_dim), nn.Linear(width, action_dim)
        self.limit: Tensor
        # A buffer, so that it travels with the weights.
        self.register_buffer("limit", torch.full((action_dim,), action_limit))
        self.to(device)

    def forward(
        self, observation: Tensor, training: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, ActorInfo]:
        """An action drawn with gradients, its log-density, and in training one loss of its own."""
        mean, log_std = self._distribution(observation)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        pre_tanh = mean + log_std.exp() * noise
        losses = {"action_size": self.size_cost * mean.square().mean()} if training and self.size_cost else {}
        return self._squash(pre_tanh), ActorInfo(log_prob_of_noise(noise, pre_tanh, log_std, self.limit), losses)

    def get_mean_and_std(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Of the Gaussian, before the squash."""
        mean, log_std = self._distribution(observation)
        return mean, log_std.exp()

    @torch.no_grad()
    def explore(
        self, observation: Tensor, deterministic: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """An action and its log-density; deterministic: the squashed mean."""
        if not deterministic:
            action, info = self(observation, False, generator)
            return action, info.log_prob
        mean, log_std = self._distribution(observation)
        return self._squash(mean), log_prob_of_noise(torch.zeros_like(mean), mean, log_std, self.limit)

    def as_export_module(self) -> nn.Module:
        """A module of observation -> deterministic action."""
        return _Deterministic(self)

    def _distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(observation)
        return self.mean(features), self.log_std(features).clamp(-5.0, 1.0)

    def _squash(self, pre_tanh: Tensor) -> Tensor:
        return squash(pre_tanh, torch.zeros_like(self.limit), self.limit)


class _Deterministic(nn.Module):
    def __init__(self, actor: MyActor) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, observation: Tensor) -> Tensor:
        return self.actor._squash(self.actor.get_mean_and_std(observation)[0])
