"""Draws evenly among the rows that a bound on the lag allows."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paceline.errors import UnavailableError
from paceline.lag.bound import LagBound, Starvation
from paceline.tables.newest import NewestVersion
from paceline.tables.ring import Keys, Ring
from paceline.tables.samplers import UniformSampler, Versions

LISTED_BELOW = 1 / 32
"""Where a smaller share of the keys is within the bound, rows are drawn from a list of them, and else by trial."""
LOOK_KEYS = 256
"""Keys that a search for the first row within the bound looks at first; then twice as many, and so on."""
_ABSENT = -1
"""Version of a place without a row."""


class BoundedSampler(UniformSampler):
    """Draws every row that is within the bound with the same probability, with replacement, any number of times.

    Rows come with rising versions, but for collectors that lag: so those within the bound are most of those after the
    first one, and to draw among all keys after it, again where a row is beyond, needs neither weights nor a tree.
    """

    def __init__(self, ring: Ring, bound: LagBound) -> None:
        super().__init__(ring)
        self._newest = NewestVersion(bound)
        self._versions: Versions = np.full(ring.physical_rows, _ABSENT, np.int64)
        self._rows_of: dict[int, int] = {}
        """Rows of each version."""
        self._oldest, self._rows_within, self._first_within = 0, 0, 0
        """The lowest version within the bound, rows of it and above, and a key that none of those is before."""
        self._listed: Keys | None = None
        """Keys of all rows within the bound; None: to be made."""

    @property
    def memory_bytes(self) -> int:
        """Bytes set aside."""
        return super().memory_bytes + self._versions.nbytes

    def add(self, first_row: int, row_count: int, versions: Versions) -> None:
        """Rows have come."""
        super().add(first_row, row_count, versions)
        if not row_count:
            return
        versions = np.maximum(versions, 0)  # a peer may send what no policy has, and below 0 a place has no row
        self._versions[self._places(first_row, first_row + row_count)] = versions
        self._count(versions, 1)
        self._newest.note_rows(int(versions.max()))
        self._follow()

    def remove(self, first_row: int, end_row: int) -> None:
        """Rows have left."""
        places = self._places(first_row, end_row)
        versions = self._versions[places]
        self._versions[places] = _ABSENT
        self._count(versions[versions != _ABSENT], -1)

    def within_bound(self, policy_version: int) -> int:
        """Rows that are not beyond the bound."""
        self._know(policy_version)
        return self._rows_within

    def find_starvation(self, n: int, policy_version: int) -> Starvation | None:
        """What to report when the bound alone keeps `n` rows from being drawn; None when it does not."""
        self._know(policy_version)
        return None if self._rows_within else self._find_starvation()

    def draw(self, random: np.random.Generator, n: int, policy_version: int) -> Keys:
        """`[n]` keys. Raises UnavailableError if no row is within the bound."""
        self._know(policy_version)
        if not self._rows_within:
            starvation = self._find_starvation()
            if starvation is not None:
                raise UnavailableError(str(starvation))
            return super().draw(random, n, policy_version)  # which says that there is none
        first, end = max(self._first_within, self._ring.first_row), self._ring.end_row
        share = self._rows_within / (end - first)
        if share < LISTED_BELOW:
            if self._listed is None:
                self._listed = first + np.flatnonzero(self._is_within(np.arange(first, end)))
            return self._listed[random.integers(0, len(self._listed), n)]
        keys: Keys = random.integers(first, end, n)
        if self._rows_within == end - first:
            return keys  # as mostly, and then a look at each row's version would cost more than the draw
        wrong = np.flatnonzero(~self._is_within(keys))
        while len(wrong):
            tried = random.integers(first, end, math.ceil(len(wrong) / share))
            found = tried[self._is_within(tried)][: len(wrong)]
            keys[wrong[: len(found)]] = found
            wrong = wrong[len(found) :]
        return keys

    def _probability(self) -> float:
        """That one draw gives a row which may be drawn."""
        return 1 / self._rows_within

    def _know(self, version: int) -> None:
        self._newest.tell(version)
        self._follow()

    def _follow(self) -> None:
        """Go where the bound has gone."""
        oldest, before = self._newest.oldest_within, self._oldest
        if oldest == before:
            return
        self._oldest, self._listed = oldest, None
        between = range(min(oldest, before), max(oldest, before))
        # Of versions far apart, as after a restore, only some have rows.
        versions = between if len(between) < len(self._rows_of) else [v for v in self._rows_of if v in between]
        moved = sum(self._rows_of.get(version, 0) for version in versions)
        self._rows_within += moved if oldest < before else -moved
        first = max(self._first_within, self._ring.first_row) if oldest > before else self._ring.first_row
        self._first_within = self._find_first_within(first)

    def _find_first_within(self, first: int) -> int:
        look = LOOK_KEYS
        while first < self._ring.end_row:
            within = self._is_within(np.arange(first, min(self._ring.end_row, first + look)))
            at = int(within.argmax())
            if within[at]:
                return first + at
            first, look = first + len(within), 2 * look
        return first

    def _count(self, versions: Versions, sign: int) -> None:
        """So many rows more or less."""
        self._listed = None
        for version, count in zip(*(each.tolist() for each in np.unique(versions, return_counts=True)), strict=True):
            left = self._rows_of.get(version, 0) + sign * count
            if left:
                self._rows_of[version] = left
            else:
                del self._rows_of[version]
            if version >= self._oldest:
                self._rows_within += sign * count

    def _is_within(self, keys: Keys) -> npt.NDArray[np.bool_]:
        # A place without a row is never within: versions are 0 or more.
        return self._versions.take(keys % self._ring.physical_rows) >= self._oldest

    def _find_starvation(self) -> Starvation | None:
        return self._newest.find_starvation(self._versions[self._versions != _ABSENT], 1)
