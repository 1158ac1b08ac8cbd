"""The learner's time, as polls tell it: by the best of them, and one's own while nothing is known."""

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from paceline.collector.metrics import CollectorMetrics
from paceline.replica import LearnerClock
from paceline.rpc.wire import timestamp
from paceline.v1 import times_pb2

NOW = 1_700_000_000.0


class Pair:
    """One's own clock, and the learner's, which is ahead."""

    def __init__(self, ahead: float) -> None:
        self.now, self.ahead = NOW, ahead
        self.clock = LearnerClock(lambda: self.now)

    def poll(self, *, there: float = 0.0, held: float = 0.0, back: float = 0.0, uncertainty: float = 0.0) -> None:
        """A poll whose ways and whose stay with the learner take so long."""
        sent = self.now
        received_at = sent + there + self.ahead
        self.now = sent + there + held + back
        times = times_pb2.AnswerTimes(received_at=timestamp(received_at), answered_at=timestamp(received_at + held))
        times.uncertainty.FromNanoseconds(round(uncertainty * 1e9))
        self.clock.note_poll(sent, times, self.now)


def test_before_the_first_poll_ones_own_time_is_told_and_nothing_is_stamped():
    pair = Pair(ahead=1000)
    assert pair.clock.offset() is None
    assert pair.clock.now() == NOW
    assert pair.clock.stamp() == 0


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 1e6])
def test_the_learners_time_is_told_within_the_uncertainty_however_long_the_poll_was_held(ahead):
    pair = Pair(ahead)
    pair.poll(there=0.25, held=10, back=0.0)
    offset = pair.clock.offset()
    assert offset.seconds == pytest.approx(ahead + 0.125, abs=1e-5)
    assert 0.125 < offset.uncertainty_seconds < 0.13
    assert abs(pair.clock.now() - (pair.now + ahead)) <= offset.uncertainty_seconds
    assert pair.clock.stamp() == pair.clock.now()


def test_what_a_relay_is_uncertain_of_adds_to_what_the_round_trip_leaves():
    pair = Pair(ahead=1000)
    pair.poll(there=0.25, back=0.25, uncertainty=2.0)
    assert pair.clock.offset().uncertainty_seconds == pytest.approx(2.25, abs=1e-3)
    # A poll with a longer way and a surer answer is the better one.
    pair.poll(there=1.0, back=1.0, uncertainty=0.125)
    assert pair.clock.offset().uncertainty_seconds == pytest.approx(1.125, abs=1e-3)


@pytest.mark.parametrize("ways", [{"there": 1.0}, {"back": 1.0}])
def test_a_better_estimate_is_taken_at_once_and_a_worse_one_is_not(ways):
    pair = Pair(ahead=1000)
    pair.poll(**ways)
    assert abs(pair.clock.now() - (pair.now + 1000)) == pytest.approx(0.5, abs=1e-5)
    pair.poll()
    assert pair.clock.now() == pytest.approx(pair.now + 1000, abs=1e-5)
    pair.poll(**ways)
    assert pair.clock.now() == pytest.approx(pair.now + 1000, abs=1e-5)


def test_a_clock_that_was_set_is_noticed_and_followed_even_back():
    pair = Pair(ahead=1000)
    pair.poll(there=0.01)
    pair.clock.now()
    pair.ahead = -500
    with capture_logs() as logs:
        pair.poll(there=0.01)
    assert [line["event"] for line in logs] == ["clock_was_set"]
    assert pair.clock.now() == pytest.approx(pair.now - 500, abs=0.01)


def test_the_offset_and_its_uncertainty_are_absent_until_they_are_known_and_the_latter_grows():
    pair, registry = Pair(ahead=1000), CollectorRegistry()
    CollectorMetrics(registry, pair.clock)

    def value(thing):
        return registry.get_sample_value(f"paceline_collector_clock_{thing}_seconds")

    assert value("offset") is value("uncertainty") is None
    pair.poll(there=0.25, back=0.25)
    assert value("offset") == pytest.approx(1000, abs=1e-5)
    uncertainty = value("uncertainty")
    assert 0.25 < uncertainty < 0.26
    pair.now += 3600
    assert value("uncertainty") > uncertainty
