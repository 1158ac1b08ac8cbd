"""A lag that is made: which version a collector acts with next, to hold a lag or to repeat one that was recorded.

Versions never go back, so an acting policy ages by one version with each that is published until the next is applied.
What is held is therefore the lag that an application begins with.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from paceline.errors import ConfigError
from paceline.lag.trace import Application, read_trace


class Lags(Protocol):
    """The lag that each application is to begin with."""

    @property
    def most(self) -> int:
        """The largest; snapshots so far back must be kept."""

    def wanted(self, known_version: int, environment_steps: int) -> int | None:
        """Of the next application; None: there is none for now."""

    def note_application(self, known_version: int) -> None:
        """An application was made."""


class FixedLag:
    """The same lag always: a new version, so many behind, as soon as a newer one is known."""

    def __init__(self, versions: int) -> None:
        self.most = versions

    def wanted(self, known_version: int, environment_steps: int) -> int | None:
        """As `Lags`."""
        return self.most

    def note_application(self, known_version: int) -> None:
        """As `Lags`."""


class DrawnLag:
    """A lag that is drawn anew for each application, of which there is at most one for each version that is known.

    An application waits until it can begin with the lag that was drawn for it.
    """

    def __init__(self, weights: Mapping[int, float], seed: Sequence[int]) -> None:
        """`weights`: relative ones, by lag in versions."""
        self._lags = np.array(list(weights), np.int64)
        weight = np.array(list(weights.values()), np.float64)
        self._probabilities = weight / weight.sum()
        self._random = np.random.default_rng(seed)
        self.most = max(lag for lag, weight in weights.items() if weight > 0)
        self._drawn = self._draw()
        self._known_at_application: int | None = None

    def wanted(self, known_version: int, environment_steps: int) -> int | None:
        """As `Lags`."""
        return None if known_version == self._known_at_application else self._drawn

    def note_application(self, known_version: int) -> None:
        """As `Lags`."""
        self._known_at_application = known_version
        self._drawn = self._draw()

    def _draw(self) -> int:
        return int(self._random.choice(self._lags, p=self._probabilities))


class TracedLag:
    """The lags of a recorded trace, each at the environment step at which it began.

    The lag is repeated, not the version: another run may be faster. After the trace's end its last lag is held.
    """

    def __init__(self, applications: Sequence[Application]) -> None:
        """`applications`: at least one, oldest first."""
        self._steps = [application.environment_steps for application in applications]
        self._lags = [application.lag_versions for application in applications]
        self.most = max(self._lags)
        self._applied = -1
        self._current = 0

    def wanted(self, known_version: int, environment_steps: int) -> int | None:
        """As `Lags`."""
        self._current = max(bisect_right(self._steps, environment_steps) - 1, 0)
        is_last = self._current == len(self._lags) - 1
        return self._lags[self._current] if is_last or self._current > self._applied else None

    def note_application(self, known_version: int) -> None:
        """As `Lags`."""
        self._applied = self._current


class Injector:
    """Chooses, among the snapshots that a collector keeps, the one to act with next."""

    def __init__(self, lags: Lags) -> None:
        self._lags = lags

    @property
    def most_versions(self) -> int:
        """The largest lag that is injected."""
        return self._lags.most

    def next_version(
        self, held: Sequence[int], *, known_version: int, applied_version: int | None, environment_steps: int
    ) -> int | None:
        """The version to apply now; None: act on with what acts. It counts as applied when this returns.

        The newest that is at least as far behind as the lag asks; at the start of a run, when there is none, the
        oldest that there is.

        Args:
            held: versions that are kept, rising.
            known_version: the newest known.
            applied_version: what acts; None: nothing yet.
            environment_steps: that the collector has taken.
        """
        lag = self._lags.wanted(known_version, environment_steps)
        if not held or (lag is None and applied_version is not None):
            return None
        place = bisect_right(held, known_version - (lag or 0)) - 1
        if applied_version is not None and (place < 0 or held[place] <= applied_version):
            return None
        self._lags.note_application(known_version)
        return held[max(place, 0)]

    def oldest_wanted(self, held: Sequence[int], known_version: int) -> int:
        """The lowest of the versions kept that may still be applied; those below it can go."""
        place = bisect_right(held, known_version - self._lags.most) - 1
        return held[max(place, 0)] if held else known_version


def make_injector(
    mode: Literal["none", "fixed", "distribution", "trace"],
    *,
    versions: int = 0,
    weights: Mapping[int, float] | None = None,
    trace: Path | None = None,
    collector: int,
    seed: int,
) -> Injector | None:
    """What `lag.inject` asks for; None: collectors act with the newest they have.

    `seed` is the run's: each collector draws differently, and the same in a repeated run.

    Raises:
        ConfigError: what the mode needs is missing or makes no sense.
        NotFoundError, InvalidInputError: the trace is missing or damaged.
    """
    match mode:
        case "none":
            return None
        case "fixed":
            if versions < 0:
                raise ConfigError(f"lag.inject.versions is {versions}: expected 0 or more")
            return Injector(FixedLag(versions))
        case "distribution":
            _require_weights(weights or {})
            return Injector(DrawnLag(weights or {}, (seed, collector)))
        case "trace":
            if trace is None:
                raise ConfigError(
                    "lag.inject.trace is not set: expected a recorded trace, since lag.inject.mode is 'trace'"
                )
            return Injector(TracedLag(read_trace(trace, collector)))


def _require_weights(weights: Mapping[int, float]) -> None:
    if any(lag < 0 for lag in weights) or any(not 0 <= weight < np.inf for weight in weights.values()):
        raise ConfigError(f"lag.inject.weights is {dict(weights)}: expected lags and weights of 0 or more")
    if not any(weights.values()):
        raise ConfigError(
            f"lag.inject.weights is {dict(weights)}: expected the weight of at least one lag, such as "
            "{0: 0.5, 4: 0.5}, since lag.inject.mode is 'distribution'"
        )
