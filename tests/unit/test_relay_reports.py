"""What a relay tells upstream of the collectors below it: the newest of each, once, and never too many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidInputError
from paceline.identity import PolicyIdentity
from paceline.learner.registry import COLLECTOR, RunRegistry
from paceline.relay.reports import PendingReports
from paceline.v1 import parameters_pb2 as pb


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def report(
    index: int = 0, version: int | None = 1, *, incarnation: int = 1, learner: int = 1, paused: bool = False
) -> pb.ReplicaReport:
    message = pb.ReplicaReport(collector_index=index, collector_incarnation=incarnation, paused=paused)
    if version is not None:
        message.applied.incarnation, message.applied.version = learner, version
    return message


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pending(clock: Clock) -> PendingReports:
    return PendingReports(max_collectors=8, silence_seconds=30.0, clock=clock)


def test_the_newest_report_of_each_collector_is_taken_once(pending: PendingReports) -> None:
    pending.hear([report(3, 1), report(1, 5)])
    pending.hear([report(3, 2, paused=True)])
    assert pending.take() == [report(1, 5), report(3, 2, paused=True)]
    assert pending.take() == []


def test_reports_that_did_not_arrive_are_news_again_and_give_way_to_newer_ones(pending: PendingReports) -> None:
    pending.hear([report(0, 1), report(1, 1)])
    taken = pending.take()
    pending.hear([report(1, 2)])
    pending.give_back(taken)
    assert pending.take() == [report(0, 1), report(1, 2)]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (report(0, 7), report(0, 8)),
        (report(0, None), report(0, 1)),
        (report(0, 9, learner=1), report(0, 3, learner=2)),
        (report(0, 9, incarnation=1), report(0, None, incarnation=2)),
    ],
)
def test_a_report_that_is_overtaken_changes_nothing(
    pending: PendingReports, older: pb.ReplicaReport, newer: pb.ReplicaReport
) -> None:
    pending.hear([newer])
    pending.hear([older])
    assert pending.take() == [newer]


def test_a_held_poll_is_a_sign_of_life_and_a_replaced_collectors_poll_is_none(
    pending: PendingReports, clock: Clock
) -> None:
    pending.hear([report(0, 1), report(1, 1, incarnation=2)])
    pending.take()
    clock.now += 20
    pending.hear_again(report(0, 1))
    pending.hear_again(report(1, 1, incarnation=1))
    assert pending.take() == [report(0, 1)]
    clock.now += 20
    assert pending.collector_count == 1


def test_a_silent_collector_is_forgotten_and_its_report_is_never_sent(pending: PendingReports, clock: Clock) -> None:
    pending.hear([report(0, 1)])
    taken = pending.take()
    clock.now += 31
    pending.give_back(taken)
    assert pending.take() == []
    assert pending.collector_count == 0


def test_there_are_never_more_reports_than_the_run_has_indices(pending: PendingReports) -> None:
    pending.hear([report(index) for index in range(-5, 1000)])
    assert [each.collector_index for each in pending.take()] == list(range(8))


def test_of_reports_with_a_malformed_one_none_is_kept(pending: PendingReports) -> None:
    with pytest.raises(InvalidInputError):
        pending.hear([report(0, 1), report(1, 0)])
    assert pending.take() == []


deliveries = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 20)), max_size=40)


@given(deliveries, st.randoms(use_true_random=False))
def test_on_whatever_ways_reports_go_up_the_learner_ends_with_the_newest_of_each(deliveries, random) -> None:
    """Two relays side by side below a third, polls that fail, and collectors that change between them."""
    registry = RunRegistry({}, max_collectors=3, silence_seconds=30.0, warmup_steps=0, collector_count=1)
    for index in range(3):
        for number in range(3):
            registry.join(COLLECTOR, index, f"{index}.{number}")
    leaves = [PendingReports(max_collectors=3, silence_seconds=30.0) for _ in range(2)]
    top = PendingReports(max_collectors=3, silence_seconds=30.0)
    newest: dict[int, int] = {}

    def go_up(last: bool = False) -> None:
        for leaf in leaves:
            taken = leaf.take()
            if last or random.random() < 0.7:
                top.hear(taken)
            else:
                leaf.give_back(taken)
        taken = top.take()
        if last or random.random() < 0.7:
            for each in taken:
                applied = PolicyIdentity(each.applied.incarnation, each.applied.version)
                registry.polled(each.collector_index, each.collector_incarnation, applied)
        else:
            top.give_back(taken)

    for index, incarnation, version in deliveries:
        random.choice(leaves).hear([report(index, version, incarnation=incarnation)])
        if incarnation == 3:
            newest[index] = max(newest.get(index, 0), version)
        if random.random() < 0.5:
            go_up()
    go_up(last=True)
    assert {state.index: state.applied.version for state in registry.alive() if state.applied} == newest
