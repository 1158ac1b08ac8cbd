"""What an actor must prove before it is used: it runs, it agrees with itself, and its whole state travels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from paceline.actors.contract import Actor, ActorInfo, ActorSemantics
from paceline.errors import ActorSemanticsError

_ROWS = 4
_TOLERANCE = 1e-5


def check_actor(actor: Actor, semantics: ActorSemantics, rebuild: Callable[[], Actor]) -> None:
    """Run forward, explore and export once, and prove that parameters and buffers are all that the actor is made of.

    `rebuild` makes another actor of the same semantics, as a collector does in its own process. Weights, buffers,
    gradients, mode and torch's random generator are afterwards as before.

    Raises:
        ActorSemanticsError: says which part of the contract is broken.
    """
    if getattr(actor, "action_transform_id", None) != semantics.action_transform:
        raise ActorSemanticsError(
            f"the actor's action_transform_id is {getattr(actor, 'action_transform_id', None)!r}: expected "
            f"{semantics.action_transform!r}, as its semantics say"
        )
    stray = next(_stray_tensors(actor), None)
    if stray is not None:
        raise ActorSemanticsError(
            f"the actor keeps a tensor or array in {stray!r}, which is neither a parameter nor a buffer and would not "
            "reach the collectors: register it with register_buffer"
        )
    state = {name: tensor.detach().clone() for name, tensor in actor.named_tensors()}
    gradients = {name: parameter.grad for name, parameter in actor.named_parameters()}
    modes = {module: module.training for module in actor.modules()}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _check_methods(actor, semantics)
            _check_state_is_complete(actor, rebuild(), semantics)
    finally:
        with torch.no_grad():
            for name, tensor in actor.named_tensors():
                tensor.copy_(state[name])
        for name, parameter in actor.named_parameters():
            parameter.grad = gradients[name]
        for module, training in modes.items():
            module.training = training


def _check_methods(actor: Actor, semantics: ActorSemantics) -> None:
    observation, size = _observation(actor, semantics), (_ROWS, semantics.action_dim)
    action, info = actor(observation, True)
    _require("forward: action", action, size)
    _require("forward: log_prob", info.log_prob, (_ROWS,))
    for name, output in (("action", action), ("log_prob", info.log_prob)):
        if not output.requires_grad:
            raise ActorSemanticsError(f"forward's {name} has no gradient: expected a reparameterised sample")
    _check_aux_losses(actor, observation, info)
    _check_generator(actor, observation)
    mean, std = actor.get_mean_and_std(observation)
    _require("get_mean_and_std: mean", mean, size)
    _require("get_mean_and_std: std", std, size)
    if not bool((std > 0).all()):
        raise ActorSemanticsError("get_mean_and_std: a standard deviation is not above 0")
    for deterministic in (False, True):
        explored, log_prob = actor.explore(observation, deterministic)
        _require(f"explore(deterministic={deterministic}): action", explored, size)
        _require(f"explore(deterministic={deterministic}): log_prob", log_prob, (_ROWS,))
        if explored.requires_grad:
            raise ActorSemanticsError("explore keeps a gradient graph: expected torch.no_grad() inside it")
    with torch.no_grad():
        exported = actor.as_export_module()(observation)
    _require("as_export_module: action", exported, size)
    _require_equal("as_export_module and explore(deterministic=True)", exported, explored)


def _check_aux_losses(actor: Actor, observation: Tensor, info: ActorInfo) -> None:
    for name, loss in info.aux_losses.items():
        _require(f"aux_losses[{name!r}]", loss, ())
        if not loss.requires_grad:
            raise ActorSemanticsError(f"aux_losses[{name!r}] has no gradient: expected one to the actor's parameters")
    if names := sorted(actor(observation, False)[1].aux_losses):
        raise ActorSemanticsError(f"forward has aux_losses {names} without training: expected none")


def _check_generator(actor: Actor, observation: Tensor) -> None:
    """What a resumed run draws must be what the stopped one would have drawn."""
    generator = torch.Generator(observation.device)
    draws: dict[str, Callable[[], Tensor]] = {
        "forward": lambda: actor(observation, True, generator)[0],
        "explore": lambda: actor.explore(observation, False, generator)[0],
    }
    for name, draw in draws.items():
        generator.manual_seed(1)
        first = draw()
        generator.manual_seed(1)
        if not torch.equal(first, draw()):
            raise ActorSemanticsError(
                f"{name} gives other actions with a generator of the same seed: expected every random number from it"
            )


def _check_state_is_complete(actor: Actor, twin: Actor, semantics: ActorSemantics) -> None:
    """After training has changed whatever it changes, a twin given only the tensors must act the same."""
    observation = _observation(actor, semantics)
    actor.update_statistics(observation * 5 + 50)
    actor(observation * 5 + 50, True)
    theirs = dict(twin.named_tensors())
    if theirs.keys() != {name for name, _ in actor.named_tensors()}:
        raise ActorSemanticsError("two actors of the same semantics have different parameters or buffers")
    with torch.no_grad():
        for name, tensor in actor.named_tensors():
            theirs[name].copy_(tensor)
    mine, copied = (each.explore(observation, True)[0] for each in (actor, twin))
    _require_equal("an actor and its copy by parameters and buffers (state lies elsewhere)", copied, mine)


def _stray_tensors(actor: nn.Module) -> Iterator[str]:
    for path, module in actor.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            values = value if isinstance(value, list | tuple | set) else [value]
            values = list(value.values()) if isinstance(value, dict) else values
            if any(isinstance(each, Tensor | np.ndarray) for each in values):
                yield f"{path}.{name}".lstrip(".")


def _observation(actor: nn.Module, semantics: ActorSemantics) -> Tensor:
    like = next(actor.parameters())
    return torch.randn(_ROWS, semantics.observation_dim, dtype=like.dtype, device=like.device)


def _require(what: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape or not bool(value.isfinite().all()):
        raise ActorSemanticsError(
            f"{what} has shape {tuple(value.shape)} and values {value.flatten()[:4].tolist()}: "
            f"expected shape {shape} and finite values"
        )


def _require_equal(what: str, left: Tensor, right: Tensor) -> None:
    if not torch.allclose(left, right, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ActorSemanticsError(
            f"{what} differ: deterministic actions {left.flatten()[:4].tolist()} and {right.flatten()[:4].tolist()}"
        )
