import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RunMismatchError
from paceline.identity import PolicyIdentity, is_newer, require_same_run

identities = st.builds(PolicyIdentity, st.integers(1, 5), st.integers(1, 5))


@given(identities, identities)
def test_exactly_one_of_older_equal_and_newer_holds(one, other):
    assert [is_newer(one, other), one == other, is_newer(other, one)].count(True) == 1


@given(identities, identities, identities)
def test_newer_is_transitive(one, other, third):
    if is_newer(one, other) and is_newer(other, third):
        assert is_newer(one, third)


@given(identities, identities)
def test_incarnation_orders_before_version(one, other):
    assert (one > other) == ((one.incarnation, one.version) > (other.incarnation, other.version))


@given(st.lists(identities, min_size=1))
def test_applying_only_newer_ones_ends_at_the_newest_whatever_their_order(arrivals):
    current = None
    for candidate in arrivals:
        if is_newer(candidate, current):
            assert current is None or current < candidate
            current = candidate
    assert current == max(arrivals)


@pytest.mark.parametrize(("incarnation", "version"), [(0, 1), (1, 0), (-1, 5), (3, -2)])
def test_an_identity_below_one_is_refused(incarnation, version):
    with pytest.raises(ValueError, match=">= 1"):
        PolicyIdentity(incarnation, version)


def test_a_peer_of_another_run_is_refused_and_both_runs_are_named():
    require_same_run("mine", "mine")
    with pytest.raises(RunMismatchError, match=r"'mine'.*'theirs'"):
        require_same_run("mine", "theirs")
