"""What every actor is: its meaning on record, and the methods that learner, collector, evaluator and export call."""

from __future__ import annotations

import abc
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from paceline.errors import ActorSemanticsError

SCHEMA_VERSION = 1
"""Version of the actor semantics record; another one is refused, and its weights with it."""


@dataclass(frozen=True)
class ActorSemantics:
    """What an actor's weights mean. Two actors may share weights only where every field is the same.

    `observation_dim` and `action_dim` count the elements of a flattened observation and action. `kwargs` are the
    builder's, JSON values only. Raises ActorSemanticsError when a field is no such value.
    """

    schema_version: int
    kind: str
    builder: str
    kwargs: Mapping[str, Any]
    observation_dim: int
    action_dim: int
    action_transform: str

    def __post_init__(self) -> None:
        # bool is an int to Python, and no version or dimension.
        if type(self.schema_version) is not int or self.schema_version != SCHEMA_VERSION:
            raise ActorSemanticsError(
                f"actor semantics have schema_version {self.schema_version!r}: this Paceline knows {SCHEMA_VERSION}; "
                "train again with this version, or use the version that wrote the weights"
            )
        for name in ("kind", "builder", "action_transform"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ActorSemanticsError(f"actor semantics have {name} {getattr(self, name)!r}: expected a text")
        for name in ("observation_dim", "action_dim"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ActorSemanticsError(f"actor semantics have {name} {getattr(self, name)!r}: expected 1 or more")
        if not isinstance(self.kwargs, Mapping):
            raise ActorSemanticsError(f"actor semantics have kwargs {self.kwargs!r}: expected a mapping of names")
        try:
            # A tuple becomes the list that JSON makes of it, so that a record equals its own round trip.
            plain = json.loads(_canonical(dict(self.kwargs)))
        except (TypeError, ValueError) as error:
            raise ActorSemanticsError(f"actor semantics have kwargs {self.kwargs!r}: not JSON: {error}") from error
        object.__setattr__(self, "kwargs", plain)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces; equal semantics give equal texts."""
        return _canonical({each.name: getattr(self, each.name) for each in fields(self)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a record. Raises ActorSemanticsError when it is missing, null, incomplete or of another version."""
        try:
            record = json.loads(text) if text else None
        except ValueError as error:
            raise ActorSemanticsError(f"actor semantics {text[:80]!r} are not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ActorSemanticsError(
                f"actor semantics are {'missing' if record is None else repr(record)}: expected a record, without "
                "which weights cannot be told from those of another actor"
            )
        names = [each.name for each in fields(cls)]
        wrong = [f"lack {name}" for name in names if name not in record]
        wrong += [f"have an unknown field {name!r}" for name in record if name not in names]
        if wrong:
            raise ActorSemanticsError(f"actor semantics {wrong[0]}: expected exactly {', '.join(names)}")
        return cls(**record)

    def require_same(self, other: ActorSemantics) -> None:
        """Raise ActorSemanticsError naming the first field in which `other` differs from these semantics."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if mine != theirs:
                raise ActorSemanticsError(
                    f"actor semantics differ in {each.name}: the weights have {theirs!r}, expected {mine!r}; "
                    "use the settings that the weights were trained with"
                )


@dataclass(frozen=True)
class ActorInfo:
    """What `Actor.forward` says beside the action."""

    log_prob: Tensor
    """[N] log-density of the action in environment units, log|det J| of the transform included."""
    aux_losses: Mapping[str, Tensor] = field(default_factory=dict)
    """Further losses by name, 0-dimensional and weighted already, which the learner adds to the actor's; only with
    `training`, and always the same names."""


class Actor(nn.Module, abc.ABC):
    """The one object that is optimised, acts, evaluates and exports.

    Observations are `[N, observation_dim]` in the floating type of the parameters, actions `[N, action_dim]` in
    environment units. Everything that changes what the actor does is a parameter or a buffer: nothing else travels.
    Random numbers come from `generator` where one is given, so that a resumed run draws what the stopped one would.
    """

    semantics: ActorSemantics
    """Set by `build_actor`."""
    action_transform_id: ClassVar[str]
    """Names the transform from the network's output to environment units; equals `semantics.action_transform`."""

    @abc.abstractmethod
    def forward(
        self, observation: Tensor, training: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, ActorInfo]:
        """A reparameterised action, with gradients to the parameters, and its log-density."""

    @abc.abstractmethod
    def get_mean_and_std(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [N, action_dim] before the transform."""

    @abc.abstractmethod
    def explore(
        self, observation: Tensor, deterministic: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """An action [N, action_dim] and its log-density [N], without gradients. Deterministic: transform(mean)."""

    @abc.abstractmethod
    def as_export_module(self) -> nn.Module:
        """A module of observation -> deterministic action, for evaluation elsewhere."""

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that the actor is made of: parameters, then buffers, the non-persistent ones too, since they act as well.

        The names are those of the plain actor, whether or not it or a part of it is wrapped by torch.compile.
        """
        for name, tensor in itertools.chain(self.named_parameters(), self.named_buffers()):
            yield name.replace("_orig_mod.", ""), tensor

    def update_statistics(self, observation: Tensor) -> None:
        """Take a training batch into the actor's statistics, if it has any. Called by the learner alone."""


def flatten_observation(observation: Tensor) -> Tensor:
    """`[N, *shape]` of any dtype as the `[N, D]` float32 that an actor and a critic read; no copy where it is one."""
    return observation.flatten(1).to(torch.float32) if observation.ndim > 1 else observation.to(torch.float32)[:, None]


def _canonical(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
