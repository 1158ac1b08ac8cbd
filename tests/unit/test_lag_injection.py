"""A lag that is injected is held exactly, and a trace brings it back."""

from collections import Counter

import numpy as np
import pytest

from paceline.errors import ConfigError, InvalidInputError, NotFoundError
from paceline.lag.injection import Injector, make_injector
from paceline.lag.trace import Application, TraceWriter, read_trace, trace_path


def act(injector: Injector, known_versions: list[int], steps_each: int = 10) -> list[tuple[int, int, int]]:
    """(environment steps, known, applied) of each application, by a collector that keeps what is still wanted."""
    held: list[int] = []
    applied, steps, applications = None, 0, []
    for known in known_versions:
        if known not in held:
            held.append(known)
        while True:
            version = injector.next_version(held, known_version=known, applied_version=applied, environment_steps=steps)
            if version is None:
                break
            assert applied is None or version > applied
            applied = version
            applications.append((steps, known, version))
        oldest = injector.oldest_wanted(held, known)
        held = [version for version in held if version >= oldest]
        assert len(held) <= injector.most_versions + 1
        steps += steps_each
    return applications


def make(mode: str, **settings) -> Injector:
    injector = make_injector(mode, collector=0, seed=1, **settings)
    assert injector is not None
    return injector


def test_none_injects_nothing():
    assert make_injector("none", collector=0, seed=0) is None


def test_a_fixed_lag_is_held_from_when_there_are_versions_so_far_back():
    applications = act(make("fixed", versions=3), list(range(1, 9)))
    assert [(known, applied) for _, known, applied in applications] == [(1, 1), (5, 2), (6, 3), (7, 4), (8, 5)]


def test_a_fixed_lag_of_zero_is_what_happens_without():
    applications = act(make("fixed", versions=0), [1, 2, 2, 5, 6])
    assert [applied for _, _, applied in applications] == [1, 2, 5, 6]


def test_where_versions_were_missed_the_next_older_one_acts():
    injector = make("fixed", versions=2)
    choice = injector.next_version([1, 4, 9, 10], known_version=10, applied_version=1, environment_steps=0)
    assert choice == 4


def test_nothing_is_chosen_while_nothing_is_held():
    assert (
        make("fixed", versions=2).next_version([], known_version=3, applied_version=None, environment_steps=0) is None
    )


def test_each_application_of_a_distribution_begins_with_a_lag_drawn_by_the_weights():
    weights = {0: 1.0, 2: 2.0, 7: 1.0, 9: 0.0}
    injector = make("distribution", weights=weights)
    assert injector.most_versions == 7
    applications = act(injector, list(range(1, 4001)))
    lags = Counter(known - applied for _, known, applied in applications[10:])
    count = sum(lags.values())
    assert set(lags) == {0, 2, 7}
    # Binomial: five deviations either way.
    for lag, share in ((0, 0.25), (2, 0.5), (7, 0.25)):
        assert abs(lags[lag] - share * count) < 5 * (share * (1 - share) * count) ** 0.5
    known = [known for _, known, _ in applications]
    assert len(set(known)) == len(known)


def test_draws_repeat_with_the_seed_and_differ_between_collectors():
    def applied(collector: int) -> list[tuple[int, int, int]]:
        injector = make_injector("distribution", weights={0: 1, 5: 1}, collector=collector, seed=3)
        assert injector is not None
        return act(injector, list(range(1, 200)))

    assert applied(0) == applied(0)
    assert applied(0) != applied(1)


@pytest.mark.parametrize(
    ("mode", "settings"), [("fixed", {"versions": 4}), ("distribution", {"weights": {0: 1, 6: 1}})]
)
def test_a_recorded_run_is_repeated_exactly_by_one_of_the_same_pace(tmp_path, mode, settings):
    known_versions = list(range(1, 100))
    recorded = act(make(mode, **settings), known_versions)
    writer = TraceWriter.open(tmp_path, 0)
    for steps, known, applied in recorded:
        writer.write(environment_steps=steps, known_version=known, applied_version=applied)
    writer.close()
    repeated = act(make("trace", trace=tmp_path), known_versions)
    assert repeated[: len(recorded)] == recorded  # after its last line the trace says nothing of lags to come


def test_a_trace_brings_back_lags_and_not_versions_so_that_a_faster_run_has_them_too(tmp_path):
    writer = TraceWriter.open(tmp_path, 0)
    for steps, known, applied in [(0, 1, 1), (20, 3, 1), (50, 6, 5)]:
        writer.write(environment_steps=steps, known_version=known, applied_version=applied)
    writer.close()
    applications = act(make("trace", trace=tmp_path), [2, 4, 6, 8, 10, 12, 14, 16])
    # From 20 steps on 2 behind, once; from 50 on, the last line, always 1 behind: versions 11 and so on were missed.
    assert applications == [(0, 2, 2), (20, 6, 4), (50, 12, 10), (60, 14, 12), (70, 16, 14)]


def test_a_collector_that_starts_again_goes_on_counting_steps_in_its_trace(tmp_path):
    first = TraceWriter.open(tmp_path, 4)
    first.write(environment_steps=0, known_version=1, applied_version=1)
    first.write(environment_steps=300, known_version=5, applied_version=4)
    with trace_path(tmp_path, 4).open("a") as file:
        file.write('{"collector": 4, "environ')  # killed within a line
    assert len(read_trace(tmp_path, 4)) == 2
    second = TraceWriter.open(tmp_path, 4)
    second.write(environment_steps=50, known_version=9, applied_version=9)
    second.close()
    first.close()
    assert read_trace(tmp_path, 4)[1:] == [Application(4, 300, 5, 4), Application(4, 350, 9, 9)]


def test_one_file_holds_for_every_collector(tmp_path):
    writer = TraceWriter.open(tmp_path, 2)
    writer.write(environment_steps=0, known_version=3, applied_version=1)
    writer.close()
    assert read_trace(trace_path(tmp_path, 2), 7) == [Application(2, 0, 3, 1)]
    with pytest.raises(NotFoundError, match=r"collector-7\.jsonl in it, and it has those of collectors \[2\]"):
        read_trace(tmp_path, 7)
    with pytest.raises(NotFoundError, match=r"lag\.record=true"):
        read_trace(tmp_path / "nothing", 7)


GOOD = '{"collector": 0, "environment_steps": 40, "known_version": 3, "applied_version": 1}\n'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "torn {",
        "nonsense\n" + GOOD,
        GOOD.replace("3", "0") + GOOD,
        GOOD.replace("40", "-1") + GOOD,
        GOOD.replace("40", "4.5") + GOOD,
        GOOD + GOOD.replace("40", "20"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=r"line \d|no application"):
        read_trace(path, 0)


@pytest.mark.parametrize(
    ("mode", "settings", "named"),
    [
        ("fixed", {"versions": -1}, "versions is -1"),
        ("distribution", {}, "weight of at least one lag"),
        ("distribution", {"weights": {3: 0.0}}, "weight of at least one lag"),
        ("distribution", {"weights": {-3: 1.0}}, "0 or more"),
        ("distribution", {"weights": {3: float("nan")}}, "0 or more"),
        ("trace", {}, "trace is not set"),
    ],
)
def test_settings_that_make_no_sense_are_refused(mode, settings, named):
    with pytest.raises(ConfigError, match=named):
        make(mode, **settings)


def test_the_oldest_snapshot_that_may_still_be_wanted_is_kept():
    injector = make("fixed", versions=3)
    assert injector.oldest_wanted([2, 4, 9], 9) == 4
    assert injector.oldest_wanted([8, 9], 9) == 8
    assert injector.oldest_wanted([], 9) == 9
    assert np.all([injector.oldest_wanted(list(range(1, k + 1)), k) == max(k - 3, 1) for k in range(1, 20)])
