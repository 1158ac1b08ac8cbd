import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from paceline.actors.tanh_gaussian import log_prob, log_prob_of_noise, log_tanh_slope, squash

CASES = json.loads((Path(__file__).parents[1] / "data" / "sac-cases.json").read_text())


def tensors(case: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    values = {name: torch.tensor(case[name], dtype=torch.float64) for name in ("mean", "log_std", "pre_tanh")}
    low, high = (torch.tensor(case[name], dtype=torch.float64) for name in ("low", "high"))
    values |= {"centre": (low + high) / 2, "half_range": (high - low) / 2}
    return {name: value.to(dtype) for name, value in values.items()}


@pytest.mark.parametrize("case", CASES["tanh_gaussian"], ids=lambda case: case["name"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_action_and_density_are_those_of_the_reference(case: dict[str, Any], dtype: torch.dtype) -> None:
    if dtype is torch.float32 and not case["float32"]:
        return  # float32 cannot hold the inputs
    tolerance = CASES["tolerance"][str(dtype).removeprefix("torch.")]
    x = tensors(case, dtype)

    def same(value: torch.Tensor, expected: Any) -> None:
        torch.testing.assert_close(value, torch.tensor(expected, dtype=dtype), rtol=tolerance, atol=tolerance)

    same(squash(x["pre_tanh"], x["centre"], x["half_range"]), case["action"])
    same(squash(x["mean"], x["centre"], x["half_range"]), case["deterministic_action"])
    same((log_tanh_slope(x["pre_tanh"]) + x["half_range"].log()).sum(), case["log_det_jacobian"])
    same(log_prob(x["pre_tanh"], x["mean"], x["log_std"], x["half_range"]), case["log_prob"])


def test_density_from_the_noise_is_the_density_from_the_value() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise = torch.randn(3, 50, 4, generator=generator, dtype=torch.float64)
    half_range = torch.tensor([1.0, 2.0, 0.5, 7.0], dtype=torch.float64)
    pre_tanh = mean + log_std.exp() * noise
    torch.testing.assert_close(
        log_prob_of_noise(noise, pre_tanh, log_std, half_range), log_prob(pre_tanh, mean, log_std, half_range)
    )


def test_density_and_its_gradient_are_those_of_torch_distributions() -> None:
    generator = torch.Generator().manual_seed(1)
    mean, log_std = torch.randn(2, 40, 3, generator=generator, dtype=torch.float64).requires_grad_().unbind()
    pre_tanh = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    centre, half_range = torch.tensor([[1.0, 0.0, -2.0], [2.0, 1.0, 0.3]], dtype=torch.float64)
    transforms = [TanhTransform(cache_size=1), AffineTransform(centre, half_range, cache_size=1, event_dim=0)]
    oracle = Independent(TransformedDistribution(Normal(mean, log_std.exp()), transforms), 1)

    action = squash(pre_tanh, centre, half_range)
    mine = log_prob(pre_tanh, mean, log_std, half_range)
    theirs = oracle.log_prob(action)

    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    for left, right in zip(
        torch.autograd.grad(mine.sum(), (mean, log_std), retain_graph=True),
        torch.autograd.grad(theirs.sum(), (mean, log_std)),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-9)


def test_density_belongs_to_the_action_in_environment_units() -> None:
    zero, half = torch.zeros(1, dtype=torch.float64), torch.full((1,), 0.5, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    assert log_prob(half, zero, zero, one).item() == pytest.approx(-0.80371, abs=1e-5)
    # The range [-1, 3]: centre 1, half range 2.
    assert squash(half, one, 2 * one).item() == pytest.approx(1.92423, abs=1e-5)
    assert log_prob(half, zero, zero, 2 * one).item() == pytest.approx(-1.49686, abs=1e-5)
    assert math.isfinite(log_prob(3 * one, zero, zero, 2 * one).item())


def test_density_integrates_to_one_over_an_asymmetric_range() -> None:
    action = torch.linspace(-1, 3, 400_003, dtype=torch.float64)[1:-1, None]
    centre, half_range = torch.ones(1, dtype=torch.float64), torch.full((1,), 2.0, dtype=torch.float64)
    density = log_prob(
        torch.atanh((action - centre) / half_range),
        torch.full((1,), 0.3, dtype=torch.float64),
        torch.full((1,), -0.4, dtype=torch.float64),
        half_range,
    ).exp()
    assert torch.trapezoid(density, action[:, 0]).item() == pytest.approx(1.0, abs=1e-3)


def test_density_and_gradient_stay_finite_where_float32_tanh_rounds_to_one() -> None:
    pre_tanh = torch.tensor([[-60.0], [-20.0], [20.0], [60.0]], requires_grad=True)
    density = log_prob(pre_tanh, torch.zeros(1), torch.zeros(1), torch.ones(1))
    density.sum().backward()
    assert density.isfinite().all()
    assert pre_tanh.grad is not None
    assert pre_tanh.grad.isfinite().all()
