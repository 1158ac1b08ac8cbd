"""The ring's gather against numpy's on the same rows, with nothing between."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from paceline.tables.memory import MemorySettings, TableMemory
from paceline.tables.ring import HostRows
from replay_bench.processes import Remote
from replay_bench.rounds import Extent, Figures, Moved, Turn, repeat_for, take_turns
from replay_bench.workloads import BLOCK_ROWS, Columns, Workload

BATCH_ROWS = 8192
TURN_SHARE = 0.25
"""Of a turn's seconds: within one process rates are steady."""


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

    def sample(self, seconds: float) -> Moved:
        """Rows of the table's uniform sample."""
        return repeat_for(seconds, BATCH_ROWS, lambda: self._memory.sample(self._random, self._out))

    def take(self, seconds: float) -> Moved:
        """Rows that numpy gathers, from places drawn in the same way."""

        def take() -> None:
            index = self._random.integers(0, self._memory.settings.capacity_rows, BATCH_ROWS)
            np.take(self._rows, index, axis=0, out=self._out, mode="clip")

        return repeat_for(seconds, BATCH_ROWS, take)


def measure_gather(workload: Workload, extent: Extent) -> Figures:
    """Figures of one workload."""
    with ExitStack() as stack:
        gather = Remote(stack, Gather, workload).ready()

        def turn(figure: str, method: str) -> Turn:
            def measure(seconds: float) -> dict[str, float]:
                moved: Moved = gather.call(method, seconds * TURN_SHARE)
                return {f"{workload.name}.{figure}": moved.per_second}

            return measure

        turns = [turn("gather_rows_per_s", "sample"), turn("numpy_take_rows_per_s", "take")]
        return take_turns(f"{workload.name} gather", turns, extent)
