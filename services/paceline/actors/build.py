"""Actors built from their semantics, and checked before anyone relies on them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.actors import squashed_gaussian
from paceline.actors.checks import check_actor
from paceline.actors.contract import Actor, ActorSemantics
from paceline.errors import ActorSemanticsError

# The semantics may come from a peer, so they choose among known builders and never name code to import.
_BUILDERS: dict[tuple[str, str], Callable[..., Actor]] = {
    (squashed_gaussian.KIND, squashed_gaussian.BUILDER): squashed_gaussian.SquashedGaussianActor,
}


def build_actor(semantics: ActorSemantics, device: str | torch.device = "cpu") -> Actor:
    """A new actor with these semantics, its initial weights drawn from torch's global generator.

    It is checked as `check_actor` says; the check leaves no trace in it or in the generators.

    Raises:
        ActorSemanticsError: there is no such builder, it refuses its kwargs, or the actor breaks the contract.
    """
    builder = _BUILDERS.get((semantics.kind, semantics.builder))
    if builder is None:
        known = ", ".join(f"{kind} ({path})" for kind, path in _BUILDERS)
        raise ActorSemanticsError(f"actor kind {semantics.kind!r} with builder {semantics.builder!r}: expected {known}")

    def build() -> Actor:
        try:
            actor = builder(semantics.observation_dim, semantics.action_dim, **semantics.kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ActorSemanticsError(
                f"actor builder {semantics.builder!r} refuses kwargs {dict(semantics.kwargs)!r}: {error}"
            ) from error
        actor.semantics = semantics
        return actor.to(device)

    actor = build()
    check_actor(actor, semantics, build)
    return actor
