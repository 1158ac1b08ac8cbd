"""A peer's clock is known to half a round trip, whatever the ways took; a clock that is set is noticed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.lag.clock import DRIFT, RESOLUTION_SECONDS, ClockOffset, PeerClock

seconds = st.floats(0, 20)


def peer_time(true_time: float, offset: float, drift: float) -> float:
    return true_time + offset + drift * true_time


@given(
    offset=st.floats(-1e5, 1e5),
    drift=st.floats(-DRIFT, DRIFT),
    trips=st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=1, max_size=20),
    later=st.floats(0, 1000),
    window=st.integers(1, 8),
)
def test_the_true_offset_is_within_the_uncertainty_whatever_ways_holds_and_drift_are(
    offset, drift, trips, later, window
):
    clock, now = PeerClock(window=window), 0.0
    for pause, there, held, back in trips:
        sent = now + pause
        arrived, answered = sent + there, sent + there + held
        now = answered + back
        held_by_peer = peer_time(answered, offset, drift) - peer_time(arrived, offset, drift)
        assert not clock.add(sent, peer_time(answered, offset, drift), now, held_seconds=max(held_by_peer, 0.0))
    for moment in (now, now + later):
        estimate = clock.offset(moment)
        truth = peer_time(moment, offset, drift) - moment
        assert abs(estimate.seconds - truth) <= estimate.uncertainty_seconds + 1e-9


@given(
    offsets=st.lists(st.floats(-1e5, 1e5), min_size=2, max_size=4),
    drifts=st.lists(st.floats(-DRIFT / 2, DRIFT / 2), min_size=4, max_size=4),
    trips=st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=4, max_size=20),
    later=st.floats(0, 1000),
)
def test_the_true_offset_is_within_what_is_uncertain_on_all_of_the_way_through_relays(offsets, drifts, trips, later):
    """Each relay tells the clock of the first peer as it estimates it, and the last caller takes that for the truth."""

    def time_at(place, true_time):
        return true_time + offsets[place] + drifts[place] * true_time

    def told_by(place, true_time):
        """The first one's time and its uncertainty, as a place tells it; None while it does not know."""
        own = time_at(place, true_time)
        if place == 0:
            return own, 0.0
        estimate = clocks[place].offset(own)
        return None if estimate is None else (estimate.to_peer(own), estimate.uncertainty_seconds)

    last, now = len(offsets) - 1, 0.0
    clocks = {place: PeerClock(window=4) for place in range(1, last + 1)}
    for number, (pause, there, held, back) in enumerate(trips):
        place = number % last + 1
        sent = now + pause
        arrived, answered = sent + there, sent + there + held
        now = answered + back
        if (told := told_by(place - 1, answered)) is not None:
            clocks[place].add(
                time_at(place, sent),
                told[0],
                time_at(place, now),
                held_seconds=max(time_at(place - 1, answered) - time_at(place - 1, arrived), 0.0),
                peer_uncertainty_seconds=told[1],
            )
    for moment in (now, now + later):
        told = told_by(last, moment)
        assert told is not None
        assert abs(told[0] - time_at(0, moment)) <= told[1] + 1e-9


@pytest.mark.parametrize("uncertainty", [-1.0, float("nan"), float("inf")])
def test_a_round_trip_whose_uncertainty_cannot_be_is_passed_over(uncertainty):
    clock = PeerClock()
    clock.add(100.0, 160.25, 100.5, peer_uncertainty_seconds=uncertainty)
    assert clock.offset(101.0) is None


def test_nothing_is_known_before_the_first_round_trip():
    assert PeerClock().offset(100.0) is None


def test_equal_ways_give_the_exact_offset_and_half_a_round_trip_of_uncertainty():
    clock = PeerClock()
    clock.add(100.0, 160.25, 100.5)
    estimate = clock.offset(100.0)
    assert estimate == ClockOffset(60.0, 0.25 + RESOLUTION_SECONDS)
    assert estimate.to_peer(200.0) == 260.0
    assert estimate.to_own(np.array([260.0, 0.0, 61.0])).tolist() == [200.0, 0.0, 1.0]


def test_the_time_that_a_poll_was_held_adds_nothing_to_the_uncertainty():
    clock = PeerClock(drift=0.0)
    clock.add(100.0, 169.5, 110.0, held_seconds=9.0)
    assert clock.offset(110.0) == ClockOffset(60.0, 0.5 + RESOLUTION_SECONDS)


def test_the_shortest_round_trip_of_the_window_is_used_until_it_leaves():
    clock = PeerClock(window=3, drift=0.0)
    clock.add(10.0, 10.3, 11.0)
    clock.add(20.0, 20.05, 20.1)  # the best, off by 0
    clock.add(30.0, 30.8, 31.0)
    assert clock.offset(31.0).uncertainty_seconds == pytest.approx(0.05, abs=1e-5)
    clock.add(40.0, 40.6, 41.0)
    assert clock.offset(41.0).uncertainty_seconds == pytest.approx(0.05, abs=1e-5)
    clock.add(50.0, 50.6, 51.0)
    assert clock.offset(51.0).uncertainty_seconds == pytest.approx(0.5, abs=1e-5)


def test_the_uncertainty_grows_with_age_until_a_later_worse_round_trip_is_better():
    clock = PeerClock(drift=0.01)
    clock.add(0.0, 5.0, 0.0)
    assert clock.offset(100.0).uncertainty_seconds == pytest.approx(1.0, abs=1e-5)
    clock.add(100.0, 105.5, 101.0)
    assert clock.offset(100.0).uncertainty_seconds == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_was_set_makes_earlier_round_trips_count_no_more(jump):
    clock = PeerClock()
    assert not clock.add(100.0, 100.05, 100.1)
    assert clock.add(110.0, 110.25 + jump, 110.5)
    assert clock.offset(110.5).seconds == pytest.approx(jump)


@pytest.mark.parametrize(
    ("sent", "peer", "received", "held"),
    [(10.0, 10.0, 9.0, 0.0), (10.0, 10.0, 11.0, 2.0), (10.0, 10.0, 11.0, -1.0), (10.0, float("nan"), 11.0, 0.0)],
)
def test_a_round_trip_that_cannot_be_is_passed_over(sent, peer, received, held):
    clock = PeerClock()
    assert not clock.add(sent, peer, received, held_seconds=held)
    assert clock.offset(11.0) is None
