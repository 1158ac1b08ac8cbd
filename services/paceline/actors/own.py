"""Actors of a user's own: `actor.builder` names what makes them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.actors.contract import SCHEMA_VERSION, Actor, ActorSemantics
from paceline.errors import ActorSemanticsError, ConfigError

KIND = "own"


def own_semantics(
    builder: str, kwargs: Mapping[str, Any], *, observation_dim: int, action_dim: int, device: str | torch.device
) -> ActorSemantics:
    """The record of an actor of one's own; what its transform is called, one that is built and thrown away says.

    Raises:
        ConfigError: there is no such builder.
        ActorSemanticsError: it refuses its kwargs, or what it makes is no actor.
    """
    with torch.random.fork_rng(devices=[]):
        actor = make_own(builder, kwargs, observation_dim, action_dim, device)
    transform = getattr(actor, "action_transform_id", None)
    if not isinstance(transform, str) or not transform:
        raise ActorSemanticsError(
            f"the actor of {builder!r} has action_transform_id {transform!r}: expected a text that names how its "
            "network's output becomes an action, such as 'tanh_affine'"
        )
    return ActorSemantics(
        schema_version=SCHEMA_VERSION,
        kind=KIND,
        builder=builder,
        kwargs=kwargs,
        observation_dim=observation_dim,
        action_dim=action_dim,
        action_transform=transform,
    )


def make_own(
    builder: str, kwargs: Mapping[str, Any], observation_dim: int, action_dim: int, device: str | torch.device
) -> Actor:
    """What `builder`, "package.module:callable", makes of `(observation_dim, action_dim, device=device, **kwargs)`.

    Raises: as `own_semantics`.
    """
    make = _load(builder)
    try:
        actor = make(observation_dim, action_dim, device=device, **kwargs)
    except Exception as error:  # of whatever kind the user's code raises
        raise ActorSemanticsError(
            f"actor.builder {builder!r} failed for {observation_dim} observations, {action_dim} actions and kwargs "
            f"{dict(kwargs)!r}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(actor, Actor):
        raise ActorSemanticsError(
            f"actor.builder {builder!r} made a {type(actor).__name__}: expected a subclass of paceline.actors.Actor"
        )
    return actor


def _load(path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"actor.builder {path!r} cannot be imported: {error}; install the package that has it, or put its folder "
            "on PYTHONPATH, for learner, collectors and evaluator alike"
        ) from error
    if not callable(found):
        raise ConfigError(f"actor.builder {path!r} is a {type(found).__name__}: expected a class or a function")
    made: Callable[..., Any] = found
    return made
