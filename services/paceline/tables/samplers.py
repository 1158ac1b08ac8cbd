"""Which rows a batch holds.

A plain uniform draw needs the ring alone. All others keep a weight for each row in a sum tree: 1, or one by priority,
by policy version, or the draws that a row has left. Rows that are out of draws have left the table, as far as anyone
can see, though their block stays in the ring. Call every method with the ring's lock held, unless it says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.errors import UnavailableError
from paceline.tables.ring import Keys, Ring
from paceline.tables.sum_tree import SumTree, Weights

Places = npt.NDArray[np.int64]
Versions = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.uint32]
Draws = npt.NDArray[np.int64]

ONE = np.uint32(1)
"""numpy adds a number of the array's own type twenty times as fast as a Python integer."""
LOOK_ROWS = 1 << 16
"""Rows that a search for the next one alive looks at in one step."""


@dataclass(frozen=True)
class Chosen:
    """Keys of rows, and of each the probability of one draw and the times it was sampled."""

    keys: Keys
    probabilities: Floats
    times_sampled: Counts


class UniformSampler:
    """Draws every row of the ring with the same probability, with replacement, any number of times."""

    drawable = None

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._times: Counts | None = None
        """Made when it is first asked for."""

    @property
    def row_count(self) -> int:
        """Rows that are there."""
        return self._ring.row_count

    @property
    def memory_bytes(self) -> int:
        """Bytes set aside."""
        return 0 if self._times is None else self._times.nbytes

    def add(self, first_row: int, row_count: int, versions: Versions) -> None:
        """Rows have come."""
        if self._times is not None:
            self._times[self._places(first_row, first_row + row_count)] = 0

    def remove(self, first_row: int, end_row: int) -> None:
        """Rows have left."""

    def draw(self, random: np.random.Generator, n: int, policy_version: int) -> Keys:
        """`[n]` keys. Raises UnavailableError if there are no rows."""
        if not self._ring.row_count:
            raise UnavailableError("the table holds no rows: sampling goes on when some have been appended")
        return self._ring.draw_evenly(random, n)

    def draw_with_details(self, random: np.random.Generator, n: int, policy_version: int) -> Chosen:
        """The same, described; only such draws are counted. Raises as `draw`."""
        keys = self.draw(random, n, policy_version)
        if self._times is None:
            self._times = np.zeros(self._ring.physical_rows, np.uint32)
        places = keys % len(self._times)
        np.add.at(self._times, places, ONE)
        return Chosen(keys, np.full(n, self._probability(), np.float32), self._times[places])

    def find_alive(self, first_row: int, end_row: int) -> tuple[int, int]:
        """The first run of rows that are there, of those that the ring holds between two keys."""
        return first_row, end_row

    def _probability(self) -> float:
        """That one draw gives a row which may be drawn."""
        return 1 / self._ring.row_count

    def _places(self, first_row: int, end_row: int) -> Places:
        return _places(first_row, end_row, self._ring.physical_rows)


class WeightedSampler:
    """Draws rows in proportion to a weight, here 1 for all, each at most `max_times_sampled` times."""

    def __init__(self, ring: Ring, max_times_sampled: int | None) -> None:
        self.row_count = 0
        """Rows that are there."""
        self._ring = ring
        self._max_times = None if max_times_sampled is None else min(max_times_sampled, np.iinfo(np.uint32).max)
        size = ring.physical_rows
        self._tree = SumTree(size)
        self._alive: Flags = np.zeros(size, np.bool_)
        self._times: Counts = np.zeros(size, np.uint32)
        self._left: Counts | None = None if max_times_sampled is None else np.zeros(size, np.uint32)
        """Draws that each row which has a weight has left."""
        self._drawable = 0

    @property
    def drawable(self) -> int | None:
        """Draws left; None: any number."""
        return None if self._max_times is None else self._drawable

    @property
    def memory_bytes(self) -> int:
        """Bytes set aside."""
        left = 0 if self._left is None else self._left.nbytes
        return self._tree.nbytes + self._alive.nbytes + self._times.nbytes + left

    def add(self, first_row: int, row_count: int, versions: Versions) -> None:
        """Rows have come."""
        places = self._places(first_row, first_row + row_count)
        self._times[places] = 0
        self._alive[places] = True
        self.row_count += row_count
        self._weigh(places)

    def remove(self, first_row: int, end_row: int) -> None:
        """Rows have left."""
        self.kill(self._places(first_row, end_row))

    def kill(self, places: Places) -> None:
        """Rows are there no more; `places` are distinct."""
        self.row_count -= int(np.count_nonzero(self._alive[places]))
        self._alive[places] = False
        self._weigh(places)

    def draw(self, random: np.random.Generator, n: int, policy_version: int) -> Keys:
        """`[n]` keys.

        Raises:
            UnavailableError: not so many can be drawn now, and why; none was.
        """
        return self._keys(self._draw(random, n, policy_version)[0])

    def draw_with_details(self, random: np.random.Generator, n: int, policy_version: int) -> Chosen:
        """The same, described. Raises as `draw`."""
        places, probabilities = self._draw(random, n, policy_version, details=True)
        # Above 0, as is promised, where float32 holds no number as small.
        probabilities = np.maximum(probabilities, np.finfo(np.float32).tiny)
        return Chosen(self._keys(places), probabilities.astype(np.float32), self._times.take(places))

    def find_alive(self, first_row: int, end_row: int) -> tuple[int, int]:
        """The first run of rows that are there, of those that the ring holds between two keys."""
        for first in range(first_row, end_row, LOOK_ROWS):
            alive = self._alive[self._places(first, min(end_row, first + LOOK_ROWS))]
            begin = int(np.argmax(alive))
            if alive[begin]:
                length = int(np.argmin(alive[begin:])) or len(alive) - begin
                return first + begin, first + begin + length
        return end_row, end_row

    def set_states(self, places: Places, alive: Flags, priorities: Floats, times: Counts) -> None:
        """Set what a record says of rows; `places` are distinct."""
        if self._max_times is not None:
            alive = alive & (times < self._max_times)
        self.row_count += int(np.count_nonzero(alive)) - int(np.count_nonzero(self._alive[places]))
        self._alive[places], self._times[places] = alive, times
        self._weigh(places)

    def states(self, places: Places) -> tuple[Flags, Floats, Counts]:
        """Whether each row is there, its priority, and the times it was sampled."""
        return self._alive[places], np.ones(len(places), np.float32), self._times[places]

    def _weights_of(self, places: Places) -> Weights:
        """The weights of rows that are there."""
        return np.ones(len(places))

    def _why_none(self) -> str:
        return "the table holds no rows that may be drawn: sampling goes on when some have been appended"

    def _weigh(self, places: Places) -> None:
        """Bring the weights of rows up to date; with a bound on draws, `places` are distinct."""
        self._tree.set_weights(places, np.where(self._alive[places], self._weights_of(places), 0.0))
        if self._left is not None:
            # As the tree has them: to it the smallest ones are 0, and such a row has no draw that anybody could take.
            self._note_left(places, self._tree.weights(places))

    def _note_left(self, places: Places, weights: Weights) -> None:
        if self._left is not None and self._max_times is not None:
            left = np.where(weights > 0, np.uint32(self._max_times) - self._times[places], np.uint32(0))
            self._drawable += int(left.sum()) - int(self._left[places].sum())
            self._left[places] = left

    def _draw(
        self, random: np.random.Generator, n: int, policy_version: int, *, details: bool = False
    ) -> tuple[Places, Weights]:
        """Places, and with `details` their probabilities; they count as sampled."""
        self._require_drawable(n)
        if self._max_times is not None:
            return self._draw_bounded(random, n, self._max_times)
        places = self._tree.draw(random, n)
        np.add.at(self._times, places, ONE)
        return places, self._tree.weights(places) / self._tree.total if details else np.empty(0)

    def _require_drawable(self, n: int) -> None:
        if self._max_times is not None and n > self._drawable:
            raise UnavailableError(
                f"{self._drawable} draws are left of the rows that the table holds (max_times_sampled is "
                f"{self._max_times}): expected at least {n}; sampling goes on when more rows have been appended"
            )
        if n and not self._tree.total:
            raise UnavailableError(self._why_none())

    def _draw_bounded(self, random: np.random.Generator, n: int, max_times: int) -> tuple[Places, Weights]:
        chosen, probabilities, filled = np.empty(n, np.int64), np.empty(n), 0
        while filled < n:
            drawn = self._tree.draw(random, n - filled)
            earlier, distinct = _count_earlier(drawn)
            # As if drawn one after the other: a draw of a row that those before it have used up is drawn anew.
            accepted = drawn[self._times.take(drawn) + earlier < max_times]
            now = slice(filled, filled + len(accepted))
            chosen[now], probabilities[now] = accepted, self._tree.weights(accepted) / self._tree.total
            self._use(accepted, distinct, max_times)
            filled = now.stop
        return chosen, probabilities

    def _use(self, places: Places, distinct: Places, max_times: int) -> None:
        """Rows were drawn; those that have no draw left are there no more."""
        np.add.at(self._times, places, ONE)
        out_of_draws = distinct[self._times.take(distinct) >= max_times]
        self._alive[out_of_draws] = False
        self.row_count -= len(out_of_draws)
        self._reweigh_used(distinct, out_of_draws)

    def _reweigh_used(self, distinct: Places, out_of_draws: Places) -> None:
        # The others' weights are as they were; what they have left is not.
        self._note_left(distinct, self._tree.weights(distinct))
        self._weigh(out_of_draws)

    def _places(self, first_row: int, end_row: int) -> Places:
        return _places(first_row, end_row, self._ring.physical_rows)

    def _keys(self, places: Places) -> Keys:
        """Keys of rows that are held: the one at a row's place that is not before the first."""
        first, size = self._ring.first_row, self._ring.physical_rows
        ahead = places - first % size
        # As unsigned numbers, what is negative is large: then the row lies beyond the end of the ring's places.
        np.minimum(ahead.view(np.uint64), (ahead + size).view(np.uint64), out=ahead.view(np.uint64))
        ahead += first
        return ahead


class OrderedSampler(WeightedSampler):
    """Draws the oldest row, or the newest, until it has been drawn `max_times_sampled` times; then the next."""

    def __init__(self, ring: Ring, max_times_sampled: int, *, newest_first: bool) -> None:
        super().__init__(ring, max_times_sampled)
        self._newest_first, self._bound = newest_first, self._max_times or 0

    def _weights_of(self, places: Places) -> Weights:
        return self._bound - self._times[places].astype(np.float64)

    def _draw(
        self, random: np.random.Generator, n: int, policy_version: int, *, details: bool = False
    ) -> tuple[Places, Weights]:
        self._require_drawable(n)
        # The draws that are left form one line by age; it begins in the tree at the place of the oldest row.
        line = np.arange(n, dtype=np.float64)
        if self._newest_first:
            line = self._tree.total - 1 - line
        line += self._tree.sum_before(self._ring.first_row % self._ring.physical_rows)
        line[line >= self._tree.total] -= self._tree.total
        places = self._tree.find(line)
        self._use(places, places[np.flatnonzero(np.diff(places, prepend=-1))], self._bound)
        return places, np.ones(n)

    def _reweigh_used(self, distinct: Places, out_of_draws: Places) -> None:
        self._weigh(distinct)


def _places(first_row: int, end_row: int, physical_rows: int) -> Places:
    places: Places = np.arange(first_row, end_row) % physical_rows
    return places


def _count_earlier(drawn: Places) -> tuple[Counts, Places]:
    """How often the place of each draw was drawn before it in the same array; and each place once."""
    # Place and position in one number: numpy sorts those several times as fast as it finds a stable order.
    bits = len(drawn).bit_length()
    both = np.sort((drawn << bits) | np.arange(len(drawn)))
    places, order = both >> bits, both & ((1 << bits) - 1)
    begins = np.flatnonzero(np.diff(places, prepend=-1))
    earlier = np.empty(len(drawn), np.uint32)
    earlier[order] = np.arange(len(drawn)) - np.repeat(begins, np.diff(begins, append=len(drawn)))
    return earlier, places[begins]
