"""Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv 1812.05905)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.actors import Actor, ActorInfo
from paceline.errors import ActorSemanticsError, NonFiniteError
from paceline.learner.algorithms import state
from paceline.learner.algorithms.batch import TransitionBatch
from paceline.learner.algorithms.contract import Update
from paceline.learner.algorithms.critic import TwinCritic, action_gradient, evaluate, q_of
from paceline.learner.algorithms.flat import FlatActor, FlatAdam
from paceline.learner.algorithms.sac_math import (
    actor_loss,
    actor_loss_gradient,
    critic_loss,
    critic_loss_gradient,
    polyak,
    soft_target,
    td_priority,
    temperature_loss,
)


@dataclass(frozen=True)
class SacSettings:
    """What may be chosen; the defaults are those of the paper and of Stable-Baselines3."""

    gamma: float = 0.99
    n_step: int = 1
    """Steps that a row spans at most; above 1 its own count sets its discount."""
    tau: float = 0.005
    """Share of the critic that the target critic takes over in each update."""
    actor_learning_rate: float = 3e-4
    critic_learning_rate: float = 3e-4
    temperature_learning_rate: float = 3e-4
    initial_temperature: float = 1.0
    target_entropy: float | None = None
    """In nats; None: minus the number of action dimensions."""
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the critics' hidden layers."""


class Sac:
    """One actor, two critics, their slow copies and a temperature, and the update that improves them.

    The order is that of Stable-Baselines3: the critics first, then the actor against the *updated* critics, then the
    temperature, then the target critics. (Acme takes all gradients at the old parameters; on Pendulum that needed
    about 500 environment steps more.) The target, the actor's loss and the temperature's loss see the temperature of
    before the update.
    """

    def __init__(
        self, actor: Actor, settings: SacSettings, *, observation_dim: int, action_dim: int, seed: int
    ) -> None:
        self._actor, self._settings, self._action_dim = actor, settings, action_dim
        self._aux_names: frozenset[str] | None = None
        """Of the actor's own losses, as the first update had them."""
        self._target_entropy = -float(action_dim) if settings.target_entropy is None else settings.target_entropy
        self._flat_actor = FlatActor(actor)
        like = self._flat_actor.parameters
        self._generator = torch.Generator(like.device)
        self._generator.manual_seed(seed)
        self._critic, self._target_critic = (
            TwinCritic(observation_dim + action_dim, settings.hidden, dtype=like.dtype, device=like.device)
            for _ in range(2)
        )
        self._critic.initialise(self._generator)
        self._target_critic.parameters.copy_(self._critic.parameters)
        self._log_temperature = torch.full_like(like[:1], math.log(settings.initial_temperature))
        self._actor_optimiser = FlatAdam(self._flat_actor.parameters, settings.actor_learning_rate)
        self._critic_optimiser = FlatAdam(self._critic.parameters, settings.critic_learning_rate)
        self._temperature_optimiser = FlatAdam(self._log_temperature, settings.temperature_learning_rate)

    @property
    def actor(self) -> Actor:
        """The learner actor: changed in place by every update."""
        return self._actor

    def update(self, batch: TransitionBatch) -> Update:
        """Improve everything once."""
        self._actor.update_statistics(batch.observation)
        temperature = self._log_temperature.exp()
        critic_figures, priorities = self._update_critics(batch, temperature)

        action, info = self._actor(batch.observation, True, self._generator)
        log_prob = info.log_prob
        self._require_same_losses(info.aux_losses)
        actor_figures = self._update_actor(batch.observation, action, info, temperature)

        entropy_loss = temperature_loss(self._log_temperature, log_prob.detach(), self._target_entropy)
        self._temperature_optimiser.step(entropy_loss)  # the loss is its own gradient

        polyak(self._target_critic.parameters, self._critic.parameters, self._settings.tau)
        figures = {
            **critic_figures,
            **actor_figures,
            "temperature": temperature[0],
            "temperature_loss": entropy_loss[0],
            "entropy": -log_prob.detach().mean(),
        }
        return Update(figures, priorities)

    @torch.no_grad()
    def _update_critics(self, batch: TransitionBatch, temperature: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        next_action, next_info = self._actor(batch.next_observation, True, self._generator)
        next_q = q_of(evaluate(self._target_critic.layers, batch.next_observation, next_action))
        target = soft_target(
            batch.reward, batch.terminated, next_q, next_info.log_prob, temperature, self._discount(batch)
        )
        activations = evaluate(self._critic.layers, batch.observation, batch.action)
        q = q_of(activations)
        self._critic.write_weight_gradients(activations, critic_loss_gradient(q, target, batch.weight))
        self._critic_optimiser.step(self._critic.gradients)
        figures = {"critic_loss": critic_loss(q, target, batch.weight), "q_mean": q.mean()}
        return figures, None if batch.weight is None else td_priority(q, target)

    def _discount(self, batch: TransitionBatch) -> float | Tensor:
        # Whatever n_step says now: rows of the settings before a resume span as many steps as they did.
        gamma = self._settings.gamma
        if batch.step_count is None:
            return gamma
        return torch.pow(gamma, batch.step_count.to(batch.reward.dtype))

    def _update_actor(
        self, observation: Tensor, action: Tensor, info: ActorInfo, temperature: Tensor
    ) -> dict[str, Tensor]:
        log_prob, aux_losses = info.log_prob, tuple(info.aux_losses.values())
        with torch.no_grad():
            activations = evaluate(self._critic.layers, observation, action)
            q = q_of(activations)
            by_action = action_gradient(self._critic.layers, activations, actor_loss_gradient(q), self._action_dim)
            by_log_prob = (temperature / len(log_prob)).expand_as(log_prob)
            loss = actor_loss(log_prob, q, temperature)
        # The critics' part of the chain rule is done; from here autograd serves an actor of any make.
        self._flat_actor.gradients.zero_()
        torch.autograd.backward((action, log_prob, *aux_losses), (by_action, by_log_prob, *(None for _ in aux_losses)))
        self._actor_optimiser.step(self._flat_actor.gradients)
        return {"actor_loss": loss, **{f"aux_{name}": each.detach() for name, each in info.aux_losses.items()}}

    def _require_same_losses(self, aux_losses: Mapping[str, Tensor]) -> None:
        names = frozenset(aux_losses)
        if self._aux_names is None:
            self._aux_names = names
        elif names != self._aux_names:
            raise ActorSemanticsError(
                f"the actor's aux_losses are {sorted(names)} now, and were {sorted(self._aux_names)}: expected "
                "the same names in every update"
            )

    def check_finite(self) -> None:
        """Raise NonFiniteError naming the first weight or gradient that holds a NaN or an infinity."""
        flats: dict[str, tuple[FlatActor | TwinCritic, Tensor]] = {
            "actor gradient": (self._flat_actor, self._flat_actor.gradients),
            "actor weight": (self._flat_actor, self._flat_actor.parameters),
            "critic gradient": (self._critic, self._critic.gradients),
            "critic weight": (self._critic, self._critic.parameters),
            "target critic weight": (self._target_critic, self._target_critic.parameters),
        }
        for kind, (owner, flat) in flats.items():
            if not bool(flat.isfinite().all()):
                name = next(name for name, view in owner.named(flat).items() if not bool(view.isfinite().all()))
                raise NonFiniteError(_diverged(f"{kind} {name!r}"))
        rest = {**dict(self._actor.named_buffers()), "log_temperature": self._log_temperature}
        for name, tensor in rest.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise NonFiniteError(_diverged(repr(name)))

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that the next update depends on, by name, copied: weights, moments, temperature, random state."""
        return {name: tensor.detach().clone() for name, tensor in self._tensors()} | {
            state.GENERATOR: self._generator.get_state()
        }

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from `state_dict`'s tensors. Raises CheckpointError, with nothing changed, unless all fit exactly."""
        state.load(dict(self._tensors()), self._generator, saved)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._actor.named_tensors():
            yield f"actor/{name}", tensor
        for prefix, critic in (("critic", self._critic), ("target_critic", self._target_critic)):
            for name, tensor in critic.named(critic.parameters).items():
                yield f"{prefix}/{name}", tensor
        yield "log_temperature", self._log_temperature
        optimisers = {
            "actor": (self._actor_optimiser, self._flat_actor.named),
            "critic": (self._critic_optimiser, self._critic.named),
            "temperature": (self._temperature_optimiser, lambda flat: {"log_temperature": flat}),
        }
        for owner, (optimiser, named) in optimisers.items():
            yield f"{owner}_optimiser/step_count", optimiser.step_count
            for moment in ("first_moment", "second_moment"):
                for name, tensor in named(getattr(optimiser, moment)).items():
                    yield f"{owner}_optimiser/{moment}/{name}", tensor


def _diverged(what: str) -> str:
    return (
        f"{what} holds a NaN or an infinity: training stops and nothing of it is published or saved; look at the "
        "rewards and observations, lower the learning rates, and resume from the last checkpoint"
    )
