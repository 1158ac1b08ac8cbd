"""Every row has the same chance."""

import numpy as np

from paceline.tables.ring import Ring
from paceline.tables.samplers import UniformSampler


def test_every_row_of_a_ring_that_has_wrapped_is_drawn_equally_often():
    ring, rows, draws = Ring(8, 200), 200, 400_000
    for number in range(1, 58):
        first = (number - 1) * 7
        block = np.zeros((7, 8), np.uint8)
        block.view(np.int64)[:, 0] = np.arange(first, first + 7)
        ring.append(number, block)
    rows = ring.row_count
    out = np.empty((draws, 8), np.uint8)
    ring.sample(UniformSampler(seed=3).draw, out)
    drawn = out.view(np.int64)[:, 0]
    counts = np.bincount(drawn - drawn.min(), minlength=rows)
    assert drawn.min() == 57 * 7 - rows
    assert drawn.max() == 57 * 7 - 1
    expected = draws / rows
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    # Chi-squared with rows - 1 degrees of freedom has this mean and variance; five deviations either way.
    assert abs(chi_squared - (rows - 1)) < 5 * (2 * (rows - 1)) ** 0.5


def test_the_same_seed_draws_the_same_rows_and_another_seed_others():
    first, again, other = (UniformSampler(seed).draw(1000, 50) for seed in (7, 7, 8))
    assert (first == again).all()
    assert (first != other).any()


def test_draws_stay_within_the_rows():
    drawn = UniformSampler(seed=0).draw(3, 10_000)
    assert sorted(set(drawn.tolist())) == [0, 1, 2]
