"""Publications answer when a version appeared and how many had by then; a resumed learner finds them again."""

import bisect
import json
import math
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.lag.publications import Publication, PublicationLog, Publications

gaps = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 5]), st.sampled_from([0.0, 0.5, 3.0, -1.0])), max_size=30)


def made(steps) -> list[Publication]:
    version, time, publications = 0, 100.0, []
    for number, (versions, seconds) in enumerate(steps):
        version, time = version + versions, time + seconds
        publications.append(Publication(version, time, 10 * number))
    return publications


def noted(*entries: Publication, kept: int = 100) -> Publications:
    publications = Publications(kept)
    for entry in entries:
        publications.add(entry)
    return publications


def slow_seconds_behind(held: list[Publication], version: int, now: float) -> float:
    if not held or version + 1 < held[0].version:
        return math.nan
    newer = [entry.published_at for entry in held if entry.version > version]
    return max(now - newer[0], 0.0) if newer else 0.0


def found(path, kept: int = 100) -> list[Publication]:
    with closing(PublicationLog(path, kept)) as log:
        return list(log.publications)


@given(gaps, st.lists(st.integers(-1, 70), min_size=1), st.integers(1, 8))
def test_every_lookup_agrees_with_a_search_one_by_one(steps, versions, kept):
    entries = made(steps)
    publications = noted(*entries, kept=kept)
    assert len(entries) <= 2 * kept or kept <= len(publications) <= 2 * kept
    held = list(publications)
    assert [entry.version for entry in held] == [entry.version for entry in entries[len(entries) - len(held) :]]
    times = [entry.published_at for entry in held]
    assert times == sorted(times)
    asked = np.array(versions)
    known = {entry.version: entry for entry in held}
    assert publications.count_to(asked).tolist() == [sum(entry.version <= v for entry in held) for v in versions]
    moments = np.array([98.0 + v / 2 for v in versions])
    expected = [bisect.bisect_right(times, moment) for moment in moments.tolist()]
    for at_least in (0, 3):
        begun = np.full(len(versions), min(at_least, len(held)))
        assert publications.count_until(moments, begun).tolist() == np.maximum(expected, begun).tolist()
    expected = [known[v].published_at if v in known else math.nan for v in versions]
    np.testing.assert_array_equal(publications.times_of(asked), expected)
    behind = [slow_seconds_behind(held, version, 200.0) for version in versions]
    np.testing.assert_array_equal(publications.seconds_behind(asked, 200.0), behind)


def test_what_is_published_at_a_time_counts_as_published_until_then():
    publications = noted(Publication(1, 10.0, 0), Publication(2, 20.0, 10), Publication(3, 20.0, 20))
    nothing = np.zeros(1, np.int64)
    assert publications.count_until(np.array([10.0]), nothing).tolist() == [1]
    assert publications.count_until(np.array([20.0]), nothing).tolist() == [3]


def test_updates_between_versions_are_known_where_both_are_and_never_negative():
    publications = noted(Publication(3, 1.0, 30), Publication(4, 2.0, 40), Publication(5, 3.0, 20))
    np.testing.assert_array_equal(publications.updates_between(np.array([2, 3, 4, 5]), 4), [np.nan, 10, 0, 20])
    np.testing.assert_array_equal(publications.updates_between(np.array([4, 5]), 5), [0, 0])
    np.testing.assert_array_equal(publications.updates_between(np.array([3, 4]), 6), [np.nan, np.nan])


def test_a_time_before_the_last_counts_as_the_last():
    publications = noted(Publication(1, 50.0, 0), Publication(2, 40.0, 10))
    assert publications.newest == Publication(2, 50.0, 10)


def test_a_version_that_comes_again_was_never_served_and_replaces_all_from_it_on():
    entries = [Publication(1, 1.0, 0), Publication(2, 2.0, 5), Publication(3, 3.0, 10), Publication(2, 9.0, 5)]
    assert list(noted(*entries)) == [entries[0], entries[3]]


def test_a_resumed_learner_finds_what_was_published_before(tmp_path):
    path = tmp_path / "learner" / "publications.jsonl"
    with closing(PublicationLog(path)) as first:
        first.append(Publication(1, 10.5, 0))
        first.append(Publication(2, 11.25, 10))
        # Not closed yet: a learner that is killed closes nothing.
        with closing(PublicationLog(path)) as again:
            assert list(again.publications) == [Publication(1, 10.5, 0), Publication(2, 11.25, 10)]
            again.append(Publication(3, 99.0, 10))
    assert [entry.version for entry in found(path)] == [1, 2, 3]


def test_damaged_lines_are_left_out_and_counted_and_a_torn_one_is_cut_off(tmp_path):
    path = tmp_path / "publications.jsonl"
    good = '{"version": 7, "published_at": 1.5, "learner_step": 70}'
    bad = ["nonsense", '{"version": "8"}', '{"version": 8, "published_at": NaN, "learner_step": 1}']
    path.write_text("\n".join([bad[0], good, *bad[1:], '{"version": 9, "publ']))
    log = PublicationLog(path)
    assert (list(log.publications), log.damaged_lines) == ([Publication(7, 1.5, 70)], 4)
    log.append(Publication(8, 2.0, 80))
    log.close()
    assert json.loads(path.read_text().splitlines()[-1]) == {"version": 8, "published_at": 2.0, "learner_step": 80}


@pytest.mark.parametrize("lives", [1, 40])
def test_the_file_stays_bounded_however_often_the_learner_starts_again_and_keeps_the_newest(tmp_path, lives):
    path, version = tmp_path / "publications.jsonl", 0
    for _ in range(lives):
        with closing(PublicationLog(path, kept=10)) as log:
            for _ in range(200 // lives):
                version += 1
                log.append(Publication(version, float(version), version))
                assert len(path.read_text().splitlines()) <= 30
    versions = [entry.version for entry in found(path, kept=10)]
    assert versions == list(range(versions[0], 201))
    assert len(versions) >= 10


@pytest.mark.parametrize("versions", [[], [5]])
def test_an_empty_memory_knows_nothing(versions):
    publications = Publications()
    asked = np.array(versions, np.int64)
    assert publications.newest is None
    assert np.isnan(publications.times_of(asked)).all()
    assert np.isnan(publications.seconds_behind(asked, 1.0)).all()
    assert publications.count_to(asked).tolist() == [0] * len(versions)
