"""Draws in proportion to priorities. Schaul et al. 2016, "Prioritized experience replay", section 3.3."""

from __future__ import annotations

import numpy as np

from paceline.errors import InvalidInputError
from paceline.tables.ring import Keys, Ring
from paceline.tables.samplers import Counts, Flags, Floats, Places, Versions, WeightedSampler
from paceline.tables.sum_tree import LARGEST_WEIGHT, Weights


class PrioritisedSampler(WeightedSampler):
    """P(i) = p_i^exponent / sum over all. A row comes with the highest priority seen so far; 0 is not drawn."""

    def __init__(self, ring: Ring, max_times_sampled: int | None, *, exponent: float) -> None:
        self._exponent = exponent
        self._priorities: Floats = np.zeros(ring.physical_rows, np.float32)
        self._highest = np.float32(1)
        self._unrestored: Flags | None = None
        """While a record is restored: rows that it has not spoken of, which follow the highest priority."""
        super().__init__(ring, max_times_sampled)

    @property
    def memory_bytes(self) -> int:
        """Bytes set aside."""
        return super().memory_bytes + self._priorities.nbytes

    def add(self, first_row: int, row_count: int, versions: Versions) -> None:
        """Rows have come."""
        self._priorities[self._places(first_row, first_row + row_count)] = self._highest
        super().add(first_row, row_count, versions)

    def set_priorities(self, keys: Keys, priorities: Floats) -> Places:
        """Set priorities by keys; the places of those rows that are there. Where a key comes twice, the last counts.

        Raises:
            InvalidInputError: a priority is negative, not finite, or too large for the exponent.
        """
        self._require_priorities(priorities)
        held = np.flatnonzero((keys >= self._ring.first_row) & (keys < self._ring.end_row))
        places = keys[held] % self._ring.physical_rows
        alive = self._alive[places]
        held, places = held[alive], places[alive]
        if len(held):
            self._priorities[places] = priorities[held]
            self._highest = max(self._highest, priorities[held].max())
            self._weigh(np.unique(places) if self._left is not None else places)
        return places

    def set_states(self, places: Places, alive: Flags, priorities: Floats, times: Counts) -> None:
        """Set what a record says of rows; `places` are distinct. Raises as `set_priorities`, and sets nothing then."""
        self._require_priorities(priorities)
        if self._unrestored is None:
            self._unrestored = self._alive.copy()
        self._unrestored[places] = False
        self._priorities[places] = priorities
        super().set_states(places, alive, priorities, times)
        highest = priorities[alive].max(initial=np.float32(0))
        if highest > self._highest:
            self._highest = highest
            unrestored = np.flatnonzero(self._unrestored)
            self._priorities[unrestored] = highest
            self._weigh(unrestored)

    def states(self, places: Places) -> tuple[Flags, Floats, Counts]:
        """Whether each row is there, its priority, and the times it was sampled."""
        return self._alive[places], self._priorities[places], self._times[places]

    def find_lowest(self, count: int) -> Places:
        """Places of the `count` rows of lowest priority, the oldest of those that are equal. Needs no lock.

        By the priorities as they are while it looks. For the one writer alone.
        """
        places = np.flatnonzero(self._alive.copy())  # numpy refuses an array that changes while it looks
        places = np.roll(places, -np.searchsorted(places, self._ring.first_row % self._ring.physical_rows))
        priorities, count = self._priorities[places], min(count, len(places))
        if not count:
            return places
        threshold = np.partition(priorities, count - 1)[count - 1]
        lower = np.flatnonzero(priorities < threshold)
        equal = np.flatnonzero(priorities == threshold)[: count - len(lower)]
        lowest: Places = places[np.concatenate([lower, equal])]
        return lowest

    def _draw(
        self, random: np.random.Generator, n: int, policy_version: int, *, details: bool = False
    ) -> tuple[Places, Weights]:
        self._unrestored = None
        return super()._draw(random, n, policy_version, details=details)

    def _weights_of(self, places: Places) -> Weights:
        priorities = self._priorities[places].astype(np.float64)
        # 0 to the power 0 is 1, and a row of priority 0 is never drawn.
        return np.where(priorities > 0, priorities**self._exponent, 0)

    def _why_none(self) -> str:
        if not self.row_count:
            return super()._why_none()
        return (
            f"each of the {self.row_count} rows has priority 0: sampling goes on when priorities are updated, or rows "
            "have been appended"
        )

    def _require_priorities(self, priorities: Floats) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            weights = priorities.astype(np.float64) ** self._exponent
            wrong = ~((priorities >= 0) & (priorities < np.inf) & (weights <= LARGEST_WEIGHT))
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InvalidInputError(
                f"priority {priorities[at]} at position {at}: expected a finite number, 0 or more, whose power to the "
                f"exponent, {self._exponent:g}, is at most {LARGEST_WEIGHT:g}"
            )
