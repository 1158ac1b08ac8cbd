"""The bound on lag: which rows and which acting policies are within it, and what bound would let a run go on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError

Counts = npt.NDArray[np.int64]
Versions = npt.NDArray[np.int64]


class LearnerVersion(int):
    """The newest policy version of a learner, with what else the bound needs to know of that learner.

    A number, so that whoever hands it on need not know the rest. Incarnation 0: it says nothing of a learner.
    """

    incarnation: int
    """Of the learner: what a newer one says replaces what was said before."""
    base_version: int
    """As `LagBound.base_version`."""

    def __new__(cls, version: int, *, incarnation: int = 0, base_version: int = 0) -> Self:
        """As the fields say."""
        made = super().__new__(cls, version)
        made.incarnation, made.base_version = incarnation, base_version
        return made

    def raised_to(self, version: int) -> LearnerVersion:
        """The same learner's, if it says this version, too."""
        if version <= self:
            return self
        return LearnerVersion(version, incarnation=self.incarnation, base_version=self.base_version)


@dataclass(frozen=True)
class Admission:
    """Whether a collector may act with what it has applied, and if not, why."""

    may_act: bool
    lag_versions: int
    reason: str = ""


_SMALLEST_BOUND = re.compile(r"; with \S+=(\d+) they would do,")


@dataclass(frozen=True)
class Starvation:
    """A table from which the bound lets no batch be drawn."""

    max_lag_versions: int
    newest_version: int
    draws_within: int
    draws_needed: int
    smallest_bound: int
    """The smallest bound under which one could be drawn now."""
    setting: str = "lag.max_lag_versions"

    def __str__(self) -> str:
        return (
            f"no batch can be drawn: the rows that are at most {self.max_lag_versions} versions ({self.setting}) "
            f"behind {self.newest_version}, the newest policy version, allow {self.draws_within} draws, expected at "
            f"least {self.draws_needed}; with {self.setting}={self.smallest_bound} they would do, or wait for "
            "collectors that act with a newer policy"
        )

    @staticmethod
    def read_smallest_bound(message: str) -> int | None:
        """`smallest_bound` as a message has it, which is how it gets from replay to the learner; None: it has none."""
        found = _SMALLEST_BOUND.search(message)
        return None if found is None else int(found[1])


@dataclass(frozen=True)
class LagBound:
    """At most `max_lag_versions` behind; None: no bound.

    `base_version` is the version that the run was last restored at; 0: never. What was collected under it or an earlier
    one counts as if it were of it, or a restore, which skips versions, could put every row beyond the bound.
    """

    max_lag_versions: int | None
    base_version: int = 0
    setting: str = "lag.max_lag_versions"
    """Where the bound comes from, for whoever is to change it."""

    def effective_lag(self, versions: Versions, newest_version: int) -> Counts:
        """Versions that the bound counts each as behind; at least 0."""
        lags: Counts = np.maximum(newest_version - np.maximum(versions, self.base_version), 0)
        return lags

    def is_exceeded(self, versions: Versions, newest_version: int) -> npt.NDArray[np.bool_]:
        """Which are beyond the bound: not to be drawn, and without weight in an update."""
        if self.max_lag_versions is None:
            return np.zeros(np.shape(versions), np.bool_)
        return self.effective_lag(versions, newest_version) > self.max_lag_versions

    def oldest_within(self, newest_version: int) -> int:
        """The lowest version that is not beyond the bound, for a table that draws by version; 0: all are within."""
        if self.max_lag_versions is None or newest_version - self.base_version <= self.max_lag_versions:
            return 0
        return newest_version - self.max_lag_versions

    def admit(self, applied_version: int, known_version: int) -> Admission:
        """Whether a collector may take another step, having applied one version and knowing of another."""
        lag = int(self.effective_lag(np.asarray(applied_version), known_version))
        if self.max_lag_versions is None or lag <= self.max_lag_versions:
            return Admission(True, lag)
        return Admission(
            False,
            lag,
            f"paused: version {applied_version} acts, {lag} behind {known_version}, the newest known; expected at most "
            f"{self.max_lag_versions} (lag.max_lag_versions). Collecting goes on when version "
            f"{self.oldest_within(known_version)} or a newer one is applied",
        )

    def find_starvation(
        self,
        versions: Versions,
        newest_version: int,
        *,
        draws_needed: int = 1,
        draws_left: Counts | None = None,
    ) -> Starvation | None:
        """What to report when the bound, and nothing else, keeps a batch from being drawn; None when it does not.

        Args:
            versions: of the rows that the table holds.
            draws_needed: for one batch; 1 where a row may be drawn any number of times.
            draws_left: how often each row may still be drawn; None: once for each row, or any number of times.
        """
        if self.max_lag_versions is None:
            return None
        lags = self.effective_lag(versions, newest_version)
        draws = np.ones_like(lags) if draws_left is None else draws_left
        within = int(draws[lags <= self.max_lag_versions].sum())
        if within >= draws_needed or int(draws.sum()) < draws_needed:
            return None
        order = np.argsort(lags, kind="stable")
        enough = int(draws[order].cumsum().searchsorted(draws_needed))
        smallest = int(lags[order[enough]])
        return Starvation(self.max_lag_versions, newest_version, within, draws_needed, smallest, self.setting)


def smallest_reachable_bound(
    *, prefetch_batches: int, publish_every_updates: int, most_injected_versions: int = 0
) -> int:
    """The smallest bound that settings allow to be met.

    A batch that is ordered ahead is used `prefetch_batches` updates later, so even a row of the newest policy lags by
    what is published meanwhile; and a collector that is made to lag never gets nearer than that.
    """
    return max(prefetch_batches // publish_every_updates, most_injected_versions)


def require_reachable(max_lag_versions: int | None, smallest: int) -> None:
    """Raise ConfigError if the bound is below the smallest one that can be met."""
    if max_lag_versions is not None and max_lag_versions < smallest:
        raise ConfigError(
            f"lag.max_lag_versions is {max_lag_versions}: expected at least {smallest}, since batches ordered ahead "
            "(learner.prefetch_batches / learner.publish_every_updates) or the injected lag (lag.inject) are always "
            "so far behind; raise the bound, or lower what makes the lag"
        )
