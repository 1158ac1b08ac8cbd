"""Draws by the version of the policy that acted: the newer, the likelier, and none beyond a bound on the lag."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.lag.bound import LagBound, LearnerVersion, Starvation
from paceline.tables.ring import Ring
from paceline.tables.samplers import ONE, Places, Versions, WeightedSampler
from paceline.tables.sum_tree import Weights

PART_ROWS = 256
"""Rows whose lowest version is kept, so that the rows which a newer policy puts beyond the bound are found."""
EVEN_SHARE = 1 / 4
"""Rows of equal weight that make up such a share of the keys among which they lie are found by trial, in a sixth of the
time that the tree takes."""
FARTHEST_HALVINGS = 400.0
"""Weights are made anew when a row's version is so many half-lives above the one that has weight 1."""
_NONE = np.iinfo(np.int64).max


class RecentSampler(WeightedSampler):
    """Weighs a row by its policy version, and draws none that is beyond the bound.

    The bound counts from the newest version that was said with a draw, and only while none was, from the rows' newest.
    It grows, except where a newer incarnation of the learner says a lower one: then rows that were beyond the bound may
    be within it.
    """

    def __init__(
        self,
        ring: Ring,
        max_times_sampled: int | None,
        *,
        bound: LagBound,
        half_life_versions: float | None,
    ) -> None:
        self._bound, self._half_life = bound, half_life_versions
        self._versions: Versions = np.zeros(ring.physical_rows, np.int64)
        self._lowest: Versions = np.full(-(-ring.physical_rows // PART_ROWS), _NONE, np.int64)
        """Of each part's rows that have a weight; lower where rows have left since it was made."""
        self._newest: int | None = None
        self._is_told = False
        """Whether the newest version was said with a draw."""
        self._incarnation = 0
        """Of the learner that said it; 0: no learner did."""
        self._first_within = 0
        """No row before this key has a weight."""
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
        if not self._is_told and (self._newest is None or newest > self._newest):
            self._set_newest(newest)
        if self._half_life is not None and (
            not self.row_count or newest - self._base > FARTHEST_HALVINGS * self._half_life
        ):
            self._base = newest
            self._weigh(np.flatnonzero(self._alive))
        super().add(first_row, row_count, versions)
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
        if self._newest is not None and (oldest := self._bound.oldest_within(self._newest)):
            weights[versions < oldest] = 0
        return weights

    def _why_none(self) -> str:
        starvation = self._find_starvation(1)
        return super()._why_none() if starvation is None else str(starvation)

    def _find_starvation(self, n: int) -> Starvation | None:
        if self._newest is None:
            return None
        alive = np.flatnonzero(self._alive)
        left = None if self._max_times is None else self._max_times - self._times[alive].astype(np.int64)
        return self._bound.find_starvation(
            self._versions[alive], self._newest, draws_needed=1 if left is None else n, draws_left=left
        )

    def _draw(
        self, random: np.random.Generator, n: int, policy_version: int, *, details: bool = False
    ) -> tuple[Places, Weights]:
        self._know(policy_version)
        if self._half_life is not None or self._max_times is not None:
            return super()._draw(random, n, policy_version, details=details)
        self._require_drawable(n)
        first, end, total = max(self._first_within, self._ring.first_row), self._ring.end_row, self._tree.total
        if total < (end - first) * EVEN_SHARE:
            return super()._draw(random, n, policy_version, details=details)
        places = (random.integers(first, end, n)) % self._ring.physical_rows
        wrong = np.flatnonzero(self._tree.weights(places) == 0)
        while len(wrong):
            places[wrong] = again = random.integers(first, end, len(wrong)) % self._ring.physical_rows
            wrong = wrong[self._tree.weights(again) == 0]
        np.add.at(self._times, places, ONE)
        return places, np.full(n, 1 / total) if details else np.empty(0)

    def _know(self, version: int) -> None:
        """Whoever draws says that this version is the newest; 0: he does not know."""
        incarnation = version.incarnation if isinstance(version, LearnerVersion) else 0
        if version <= 0 or incarnation < self._incarnation:
            return
        if incarnation > self._incarnation and isinstance(version, LearnerVersion):
            self._incarnation = incarnation
            self._bound = replace(self._bound, base_version=version.base_version)
            self._is_told = True
            self._set_newest(int(version), anew=True)
        elif not self._is_told or self._newest is None or version > self._newest:
            goes_back = self._newest is not None and version < self._newest
            self._is_told = True
            self._set_newest(int(version), anew=goes_back)

    def _set_newest(self, version: int, *, anew: bool = False) -> None:
        """The bound counts from this version. `anew`: rows that were beyond it may be within it now."""
        self._newest = version
        oldest = self._bound.oldest_within(version)
        if anew and self._bound.max_lag_versions is not None:
            parts = np.arange(len(self._lowest))
        elif oldest:
            parts = np.flatnonzero(self._lowest < oldest)
        else:
            return
        if len(parts):
            self._weigh(self._places_of(parts))
            self._note_lowest(parts)
            self._first_within = self._find_first_within()

    def _note_lowest(self, parts: Places) -> None:
        places = self._places_of(parts)
        weighed = self._tree.weights(places) > 0
        self._lowest[parts] = np.where(weighed, self._versions[places], _NONE).reshape(-1, PART_ROWS).min(axis=1)

    def _find_first_within(self) -> int:
        """Key of the first row of the first part that has a row with a weight."""
        first = self._ring.first_row
        parts = np.roll(self._lowest != _NONE, -(first % self._ring.physical_rows // PART_ROWS))
        return first - first % PART_ROWS + int(parts.argmax()) * PART_ROWS

    def _places_of(self, parts: Places) -> Places:
        return (parts[:, None] * PART_ROWS + np.arange(PART_ROWS)).reshape(-1)
