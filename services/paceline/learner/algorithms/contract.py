"""What the training loop knows of an algorithm: no loss, only this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.actors import Actor
from paceline.learner.algorithms.batch import TransitionBatch


@dataclass(frozen=True)
class Update:
    """What an update gave; nobody has waited for its tensors yet."""

    figures: Mapping[str, Tensor]
    """0-dimensional tensors, by name."""
    priorities: Tensor | None = None
    """[N] how much each row surprised, from which it is drawn again; None where the batch had no weights."""


class Algorithm(Protocol):
    """Improves an actor from batches of transitions."""

    @property
    def actor(self) -> Actor:
        """The learner actor: changed in place by every update."""

    def update(self, batch: TransitionBatch) -> Update:
        """Improve the actor once."""

    def check_finite(self) -> None:
        """Raise NonFiniteError naming the first weight or gradient that is not finite."""

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all tensors that the next update depends on, random state included."""

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from `state_dict`'s tensors. Raises CheckpointError, with nothing changed, unless all fit exactly."""
