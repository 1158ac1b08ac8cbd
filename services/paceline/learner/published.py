"""When this run's policy versions were published: remembered over a resume."""

from __future__ import annotations

import contextlib
from pathlib import Path

from paceline.lag.publications import Publication, PublicationLog, Publications
from paceline.telemetry import get_logger


class PublishedVersions:
    """Publications in memory and, as long as the disk takes them, in the run's folder.

    Without them training goes on: lag that cannot be split for want of a time counts as unattributed.
    """

    def __init__(self, path: Path) -> None:
        """Read what an earlier process noted, and go on behind it."""
        self._path, self._has_failed = path, False
        self._log: PublicationLog | None = None
        try:
            self._log = PublicationLog(path)
        except OSError as error:
            self._report(error)
        self.publications = Publications() if self._log is None else self._log.publications
        if self._log is not None and self._log.damaged_lines:
            get_logger().warning("publications_damaged", file=str(path), lines=self._log.damaged_lines)

    def note(self, version: int, published_at: float, learner_step: int) -> None:
        """A version was published; never fails."""
        publication = Publication(version, published_at, learner_step)
        if self._log is None:
            self.publications.add(publication)
            return
        try:
            self._log.append(publication)
        except OSError as error:  # it is in memory
            self._report(error)

    def close(self) -> None:
        """End the file."""
        if self._log is not None:
            with contextlib.suppress(OSError):  # the last lines, which were reported
                self._log.close()

    def _report(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            get_logger().error(
                "publications_not_written",
                file=str(self._path),
                error=str(error),
                meaning="training goes on; after a resume, lag that these versions are part of is unattributed",
            )
