"""Draws by the version of the policy that acted: the newer, the likelier, and none beyond a bound on the lag."""

from __future__ import annotations

import numpy as np

from paceline.tables.ring import Ring
from paceline.tables.samplers import Places, Versions, WeightedSampler
from paceline.tables.sum_tree import Weights

PART_ROWS = 256
"""Rows whose lowest version is kept, so that the rows which a newer policy puts beyond the bound are found."""
FARTHEST_HALVINGS = 400.0
"""Weights are made anew when a row's version is so many half-lives above the one that has weight 1."""
_NONE = np.iinfo(np.int64).max


class RecentSampler(WeightedSampler):
    """Weighs a row by its policy version; the newest version known only grows."""

    def __init__(
        self,
        ring: Ring,
        max_times_sampled: int | None,
        *,
        max_lag_versions: int | None,
        half_life_versions: float | None,
    ) -> None:
        self._max_lag, self._half_life = max_lag_versions, half_life_versions
        self._versions: Versions = np.zeros(ring.physical_rows, np.int64)
        self._lowest: Versions = np.full(-(-ring.physical_rows // PART_ROWS), _NONE, np.int64)
        """Of each part's rows that have a weight; lower where rows have left since it was made."""
        self._newest: int | None = None
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
        self._know(newest)
        if self._half_life is not None and (
            not self.row_count or newest - self._base > FARTHEST_HALVINGS * self._half_life
        ):
            self._base = newest
            self._weigh(np.flatnonzero(self._alive))
        super().add(first_row, row_count, versions)
        self._note_lowest(np.unique(places // PART_ROWS))

    def _weights_of(self, places: Places) -> Weights:
        versions = self._versions[places]
        if self._half_life is None:
            weights = np.ones(len(places))
        else:
            weights = np.exp2((versions - self._base) / self._half_life)
        if self._max_lag is not None and self._newest is not None:
            weights[versions < self._newest - self._max_lag] = 0
        return weights

    def _why_none(self) -> str:
        if not self.row_count:
            return super()._why_none()
        return (
            f"none of the {self.row_count} rows is recent enough: expected some at most {self._max_lag} versions "
            f"(max_lag_versions) behind {self._newest}, the newest policy version known; sampling goes on when "
            "collectors that act with a newer policy have appended"
        )

    def _draw(
        self, random: np.random.Generator, n: int, policy_version: int, *, details: bool = False
    ) -> tuple[Places, Weights]:
        self._know(policy_version)
        return super()._draw(random, n, policy_version, details=details)

    def _know(self, version: int) -> None:
        """The newest version is at least this one."""
        if self._newest is not None and version <= self._newest:
            return
        self._newest = version
        if self._max_lag is not None:
            parts = np.flatnonzero(self._lowest < version - self._max_lag)
            if len(parts):
                self._weigh(self._places_of(parts))
                self._note_lowest(parts)

    def _note_lowest(self, parts: Places) -> None:
        places = self._places_of(parts)
        weighed = self._tree.weights(places) > 0
        self._lowest[parts] = np.where(weighed, self._versions[places], _NONE).reshape(-1, PART_ROWS).min(axis=1)

    def _places_of(self, parts: Places) -> Places:
        return (parts[:, None] * PART_ROWS + np.arange(PART_ROWS)).reshape(-1)
