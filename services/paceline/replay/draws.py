"""Rows drawn from one table for Sample streams, as its limiter lets them pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from paceline.errors import LimiterTimeoutError, StarvedError, StarvedForGoodError, UnavailableError
from paceline.lag.bound import LearnerVersion, Starvation
from paceline.replay.metrics import TableMetrics
from paceline.replay.skipping import BoundedBatch
from paceline.rows import ByteMatrix, RowSpec
from paceline.tables.limiter import Ended, Limiter
from paceline.tables.memory import Drawn, TableMemory

STARVED_SECONDS = 2.0
"""A draw that the bound on the lag leaves no row to waits so long for newer rows; then the caller is told."""


class Draws:
    """What samplers take from one table. What is granted counts as sampled; so what is not drawn is given back."""

    def __init__(
        self,
        table: str,
        memory: TableMemory,
        limiter: Limiter,
        changed: threading.Condition,
        metrics: TableMetrics,
        is_whole: Callable[[], bool],
    ) -> None:
        """`changed` is notified when other rows may have become drawable; `is_whole`: none is yet to be restored."""
        self._table, self._memory, self._limiter, self._changed = table, memory, limiter, changed
        self._metrics, self._is_whole = metrics, is_whole
        # A sampler that goes by version knows the bound itself.
        self._skips = memory.settings.max_lag_versions is not None and memory.settings.sampler != "recent"
        if self._skips:
            metrics.count_skipped(0)

    def grant(self, batch_size: int, batch_count: int, ended: Ended, *, wait: bool) -> int:
        """How many batches may be drawn now.

        Raises:
            StarvedError: the bound on the lag leaves fewer draws than a batch needs (`max_times_sampled`).
            PacelineError: as `Limiter.grant_samples`.
        """
        try:
            with self._metrics.waiting_for_limiter("sample"):
                return self._limiter.grant_samples(batch_size, batch_count, ended, wait=wait)
        except LimiterTimeoutError as error:
            starvation = self._memory.find_starvation(batch_size, 0)
            raise error if starvation is None else StarvedError(f"table {self._table!r}: {starvation}") from error

    def give_back(self, row_count: int) -> None:
        """So many rows that were granted will not be drawn."""
        if row_count:
            self._limiter.settle_samples(row_count, 0)

    def draw(
        self,
        random: np.random.Generator,
        out: ByteMatrix,
        ended: Ended,
        *,
        spec: RowSpec,
        policy_version: LearnerVersion,
        details: bool,
    ) -> Drawn | None:
        """Fill `out`, `[n, row_bytes]`, with as many rows that were granted; what is known of them, if asked for.

        Waits while there are none to draw: every priority is 0, say, or rows have left since they were granted.

        Raises:
            LimiterTimeoutError: the limiter's deadline came first; the message says what it waited for.
            StarvedError: the bound on the lag leaves no row to draw, and no newer one came for some seconds.
            PacelineError: what `ended` gave.
        """
        if self._skips:
            drawn = self._draw_bounded(random, out, ended, spec, policy_version, details)
        else:
            memory = self._memory
            drawn = self._fill(
                lambda: memory.sample(random, out, policy_version=policy_version, details=details),
                lambda: memory.find_starvation(len(out), policy_version),
                ended,
            )
        self._limiter.settle_samples(len(out), len(out))
        self._metrics.sampled_rows.inc(len(out))
        self._metrics.sampled_bytes.inc(out.nbytes)
        return drawn

    def _draw_bounded(
        self,
        random: np.random.Generator,
        out: ByteMatrix,
        ended: Ended,
        spec: RowSpec,
        policy_version: LearnerVersion,
        details: bool,
    ) -> Drawn | None:
        batch = BoundedBatch(self._memory, spec, random, out, policy_version=policy_version, details=details)
        try:
            return self._fill(batch.fill, batch.find_starvation, ended)
        finally:
            self._metrics.count_skipped(batch.skipped_rows)

    def _fill(
        self, sample: Callable[[], Drawn | None], find_starvation: Callable[[], Starvation | None], ended: Ended
    ) -> Drawn | None:
        """What `sample` gives, as soon as it does not raise UnavailableError. Raises as `draw`."""
        try:
            return sample()
        except UnavailableError:
            with self._metrics.waiting_for_limiter("sample"):
                return self._fill_later(sample, find_starvation, ended)

    def _fill_later(
        self, sample: Callable[[], Drawn | None], find_starvation: Callable[[], Starvation | None], ended: Ended
    ) -> Drawn | None:
        deadline_seconds, began = self._limiter.settings.deadline_seconds, time.monotonic()
        waived = False
        with self._changed:
            while True:
                try:
                    return sample()
                except UnavailableError as why:
                    error = ended()
                    if error is not None:
                        try:
                            raise error from why
                        finally:
                            del error  # or it and this frame keep each other, and with them what `sample` fills
                    starvation = find_starvation()
                    if starvation is not None and not waived:
                        # Without newer rows there will be no draw; a window's worth of them is let in for each wait.
                        self._limiter.waive_before(self._limiter.inserted)
                        waived = True
                    longest = deadline_seconds if starvation is None else min(deadline_seconds, STARVED_SECONDS)
                    seconds = began + longest - time.monotonic()
                    if seconds <= 0 and starvation is not None:
                        is_for_good = self._limiter.is_complete and self._is_whole()
                        kind = StarvedForGoodError if is_for_good else StarvedError
                        raise kind(f"table {self._table!r}: {starvation}") from why
                    if seconds <= 0:
                        raise LimiterTimeoutError(
                            f"sample of table {self._table!r} was held back for {deadline_seconds:g} s: {why}; "
                            "ask again"
                        ) from why
                self._changed.wait(seconds)
