"""Parameters, gradients and moments as one flat tensor each, so that an optimiser step is one call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam

from paceline.actors import Actor
from paceline.errors import ActorSemanticsError

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
"""Kingma and Ba 2015, and torch.optim.Adam."""


def total_size(shapes: Mapping[str, Sequence[int]]) -> int:
    """Elements of all shapes together."""
    return sum(math.prod(shape) for shape in shapes.values())


def views(flat: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The flat tensor, cut in order into views of these shapes."""
    cut, position = {}, 0
    for name, shape in shapes.items():
        end = position + math.prod(shape)
        cut[name] = flat[position:end].view(*shape)
        position = end
    return cut


class FlatActor:
    """An actor's trainable parameters, and their gradients: from now on views of two flat tensors."""

    def __init__(self, actor: Actor) -> None:
        trainable = {name: each for name, each in actor.named_tensors() if each.requires_grad}
        kinds = {(each.dtype, each.device) for each in trainable.values()}
        if len(kinds) != 1:
            raise ActorSemanticsError(
                f"the actor's trainable parameters are of {len(kinds)} kinds ({kinds}): expected one dtype and device"
            )
        self._shapes = {name: tuple(each.shape) for name, each in trainable.items()}
        self.parameters = torch.cat([each.detach().flatten() for each in trainable.values()])
        self.gradients = torch.zeros_like(self.parameters)
        values, gradients = self.named(self.parameters), self.named(self.gradients)
        for name, each in trainable.items():
            each.data = values[name]
            each.grad = gradients[name]  # autograd adds to it in place

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat tensor laid out like the parameters, as named views."""
        return views(flat, self._shapes)


class FlatAdam:
    """Adam over one flat tensor; its state is three tensors that a checkpoint keeps as they are."""

    def __init__(self, parameters: Tensor, learning_rate: float) -> None:
        self._parameters, self._learning_rate = parameters, learning_rate
        self.first_moment = torch.zeros_like(parameters)
        self.second_moment = torch.zeros_like(parameters)
        self.step_count = torch.zeros((), dtype=torch.float32, device=parameters.device)

    @torch.no_grad()
    def step(self, gradients: Tensor) -> None:
        """Change the parameters in place."""
        adam(
            [self._parameters],
            [gradients],
            [self.first_moment],
            [self.second_moment],
            [],
            [self.step_count],
            fused=True,
            amsgrad=False,
            beta1=BETA_1,
            beta2=BETA_2,
            lr=self._learning_rate,
            weight_decay=0.0,
            eps=EPSILON,
            maximize=False,
        )
