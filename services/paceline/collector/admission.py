"""Whether the policy that acts is near enough to the newest known one, and what is told while it is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.collector.metrics import CollectorMetrics
from paceline.lag.bound import Admission, LagBound
from paceline.replica import Standing
from paceline.telemetry import get_logger

TELL_AGAIN_SECONDS = 30.0
"""A pause tells again what it waits for, so often."""


class AdmissionControl:
    """Admits steps under the lag bound, and makes each pause seen: in metrics, and in the log as it begins and ends."""

    def __init__(self, bound: LagBound, metrics: CollectorMetrics) -> None:
        self._bound, self._metrics, self._log = bound, metrics, get_logger()
        self._admitted: Standing | None = None

    def admits(self, standing: Standing | None) -> bool:
        """Whether steps may be taken with a policy that stands so."""
        if standing is self._admitted:
            return True
        if standing is not None and not self._judge(standing).may_act:
            return False
        self._admitted = standing
        return True

    @contextmanager
    def pause(self, standing: Callable[[], Standing | None]) -> Iterator[Callable[[], None]]:
        """The time within is a pause; call what it gives now and then, and it tells again what the pause waits for."""
        began = told = time.monotonic()
        self._metrics.pauses.inc()
        self._metrics.paused.set(1)
        self._tell("lag_paused", standing(), 0.0)

        def tell_again() -> None:
            nonlocal told
            now = time.monotonic()
            if now - told >= TELL_AGAIN_SECONDS:
                told = now
                self._tell("lag_still_paused", standing(), now - began)

        try:
            yield tell_again
        finally:
            self._metrics.paused.set(0)
            after = standing()
            self._log.info(
                "lag_resumed" if self.admits(after) else "lag_pause_ended",  # the run's end, or a stop
                applied=None if after is None else after.applied_version,
                known=None if after is None else after.known_version,
                paused_seconds=round(time.monotonic() - began, 3),
            )

    def _judge(self, standing: Standing) -> Admission:
        return self._bound.admit(standing.applied_version, standing.known_version)

    def _tell(self, event: str, standing: Standing | None, seconds: float) -> None:
        if standing is None:
            return
        admission = self._judge(standing)
        self._log.warning(
            event,
            reason=admission.reason,
            applied=standing.applied_version,
            known=standing.known_version,
            lag_versions=admission.lag_versions,
            max_lag_versions=self._bound.max_lag_versions,
            waits_for=self._bound.oldest_within(standing.known_version),
            paused_seconds=round(seconds, 3),
        )
