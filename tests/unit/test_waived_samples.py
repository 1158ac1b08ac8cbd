"""With a bound on the lag learner and collectors never come to wait for each other, whatever block, band and bound."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UnavailableError
from paceline.lag.bound import LagBound
from paceline.tables.limiter import Limiter, LimiterSettings


def never() -> None:
    return None


def refuse() -> UnavailableError:
    return UnavailableError("would wait")


def settings(**changes) -> LimiterSettings:
    values = {"min_rows": 100, "samples_per_insert": 4.0, "window_rows": 1000.0, "deadline_seconds": 30.0}
    return LimiterSettings(**{**values, **changes})


def passing_rows(limiter: Limiter, block_rows: int = 1) -> int:
    """Inserts blocks until one would have to wait; the rows that passed."""
    rows = 0
    while rows < 100_000:
        try:
            limiter.reserve_insert(block_rows, refuse)
        except UnavailableError:
            break
        limiter.settle_insert(block_rows, block_rows)
        rows += block_rows
    return rows


def test_inserts_wait_for_no_samples_of_rows_that_are_waived_and_for_those_of_others():
    limiter = Limiter("t", settings(), inserted=225, sampled=7)
    assert passing_rows(limiter) == 1
    limiter.waive_before(226)
    assert passing_rows(limiter) == 250  # what the window lets pass at once
    assert (limiter.inserted, limiter.sampled) == (476, 7)
    limiter.waive_before(200)  # it never goes back
    assert passing_rows(limiter) == 0
    limiter.waive_before(476)
    assert passing_rows(limiter, 250) == 250  # the largest block


def test_what_is_waived_counts_no_more_when_so_much_was_sampled():
    limiter = Limiter("t", settings(), inserted=225)
    limiter.waive_before(225)
    passing_rows(limiter)
    limiter.raise_sampled(1000)  # the lower edge at 225 rows, which was waived
    assert passing_rows(limiter) == 0
    limiter.raise_sampled(1004)
    assert passing_rows(limiter) == 1


def test_samples_are_held_to_the_ratio_by_what_was_sampled_alone():
    limiter = Limiter("t", settings(), inserted=225)
    limiter.waive_before(225)
    assert limiter.grant_samples(100, 50, never, wait=False) == 10


def test_nothing_is_waived_for_rows_that_are_not_there():
    limiter = Limiter("t", settings(), inserted=225)
    limiter.waive_before(10_000)
    assert passing_rows(limiter) == 250
    limiter.restore(inserted=225)  # the record lost its end
    assert passing_rows(limiter) == 250
    limiter.restore(inserted=150)
    assert passing_rows(limiter) == 250
    free = Limiter("t", settings(samples_per_insert=None, window_rows=None), inserted=225)
    free.waive_before(225)
    assert free.inserted == 225


class Run:
    """A learner that follows, replay, and collectors, each as hasty or slow as chance has it. One shard."""

    def __init__(self, shape: dict, seed: int) -> None:
        ratio, batch, block = shape["ratio"], shape["batch"], shape["block"]
        limits = settings(
            min_rows=shape["min_rows"],
            samples_per_insert=ratio,
            window_rows=batch + math.ceil(block * ratio) + shape["extra"],
        )
        limits.require_room(batch_rows=batch, block_rows=block)
        self._shape, self._waives = shape, shape.get("waives", True)
        self._random = np.random.default_rng(seed)
        self._bound = LagBound(shape["bound"])
        self._learner, self._replay = Limiter("learner", limits), Limiter("replay", limits)
        self._stored: list[int] = []
        """The version of each row that replay has; the learner has the first `_received` of them."""
        self._received = self._updates = self._version = 0
        self._applied = [0] * shape["collectors"]
        self._in_flight: list[deque[list[int]]] = [deque() for _ in self._applied]
        self._open: list[list[int]] = [[] for _ in self._applied]

    def turn(self) -> None:
        """Somebody does something, or finds that it has to wait."""
        collector = int(self._random.integers(len(self._applied)))
        match self._random.integers(6):
            case 0:
                self._applied[collector] = self._version
            case 1:
                self._step(collector)
            case 2:
                self._append(collector)
            case 3:
                self._receive()
            case _:
                self._update()

    def goes_on(self) -> bool:
        """Whether the learner comes to an update when everybody has his turn again and again."""
        updates = self._updates
        in_flight = len(self._applied) * (self._shape["in_flight"] + 2)
        needed = self._shape["min_rows"] // self._shape["block"] + math.ceil(1 / self._shape["ratio"])
        for _ in range(5 * (in_flight + needed) + self._shape["batch"]):
            for collector in range(len(self._applied)):
                self._applied[collector] = self._version
                for _ in range(self._shape["block"]):
                    self._step(collector)
                self._append(collector)
            self._receive()
            self._update()
            if self._updates > updates:
                return True
        return False

    def _step(self, collector: int) -> None:
        block, in_flight = self._open[collector], self._in_flight[collector]
        if len(block) < self._shape["block"]:
            block.append(self._applied[collector])
        elif len(in_flight) < self._shape["in_flight"]:
            in_flight.append(block)
            self._open[collector] = []

    def _append(self, collector: int) -> None:
        if not self._in_flight[collector]:
            return
        block = self._in_flight[collector][0]
        try:
            self._replay.reserve_insert(len(block), refuse)
        except UnavailableError:
            return
        self._stored += self._in_flight[collector].popleft()
        self._replay.settle_insert(len(block), len(block))

    def _receive(self) -> None:
        self._received = len(self._stored)
        self._learner.restore(inserted=self._received)

    def _update(self) -> None:
        batch = self._shape["batch"]
        if self._received and self._learner.grant_samples(batch, 1, never, wait=False):
            versions = np.array(self._stored[: self._received])
            if self._bound.find_starvation(versions, self._version) is not None:
                self._learner.settle_samples(batch, 0)
                if self._waives:
                    self._replay.waive_before(self._received)
            else:
                self._updates += 1
                self._version = self._updates // self._shape["publish_every"]
        self._replay.raise_sampled(self._learner.sampled)


SHAPES = st.fixed_dictionaries(
    {
        "ratio": st.sampled_from([0.5, 1.0, 2.5, 8.0, 64.0]),
        "batch": st.integers(1, 16),
        "block": st.integers(1, 16),
        "extra": st.integers(0, 40),
        "min_rows": st.integers(1, 20),
        "bound": st.integers(0, 4),
        "publish_every": st.integers(1, 3),
        "collectors": st.integers(1, 3),
        "in_flight": st.integers(1, 4),
    }
)


@given(shape=SHAPES, seed=st.integers(0, 2**32 - 1), turns=st.integers(0, 250))
def test_the_learner_always_comes_to_another_update(shape, seed, turns):
    run = Run(shape, seed)
    for _ in range(turns):
        run.turn()
    assert all(run.goes_on() for _ in range(2))


@pytest.mark.parametrize(("block", "in_flight"), [(2, 1), (8, 4)])
def test_both_sides_come_to_wait_for_each_other_where_nothing_is_waived(block, in_flight):
    shape = {
        "ratio": 8.0, "batch": 8, "block": block, "extra": 40, "min_rows": 10, "bound": 1, "publish_every": 1,
        "collectors": 1, "in_flight": in_flight, "waives": False,
    }  # fmt: skip
    assert not _goes_on_for_long(shape)
    assert _goes_on_for_long({**shape, "waives": True})


def _goes_on_for_long(shape: dict) -> bool:
    run = Run(shape, seed=1)
    return all(run.goes_on() for _ in range(100))
