"""Actors: the contract, its checks, the built-in ones, and those of a user's own."""

from paceline.actors.build import build_actor
from paceline.actors.contract import Actor, ActorInfo, ActorSemantics, flatten_observation
from paceline.actors.own import own_semantics
from paceline.actors.squashed_gaussian import squashed_gaussian_semantics

__all__ = [
    "Actor",
    "ActorInfo",
    "ActorSemantics",
    "build_actor",
    "flatten_observation",
    "own_semantics",
    "squashed_gaussian_semantics",
]
