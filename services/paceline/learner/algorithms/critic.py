"""Twin critics: two networks Q_i(s, a) whose layers are stacked, so that one product serves both.

Their gradients are written out instead of recorded by autograd. That computes only what each loss needs: weights
without inputs for the critics' own loss, the action without weights for the actor's. Measured at batch 256 it is a
quarter faster than autograd over the same products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.learner.algorithms.flat import total_size, views

CRITIC_COUNT = 2


@dataclass(frozen=True)
class Layer:
    """One layer of both networks: weight [2, in, out] and bias [2, 1, out]."""

    weight: Tensor
    bias: Tensor


class TwinCritic:
    """Multilayer perceptrons with ReLU over (observation, action), all parameters in one flat tensor."""

    def __init__(self, input_dim: int, hidden: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        widths = [input_dim, *hidden, 1]
        self._shapes: dict[str, tuple[int, ...]] = {}
        for index, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            self._shapes[f"{index}.weight"] = (CRITIC_COUNT, inputs, outputs)
            self._shapes[f"{index}.bias"] = (CRITIC_COUNT, 1, outputs)
        self.parameters = torch.zeros(total_size(self._shapes), dtype=dtype, device=device)
        self.gradients = torch.zeros_like(self.parameters)
        self.layers = self._layers(self.parameters)
        self._gradient_layers = self._layers(self.gradients)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw all parameters from U(-1, 1) / sqrt(inputs), which is what torch.nn.Linear does."""
        for layer in self.layers:
            bound = 1.0 / math.sqrt(layer.weight.shape[1])
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.uniform_(-bound, bound, generator=generator)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat tensor laid out like the parameters, as named views."""
        return views(flat, self._shapes)

    def write_weight_gradients(self, activations: Sequence[Tensor], q_gradient: Tensor) -> None:
        """Overwrite `gradients` with the derivative in all parameters, given the derivative in q [2, N]."""
        weight_gradients(self.layers, self._gradient_layers, activations, q_gradient)

    def _layers(self, flat: Tensor) -> tuple[Layer, ...]:
        named = self.named(flat)
        return tuple(Layer(named[f"{i}.weight"], named[f"{i}.bias"]) for i in range(len(named) // 2))


def evaluate(layers: Sequence[Layer], observation: Tensor, action: Tensor) -> list[Tensor]:
    """What each layer gives, [2, N, width], beginning with the input; `q_of` reads the value from it."""
    activations = [torch.cat((observation, action), -1).expand(CRITIC_COUNT, -1, -1)]
    for layer in layers[:-1]:
        # bmm and an addition in place: baddbmm would first copy the bias to the size of the result.
        activations.append(torch.bmm(activations[-1], layer.weight).add_(layer.bias).relu_())
    activations.append(torch.bmm(activations[-1], layers[-1].weight).add_(layers[-1].bias))
    return activations


def q_of(activations: Sequence[Tensor]) -> Tensor:
    """The critics' values [2, N]."""
    return activations[-1].squeeze(-1)


def weight_gradients(
    layers: Sequence[Layer], gradients: Sequence[Layer], activations: Sequence[Tensor], q_gradient: Tensor
) -> None:
    """Overwrite `gradients` with the derivative in every weight and bias, given the derivative in q [2, N]."""
    gradient = q_gradient.unsqueeze(-1)
    for index in reversed(range(len(layers))):
        torch.bmm(activations[index].mT, gradient, out=gradients[index].weight)
        torch.sum(gradient, 1, keepdim=True, out=gradients[index].bias)
        if index:
            gradient = _through_relu(gradient, layers[index], activations[index])


def action_gradient(
    layers: Sequence[Layer], activations: Sequence[Tensor], q_gradient: Tensor, action_dim: int
) -> Tensor:
    """The derivative in the action [N, action_dim], given the derivative in q [2, N]; weights are constants."""
    gradient = q_gradient.unsqueeze(-1)
    for index in reversed(range(1, len(layers))):
        gradient = _through_relu(gradient, layers[index], activations[index])
    # The action is the last part of the input; the rest of the product is not wanted.
    return torch.bmm(gradient, layers[0].weight[:, -action_dim:].mT).sum(0)


def _through_relu(gradient: Tensor, layer: Layer, activation: Tensor) -> Tensor:
    """From a derivative in what a layer gives to that in what the ReLU before it took in."""
    # From a single output it is an outer product, which is cheaper without a matrix product.
    back = layer.weight.mT
    gradient = gradient * back if gradient.shape[-1] == 1 else torch.bmm(gradient, back)
    # torch.where would cost a fifth of the whole update here; this is the kernel of autograd's own ReLU.
    result: Tensor = torch.ops.aten.threshold_backward(gradient, activation, 0)
    return result
