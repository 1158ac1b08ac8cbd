"""Times of places: whatever was written, by blocks of any size and place, is what is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tables.stored_times import GROUP_PLACES, StoredTimes

PLACES = 5 * GROUP_PLACES + 7


@st.composite
def writes(draw):
    position = draw(st.integers(0, PLACES - 1))
    count = draw(st.integers(0, PLACES - position))
    times = draw(st.floats(0, 3) | st.lists(st.sampled_from([1.0, 2.0]), min_size=count, max_size=count))
    return position, count, np.array(times) if isinstance(times, list) else times


@given(st.lists(writes(), max_size=12))
def test_each_place_has_the_time_that_was_written_last(all_writes):
    times, expected = StoredTimes(PLACES), np.zeros(PLACES)
    times.write(0, PLACES, 0.0)
    for position, count, values in all_writes:
        times.write(position, count, values)
        expected[position : position + count] = values
        out = np.full(PLACES, -1.0)
        times.gather(np.arange(PLACES), out)
        assert out.tolist() == expected.tolist()
        assert times.read(position, count).tolist() == expected[position : position + count].tolist()


@pytest.mark.parametrize("at", [0, GROUP_PLACES + 3])
def test_places_that_a_block_shares_are_known_in_common_and_others_one_by_one(at):
    times = StoredTimes(PLACES)
    times.write(0, PLACES, 1.0)
    times.write(at, 2 * GROUP_PLACES, 2.0)
    inner = np.arange(-(-at // GROUP_PLACES) * GROUP_PLACES, (at + 2 * GROUP_PLACES) // GROUP_PLACES * GROUP_PLACES)
    times._times[:] = np.nan  # what is known in common needs none of these
    out = np.empty(len(inner))
    times.gather(inner, out)
    assert out.tolist() == [2.0] * len(inner)


@pytest.mark.parametrize("as_array", [False, True])
def test_a_block_that_comes_in_pieces_is_known_in_common_where_they_meet_within_a_group(as_array):
    times = StoredTimes(PLACES)
    for position in range(0, 3 * GROUP_PLACES, GROUP_PLACES - 5):
        times.write(position, GROUP_PLACES - 5, np.full(GROUP_PLACES - 5, 2.0) if as_array else 2.0)
    times._times[:] = np.nan
    out = np.empty(3 * GROUP_PLACES)
    times.gather(np.arange(len(out)), out)
    assert out.tolist() == [2.0] * len(out)
