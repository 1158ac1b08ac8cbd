"""Draws by the version of the policy that acted: the newer, the likelier, and none beyond a bound on the lag."""

from __future__ import annotations

import numpy as np

from paceline.lag.bound import LagBound, Starvation
from paceline.tables.newest import NewestVersion
from paceline.tables.ring import Ring
from paceline.tables.samplers import Places, Versions, WeightedSampler
from paceline.tables.sum_tree import Weights

PART_ROWS = 256
"""Rows whose lowest version is kept, so that the rows which a newer policy puts beyond the bound are found."""
FARTHEST_HALVINGS = 400.0
"""Weights are made anew when a row's version is so many half-lives above the one that has weight 1."""
_NONE = np.iinfo(np.int64).max


class RecentSampler(WeightedSampler):
    """Weighs a row by its policy version, and draws none that is beyond the bound.

    Where neither the version nor earlier draws make a difference, `BoundedSampler` does the same for less.
    """

    def __init__(
        self,
        ring: Ring,
        max_times_sampled: int | None,
        *,
        bound: LagBound,
        half_life_versions: float | None,
    ) -> None:
        self._newest, self._half_life = NewestVersion(bound), half_life_versions
        self._oldest = 0
        """The lowest version within the bound, as the weights have it."""
        self._versions: Versions = np.zeros(ring.physical_rows, np.int64)
        self._lowest: Versions = np.full(-(-ring.physical_rows // PART_ROWS), _NONE, np.int64)
        """Of each part's rows that have a weight; lower where rows have left since it was made."""
        self._base = 0
        """The version of weight 1: 2^((version - base) / half-life) keeps every ratio as the newest grows."""
        super().__init__(ring, max_times_sampled)

    @property
    def memory_bytes(self) -> int:
        """Bytes set aside."""
        return super().memory_bytes + self._versions.nbytes + self._lowest.nbytes

    def add(self, first_row: int, row_count: int, versions: Versions) -> None:
        """Rows have come."""
        if not row_count:
            return
        places = self._places(first_row, first_row + row_count)
        self._versions[places] = versions
        newest = int(versions.max())
        self._newest.note_rows(newest)
        self._follow()
        if self._half_life is not None and (
            not self.row_count or newest - self._base > FARTHEST_HALVINGS * self._half_life
        ):
            self._weigh_from(newest)
        super().add(first_row, row_count, versions)
        if self._half_life is not None and not self._tree.total:
            # Rows of a far higher version have left: those that are there weigh nothing beside it.
            drawable = self._versions[self._alive & (self._versions >= self._oldest)]
            if len(drawable):
                self._weigh_from(int(drawable.max()))
                self._note_lowest(np.arange(len(self._lowest)))
        self._note_lowest(np.unique(places // PART_ROWS))

    def within_bound(self, policy_version: int) -> int | None:
        """Rows that are not beyond the bound; None where rows differ in weight."""
        if self._half_life is not None:
            return None
        self._know(policy_version)
        return int(self._tree.total)

    def find_starvation(self, n: int, policy_version: int) -> Starvation | None:
        """What to report when the bound alone keeps `n` rows from being drawn; None when it does not."""
        self._know(policy_version)
        if self._drawable >= n if self._max_times is not None else self._tree.total:
            return None
        return self._find_starvation(n)

    def _weights_of(self, places: Places) -> Weights:
        versions = self._versions[places]
        if self._half_life is None:
            weights = np.ones(len(places))
        else:
            weights = np.exp2((versions - self._base) / self._half_life)
        if self._oldest:
            weights[versions < self._oldest] = 0
        return weights

    def _why_none(self) -> str:
        starvation = self._find_starvation(1)
        return super()._why_none() if starvation is None else str(starvation)

    def _find_starvation(self, n: int) -> Starvation | None:
        alive = np.flatnonzero(self._alive)
        left = None if self._max_times is None else self._max_times - self._times[alive].astype(np.int64)
        return self._newest.find_starvation(self._versions[alive], n, left)

    def _draw(
        self, random: np.random.Generator, n: int, policy_version: int, *, details: bool = False
    ) -> tuple[Places, Weights]:
        self._know(policy_version)
        return super()._draw(random, n, policy_version, details=details)

    def _know(self, version: int) -> None:
        self._newest.tell(version)
        self._follow()

    def _weigh_from(self, base: int) -> None:
        """Make all weights anew, such that rows of this version have weight 1."""
        self._base = base
        self._weigh(np.flatnonzero(self._alive))

    def _follow(self) -> None:
        """Go where the bound has gone."""
        oldest, before = self._newest.oldest_within, self._oldest
        if oldest == before:
            return
        self._oldest = oldest
        # Where it went back, rows that were beyond it may be within it.
        parts = np.flatnonzero(self._lowest < oldest) if oldest > before else np.arange(len(self._lowest))
        if len(parts):
            self._weigh(self._places_of(parts))
            self._note_lowest(parts)

    def _note_lowest(self, parts: Places) -> None:
        places = self._places_of(parts)
        weighed = self._tree.weights(places) > 0
        self._lowest[parts] = np.where(weighed, self._versions[places], _NONE).reshape(-1, PART_ROWS).min(axis=1)

    def _places_of(self, parts: Places) -> Places:
        return (parts[:, None] * PART_ROWS + np.arange(PART_ROWS)).reshape(-1)
