"""Prioritised sampling as the learner sees it: Schaul et al. 2016, "Prioritized Experience Replay"."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PRIORITY_FLOOR = 1e-6
"""A row whose error is 0 now may surprise again later: the epsilon of section 3.3."""


def importance_weights(
    probabilities: npt.NDArray[np.float32], row_count: int, exponent: float
) -> npt.NDArray[np.float32]:
    """`[n]` (N P)^-b over their largest, of rows that one draw gives with probability P each: section 3.4.

    Args:
        probabilities: `[n]` P, above 0.
        row_count: N, rows in the table.
        exponent: b; 0 gives ones, 1 undoes the bias whole.
    """
    weights = np.power(probabilities.astype(np.float64) * row_count, -exponent)
    scaled: npt.NDArray[np.float32] = (weights / weights.max()).astype(np.float32)
    return scaled


def usable_priorities(
    errors: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """Which of the rows' errors are finite, and the priorities of those; replay refuses others.

    An update that diverged is noticed and named before the next snapshot; its priorities are not what to fail by.
    """
    usable = np.isfinite(errors)
    return usable, np.maximum(errors[usable], PRIORITY_FLOOR).astype(np.float32)
