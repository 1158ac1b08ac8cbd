"""How far rows lag when they are trained on, what it is made of, and which of them the bound lets count."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from paceline.lag.attribution import RowTimes, attribute, lag_versions
from paceline.lag.bound import LagBound, Starvation
from paceline.lag.publications import Publications
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.row_metrics import Trained
from paceline.learner.sources import Batch
from paceline.process import own_time
from paceline.rows import NUMPY_TYPES, ByteMatrix, RowSpec

ROWS_AT_ONCE = 4096
"""So many rows are counted together, or those of one update: one by one the updates of a small batch cost thrice."""
LONGEST_SECONDS = 1.0
"""What waits to be counted is counted by then, if updates come at all."""

_STAMPS = ("policy_version", "policy_learner_step", "collected_at", "policy_applied_at", "sealed_at")


class _Update(NamedTuple):
    """One whose rows wait to be counted."""

    row_count: int
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
        clock: Callable[[], float] = own_time,
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
        self._updates: list[_Update] = []
        self._row_count = 0
        """Of all of them."""
        self._masked_rows, self._skipped_rows = 0, 0.0
        self._make_room(ROWS_AT_ONCE)
        if publications is not None:
            metrics.rows.split()
        if bound.max_lag_versions is not None:
            metrics.set_max_lag_versions(bound.max_lag_versions)

    def take(self, batch: Batch, *, policy_version: int, learner_step: int) -> Batch | Starvation:
        """The rows of a batch that are within the bound, noted as trained on now; Starvation where none is.

        To leave a row out gives it weight 0, and the mean over a batch is over the others.
        """
        self._skipped_rows += batch.skipped_row_count
        if self._row_count + len(batch.rows) > len(self._stamps):
            self.count()
            if len(batch.rows) > len(self._stamps):
                self._make_room(len(batch.rows))
        # Copies: the batch is valid only until the next one is taken.
        begin, end = self._row_count, self._row_count + len(batch.rows)
        self._stamps[begin:end] = self._stamps_of(batch.rows)
        versions, oldest = self._columns["policy_version"][begin:end], self._bound.oldest_within(policy_version)
        if oldest and versions.min() < oldest:
            places = np.flatnonzero(versions >= oldest)
            self._masked_rows += len(versions) - len(places)
            if not len(places):
                starvation = self._bound.find_starvation(versions, policy_version)
                assert starvation is not None  # every row is beyond the bound
                return starvation
            batch, end = batch.select(places), begin + len(places)
            self._stamps[begin:end] = self._stamps[begin + places]
        self._stored_at[begin:end] = 0.0 if batch.stored_at is None else batch.stored_at
        now = self._clock()
        self._updates.append(_Update(end - begin, policy_version, learner_step, now))
        self._row_count = end
        if end >= ROWS_AT_ONCE or now - self._updates[0].now >= LONGEST_SECONDS:
            self.count()
        return batch

    def count(self) -> None:
        """Have everything that was taken be in the metrics."""
        updates, rows = self._updates, slice(0, self._row_count)
        masked, skipped = self._masked_rows, self._skipped_rows
        self._updates, self._row_count, self._masked_rows, self._skipped_rows = [], 0, 0, 0.0
        if not updates and not masked and not skipped:
            return
        row_counts = np.array([each.row_count for each in updates], np.int64)
        version = np.array([each.policy_version for each in updates], np.int64)
        step = np.array([each.learner_step for each in updates], np.int64)
        now = np.array([each.now for each in updates], np.float64)
        # Without gaps: numpy is several times as fast with those.
        stamps = {name: np.ascontiguousarray(column[rows]) for name, column in self._columns.items()}
        versions, collected_at = stamps["policy_version"], stamps["collected_at"]
        attribution = None
        if self._publications is not None:
            times = RowTimes(
                policy_version=versions,
                applied_at=stamps["policy_applied_at"],
                sealed_at=stamps["sealed_at"],
                stored_at=self._stored_at[rows],
            )
            attribution = attribute(self._publications, times, learner_version=version, now=now, row_counts=row_counts)
        ages, has_age = now.repeat(row_counts), collected_at > 0
        # The estimates of two clocks may differ by more than a young row's age.
        np.maximum(np.subtract(ages, collected_at, out=ages), 0.0, out=ages)
        self._rows.add(
            Trained(
                lag_versions=lag_versions(versions, version.repeat(row_counts)),
                # A learner that resumed from an older checkpoint meets rows of policies with more updates than its own.
                lag_updates=np.maximum(step.repeat(row_counts) - stamps["policy_learner_step"], 0),
                age_seconds=ages if has_age.all() else ages[has_age],
                attribution=attribution,
                masked_rows=masked,
                skipped_rows=skipped,
            )
        )

    def _stamps_of(self, rows: Tensor) -> ByteMatrix:
        """The bytes of rows in which their stamps lie; from a device in one transfer."""
        if rows.device.type != "cpu":
            return rows[:, self._begin : self._end].cpu().numpy()
        return rows.numpy()[:, self._begin : self._end]  # a call of torch less: it is made for each update

    def _make_room(self, row_count: int) -> None:
        """Have so many rows find room. Nothing waits to be counted."""
        self._stamps: ByteMatrix = np.empty((row_count, self._end - self._begin), np.uint8)
        self._stored_at = np.empty(row_count, np.float64)
        stamps = self._stamps.view(self._dtype)[:, 0]
        self._columns = {name: stamps[name] for name in _STAMPS}
