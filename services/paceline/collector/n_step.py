"""Sums up n steps into a row: windows that begin at every step and end with n of them, or with their episode."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.collector.filler import policy_stamps
from paceline.collector.open_block import OpenBlock
from paceline.envs import VectorStep
from paceline.identity import PolicyIdentity
from paceline.rows import Block

Integers = npt.NDArray[np.int64]

# Of the step that a window begins with; what remains of its row follows from the steps after it.
_OF_FIRST_STEP = ("observation", "action", "episode")


class NStepFiller:
    """Makes a row of every n steps of an environment: R = sum over j < k of gamma^j r_(t+j), for k steps.

    k is n, and less for the last windows of an episode, and for those of environments that end without one. A window
    never crosses an episode. The row's next observation, `terminated` and `truncated` are of step t + k - 1, its stamps
    of step t, where its action was chosen. While no episode ends, the window of one environment that begins where the
    one before it ends is `n` times the number of environments rows later.
    """

    def __init__(self, block: OpenBlock, *, environments: int, n_step: int, gamma: float) -> None:
        self.block = block
        self._count, self._n = environments, n_step
        # Slot s of environment e is row s * environments + e: begun rows, whose windows are still open.
        self._begun = block.make_rows(n_step * environments)
        self._reward = np.zeros((n_step, environments), np.float64)
        self._first = np.zeros(environments, np.int64)
        """[N] slot of the oldest open window."""
        self._open = np.zeros(environments, np.int64)
        """[N] open windows: one for each step since."""
        self._powers = np.power(gamma, np.arange(n_step, dtype=np.float64))[:, None]
        self._columns = {name: self._begun.columns[name] for name in block.spec.offsets}
        self._stamps: dict[str, float] = {}
        self._next_observation = np.zeros((environments, *block.spec["next_observation"].shape))

    def set_policy(self, identity: PolicyIdentity, learner_step: int, applied_at: float = 0.0) -> None:
        """The policy of the windows that begin from now on, as `Filler`."""
        self._stamps = policy_stamps(identity, learner_step, applied_at)

    def add(self, step: VectorStep, log_prob: npt.NDArray[np.float32]) -> list[Block]:
        """Take the valid transitions of a step; the blocks that the windows filled that it closes."""
        live = np.flatnonzero(step.valid)
        slot = (self._first[live] + self._open[live]) % self._n
        begun = slot * self._count + live
        for name in _OF_FIRST_STEP:
            self._columns[name][begun] = getattr(step, name)[live]
        self._columns["behaviour_log_prob"][begun] = log_prob[live]
        self._columns["collected_at"][begun] = self.block.clock.now()
        for name, value in self._stamps.items():
            self._columns[name][begun] = value
        self._reward[slot, live] = step.reward[live]
        self._open[live] += 1
        self._next_observation = step.next_observation
        # An environment that only reset has no open window.
        closed = np.where(step.terminated | step.truncated, self._open, self._open == self._n)
        return self._close(closed, step.terminated, step.truncated)

    def drop_episode(self, episode: int) -> int:
        """Forget the open windows of an episode, and its rows in the open block; how many of both."""
        oldest = self._columns["episode"][self._first * self._count + np.arange(self._count)]
        dropped = np.where(oldest == episode, self._open, 0)
        self._open -= dropped
        return int(dropped.sum()) + self.block.drop_episode(episode)

    def cut(self) -> list[Block]:
        """Close every window with the steps that it has: its row bootstraps from the last observation."""
        running = np.zeros(self._count, np.bool_)
        return self._close(self._open.copy(), running, running)

    def _close(
        self, closed: Integers, terminated: npt.NDArray[np.bool_], truncated: npt.NDArray[np.bool_]
    ) -> list[Block]:
        """Make rows of the oldest `closed` [N] windows of each environment, which end with the step just taken."""
        count = int(closed.sum())
        if count == 0:
            return []
        number = np.repeat(np.arange(self._count), closed)
        older = np.arange(count) - np.repeat(np.cumsum(closed) - closed, closed)
        slot, steps = (self._first[number] + older) % self._n, self._open[number] - older
        rows = Block(self.block.spec, self._begun.data[slot * self._count + number])
        columns = rows.columns
        columns["reward"] = self._sums(number, slot, steps)
        columns["next_observation"] = self._next_observation[number]
        columns["terminated"], columns["truncated"] = terminated[number], truncated[number]
        columns["step_count"] = steps
        self._first = (self._first + closed) % self._n
        self._open = self._open - closed
        return self.block.add_rows(rows.data)

    def _sums(self, number: Integers, slot: Integers, steps: Integers) -> npt.NDArray[np.float64]:
        """Discounted sums of the rewards of windows: the environment, first slot and number of steps of each."""
        ahead = np.arange(int(steps.max()))[:, None]
        terms = self._powers[: len(ahead)] * self._reward[(slot + ahead) % self._n, number]
        return np.asarray(np.where(ahead < steps, terms, 0.0).sum(axis=0), np.float64)
