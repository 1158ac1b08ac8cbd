"""Fills steps into rows, each stamped with the policy that acted."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.collector.open_block import OpenBlock
from paceline.envs import VectorStep
from paceline.identity import PolicyIdentity
from paceline.rows import Block

# Taken from the step as they are; the other columns are stamps.
_OF_STEP = ("observation", "action", "reward", "next_observation", "terminated", "truncated", "episode")


class Filler(Protocol):
    """Makes rows of the steps of all environments of a collector, and puts them into the open block."""

    @property
    def block(self) -> OpenBlock:
        """Where the rows go."""

    def set_policy(self, identity: PolicyIdentity, learner_step: int, applied_at: float = 0.0) -> None:
        """The policy of the steps from now on, the updates behind it, and when it was applied.

        That is by the learner's clock; 0: not known.
        """

    def add(self, step: VectorStep, log_prob: npt.NDArray[np.float32]) -> list[Block]:
        """Take the valid transitions of a step, with their behaviour log-densities [N]; the blocks that they filled."""

    def drop_episode(self, episode: int) -> int:
        """Forget an episode as far as it is not sealed; the rows that are lost by it."""

    def cut(self) -> list[Block]:
        """Make rows of what is under way: the next step follows upon no earlier one. The blocks that they filled."""


class StepFiller:
    """Makes a row of each step: rows lie in the order of steps, and of environments within a step."""

    def __init__(self, block: OpenBlock) -> None:
        self.block = block
        block.stamp({"step_count": 1})

    def set_policy(self, identity: PolicyIdentity, learner_step: int, applied_at: float = 0.0) -> None:
        """The policy of the steps from now on, as `Filler`."""
        self.block.stamp(policy_stamps(identity, learner_step, applied_at))

    def add(self, step: VectorStep, log_prob: npt.NDArray[np.float32]) -> list[Block]:
        """Take the valid transitions of a step; the blocks that they filled."""
        columns: dict[str, npt.NDArray[Any]] = {name: getattr(step, name) for name in _OF_STEP}
        columns["behaviour_log_prob"] = log_prob
        count = len(log_prob)
        if not step.valid.all():
            columns = {name: values[step.valid] for name, values in columns.items()}
            count = int(np.count_nonzero(step.valid))
        columns["collected_at"] = np.full(count, self.block.clock.now())
        return self.block.add_columns(columns, count)

    def drop_episode(self, episode: int) -> int:
        """Take the rows of an episode out of the open block; how many there were."""
        return self.block.drop_episode(episode)

    def cut(self) -> list[Block]:
        """Nothing is under way between two steps."""
        return []


def policy_stamps(identity: PolicyIdentity, learner_step: int, applied_at: float) -> dict[str, float]:
    """What a row says of the policy that acted."""
    return {
        "policy_incarnation": identity.incarnation,
        "policy_version": identity.version,
        "policy_learner_step": learner_step,
        "policy_applied_at": applied_at,
    }
