"""The ring holds what a list of blocks would, and never gives a torn row."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import BlockError, NotFoundError
from paceline.tables.ring import LOCKED_AFTER, Ring

ROW_BYTES = 8


def rows_of(first: int, count: int, row_bytes: int = ROW_BYTES) -> np.ndarray:
    """Rows that are each filled with their own number, modulo 251."""
    numbers = np.arange(first, first + count) % 251
    return np.repeat(numbers.astype(np.uint8)[:, None], row_bytes, axis=1)


def every_row(row_count: int, n: int) -> np.ndarray:
    assert row_count == n
    return np.arange(n)


@given(
    capacity=st.integers(1, 40),
    gap=st.integers(0, 10),
    sizes=st.lists(st.integers(1, 50), max_size=40),
)
def test_the_ring_holds_the_newest_whole_blocks_that_fit(capacity, gap, sizes):
    ring, oracle, written = Ring(ROW_BYTES, capacity, gap), [], 0
    for number, size in enumerate(sizes, start=1):
        block = rows_of(written, size)
        if size > capacity:
            with pytest.raises(BlockError, match="at most capacity_rows"):
                ring.append(number, block)
            continue
        expected_removed = []
        while sum(len(rows) for _, rows in oracle) + size > capacity:
            expected_removed.append(oracle.pop(0)[0])
        expected_first = oracle[0][0] if oracle else None
        assert ring.first_block_after(size) == expected_first

        assert ring.append(number, block) == expected_removed
        oracle.append((number, block))
        written += size

        expected = np.concatenate([rows for _, rows in oracle])
        held = np.empty_like(expected)
        ring.sample(every_row, held)
        assert (held == expected).all()
        assert ring.row_count == len(expected)
        assert ring.block_count == len(oracle)
        assert ring.first_block == oracle[0][0]
        after = oracle[0][0]
        assert [(n, rows.tolist()) for n, rows in ring.blocks_after(after)] == [
            (n, rows.tolist()) for n, rows in oracle[1:]
        ]


def test_a_gather_that_was_overtaken_is_drawn_again():
    ring, calls = Ring(ROW_BYTES, 4, gap_rows=2), []
    ring.append(1, rows_of(0, 4))

    def draw(row_count: int, n: int) -> np.ndarray:
        calls.append(row_count)
        if len(calls) == 1:  # the chosen rows are gone and written over before they are read
            for number in range(2, 5):
                ring.append(number, rows_of(4 * (number - 1), 4))
        return np.zeros(n, np.int64)

    out = np.zeros((1, ROW_BYTES), np.uint8)
    ring.sample(draw, out)
    assert len(calls) == 2
    assert (out == 12).all()


def test_a_row_that_left_but_lies_in_the_gap_is_given_whole():
    ring, calls = Ring(ROW_BYTES, 4, gap_rows=4), []
    ring.append(1, rows_of(0, 4))

    def draw(row_count: int, n: int) -> np.ndarray:
        calls.append(row_count)
        ring.append(1 + len(calls), rows_of(4, 4))
        return np.arange(n)

    out = np.zeros((4, ROW_BYTES), np.uint8)
    ring.sample(draw, out)
    assert len(calls) == 1
    assert (out == rows_of(0, 4)).all()


def test_a_gather_that_is_always_overtaken_ends_by_holding_writers_back():
    ring, calls = Ring(ROW_BYTES, 4, gap_rows=0), []
    ring.append(1, rows_of(0, 4))

    def draw(row_count: int, n: int) -> np.ndarray:
        calls.append(row_count)
        if len(calls) <= LOCKED_AFTER:
            ring.append(1 + len(calls), rows_of(4 * len(calls), 4))
        else:
            assert ring._lock.locked()
        return np.arange(n)

    out = np.zeros((4, ROW_BYTES), np.uint8)
    ring.sample(draw, out)
    assert len(calls) == LOCKED_AFTER + 1
    assert (out == rows_of(4 * LOCKED_AFTER, 4)).all()


def test_no_row_is_torn_while_a_writer_races_samplers():
    row_bytes, block_rows = 4096, 8
    ring = Ring(row_bytes, 32, gap_rows=8)
    ring.append(1, rows_of(0, block_rows, row_bytes))
    done, problems = threading.Event(), []

    def sample(seed: int) -> None:
        random, out = np.random.default_rng(seed), np.empty((64, row_bytes), np.uint8)
        while not done.is_set():
            ring.sample(lambda row_count, n: random.integers(0, row_count, n), out)
            if not (out == out[:, :1]).all():
                problems.append(out.copy())
                return

    threads = [threading.Thread(target=sample, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for number in range(2, 3000):
        ring.append(number, rows_of(number * block_rows, block_rows, row_bytes))
    done.set()
    for thread in threads:
        thread.join(30)
    assert not problems


def test_an_empty_ring_has_nothing_to_sample():
    with pytest.raises(NotFoundError):
        Ring(ROW_BYTES, 4).sample(every_row, np.empty((1, ROW_BYTES), np.uint8))


def test_block_numbers_must_grow():
    ring = Ring(ROW_BYTES, 4)
    ring.append(5, rows_of(0, 1))
    with pytest.raises(BlockError, match="numbers must grow"):
        ring.append(5, rows_of(1, 1))
