"""How far replay's clock is from the learner's, which runs on this host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import grpc
import numpy as np
import numpy.typing as npt

from paceline.lag.clock import ClockOffset, PeerClock
from paceline.process import own_time
from paceline.rpc.wire import seconds_of
from paceline.v1 import replay_pb2, replay_pb2_grpc

PROBE_SECONDS = 5.0
"""Between two looks at replay's clock: in that time clocks of quartz part by half a millisecond at most."""

Seconds = npt.NDArray[np.float64]


class ReplayClock:
    """The clock of one replay service, estimated from each DescribeTables: those of a thread, and those of its users.

    Methods may be called from any thread.
    """

    def __init__(
        self,
        stub: replay_pb2_grpc.ReplayServiceStub,
        *,
        run_id: str,
        deadline_seconds: float,
        on_estimate: Callable[[ClockOffset], None] = lambda offset: None,
    ) -> None:
        """`on_estimate` is told the offset, replay's clock minus the learner's, whenever the thread has looked."""
        self._stub, self._deadline_seconds, self._on_estimate = stub, deadline_seconds, on_estimate
        self._request = replay_pb2.DescribeTablesRequest(run_id=run_id)
        self._peer, self._lock = PeerClock(), threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look every few seconds from now on."""
        self._thread = threading.Thread(target=self._look_until_closed, name="replay-clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more. The channel may be closed then."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(5)

    def describe(self, seconds: float | None = None) -> replay_pb2.DescribeTablesResponse:
        """What replay has in its tables, asked for at most `seconds`; the answer's times are taken in.

        Raises:
            grpc.RpcError: it did not answer.
        """
        sent = own_time()
        answer: replay_pb2.DescribeTablesResponse = self._stub.DescribeTables(
            self._request, timeout=self._deadline_seconds if seconds is None else seconds
        )
        received = own_time()
        if answer.HasField("times"):
            there, answered = seconds_of(answer.times.received_at), seconds_of(answer.times.answered_at)
            with self._lock:
                self._peer.add(sent, answered, received, held_seconds=answered - there)
        return answer

    def offset(self) -> ClockOffset | None:
        """Replay's clock minus the learner's; None while unknown."""
        with self._lock:
            return self._peer.offset(own_time())

    def to_own(self, times: Seconds) -> Seconds:
        """Times of replay's by the learner's clock; 0 where they are not known, or the offset is not."""
        offset = self.offset()
        return np.zeros_like(times) if offset is None else offset.to_own(times)

    def _look_until_closed(self) -> None:
        while not self._closed.is_set():
            # Away, or its channel was closed; whoever wants its rows says so. What is known gets less sure.
            with contextlib.suppress(grpc.RpcError, ValueError):
                self.describe()
            if (offset := self.offset()) is not None:
                self._on_estimate(offset)
            self._closed.wait(PROBE_SECONDS)
