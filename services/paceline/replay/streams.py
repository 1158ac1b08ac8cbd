"""Open streams: what they wait for, and how they end when the caller goes away or the service stops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
from prometheus_client import Gauge

from paceline.errors import PacelineError, UnavailableError
from paceline.rpc.shared_memory import Bytes, open_offered
from paceline.v1 import replay_pb2 as pb


class Stream:
    """One open stream."""

    def __init__(self, rpc: str, context: grpc.ServicerContext, streams: Streams) -> None:
        self.context = context
        self.memory: Bytes | None = None
        """What the client shares with this process, for rows that need not go through the connection."""
        self.changed = threading.Condition()
        """Notified when the stream ends, or as its credit grows."""
        self.idle = False
        """Nothing of the caller's is in work: the stream may be cut."""
        self._rpc, self._streams, self._gone, self._has_looked = rpc, streams, False, False

    def open_memory(self, first: pb.AppendRequest | pb.SampleRequest | pb.FollowRequest) -> None:
        """See the memory that the first request offers, if it does and this process can. Later ones change nothing."""
        if not self._has_looked and self._streams.shares_memory and first.HasField("memory"):
            self.memory = open_offered(first.memory, self.context.peer())
            if self.memory is not None:
                self._streams.shared.labels(self._rpc).inc()
        self._has_looked = True

    def why_ended(self) -> PacelineError | None:
        """Why no wait of this stream makes sense any more, or None."""
        if self._streams.draining:
            return UnavailableError("replay is stopping: what it has not acknowledged is to be sent again, retry")
        return UnavailableError("the caller went away") if self._gone else None

    def receive(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """Each request as it comes. Raises UnavailableError when the service stops."""
        while True:
            if not self._streams.set_idle(self, True):
                raise UnavailableError("replay is stopping: what it has not acknowledged is to be sent again, retry")
            data = next(requests, None)
            self._streams.set_idle(self, False)
            if data is None:
                return
            yield data

    def end(self) -> None:
        """The call is over: nothing waits for it any more."""
        self._gone = True
        self.wake()

    def wake(self) -> None:
        """Have the stream's waits look at `why_ended`."""
        with self.changed:
            self.changed.notify_all()


class Streams:
    """Every open stream of a service."""

    def __init__(self, *, on_change: Callable[[], None], opened: Gauge, shared: Gauge, shares_memory: bool) -> None:
        """`on_change` wakes the waits that streams share, such as those of limiters."""
        self.draining, self.shares_memory, self.shared = False, shares_memory, shared
        self._on_change, self._opened = on_change, opened
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()

    @contextmanager
    def open(self, rpc: str, context: grpc.ServicerContext) -> Iterator[Stream]:
        """A stream for the time of its call."""
        stream = Stream(rpc, context, self)

        def on_end() -> None:
            stream.end()
            self._on_change()

        if not context.add_callback(on_end):
            raise UnavailableError("the caller went away")
        with self._lock:
            self._streams.add(stream)
        self._opened.labels(rpc).inc()
        self.shared.labels(rpc).inc(0)  # there from the first stream on
        try:
            yield stream
        finally:
            self._opened.labels(rpc).dec()
            if stream.memory is not None:
                stream.memory = None  # the call's own callbacks keep the stream for a while
                self.shared.labels(rpc).dec()
            with self._lock:
                self._streams.discard(stream)

    def set_idle(self, stream: Stream, idle: bool) -> bool:
        """Note whether a stream is between two requests; False: the service is stopping."""
        with self._lock:
            stream.idle = idle
            return not self.draining

    def drain(self) -> None:
        """End every stream: the idle ones are cut at once, the others end when their work is done."""
        with self._lock:
            self.draining = True
            streams = list(self._streams)
            for stream in streams:
                if stream.idle:
                    stream.context.cancel()
        for stream in streams:
            stream.wake()
        self._on_change()


class Requests:
    """A stream's later requests, read on a thread, so that each counts as it comes and not when its turn is."""

    def __init__(
        self,
        stream: Stream,
        requests: Iterator[bytes],
        take: Callable[[bytes], None],
        *,
        on_change: Callable[[], None],
    ) -> None:
        """`take` is given each request, on that thread; what it raises ends the stream. `on_change` is called after."""
        self.closed = False
        """The caller sends no more."""
        self._stream, self._requests, self._take, self._on_change = stream, requests, take, on_change
        self._error: Exception | None = None
        threading.Thread(target=self._read_ahead, name="requests", daemon=True).start()

    def require_going(self) -> None:
        """Raise why the stream must end, if it must: a malformed request, a caller that went away, the drain."""
        error = self._error or self._stream.why_ended()
        if error is not None:
            raise error

    def _read_ahead(self) -> None:
        try:
            for data in self._requests:
                self._take(data)
                self._on_change()
        except grpc.RpcError:
            pass  # the call is over
        except Exception as error:  # raised again where the stream is served
            self._error = error
        finally:
            self.closed = True
            self._on_change()
