"""The rows that are measured, and what a collector has before it packs a block of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.rows import Block, Column, RowSpec, transition_spec

BLOCK_ROWS = 1024
ENVIRONMENTS = 16
"""Environments that step together: the next observation of row i is the observation of row i + 16."""
EPISODE_STEPS = 250
"""Mean length of an episode; at its end the next observation is no later row's observation."""


@dataclass(frozen=True)
class Workload:
    """A row layout, and a ring of such rows that is larger than a processor's cache."""

    name: str
    spec: RowSpec
    ring_rows: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of one row without its padding."""
        return sum(column.nbytes for column in self.spec.columns)

    def smaller(self, divisor: int) -> Workload:
        """The same rows in a ring of a fraction of the size, to see that it runs."""
        return Workload(self.name, self.spec, self.ring_rows // divisor)


def _spec(observations: dict[str, int], action: int) -> RowSpec:
    return RowSpec(
        (
            *(Column(name, "float32", (size,)) for name, size in observations.items()),
            Column("action", "float32", (action,)),
            Column("reward", "float32"),
            *(Column(f"next_{name}", "float32", (size,)) for name, size in observations.items()),
            Column("policy_version", "uint32"),
            # Terminated and truncated side by side: two columns would be padded to four bytes each.
            Column("ended", "uint8", (2,)),
        )
    )


OBSERVATION_DIM, ACTION_DIM = 400, 29
"""Of the learner's rows: the humanoid again, with one observation vector."""
LEARNER = "training"
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("w1", _spec({"observation": 3}, 1), 1_000_000),  # pendulum, 40 bytes a row
        Workload("w2", _spec({"observation": 48}, 12), 500_000),  # quadruped, 448
        Workload("w3", _spec({"observation": 100, "critic_observation": 300}, 29), 200_000),  # humanoid, 3,328
        Workload(
            LEARNER,  # what collectors fill, stamps and all
            transition_spec(
                Column("observation", "float32", (OBSERVATION_DIM,)), Column("action", "float32", (ACTION_DIM,))
            ),
            100_000,
        ),
    )
}
LARGE = ("w2", "w3")
"""Workloads whose bytes are what counts; of the first it is the number of rows."""


class Columns:
    """The columns of one block, as environments and policy gave them."""

    def __init__(self, spec: RowSpec, row_count: int = BLOCK_ROWS) -> None:
        self._spec, self._row_count = spec, row_count
        random = np.random.default_rng(0)
        self.values: dict[str, npt.NDArray[Any]] = {}
        ended = random.random(row_count) < 1 / EPISODE_STEPS
        for column in spec.columns:
            shape = (row_count, *column.shape)
            if column.name.startswith("next_"):
                continue
            if column.dtype != "float32":
                self.values[column.name] = np.full(shape, column.name == "step_count", column.dtype)
            elif f"next_{column.name}" in spec:
                steps = random.standard_normal((row_count + ENVIRONMENTS, *column.shape), np.float32)
                following = steps[ENVIRONMENTS:].copy()
                following[ended] += 1
                self.values[column.name], self.values[f"next_{column.name}"] = steps[:row_count], following
            else:
                self.values[column.name] = random.standard_normal(shape, np.float32)

    def pack(self) -> Block:
        """A new block of them."""
        block = Block.empty(self._spec, self._row_count)
        columns = block.columns
        for name, values in self.values.items():
            columns[name] = values
        return block
