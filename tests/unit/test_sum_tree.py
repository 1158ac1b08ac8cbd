"""The sum tree draws, finds and sums as a plain list of weights would, and its sums do not drift."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chi_squared import assert_as_likely_as
from paceline.tables.sum_tree import BLOCK_BITS, GUIDED_FROM, LARGEST_WEIGHT, SMALLEST_WEIGHT, SumTree

BLOCK = 1 << BLOCK_BITS


def tree_of(weights: np.ndarray) -> SumTree:
    tree = SumTree(len(weights))
    tree.set_weights(np.arange(len(weights)), weights.astype(np.float64))
    return tree


@given(
    size=st.sampled_from([1, 15, 16, 17, BLOCK, BLOCK + 1, 5 * BLOCK - 1]),
    changes=st.lists(
        st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 9)), max_size=30),
        max_size=8,
    ),
)
def test_whole_weights_are_summed_and_found_as_in_a_plain_list(size, changes):
    tree, plain = SumTree(size), [0] * size
    for change in changes:
        slots = np.array([slot % size for slot, _ in change], np.int64)
        tree.set_weights(slots, np.array([weight for _, weight in change], np.float64))
        for slot, (_, weight) in zip(slots.tolist(), change, strict=True):
            plain[slot] = weight  # where a slot comes twice, the last counts
        assert tree.total == sum(plain)
        assert tree.weights(np.arange(size)).tolist() == plain
        before = list(itertools.accumulate(plain, initial=0))
        assert [tree.sum_before(slot) for slot in range(size)] == before[:-1]
        line = [slot for slot, weight in enumerate(plain) for _ in range(weight)]
        assert tree.find(np.arange(len(line), dtype=np.float64)).tolist() == line


@pytest.mark.parametrize("n", [GUIDED_FROM - 1, GUIDED_FROM], ids=["searched", "guided"])
@pytest.mark.parametrize(
    "kind", ["even", "skewed", "one block holds nearly all", "most blocks are empty", "spread over the whole range"]
)
def test_slots_are_drawn_in_proportion_to_their_weights(kind, n):
    random = np.random.default_rng(11)
    weights = random.random(40 * BLOCK)
    if kind == "skewed":
        weights = random.pareto(0.7, len(weights))
    elif kind == "one block holds nearly all":
        weights[17 * BLOCK : 18 * BLOCK] *= 1e6
    elif kind == "most blocks are empty":
        weights[: 39 * BLOCK] = 0
        weights[7] = 3
    elif kind == "spread over the whole range":
        weights = 10 ** random.uniform(-280, 280, len(weights))
    weights[random.random(len(weights)) < 0.3] = 0
    tree, counts = tree_of(random.random(len(weights))), np.zeros(len(weights), np.int64)
    tree.draw(random, n)
    tree.set_weights(np.arange(len(weights)), weights)
    for _ in range(300):
        counts += np.bincount(tree.draw(random, n), minlength=len(weights))
    assert_as_likely_as(counts, weights / weights.sum())


@given(st.lists(st.floats(0, 1e290), min_size=1, max_size=40), st.integers(0, 2**32))
def test_a_slot_without_weight_is_never_drawn(weights, seed):
    tree = tree_of(np.repeat(np.array(weights), 20))
    if not tree.total:
        return
    for n in (50, GUIDED_FROM):
        drawn = tree.draw(np.random.default_rng(seed), n)
        assert (tree.weights(drawn) > 0).all()


class LargestNumbers:
    """A generator whose every number is the largest below 1, or the smallest."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self, n: int) -> np.ndarray:
        return np.full(n, self.number)


@pytest.mark.parametrize("number", [0.0, np.nextafter(1, 0)])
@pytest.mark.parametrize("n", [1, GUIDED_FROM])
def test_the_ends_of_the_range_fall_on_the_first_and_the_last_slot_with_weight(number, n):
    random = np.random.default_rng(5)
    for scale in (SMALLEST_WEIGHT, 1.0, LARGEST_WEIGHT):
        for size in (3, BLOCK, 9 * BLOCK + 5):
            first = BLOCK + 20
            weights = np.zeros(first + size + 3 * BLOCK)
            weights[first : first + size] = random.uniform(1, 7 if scale < 1e290 else 1, size) * scale
            drawn = tree_of(weights).draw(LargestNumbers(number), n)
            assert set(drawn.tolist()) == {first if number == 0 else first + size - 1}


def test_sums_do_not_drift():
    random, size = np.random.default_rng(1), 20 * BLOCK
    tree = tree_of(random.random(size))
    for _ in range(2000):
        slots = random.integers(0, size, 64)
        tree.set_weights(slots, 10 ** random.uniform(-12, 12, 64))
    tree.set_weights(np.arange(size), np.full(size, 0.1))
    fresh = tree_of(np.full(size, 0.1))
    assert tree.total == fresh.total
    tree.set_weights(np.arange(size), np.zeros(size))
    assert tree.total == 0


def test_a_weight_too_small_to_be_drawn_safely_counts_as_none():
    tree = tree_of(np.array([SMALLEST_WEIGHT / 2, 0.0]))
    assert tree.total == 0
    assert tree.weights(np.array([0])).tolist() == [0]


def test_a_tree_says_how_much_memory_it_takes():
    assert SumTree(10 * BLOCK).nbytes == 10 * BLOCK * (8 + 8 + 1)
