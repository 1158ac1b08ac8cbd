"""Rounds of turns: every turn once a round, in alternating order."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Turn = Callable[[float], dict[str, float]]
"""Measures for about so many seconds; gives figures by their names."""

Figures = dict[str, list[float]]
"""Values of each round, by the figure's name: `<workload>.<what>_<unit>`."""

WARM_UP_SHARE = 0.25
"""Of a turn's seconds: an uncounted round at the start touches memory and opens streams."""

SLICE_SECONDS = 0.02
"""Of what is compared within one process: a busy host changes its speed from tenth to tenth of a second."""


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    rounds: int
    seconds: float
    """Of a turn."""


def take_turns(title: str, turns: Sequence[Turn], extent: Extent, settle: Callable[[], None] = lambda: None) -> Figures:
    """The figures of all turns, with one value for each round.

    Args:
        settle: waits until what the turn before left running is over.
    """
    figures: Figures = {}
    for number in range(extent.rounds + 1):
        print(f"{title}: {f'round {number} of {extent.rounds}' if number else 'warming up'}", file=sys.stderr)
        for turn in turns if number % 2 == 0 else reversed(turns):
            settle()
            found = turn(extent.seconds if number else extent.seconds * WARM_UP_SHARE)
            if number:
                for name, value in found.items():
                    figures.setdefault(name, []).append(value)
    return figures


@dataclass(frozen=True)
class Moved:
    """What went through, rows or bytes, in so many seconds."""

    amount: int
    seconds: float

    @property
    def per_second(self) -> float:
        """The rate."""
        return self.amount / self.seconds


def repeat_for(seconds: float, amount: int, call: Callable[[], object]) -> Moved:
    """Make a call, each of which moves `amount`, again and again."""
    began = now = time.perf_counter()
    calls = 0
    while now - began < seconds:
        call()
        calls, now = calls + 1, time.perf_counter()
    return Moved(calls * amount, now - began)


def repeat_by_turns(seconds: float, amount: int, calls: Sequence[Callable[[], object]]) -> list[Moved]:
    """What `repeat_for` so many seconds each gives, with the calls in short slices that alternate."""
    moved = [Moved(0, 0.0) for _ in calls]
    while min(each.seconds for each in moved) < seconds:
        for number, call in enumerate(calls):
            come = repeat_for(SLICE_SECONDS, amount, call)
            moved[number] = Moved(moved[number].amount + come.amount, moved[number].seconds + come.seconds)
    return moved


@dataclass(frozen=True)
class Spread:
    """Median of values, and the lowest and highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one value or more."""
        return cls(statistics.median(values), min(values), max(values))
