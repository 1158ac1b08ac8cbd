"""The ring's gather against numpy's on the same rows, with nothing between."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import numpy as np

from paceline.tables.memory import MemorySettings, TableMemory
from paceline.tables.ring import HostRows
from replay_bench.processes import Remote
from replay_bench.rounds import Extent, Figures, Moved, repeat_by_turns, take_turns
from replay_bench.workloads import BLOCK_ROWS, Columns, Workload

BATCH_ROWS = 8192
TURN_SHARE = 0.25
"""Of a turn's seconds, for each of both."""


class Gather:
    """A full table in this process."""

    def __init__(self, workload: Workload) -> None:
        settings = MemorySettings(capacity_rows=workload.ring_rows)
        store = HostRows(settings.physical_rows, workload.spec.row_bytes)
        self._memory = TableMemory(settings, workload.spec.row_bytes, rows=store)
        self._rows = store._rows  # the very same memory, without the ring around it
        self._random = np.random.default_rng(0)
        self._out = np.empty((BATCH_ROWS, workload.spec.row_bytes), np.uint8)
        block = Columns(workload.spec).pack().data
        for first_row in range(0, settings.physical_rows, BLOCK_ROWS):
            self._memory.append(first_row, block, stored_at=0.0)

    def compare(self, seconds: float) -> list[Moved]:
        """Rows of the table's uniform sample, and rows that numpy gathers, from places drawn in the same way."""

        def take() -> None:
            index = self._random.integers(0, self._memory.settings.capacity_rows, BATCH_ROWS)
            np.take(self._rows, index, axis=0, out=self._out, mode="clip")

        sample = partial(self._memory.sample, self._random, self._out)
        return repeat_by_turns(seconds, BATCH_ROWS, [sample, take])


def measure_gather(workload: Workload, extent: Extent) -> Figures:
    """Figures of one workload."""
    with ExitStack() as stack:
        gather = Remote(stack, Gather, workload).ready()

        def turn(seconds: float) -> dict[str, float]:
            sampled, taken = gather.call("compare", seconds * TURN_SHARE)
            return {
                f"{workload.name}.gather_rows_per_s": sampled.per_second,
                f"{workload.name}.numpy_take_rows_per_s": taken.per_second,
            }

        return take_turns(f"{workload.name} gather", [turn], extent)
