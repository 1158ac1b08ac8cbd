"""Puts steps of one environment after each other into unrolls: rows of T steps and the observation after them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.collector.filler import policy_stamps
from paceline.collector.open_block import Columns, OpenBlock
from paceline.envs import VectorStep
from paceline.identity import PolicyIdentity
from paceline.rows import Block

Integers = npt.NDArray[np.int64]


class UnrollFiller:
    """Makes unrolls as `rows.unroll_spec` describes them: each begins with the last observation of the one before.

    Environments fill theirs independently, for an episode's end takes one step more: the one that is not valid, from
    the episode's last observation to the first of the next. It is put in when that first observation is acted upon, so
    both autoreset modes give the same rows.
    """

    def __init__(self, block: OpenBlock, *, environments: int) -> None:
        self.block = block
        self._begun = block.make_rows(environments)
        self._columns = {name: self._begun.columns[name] for name in block.spec.offsets}
        self._length = block.spec["reward"].shape[0]
        self._steps = np.zeros(environments, np.int64)
        """[N] steps in the unroll that is under way."""
        self._has_last = np.zeros(environments, np.bool_)
        """[N] whether there was a step that the next one comes after."""
        self._ended = np.zeros(environments, np.bool_)
        """[N] whether that step was the last of its episode, or of environments that were given up."""
        self._last_observation = np.empty_like(self._columns["observation"][:, 0])
        """[N, *observation] what came after that step."""
        self._last_episode = np.zeros(environments, np.int64)
        self._stamps: dict[str, float] = {}

    def set_policy(self, identity: PolicyIdentity, learner_step: int, applied_at: float = 0.0) -> None:
        """The policy of the steps from now on, as `Filler`."""
        self._stamps = policy_stamps(identity, learner_step, applied_at)

    def add(self, step: VectorStep, log_prob: npt.NDArray[np.float32]) -> list[Block]:
        """Take the valid transitions of a step; the blocks that the unrolls filled that it completes."""
        live = np.flatnonzero(step.valid)
        sealed = self._put_between(live[self._ended[live]], step.observation)
        columns = {
            "observation": step.observation[live],
            "action": step.action[live],
            "reward": step.reward[live],
            "behaviour_log_prob": log_prob[live],
            "episode": step.episode[live],
            "terminated": step.terminated[live],
            "truncated": step.truncated[live],
        }
        sealed += self._put(live, columns, step.next_observation[live], valid=True)
        self._has_last[live] = True
        self._ended[live] = (step.terminated | step.truncated)[live]
        self._last_observation[live] = step.next_observation[live]
        self._last_episode[live] = step.episode[live]
        return sealed

    def drop_episode(self, episode: int) -> int:
        """Forget the unrolls that hold steps of an episode, as far as they are not sealed; how many there were."""
        is_begun = np.arange(self._length) < self._steps[:, None]
        holds = (is_begun & (self._columns["episode"] == episode)).any(axis=1)
        broken = holds | (self._has_last & (self._last_episode == episode))
        dropped = int(np.count_nonzero(self._steps[broken]))
        self._steps[broken] = 0
        self._has_last[broken] = self._ended[broken] = False
        return dropped + self.block.drop_episode(episode)

    def cut(self) -> list[Block]:
        """Let unrolls that are under way go on behind a step that is not valid, as behind an episode's end."""
        self._ended = self._has_last.copy()
        return []

    def _put_between(self, numbers: Integers, first_observation: npt.NDArray[Any]) -> list[Block]:
        """Put the step between two episodes into these environments' unrolls."""
        if len(numbers) == 0:
            return []
        columns = {
            "observation": self._last_observation[numbers],
            "episode": self._last_episode[numbers],
            **dict.fromkeys(("action", "reward", "behaviour_log_prob", "terminated", "truncated"), np.zeros(())),
        }
        return self._put(numbers, columns, first_observation[numbers], valid=False)

    def _put(
        self, numbers: Integers, columns: Columns, next_observation: npt.NDArray[Any], *, valid: bool
    ) -> list[Block]:
        at = self._steps[numbers]
        for name, values in columns.items():
            self._columns[name][numbers, at] = values
        for name, value in {**self._stamps, "collected_at": self.block.clock.now(), "valid": valid}.items():
            self._columns[name][numbers, at] = value
        self._steps[numbers] = at + 1
        is_full = at + 1 == self._length
        full = numbers[is_full]
        self._columns["observation"][full, self._length] = next_observation[is_full]
        self._steps[full] = 0
        return self.block.add_rows(self._begun.data[full])
