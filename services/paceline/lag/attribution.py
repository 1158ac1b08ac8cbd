"""Where the lag of a row came from: what was published, and what time passed, in each part of its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from paceline.lag.publications import Publications

PARTS = ("transfer", "rollout", "queue", "residence", "unattributed")
"""transfer: published -> applied by the collector. rollout: applied -> block sealed. queue: sealed -> stored by replay.
residence: stored -> trained on. unattributed: what none of these can be said to be."""
_UNATTRIBUTED = PARTS.index("unattributed")

Counts = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Reached = TypeVar("Reached", Counts, Times)


@dataclass(frozen=True)
class RowTimes:
    """The way of rows, in arrays that broadcast to one shape.

    Times are seconds since 1970 by the learner's clock, or what is taken for it; one that is not known is 0 or NaN.
    """

    policy_version: npt.NDArray[np.int64]
    applied_at: Times
    sealed_at: Times
    stored_at: Times


@dataclass(frozen=True)
class Attribution:
    """The parts of each row's lag: `[5, *rows]`, in the order of `PARTS`, none negative."""

    versions: Counts
    """Their sum is the row's lag in versions."""
    seconds: Times
    """Their sum is the time since the row's policy was published or, where that is not known, since the first time
    that is."""

    def version_totals(self) -> dict[str, int]:
        """Over all rows."""
        return dict(zip(PARTS, self.versions.reshape(len(PARTS), -1).sum(axis=1).tolist(), strict=True))

    def second_totals(self) -> dict[str, float]:
        """Over all rows."""
        return dict(zip(PARTS, self.seconds.reshape(len(PARTS), -1).sum(axis=1).tolist(), strict=True))


def lag_versions(policy_version: npt.NDArray[np.int64], learner_version: int | Counts) -> Counts:
    """Versions that rows are behind; a row of a policy that this learner has not published yet is not behind."""
    return np.maximum(learner_version - policy_version, 0)


def attribute(
    publications: Publications,
    rows: RowTimes,
    *,
    learner_version: int | Counts,
    now: float | Times,
    row_counts: Counts | None = None,
) -> Attribution:
    """Split the lag of rows that are trained on at `now` by a learner whose newest version is `learner_version`.

    Both may be arrays that broadcast with the rows; or, with `row_counts`, both are of updates, `[updates]`, each of
    which took so many of the rows, `[n]`: rows of several updates in one call cost less than by themselves.

    A row of version v lags by the versions v + 1 to `learner_version`, and each belongs to the part in which it was
    published: transfer those up to and with `applied_at`, rollout those after it up to and with `sealed_at`, and so on.
    Times out of order, as clocks that disagree give them, are brought into order first: none before one that comes
    earlier on the way, none after `now`. Where a time in the middle is not known, what lies between its neighbours is
    unattributed, and so are versions whose publication is not known.
    """
    newest = np.asarray(learner_version)
    # One's own clock may have been set back.
    now, newest_count = np.fmax(now, publications.times_of(newest)), publications.count_to(newest)
    if row_counts is not None:
        newest, newest_count = newest.repeat(row_counts), newest_count.repeat(row_counts)
        now = np.repeat(now, row_counts)
    version, applied, sealed, stored, newest, now = np.broadcast_arrays(
        rows.policy_version, rows.applied_at, rows.sealed_at, rows.stored_at, newest, now
    )
    times = np.empty((5, *version.shape))
    times[0], times[1], times[2], times[3], times[4] = publications.times_of(version), applied, sealed, stored, now
    known = times > 0
    # An unknown time becomes the one before. One by one: `accumulate` takes twenty times as long.
    for place in (1, 2, 3, 4):
        np.fmax(times[place - 1], times[place], out=times[place])
    np.minimum(times, now, out=times)

    counts = np.empty(times.shape, np.int64)
    counts[0] = publications.count_to(version)
    np.maximum(newest_count, counts[0], out=counts[4])
    for place in (1, 2, 3):
        np.minimum(publications.count_until(times[place], counts[place - 1]), counts[4], out=counts[place])

    versions = _split(counts, np.concatenate((np.ones_like(known[:1]), known[1:])))
    versions[_UNATTRIBUTED] += lag_versions(version, newest) - (counts[4] - counts[0])
    return Attribution(versions, _split(times, known))


def _split(reached: Reached, known: Flags) -> Reached:
    """The parts `[5, ...]` of a way of which `reached` `[5, ...]` says how far it was at its five times.

    Each step between two neighbours belongs to the second's part, unless the first is not known; then it belongs, from
    the last time that is known, to no part.
    """
    parts = np.zeros_like(reached)
    if known.all():
        np.subtract(reached[1:], reached[:-1], out=parts[:_UNATTRIBUTED])
        return parts
    begun, before = known[0].copy(), reached[0]
    for part in range(_UNATTRIBUTED):
        step = np.where(begun & known[part + 1], reached[part + 1] - before, 0)
        parts[part] = np.where(known[part], step, 0)
        parts[_UNATTRIBUTED] += np.where(known[part], 0, step)
        before = np.where(known[part + 1], reached[part + 1], before)
        begun |= known[part + 1]
    return parts
