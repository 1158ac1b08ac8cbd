"""Sends new priorities to replay, beside the training and never in its way."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

import grpc
import numpy as np
import numpy.typing as npt

from paceline.config import RpcConfig
from paceline.errors import PacelineError
from paceline.rpc.bulk import UPDATE_PRIORITIES_REQUEST, Bulk
from paceline.rpc.client import Backoff
from paceline.rpc.status import raising
from paceline.telemetry import get_logger
from paceline.v1 import replay_pb2

MAX_WAITING_ROWS = 1 << 16
"""Priorities that wait to be sent; beyond them the oldest are dropped, which are the most outdated too."""


class PriorityUpdates:
    """A thread that sends what it is given, as many at once as there are."""

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        run_id: str,
        table: str,
        rpc: RpcConfig,
        peer: str,
        on_done: Callable[[int, int], None],
    ) -> None:
        """`on_done` is told how many rows' priorities were sent, and how many were dropped, since it was called last.

        It is called by this object's thread.
        """
        self._method = channel.unary_unary(
            "/paceline.v1.ReplayService/UpdatePriorities",
            request_serializer=UPDATE_PRIORITIES_REQUEST.serialize,
            response_deserializer=replay_pb2.UpdatePrioritiesResponse.FromString,
        )
        self._head = replay_pb2.UpdatePrioritiesRequest(run_id=run_id, table=table)
        self._rpc, self._peer, self._on_done = rpc, peer, on_done
        self._backoff, self._log, self._said = Backoff(rpc), get_logger(), ""
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = collections.deque()
        self._waiting_rows = self._dropped_rows = 0
        self._closed = False
        self._thread = threading.Thread(target=self._send_until_closed, name="priorities", daemon=True)
        self._thread.start()

    def put(self, keys: npt.NDArray[np.int64], priorities: npt.NDArray[np.float32]) -> None:
        """Have these sent. Never waits."""
        with self._changed:
            self._waiting.append((keys, priorities))
            self._waiting_rows += len(keys)
            while self._waiting_rows > MAX_WAITING_ROWS and len(self._waiting) > 1:
                oldest = len(self._waiting.popleft()[0])
                self._waiting_rows -= oldest
                self._dropped_rows += oldest
            self._changed.notify()

    def close(self) -> None:
        """Send no more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(self._rpc.deadline_seconds)

    def _send_until_closed(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                # Where a row comes twice, the later priority counts: the order is kept.
                keys, priorities = (np.concatenate(each) for each in zip(*self._waiting, strict=True))
                self._waiting.clear()
                self._waiting_rows, dropped, self._dropped_rows = 0, self._dropped_rows, 0
            sent = self._send(keys, priorities)
            self._on_done(len(keys) if sent else 0, dropped + (0 if sent else len(keys)))

    def _send(self, keys: npt.NDArray[np.int64], priorities: npt.NDArray[np.float32]) -> bool:
        """Whether replay took them. Those that it did not take are not sent again: newer ones will come."""
        try:
            with raising(self._peer):
                self._method(
                    Bulk(self._head, arrays={"keys": keys, "priorities": priorities}),
                    timeout=self._rpc.deadline_seconds,
                )
        except PacelineError as error:
            if str(error) != self._said:
                self._said = str(error)
                self._log.warning("priorities_dropped", row_count=len(keys), reason=self._said)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._backoff.next_seconds(error))
            return False
        self._backoff.reset()
        self._said = ""
        return True
