"""What collectors below a relay act with, until the relay's next poll tells it upstream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock

from paceline.identity import PolicyIdentity
from paceline.rpc.wire import identity_from_wire
from paceline.v1 import parameters_pb2 as pb


@dataclass(frozen=True)
class _Heard:
    report: pb.ReplicaReport
    applied: PolicyIdentity | None
    at: float

    @property
    def incarnation(self) -> int:
        return self.report.collector_incarnation

    def overtakes(self, known: _Heard) -> bool:
        """Whether it is the newer one of two reports of a collector, which never goes back to an older snapshot."""
        if self.incarnation != known.incarnation:
            return self.incarnation > known.incarnation
        return known.applied is None or (self.applied is not None and self.applied >= known.applied)


class PendingReports:
    """The newest report of each collector, and which of them are news since the last poll.

    There are never more than `max_collectors`, whatever polls say. Every method may be called from any thread.
    """

    def __init__(
        self, *, max_collectors: int, silence_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` gives seconds, monotonic; a collector that is silent for `silence_seconds` is forgotten."""
        self._max_collectors, self._silence_seconds, self._clock = max_collectors, silence_seconds, clock
        self._heard: dict[int, _Heard] = {}
        self._news: set[int] = set()
        self._lock = Lock()

    def hear(self, reports: Sequence[pb.ReplicaReport]) -> None:
        """Keep each report unless a newer one of its collector is known; either way, that collector lives.

        Raises:
            InvalidInputError: one names a policy that cannot be; none of them is kept then.
        """
        now = self._clock()
        heard = [_Heard(report, _applied(report), now) for report in reports]
        with self._lock:
            for latest in heard:
                index = latest.report.collector_index
                # The run has no such collector; the learner would pass over it, too.
                if not 0 <= index < self._max_collectors:
                    continue
                known = self._heard.get(index)
                if known is None or latest.overtakes(known):
                    self._heard[index] = latest
                elif latest.incarnation == known.incarnation:
                    self._heard[index] = replace(known, at=now)
                else:
                    continue  # it was replaced: that it goes on is no sign of life of its successor
                self._news.add(index)

    def hear_again(self, report: pb.ReplicaReport) -> None:
        """The collector whose poll is held still lives."""
        self.hear([report])

    def take(self) -> list[pb.ReplicaReport]:
        """The news, for a poll; they are none any more."""
        with self._lock:
            self._forget()
            indices, self._news = sorted(self._news), set()
            return [self._heard[index].report for index in indices]

    def give_back(self, reports: Sequence[pb.ReplicaReport]) -> None:
        """The poll failed: these are news as before, or what has come since is."""
        with self._lock:
            self._forget()
            self._news.update(index for report in reports if (index := report.collector_index) in self._heard)

    @property
    def collector_count(self) -> int:
        """Collectors heard within the silence."""
        with self._lock:
            self._forget()
            return len(self._heard)

    def _forget(self) -> None:
        bound = self._clock() - self._silence_seconds
        for index in [index for index, heard in self._heard.items() if heard.at < bound]:
            del self._heard[index]
            self._news.discard(index)


def _applied(report: pb.ReplicaReport) -> PolicyIdentity | None:
    return identity_from_wire(report.applied) if report.HasField("applied") else None
