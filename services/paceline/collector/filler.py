"""Fills steps into rows: vectorised column writes into the block that is open."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.envs import VectorStep
from paceline.identity import PolicyIdentity
from paceline.rows import Block, RowSpec

# Taken from the step as they are; the other columns are stamps.
_OF_STEP = ("observation", "action", "reward", "next_observation", "terminated", "truncated", "episode")


class BlockFiller:
    """Collects complete transitions of all environments into blocks, each row stamped with the policy that acted.

    Rows lie in the order of steps, and of environments within a step.
    """

    def __init__(
        self, spec: RowSpec, *, block_rows: int, block_seconds: float, collector_index: int, collector_incarnation: int
    ) -> None:
        """Fill blocks of `block_rows` rows; one that is `block_seconds` old is due with fewer."""
        self._spec, self._block_rows, self._block_seconds = spec, block_rows, block_seconds
        self._index, self._incarnation = collector_index, collector_incarnation
        self._policy: PolicyIdentity | None = None
        self._learner_step = 0
        self._end, self._due_at = 0, 0.0
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._open()

    @property
    def row_count(self) -> int:
        """Rows in the open block."""
        return self._end

    def set_policy(self, identity: PolicyIdentity, learner_step: int) -> None:
        """The policy of the rows from now on, and the updates behind it."""
        self._policy, self._learner_step = identity, learner_step
        self._stamp_rest()

    def add(self, step: VectorStep, log_prob: npt.NDArray[np.float32]) -> list[Block]:
        """Take the valid transitions of a step, with their behaviour log-densities [N]; the blocks that they filled."""
        rows: dict[str, npt.NDArray[Any]] = {name: getattr(step, name) for name in _OF_STEP}
        rows["behaviour_log_prob"] = log_prob
        count = len(log_prob)
        if not step.valid.all():
            rows = {name: values[step.valid] for name, values in rows.items()}
            count = int(step.valid.sum())
        if count == 0:
            return []
        now, sealed, taken = time.time(), [], 0
        while True:
            begin = self._end
            if begin == 0:
                self._due_at = time.monotonic() + self._block_seconds
            size = min(count - taken, self._block_rows - begin)
            self._end = end = begin + size
            for name, values in rows.items():
                self._columns[name][begin:end] = values if size == count else values[taken : taken + size]
            self._columns["collected_at"][begin:end] = now
            taken += size
            if end == self._block_rows:
                sealed.append(self._block)
                self._open()
            if taken == count:
                return sealed

    def take_due(self) -> Block | None:
        """The open block if it is due by time."""
        return self.take() if self._end and time.monotonic() >= self._due_at else None

    def take(self) -> Block | None:
        """The rows of the open block, however few; None if there are none."""
        if self._end == 0:
            return None
        block = self._block.first(self._end)
        self._open()
        return block

    def drop_episode(self, episode: int) -> int:
        """Take the rows of an episode out of the open block; how many there were."""
        kept = self._columns["episode"][: self._end] != episode
        count = int(kept.sum())
        dropped = self._end - count
        if dropped:
            self._block.data[:count] = self._block.data[: self._end][kept]
            self._end = count
            self._stamp_rest()
        return dropped

    def _open(self) -> None:
        self._block, self._end, self._due_at = Block.empty(self._spec, self._block_rows), 0, 0.0
        records = self._block.columns
        self._columns = {name: records[name] for name in records.dtype.names or ()}
        self._columns["collector_index"][:] = self._index
        self._columns["collector_incarnation"][:] = self._incarnation
        self._stamp_rest()

    def _stamp_rest(self) -> None:
        # Stamped ahead, once per snapshot and block, not once per step.
        if self._policy is not None:
            self._columns["policy_incarnation"][self._end :] = self._policy.incarnation
            self._columns["policy_version"][self._end :] = self._policy.version
            self._columns["policy_learner_step"][self._end :] = self._learner_step
