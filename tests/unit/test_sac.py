import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from paceline.actors import Actor, build_actor, flatten_observation, squashed_gaussian_semantics
from paceline.config import SacConfig
from paceline.errors import CheckpointError, ConfigError, NonFiniteError
from paceline.learner.algorithms import TransitionBatch, build_algorithm
from paceline.learner.algorithms.sac import Sac, SacSettings
from paceline.rows import Block, Column, transition_spec

OBSERVATION_DIM, ACTION_DIM = 5, 2


def make_actor(*, seed: int = 0, **kwargs: Any) -> Actor:
    torch.manual_seed(seed)
    semantics = squashed_gaussian_semantics(
        OBSERVATION_DIM, hidden=(16, 12), action_low=[-1.0, -1.0], action_high=[1.0, 3.0], **kwargs
    )
    return build_actor(semantics)


def make_sac(actor: Actor | None = None, *, seed: int = 0, **settings: Any) -> Sac:
    chosen = SacSettings(**{"hidden": (16, 12), **settings})
    return Sac(actor or make_actor(), chosen, observation_dim=OBSERVATION_DIM, action_dim=ACTION_DIM, seed=seed)


def make_batch(seed: int = 0, dtype: torch.dtype = torch.float32, rows: int = 32) -> TransitionBatch:
    generator = torch.Generator().manual_seed(seed)
    observation, following = torch.randn(2, rows, OBSERVATION_DIM, generator=generator, dtype=dtype)
    return TransitionBatch(
        observation,
        torch.rand(rows, ACTION_DIM, generator=generator, dtype=dtype) * 2 - 1,
        torch.randn(rows, generator=generator, dtype=dtype),
        following,
        torch.rand(rows, generator=generator) < 0.2,
    )


def with_several_steps(batch: TransitionBatch) -> TransitionBatch:
    """The batch as if its rows spanned 1 to 3 steps, and with importance weights."""
    rows = len(batch.reward)
    counts = torch.arange(rows, dtype=torch.int32) % 3 + 1
    return dataclasses.replace(batch, step_count=counts, weight=torch.linspace(0.1, 1, rows, dtype=batch.reward.dtype))


class PlainSac:
    """Soft actor-critic as a textbook writes it: two critics one after another, autograd, torch.optim, no sharing."""

    def __init__(self, actor: Actor, critics: list[nn.Sequential], seed: int) -> None:
        self.actor, self.critics = actor, critics
        self.targets = copy.deepcopy(critics)
        self.log_temperature = torch.zeros((), dtype=torch.float64, requires_grad=True)
        self.critic_optimiser = torch.optim.Adam([p for critic in critics for p in critic.parameters()], lr=3e-3)
        self.actor_optimiser = torch.optim.Adam(actor.parameters(), lr=1e-3)
        self.temperature_optimiser = torch.optim.Adam([self.log_temperature], lr=2e-3)
        self.generator = torch.Generator().manual_seed(seed)

    def sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = self.actor.get_mean_and_std(observation)
        noise = torch.randn(mean.shape, generator=self.generator, dtype=mean.dtype)
        low, high = (
            torch.tensor(self.actor.semantics.kwargs[f"action_{end}"], dtype=mean.dtype) for end in ("low", "high")
        )
        squashed = TransformedDistribution(Normal(mean, std), [TanhTransform(cache_size=1)])
        unit = torch.tanh(mean + std * noise)
        density = Independent(squashed, 1).log_prob(unit) - ((high - low) / 2).log().sum()
        return (low + high) / 2 + (high - low) / 2 * unit, density

    @staticmethod
    def values(critics: list[nn.Sequential], observation: Tensor, action: Tensor) -> list[Tensor]:
        return [critic(torch.cat((observation, action), 1))[:, 0] for critic in critics]

    def update(self, batch: TransitionBatch) -> None:
        temperature = self.log_temperature.exp().detach()
        with torch.no_grad():
            action, density = self.sample(batch.next_observation)
            first, second = self.values(self.targets, batch.next_observation, action)
            future = torch.minimum(first, second) - temperature * density
            steps = torch.tensor(1) if batch.step_count is None else batch.step_count
            discount = 0.98 ** steps.to(batch.reward.dtype)
            target = torch.where(batch.terminated, batch.reward, batch.reward + discount * future)
        weight = 1.0 if batch.weight is None else batch.weight
        losses = [
            0.5 * (weight * (q - target).square()).mean()
            for q in self.values(self.critics, batch.observation, batch.action)
        ]
        self.critic_optimiser.zero_grad()
        (losses[0] + losses[1]).backward()
        self.critic_optimiser.step()

        action, density = self.sample(batch.observation)
        first, second = self.values(self.critics, batch.observation, action)
        self.actor_optimiser.zero_grad()
        (temperature * density - torch.minimum(first, second)).mean().backward()
        self.actor_optimiser.step()

        self.temperature_optimiser.zero_grad()
        (-self.log_temperature.exp() * (density.detach() - ACTION_DIM)).mean().backward()
        self.temperature_optimiser.step()
        with torch.no_grad():
            for critic, slow in zip(self.critics, self.targets, strict=True):
                for parameter, late in zip(critic.parameters(), slow.parameters(), strict=True):
                    late.copy_((1 - 0.1) * late + 0.1 * parameter)


def plain_critics(state: dict[str, Tensor], prefix: str) -> list[nn.Sequential]:
    critics = []
    for index in range(2):
        layers = [nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 1)]
        for number, layer in enumerate(layers[::2]):
            layer.weight.data = state[f"{prefix}/{number}.weight"][index].T.clone()
            layer.bias.data = state[f"{prefix}/{number}.bias"][index, 0].clone()
        critics.append(nn.Sequential(*layers))
    return critics


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("updates", [1, 5])
def test_the_flat_and_stacked_update_is_the_textbook_one(updates: int, n_step: int) -> None:
    actor = make_actor().double()
    oracle_actor = copy.deepcopy(actor)
    sac = make_sac(
        actor,
        gamma=0.98,
        n_step=n_step,
        tau=0.1,
        actor_learning_rate=1e-3,
        critic_learning_rate=3e-3,
        temperature_learning_rate=2e-3,
    )
    state = sac.state_dict()
    oracle = PlainSac(oracle_actor, plain_critics(state, "critic"), seed=0)
    oracle.generator.set_state(state["generator"])

    for index in range(updates):
        batch = make_batch(index, torch.float64)
        if n_step > 1:
            batch = with_several_steps(batch)
        sac.update(batch)
        oracle.update(batch)

    state = sac.state_dict()
    for name, parameter in oracle_actor.named_parameters():
        torch.testing.assert_close(state[f"actor/{name}"], parameter.data, rtol=1e-9, atol=1e-10)
    for prefix, critics in (("critic", oracle.critics), ("target_critic", oracle.targets)):
        for mine, theirs in zip(plain_critics(state, prefix), critics, strict=True):
            for left, right in zip(mine.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state["log_temperature"][0], oracle.log_temperature.data, rtol=1e-9, atol=1e-10)


def test_a_restored_algorithm_goes_on_bit_for_bit() -> None:
    stopped, fresh = make_sac(), make_sac(make_actor(seed=9), seed=9)
    for index in range(3):
        stopped.update(make_batch(index))
    fresh.load_state_dict(stopped.state_dict())
    for index in range(3, 6):
        left, right = stopped.update(make_batch(index)).figures, fresh.update(make_batch(index)).figures
        assert {name: value.item() for name, value in left.items()} == {
            name: value.item() for name, value in right.items()
        }
    theirs = fresh.state_dict()
    for name, tensor in stopped.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


def test_saved_state_is_a_copy_that_later_updates_do_not_reach() -> None:
    sac = make_sac()
    saved = sac.state_dict()
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    sac.update(make_batch())
    assert all(torch.equal(saved[name], kept[name]) for name in kept)


def test_the_default_entropy_target_counts_the_dimensions_of_the_action() -> None:
    assert make_sac()._target_entropy == -2.0
    wide = squashed_gaussian_semantics(4, hidden=(8,), action_low=[-1.0] * 6, action_high=[1.0] * 6)
    algorithm = build_algorithm({"name": "sac"}, build_actor(wide), seed=0)  # an action of shape (3, 2)
    assert isinstance(algorithm, Sac)
    assert algorithm._target_entropy == -6.0


def spoil_missing(saved: dict[str, Tensor]) -> str:
    del saved["critic/0.weight"]
    return "critic/0.weight"


def spoil_extra(saved: dict[str, Tensor]) -> str:
    saved["critic/9.weight"] = torch.zeros(1)
    return "critic/9.weight"


def spoil_shape(saved: dict[str, Tensor]) -> str:
    saved["critic/1.weight"] = saved["critic/1.weight"].mT.contiguous()
    return "critic/1.weight"


def spoil_dtype(saved: dict[str, Tensor]) -> str:
    saved["actor/trunk.0.bias"] = saved["actor/trunk.0.bias"].double()
    return "actor/trunk.0.bias"


@pytest.mark.parametrize("spoil", [spoil_missing, spoil_extra, spoil_shape, spoil_dtype])
def test_state_that_does_not_fit_exactly_is_refused_and_changes_nothing(spoil: Any) -> None:
    sac = make_sac()
    before = sac.state_dict()
    other = make_sac(make_actor(seed=5), seed=5).state_dict()
    name = spoil(other)
    with pytest.raises(CheckpointError, match=name):
        sac.load_state_dict(other)
    after = sac.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_gradient_that_is_not_finite_is_caught_and_named() -> None:
    sac = make_sac()
    sac.update(make_batch())
    sac.check_finite()
    batch = make_batch(1)
    batch.reward[3] = math.nan
    sac.update(batch)
    with pytest.raises(NonFiniteError, match="actor gradient"):
        sac.check_finite()


@pytest.mark.parametrize("name", ["_critic", "_target_critic"])
def test_a_weight_that_is_not_finite_is_caught_and_named(name: str) -> None:
    sac = make_sac()
    critic = getattr(sac, name)
    critic.layers[1].weight[0, 2, 3] = math.inf
    with pytest.raises(NonFiniteError, match=r"critic weight '1\.weight'"):
        sac.check_finite()


def test_a_custom_actor_is_optimised_through_its_own_graph() -> None:
    actor = make_actor()
    frozen = dict(actor.named_parameters())["trunk.0.weight"]
    frozen.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in actor.named_parameters()}
    make_sac(actor).update(make_batch())
    changed = {name for name, parameter in actor.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == before.keys() - {"trunk.0.weight"}


def test_statistics_move_with_the_training_batches_and_never_by_acting() -> None:
    sac = make_sac(make_actor(normalise_observation=True))
    batch = make_batch()
    sac.update(batch)
    mean = dict(sac.actor.named_buffers())["normaliser.mean"]
    torch.testing.assert_close(mean, batch.observation.double().mean(0))
    kept = mean.clone()
    sac.actor.explore(batch.observation + 9, deterministic=False)
    assert torch.equal(mean, kept)


def test_the_state_of_a_compiled_actor_loads_into_a_plain_one() -> None:
    # eager: only the wrapping matters here, which puts _orig_mod before every name.
    actor: Any = make_actor()
    actor.trunk = torch.compile(actor.trunk, backend="eager")
    assert any("_orig_mod" in name for name, _ in actor.named_parameters())
    saved = make_sac(actor).state_dict()
    assert not any("_orig_mod" in name for name in saved)
    plain = make_sac(make_actor(seed=3))
    plain.load_state_dict(saved)
    assert torch.equal(plain.state_dict()["actor/trunk.0.weight"], saved["actor/trunk.0.weight"])


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", (5,)), ("uint8", (2, 3)), ("float64", ()), ("bfloat16", (4,))]
)
def test_a_batch_reads_packed_rows_of_any_observation(dtype: str, shape: tuple[int, ...]) -> None:
    spec = transition_spec(Column("observation", dtype, shape), Column("action", "float32", (2, 3)))
    block = Block.empty(spec, 4)
    # bfloat16 has the upper half of float32's bits: 0x3F80 is 1.
    block.columns["observation"] = 0x3F80 if dtype == "bfloat16" else 1
    block.columns["action"] = np.arange(6, dtype=np.float32).reshape(2, 3)
    block.columns["reward"] = [1, 2, 3, 4]
    block.columns["terminated"] = [False, True, False, True]
    block.columns["truncated"] = True
    block.columns["step_count"] = [1, 2, 3, 1]

    batch = TransitionBatch.from_rows(spec, torch.from_numpy(block.data))

    assert torch.equal(batch.observation, torch.ones(4, max(1, math.prod(shape))))
    assert batch.observation.dtype == torch.float32
    assert batch.next_observation.shape == batch.observation.shape
    assert torch.equal(batch.action, torch.arange(6.0).repeat(4, 1))
    assert batch.reward.tolist() == [1, 2, 3, 4]
    assert batch.terminated.tolist() == [False, True, False, True]
    assert batch.step_count is not None
    assert batch.step_count.tolist() == [1, 2, 3, 1]


def test_a_float32_observation_is_read_without_a_copy() -> None:
    rows = torch.zeros(3, 4)
    assert flatten_observation(rows).data_ptr() == rows.data_ptr()


def test_priorities_are_the_mean_error_of_both_critics_before_the_update() -> None:
    sac = make_sac(make_actor().double())
    batch = dataclasses.replace(make_batch(0, torch.float64), weight=torch.full((32,), 0.5, dtype=torch.float64))
    batch.terminated[:] = True  # the target is the reward
    critics = plain_critics(sac.state_dict(), "critic")
    first, second = PlainSac.values(critics, batch.observation, batch.action)
    expected = ((first - batch.reward).abs() + (second - batch.reward).abs()) / 2
    priorities = sac.update(batch).priorities
    assert priorities is not None
    torch.testing.assert_close(priorities, expected.detach())


def test_an_update_without_weights_gives_no_priorities() -> None:
    assert make_sac().update(make_batch()).priorities is None


def test_weights_of_one_change_nothing() -> None:
    plain, weighted = make_sac(), make_sac()
    plain.update(make_batch())
    weighted.update(dataclasses.replace(make_batch(), weight=torch.ones(32)))
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(weighted.state_dict()[name], tensor)


def test_rows_of_one_step_are_discounted_as_rows_that_do_not_count_theirs() -> None:
    plain, counted = make_sac(), make_sac()
    plain.update(make_batch())
    counted.update(dataclasses.replace(make_batch(), step_count=torch.full((32,), 1, dtype=torch.int32)))
    torch.testing.assert_close(plain.state_dict()["critic/0.weight"], counted.state_dict()["critic/0.weight"])


def test_rows_of_several_steps_are_discounted_by_their_own_count_whatever_the_settings_say_now() -> None:
    batch = with_several_steps(make_batch())
    before, resumed = make_sac(n_step=3), make_sac(n_step=1)
    for sac in (before, resumed):
        sac.update(batch)
    for name, tensor in before.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_the_algorithm_is_built_from_the_settings_of_a_run() -> None:
    algorithm = build_algorithm(SacConfig(hidden=(16, 12)).model_dump(), make_actor(), seed=0)
    assert isinstance(algorithm, Sac)
    assert algorithm._settings == SacSettings(hidden=(16, 12))
    with pytest.raises(ConfigError, match="'ppo': expected sac"):
        build_algorithm({"name": "ppo"}, make_actor(), seed=0)
    with pytest.raises(ConfigError, match="learning_rate"):
        build_algorithm({"name": "sac", "learning_rate": 1}, make_actor(), seed=0)
