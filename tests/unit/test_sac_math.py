import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.learner.algorithms.sac_math import (
    actor_loss,
    actor_loss_gradient,
    critic_loss,
    critic_loss_gradient,
    polyak,
    soft_target,
    temperature_loss,
)

DATA = json.loads((Path(__file__).parents[1] / "data" / "sac-cases.json").read_text())
CASES = DATA["soft"]


def f64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES["targets"], ids=lambda case: case["name"])
def test_soft_targets_are_those_of_the_reference(case: dict[str, Any]) -> None:
    target = soft_target(
        f64(case["rewards"]),
        f64(case["terminated"]),
        f64(case["next_q"]),
        f64(case["next_log_prob"]),
        f64(case["alpha"]),
        case["gamma"],
    )
    torch.testing.assert_close(target, f64(case["expected_target"]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", DATA["n_step"], ids=lambda case: case["name"])
def test_targets_of_several_steps_are_those_of_the_reference(case: dict[str, Any]) -> None:
    expected = case["expected"]
    following = f64(case["next_values"])[torch.tensor(expected["bootstrap_index"])]
    # A window that ended by termination is the one that the reference does not bootstrap.
    terminated = f64(expected["bootstrap_discount"]) == 0
    target = soft_target(
        f64(expected["n_step_reward"]),
        terminated,
        torch.stack((following, following + 1)),
        torch.zeros(len(following), dtype=torch.float64),
        f64(0.0),
        torch.pow(f64(case["gamma"]), torch.tensor(expected["steps"])),
    )
    torch.testing.assert_close(target, f64(expected["target"]), rtol=1e-9, atol=1e-9)


def test_a_truncated_step_has_a_future_and_a_terminated_one_has_none() -> None:
    # Running, truncated only, terminated only, both: truncation is not even asked for.
    terminated = torch.tensor([False, False, True, True])
    next_q = torch.stack((torch.full((4,), 10.0), torch.full((4,), 11.0)))
    target = soft_target(torch.ones(4), terminated, next_q, torch.full((4,), -1.5), torch.tensor(0.2), 0.99)
    torch.testing.assert_close(target, torch.tensor([11.197, 11.197, 1.0, 1.0]), rtol=0, atol=1e-4)


def test_polyak_averaging_is_that_of_the_reference() -> None:
    case = CASES["polyak"]
    target, online = f64(case["target"]), f64(case["online"])
    polyak(target, online, case["tau"])
    torch.testing.assert_close(target, f64(case["after_1"]), rtol=1e-9, atol=1e-9)
    for _ in range(99):
        polyak(target, online, case["tau"])
    torch.testing.assert_close(target, f64(case["after_100"]), rtol=1e-9, atol=1e-9)


def test_the_written_out_gradients_are_those_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 30, generator=generator, dtype=torch.float64).requires_grad_()
    log_prob, target = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    log_temperature = f64([-1.3]).requires_grad_()

    (by_critic,) = torch.autograd.grad(critic_loss(q, target), q)
    torch.testing.assert_close(by_critic, critic_loss_gradient(q.detach(), target))
    weight = torch.rand(30, generator=generator, dtype=torch.float64)
    (by_critic,) = torch.autograd.grad(critic_loss(q, target, weight), q)
    torch.testing.assert_close(by_critic, critic_loss_gradient(q.detach(), target, weight))
    (by_actor,) = torch.autograd.grad(actor_loss(log_prob, q, f64(0.2)), q)
    torch.testing.assert_close(by_actor, actor_loss_gradient(q.detach()))
    loss = temperature_loss(log_temperature, log_prob, -3.0)
    (by_temperature,) = torch.autograd.grad(loss, log_temperature)
    torch.testing.assert_close(by_temperature, loss.detach())


def test_the_temperature_rises_while_entropy_is_below_its_target() -> None:
    # log pi = 5, so entropy is -5, below -2: the step is against the gradient, which must be negative.
    assert temperature_loss(torch.zeros(1), torch.full((8,), 5.0), -2.0).item() < 0
    assert temperature_loss(torch.zeros(1), torch.full((8,), -5.0), -2.0).item() > 0
