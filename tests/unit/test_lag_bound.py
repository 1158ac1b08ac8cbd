"""The bound: what is beyond it, who pauses, how it re-bases, and what is said when nothing is within it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.lag.bound import LagBound, Starvation, require_reachable, smallest_reachable_bound

lists_of_versions = st.lists(st.integers(0, 40), min_size=1, max_size=30)


@given(
    lists_of_versions,
    st.integers(0, 50),
    st.one_of(st.none(), st.integers(0, 20)),
    st.integers(0, 40),
)
def test_rows_are_beyond_the_bound_as_counted_one_by_one(versions, newest, most, base):
    bound = LagBound(most, base)
    expected = [max(newest - max(version, base), 0) for version in versions]
    assert bound.effective_lag(np.array(versions), newest).tolist() == expected
    beyond = [most is not None and lag > most for lag in expected]
    assert bound.is_exceeded(np.array(versions), newest).tolist() == beyond
    assert [version < bound.oldest_within(newest) for version in versions] == beyond


def test_after_a_restore_older_rows_count_as_if_they_were_of_the_restored_version():
    bound = LagBound(5, base_version=100)
    versions = np.array([3, 99, 100, 101, 104])
    assert bound.effective_lag(versions, 104).tolist() == [4, 4, 4, 3, 0]
    assert not bound.is_exceeded(versions, 105).any()
    assert bound.is_exceeded(versions, 106).tolist() == [True, True, True, False, False]


def test_a_collector_acts_up_to_the_bound_and_pauses_beyond_it_with_the_way_out():
    bound = LagBound(4)
    within, beyond = bound.admit(4, 8), bound.admit(3, 8)
    assert (within.may_act, within.lag_versions, within.reason) == (True, 4, "")
    assert (beyond.may_act, beyond.lag_versions) == (False, 5)
    assert "version 3 acts, 5 behind 8" in beyond.reason
    assert "at most 4 (lag.max_lag_versions)" in beyond.reason
    assert "version 4 or a newer one is applied" in beyond.reason


def test_without_a_bound_nobody_pauses_and_nothing_starves():
    bound = LagBound(None)
    assert bound.admit(1, 1000).may_act
    assert bound.find_starvation(np.array([1]), 1000) is None


def test_a_collector_that_applied_what_it_did_not_hear_of_yet_is_not_behind():
    assert LagBound(0).admit(9, 8).lag_versions == 0


@given(lists_of_versions, st.integers(0, 60), st.integers(0, 10), st.integers(1, 40), st.booleans(), st.data())
def test_starvation_names_the_smallest_bound_that_would_work(versions, newest, most, needed, with_draws, data):
    draws = data.draw(st.lists(st.integers(0, 3), min_size=len(versions), max_size=len(versions)))
    left = np.array(draws) if with_draws else None
    weights = draws if with_draws else [1] * len(versions)

    def works(bound: int) -> bool:
        lags = [max(newest - version, 0) for version in versions]
        return sum(weight for lag, weight in zip(lags, weights, strict=True) if lag <= bound) >= needed

    found = LagBound(most).find_starvation(np.array(versions), newest, draws_needed=needed, draws_left=left)
    smallest = next((bound for bound in range(newest + 1) if works(bound)), None)
    if works(most) or smallest is None:
        assert found is None
    else:
        assert found.smallest_bound == smallest


def test_a_report_of_starvation_says_what_is_there_what_is_needed_and_what_would_do():
    found = LagBound(2).find_starvation(np.array([1, 3, 8]), 10, draws_needed=2)
    assert found is not None
    assert Starvation.read_smallest_bound(f"no batch within 0.5 s: table 'transitions': {found}") == 7
    assert Starvation.read_smallest_bound("no batch within 0.5 s: the limiter holds it back") is None
    assert str(found) == (
        "no batch can be drawn: the rows that are at most 2 versions (lag.max_lag_versions) behind 10, the newest "
        "policy version, allow 1 draws, expected at least 2; with lag.max_lag_versions=7 they would do, or wait for "
        "collectors that act with a newer policy"
    )


def test_a_bound_below_what_prefetch_or_injection_makes_is_refused_with_the_number_that_would_work():
    smallest = smallest_reachable_bound(prefetch_batches=8, publish_every_updates=2, most_injected_versions=3)
    assert smallest == 4
    assert smallest_reachable_bound(prefetch_batches=4, publish_every_updates=10, most_injected_versions=6) == 6
    for allowed in (None, 4, 5):
        require_reachable(allowed, smallest)
    with pytest.raises(ConfigError, match=r"max_lag_versions is 3: expected at least 4"):
        require_reachable(3, smallest)
