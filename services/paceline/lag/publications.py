"""When each policy version was published, and after how many updates: in memory, and as lines on disk.

Times are seconds since 1970 by the learner's clock.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.lag.lines import open_lines, read_lines

KEPT_PUBLICATIONS = 1 << 16
_STEPS = 4
"""What is mostly asked for lies a few publications on, where to go on one by one is ten times as fast as a search."""

Counts = npt.NDArray[np.int64]
Versions = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Publication:
    """One version's appearance."""

    version: int
    published_at: float
    learner_step: int


class Publications:
    """The latest publications, by rising version and time. Used by one thread.

    At least `kept` of them are remembered, at most twice as many. Of a version that is not among them nothing is known.
    """

    def __init__(self, kept: int = KEPT_PUBLICATIONS) -> None:
        self._kept = kept
        self._versions = np.zeros(2 * kept, np.int64)
        # One more, so that after the last one there always is one, which is never reached.
        self._times = np.full(2 * kept + 1, np.inf)
        self._steps = np.zeros(2 * kept, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Publication]:
        for place in range(self._count):
            yield self._at(place)

    @property
    def newest(self) -> Publication | None:
        """The last one; None before the first."""
        return self._at(self._count - 1) if self._count else None

    def add(self, publication: Publication) -> None:
        """Note a publication.

        A version that was noted but never served may be published anew by a learner that resumed: then it and all
        above it are forgotten. A time below the one before, from a clock that was set back, counts as that one.
        """
        if self._count and publication.version <= self._versions[self._count - 1]:
            self._forget_from(int(self._versions[: self._count].searchsorted(publication.version)))
        if self._count == len(self._versions):
            for column in (self._versions, self._times, self._steps):
                column[: self._kept] = column[self._kept : 2 * self._kept]
            self._forget_from(self._kept)
        earliest = self._times[self._count - 1] if self._count else -math.inf
        self._versions[self._count] = publication.version
        self._times[self._count] = max(publication.published_at, earliest)
        self._steps[self._count] = publication.learner_step
        self._count += 1

    def count_until(self, times: Times, at_least: Counts) -> Counts:
        """How many were published at or before each time, or `at_least` where that is more."""
        counts = at_least.copy()
        for _ in range(_STEPS):
            is_later = self._times.take(counts) <= times
            if not is_later.any():
                return counts
            counts += is_later
        rest = self._times.take(counts) <= times
        counts[rest] = self._times[: self._count].searchsorted(times[rest], side="right")
        return counts

    def count_to(self, versions: Versions) -> Counts:
        """How many are of each version or a lower one."""
        known = self._versions[: self._count]
        if self._count and known[-1] - known[0] == self._count - 1:
            # No number is left out, as almost always: a subtraction instead of a search.
            counts: Counts = np.minimum(versions - (known[0] - 1), self._count)
            return np.maximum(counts, 0)
        return known.searchsorted(versions, side="right").astype(np.int64, copy=False)

    def times_of(self, versions: Versions) -> Times:
        """When each version was published; NaN where that is not known."""
        places, is_known = self._find(versions)
        return np.where(is_known, self._times[places], np.nan)

    def updates_between(self, versions: Versions, version: int) -> npt.NDArray[np.float64]:
        """Updates from each version to `version`, at least 0; NaN where either is not known."""
        places, is_known = self._find(versions)
        end, end_is_known = self._find(np.asarray(version))
        return np.where(is_known & end_is_known, np.maximum(self._steps[end] - self._steps[places], 0), np.nan)

    def seconds_behind(self, versions: Versions, now: float) -> Times:
        """Seconds since a version newer than each was first published; 0 where none is newer, NaN where not known."""
        if not self._count:
            return np.full(np.shape(versions), np.nan)
        following = self.count_to(versions)
        seconds = np.maximum(now - self._times[np.minimum(following, self._count - 1)], 0.0)
        # Of a version before all that are kept, the first newer one may be forgotten.
        is_known = np.asarray(versions) >= self._versions[0] - 1
        return np.where(following == self._count, 0.0, np.where(is_known, seconds, np.nan))

    def _forget_from(self, place: int) -> None:
        self._count = place
        self._times[place:] = np.inf

    def _find(self, versions: Versions) -> tuple[Counts, npt.NDArray[np.bool_]]:
        """The place of each version, and whether it is there; a place that is not may be read all the same."""
        places = np.maximum(self.count_to(versions) - 1, 0)
        return places, (self._versions[places] == versions) & (self._count > 0)

    def _at(self, place: int) -> Publication:
        return Publication(int(self._versions[place]), float(self._times[place]), int(self._steps[place]))


class PublicationLog:
    """Publications that a learner which resumes finds again: one JSON line each, the oldest left out at times."""

    def __init__(self, path: Path, kept: int = KEPT_PUBLICATIONS) -> None:
        """Read what is there, and go on after it; a file that is not there is made."""
        self._path, self._kept = path, kept
        self.publications = Publications(kept)
        self.damaged_lines = 0
        """Lines that could not be read; their versions are unknown."""
        lines = read_lines(path) if path.exists() else []
        for line in lines:
            if (publication := _read_publication(line)) is None:
                self.damaged_lines += 1
            else:
                self.publications.add(publication)
        self._line_count = len(lines)
        self._file = open_lines(path)

    def append(self, publication: Publication) -> None:
        """Note a publication, in memory and on disk. Raises OSError when it is in memory only."""
        self.publications.add(publication)
        if self._line_count >= 3 * self._kept:
            self._rewrite()
            return
        self._file.write(json.dumps(asdict(publication)) + "\n")
        self._line_count += 1

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _rewrite(self) -> None:
        """Leave out what is not kept; after a crash the file is the old one or the new one."""
        temporary = self._path.with_name(f".{self._path.name}.new")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(publication)) + "\n" for publication in self.publications)
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        temporary.replace(self._path)
        self._file = open_lines(self._path)
        self._line_count = len(self.publications)


def _read_publication(line: dict[str, Any] | None) -> Publication | None:
    if line is None:
        return None
    version, published_at, step = (line.get(name) for name in ("version", "published_at", "learner_step"))
    if not isinstance(version, int) or not isinstance(step, int) or not isinstance(published_at, (int, float)):
        return None
    if version < 1 or step < 0 or not math.isfinite(published_at):
        return None
    return Publication(version, float(published_at), step)
