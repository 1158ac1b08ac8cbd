"""The limiter holds the ratio within its window, never holds both sides back, and says what it waits for."""

from __future__ import annotations

import math
import threading
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_examples
from hypothesis import strategies as st

from paceline.config import Config, build
from paceline.errors import ConfigError, InvalidInputError, LimiterTimeoutError, PacelineError, UnavailableError
from paceline.replay.settings import limiter_settings
from paceline.tables.limiter import Limiter, LimiterSettings
from paceline.tables.memory import MemorySettings, TableMemory

SECONDS = 30


def settings(**changes) -> LimiterSettings:
    values = {"min_rows": 100, "samples_per_insert": 4.0, "window_rows": 1000.0, "deadline_seconds": 10 * SECONDS}
    return LimiterSettings(**{**values, **changes})


def never() -> None:
    return None


def refuse() -> PacelineError:
    return UnavailableError("would wait")


def try_insert(limiter: Limiter, rows: int) -> bool:
    try:
        limiter.reserve_insert(rows, refuse)
    except UnavailableError:
        return False
    limiter.settle_insert(rows, rows)
    return True


@given(
    ratio=st.sampled_from([0.5, 1.0, 4.0, 256.0]),
    batch=st.integers(1, 64),
    block=st.integers(1, 32),
    extra=st.integers(0, 50),
    min_rows=st.integers(1, 100),
    turns=st.lists(st.booleans(), max_size=200),
)
def test_the_ratio_stays_within_the_window_and_one_side_can_always_go_on(ratio, batch, block, extra, min_rows, turns):
    window = batch + math.ceil(block * ratio) + extra
    limiter = Limiter(
        "t", settings(min_rows=min_rows, samples_per_insert=ratio, window_rows=window, deadline_seconds=1)
    )
    inserted = sampled = 0  # the oracle's
    for insert in turns:
        after_insert = (inserted + block - min_rows) * ratio - sampled
        after_sample = (inserted - min_rows) * ratio - sampled - batch
        may_insert = inserted < min_rows or after_insert <= window / 2
        may_sample = inserted >= min_rows and after_sample >= -window / 2
        assert may_insert or may_sample
        if insert:
            assert try_insert(limiter, block) == may_insert
            inserted += block * may_insert
        else:
            assert limiter.grant_samples(batch, 1, never, wait=False) == may_sample
            sampled += batch * may_sample
        assert (limiter.inserted, limiter.sampled) == (inserted, sampled)


@pytest.mark.parametrize(("window", "fits"), [(128, False), (4 * 64 + 255, False), (4 * 64 + 256, True)])
def test_a_window_too_small_for_one_batch_and_one_block_is_refused_with_the_smallest_that_is_not(window, fits):
    limits = settings(window_rows=window)
    if fits:
        limits.require_room(batch_rows=256, block_rows=64)
    else:
        with pytest.raises(ConfigError, match="expected at least 512"):
            limits.require_room(batch_rows=256, block_rows=64)


def test_several_batches_are_granted_at_once_as_far_as_the_window_goes():
    limiter = Limiter("t", settings(), inserted=100)
    assert limiter.grant_samples(100, 50, never) == 5  # down to -500, the lower edge
    assert limiter.grant_samples(100, 50, never, wait=False) == 0


def test_rows_set_aside_count_until_they_are_settled():
    limiter = Limiter("t", settings(), inserted=100)
    limiter.reserve_insert(125, never)  # up to +500, the upper edge
    assert not try_insert(limiter, 1)
    limiter.settle_insert(125, 0)
    assert limiter.inserted == 100
    assert try_insert(limiter, 125)


@pytest.mark.parametrize("side", ["insert", "sample"])
def test_a_side_that_waits_goes_on_as_soon_as_the_other_has_moved(side):
    limiter = Limiter("t", settings(), inserted=100, sampled=0 if side == "insert" else 500)
    started, done = threading.Event(), threading.Event()

    def ended() -> None:
        started.set()  # asked only when there is something to wait for

    def wait() -> None:
        if side == "insert":
            limiter.reserve_insert(125, never)
            limiter.settle_insert(125, 125)
            limiter.reserve_insert(1, ended)
        else:
            limiter.grant_samples(100, 1, ended)
        done.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert started.wait(SECONDS)
    assert not done.is_set()
    if side == "insert":
        assert limiter.grant_samples(100, 1, never) == 1
    else:
        assert try_insert(limiter, 100)
    assert done.wait(SECONDS)
    thread.join(SECONDS)


def test_an_insert_that_is_held_back_too_long_says_side_state_and_what_it_waits_for():
    limiter = Limiter("transitions", settings(deadline_seconds=0.01), inserted=225)
    with pytest.raises(LimiterTimeoutError) as caught:
        limiter.reserve_insert(10, never)
    for part in ("append to table 'transitions'", "225 rows are inserted and 0 sampled", "40 rows must be sampled"):
        assert part in str(caught.value)


def test_a_sample_that_is_held_back_too_long_says_side_state_and_what_it_waits_for():
    few = Limiter("transitions", settings(deadline_seconds=0.01), inserted=57)
    with pytest.raises(LimiterTimeoutError, match=r"sample of table 'transitions'.* 57 of the 100 rows .*collectors"):
        few.grant_samples(256, 1, never)
    ahead = Limiter("transitions", settings(deadline_seconds=0.01), inserted=100, sampled=400)
    with pytest.raises(LimiterTimeoutError, match=r"100 rows are inserted and 400 sampled.* overstep the window"):
        ahead.grant_samples(256, 1, never)


def test_what_could_never_pass_is_refused_at_once():
    limiter = Limiter("t", settings())
    with pytest.raises(InvalidInputError, match="at most 250 rows"):
        limiter.reserve_insert(251, never)
    with pytest.raises(InvalidInputError, match="at most 1000"):
        limiter.grant_samples(1001, 1, never)


def test_a_wait_ends_when_its_caller_is_gone():
    limiter, gone, started, caught = Limiter("t", settings()), threading.Event(), threading.Event(), []

    def ended() -> PacelineError | None:
        started.set()
        return UnavailableError("the caller went away") if gone.is_set() else None

    def wait() -> None:
        try:
            limiter.grant_samples(256, 1, ended)
        except UnavailableError as error:
            caught.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert started.wait(SECONDS)
    gone.set()
    limiter.wake()
    thread.join(SECONDS)
    assert caught == ["the caller went away"]


def test_a_free_ratio_waits_for_the_minimum_alone():
    limiter = Limiter("t", settings(samples_per_insert=None, window_rows=None))
    assert limiter.grant_samples(10, 1, never, wait=False) == 0
    assert all(try_insert(limiter, 1000) for _ in range(100))
    assert limiter.grant_samples(10**6, 1000, never) == 1000


def test_when_no_row_will_come_any_more_samples_run_free():
    limiter = Limiter("t", settings(), inserted=100, sampled=500)
    assert limiter.grant_samples(256, 10, never, wait=False) == 0
    limiter.complete()
    assert limiter.grant_samples(256, 10, never, wait=False) == 10


def test_ratio_and_window_come_together():
    with pytest.raises(ConfigError, match="expected both"):
        settings(window_rows=None)


@given(
    ratio=st.sampled_from([None, 2.0]),
    bound=st.integers(1, 3),
    capacity=st.integers(4, 40),
    turns=st.lists(st.tuples(st.sampled_from(["insert", "sample", "consume"]), st.integers(1, 12)), max_size=80),
)
def test_room_and_draws_bound_both_sides_as_a_plain_count_does(ratio, bound, capacity, turns):
    batch = 3
    inserted = sampled = consumed = 0  # the oracle's
    limiter = Limiter(
        "t",
        settings(min_rows=2, samples_per_insert=ratio, window_rows=ratio and 60.0),
        room=lambda: capacity - (inserted - consumed),
        drawable=lambda: inserted * bound - sampled,
    )
    for turn, rows in turns:
        deviation = 0 if ratio is None else (inserted - 2) * ratio - sampled
        if turn == "insert":
            may = inserted - consumed + rows <= capacity and deviation + rows * (ratio or 0) <= 30
            assert try_insert(limiter, rows) == may
            inserted += rows * may
        elif turn == "sample":
            granted = limiter.grant_samples(batch, rows, never, wait=False)
            by_ratio = math.inf if ratio is None else (deviation + 30) // batch
            by_draws = (inserted * bound - sampled) // batch
            assert granted == (max(0, min(rows, by_ratio, by_draws)) if inserted >= 2 else 0)
            drawn = granted // 2 * batch  # the others turned out not to be there
            limiter.settle_samples(granted * batch, drawn)
            sampled += drawn
        else:
            consumed = min(inserted, consumed + rows)
        assert (limiter.inserted, limiter.sampled) == (inserted, sampled)


def test_room_is_not_given_twice_to_rows_set_aside():
    limiter = Limiter("q", settings(), inserted=100, room=lambda: 10)
    limiter.reserve_insert(6, never)
    assert not try_insert(limiter, 5)
    assert try_insert(limiter, 4)


def test_granted_draws_are_not_granted_again_until_they_are_settled():
    limiter = Limiter("t", settings(samples_per_insert=None, window_rows=None), inserted=100, drawable=lambda: 100)
    assert limiter.grant_samples(30, 2, never) == 2
    assert limiter.grant_samples(30, 2, never, wait=False) == 1
    limiter.settle_samples(90, 0)
    assert limiter.sampled == 0
    assert limiter.grant_samples(30, 9, never, wait=False) == 3


@pytest.mark.parametrize("side", ["insert", "sample"])
def test_a_side_that_waits_for_room_or_rows_goes_on_when_the_limiter_is_woken(side):
    free = [0]
    limiter = Limiter(
        "t",
        settings(samples_per_insert=None, window_rows=None),
        inserted=100,
        room=lambda: free[0],
        drawable=lambda: free[0],
    )
    started, done = threading.Event(), threading.Event()

    def ended() -> None:
        started.set()

    def wait() -> None:
        if side == "insert":
            limiter.reserve_insert(8, ended)
        else:
            limiter.grant_samples(8, 1, ended)
        done.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert started.wait(SECONDS)
    assert not done.is_set()
    free[0] = 8
    limiter.wake()
    assert done.wait(SECONDS)
    thread.join(SECONDS)


def test_a_wait_for_room_or_for_rows_says_how_much_there_is():
    limiter = Limiter("q", settings(deadline_seconds=0.01), inserted=110, room=lambda: 3, drawable=lambda: 20)
    with pytest.raises(LimiterTimeoutError, match=r"'q' .* a block of 5 rows, and there is room for 3 .* to consume"):
        limiter.reserve_insert(5, never)
    with pytest.raises(LimiterTimeoutError, match=r"'q' .* 20 draws are left .*max_times_sampled.* batch needs 32"):
        limiter.grant_samples(32, 1, never)


def test_rows_that_a_follower_sampled_count_once_and_never_less():
    limiter = Limiter("t", settings(), inserted=225)
    assert not try_insert(limiter, 1)
    limiter.raise_sampled(4)
    assert try_insert(limiter, 1)
    limiter.raise_sampled(2)
    assert limiter.sampled == 4


@pytest.mark.parametrize(("block", "min_rows"), [(32, 1), (32, 33), (10, 15), (1, 1000)])
def test_rows_needed_before_the_first_sample_are_never_held_back(block, min_rows):
    # The narrowest window: half of it is less than a block.
    limiter = Limiter("t", settings(min_rows=min_rows, samples_per_insert=256.0, window_rows=block * 256 + 1))
    while limiter.inserted < min_rows:
        assert try_insert(limiter, block)
    assert limiter.grant_samples(1, 1, never, wait=False) == 1


def bounded_config(max_times_sampled: int, sampler: str, shape: dict) -> Config:
    """A learner's table with a ratio and the narrowest window, whose rows are drawn at most so often."""
    batch, block, ratio = shape["batch"], shape["block"], shape["ratio"]
    table = {
        "capacity_rows": shape["capacity"],
        "sampler": sampler,
        "max_times_sampled": max_times_sampled,
        "limiter": {
            "min_rows": shape["min_rows"],
            "samples_per_insert": ratio,
            "window_rows": batch + math.ceil(block * ratio),
        },
    }
    return build(
        {
            "learner": {"updates": "learner_bound", "batch_size": batch, "prefetch_batches": shape["prefetch"]},
            "collector": {"block_rows": block},
            "replay": {"tables": {"transitions": table}},
        }
    )


def smallest_accepted(sampler: str, shape: dict) -> int:
    """The smallest `max_times_sampled` that the configuration takes."""
    for bound in range(1, 1000):
        with suppress(ConfigError):
            bounded_config(bound, sampler, shape)
            return bound
    raise AssertionError(shape)


class Traffic:
    """Collectors and a learner at one table, each as hasty or slow as chance has it, with batches in flight."""

    def __init__(self, max_times_sampled: int, sampler: str, shape: dict, seed: int) -> None:
        limits = limiter_settings(bounded_config(10**6, sampler, shape), "transitions")
        kept = MemorySettings(shape["capacity"], sampler=sampler, max_times_sampled=max_times_sampled)
        self._memory = TableMemory(kept, 1)
        self.limiter = Limiter("transitions", limits, drawable=self._memory.drawable)
        self._batch, self._block, self._prefetch = shape["batch"], shape["block"], shape["prefetch"]
        self._random = np.random.default_rng(seed)
        self._granted = 0

    def is_stuck_within(self, turns: int) -> bool:
        """Whether a state comes in which neither a block may be inserted nor a batch be drawn."""
        random, inserts, draws = self._random, 0.5, 0.5
        for _ in range(turns):
            if random.random() < 0.05:  # who is the faster one changes
                inserts, draws = random.choice([0.05, 0.5, 0.95]), random.choice([0.02, 0.5, 1.0])
            if random.random() < inserts:
                moved = self._insert(self._block if random.random() < 0.5 else int(random.integers(self._block)) + 1)
            elif random.random() < draws:
                moved = self._draw()
            else:
                moved = self._grant(self._prefetch - self._granted // self._batch)
            if not moved:
                while self._draw():
                    pass
                granted = not self._granted and self._grant(1)
                if not granted and not self._insert(self._block):
                    return True
        return False

    def _insert(self, row_count: int) -> bool:
        try:
            self.limiter.reserve_insert(row_count, refuse)
        except UnavailableError:
            return False
        self._memory.append(self._memory.end_row, np.zeros((row_count, 1), np.uint8), stored_at=0.0)
        self.limiter.settle_insert(row_count, row_count)
        return True

    def _grant(self, batch_count: int) -> bool:
        granted = self.limiter.grant_samples(self._batch, batch_count, never, wait=False) if batch_count else 0
        self._granted += granted * self._batch
        return granted > 0

    def _draw(self) -> bool:
        """Draw all that was granted, as one message of replay does."""
        try:
            self._memory.sample(self._random, np.empty((self._granted, 1), np.uint8))
        except UnavailableError:
            return False
        self.limiter.settle_samples(self._granted, self._granted)
        drawn, self._granted = self._granted, 0
        return drawn > 0


SHAPES = st.fixed_dictionaries(
    {
        "ratio": st.sampled_from([0.5, 1.0, 2.5, 4.0, 7.3]),
        "batch": st.integers(1, 32),
        "block": st.integers(1, 8),
        "capacity": st.integers(10, 60),
        "min_rows": st.integers(1, 10),
        "prefetch": st.integers(1, 3),
    }
)


@given(shape=SHAPES, sampler=st.sampled_from(["uniform", "fifo", "lifo"]), seed=st.integers(0, 2**32 - 1))
def test_with_the_smallest_bound_on_draws_that_is_accepted_both_sides_go_on(shape, sampler, seed):
    traffic = Traffic(smallest_accepted(sampler, shape), sampler, shape, seed)
    assert not traffic.is_stuck_within(200)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["uniform", "fifo", "lifo"])
@settings_of_examples(max_examples=8, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**32 - 1))
def test_with_the_smallest_bound_on_draws_that_is_accepted_both_sides_go_on_for_long(shape, sampler, seed):
    traffic = Traffic(smallest_accepted(sampler, shape), sampler, shape, seed)
    assert not traffic.is_stuck_within(3000)


@pytest.mark.parametrize(
    ("sampler", "smallest", "shape"),
    [
        # Too few draws for the ratio.
        ("uniform", 3, {"ratio": 2.5, "batch": 8, "block": 4, "capacity": 1000, "min_rows": 10, "prefetch": 1}),
        ("fifo", 3, {"ratio": 2.5, "batch": 8, "block": 4, "capacity": 1000, "min_rows": 10, "prefetch": 1}),
        ("lifo", 3, {"ratio": 2.5, "batch": 8, "block": 4, "capacity": 1000, "min_rows": 10, "prefetch": 1}),
        # As many as the ratio asks for, and some are lost with rows that leave.
        ("uniform", 2, {"ratio": 1.0, "batch": 4, "block": 1, "capacity": 20, "min_rows": 10, "prefetch": 1}),
        ("lifo", 5, {"ratio": 4.0, "batch": 8, "block": 4, "capacity": 40, "min_rows": 10, "prefetch": 1}),
        ("lifo", 5, {"ratio": 4.0, "batch": 1, "block": 1, "capacity": 10, "min_rows": 1, "prefetch": 1}),
        # No draw is lost, and what is there when inserts are held back first is less than a batch.
        ("fifo", 2, {"ratio": 1.0, "batch": 32, "block": 1, "capacity": 1000, "min_rows": 1, "prefetch": 1}),
    ],
)
def test_with_one_draw_less_both_sides_come_to_wait_for_each_other(sampler, smallest, shape):
    assert smallest_accepted(sampler, shape) == smallest
    assert Traffic(smallest - 1, sampler, shape, seed=1).is_stuck_within(20_000)
    assert not Traffic(smallest, sampler, shape, seed=1).is_stuck_within(2000)
