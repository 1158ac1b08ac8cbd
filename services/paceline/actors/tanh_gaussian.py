"""The squashed Gaussian: u ~ N(mean, std^2), action = centre + half_range * tanh(u).

Haarnoja et al. 2018 (SAC), appendix C. Pure functions; the last dimension is the action's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

_LOG_2 = math.log(2.0)
_HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)


def squash(pre_tanh: Tensor, centre: Tensor, half_range: Tensor) -> Tensor:
    """The action in environment units, within [centre - half_range, centre + half_range]."""
    return torch.addcmul(centre, half_range, torch.tanh(pre_tanh))


def log_tanh_slope(pre_tanh: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), elementwise and finite for every finite u.

    2 (log 2 - u - softplus(-2u)) with softplus(-x) = -logsigmoid(x). The usual log(1 - a^2 + 1e-6) is wrong beyond
    |u| of about 7, where a rounds to 1.
    """
    return 2.0 * (_LOG_2 - pre_tanh + logsigmoid(2.0 * pre_tanh))


def log_prob_of_noise(noise: Tensor, pre_tanh: Tensor, log_std: Tensor, half_range: Tensor) -> Tensor:
    """Log-density of the action squash(pre_tanh), where pre_tanh = mean + exp(log_std) * noise.

    log pi(a|s) = sum_j [ -noise^2 / 2 - log_std - log(2 pi) / 2 - log(1 - tanh(u)^2) - log(half_range) ].
    Taking the noise rather than (u - mean) / std keeps its digits where std is tiny.
    """
    gaussian = -0.5 * noise.square() - log_std - _HALF_LOG_2_PI
    return (gaussian - log_tanh_slope(pre_tanh) - half_range.log()).sum(-1)


def log_prob(pre_tanh: Tensor, mean: Tensor, log_std: Tensor, half_range: Tensor) -> Tensor:
    """Log-density of the action squash(pre_tanh), from the pre-squash value itself."""
    return log_prob_of_noise((pre_tanh - mean) * torch.exp(-log_std), pre_tanh, log_std, half_range)
