"""A table's memory holds, draws, reads and restores what a plain list of rows would."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import BlockError
from paceline.tables.memory import MemorySettings, TableMemory
from paceline.tables.pages import PAGE, PAGE_ROWS
from paceline.tables.stored_times import StoredTimes

CAPACITY = 40
KINDS = {
    "uniform": {},
    "uniform, bounded": {"max_times_sampled": 2},
    "prioritised": {"sampler": "prioritised", "exponent": 0.7},
    "prioritised, bounded": {"sampler": "prioritised", "exponent": 0.7, "max_times_sampled": 2},
    "lowest priority": {"sampler": "prioritised", "exponent": 0.7, "remover": "lowest_priority"},
    "recent": {"sampler": "recent", "max_lag_versions": 5, "half_life_versions": 2.0},
    "recent, even": {"sampler": "recent", "max_lag_versions": 5},
    "recent, bounded": {"sampler": "recent", "max_lag_versions": 5, "max_times_sampled": 2},
    "fifo": {"sampler": "fifo", "max_times_sampled": 2},
    "lifo": {"sampler": "lifo", "max_times_sampled": 2},
}


def memory_of(row_bytes: int = 8, **changes) -> TableMemory:
    return TableMemory(MemorySettings(**{"capacity_rows": CAPACITY, **changes}), row_bytes)


def rows_of(first: int, count: int, row_bytes: int = 8) -> np.ndarray:
    """Rows that are filled with their own keys."""
    keys = np.arange(first, first + count, dtype=np.int64)
    return np.repeat(keys[:, None], row_bytes // 8, axis=1).view(np.uint8)


def append(memory: TableMemory, count: int, version: int = 0, *, row_bytes: int = 8) -> None:
    first = memory.end_row
    memory.append(
        first, rows_of(first, count, row_bytes), stored_at=float(first), versions=np.full(count, version, np.int64)
    )


@dataclass
class Row:
    key: int
    block: int
    version: int
    priority: float
    times: int = 0


class PlainTable:
    """A table as a list of the rows that are there."""

    def __init__(self, kind: str) -> None:
        self.settings = MemorySettings(**{"capacity_rows": CAPACITY, **KINDS[kind]})
        self.rows: list[Row] = []
        self.blocks: list[tuple[int, int]] = []
        self.end, self.newest, self.highest = 0, 0, np.float32(1)

    @property
    def first(self) -> int:
        return self.blocks[0][0] if self.blocks else self.end

    def leave_for(self, end: int) -> None:
        horizon = end - CAPACITY * (2 if self.settings.remover == "lowest_priority" else 1)
        self.blocks = [block for block in self.blocks if block[0] >= horizon]
        self.rows = [row for row in self.rows if row.block >= horizon]

    def append(self, first: int, count: int, version: int) -> None:
        self.leave_for(first + count)
        self.rows += [Row(key, first, version, float(self.highest)) for key in range(first, first + count)]
        self.blocks.append((first, first + count))
        self.end, self.newest = first + count, max(self.newest, version)
        if self.settings.remover == "lowest_priority" and len(self.rows) > CAPACITY:
            leaving = len(self.rows) - CAPACITY + CAPACITY // 64
            lowest = sorted(self.rows, key=lambda row: (row.priority, row.key))[:leaving]
            self.rows = [row for row in self.rows if row not in lowest]

    def set_end(self, row: int) -> None:
        if row > self.end:
            self.leave_for(row)
            self.end = row

    def drop_before(self, key: int) -> None:
        self.blocks = [(max(first, key), end) for first, end in self.blocks if end > key]
        self.rows = [row for row in self.rows if row.key >= key]
        for row in self.rows:
            row.block = max(row.block, key)

    def weights(self) -> dict[int, float]:
        values = {}
        for row in self.rows:
            weight = 1.0
            if self.settings.sampler == "prioritised":
                weight = row.priority**self.settings.exponent if row.priority else 0.0
            if self.settings.sampler == "recent":
                if self.settings.half_life_versions is not None:
                    weight = 2.0 ** ((row.version - self.newest) / self.settings.half_life_versions)
                if row.version < self.newest - self.settings.max_lag_versions:
                    weight = 0.0
            values[row.key] = weight
        return values

    def drawable(self) -> int | None:
        bound, weights = self.settings.max_times_sampled, self.weights()
        return None if bound is None else sum(bound - row.times for row in self.rows if weights[row.key])

    def count(self, keys: list[int]) -> None:
        by_key = {row.key: row for row in self.rows}
        for key in keys:
            by_key[key].times += 1  # a KeyError here: it was not there
        bound = self.settings.max_times_sampled
        if bound is not None:
            assert all(row.times <= bound for row in self.rows)
            self.rows = [row for row in self.rows if row.times < bound]

    def set_priorities(self, keys: list[int], priorities: list[float]) -> int:
        by_key = {row.key: row for row in self.rows}
        found = [(key, priority) for key, priority in zip(keys, priorities, strict=True) if key in by_key]
        for key, priority in found:
            by_key[key].priority = priority
            self.highest = max(self.highest, np.float32(priority))
        return len(found)

    def read(self, first_row: int, max_rows: int) -> tuple[int, list[int]]:
        later = [row.key for row in self.rows if row.key >= first_row]
        run = [key for place, key in enumerate(later) if key - place == later[0]][:max_rows]
        return (run[0] if run else max(first_row, self.end)), run


SEEDS = st.integers(0, 2**20)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, CAPACITY), SEEDS),
        st.tuples(st.just("append"), st.integers(1, 8), SEEDS),
        st.tuples(st.just("skip"), st.integers(1, 30), SEEDS),
        st.tuples(st.just("drop_before"), st.integers(0, 30), SEEDS),
        st.tuples(st.just("sample"), st.integers(1, 30), SEEDS),
        st.tuples(st.just("update"), st.integers(1, 40), SEEDS),
        st.tuples(st.just("read"), st.integers(1, 60), SEEDS),
        st.tuples(st.just("restart"), st.just(0), SEEDS),
    ),
    max_size=30,
)


@pytest.mark.parametrize("kind", KINDS)
@given(steps=STEPS, start=st.sampled_from([0, 490, 10**14 + 251]))
@settings(max_examples=60)
def test_a_table_is_what_a_list_of_its_rows_is(kind, steps, start):
    memory, plain = memory_of(**KINDS[kind]), PlainTable(kind)
    pages: dict[int, bytes] = {}
    memory.set_end(start)
    plain.set_end(start)
    version = 0
    for step, count, seed in steps:
        random = np.random.default_rng(seed)
        if step == "append":
            version = max(0, version + int(random.integers(-3, 4)))
            assert memory.first_row_after(count) == _first_after(plain, count)
            append(memory, count, version)
            plain.append(plain.end, count, version)
        elif step == "skip":
            memory.set_end(memory.end_row + count)
            plain.set_end(plain.end + count)
        elif step == "drop_before":
            row = min(memory.first_row + count, memory.end_row)
            memory.drop_before(row)
            plain.drop_before(row)
        elif step == "sample":
            _sample(memory, plain, count, random)
        elif step == "update" and plain.settings.sampler == "prioritised":
            keys = random.integers(memory.first_row - 5, memory.end_row + 5, count)
            priorities = random.choice([0, 0.5, 1, 3, 20], count).astype(np.float32)
            found = memory.update_priorities(keys, priorities)
            assert found == plain.set_priorities(keys.tolist(), priorities.tolist())
        elif step == "read":
            first_row = memory.first_row + int(random.integers(-5, 2 * CAPACITY))
            first, rows, stored_at = memory.read(first_row, count)
            assert (first, rows.view(np.int64).reshape(-1).tolist()) == plain.read(first_row, count)
            assert len(stored_at) == len(rows)
        elif step == "restart":
            pages.update(memory.take_changed_pages())
            assert not memory.take_changed_pages()
            if memory.settings.keeps_state:
                memory = _restart(memory, plain, pages)
        assert (memory.first_row, memory.end_row, memory.row_count) == (plain.first, plain.end, len(plain.rows))
        assert memory.drawable() == plain.drawable()


def _first_after(plain: PlainTable, count: int) -> int:
    later = PlainTable("uniform")
    later.settings, later.blocks = plain.settings, plain.blocks
    later.leave_for(plain.end + count)
    return later.blocks[0][0] if later.blocks else plain.end


def _sample(memory: TableMemory, plain: PlainTable, n: int, random: np.random.Generator) -> None:
    weights, drawable = plain.weights(), plain.drawable()
    if not any(weights.values()):
        return
    n = n if drawable is None else min(n, drawable)
    out = np.empty((n, 8), np.uint8)
    drawn = memory.sample(random, out, details=True)
    assert out.view(np.int64).reshape(-1).tolist() == drawn.keys.tolist()
    assert all(weights[key] for key in drawn.keys.tolist())
    if drawable is None:
        total = sum(weights.values())
        expected = [weights[key] / total for key in drawn.keys.tolist()]
        np.testing.assert_allclose(drawn.probabilities, expected, rtol=1e-6)
    times = {row.key: row.times for row in plain.rows}
    plain.count(drawn.keys.tolist())
    if plain.settings.sampler != "recent" or drawable is not None:
        assert drawn.times_sampled.tolist() == [times[key] + drawn.keys.tolist().count(key) for key in drawn.keys]


def _restart(before: TableMemory, plain: PlainTable, pages: dict[int, bytes]) -> TableMemory:
    memory = TableMemory(before.settings, 8)
    versions = {row.key: row.version for row in plain.rows}
    for first, end in plain.blocks:
        block = np.array([versions.get(key, 0) for key in range(first, end)], np.int64)
        memory.append(first, rows_of(first, end - first), stored_at=0.0, versions=block)
    memory.set_end(before.end_row)
    for page, data in pages.items():
        if page >= before.first_page:
            memory.restore_page(page, data)
    # What the newest policy and the highest priority were is known from the rows that are there alone.
    plain.newest = max((row.version for row in plain.rows), default=0) if memory.settings.sampler == "recent" else 0
    plain.newest = max([plain.newest, *(versions.get(key, 0) for block in plain.blocks for key in range(*block))])
    plain.highest = max([np.float32(1), *(np.float32(row.priority) for row in plain.rows)])
    return memory


def test_a_block_larger_than_the_table_is_refused():
    for kind in KINDS:
        memory = memory_of(**KINDS[kind])
        for refuse in (memory.require_fits, memory.first_row_after, lambda count: append(memory, count)):  # noqa: B023
            with pytest.raises(BlockError, match=f"at most capacity_rows, {CAPACITY}"):
                refuse(CAPACITY + 1)
        memory.require_fits(CAPACITY)


@pytest.mark.parametrize("start", [0, 508], ids=["", "where the ring's places begin anew"])
def test_the_lowest_priorities_leave_first_and_the_oldest_of_equal_ones(start):
    memory = memory_of(sampler="prioritised", remover="lowest_priority", capacity_rows=10)
    memory.set_end(start)
    append(memory, 10)
    memory.update_priorities(start + np.arange(10), np.array([5, 0, 3, 1, 1, 1, 7, 7, 2, 4], np.float32))
    append(memory, 3)
    left = [key - start for key in range(start, start + 13) if memory.read(key, 1)[0] != key]
    assert left == [1, 3, 4]
    assert (memory.row_count, memory.first_row) == (10, start)


def test_rows_that_left_by_priority_change_their_pages():
    memory = memory_of(sampler="prioritised", remover="lowest_priority", capacity_rows=3 * PAGE_ROWS)
    append(memory, 3 * PAGE_ROWS)
    memory.update_priorities(np.array([PAGE_ROWS]), np.zeros(1, np.float32))
    memory.take_changed_pages()
    append(memory, 1)
    pages = memory.take_changed_pages()
    assert pages.keys() == {0, 1, 3}
    leaving = 1 + 3 * PAGE_ROWS // 64
    assert np.frombuffer(pages[0], PAGE)[0]["priority"].tolist() == [-1] * (leaving - 1) + [1] * (
        PAGE_ROWS - leaving + 1
    )
    assert np.frombuffer(pages[1], PAGE)[0]["priority"].tolist() == [-1] + [1] * (PAGE_ROWS - 1)
    assert np.isnan(np.frombuffer(pages[3], PAGE)[0]["priority"][1:]).all()


def test_a_row_of_high_priority_leaves_when_twice_the_capacity_came_after_it():
    memory = memory_of(sampler="prioritised", remover="lowest_priority", capacity_rows=10)
    append(memory, 1)
    memory.update_priorities(np.array([0]), np.array([100], np.float32))
    for _ in range(19):
        memory.update_priorities(np.arange(1, memory.end_row), np.ones(memory.end_row - 1, np.float32))
        append(memory, 1)
        assert memory.read(0, 1)[0] == 0
    append(memory, 1)
    assert memory.first_row == 1


def test_rows_that_leave_by_priority_leave_a_few_at_once():
    memory = memory_of(sampler="prioritised", remover="lowest_priority", capacity_rows=640)
    counts = []
    for _ in range(900):
        append(memory, 1)
        counts.append(memory.row_count)
    assert max(counts) == 640
    assert min(counts[640:]) == 640 - 10


def test_only_pages_whose_rows_changed_are_taken_and_each_once():
    memory = memory_of(sampler="prioritised", capacity_rows=5 * PAGE_ROWS)
    append(memory, 5 * PAGE_ROWS)
    assert memory.take_changed_pages().keys() == {0, 1, 2, 3, 4}
    assert memory.take_changed_pages() == {}
    memory.update_priorities(np.array([PAGE_ROWS, 2 * PAGE_ROWS - 1, 4 * PAGE_ROWS]), np.full(3, 2, np.float32))
    pages = memory.take_changed_pages()
    assert pages.keys() == {1, 4}
    content = np.frombuffer(pages[1], PAGE)[0]
    assert content["priority"].tolist() == [2] + [1] * (PAGE_ROWS - 2) + [2]
    append(memory, PAGE_ROWS)
    assert memory.first_page == 5 == memory.first_row // PAGE_ROWS
    assert memory.take_changed_pages().keys() == {5}


def test_a_draw_changes_pages_where_its_count_is_bounded():
    bounded, free = memory_of(sampler="prioritised", max_times_sampled=3), memory_of(sampler="prioritised")
    for memory in (bounded, free):
        append(memory, 10)
        memory.take_changed_pages()
        memory.sample(np.random.default_rng(0), np.empty((5, 8), np.uint8))
    assert bounded.take_changed_pages().keys() == {0}
    assert free.take_changed_pages() == {}


def test_tables_without_such_state_have_no_pages():
    for kind in ("uniform", "recent", "recent, even"):
        memory = memory_of(**KINDS[kind])
        append(memory, 10)
        memory.sample(np.random.default_rng(0), np.empty((5, 8), np.uint8))
        assert memory.take_changed_pages() == {}
        memory.restore_page(0, b"another table's")  # has no meaning here, and does no harm


def test_a_restored_row_that_no_page_speaks_of_has_the_highest_priority_restored():
    memory = memory_of(sampler="prioritised", exponent=1.0)
    append(memory, 10)
    memory.update_priorities(np.arange(10), np.arange(10).astype(np.float32))
    page = memory.take_changed_pages()[0]
    restored = memory_of(sampler="prioritised", exponent=1.0)
    append(restored, 12)
    restored.restore_page(0, page)
    drawn = restored.sample(np.random.default_rng(0), np.empty((3000, 8), np.uint8), details=True)
    expected = np.array([*range(10), 9, 9]) / (45 + 18)
    np.testing.assert_allclose(drawn.probabilities, expected[drawn.keys], rtol=1e-6)
    assert set(drawn.keys.tolist()) == set(range(1, 12))
    append(restored, 1)
    assert restored.sample(np.random.default_rng(0), np.empty((1, 8), np.uint8), details=True) is not None


def _page(**columns: float) -> bytes:
    content = np.zeros(1, PAGE)
    for name, value in columns.items():
        content[name][0, 3] = value
    return content.tobytes()


@pytest.mark.parametrize(
    "data", [b"", _page()[:-1], _page() + b"\0", _page(priority=-2), _page(priority=np.inf), _page(priority=-np.inf)]
)
def test_a_damaged_page_is_named_and_restores_nothing(data):
    memory = memory_of(sampler="prioritised")
    append(memory, 10)
    with pytest.raises(BlockError, match="page 0"):
        memory.restore_page(0, data)
    drawn = memory.sample(np.random.default_rng(0), np.empty((50, 8), np.uint8), details=True)
    assert set(drawn.probabilities.tolist()) == {np.float32(0.1)}


def test_a_page_brings_no_row_to_life_that_is_not_held():
    memory = memory_of(sampler="prioritised")
    append(memory, 5)
    memory.set_end(8)
    append(memory, 2)
    memory.restore_page(0, _page(priority=1.0))
    assert memory.row_count == 7


def test_memory_counts_rows_and_what_is_known_of_them():
    plain, weighted = memory_of(row_bytes=400), memory_of(row_bytes=400, sampler="prioritised")
    physical = plain.settings.physical_rows
    times = StoredTimes(physical).nbytes
    assert times >= 8 * physical
    assert plain.memory_bytes == physical * 400 + times
    assert weighted.memory_bytes > weighted.settings.physical_rows * (400 + 8 + 8 + 4)


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_that_is_torn_dead_or_missing_is_given_while_a_writer_races_samplers(kind):
    row_bytes, capacity, bound = 512, 128, KINDS[kind].get("max_times_sampled")
    memory = memory_of(row_bytes, **KINDS[kind] | {"capacity_rows": capacity})
    done, problems = threading.Event(), []
    counts: list[dict[int, int]] = [{}, {}]
    holes: set[int] = set()

    def append_next(number: int) -> None:
        if number % 5 == 0:
            holes.update(range(memory.end_row, memory.end_row + 3))
            memory.set_end(memory.end_row + 3)
        append(memory, 8, number // 20, row_bytes=row_bytes)

    def sample(seed: int) -> None:
        random, out = np.random.default_rng(seed), np.empty((32, row_bytes), np.uint8)
        while not done.is_set() and not problems:
            lowest = memory.first_row
            try:
                drawn = memory.sample(random, out, details=True)
            except Exception as error:
                if "appended" not in str(error):
                    problems.append(error)
                continue
            rows = out.view(np.int64)
            if not (rows == drawn.keys[:, None]).all() or drawn.keys.min() < lowest:
                problems.append(("torn or gone", drawn.keys, rows))
            for key in drawn.keys.tolist():
                counts[seed][key] = counts[seed].get(key, 0) + 1
            if kind in ("prioritised", "prioritised, bounded", "lowest priority"):
                memory.update_priorities(drawn.keys, random.random(32).astype(np.float32))

    append_next(1)
    threads = [threading.Thread(target=sample, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for number in range(2, 500):
        append_next(number)
        memory.read(memory.first_row, 10)
        memory.take_changed_pages()
    done.set()
    for thread in threads:
        thread.join(30)
    assert not problems
    given = counts[0].keys() | counts[1].keys()
    assert given
    assert not given & holes
    if bound is not None:
        assert max(counts[0].get(key, 0) + counts[1].get(key, 0) for key in given) <= bound


def test_a_row_restored_with_all_the_draws_that_it_may_have_now_is_there_no_more():
    before, after = memory_of(sampler="fifo", max_times_sampled=3), memory_of(sampler="fifo", max_times_sampled=2)
    append(before, 5)
    before.sample(np.random.default_rng(0), np.empty((5, 8), np.uint8))  # three times the first row, twice the second
    append(after, 5)
    after.restore_page(0, before.take_changed_pages()[0])
    assert (after.row_count, after.drawable()) == (3, 6)
    assert after.read(0, 10)[0] == 2
