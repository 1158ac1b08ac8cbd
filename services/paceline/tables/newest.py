"""The newest policy version that a sampler was told of, from which the bound on the lag counts."""

from __future__ import annotations

from dataclasses import replace

from paceline.lag.bound import LagBound, LearnerVersion, Starvation
from paceline.tables.samplers import Draws, Versions


class NewestVersion:
    """What is said with the draws of a table, and what follows for the bound.

    Only while nobody said a version is it the newest of the rows. It grows, except where a newer incarnation of the
    learner says a lower one: then rows that were beyond the bound may be within it.
    """

    def __init__(self, bound: LagBound) -> None:
        self.oldest_within = 0
        """Rows of a lower version are beyond the bound; 0: none is."""
        self._bound = bound
        self._version: int | None = None
        self._is_told = False
        self._incarnation = 0
        """Of the learner that said the version; 0: no learner did."""

    def note_rows(self, version: int) -> None:
        """Rows of this version have come."""
        if not self._is_told and (self._version is None or version > self._version):
            self._set(version)

    def tell(self, version: int) -> None:
        """Whoever draws says that this version is the newest; 0: he does not know."""
        incarnation = version.incarnation if isinstance(version, LearnerVersion) else 0
        if version <= 0 or incarnation < self._incarnation:
            return
        if isinstance(version, LearnerVersion) and incarnation > self._incarnation:
            self._incarnation = incarnation
            self._bound = replace(self._bound, base_version=version.base_version)
        elif self._is_told and self._version is not None and version <= self._version:
            return
        self._is_told = True
        self._set(int(version))

    def find_starvation(self, versions: Versions, n: int, draws_left: Draws | None = None) -> Starvation | None:
        """As `LagBound.find_starvation`, of rows of these versions; None also where no version is known."""
        if self._version is None:
            return None
        return self._bound.find_starvation(
            versions, self._version, draws_needed=1 if draws_left is None else n, draws_left=draws_left
        )

    def _set(self, version: int) -> None:
        self._version = version
        self.oldest_within = self._bound.oldest_within(version)
