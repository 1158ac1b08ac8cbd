"""The ring holds what a list of blocks would, and never gives a torn row, or one that it does not hold."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import BlockError
from paceline.tables.ring import LOCKED_AFTER, HostRows, Ring
from paceline.tables.stored_times import StoredTimes

ROW_BYTES = 8


def rows_of(first: int, count: int, row_bytes: int = ROW_BYTES) -> np.ndarray:
    """Rows that are each filled with their own key, modulo 251."""
    keys = np.arange(first, first + count) % 251
    return np.repeat(keys.astype(np.uint8)[:, None], row_bytes, axis=1)


def ring_of(capacity: int, gap: int, row_bytes: int = ROW_BYTES, **arguments) -> Ring:
    return Ring(HostRows(capacity + gap, row_bytes), capacity + gap, capacity, **arguments)


def append(ring: Ring, first: int, count: int, row_bytes: int = ROW_BYTES) -> None:
    times = np.arange(first, first + count, dtype=np.float64)
    ring.append(first, rows_of(first, count, row_bytes), stored_at=times)


class PlainRing:
    """Blocks as lists of keys."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.blocks, self.end, self.left = capacity, [], 0, []

    @property
    def keys(self) -> list[int]:
        return [key for block in self.blocks for key in block]

    def leave(self, blocks: list[list[int]]) -> None:
        before = self.keys
        self.blocks = blocks
        self.left += [key for key in before if key not in self.keys]

    def leave_for(self, end: int) -> None:
        self.leave([block for block in self.blocks if block[0] >= end - self.capacity])

    def append(self, first: int, count: int) -> None:
        self.leave_for(first + count)
        self.blocks.append(list(range(first, first + count)))
        self.end = first + count

    def set_end(self, row: int) -> None:
        if row > self.end:
            self.leave_for(row)
            self.end = row

    def drop_before(self, row: int) -> None:
        blocks = [[key for key in block if key >= row] for block in self.blocks]
        self.leave([block for block in blocks if block])

    def read(self, first_row: int, max_rows: int) -> tuple[int, list[int]]:
        later = [key for key in self.keys if key >= first_row]
        run = [key for place, key in enumerate(later) if key - place == later[0]][:max_rows]
        return (run[0] if run else max(first_row, self.end)), run


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([0, 0, 0, 3]), st.integers(1, 14)),
        st.tuples(st.just("append"), st.just(0), st.integers(1, 50)),
        st.tuples(st.just("drop_before"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("set_end"), st.integers(0, 60), st.just(0)),
        st.tuples(st.just("read"), st.integers(-5, 60), st.integers(1, 30)),
    ),
    max_size=40,
)


@given(capacity=st.integers(1, 40), gap=st.integers(0, 10), steps=STEPS)
@settings(max_examples=200)
def test_the_ring_holds_the_newest_whole_blocks_that_fit(capacity, gap, steps):
    left = []
    ring = ring_of(capacity, gap, on_leave=lambda first, end: left.append((first, end)))
    oracle = PlainRing(capacity)
    for step, number, count in steps:
        if step == "append":
            first = ring.end_row + number  # keys that it skips are a hole
            if count > capacity:
                with pytest.raises(BlockError, match="at most capacity_rows"):
                    append(ring, first, count)
                continue
            if not number:
                after = PlainRing(capacity)
                after.blocks = oracle.blocks
                after.append(oracle.end, count)
                assert ring.first_row_after(count) == after.keys[0]
            append(ring, first, count)
            oracle.append(first, count)
        elif step == "drop_before":
            row = ring.first_row + number
            ring.drop_before(row)
            oracle.drop_before(row)
        elif step == "set_end":
            row = ring.end_row + number - 20
            ring.set_end(row)
            oracle.set_end(row)
        else:
            first_row = ring.first_row + number
            first, rows, stored_at = ring.read(first_row, count)
            expected_first, keys = oracle.read(first_row, count)
            assert (first, len(rows)) == (expected_first, len(keys))
            assert rows.tolist() == [[key % 251] * ROW_BYTES for key in keys]
            assert stored_at.tolist() == keys

        keys = oracle.keys
        assert (ring.row_count, ring.end_row) == (len(keys), oracle.end)
        assert ring.first_row == (keys[0] if keys else oracle.end)
        assert [key for first, end in left for key in range(first, end) if key in oracle.left] == oracle.left
        if keys:
            with ring.lock:
                assert ring.keys_at(np.arange(len(keys))).tolist() == keys
                # Whether there are holes or not, one seed draws the same of the rows by age.
                offsets = np.random.default_rng(number).integers(0, len(keys), 30)
                drawn = ring.draw_evenly(np.random.default_rng(number), 30)
                assert drawn.tolist() == [keys[offset] for offset in offsets]
                span = range(keys[0] - 3, oracle.end + 3)
                assert ring.held(span.start, len(span)).tolist() == [key in keys for key in span]
            out, times = np.empty((len(keys), ROW_BYTES), np.uint8), np.empty(len(keys))
            drawn = ring.sample(lambda n, at: np.array(keys), out, times)  # noqa: B023
            assert drawn.tolist() == keys
            assert out.tolist() == [[key % 251] * ROW_BYTES for key in keys]
            assert times.tolist() == keys


def test_the_rows_of_a_block_may_share_a_time():
    ring = ring_of(4, 2)
    for first in range(0, 9, 3):
        ring.append(first, rows_of(first, 3), stored_at=first / 2)
    assert ring.read(0, 10)[2].tolist() == [3, 3, 3]


def test_only_the_rows_that_were_overtaken_are_drawn_again():
    ring, calls = ring_of(4, gap=2), []
    append(ring, 0, 2)
    append(ring, 2, 2)

    def draw(n: int, at: slice | np.ndarray) -> np.ndarray:
        calls.append(at)
        if len(calls) > 1:
            return np.full(n, ring.first_row)
        return np.array([3, 0, 2, 1])

    gather = ring._rows.gather

    def overtaken(index: np.ndarray, out: np.ndarray) -> None:
        if len(calls) == 1 and ring.end_row == 4:  # written over after they were chosen, before they are read
            append(ring, 4, 2)
            append(ring, 6, 2)
        gather(index, out)

    ring._rows.gather = overtaken
    out = np.zeros((4, ROW_BYTES), np.uint8)
    keys = ring.sample(draw, out)
    assert [at.tolist() for at in calls[1:]] == [[1, 3]]
    assert keys.tolist() == [3, 4, 2, 4]
    assert out[:, 0].tolist() == [3, 4, 2, 4]


def test_a_row_that_left_but_lies_in_the_gap_is_given_whole():
    ring, calls = ring_of(4, gap=4), []
    append(ring, 0, 4)
    gather = ring._rows.gather

    def late(index: np.ndarray, out: np.ndarray) -> None:
        append(ring, 4, 4)
        gather(index, out)

    def draw(n: int, at: slice | np.ndarray) -> np.ndarray:
        calls.append(n)
        return np.arange(n)

    ring._rows.gather = late
    out = np.zeros((4, ROW_BYTES), np.uint8)
    ring.sample(draw, out)
    assert calls == [4]
    assert (out == rows_of(0, 4)).all()


@pytest.mark.parametrize("what", ["sample", "read"])
def test_a_copy_that_is_always_overtaken_ends_by_holding_writers_back(what):
    ring, calls = ring_of(4, gap=0), []
    append(ring, 0, 4)
    store = ring._rows
    gather, read = store.gather, store.read

    def overtake() -> None:
        calls.append(ring.end_row)
        if len(calls) <= LOCKED_AFTER:
            append(ring, ring.end_row, 4)
        else:
            assert ring.lock.locked()

    def overtaken_gather(index: np.ndarray, out: np.ndarray) -> None:
        overtake()
        gather(index, out)

    def overtaken_read(position: int, count: int) -> np.ndarray:
        overtake()
        return read(position, count)

    store.gather, store.read = overtaken_gather, overtaken_read
    out = np.zeros((4, ROW_BYTES), np.uint8)
    if what == "sample":
        ring.sample(lambda n, at: ring.keys_at(np.arange(n)), out)
    else:
        _, out, _ = ring.read(0, 4)
    assert len(calls) == LOCKED_AFTER + 1
    assert (out == rows_of(4 * LOCKED_AFTER, 4)).all()


def test_no_row_is_torn_while_a_writer_races_samplers_and_a_reader():
    row_bytes, block_rows = 4096, 8
    ring = ring_of(32, 8, row_bytes)
    append(ring, 0, block_rows, row_bytes)
    done, problems, given = threading.Event(), [], [0, 0, 0]

    def sample(seed: int) -> None:
        random, out = np.random.default_rng(seed), np.empty((64, row_bytes), np.uint8)
        while not done.is_set():
            keys = ring.sample(lambda n, at: ring.keys_at(random.integers(0, ring.row_count, n)), out)
            given[seed] += 1
            if not (out == (keys % 251)[:, None]).all():
                problems.append(keys)
                return

    def read() -> None:
        wanted = 0
        while not done.is_set():
            first, rows, _ = ring.read(wanted, 5)
            given[2] += 1
            if first < wanted or not (rows == rows_of(first, len(rows), 1)).all():
                problems.append(first)
                return
            wanted = first + len(rows)

    threads = [threading.Thread(target=sample, args=(seed,)) for seed in (0, 1)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for number in range(1, 3000):
        append(ring, number * block_rows, block_rows, row_bytes)
    done.set()
    for thread in threads:
        thread.join(30)
    assert not problems
    assert all(given)


def test_keys_must_grow():
    ring = ring_of(4, 0)
    append(ring, 5, 1)
    with pytest.raises(BlockError, match="expected 6 or above"):
        append(ring, 5, 1)


def test_the_memory_of_a_ring_is_that_of_its_places_and_their_times():
    assert ring_of(30, 10).memory_bytes == 40 * ROW_BYTES + StoredTimes(40).nbytes
