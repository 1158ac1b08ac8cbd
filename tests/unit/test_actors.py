import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.actors import Actor, ActorInfo, ActorSemantics, build_actor, squashed_gaussian_semantics
from paceline.actors.checks import check_actor, require_made_for
from paceline.actors.normaliser import RunningNormaliser
from paceline.actors.squashed_gaussian import SquashedGaussianActor
from paceline.errors import ActorSemanticsError

SEMANTICS = squashed_gaussian_semantics(3, hidden=(8, 6), action_low=[-1.0, 0.0], action_high=[3.0, 10.0])

CHANGES: dict[str, Any] = {
    "kind": "another",
    "builder": "elsewhere:Actor",
    "kwargs": {**SEMANTICS.kwargs, "hidden": [8, 7]},
    "observation_dim": 4,
    "action_dim": 3,
    "action_transform": "clip",
}


def test_a_record_survives_its_json_and_is_canonical() -> None:
    text = SEMANTICS.to_json()
    assert ActorSemantics.from_json(text) == SEMANTICS
    shuffled = json.dumps(dict(reversed(json.loads(text).items())), indent=2)
    assert ActorSemantics.from_json(shuffled).to_json() == text


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_in_any_field_is_refused_by_its_name(name: str) -> None:
    other = dataclasses.replace(SEMANTICS, **{name: CHANGES[name]})
    with pytest.raises(ActorSemanticsError, match=f"differ in {name}:"):
        SEMANTICS.require_same(other)
    SEMANTICS.require_same(dataclasses.replace(SEMANTICS))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda record: "", "are missing"),
        (lambda record: "null", "are missing"),
        (lambda record: "[1]", "expected a record"),
        (lambda record: "{", "not JSON"),
        (lambda record: json.dumps({**record, "schema_version": 2}), "schema_version 2"),
        (lambda record: json.dumps({**record, "schema_version": None}), "schema_version None"),
        (lambda record: json.dumps({**record, "schema_version": True}), "schema_version True"),
        (lambda record: json.dumps({k: v for k, v in record.items() if k != "schema_version"}), "lack schema_version"),
        (lambda record: json.dumps({**record, "colour": 1}), "unknown field 'colour'"),
        (lambda record: json.dumps({**record, "action_dim": 0}), "action_dim 0"),
        (lambda record: json.dumps({**record, "kwargs": [1]}), "kwargs"),
    ],
)
def test_a_record_that_is_missing_or_malformed_is_refused(spoil: Callable[[Any], str], words: str) -> None:
    with pytest.raises(ActorSemanticsError, match=words):
        ActorSemantics.from_json(spoil(json.loads(SEMANTICS.to_json())))


def test_kwargs_that_are_not_json_are_refused() -> None:
    with pytest.raises(ActorSemanticsError, match="not JSON"):
        dataclasses.replace(SEMANTICS, kwargs={"hidden": {1, 2}})
    with pytest.raises(ActorSemanticsError, match="not JSON"):
        dataclasses.replace(SEMANTICS, kwargs={"low": float("nan")})


def test_an_unknown_builder_is_refused_and_nothing_is_imported_for_it() -> None:
    with pytest.raises(ActorSemanticsError, match="'antigravity:fly': expected squashed_gaussian"):
        build_actor(dataclasses.replace(SEMANTICS, builder="antigravity:fly"))


def test_unknown_kwargs_are_refused() -> None:
    with pytest.raises(ActorSemanticsError, match="refuses kwargs"):
        build_actor(dataclasses.replace(SEMANTICS, kwargs={**SEMANTICS.kwargs, "depth": 3}))


@pytest.mark.parametrize("bounds", [([-1.0], [1.0, 2.0]), ([1.0], [1.0]), ([float("-inf")], [1.0]), ([], [])])
def test_an_action_range_that_cannot_be_squashed_into_is_refused(bounds: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ActorSemanticsError, match="action"):
        squashed_gaussian_semantics(3, hidden=(4,), action_low=bounds[0], action_high=bounds[1])


def test_actions_fill_their_asymmetric_range_and_never_leave_it() -> None:
    torch.manual_seed(0)
    actor = build_actor(SEMANTICS)
    actions, log_prob = actor.explore(torch.randn(20_000, 3) * 200, deterministic=False)
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 10.0])
    assert (actions >= low).all()
    assert (actions <= high).all()
    assert (actions.amax(0) > high - 0.1).all()
    assert (actions.amin(0) < low + 0.1).all()
    assert log_prob.isfinite().all()


def test_training_acting_and_export_agree() -> None:
    actor = build_actor(SEMANTICS)
    observation = torch.randn(7, 3)
    drawn, log_prob = actor.explore(observation, False, torch.Generator().manual_seed(3))
    trained, info = actor(observation, True, torch.Generator().manual_seed(3))
    assert torch.equal(drawn, trained.detach())
    assert torch.equal(log_prob, info.log_prob.detach())
    fixed, _ = actor.explore(observation, True)
    assert torch.equal(fixed, actor.as_export_module()(observation))


def test_an_actor_works_in_float64() -> None:
    actor = build_actor(SEMANTICS).double()
    action, info = actor(torch.randn(5, 3, dtype=torch.float64), True)
    assert action.dtype == info.log_prob.dtype == torch.float64


def test_building_leaves_the_random_generator_where_the_weights_left_it() -> None:
    torch.manual_seed(4)
    SquashedGaussianActor(3, 2, **SEMANTICS.kwargs)
    expected = torch.rand(3)
    torch.manual_seed(4)
    actor = build_actor(SEMANTICS)
    assert torch.equal(torch.rand(3), expected)
    assert all(parameter.grad is None for parameter in actor.parameters())


def test_the_check_leaves_no_trace_in_weights_and_statistics() -> None:
    semantics = dataclasses.replace(SEMANTICS, kwargs={**SEMANTICS.kwargs, "normalise_observation": True})
    torch.manual_seed(4)
    unchecked = dict(SquashedGaussianActor(3, 2, **semantics.kwargs).named_tensors())
    torch.manual_seed(4)
    checked = dict(build_actor(semantics).named_tensors())
    assert checked["normaliser.count"].item() == 0
    assert all(torch.equal(tensor, unchecked[name]) for name, tensor in checked.items())


class Custom(SquashedGaussianActor):
    """An actor of a user's, which each test breaks in one way."""

    def __init__(self) -> None:
        super().__init__(3, 2, **SEMANTICS.kwargs)


class KeepsAnArray(Custom):
    def __init__(self) -> None:
        super().__init__()
        self.offset = [np.zeros(3)]


class KeepsStatisticsInPython(Custom):
    seen = 0.0

    def update_statistics(self, observation: Tensor) -> None:
        self.seen = observation.mean().item()

    def _distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return super()._distribution(observation - self.seen)


class IsRandomlyBuilt(Custom):
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.rand(1).item()

    def _distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return super()._distribution(observation * self.gain)


class CountsInPython(Custom):
    """Each of those below lets the number of its batches show in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def update_statistics(self, observation: Tensor) -> None:
        self.batches += 1


class AnnealsItsNoise(CountsInPython):
    def _distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = super()._distribution(observation)
        return mean, log_std - self.batches / 1000


class AnnealsWhatItExplores(CountsInPython):
    @torch.no_grad()
    def explore(
        self, observation: Tensor, deterministic: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        action, log_prob = super().explore(observation, deterministic, generator)
        return action * (1 if deterministic else 0.99**self.batches), log_prob


class AnnealsItsDensity(CountsInPython):
    @torch.no_grad()
    def explore(
        self, observation: Tensor, deterministic: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        action, log_prob = super().explore(observation, deterministic, generator)
        return action, log_prob if deterministic else log_prob - self.batches / 1000


class WarmsUp(CountsInPython):
    """As statistics often do: they are used after some batches only."""

    def _distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = super()._distribution(observation)
        return mean if self.batches < 80 else mean * 0.1, log_std


class CountsForwards(Custom):
    forwards = 0

    def forward(
        self, observation: Tensor, training: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, ActorInfo]:
        self.forwards += training
        return super().forward(observation, training, generator)

    def _distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return super()._distribution(observation + (self.forwards > 50))


class KeepsATensorOnTheClass(Custom):
    seen = torch.zeros(3)

    def update_statistics(self, observation: Tensor) -> None:
        type(self).seen += observation.mean(0)

    def _distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return super()._distribution(observation - self.seen)


class InheritsATensorOfTheClass(KeepsATensorOnTheClass):
    pass


class KeepsANumberOnTheClass(Custom):
    seen = 0.0

    def update_statistics(self, observation: Tensor) -> None:
        type(self).seen = observation.mean().item()

    def _distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return super()._distribution(observation - self.seen)


OF_THE_MODULE = {"seen": torch.zeros(3)}


class KeepsItInTheModule(Custom):
    def update_statistics(self, observation: Tensor) -> None:
        OF_THE_MODULE["seen"] = observation.mean(0)

    def _distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return super()._distribution(observation - OF_THE_MODULE["seen"])


class ExportsASample(Custom):
    def as_export_module(self) -> nn.Module:
        outer = self

        class Sample(nn.Module):
            def forward(self, observation: Tensor) -> Tensor:
                return outer.explore(observation, deterministic=False)[0]

        return Sample()


class HasNoGradient(Custom):
    def forward(
        self, observation: Tensor, training: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, ActorInfo]:
        action, info = super().forward(observation, training, generator)
        return action.detach(), info


class SumsNothing(Custom):
    def forward(
        self, observation: Tensor, training: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, ActorInfo]:
        action, info = super().forward(observation, training, generator)
        return action, ActorInfo(info.log_prob[:, None])


class NamesAnotherTransform(Custom):
    action_transform_id = "clip"


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (KeepsAnArray, "'offset', which is neither a parameter nor a buffer"),
        (KeepsStatisticsInPython, "state lies elsewhere"),
        (IsRandomlyBuilt, "state lies elsewhere"),
        (AnnealsItsNoise, "state lies elsewhere.* standard deviations"),
        (AnnealsWhatItExplores, "state lies elsewhere.* explored actions"),
        (AnnealsItsDensity, "state lies elsewhere.* log-densities of explored actions"),
        (WarmsUp, "state lies elsewhere.* means"),
        (CountsForwards, "state lies elsewhere.* means"),
        (KeepsATensorOnTheClass, "'seen' of its class KeepsATensorOnTheClass, which is neither"),
        (InheritsATensorOfTheClass, "'seen' of its class KeepsATensorOnTheClass, which is neither"),
        (KeepsANumberOnTheClass, "state lies in their class or module"),
        (KeepsItInTheModule, "state lies in their class or module"),
        (ExportsASample, "as_export_module and explore"),
        (HasNoGradient, "no gradient"),
        (SumsNothing, "log_prob has shape"),
        (NamesAnotherTransform, "action_transform_id is 'clip'"),
    ],
)
def test_an_actor_that_breaks_the_contract_is_refused(broken: type[Custom], words: str) -> None:
    actor: Actor = broken()
    before = {name: tensor.clone() for name, tensor in actor.named_tensors()}
    generator = torch.get_rng_state()
    with pytest.raises(ActorSemanticsError, match=words):
        check_actor(actor, SEMANTICS, broken)
    assert all(torch.equal(tensor, before[name]) for name, tensor in actor.named_tensors())
    assert torch.equal(torch.get_rng_state(), generator)


class AnnealsByABuffer(Custom):
    """As those above, but for where it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: Tensor
        self.register_buffer("batches", torch.zeros(()))

    def update_statistics(self, observation: Tensor) -> None:
        self.batches += 1

    def _distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = super()._distribution(observation)
        return torch.where(self.batches < 80, mean, mean * 0.1), log_std - self.batches / 1000


class CountsForItsLog(Custom):
    """State elsewhere that no action depends upon is its own affair."""

    calls = 0

    def update_statistics(self, observation: Tensor) -> None:
        type(self).calls += 1
        self.newest = observation.mean().item()


@pytest.mark.parametrize("kept", [AnnealsByABuffer, CountsForItsLog])
def test_an_actor_whose_whole_state_travels_is_taken(kept: type[Custom]) -> None:
    check_actor(kept(), SEMANTICS, kept)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"observation_dim": 4}, r"observation_dim 3: environment 'Mine-v0' here has 4"),
        ({"action_low": (-1.0,), "action_high": (3.0,)}, "action_dim 2: environment 'Mine-v0' here has 1"),
        ({"action_low": (-1.0, -1.0)}, r"action_low \[-1.0, 0.0\]: environment 'Mine-v0' here has \[-1.0, -1.0\]"),
        ({"action_high": (3.0, 9.0)}, r"action_high \[3.0, 10.0\]: .* \[3.0, 9.0\]; start learner"),
    ],
)
def test_an_environment_that_the_actor_is_not_made_for_is_refused_by_the_name_of_the_field(
    changes: dict[str, Any], words: str
) -> None:
    own: dict[str, Any] = {"observation_dim": 3, "action_low": (-1.0, 0.0), "action_high": (3.0, 10.0)}
    require_made_for(SEMANTICS, "Mine-v0", **own)
    with pytest.raises(ActorSemanticsError, match=words):
        require_made_for(SEMANTICS, "Mine-v0", **{**own, **changes})


def test_the_range_of_an_actor_of_ones_own_is_its_own_affair() -> None:
    semantics = dataclasses.replace(SEMANTICS, kind="own", kwargs={"action_low": "whatever"})
    require_made_for(semantics, "Mine-v0", observation_dim=3, action_low=(-9.0, 0.0), action_high=(9.0, 1.0))
    with pytest.raises(ActorSemanticsError, match="action_dim 2"):
        require_made_for(semantics, "Mine-v0", observation_dim=3, action_low=(-9.0,), action_high=(9.0,))


def test_running_statistics_are_those_of_all_rows_together() -> None:
    generator = torch.Generator().manual_seed(0)
    # The mean drifts, where a cross term taken after the update would under-estimate the variance.
    batches = [torch.randn(17, 2, generator=generator) * (step + 1) + 10 * step for step in range(5)]
    normaliser = RunningNormaliser(2)
    for batch in batches:
        normaliser.update(batch)
    everything = torch.cat(batches).double()
    torch.testing.assert_close(normaliser.mean, everything.mean(0))
    torch.testing.assert_close(normaliser.variance, everything.var(0, unbiased=False))
    assert normaliser.count.item() == 85


def test_the_cross_term_takes_the_mean_of_before_the_update() -> None:
    normaliser = RunningNormaliser(1)
    normaliser.update(torch.tensor([[-1.0], [1.0], [-1.0], [1.0]]))  # mean 0, variance 1
    normaliser.update(torch.tensor([[1.0], [3.0], [1.0], [3.0]]))  # mean 2, variance 1
    assert normaliser.variance.item() == pytest.approx(2.0)  # 1.25 with the mean of after it
