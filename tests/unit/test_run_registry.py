"""The run's registry: places, replacements, repeats, silence, environment steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.errors import ConflictError, InvalidInputError, ReplacedError, RunFullError
from paceline.identity import PolicyIdentity
from paceline.learner.ledger import Members
from paceline.learner.registry import COLLECTOR, EVALUATOR, RunRegistry

SILENCE_SECONDS = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


Make = Callable[..., RunRegistry]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock) -> Make:
    def registry(members: Members | None = None, max_collectors: int = 4, **settings: object) -> RunRegistry:
        values = {"warmup_steps": 100, "collector_count": 3, **settings}
        return RunRegistry(
            members or {},
            max_collectors=max_collectors,
            silence_seconds=SILENCE_SECONDS,
            clock=clock,
            **values,  # type: ignore[arg-type]
        )

    return registry


def test_collectors_get_the_lowest_free_index_and_their_share_of_the_warm_up(make: Make) -> None:
    registry = make()
    places = [registry.join(COLLECTOR, None, f"process {number}") for number in range(3)]
    assert [(place.index, place.incarnation, place.warmup_steps) for place in places] == [
        (0, 1, 34),
        (1, 1, 34),
        (2, 1, 34),
    ]


def test_a_named_index_replaces_its_holder(make: Make) -> None:
    registry = make()
    registry.join(COLLECTOR, 2, "a")
    place = registry.join(COLLECTOR, 2, "b")
    assert (place.index, place.incarnation, place.warmup_steps) == (2, 2, 0)
    with pytest.raises(ReplacedError, match="collector 2 has incarnation 2 now"):
        registry.begin_report(2, 1, 1, 0)
    assert not registry.polled(2, 1, PolicyIdentity(1, 1))


def test_a_process_that_joins_again_keeps_its_index(make: Make) -> None:
    registry = make()
    registry.join(COLLECTOR, None, "a")
    registry.join(COLLECTOR, None, "b")
    place = registry.join(COLLECTOR, None, "b")
    assert (place.index, place.incarnation) == (1, 2)


def test_processes_without_a_name_are_not_taken_for_one(make: Make) -> None:
    registry = make()
    assert [registry.join(COLLECTOR, None, "").index for _ in range(2)] == [0, 1]


def test_an_index_is_free_again_after_a_silence(make: Make, clock: Clock) -> None:
    registry = make()
    registry.join(COLLECTOR, None, "a")
    registry.join(COLLECTOR, None, "b")
    clock.now += SILENCE_SECONDS - 1
    registry.polled(1, 1, None)
    clock.now += 2
    place = registry.join(COLLECTOR, None, "c")
    assert (place.index, place.incarnation) == (0, 2)


def test_a_full_run_is_said_and_ends(make: Make, clock: Clock) -> None:
    registry = make(max_collectors=2)
    for process in "ab":
        registry.join(COLLECTOR, None, process)
    with pytest.raises(RunFullError, match=r"all 2 indices are taken: raise collector\.max_count"):
        registry.join(COLLECTOR, None, "c")
    clock.now += SILENCE_SECONDS + 1
    assert registry.join(COLLECTOR, None, "c").index == 0


@pytest.mark.parametrize("index", [-1, 4, 2**31 - 1])
def test_an_index_out_of_range_is_refused(make: Make, index: int) -> None:
    with pytest.raises(InvalidInputError, match=f"index {index}: expected 0 to 3"):
        make().join(COLLECTOR, index, "a")


def test_collectors_of_an_earlier_learner_keep_their_places_without_joining(make: Make) -> None:
    registry = make({COLLECTOR: {0: 5, 1: 2}})
    assert registry.join(COLLECTOR, None, "new").index == 2
    assert registry.polled(0, 5, PolicyIdentity(1, 9))
    assert registry.begin_report(1, 2, 40, 1000)
    assert [state.index for state in registry.alive()] == [0, 1, 2]


def test_a_place_of_an_earlier_learner_is_given_away_before_a_collector_is_turned_away(make: Make) -> None:
    registry = make({COLLECTOR: {0: 5, 1: 2}}, max_collectors=2)
    registry.polled(0, 5, None)
    place = registry.join(COLLECTOR, None, "new")
    assert (place.index, place.incarnation) == (1, 3)


def test_collectors_that_an_earlier_learner_knew_are_not_said_to_live(make: Make) -> None:
    assert make({COLLECTOR: {0: 5, 1: 2}}).alive() == []


def test_a_resumed_run_and_one_past_its_warm_up_ask_for_no_random_steps(make: Make) -> None:
    assert make(resumed=True).join(COLLECTOR, None, "a").warmup_steps == 0
    late = make()
    late.published(100)
    assert late.join(COLLECTOR, None, "a").warmup_steps == 0


def test_a_new_evaluator_replaces_the_old_one_and_takes_no_collector_index(make: Make) -> None:
    registry = make()
    first, second = (registry.join(EVALUATOR, None, process) for process in "ab")
    assert (first.index, first.incarnation, first.warmup_steps) == (0, 1, 0)
    assert (second.index, second.incarnation) == (0, 2)
    assert registry.join(COLLECTOR, None, "c").index == 0


def test_members_are_what_a_later_registry_goes_on_from(make: Make) -> None:
    registry = make()
    registry.join(COLLECTOR, 3, "a")
    registry.join(COLLECTOR, 3, "a")
    registry.join(EVALUATOR, None, "e")
    assert registry.members() == {COLLECTOR: {3: 2}, EVALUATOR: {0: 1}}
    assert make(registry.members()).join(COLLECTOR, 3, "b").incarnation == 3


def test_a_repeated_report_is_known(make: Make) -> None:
    registry = make()
    registry.join(COLLECTOR, None, "a")
    assert [registry.begin_report(0, 1, sequence, 10) for sequence in (1, 1, 2, 1, 4, 3)] == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]


def test_a_report_that_an_earlier_learner_recorded_is_known(make: Make) -> None:
    registry = make({COLLECTOR: {0: 2}})
    registry.recall_report(0, 1, 99)
    registry.recall_report(0, 2, 7)
    assert not registry.begin_report(0, 2, 7, 50)
    assert registry.begin_report(0, 2, 8, 60)


@pytest.mark.parametrize(("index", "incarnation"), [(0, 2), (1, 1), (-1, 1), (0, 0), (7, 0)])
def test_a_report_of_a_place_that_was_never_given_out_is_refused(make: Make, index: int, incarnation: int) -> None:
    registry = make()
    registry.join(COLLECTOR, 0, "a")
    with pytest.raises(ConflictError):
        registry.begin_report(index, incarnation, 1, 0)


@pytest.mark.parametrize(("sequence", "steps"), [(0, 1), (-1, 1), (1, -1)])
def test_a_report_out_of_range_is_refused(make: Make, sequence: int, steps: int) -> None:
    registry = make()
    registry.join(COLLECTOR, 0, "a")
    with pytest.raises(InvalidInputError):
        registry.begin_report(0, 1, sequence, steps)


@pytest.mark.parametrize(("index", "incarnation"), [(1, 1), (0, 2), (-5, 1), (10**6, 1)])
def test_a_poll_of_a_place_that_was_never_given_out_is_not_noted(make: Make, index: int, incarnation: int) -> None:
    registry = make()
    registry.join(COLLECTOR, 0, "a")
    assert not registry.polled(index, incarnation, PolicyIdentity(1, 1))
    assert [state.applied for state in registry.alive()] == [None]


def test_a_report_that_another_overtook_is_a_sign_of_life_and_nothing_else(make: Make, clock: Clock) -> None:
    registry = make()
    place = registry.join(COLLECTOR, 0, "a")
    registry.polled(0, place.incarnation, PolicyIdentity(1, 7), paused=False)
    clock.now += SILENCE_SECONDS - 1
    assert registry.polled(0, place.incarnation, PolicyIdentity(1, 6), paused=True)
    clock.now += SILENCE_SECONDS - 1
    [state] = registry.alive()
    assert (state.applied, state.paused) == (PolicyIdentity(1, 7), False)
    registry.polled(0, place.incarnation, PolicyIdentity(2, 3), paused=True)
    [state] = registry.alive()
    assert (state.applied, state.paused) == (PolicyIdentity(2, 3), True)


def test_an_evaluation_is_new_once(make: Make) -> None:
    registry = make()
    assert [registry.begin_evaluation(PolicyIdentity(1, version)) for version in (5, 5, 6, 5)] == [
        True,
        False,
        True,
        False,
    ]


def test_environment_steps_sum_over_collectors_and_their_incarnations(make: Make) -> None:
    registry = make(resumed_environment_steps=1000)
    registry.join(COLLECTOR, 0, "a")
    registry.join(COLLECTOR, 1, "b")
    registry.begin_report(0, 1, 1, 50)
    registry.begin_report(1, 1, 1, 30)
    registry.begin_report(0, 1, 2, 70)
    assert registry.environment_steps() == 1100
    registry.join(COLLECTOR, 0, "c")
    registry.begin_report(0, 2, 1, 5)
    assert registry.environment_steps() == 1105
    registry.published(2000)
    assert registry.environment_steps() == 2000


def test_steps_that_a_collector_took_before_the_learner_resumed_are_not_counted_again(make: Make) -> None:
    registry = make({COLLECTOR: {0: 1}}, resumed_environment_steps=1000)
    registry.begin_report(0, 1, 9, 900)
    registry.begin_report(0, 1, 10, 940)
    assert registry.environment_steps() == 1040


def test_a_collector_that_comes_back_after_a_silence_lives_again(make: Make, clock: Clock) -> None:
    registry = make()
    registry.join(COLLECTOR, None, "a")
    clock.now += SILENCE_SECONDS + 1
    assert registry.alive() == []
    assert registry.begin_report(0, 1, 1, 10)
    assert [state.index for state in registry.alive()] == [0]
    assert registry.environment_steps() == 10
