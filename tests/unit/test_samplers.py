"""Every sampler draws the rows that it should, as often as it should, and says with what probability."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chi_squared import assert_as_likely_as
from paceline.errors import BlockError, ConfigError, ConflictError, InvalidInputError, UnavailableError
from paceline.lag.bound import LagBound, LearnerVersion
from paceline.tables.memory import Drawn, MemorySettings, TableMemory

CAPACITY = 200
SAMPLERS = {
    "uniform": {},
    "uniform, bounded": {"max_times_sampled": 3},
    "prioritised": {"sampler": "prioritised"},
    "prioritised, bounded": {"sampler": "prioritised", "max_times_sampled": 3},
    "fifo": {"sampler": "fifo", "max_times_sampled": 3},
    "lifo": {"sampler": "lifo", "max_times_sampled": 3},
    "recent": {"sampler": "recent", "half_life_versions": 5.0},
}


def memory_of(**settings) -> TableMemory:
    return TableMemory(MemorySettings(**{"capacity_rows": CAPACITY, **settings}), 8)


def append(memory: TableMemory, count: int, *, version: int = 0, first: int | None = None) -> None:
    """Rows that hold their own keys."""
    first = memory.end_row if first is None else first
    rows = np.arange(first, first + count, dtype=np.int64).view(np.uint8).reshape(count, 8)
    memory.append(first, rows, stored_at=float(first), versions=np.full(count, version))


def draw(memory: TableMemory, n: int, seed: int = 0, policy_version: int = 0) -> Drawn:
    out = np.empty((n, 8), np.uint8)
    drawn = memory.sample(np.random.default_rng(seed), out, policy_version=policy_version, details=True)
    assert drawn is not None
    assert (out.view(np.int64)[:, 0] == drawn.keys).all()
    return drawn


def count_draws(memory: TableMemory, draws: int, seed: int = 0) -> np.ndarray:
    """How often each row was drawn, from the first that is held."""
    out = np.empty((draws, 8), np.uint8)
    assert memory.sample(np.random.default_rng(seed), out) is None
    first = memory.first_row
    return np.bincount(out.view(np.int64)[:, 0] - first, minlength=memory.end_row - first)


def fill_with_a_hole(memory: TableMemory) -> np.ndarray:
    """Blocks until the ring has wrapped, some keys missing; the keys that are held."""
    for number in range(150):
        append(memory, 7, first=7 * number + 20 * (number >= 130))
    missing = set(range(7 * 130, 7 * 130 + 20))
    keys = np.array([key for key in range(memory.first_row, memory.end_row) if key not in missing])
    assert len(keys) == memory.row_count < memory.end_row - memory.first_row
    return keys


@pytest.mark.parametrize("sampler", ["uniform", "prioritised", "recent"])
def test_rows_of_equal_weight_are_drawn_equally_often(sampler):
    memory = memory_of(**SAMPLERS[sampler])
    keys = fill_with_a_hole(memory)
    probabilities = np.zeros(memory.end_row - memory.first_row)
    probabilities[keys - memory.first_row] = 1 / len(keys)
    assert_as_likely_as(count_draws(memory, 400_000), probabilities)
    assert (draw(memory, 100).probabilities == np.float32(1 / len(keys))).all()


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 2.0])
def test_a_row_is_drawn_in_proportion_to_its_priority_to_the_exponent(exponent):
    memory = memory_of(sampler="prioritised", exponent=exponent)
    keys = fill_with_a_hole(memory)
    priorities = np.random.default_rng(4).lognormal(0, 1.5, len(keys)).astype(np.float32)
    priorities[::9] = 0
    assert memory.update_priorities(keys, priorities) == len(keys)
    weights = np.where(priorities > 0, priorities.astype(np.float64) ** exponent, 0)
    expected = np.zeros(memory.end_row - memory.first_row)
    expected[keys - memory.first_row] = weights / weights.sum()

    drawn = draw(memory, 5000)
    assert (drawn.probabilities == expected[drawn.keys - memory.first_row].astype(np.float32)).all()
    assert_as_likely_as(count_draws(memory, 400_000), expected)


def test_a_new_row_has_the_highest_priority_that_was_ever_seen():
    memory = memory_of(sampler="prioritised", exponent=1.0)
    append(memory, 4)
    memory.update_priorities(np.arange(4), np.array([1, 2, 8, 1], np.float32))
    memory.update_priorities(np.arange(4), np.array([1, 2, 4, 1], np.float32))
    append(memory, 1)
    drawn = draw(memory, 500)
    for key, priority in enumerate([1, 2, 4, 1, 8]):
        assert set(drawn.probabilities[drawn.keys == key]) == {np.float32(priority / 16)}


def test_a_first_row_has_priority_one():
    memory = memory_of(sampler="prioritised", exponent=1.0)
    append(memory, 2)
    memory.update_priorities(np.array([0]), np.array([0.25], np.float32))
    drawn = draw(memory, 200)
    assert set(drawn.probabilities[drawn.keys == 1]) == {np.float32(1 / 1.25)}


@pytest.mark.parametrize(
    ("half_life", "max_lag", "known"), [(3.0, None, 0), (None, 6, 0), (2.5, 9, 0), (2.5, 9, 45), (0.01, 9, 0)]
)
def test_a_row_is_drawn_by_its_policy_version(half_life, max_lag, known):
    memory = memory_of(sampler="recent", half_life_versions=half_life, max_lag_versions=max_lag)
    versions = {}
    for number in range(40):
        # Not in order: a collector that is late acts with an older version.
        version = number if number % 3 else max(0, number - 4)
        first = memory.end_row
        append(memory, 10, version=version)
        versions.update(dict.fromkeys(range(first, first + 10), version))
        draw(memory, 3, policy_version=known if number == 39 else 0)
    held = np.array([versions[key] for key in range(memory.first_row, memory.end_row)])
    weights = np.ones(len(held)) if half_life is None else 2.0 ** ((held - held.max()) / half_life)
    if max_lag is not None:
        weights[held < max(held.max(), known) - max_lag] = 0
    expected = weights / weights.sum()
    drawn = draw(memory, 2000)
    np.testing.assert_allclose(drawn.probabilities, expected[drawn.keys - memory.first_row], rtol=1e-6)
    assert_as_likely_as(count_draws(memory, 200_000), expected)


def test_weights_by_version_stay_right_over_a_very_long_run():
    memory = memory_of(sampler="recent", half_life_versions=1.0, capacity_rows=30)
    for version in range(0, 5000, 3):
        append(memory, 5, version=version)
    newest = memory.end_row - 1
    drawn = draw(memory, 3000)
    weights = np.repeat(2.0 ** (-3 * np.arange(6)[::-1]), 5)
    np.testing.assert_allclose(drawn.probabilities, (weights / weights.sum())[drawn.keys - (newest - 29)], rtol=1e-6)
    append(memory, 5, version=10**9)  # so far ahead that the others count for nothing
    assert set(draw(memory, 100).keys.tolist()) == set(range(newest + 1, newest + 6))


def test_rows_of_a_version_that_nobody_else_reached_leave_the_others_drawable():
    """A peer may send any version; what it sends counts no longer than its rows are there."""
    memory = memory_of(sampler="recent", half_life_versions=10.0, capacity_rows=40)
    append(memory, 10, version=1_000_000_000)
    for version in range(1, 9):
        append(memory, 10, version=version)
    weights = 2.0 ** (np.repeat(np.arange(5, 9), 10) / 10.0)
    assert_as_likely_as(count_draws(memory, 100_000), weights / weights.sum())


@pytest.mark.parametrize(
    "settings",
    [{"sampler": "recent", "half_life_versions": 1.0}, {"sampler": "prioritised", "exponent": 8.0}],
    ids=["recent", "prioritised"],
)
def test_a_row_that_weighs_next_to_nothing_has_no_draws_that_count(settings):
    memory = memory_of(**settings, max_times_sampled=1)
    append(memory, 10, version=1)
    append(memory, 10, version=1001)
    if settings["sampler"] == "prioritised":
        memory.update_priorities(np.arange(10), np.full(10, 1e-37, np.float32))
    first = draw(memory, 8).keys
    with pytest.raises(UnavailableError, match="2 draws are left"):
        draw(memory, 3)
    assert sorted([*first, *draw(memory, 2).keys]) == list(range(10, 20))
    with pytest.raises(UnavailableError, match="0 draws are left"):
        draw(memory, 1)


def test_a_lag_that_no_row_keeps_is_reported_with_the_newest_version_and_ends_when_newer_rows_come():
    memory = memory_of(sampler="recent", max_lag_versions=2)
    append(memory, 10, version=1)
    draw(memory, 5, policy_version=3)
    with pytest.raises(
        UnavailableError, match=r"at most 2 versions \(recent.* behind 4, .*max_lag_versions=3 they would"
    ):
        draw(memory, 5, policy_version=4)
    with pytest.raises(UnavailableError):
        draw(memory, 5, policy_version=0)
    append(memory, 1, version=1)
    append(memory, 1, version=2)
    assert set(draw(memory, 50).keys.tolist()) == {11}  # what was known once is not forgotten


@given(
    newest_first=st.booleans(),
    bound=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["append", "draw"]), st.integers(1, 20)), max_size=40),
    start=st.sampled_from([0, 490, 10**12 + 7]),
)
def test_rows_are_drawn_in_the_order_of_their_age(newest_first, bound, steps, start):
    memory = memory_of(sampler="lifo" if newest_first else "fifo", max_times_sampled=bound, capacity_rows=60)
    memory.set_end(start)
    left = {}  # the oracle: draws that each row has left, oldest first
    for step, count in steps:
        if step == "append":
            end = memory.end_row + count
            append(memory, count)
            left = {key: n for key, n in left.items() if key >= memory.first_row}
            left.update(dict.fromkeys(range(end - count, end), bound))
        elif count > sum(left.values()):
            with pytest.raises(UnavailableError, match=f"expected at least {count}"):
                draw(memory, count)
        else:
            line = [key for key, n in sorted(left.items(), reverse=newest_first) for _ in range(n)]
            drawn = draw(memory, count)
            assert drawn.keys.tolist() == line[:count]
            assert (drawn.probabilities == 1).all()
            for key in line[:count]:
                left[key] -= 1
            assert drawn.times_sampled.tolist() == [bound - left[key] for key in line[:count]]
        assert memory.drawable() == sum(left.values())
        assert memory.row_count == sum(n > 0 for n in left.values())


@pytest.mark.parametrize("sampler", [name for name, settings in SAMPLERS.items() if "max_times_sampled" in settings])
def test_every_row_is_given_exactly_as_often_as_it_may_be(sampler):
    memory, counts = memory_of(**SAMPLERS[sampler]), np.zeros(CAPACITY, np.int64)
    append(memory, CAPACITY)
    if "prioritised" in sampler:
        priorities = np.random.default_rng(1).pareto(0.5, CAPACITY).astype(np.float32) + np.float32(1e-6)
        memory.update_priorities(np.arange(CAPACITY), priorities)
    for seed in range(15):
        drawn = draw(memory, 40, seed)
        counts += np.bincount(drawn.keys, minlength=CAPACITY)
        assert drawn.times_sampled.tolist() == counts[drawn.keys].tolist()
        assert counts.max() <= 3
    assert (counts == 3).all()
    assert memory.drawable() == memory.row_count == 0
    with pytest.raises(UnavailableError, match="0 draws are left"):
        draw(memory, 1)
    append(memory, 5)
    assert memory.drawable() == 15


def test_a_bounded_draw_is_as_if_rows_were_drawn_one_after_the_other():
    weights, bound, n = [5.0, 2.0, 1.0], 2, 4
    chances: dict[tuple[int, ...], float] = {(): 1.0}  # the oracle: every order of draws, with its chance
    for _ in range(n):
        longer = {}
        for drawn, chance in chances.items():
            free = [w if drawn.count(key) < bound else 0 for key, w in enumerate(weights)]
            longer.update({(*drawn, key): chance * w / sum(free) for key, w in enumerate(free) if w})
        chances = longer
    orders, counts = list(chances), dict.fromkeys(chances, 0)
    memory = memory_of(sampler="prioritised", exponent=1.0, max_times_sampled=bound, capacity_rows=3)
    for seed in range(1500):
        append(memory, 3)  # those before them leave
        memory.update_priorities(memory.first_row + np.arange(3), np.array(weights, np.float32))
        counts[tuple((draw(memory, n, seed).keys - memory.first_row).tolist())] += 1
    assert_as_likely_as(np.array([counts[order] for order in orders]), np.array([chances[order] for order in orders]))


def test_unbounded_rows_are_counted_as_they_are_drawn():
    memory = memory_of(sampler="prioritised")
    append(memory, 3)
    counts = count_draws(memory, 1000)
    drawn = draw(memory, 50)
    counts += np.bincount(drawn.keys, minlength=3)
    assert drawn.times_sampled.tolist() == counts[drawn.keys].tolist()


def test_a_uniform_table_counts_the_draws_that_ask_for_details_and_forgets_rows_that_left():
    memory = memory_of(capacity_rows=4)
    append(memory, 4)
    count_draws(memory, 100)
    drawn = draw(memory, 50)
    assert drawn.times_sampled.tolist() == np.bincount(drawn.keys)[drawn.keys].tolist()
    for _ in range(4):
        append(memory, 4)
    assert draw(memory, 1).times_sampled.tolist() == [1]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_draws_the_same_rows(sampler):
    drawn = []
    for seed in (7, 7, 8):
        memory = memory_of(**SAMPLERS[sampler])
        append(memory, CAPACITY)
        drawn.append(draw(memory, 50, seed).keys.tolist())
    assert drawn[0] == drawn[1]
    assert (drawn[0] == drawn[2]) == (sampler in ("fifo", "lifo"))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_table_without_rows_has_nothing_to_draw(sampler):
    memory = memory_of(**SAMPLERS[sampler])
    with pytest.raises(UnavailableError, match="appended"):
        draw(memory, 1)
    append(memory, 5)
    memory.drop_before(5)
    with pytest.raises(UnavailableError, match="appended"):
        draw(memory, 1)


def test_a_table_whose_priorities_are_all_zero_has_nothing_to_draw_until_one_is_not():
    memory = memory_of(sampler="prioritised")
    append(memory, 5)
    memory.update_priorities(np.arange(5), np.zeros(5, np.float32))
    with pytest.raises(UnavailableError, match="each of the 5 rows has priority 0"):
        draw(memory, 1)
    memory.update_priorities(np.array([3]), np.array([1e-9], np.float32))
    assert set(draw(memory, 20).keys.tolist()) == {3}


class SmallestNumbers:
    """A generator whose every number is 0."""

    def random(self, n: int) -> np.ndarray:
        return np.zeros(n)


def test_a_probability_is_above_zero_where_float32_holds_none_as_small():
    memory = memory_of(sampler="prioritised", exponent=2.0)
    append(memory, 2)
    memory.update_priorities(np.arange(2), np.array([1e-30, 1e30], np.float32))
    drawn = memory.sample(SmallestNumbers(), np.empty((3, 8), np.uint8), details=True)
    assert drawn.keys.tolist() == [0, 0, 0]
    assert (drawn.probabilities > 0).all()


@pytest.mark.parametrize(
    ("priority", "exponent"), [(-1.0, 0.6), (np.nan, 0.6), (np.inf, 0.0), (-np.inf, 0.0), (1e38, 9.0)]
)
def test_a_priority_out_of_range_is_refused_and_none_is_set(priority, exponent):
    memory = memory_of(sampler="prioritised", exponent=exponent)
    append(memory, 3)
    before = draw(memory, 50).probabilities.tolist()
    with pytest.raises(InvalidInputError, match="at position 1: expected a finite number, 0 or more"):
        memory.update_priorities(np.arange(3), np.array([2, priority, 2], np.float32))
    assert draw(memory, 50).probabilities.tolist() == before


def test_keys_and_priorities_come_in_pairs_and_only_where_rows_have_priorities():
    memory = memory_of(sampler="prioritised")
    append(memory, 3)
    with pytest.raises(InvalidInputError, match="2 keys and 1 priorities"):
        memory.update_priorities(np.arange(2), np.ones(1, np.float32))
    with pytest.raises(ConflictError, match="'uniform': expected 'prioritised'"):
        memory_of().update_priorities(np.arange(2), np.ones(2, np.float32))


def test_keys_of_rows_that_left_or_never_were_are_passed_over_and_the_last_of_equal_keys_counts():
    memory = memory_of(sampler="prioritised", exponent=1.0, capacity_rows=20)
    for first, count in ((0, 10), (15, 5), (22, 2)):  # the first block leaves for the last
        append(memory, count, first=first)
    keys = np.array([0, 9, 12, 15, 16, 16, 19, 20, 24, -1, 15 + 512, 2**62])
    assert memory.update_priorities(keys, np.array([9, 9, 9, 2, 9, 3, 4, 9, 9, 9, 9, 9], np.float32)) == 4
    drawn = draw(memory, 1000)
    found = {int(key): float(p) for key, p in zip(drawn.keys, drawn.probabilities, strict=True)}
    priorities = {15: 2, 16: 3, 17: 1, 18: 1, 19: 4, 22: 1, 23: 1}
    assert found == pytest.approx({key: priority / 13 for key, priority in priorities.items()})


def test_rows_sampled_by_version_must_have_one():
    memory = memory_of(sampler="recent", half_life_versions=1.0)
    with pytest.raises(BlockError, match="with 0 policy versions"):
        memory.append(0, np.zeros((2, 8), np.uint8), stored_at=0.0)
    with pytest.raises(BlockError, match="with 1 policy versions"):
        memory.append(0, np.zeros((2, 8), np.uint8), stored_at=0.0, versions=np.zeros(1, np.int64))
    assert memory.end_row == 0


@pytest.mark.parametrize("sampler", ["fifo", "lifo", "newest"])
def test_a_sampler_that_is_unknown_or_would_draw_one_row_for_ever_is_refused(sampler):
    with pytest.raises(ConfigError, match=f"sampler is '{sampler}' with max_times_sampled None"):
        memory_of(sampler=sampler)


def test_a_uniform_table_under_a_bound_draws_uniformly_among_the_rows_within_it():
    settings = MemorySettings(1000, max_times_sampled=None, half_life_versions=3.0).bounded(2)
    memory = TableMemory(settings, 8)
    for version in range(1, 9):
        append(memory, 10, version=version)
    assert memory.settings.half_life_versions is None  # a setting of the recent sampler alone
    keys = draw(memory, 3000, policy_version=9).keys
    assert_as_likely_as(np.bincount(keys, minlength=80), np.where(np.arange(80) < 60, 0, 1 / 20))
    assert memory.within_bound(9) == 20
    assert memory.within_bound(10) == 10


@pytest.mark.parametrize("each", [1, 2, 20, 100])
def test_rows_within_the_bound_are_drawn_equally_often_however_few_they_are(each):
    memory = memory_of(sampler="recent", max_lag_versions=2, capacity_rows=1000)
    within = np.zeros(1000)
    for number in range(100):
        append(memory, 10, version=9 if number % each == 0 else 1)
        within[10 * number : 10 * number + 10] = number % each == 0
    assert_as_likely_as(count_draws(memory, 200_000), within / within.sum())
    assert memory.within_bound(0) == within.sum()


def test_a_version_below_zero_which_a_peer_may_send_is_drawn_as_the_oldest():
    memory = memory_of(sampler="recent", max_lag_versions=2)
    for version in (-1, -7, 0):
        append(memory, 10, version=version)
    drawn = draw(memory, 300)
    assert set(drawn.keys.tolist()) == set(range(30))
    assert set(drawn.probabilities.tolist()) == {np.float32(1 / 30)}
    append(memory, CAPACITY, version=1)  # those before it leave
    assert memory.within_bound(0) == CAPACITY


@pytest.mark.parametrize(("own", "of_run", "smaller"), [(None, 5, 5), (3, 5, 3), (7, 5, 5), (3, None, 3)])
def test_the_smaller_of_both_bounds_holds(own, of_run, smaller):
    settings = MemorySettings(1000, sampler="recent", max_lag_versions=own, half_life_versions=2.0).bounded(of_run)
    assert (settings.max_lag_versions, settings.half_life_versions) == (smaller, 2.0)


@pytest.mark.parametrize("sampler", ["prioritised", "fifo"])
def test_draws_by_priority_or_age_know_no_bound(sampler):
    settings = MemorySettings(1000, sampler=sampler, max_times_sampled=1)
    assert settings.bounded(3) == settings


def test_rows_of_before_a_restore_count_as_if_they_were_of_its_version():
    memory = TableMemory(MemorySettings(1000).bounded(2), 8, base_version=50)
    append(memory, 10, version=3)
    append(memory, 10, version=50)
    assert set(draw(memory, 500, policy_version=52).keys.tolist()) == set(range(20))
    append(memory, 10, version=51)
    assert set(draw(memory, 500, policy_version=53).keys.tolist()) == set(range(20, 30))
    assert memory.find_starvation(1, 53) is None
    assert memory.find_starvation(1, 60).smallest_bound == 9


@given(
    most=st.integers(0, 6),
    limited=st.booleans(),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("rows"), st.lists(st.integers(0, 40), min_size=1, max_size=8)),
            st.tuples(st.just("says"), st.integers(0, 3), st.integers(0, 40), st.integers(0, 40)),
        ),
        min_size=1,
        max_size=30,
    ),
)
def test_the_bound_counts_from_what_the_newest_incarnation_of_the_learner_says(most, limited, steps):
    memory = memory_of(
        sampler="recent",
        max_lag_versions=most,
        capacity_rows=2000,
        max_times_sampled=1000 if limited else None,
    )
    versions: list[int] = []
    said: dict[int, int] = {}  # the newest version by incarnation
    bases: dict[int, int] = {}
    for step in steps:
        version: int = 0
        if step[0] == "rows":
            for number in step[1]:
                append(memory, 1, version=number)
            versions += step[1]
        else:
            _, incarnation, number, base = step
            bases.setdefault(incarnation, base if incarnation else 0)
            version = LearnerVersion(number, incarnation=incarnation, base_version=bases[incarnation])
            if number:
                said[incarnation] = max(said.get(incarnation, 0), number)
        starvation = memory.find_starvation(1, version)
        if not versions:
            continue
        speaker = max(said, default=0)
        newest = said.get(speaker, max(versions))
        bound = LagBound(most, bases.get(speaker, 0))
        within = ~bound.is_exceeded(np.array(versions), newest)
        assert (starvation is None) == within.any()
        if starvation is not None:
            continue
        keys = draw(memory, 1, policy_version=version).keys
        assert within[keys].all()
        if memory.settings.max_times_sampled is None:
            assert memory.within_bound(0) == np.count_nonzero(within)
            np.testing.assert_allclose(draw(memory, 3).probabilities, 1 / np.count_nonzero(within), rtol=1e-6)


def test_a_learner_that_was_restored_counts_anew_and_the_one_before_counts_no_longer():
    memory = memory_of(sampler="recent", max_lag_versions=2)
    for version in (3, 50, 58, 60):
        append(memory, 10, version=version)
    before = LearnerVersion(60, incarnation=1)
    assert set(draw(memory, 500, policy_version=before).keys.tolist()) == set(range(20, 40))
    # Restored from a backup of the run: rows of versions that it has not published yet do not lag, nor do older ones.
    restored = LearnerVersion(42, incarnation=2, base_version=40)
    assert set(draw(memory, 500, policy_version=restored).keys.tolist()) == set(range(40))
    assert set(draw(memory, 500, policy_version=before).keys.tolist()) == set(range(40))
    assert set(draw(memory, 500, policy_version=99).keys.tolist()) == set(range(40))
    assert set(draw(memory, 500, policy_version=restored.raised_to(43)).keys.tolist()) == set(range(10, 40))


def test_a_version_that_is_said_counts_for_more_than_that_of_a_row():
    memory = memory_of(sampler="recent", max_lag_versions=2)
    for version in (6, 9):
        append(memory, 10, version=version)
    assert set(draw(memory, 300).keys.tolist()) == set(range(10, 20))  # nobody said any
    assert set(draw(memory, 300, policy_version=8).keys.tolist()) == set(range(20))
    append(memory, 10, version=30)
    assert set(draw(memory, 300).keys.tolist()) == set(range(30))


def test_starvation_by_the_bound_is_told_from_a_lack_of_draws():
    memory = memory_of(sampler="recent", max_lag_versions=2, max_times_sampled=2)
    append(memory, 3, version=1)
    assert memory.find_starvation(7, 1) is None  # there are six draws, whatever the bound
    append(memory, 2, version=9)
    found = memory.find_starvation(5, 9)
    assert (found.draws_within, found.draws_needed, found.smallest_bound) == (4, 5, 8)
    assert memory.find_starvation(4, 9) is None
