"""What one peer may ask of a server. A peer is a connection: a process has one to each server.

An address would be too coarse, since all collectors of a host or behind one gateway share it, and a token too, since
all of a role do. Who opens many connections meets the bound on those, and that on all streams together.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.config import RpcConfig
from paceline.errors import TooManyCallsError, TooManyStreamsError


class PeerLimits:
    """Counts streams and calls of each peer. Any thread may use it; nothing waits."""

    def __init__(self, config: RpcConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_streams, self._max_calls = config.max_streams_per_peer, config.max_calls_per_second_per_peer
        self._max_peers, self._clock = config.max_connections, clock
        self._lock = threading.Lock()
        self._streams: Counter[str] = Counter()
        # Calls that a peer may still make at once, and when that was counted; who was silent longest comes first.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take_call(self, peer: str) -> None:
        """Count a call. Raises TooManyCallsError when the peer has made too many within a second."""
        now = self._clock()
        with self._lock:
            left, since = self._left.pop(peer, (float(self._max_calls), now))
            left = min(left + (now - since) * self._max_calls, self._max_calls)
            # A refused call costs nothing: who asks on and on is still served at the rate that is admitted.
            self._left[peer] = (left - 1 if left >= 1 else left, now)
            if len(self._left) > self._max_peers:
                self._left.popitem(last=False)
        if left < 1:
            raise TooManyCallsError(
                f"{peer} makes more than {self._max_calls} calls a second, as many as "
                "rpc.max_calls_per_second_per_peer admits: retry later, or raise it"
            )

    @contextmanager
    def stream(self, peer: str) -> Iterator[None]:
        """A stream for the time of its call. Raises TooManyStreamsError when the peer has too many."""
        with self._lock:
            if self._streams[peer] >= self._max_streams:
                raise TooManyStreamsError(
                    f"{peer} has {self._max_streams} streams open, as many as rpc.max_streams_per_peer admits: retry "
                    "later, or raise it"
                )
            self._streams[peer] += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams[peer] -= 1
                if not self._streams[peer]:
                    del self._streams[peer]
