"""One stream of a replay service, opened again whenever it is cut."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from paceline.config import RpcConfig
from paceline.errors import DeadlineError, LimiterTimeoutError, PacelineError, StarvedError
from paceline.process import StopSignal
from paceline.rpc.client import Backoff
from paceline.rpc.status import RETRYABLE, raising
from paceline.telemetry import get_logger
from paceline.v1 import replay_pb2, replay_pb2_grpc

FLOWING = "replay has sent nothing since the last batch"
"""Why there is no batch while the stream is well."""


class ReplayStream:
    """Keeps one stream open, on the thread that calls `run`. The other methods may be called from any thread.

    The table is declared before each stream: replay may have come back without it.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        declaration: replay_pb2.OpenTableRequest,
        rpc: RpcConfig,
        *,
        peer: str,
        on_cut: Callable[[PacelineError, bool], None] = lambda error, is_away: None,
    ) -> None:
        """`on_cut` is told why a stream ended and whether replay is away, before the next one is opened."""
        self.stub = replay_pb2_grpc.ReplayServiceStub(channel)
        self.reason = f"{peer} has not answered yet"
        """Why nothing comes."""
        self.is_away = False
        """Replay was asked, and cannot be reached or serves nobody."""
        self._channel, self._declaration, self._rpc, self._peer = channel, declaration, rpc, peer
        self._on_cut = on_cut
        self._backoff = Backoff(rpc)
        self._closed = StopSignal()
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        self._log = get_logger()

    def run(self, receive: Callable[[], None]) -> None:
        """Call `receive`, which opens a stream and reads it, again and again until this is closed.

        Raises:
            PacelineError: replay refused for good.
        """
        while not self._closed.is_set():
            try:
                with raising(self._peer):
                    self.stub.OpenTable(self._declaration, timeout=self._rpc.deadline_seconds)
                    try:
                        receive()
                    finally:
                        self._cancel()  # it may have been left in the midst
                # Replay ended it in peace: the next one may have to wait for what comes.
                self._closed.wait(self._backoff.next_seconds())
            except RETRYABLE as error:
                if self._closed.is_set():
                    return
                is_held_back = isinstance(error, LimiterTimeoutError)
                if isinstance(error, DeadlineError) and self.reason == FLOWING and not is_held_back:
                    continue  # the stream lived for `stream_seconds`; the next one goes on
                # Of starvation, whose reason is another one with each version, the training process tells.
                if str(error) != self.reason and not isinstance(error, StarvedError):
                    self._log.warning("replay_stream_cut", reason=str(error))
                self.reason = str(error)
                # Held back by its limiter or the lag bound, replay is well, and has done the waiting.
                self.is_away = not is_held_back
                if is_held_back:
                    self._backoff.reset()
                self._on_cut(error, self.is_away)
                self._closed.wait(self._backoff.next_seconds(error))
            except (PacelineError, ValueError):
                if self._closed.is_set():
                    return  # the channel was closed under a call
                raise

    def open(
        self,
        method: str,
        requests: Iterable[Any],
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
    ) -> Iterator[Any]:
        """The answers of a new stream. `close` cancels it."""
        stream = self._channel.stream_stream(
            f"/paceline.v1.ReplayService/{method}", request_serializer=serialize, response_deserializer=deserialize
        )
        with self._lock:
            if self._closed.is_set():
                return iter(())
            call = stream(iter(requests), timeout=self._rpc.stream_seconds)
            self._call = call
        answers: Iterator[Any] = call
        return answers

    def note_answer(self) -> None:
        """Replay is well: something came."""
        self._backoff.reset()
        self.reason = FLOWING
        self.is_away = False

    def close(self) -> None:
        """End the stream and open no other."""
        self._closed.set()
        self._cancel()

    def _cancel(self) -> None:
        with self._lock:
            if self._call is not None:
                self._call.cancel()
