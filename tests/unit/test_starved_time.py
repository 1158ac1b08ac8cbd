"""How long the bound starved the learner, and the bound under which it would not have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from paceline.learner.row_metrics import WORKABLE_SHARE, StarvedTime


class Run:
    """A run by a clock of its own."""

    def __init__(self, bound: int) -> None:
        self.now, self._registry = 1000.0, CollectorRegistry()
        self.starved = StarvedTime(self._registry, clock=lambda: self.now)
        self.starved.set_bound(bound)

    def passes(self, seconds: float, *, needed: int | None = 0) -> None:
        """Time passes: without a batch that a bound of `needed` would have given, or (0) with batches."""
        self.now += seconds
        if needed != 0:
            self.starved.add(seconds, needed)

    def value(self, thing: str) -> float | None:
        return self._registry.get_sample_value(f"paceline_learner_{thing}")


def test_a_run_that_was_never_starved_has_no_figure_but_0_seconds():
    run = Run(4)
    run.passes(100)
    assert run.value("starved_seconds_total") == 0
    assert run.value("workable_lag_versions") is None


def test_the_bound_that_works_is_the_smallest_that_leaves_less_than_a_hundredth():
    run = Run(4)
    run.passes(885)
    run.passes(80, needed=7)
    run.passes(30, needed=9)
    run.passes(5, needed=60)  # half of a hundredth: not worth a bound of 60
    assert run.value("starved_seconds_total") == 115
    assert run.value("workable_lag_versions") == 9
    run.passes(10, needed=60)
    assert run.value("workable_lag_versions") == 60


def test_a_bound_that_hardly_starves_works_already():
    run = Run(4)
    run.passes(999)
    run.passes(1, needed=50)
    assert run.value("workable_lag_versions") == 4


def test_where_it_is_not_known_what_would_do_no_bound_is_named():
    run = Run(4)
    run.passes(50)
    run.passes(50, needed=None)
    assert run.value("starved_seconds_total") == 50
    assert run.value("workable_lag_versions") is None


@pytest.mark.parametrize(("needed", "told"), [(99, 99), (100, 100), (101, 110), (1234, 1300)])
def test_a_large_bound_is_told_in_two_digits_and_never_too_small(needed, told):
    run = Run(4)
    run.passes(1, needed=needed)
    assert run.value("workable_lag_versions") == told


@given(st.integers(1, 20), st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 99)), max_size=20))
def test_under_the_bound_that_is_named_the_starved_share_is_small_and_under_a_smaller_one_it_is_not(bound, times):
    run = Run(bound)
    run.passes(10)
    for seconds, needed in times:
        run.passes(seconds, needed=needed)

    def left(under: int) -> float:
        return sum(seconds for seconds, needed in times if needed > under)

    workable, most = run.starved.find_workable_bound(), WORKABLE_SHARE * (run.now - 1000)
    if not any(needed for _, needed in times):
        assert workable is None
        return
    assert workable is not None
    assert left(workable) < most + 1e-9
    assert workable == bound or left(workable - 1) >= most - 1e-9
