"""Actors of a user's own: the example is one, and what is wrong with others is said."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.actors import Actor, ActorInfo, ActorSemantics, build_actor, own_semantics
from paceline.actors.squashed_gaussian import SquashedGaussianActor
from paceline.config import build
from paceline.errors import ActorSemanticsError, ConfigError
from paceline.learner.algorithms import TransitionBatch
from paceline.learner.algorithms.sac import Sac, SacSettings

EXAMPLE = Path(__file__).parents[2] / "deploy/example"
BUILDER = "my_actor:MyActor"
KWARGS = {"action_limit": 0.25, "size_cost": 0.5}


@pytest.fixture(autouse=True)
def example_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    sys.modules.pop("my_actor", None)


def semantics(**kwargs: Any) -> ActorSemantics:
    return own_semantics(BUILDER, {**KWARGS, **kwargs}, observation_dim=3, action_dim=2, device="cpu")


def own_actor(**kwargs: Any) -> Actor:
    torch.manual_seed(0)
    return build_actor(semantics(**kwargs), own_builder=BUILDER)


def test_the_record_says_what_the_weights_mean() -> None:
    record = semantics()
    assert (record.kind, record.builder, record.kwargs) == ("own", BUILDER, KWARGS)
    assert (record.observation_dim, record.action_dim, record.action_transform) == (3, 2, "tanh_limit")
    assert ActorSemantics.from_json(record.to_json()) == record
    with pytest.raises(ActorSemanticsError, match="differ in kwargs"):
        record.require_same(semantics(width=16))


def test_making_the_record_draws_no_random_number() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    semantics()
    assert torch.equal(torch.rand(2), expected)


def test_a_peer_cannot_name_code_to_import() -> None:
    record = dataclasses.replace(semantics(), builder="antigravity:fly")
    for mine in (None, BUILDER):
        with pytest.raises(ActorSemanticsError, match="built by 'antigravity:fly', and this process's settings name"):
            build_actor(record, own_builder=mine)
    assert "antigravity" not in sys.modules


def test_another_process_builds_the_same_from_the_record_and_the_weights(tmp_path: Path) -> None:
    actor = own_actor()
    observation = torch.randn(5, 3)
    torch.save({"observation": observation, "tensors": dict(actor.named_tensors())}, tmp_path / "weights")
    code = (
        "import sys, torch; from paceline.actors import ActorSemantics, build_actor; "
        "saved = torch.load(sys.argv[2]); "
        f"actor = build_actor(ActorSemantics.from_json(sys.argv[1]), own_builder={BUILDER!r}); "
        "[tensor.data.copy_(saved['tensors'][name]) for name, tensor in actor.named_tensors()]; "
        "torch.save(actor.explore(saved['observation'], True), sys.argv[3])"
    )
    files = [str(tmp_path / name) for name in ("weights", "actions")]
    subprocess.run(
        [sys.executable, "-c", code, semantics().to_json(), *files], env={"PYTHONPATH": str(EXAMPLE)}, check=True
    )
    for theirs, mine in zip(torch.load(files[1]), actor.explore(observation, True), strict=True):
        assert torch.equal(theirs, mine)


def test_its_log_density_is_that_of_the_action_in_its_range() -> None:
    """The mean of an indicator over the density is the volume where it is 1, whatever the density."""
    actor = own_actor()
    torch.manual_seed(1)
    actions, log_prob = actor.explore(torch.zeros(1, 3).expand(400_000, 3), False)
    assert actions.abs().max() <= 0.25
    inner = (actions.abs() < 0.125).all(1)
    volume = torch.where(inner, torch.exp(-log_prob), torch.zeros(())).mean()
    assert volume.item() == pytest.approx(0.25**2, rel=0.02)


def batch() -> TransitionBatch:
    torch.manual_seed(2)
    observation, following = torch.randn(2, 32, 3)
    action = torch.rand(32, 2) * 0.5 - 0.25
    return TransitionBatch(observation, action, torch.randn(32), following, torch.zeros(32, dtype=torch.bool))


def sac_of(actor: Actor) -> Sac:
    return Sac(actor, SacSettings(hidden=(8,)), observation_dim=3, action_dim=2, seed=0)


def test_its_own_losses_reach_its_gradient_and_the_figures() -> None:
    with_cost, without = own_actor(), own_actor(size_cost=0.0)
    update, plain = sac_of(with_cost).update(batch()), sac_of(without).update(batch())
    assert update.figures["aux_action_size"] > 0
    assert not update.figures["aux_action_size"].requires_grad
    assert not [name for name in plain.figures if name.startswith("aux_")]
    mine, theirs = (dict(actor.named_parameters())["mean.weight"].grad for actor in (with_cost, without))
    assert mine is not None
    assert theirs is not None
    copy = own_actor()
    loss = copy(batch().observation, True)[1].aux_losses["action_size"]
    (expected,) = torch.autograd.grad(loss, dict(copy.named_parameters())["mean.weight"])
    torch.testing.assert_close(mine - theirs, expected, rtol=1e-4, atol=1e-6)


def test_losses_that_change_their_names_end_the_training() -> None:
    actor = own_actor()
    sac = sac_of(actor)
    sac.update(batch())
    actor.size_cost = 0.0
    with pytest.raises(ActorSemanticsError, match=r"aux_losses are \[\] now, and were \['action_size'\]"):
        sac.update(batch())


class Plain(SquashedGaussianActor):
    """An actor that keeps the contract; each of the others breaks it in one way."""

    def __init__(self, observation_dim: int, action_dim: int, *, device: str) -> None:
        super().__init__(observation_dim, action_dim, hidden=(4,), action_low=[-1.0] * 2, action_high=[1.0] * 2)


class HasNoName(Plain):
    action_transform_id = ""


class Forward(Plain):
    def forward(
        self, observation: Tensor, training: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, ActorInfo]:
        action, info = super().forward(observation, training, generator)
        return self.spoil(action, info, training)

    def spoil(self, action: Tensor, info: ActorInfo, training: bool) -> tuple[Tensor, ActorInfo]:
        raise IndexError("no such joint")


class LosesWithoutTraining(Forward):
    def spoil(self, action: Tensor, info: ActorInfo, training: bool) -> tuple[Tensor, ActorInfo]:
        return action, ActorInfo(info.log_prob, {"size": action.square().mean()})


class LosesMany(Forward):
    def spoil(self, action: Tensor, info: ActorInfo, training: bool) -> tuple[Tensor, ActorInfo]:
        return action, ActorInfo(info.log_prob, {"size": action.square()} if training else {})


class LosesNoGradient(Forward):
    def spoil(self, action: Tensor, info: ActorInfo, training: bool) -> tuple[Tensor, ActorInfo]:
        return action, ActorInfo(info.log_prob, {"size": action.detach().mean()} if training else {})


class DrawsForItself(Forward):
    def spoil(self, action: Tensor, info: ActorInfo, training: bool) -> tuple[Tensor, ActorInfo]:
        return action + torch.rand(()), info


def makes_no_actor(observation_dim: int, action_dim: int, *, device: str) -> str:
    return "an actor"


def breaks(observation_dim: int, action_dim: int, *, device: str) -> Actor:
    raise KeyError("joints")


@pytest.mark.parametrize(
    ("builder", "words"),
    [
        ("HasNoName", "action_transform_id ''"),
        ("Forward", "fails when it is tried: IndexError: no such joint"),
        ("LosesWithoutTraining", r"aux_losses \['size'\] without training"),
        ("LosesMany", r"aux_losses\['size'\] has shape \(4, 2\)"),
        ("LosesNoGradient", r"aux_losses\['size'\] has no gradient"),
        ("DrawsForItself", "forward gives other actions with a generator of the same seed"),
        ("makes_no_actor", "made a str: expected a subclass of paceline.actors.Actor"),
        ("breaks", "failed for 3 observations, 2 actions and kwargs {}: KeyError: 'joints'"),
    ],
)
def test_what_is_no_actor_is_refused_with_what_is_wrong(builder: str, words: str) -> None:
    path = f"{__name__}:{builder}"
    with pytest.raises(ActorSemanticsError, match=words):
        build_actor(own_semantics(path, {}, observation_dim=3, action_dim=2, device="cpu"), own_builder=path)


def test_an_actor_that_keeps_the_contract_is_built() -> None:
    path = f"{__name__}:Plain"
    build_actor(own_semantics(path, {}, observation_dim=3, action_dim=2, device="cpu"), own_builder=path)


def test_kwargs_that_the_builder_does_not_take_are_refused() -> None:
    with pytest.raises(ActorSemanticsError, match=r"kwargs \{.*'depth': 3\}: TypeError"):
        semantics(depth=3)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("not_there:Actor", "cannot be imported: No module named 'not_there'; install"),
        ("my_actor:NotThere", "cannot be imported: module 'my_actor' has no attribute 'NotThere'"),
        ("my_actor:torch", "is a module: expected a class or a function"),
    ],
)
def test_a_builder_that_is_not_there_is_said_with_what_to_do(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        own_semantics(path, {}, observation_dim=3, action_dim=2, device="cpu")


@pytest.mark.parametrize("text", ["my_actor", "my_actor:", ":MyActor", "my actor:MyActor", "os;x:y"])
def test_a_builder_that_is_no_path_is_refused_by_the_settings(text: str) -> None:
    with pytest.raises(ConfigError, match=r"actor\.builder"):
        build({"actor": {"builder": text}})


def test_kwargs_without_a_builder_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"actor\.kwargs are given without actor\.builder"):
        build({"actor": {"kwargs": {"width": 3}}})
