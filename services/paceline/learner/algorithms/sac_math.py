"""The equations of soft actor-critic, as pure functions.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905), cited by equation below.
N is the batch; the two critics are the first dimension of what they give.
"""

from __future__ import annotations

import torch
from torch import Tensor


def soft_target(
    reward: Tensor,
    terminated: Tensor,
    next_q: Tensor,
    next_log_prob: Tensor,
    temperature: Tensor,
    discount: float | Tensor,
) -> Tensor:
    """What the critics should say, [N]: r + discount m (min_i Q_i(s', a') - temperature log pi(a'|s')).

    Equations 2, 3 and 5, with the smaller of two target critics. The mask m is 0 only where the step *terminated* its
    episode: a truncated step has a future, and where a step did both, termination wins.

    Args:
        reward, terminated, next_log_prob: [N]; `terminated` is bool or 0 and 1.
        next_q: [2, N] target critics at the next observation and an action of the policy there.
        temperature: scalar, alpha.
        discount: gamma; or [N] gamma^n, where rows span n steps and `reward` sums them up.
    """
    next_value = next_q.amin(0) - temperature * next_log_prob
    goes_on = 1.0 - terminated.to(reward.dtype)
    if isinstance(discount, Tensor):
        return torch.addcmul(reward, goes_on.mul_(discount), next_value)
    return torch.addcmul(reward, goes_on, next_value, value=discount)


def critic_loss(q: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """sum_i mean_N w (Q_i - y)^2 / 2 of q [2, N], target [N] and weight [N] (None: 1): equation 5."""
    squared = (q - target).square()
    return 0.5 * (squared if weight is None else squared * weight).mean(-1).sum()


def critic_loss_gradient(q: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Derivative of `critic_loss` in q, [2, N]; target and weight are constants."""
    gradient = (q - target) / q.shape[-1]
    return gradient if weight is None else gradient.mul_(weight)


def td_priority(q: Tensor, target: Tensor) -> Tensor:
    """[N] |TD error| of q [2, N] and target [N], the mean over the critics: proportional prioritisation, Schaul et al.
    2016, section 3.3."""
    return (q - target).abs_().mean(0)


def actor_loss(log_prob: Tensor, q: Tensor, temperature: Tensor) -> Tensor:
    """mean_N [ temperature log pi(a|s) - min_i Q_i(s, a) ]: equation 9, of log_prob [N] and q [2, N]."""
    return (temperature * log_prob - q.amin(0)).mean()


def actor_loss_gradient(q: Tensor) -> Tensor:
    """Derivative of `actor_loss` in q, [2, N]: -1/N for the smaller critic of each row, 0 for the other."""
    first_is_smaller = (q[0] <= q[1]).to(q.dtype)
    return torch.stack((first_is_smaller, 1.0 - first_is_smaller)) * (-1.0 / q.shape[-1])


def temperature_loss(log_temperature: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """-exp(log alpha) (mean log pi(a|s) + target entropy): equation 18.

    It is also its own derivative in log alpha, since exp is.
    """
    return -log_temperature.exp() * (log_prob.mean() + target_entropy)


def polyak(target: Tensor, online: Tensor, tau: float) -> Tensor:
    """Move `target` in place to (1 - tau) target + tau online."""
    return target.lerp_(online, tau)
