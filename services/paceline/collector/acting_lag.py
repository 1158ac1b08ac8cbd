"""Counts environment steps by how far behind the policy was that chose their actions."""

from __future__ import annotations

import numpy as np

from paceline.collector.metrics import CollectorMetrics
from paceline.replica import LearnerClock, Standing


class ActingLag:
    """Gathers what `CollectorMetrics` is told in bulk: an observation for each step would cost more than the step."""

    def __init__(self, metrics: CollectorMetrics, clock: LearnerClock) -> None:
        self._metrics, self._clock = metrics, clock
        self._standing: Standing | None = None
        self._seconds = 0.0
        self._steps: dict[Standing, int] = {}
        self._behind: list[tuple[float, int]] = []
        """Seconds and number of the steps with a policy that something newer was known of; of the others, 0."""

    def begin(self, standing: Standing | None) -> None:
        """The next steps' actions are chosen now, by the policy that stands so."""
        self._standing = standing
        if standing is not None and standing.newer_since is not None:
            self._seconds = standing.lag_seconds(self._clock.own())

    def count(self, steps: int) -> None:
        """So many steps were taken with them."""
        standing = self._standing
        if standing is None:
            return
        self._steps[standing] = self._steps.get(standing, 0) + steps
        if standing.newer_since is not None:
            self._behind.append((self._seconds, steps))

    def hand_on(self) -> None:
        """Tell the metrics what was counted since the last time."""
        if not self._steps:
            return
        metrics, counts = self._metrics, list(self._steps.values())
        metrics.acting_lag_versions.observe(np.repeat([each.lag_versions for each in self._steps], counts))
        known = {each: steps for each, steps in self._steps.items() if each.lag_updates is not None}
        if known:
            updates = np.array([each.lag_updates for each in known], np.int64)
            metrics.acting_lag_updates.observe(np.repeat(updates, list(known.values())))
        seconds = [*self._behind, (0.0, sum(counts) - sum(steps for _, steps in self._behind))]
        values, steps = zip(*seconds, strict=True)
        metrics.acting_lag_seconds.observe(np.repeat(np.array(values), steps))
        self._steps.clear()
        self._behind.clear()
