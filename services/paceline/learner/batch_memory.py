"""The memory through which batches go from the receiving process to the training process: slots of one batch each."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.learner.anonymous_memory import create_anonymous_file
from paceline.rows import ByteMatrix

_ALIGNMENT = 64


@dataclass(frozen=True)
class Slot:
    """Room for one batch; the arrays are views of shared memory."""

    rows: ByteMatrix
    keys: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float32]
    stored_at: npt.NDArray[np.float64]


class BatchMemory:
    """`slot_count` slots. What is written in one process is seen in the other."""

    def __init__(self, descriptor: int, *, slot_count: int, batch_size: int, row_bytes: int) -> None:
        """Map the file behind `descriptor`, which this object then owns, and give it its size."""
        self.descriptor = descriptor
        row_total = _round_up(batch_size * row_bytes, _ALIGNMENT)
        sizes = [row_total, *(_round_up(batch_size * each, _ALIGNMENT) for each in (8, 4, 8))]
        slot_bytes = sum(sizes)
        os.ftruncate(descriptor, slot_count * slot_bytes)
        self._map = mmap.mmap(descriptor, slot_count * slot_bytes)

        def view(dtype: type[Any], position: int, count: int) -> npt.NDArray[Any]:
            return np.frombuffer(self._map, dtype, count, position)

        self.slots = []
        for start in range(0, slot_count * slot_bytes, slot_bytes):
            keys, probabilities, stored_at = (start + sum(sizes[:part]) for part in (1, 2, 3))
            self.slots.append(
                Slot(
                    view(np.uint8, start, batch_size * row_bytes).reshape(batch_size, row_bytes),
                    view(np.int64, keys, batch_size),
                    view(np.float32, probabilities, batch_size),
                    view(np.float64, stored_at, batch_size),
                )
            )

    @classmethod
    def create(cls, *, slot_count: int, batch_size: int, row_bytes: int) -> BatchMemory:
        """New memory."""
        return cls(
            create_anonymous_file("paceline-batches"),
            slot_count=slot_count,
            batch_size=batch_size,
            row_bytes=row_bytes,
        )

    def close(self) -> None:
        """Let go of the file. The memory is gone when both processes have, and nobody looks at a slot."""
        os.close(self.descriptor)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
