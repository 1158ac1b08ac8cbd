"""Actors: the contract, its checks, and the built-in ones."""

from paceline.actors.build import build_actor
from paceline.actors.contract import Actor, ActorInfo, ActorSemantics, flatten_observation
from paceline.actors.squashed_gaussian import squashed_gaussian_semantics

__all__ = [
    "Actor",
    "ActorInfo",
    "ActorSemantics",
    "build_actor",
    "flatten_observation",
    "squashed_gaussian_semantics",
]
