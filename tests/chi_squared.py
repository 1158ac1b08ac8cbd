"""How far counts of draws may stray from what is expected of them."""

from __future__ import annotations

import numpy as np


def assert_as_likely_as(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's chi-squared test, with the rows that are hardly ever drawn taken together."""
    draws = counts.sum()
    assert not counts[probabilities == 0].any()
    often = probabilities * draws >= 10
    observed, expected = counts[often], probabilities[often] * draws
    rest = draws - expected.sum()
    if rest >= 10:
        observed, expected = np.append(observed, counts[~often].sum()), np.append(expected, rest)
    chi_squared, freedom = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    # Its mean is its degrees of freedom, its variance twice as much; five deviations either way.
    assert abs(chi_squared - freedom) < 5 * (2 * freedom) ** 0.5, (chi_squared, freedom)
