"""What an actor must prove before it is used: it runs, agrees with itself, travels whole, and fits the environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from paceline.actors.contract import Actor, ActorInfo, ActorSemantics
from paceline.actors.own import KIND as OWN
from paceline.errors import ActorSemanticsError

_ROWS = 4
_TOLERANCE = 1e-5
_TRAINING_BATCHES = 100
"""After so many, what an actor keeps elsewhere has to show; 0.07 s of CPU for the built-in one."""


def check_actor(actor: Actor, semantics: ActorSemantics, rebuild: Callable[[], Actor]) -> None:
    """Run forward, explore and export, and prove that parameters and buffers are all that the actor is made of.

    `rebuild` makes another actor of the same semantics, as a collector does in its own process. Weights, buffers,
    gradients, mode and torch's random generator are afterwards as before.

    State elsewhere (in the object, its classes, their modules, a file) is found by what it does to mean, standard
    deviation, actions or log-densities within some 100 batches of `update_statistics` and `forward`. What shows only
    later, by other calls, or for other observations than random ones is not found, nor what a module has another value
    of in another process from the start.

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
            f"the actor keeps a tensor or array in {stray}, which is neither a parameter nor a buffer and would not "
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


def require_made_for(
    semantics: ActorSemantics,
    environment_id: str,
    *,
    observation_dim: int,
    action_low: Sequence[float],
    action_high: Sequence[float],
) -> None:
    """Raise ActorSemanticsError where the learner's actor is made for another environment than a process's own.

    Of a built-in actor the range of actions is compared too; one of a user's own has what range it likes.
    """
    mine: dict[str, object] = {"observation_dim": observation_dim, "action_dim": len(action_low)}
    theirs = {name: getattr(semantics, name) for name in mine}
    if semantics.kind != OWN:
        mine |= {"action_low": [*action_low], "action_high": [*action_high]}
        theirs |= {name: semantics.kwargs.get(name) for name in ("action_low", "action_high")}
    for name, value in mine.items():
        if theirs[name] != value:
            raise ActorSemanticsError(
                f"the learner's actor has {name} {theirs[name]}: environment {environment_id!r} here has {value}; "
                "start learner, collectors and evaluator with the same env settings and the same version of the "
                "environment"
            )


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
    """After training has changed whatever it changes, a twin given only the tensors must act the same.

    And one that is given the tensors of before must act as before: what the actors of a process share, in a class or a
    module, changes both alike, and no other process.
    """
    observation = _observation(actor, semantics)
    if {name for name, _ in twin.named_tensors()} != {name for name, _ in actor.named_tensors()}:
        raise ActorSemanticsError("two actors of the same semantics have different parameters or buffers")
    untrained = {name: tensor.detach().clone() for name, tensor in actor.named_tensors()}
    _take_over(twin, untrained)
    before = _outputs(twin, observation)
    for _ in range(_TRAINING_BATCHES):
        batch = _observation(actor, semantics) * 5 + 50
        actor.update_statistics(batch)
        actor(batch, True)
    trained = {name: tensor.detach().clone() for name, tensor in actor.named_tensors()}
    mine = _outputs(actor, observation)
    _take_over(twin, trained)
    _require_same_outputs(
        "an actor and its copy by parameters and buffers (state lies elsewhere)", _outputs(twin, observation), mine
    )
    _take_over(twin, untrained)
    _require_same_outputs(
        "an actor before and after another one of this process was trained (state lies in their class or module, and "
        "would not reach the collectors: keep it in buffers)",
        before,
        _outputs(twin, observation),
    )


def _take_over(actor: Actor, state: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in actor.named_tensors():
            tensor.copy_(state[name])


def _outputs(actor: Actor, observation: Tensor) -> dict[str, Tensor]:
    """All that the actor says about the observation, by name; random numbers are the same at each call."""
    generator = torch.Generator(observation.device)
    generator.manual_seed(1)
    with torch.no_grad():
        mean, std = actor.get_mean_and_std(observation)
        action, log_prob = actor.explore(observation, True)
        explored, explored_log_prob = actor.explore(observation, False, generator)
    # Copies: what is returned may be a tensor that the actor goes on with.
    return {
        name: output.clone()
        for name, output in {
            "means": mean,
            "standard deviations": std,
            "deterministic actions": action,
            "log-densities of deterministic actions": log_prob,
            "explored actions": explored,
            "log-densities of explored actions": explored_log_prob,
        }.items()
    }


def _stray_tensors(actor: nn.Module) -> Iterator[str]:
    for path, module in actor.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules") and _holds_tensor(value):
                yield repr(f"{path}.{name}".lstrip("."))
        for cls in type(module).__mro__:
            for name, value in vars(cls).items():
                if _holds_tensor(value):
                    yield f"{name!r} of its class {cls.__qualname__}"


def _holds_tensor(value: object) -> bool:
    values = value if isinstance(value, list | tuple | set) else [value]
    values = list(value.values()) if isinstance(value, dict) else values
    return any(isinstance(each, Tensor | np.ndarray) for each in values)


def _observation(actor: nn.Module, semantics: ActorSemantics) -> Tensor:
    like = next(actor.parameters())
    return torch.randn(_ROWS, semantics.observation_dim, dtype=like.dtype, device=like.device)


def _require(what: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape or not bool(value.isfinite().all()):
        raise ActorSemanticsError(
            f"{what} has shape {tuple(value.shape)} and values {value.flatten()[:4].tolist()}: "
            f"expected shape {shape} and finite values"
        )


def _require_same_outputs(what: str, left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    for name, output in left.items():
        _require_equal(what, output, right[name], name)


def _require_equal(what: str, left: Tensor, right: Tensor, name: str = "deterministic actions") -> None:
    if not torch.allclose(left, right, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
        raise ActorSemanticsError(
            f"{what} differ: {name} {left.flatten()[:4].tolist()} and {right.flatten()[:4].tolist()}"
        )
