"""The learner's clock, as a process estimates it from its polls."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from paceline.lag.clock import ClockOffset, PeerClock
from paceline.process import own_time
from paceline.rpc.wire import seconds_of
from paceline.telemetry import get_logger
from paceline.v1 import times_pb2


class LearnerClock:
    """Tells the learner's time. `note_poll` belongs to the polling thread, `now` and `stamp` to the acting one."""

    def __init__(self, clock: Callable[[], float] = own_time) -> None:
        """`clock` is this process's own, in seconds since 1970."""
        self.own = clock
        self._peer, self._lock = PeerClock(), Lock()
        self._known: ClockOffset | None = None

    def note_poll(self, sent: float, times: times_pb2.AnswerTimes, received: float) -> None:
        """Take in a poll that was sent and answered at these times of one's own clock."""
        received_there, answered = seconds_of(times.received_at), seconds_of(times.answered_at)
        with self._lock:
            was_set = self._peer.add(
                sent,
                answered,
                received,
                held_seconds=answered - received_there,
                peer_uncertainty_seconds=seconds_of(times.uncertainty),
            )
            self._known = self._peer.offset(received)
        if was_set:
            get_logger().warning("clock_was_set", offset_seconds=None if self._known is None else self._known.seconds)

    def offset(self) -> ClockOffset | None:
        """The learner's clock minus one's own; None while unknown."""
        with self._lock:
            return self._peer.offset(self.own())

    def now(self) -> float:
        """The learner's time; one's own is taken for it while the offset is unknown, as it is right on one host.

        A better estimate is taken at once, so the time may go back, within what was uncertain before.
        """
        known = self._known
        return self.own() if known is None else known.to_peer(self.own())

    def stamp(self) -> float:
        """The learner's time, or 0 while the offset is unknown: for what nobody can judge without it."""
        return 0.0 if self._known is None else self.now()
