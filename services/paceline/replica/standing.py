"""How the snapshot that acts stands to the newest one that is known."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import Lock

from paceline.identity import PolicyIdentity, is_newer
from paceline.snapshot import SnapshotHeader

_MAX_NEWS = 4_096
"""Versions remembered that are newer than the one that acts."""


@dataclass(frozen=True, eq=False)
class Standing:
    """How far what acts is behind. Each change makes a new object, so whoever looks often compares which one it is."""

    applied_version: int
    known_version: int
    lag_updates: int | None
    """None: the learner did not say how many updates are behind the newest version."""
    newer_since: float | None
    """When a version newer than the one that acts was first known, by one's own clock; None: none is."""

    @property
    def lag_versions(self) -> int:
        """Versions between the one that acts and the newest known; at least 0."""
        return max(self.known_version - self.applied_version, 0)

    def lag_seconds(self, now: float) -> float:
        """Seconds since a newer version was first known, 0 while none is."""
        return 0.0 if self.newer_since is None else max(now - self.newer_since, 0.0)


@dataclass(frozen=True)
class _News:
    identity: PolicyIdentity
    learner_step: int | None
    known_at: float


class Standings:
    """What is known and what acts; news may come on another thread than applications."""

    def __init__(self) -> None:
        self.known: PolicyIdentity | None = None
        """The newest snapshot that the learner told of."""
        self.applied: SnapshotHeader | None = None
        """The snapshot that acts."""
        self.now: Standing | None = None
        """None: nothing acts yet."""
        self._newest: _News | None = None
        self._news: deque[_News] = deque()
        """Those newer than what acts, oldest first."""
        self._lock = Lock()

    def note_known(self, identity: PolicyIdentity, learner_step: int | None, known_at: float) -> bool:
        """Note a snapshot that the learner told of; whether it is newer than all before."""
        with self._lock:
            if not is_newer(identity, self.known):
                return False
            self.known, self._newest = identity, _News(identity, learner_step, known_at)
            if len(self._news) == _MAX_NEWS:
                self._news.pop()  # the first ones say since when there are news
            self._news.append(self._newest)
            self._settle()
            return True

    def note_applied(self, header: SnapshotHeader) -> None:
        """Note the snapshot that acts from now on."""
        with self._lock:
            self.applied = header
            self._settle()

    def _settle(self) -> None:
        applied, newest = self.applied, self._newest
        if applied is None or newest is None:
            return
        while self._news and not is_newer(self._news[0].identity, applied.identity):
            self._news.popleft()
        self.now = Standing(
            applied.identity.version,
            newest.identity.version,
            None if newest.learner_step is None else max(newest.learner_step - applied.learner_step, 0),
            self._news[0].known_at if self._news else None,
        )
