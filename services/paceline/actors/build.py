"""Actors built from their semantics, and checked before anyone relies on them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.actors import own, squashed_gaussian
from paceline.actors.checks import check_actor
from paceline.actors.contract import Actor, ActorSemantics
from paceline.errors import ActorSemanticsError

_BUILT_IN: dict[tuple[str, str], Callable[..., Actor]] = {
    (squashed_gaussian.KIND, squashed_gaussian.BUILDER): squashed_gaussian.SquashedGaussianActor,
}


def build_actor(
    semantics: ActorSemantics, device: str | torch.device = "cpu", *, own_builder: str | None = None
) -> Actor:
    """A new actor with these semantics, its initial weights drawn from torch's global generator.

    It is checked as `check_actor` says; the check leaves no trace in it or in the generators.

    Args:
        own_builder: `actor.builder` of this process's own settings. The semantics may come from a peer, so they choose
            among the built-in actors and this one, and never name code to import.

    Raises:
        ConfigError: `own_builder` cannot be imported.
        ActorSemanticsError: there is no such builder, it refuses its kwargs, or the actor breaks the contract.
    """
    make = _find_maker(semantics, device, own_builder)

    def build() -> Actor:
        actor = make()
        actor.semantics = semantics
        return actor.to(device)

    actor = build()
    try:
        check_actor(actor, semantics, build)
    except ActorSemanticsError:
        raise
    except Exception as error:  # of whatever kind a user's own actor raises
        raise ActorSemanticsError(
            f"the actor of {semantics.builder!r} fails when it is tried: {type(error).__name__}: {error}"
        ) from error
    return actor


def _find_maker(semantics: ActorSemantics, device: str | torch.device, own_builder: str | None) -> Callable[[], Actor]:
    observation_dim, action_dim, kwargs = semantics.observation_dim, semantics.action_dim, semantics.kwargs
    if semantics.kind == own.KIND:
        if semantics.builder != own_builder:
            raise ActorSemanticsError(
                f"the actor is built by {semantics.builder!r}, and this process's settings name {own_builder!r}, the "
                "only one that it imports: give every process of the run the same actor.builder"
            )
        return lambda: own.make_own(semantics.builder, kwargs, observation_dim, action_dim, device)
    builder = _BUILT_IN.get((semantics.kind, semantics.builder))
    if builder is None:
        known = ", ".join(f"{kind} ({path})" for kind, path in _BUILT_IN)
        raise ActorSemanticsError(f"actor kind {semantics.kind!r} with builder {semantics.builder!r}: expected {known}")

    def make() -> Actor:
        try:
            return builder(observation_dim, action_dim, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ActorSemanticsError(
                f"actor builder {semantics.builder!r} refuses kwargs {dict(kwargs)!r}: {error}"
            ) from error

    return make
