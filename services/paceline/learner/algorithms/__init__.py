"""Algorithms: what improves the actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paceline.actors import Actor
from paceline.errors import ConfigError
from paceline.learner.algorithms.batch import TransitionBatch
from paceline.learner.algorithms.contract import Algorithm, Update
from paceline.learner.algorithms.sac import Sac, SacSettings

__all__ = ["Algorithm", "TransitionBatch", "Update", "build_algorithm"]


def build_algorithm(settings: Mapping[str, Any], actor: Actor, *, seed: int) -> Algorithm:
    """The algorithm that `settings["name"]` names, with the other settings as its own.

    Raises:
        ConfigError: no algorithm has that name, or it has no such setting.
    """
    chosen = dict(settings)
    name = chosen.pop("name", None)
    if name != "sac":
        raise ConfigError(f"learner.algorithm.name is {name!r}: expected sac")
    known = {field.name for field in fields(SacSettings)}
    if unknown := sorted(chosen.keys() - known):
        raise ConfigError(f"learner.algorithm has unknown settings {unknown}: expected some of {sorted(known)}")
    if "hidden" in chosen:
        chosen["hidden"] = tuple(chosen["hidden"])
    meaning = actor.semantics
    return Sac(
        actor,
        SacSettings(**chosen),
        observation_dim=meaning.observation_dim,
        action_dim=meaning.action_dim,
        seed=seed,
    )
