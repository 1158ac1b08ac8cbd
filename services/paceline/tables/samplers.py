"""Which rows a batch holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class UniformSampler:
    """Draws every row with the same probability, with replacement. One per stream, seeded once; not shared."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = np.random.default_rng(seed)

    def draw(self, row_count: int, n: int) -> npt.NDArray[np.int64]:
        """`[n]` offsets in 0 to row_count - 1."""
        return self._random.integers(0, row_count, n)
