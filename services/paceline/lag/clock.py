"""How far a peer's clock is from one's own, and how surely that is known, from round trips.

Own and peer's times are seconds since 1970 of two clocks that nobody has synchronised.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DRIFT = 1e-4
"""Seconds that two clocks may part in one second: twice the 50 ppm that quartz is specified for."""
RESOLUTION_SECONDS = 1e-6
"""No offset is known better: a double that counts seconds since 1970 resolves 0.24 microseconds."""
WINDOW_ROUND_TRIPS = 64

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClockOffset:
    """A peer's clock minus one's own: the truth is within `uncertainty_seconds` of `seconds`."""

    seconds: float
    uncertainty_seconds: float

    def to_peer(self, own_time: float) -> float:
        """What the peer's clock shows when one's own shows `own_time`."""
        return own_time + self.seconds

    def to_own(self, peer_times: Times) -> Times:
        """What one's own clock shows at times of the peer's; 0, which stands for an unknown time, stays 0."""
        return np.where(peer_times > 0, peer_times - self.seconds, 0.0)


@dataclass(frozen=True)
class _RoundTrip:
    offset_seconds: float
    half_seconds: float
    began: float

    def uncertainty(self, now: float, drift: float) -> float:
        return self.half_seconds + drift * max(now - self.began, 0.0)


class PeerClock:
    """Estimates the clock of one peer from the latest round trips to it.

    The peer read its clock somewhere between the request and the answer, so one round trip gives the offset to half
    of its own length, whatever the two ways took (Mills, RFC 5905, section 8). The shortest of the window is the best,
    until drift has made a later one better.
    """

    def __init__(self, *, window: int = WINDOW_ROUND_TRIPS, drift: float = DRIFT) -> None:
        self._round_trips: deque[_RoundTrip] = deque(maxlen=window)
        self._drift = drift

    def add(
        self,
        sent: float,
        peer_time: float,
        received: float,
        *,
        held_seconds: float = 0.0,
        peer_uncertainty_seconds: float = 0.0,
    ) -> bool:
        """Take in a round trip; whether one of the clocks was set since the last, so that those before count no more.

        A round trip that cannot be (received before it was sent, say, since one's own clock was set meanwhile) is
        passed over.

        Args:
            sent, received: by one's own clock.
            peer_time: by the peer's, when it answered.
            held_seconds: how long the peer kept the request before that, as it does with a long poll.
            peer_uncertainty_seconds: how far `peer_time` may be off, where who answered estimates the peer's clock
                itself, as a relay does.
        """
        round_trip = received - sent - held_seconds
        if not math.isfinite(round_trip + peer_time + peer_uncertainty_seconds):
            return False
        if held_seconds < 0 or peer_uncertainty_seconds < 0:
            return False
        if round_trip < -self._drift * held_seconds - RESOLUTION_SECONDS:
            return False
        latest = _RoundTrip(
            offset_seconds=peer_time - (sent + held_seconds + received) / 2,
            half_seconds=max(round_trip, 0.0) / 2 + peer_uncertainty_seconds + RESOLUTION_SECONDS,
            began=sent,
        )
        before = self.offset(received)
        was_set = before is not None and (
            abs(latest.offset_seconds - before.seconds)
            > latest.uncertainty(received, self._drift) + before.uncertainty_seconds
        )
        if was_set:
            self._round_trips.clear()
        self._round_trips.append(latest)
        return was_set

    def offset(self, now: float) -> ClockOffset | None:
        """The offset at `now` by one's own clock; None before the first round trip."""
        if not self._round_trips:
            return None
        best = min(self._round_trips, key=lambda trip: trip.uncertainty(now, self._drift))
        return ClockOffset(best.offset_seconds, best.uncertainty(now, self._drift))
