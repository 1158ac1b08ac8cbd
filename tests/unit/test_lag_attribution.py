"""The parts of a row's lag are what was published in each, and sum to the whole whatever the clocks say."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.lag.attribution import PARTS, RowTimes, attribute
from paceline.lag.clock import PeerClock
from paceline.lag.publications import Publication, Publications

UNATTRIBUTED = PARTS.index("unattributed")


def publications_at(times: dict[int, float]) -> Publications:
    publications = Publications()
    for version, time in times.items():
        publications.add(Publication(version, time, 10 * version))
    return publications


def split(publications, version, applied, sealed, stored, *, learner_version, now):
    """Parts of one row: versions and seconds."""
    rows = RowTimes(np.array([version]), np.array([applied]), np.array([sealed]), np.array([stored]))
    parts = attribute(publications, rows, learner_version=learner_version, now=now)
    return parts.versions[:, 0].tolist(), parts.seconds[:, 0].tolist()


def slow_split(published, version, applied, sealed, stored, *, learner_version, now):
    """The same, version by version and time by time, from the definition."""
    now = max(now, published.get(learner_version, now))
    way, latest = [], -math.inf
    for time in (published.get(version), applied, sealed, stored, now):
        if time is None or not time > 0:
            way.append(None)
            continue
        latest = max(min(time, now), latest)
        way.append(latest)
    versions, seconds = [0] * 5, [0.0] * 5
    for newer in range(version + 1, learner_version + 1):
        part = UNATTRIBUTED
        if newer in published:
            later = (place for place in (1, 2, 3) if way[place] is not None and published[newer] <= way[place])
            reached = next(later, 4)
            part = reached - 1 if reached == 1 or way[reached - 1] is not None else UNATTRIBUTED
        versions[part] += 1
    known = [place for place in range(5) if way[place] is not None]
    for before, after in itertools.pairwise(known):
        seconds[after - 1 if after == before + 1 else UNATTRIBUTED] += way[after] - way[before]
    return versions, seconds


@st.composite
def histories(draw):
    """Versions that were published, some of unknown time, by rising times."""
    first, count = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    time, published = 10.0, {}
    for version in range(first, first + count):
        time += draw(st.sampled_from([0.0, 0.25, 1.0, 4.0]))
        if draw(st.integers(0, 5)):
            published[version] = time
    return published, first + count - 1


times = st.one_of(st.sampled_from([0.0, math.nan, 10.0]), st.integers(30, 220).map(lambda quarter: quarter / 4))
ways = st.tuples(st.integers(0, 18), times, times, times)


@given(
    histories(),
    st.integers(0, 3),
    st.lists(ways, min_size=1, max_size=8),
    st.integers(40, 200).map(lambda quarter: quarter / 4),
)
def test_every_row_is_split_as_the_definition_says_whatever_the_clocks_show(history, back, rows, now):
    published, last_version = history
    learner_version = last_version - back
    columns = RowTimes(*(np.array(column) for column in zip(*rows, strict=True)))
    parts = attribute(publications_at(published), columns, learner_version=learner_version, now=now)
    for place, row in enumerate(rows):
        versions, seconds = slow_split(published, *row, learner_version=learner_version, now=now)
        assert parts.versions[:, place].tolist() == versions
        assert parts.seconds[:, place].tolist() == seconds  # quarters, so exactly


@given(
    histories(),
    st.lists(st.tuples(st.integers(-3, 30), *(st.floats(allow_nan=True, allow_infinity=True),) * 3), min_size=1),
    st.floats(1.0, 1e10),
)
def test_the_parts_sum_to_the_lag_and_none_is_negative_for_any_numbers_at_all(history, rows, now):
    published, learner_version = history
    columns = RowTimes(*(np.array(column) for column in zip(*rows, strict=True)))
    parts = attribute(publications_at(published), columns, learner_version=learner_version, now=now)
    assert parts.versions.sum(axis=0).tolist() == [max(learner_version - row[0], 0) for row in rows]
    assert (parts.versions >= 0).all()
    assert (parts.seconds >= 0).all()
    assert np.isfinite(parts.seconds).all()


@given(histories(), ways, st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_no_part_shrinks_as_the_learner_goes_on(history, way, steps):
    published, learner_version = history
    assume(way[0] <= learner_version)  # of a policy that is yet to come, the time it was published becomes known later
    publications, now, before = publications_at(published), max([40.0, *published.values()]), None
    for step in steps:
        parts = split(publications, *way, learner_version=learner_version, now=now)
        if before is not None:
            assert all(after >= earlier for after, earlier in zip(parts[0], before[0], strict=True))
            assert all(after >= earlier for after, earlier in zip(parts[1], before[1], strict=True))
        before, now, learner_version = parts, now + step, learner_version + 1
        publications.add(Publication(learner_version, now, 0))


# Versions 1 to 6 are published ten seconds apart: 1 at 10, 2 at 20, and so on.
EVERY_TEN = publications_at({version: 10.0 * version for version in range(1, 7)})


@pytest.mark.parametrize(
    ("way", "versions", "seconds"),
    [
        pytest.param((1, 22.0, 35.0, 52.0, 61.0), [1, 1, 2, 1, 0], [12, 13, 17, 9, 0], id="some in each part"),
        pytest.param((6, 61.0, 62.0, 63.0, 64.0), [0, 0, 0, 0, 0], [1, 1, 1, 1, 0], id="nothing newer"),
        pytest.param((1, 11.0, 12.0, 59.0, 65.0), [0, 0, 4, 1, 0], [1, 1, 47, 6, 0], id="a held queue"),
        pytest.param((1, 59.0, 59.5, 59.5, 65.0), [4, 0, 0, 1, 0], [49, 0.5, 0, 5.5, 0], id="a slow transfer"),
        pytest.param((2, 30.0, 40.0, 50.0, 60.0), [1, 1, 1, 1, 0], [10, 10, 10, 10, 0], id="published at the edges"),
        pytest.param((1, 5.0, 35.0, 25.0, 61.0), [0, 2, 0, 3, 0], [0, 25, 0, 26, 0], id="times out of order"),
        pytest.param((1, 22.0, 35.0, 500.0, 61.0), [1, 1, 3, 0, 0], [12, 13, 26, 0, 0], id="stored in the future"),
        pytest.param((1, 0.0, 35.0, 52.0, 61.0), [0, 0, 2, 1, 2], [0, 0, 17, 9, 25], id="applied at no known time"),
        pytest.param((1, 22.0, 35.0, 0.0, 61.0), [1, 1, 0, 0, 3], [12, 13, 0, 0, 26], id="stored at no known time"),
        pytest.param((1, 0.0, 0.0, 0.0, 61.0), [0, 0, 0, 0, 5], [0, 0, 0, 0, 51], id="no known time"),
    ],
)
def test_scripted_ways_give_the_numbers_worked_out_by_hand(way, versions, seconds):
    *row, now = way
    assert split(EVERY_TEN, *row, learner_version=6, now=now) == (versions, seconds)


def test_versions_of_before_a_resume_whose_times_are_unknown_are_unattributed():
    resumed = publications_at({8: 80.0, 9: 90.0})
    parts = split(resumed, 5, 81.0, 82.0, 83.0, learner_version=9, now=91.0)
    # 6 and 7 at unknown times, 8 before it was applied, 9 after it was stored; the transfer began at an unknown time.
    assert parts == ([1, 0, 0, 1, 2], [0, 1, 1, 8, 0])


def test_rows_of_several_updates_are_split_together_as_by_themselves():
    ways = [(1, 22.0, 35.0, 0.0), (1, 22.0, 35.0, 41.0), (3, 31.0, 45.0, 46.0)]
    updates = [(4, 41.0), (5, 55.0), (6, 60.0)]
    rows = RowTimes(*(np.array(column)[None, :] for column in zip(*ways, strict=True)))
    versions, nows = (np.array(column)[:, None] for column in zip(*updates, strict=True))
    together = attribute(EVERY_TEN, rows, learner_version=versions, now=nows)
    for place, (version, now) in enumerate(updates):
        alone = attribute(EVERY_TEN, rows, learner_version=version, now=now)
        np.testing.assert_array_equal(together.versions[:, place], alone.versions[:, 0])
        np.testing.assert_array_equal(together.seconds[:, place], alone.seconds[:, 0])


def test_totals_are_over_all_rows_and_unrolls_have_a_policy_for_each_step():
    rows = RowTimes(
        np.array([[1, 2], [6, 6]]), np.array([[22.0, 30.0], [61.0, 61.0]]), np.array([[35.0], [61.0]]), np.array([52.0])
    )
    parts = attribute(EVERY_TEN, rows, learner_version=6, now=61.0)
    assert parts.versions.shape == (5, 2, 2)
    assert parts.version_totals() == {"transfer": 2, "rollout": 1, "queue": 4, "residence": 2, "unattributed": 0}
    assert parts.second_totals()["transfer"] == 12 + 10 + 1 + 1


class Scripted:
    """A run in which all happens at known times: what it counts as it goes is the truth.

    The collector's clock and replay's are off; the collector learns of its own by round trips with equal ways.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.collector_offset, self.replay_offset = (self.random.randint(-4000, 4000) / 4 for _ in range(2))
        self.publications, self.version, self.now = Publications(), 0, 5000.0
        self.rows, self.truths = [], []

    def wait(self) -> None:
        """Let time pass, in which some versions are published, none at the very moment of anything else."""
        for _ in range(self.random.choice([0, 0, 1, 3])):
            self.now += 0.5
            self.version += 1
            self.publications.add(Publication(self.version, self.now, self.version))
            self.now += 0.5

    def learner_clock(self) -> PeerClock:
        clock = PeerClock()
        sent = self.now + self.collector_offset
        clock.add(sent, self.now + 0.25, sent + 0.5)
        self.now += 0.5
        return clock

    def pass_row(self) -> None:
        learner = self.learner_clock()
        version, seen = self.version, [self.version]
        applied_at, sealed_at, stored_at = 0.0, 0.0, 0.0
        for stage in ("applied", "sealed", "stored", "trained"):
            self.wait()
            seen.append(self.version)
            own = self.now + self.collector_offset
            if stage == "applied":
                applied_at = learner.offset(own).to_peer(own)
            elif stage == "sealed":
                sealed_at = learner.offset(own).to_peer(own)
            elif stage == "stored":
                stored_at = self.now + self.replay_offset
        self.rows.append((version, applied_at, sealed_at, stored_at))
        self.truths.append([after - before for before, after in itertools.pairwise(seen)] + [0])


@pytest.mark.parametrize("seed", range(20))
def test_in_a_run_of_known_delays_and_clocks_the_parts_equal_the_truth_exactly(seed):
    run = Scripted(seed)
    run.wait()
    run.publications.add(Publication(run.version + 1, run.now, 0))
    run.version += 1
    for _ in range(10):
        run.pass_row()
        version, applied, sealed, stored = run.rows[-1]
        replay = PeerClock()
        replay.add(run.now, run.now + 0.25 + run.replay_offset, run.now + 0.5)
        mapped = replay.offset(run.now).to_own(np.array([stored]))[0]
        versions, seconds = split(
            run.publications, version, applied, sealed, mapped, learner_version=run.version, now=run.now
        )
        assert versions == run.truths[-1]
        assert sum(seconds) == run.now - run.publications.times_of(np.array([version]))[0]
