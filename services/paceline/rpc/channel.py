"""A channel that shows the token of its role, and that connects anew when its certificates were renewed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from paceline.config import SecurityConfig
from paceline.errors import ConflictError, HandshakeError
from paceline.rpc.certificates import CertificateFolder
from paceline.rpc.exposure import require_safe_client
from paceline.rpc.handshake import explain
from paceline.rpc.status import REASON_KEY
from paceline.rpc.tokens import ClientToken, metadata_with

EXPLAIN_SECONDS = 5.0
"""Why there is no connection is found out at most so often."""

_UNARY = frozenset({"unary_unary", "stream_unary"})


class SecuredChannel(grpc.Channel):
    """A gRPC channel to one address. Its methods are called as those of any channel (but for `future`).

    gRPC binds certificates to a connection. So when the files change there is a new one for the calls that begin
    then, and calls on the one before live on until they end.

    A call that gets no answer as TLS fails raises HandshakeError with the reason. A unary call whose token is refused
    is made once more when the token was just replaced: the server did nothing of it.

    It belongs to the process that made it: in a fork of that, where gRPC's threads are not, every call raises
    ConflictError, and sends nothing.
    """

    def __init__(
        self, address: str, options: Sequence[tuple[str, int | str]], security: SecurityConfig, role: str
    ) -> None:
        """Connects at the first call. Raises ConfigError: files are missing or wrong, or a token would go out plain."""
        require_safe_client(address, security)
        self._address, self._options, self._pid = address, list(options), os.getpid()
        self._folder = (
            CertificateFolder(security.certificates, needs_own=security.client_certificates)
            if security.certificates is not None
            else None
        )
        self._token = None if security.tokens is None else ClientToken(security.tokens, role)
        self._lock = threading.Lock()
        self._current = self._connect()
        self._retired: set[_Connection] = set()
        self._explained_at, self._reason = -EXPLAIN_SECONDS, ""
        self._closed = False

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        """A callable for the method."""
        return _UnaryCalls(self, "unary_unary", method, arguments, options)

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        """A callable for the method."""
        return _UnaryCalls(self, "stream_unary", method, arguments, options)

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        """A callable for the method."""
        return _StreamCalls(self, "unary_stream", method, arguments, options)

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        """A callable for the method."""
        return _StreamCalls(self, "stream_stream", method, arguments, options)

    def subscribe(self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False) -> None:
        """Watch the connection of now."""
        self.require_own_process()
        self._current.channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Watch it no longer."""
        if os.getpid() == self._pid:
            self._current.channel.unsubscribe(callback)

    def close(self) -> None:
        """End every call and connection. In a fork: nothing, they are its parent's."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            connections = [self._current, *self._retired]
        for connection in connections:
            connection.channel.close()

    def __enter__(self) -> SecuredChannel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def require_own_process(self) -> None:
        """Raise ConflictError in a fork of the process that made the channel; ask before taking a lock."""
        pid = os.getpid()
        if pid != self._pid:
            raise ConflictError(
                f"the channel to {self._address} was opened in process {self._pid} and is used in its fork, process "
                f"{pid}: gRPC's threads are not there, so a call may wait for ever; open a channel in the process that "
                "uses it, and start processes with spawn, as multiprocessing.get_context('spawn')"
            )

    def begin_call(self) -> _Connection:
        """The connection for a call that begins now; tell it `end_call` when the call ends."""
        newest = None if self._folder is None else self._folder.current()
        with self._lock:
            if self._current.certificates is not newest and not self._closed:
                if self._current.open_calls:
                    self._retired.add(self._current)
                else:
                    self._current.channel.close()
                self._current = self._connect()
            self._current.open_calls += 1
            return self._current

    def end_call(self, connection: _Connection) -> None:
        """A call is over."""
        with self._lock:
            connection.open_calls -= 1
            if not connection.open_calls:
                # gRPC lets go of a connection that nobody knows; it must not be closed from within its own callback.
                self._retired.discard(connection)

    def tokens(self) -> list[str | None]:
        """The tokens to try, in this order."""
        return [None] if self._token is None else list(self._token.candidates())

    def note_answer(self, token: str | None, error: grpc.RpcError | None) -> None:
        """Take note of how a call with this token ended."""
        if self._token is None or token is None:
            return
        if error is None:
            self._token.accept(token)
        elif error.code() is grpc.StatusCode.UNAUTHENTICATED:
            self._token.refuse(token)

    def require_handshake(self, error: grpc.RpcError) -> None:
        """Raise HandshakeError if a call failed since client and server do not agree on TLS."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE or REASON_KEY in dict(error.trailing_metadata() or ()):
            return
        with self._lock:
            now = time.monotonic()
            is_due = now - self._explained_at >= EXPLAIN_SECONDS
            if is_due:
                self._explained_at = now
        if is_due:
            self._reason = explain(self._address, None if self._folder is None else self._folder.path) or ""
        if self._reason:
            raise HandshakeError(self._reason) from error

    def _connect(self) -> _Connection:
        if self._folder is None:
            return _Connection(grpc.insecure_channel(self._address, options=self._options), None)
        certificates = self._folder.current()
        credentials = grpc.ssl_channel_credentials(
            certificates.authorities, private_key=certificates.key, certificate_chain=certificates.chain
        )
        return _Connection(grpc.secure_channel(self._address, credentials, options=self._options), certificates)


class _Connection:
    """A channel of gRPC, with the certificates that it has for good."""

    def __init__(self, channel: grpc.Channel, certificates: object) -> None:
        self.channel, self.certificates = channel, certificates
        self.open_calls = 0


class _Calls:
    """The calls of one method."""

    def __init__(
        self, channel: SecuredChannel, kind: str, method: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._channel = channel
        self._kind, self._method, self._arguments, self._options = kind, method, arguments, options
        self._made: tuple[_Connection, Any] | None = None

    def _call_of(self, connection: _Connection) -> Any:
        made = self._made
        if made is None or made[0] is not connection:
            make = getattr(connection.channel, self._kind)
            made = self._made = (connection, make(self._method, *self._arguments, **self._options))
        return made[1]


class _UnaryCalls(_Calls):
    """Calls with one answer."""

    def __call__(
        self, request: Any, timeout: float | None = None, metadata: Sequence[tuple[str, str]] = (), **options: Any
    ) -> Any:
        channel = self._channel
        channel.require_own_process()
        *first, last = channel.tokens()
        for token in first:
            try:
                return self._call(token, request, timeout, metadata, options)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    raise
        return self._call(last, request, timeout, metadata, options)

    def _call(
        self,
        token: str | None,
        request: Any,
        timeout: float | None,
        metadata: Sequence[tuple[str, str]],
        options: dict[str, Any],
    ) -> Any:
        channel = self._channel
        connection = channel.begin_call()
        try:
            answer = self._call_of(connection)(request, timeout=timeout, metadata=_with(token, metadata), **options)
        except grpc.RpcError as error:
            channel.note_answer(token, error)
            channel.require_handshake(error)
            raise
        finally:
            channel.end_call(connection)
        channel.note_answer(token, None)
        return answer


class _StreamCalls(_Calls):
    """Calls with a stream of answers, which nothing of this stands in the way of."""

    def __call__(
        self, request: Any, timeout: float | None = None, metadata: Sequence[tuple[str, str]] = (), **options: Any
    ) -> Any:
        channel = self._channel
        channel.require_own_process()
        token = channel.tokens()[0]
        connection = channel.begin_call()
        try:
            call = self._call_of(connection)(request, timeout=timeout, metadata=_with(token, metadata), **options)
        except BaseException:
            channel.end_call(connection)
            raise

        def end() -> None:
            channel.end_call(connection)
            if call.code() is grpc.StatusCode.UNAUTHENTICATED:
                channel.note_answer(token, call)

        if not call.add_callback(end):
            end()
        return call


def _with(token: str | None, metadata: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]] | None:
    return (*metadata, metadata_with(token)) if token is not None else metadata or None
