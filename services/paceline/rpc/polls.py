"""Polls of a parameter service, each message of whose answers is waited for by itself."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from paceline.config import RpcConfig
from paceline.errors import DeadlineError
from paceline.rpc.status import raising
from paceline.v1 import parameters_pb2 as pb
from paceline.v1 import parameters_pb2_grpc


class SnapshotPolls:
    """Polls `ParameterService` on one thread, within a `with` of this; any other may close it.

    gRPC knows one deadline for a whole call. With that alone a snapshot whose transfer takes longer would never come,
    since each try begins with its first byte. So a call may last, and each message has a deadline: the first one
    `poll_seconds`, which the peer may hold the poll, and `rpc.deadline_seconds`; each one after it the latter.
    """

    def __init__(self, channel: grpc.Channel, rpc: RpcConfig, *, peer: str, poll_seconds: float) -> None:
        """`peer` is what messages call the service that `channel` leads to."""
        self._stub = parameters_pb2_grpc.ParameterServiceStub(channel)
        self._peer, self._poll_seconds, self._deadline_seconds = peer, poll_seconds, rpc.deadline_seconds
        # Beyond what a server lets a connection grow old and what is in progress on it go on.
        self._call_seconds = rpc.connection_seconds + rpc.stream_seconds
        self._changed = threading.Condition()
        self._call: grpc.Call | None = None
        self._wait: _Wait | None = None
        self._is_left = self._is_closed = False
        self._wakes_at = math.inf
        self._watch = threading.Thread(target=self._cancel_late_calls, name="snapshot-polls-watch", daemon=True)
        self.longest_wait_seconds = poll_seconds + rpc.deadline_seconds
        """That a poll may take to its first message, and to any other."""

    def __enter__(self) -> SnapshotPolls:
        self._watch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._is_left = True
            self._changed.notify_all()
        self._watch.join()

    def close(self) -> None:
        """End the poll in progress, and each one to come at once."""
        with self._changed:
            self._is_closed = True
            if self._call is not None:
                self._call.cancel()

    @contextmanager
    def ask(self, request: pb.GetSnapshotRequest) -> Iterator[Iterator[pb.GetSnapshotResponse]]:
        """The messages that answer one poll; it is cancelled when the `with` is left before their end.

        Raises:
            DeadlineError: a message did not come in time, here or from `next` of the messages.
            PacelineError: what else a failed call stands for.
        """
        with raising(self._peer):
            call = self._stub.GetSnapshot(request, timeout=self._call_seconds)
            try:
                with self._changed:
                    self._call = call
                    if self._is_closed:
                        call.cancel()
                yield self._messages(call)
            finally:
                call.cancel()

    def _messages(self, call: grpc.Call) -> Iterator[pb.GetSnapshotResponse]:
        message = self._next(
            call,
            self.longest_wait_seconds,
            f"{self._peer} gave no answer for {self.longest_wait_seconds:g} s: expected one within the "
            f"{self._poll_seconds:g} s that it may hold a poll and rpc.deadline_seconds, {self._deadline_seconds:g} s; "
            "it or the network stands still, and it is asked again",
        )
        count = 0
        while message is not None:
            yield message
            message = self._next(
                call,
                self._deadline_seconds,
                f"{self._peer} sent nothing for {self._deadline_seconds:g} s, after {count} chunks of a snapshot: "
                "expected the next one within rpc.deadline_seconds; it or the network stands still, and the snapshot "
                "is fetched again; for a network that is so slow, lower learner.chunk_bytes",
            )
            count += 1

    def _next(self, call: grpc.Call, seconds: float, reason: str) -> pb.GetSnapshotResponse | None:
        """The next message, None at the end of them. Raises DeadlineError with `reason` after so long."""
        wait = _Wait(call, time.monotonic() + seconds)
        with self._changed:
            self._wait = wait
            if wait.late_at < self._wakes_at:
                self._changed.notify_all()
        try:
            message: pb.GetSnapshotResponse | None = next(call, None)
        except grpc.RpcError as error:
            if wait.is_late and error.code() is grpc.StatusCode.CANCELLED:
                raise DeadlineError(reason) from error
            raise
        finally:
            with self._changed:
                self._wait = None
        if wait.is_late and message is not None:
            raise DeadlineError(reason)  # it came as the call was cancelled: none would follow
        return message

    def _cancel_late_calls(self) -> None:
        """The other thread: to wait for a message is to wait without end."""
        with self._changed:
            while not self._is_left:
                wait = self._wait
                # A message that comes in time wakes nobody: this looks again when it would have been late.
                self._wakes_at = math.inf if wait is None else wait.late_at
                if wait is None:
                    self._changed.wait()
                elif (left := wait.late_at - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    wait.is_late, self._wait = True, None
                    wait.call.cancel()


@dataclass(eq=False)
class _Wait:
    """For one message of a call."""

    call: grpc.Call
    late_at: float
    is_late: bool = False
    """It was given up, and the call with it."""
