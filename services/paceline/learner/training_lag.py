"""How far rows lag when they are trained on, what it is made of, and which of them the bound lets count."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paceline.lag.attribution import RowTimes, attribute, lag_versions
from paceline.lag.bound import LagBound, Starvation
from paceline.lag.publications import Publications
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.row_metrics import Trained
from paceline.learner.sources import Batch
from paceline.rows import NUMPY_TYPES, RowSpec

UPDATES_AT_ONCE = 8
"""Rows of so many updates are counted together: for 256 rows each that costs a third of counting them one by one."""
LONGEST_SECONDS = 1.0
"""What waits to be counted is counted by then, if updates come at all."""

_STAMPS = ("policy_version", "policy_learner_step", "collected_at", "policy_applied_at", "sealed_at")


@dataclass(frozen=True)
class _Taken:
    """The rows of one update."""

    stamps: npt.NDArray[Any]
    stored_at: npt.NDArray[np.float64] | None
    policy_version: int
    learner_step: int
    now: float


class TrainingLag:
    """Counts rows as they are trained on, some updates at once. Used by one thread."""

    def __init__(
        self,
        spec: RowSpec,
        *,
        bound: LagBound,
        publications: Publications | None,
        metrics: LearnerMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin with no row.

        Args:
            publications: this run's, which grow as it publishes; None: lag is not split.
            clock: the learner's, in seconds since 1970.
        """
        self._bound, self._publications, self._rows, self._clock = bound, publications, metrics.rows, clock
        offsets = [spec.offsets[name] for name in _STAMPS]
        self._begin, self._end = min(offsets), max(spec.offsets[name] + spec[name].nbytes for name in _STAMPS)
        self._dtype = np.dtype(
            {
                "names": list(_STAMPS),
                "formats": [NUMPY_TYPES[spec[name].dtype] for name in _STAMPS],
                "offsets": [offset - self._begin for offset in offsets],
                "itemsize": self._end - self._begin,
            }
        )
        self._taken: list[_Taken] = []
        self._masked_rows, self._skipped_rows = 0, 0.0
        if publications is not None:
            metrics.rows.split()
        if bound.max_lag_versions is not None:
            metrics.set_max_lag_versions(bound.max_lag_versions)

    def take(self, batch: Batch, *, policy_version: int, learner_step: int) -> Batch | Starvation:
        """The rows of a batch that are within the bound, noted as trained on now; Starvation where none is.

        To leave a row out gives it weight 0, and the mean over a batch is over the others.
        """
        stamps, stored_at = self._stamps_of(batch.rows), batch.stored_at
        self._skipped_rows += batch.skipped_row_count
        oldest = self._bound.oldest_within(policy_version)
        versions = stamps["policy_version"]
        if oldest and versions.min() < oldest:
            places = np.flatnonzero(versions >= oldest)
            self._masked_rows += len(stamps) - len(places)
            if not len(places):
                starvation = self._bound.find_starvation(versions, policy_version)
                assert starvation is not None  # every row is beyond the bound
                return starvation
            batch = batch.select(places)
            stamps, stored_at = stamps[places], batch.stored_at
        now = self._clock()
        # Copies: the batch is valid only until the next one is taken.
        kept = None if stored_at is None or self._publications is None else stored_at.copy()
        self._taken.append(_Taken(stamps.copy(), kept, policy_version, learner_step, now))
        if len(self._taken) >= UPDATES_AT_ONCE or now - self._taken[0].now >= LONGEST_SECONDS:
            self.count()
        return batch

    def count(self) -> None:
        """Have everything that was taken be in the metrics."""
        taken, self._taken = self._taken, []
        masked, self._masked_rows = self._masked_rows, 0
        skipped, self._skipped_rows = self._skipped_rows, 0.0
        if not taken and not masked and not skipped:
            return
        stamps = np.concatenate([each.stamps for each in taken] or [np.empty(0, self._dtype)])
        sizes = [len(each.stamps) for each in taken]
        version = np.repeat(np.array([each.policy_version for each in taken], np.int64), sizes)
        step = np.repeat(np.array([each.learner_step for each in taken], np.int64), sizes)
        now = np.repeat(np.array([each.now for each in taken], np.float64), sizes)
        versions, collected_at = stamps["policy_version"], stamps["collected_at"]
        attribution = None
        if self._publications is not None:
            stored_at = [np.zeros(len(each.stamps)) if each.stored_at is None else each.stored_at for each in taken]
            times = RowTimes(
                policy_version=versions,
                applied_at=stamps["policy_applied_at"],
                sealed_at=stamps["sealed_at"],
                stored_at=np.concatenate(stored_at or [np.empty(0)]),
            )
            attribution = attribute(self._publications, times, learner_version=version, now=now)
        self._rows.add(
            Trained(
                lag_versions=lag_versions(versions, version),
                # A learner that resumed from an older checkpoint meets rows of policies with more updates than its own.
                lag_updates=np.maximum(step - stamps["policy_learner_step"], 0),
                # The estimates of two clocks may differ by more than a young row's age.
                age_seconds=np.maximum(now - collected_at, 0.0)[collected_at > 0],
                attribution=attribution,
                masked_rows=masked,
                skipped_rows=skipped,
            )
        )

    def _stamps_of(self, rows: Tensor) -> npt.NDArray[Any]:
        """The stamps of rows, `[n]` records; from a GPU in one transfer."""
        stamps: npt.NDArray[Any] = rows[:, self._begin : self._end].cpu().numpy().view(self._dtype)[:, 0]
        return stamps
