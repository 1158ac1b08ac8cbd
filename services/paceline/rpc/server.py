"""Servers, the same in every service: own port, health, reflection, errors as statuses, drain.

`Server` is a thread pool, for a service that moves bulk (one event loop starves appends beside a sampler);
`AioServer` is an event loop, for one that holds many waiting polls.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.config import RpcConfig
from paceline.errors import PacelineError, PortTakenError, TooManyStreamsError
from paceline.rpc.status import code_of, metadata_of
from paceline.telemetry import get_logger

SHORT_CALL_THREADS = 16
"""Threads beyond the admitted streams: short calls and health always find one."""

_OURS = "/paceline."

_MAX_DETAILS_LENGTH = 2_000
"""Of a status message: a peer refuses trailers above 8 KiB, and would see no reason at all."""


class Register(Protocol):
    """Adds servicers to a server: `add_ReplayServiceServicer_to_server`, bound to its servicer, or the like."""

    def __call__(self, server: Any) -> None:
        """Add the servicer to `server`."""


def server_options(config: RpcConfig) -> list[tuple[str, int]]:
    """Server options that agree with `client.channel_options` of the same configuration."""
    return [
        # A port is owned, never shared: two learners on one port would take turns answering.
        ("grpc.so_reuseport", 0),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.keepalive_time_ms", round(config.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Half of what the clients use, so that a late ping of theirs is never taken for abuse.
        ("grpc.http2.min_ping_interval_without_data_ms", round(config.keepalive_seconds * 500)),
    ]


class Server:
    """A thread-pool server. Health says NOT_SERVING until `set_serving(True)`."""

    def __init__(
        self,
        listen: str,
        config: RpcConfig,
        *,
        services: Sequence[str],
        register: Sequence[Register],
        max_streams: int,
        handlers: Sequence[grpc.GenericRpcHandler] = (),
    ) -> None:
        """Bind `listen` ("host:port"; port 0 takes any free one).

        Args:
            services: full names, for health and reflection.
            register: one for each servicer.
            max_streams: streams served at once; more get RESOURCE_EXHAUSTED.
            handlers: further method handlers, such as those with their own (de)serialisers.

        Raises:
            PortTakenError: the port is not free.
        """
        self.draining = threading.Event()
        self._config, self._services = config, services
        self._server = grpc.server(
            ThreadPoolExecutor(max_streams + SHORT_CALL_THREADS, thread_name_prefix="rpc"),
            interceptors=[_StatusInterceptor(max_streams)],
            options=server_options(config),
        )
        self._health = health.HealthServicer(experimental_non_blocking=True)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*services, reflection.SERVICE_NAME, health.SERVICE_NAME], self._server)
        # Handlers that were added first win, so those with their own (de)serialisers come before the plain ones.
        self._server.add_generic_rpc_handlers(tuple(handlers))
        for add in register:
            add(self._server)
        self.port: int = _bind(self._server, listen)
        self.set_serving(False)

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()

    def set_serving(self, serving: bool) -> None:
        """Set what health says, for the whole server and for each service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *self._services):
            self._health.set(service, status)

    def set_ready(self, ready: bool) -> None:
        """Set what health says for each service, and leave the whole server's as it is.

        Services speak for readiness, the server ("") for liveness: a store that is away makes a service not ready, and
        must not have its process restarted.
        """
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            self._health.set(service, status)

    def stop(self) -> None:
        """Drain: health off, new calls refused, calls in progress finish within `drain_seconds`, then are cancelled."""
        self.draining.set()
        self._health.enter_graceful_shutdown()
        self._server.stop(self._config.drain_seconds).wait()


class AioServer:
    """An event-loop server; make and use it within the loop. Health says NOT_SERVING until `set_serving(True)`."""

    def __init__(
        self, listen: str, config: RpcConfig, *, services: Sequence[str], register: Sequence[Register]
    ) -> None:
        """Bind `listen`. Raises PortTakenError when the port is not free."""
        self._config, self._services = config, services
        self._server = grpc.aio.server(interceptors=[_AioStatusInterceptor()], options=server_options(config))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*services, reflection.SERVICE_NAME, health.SERVICE_NAME], self._server)
        for add in register:
            add(self._server)
        self.port: int = _bind(self._server, listen)

    async def start(self) -> None:
        """Begin to answer."""
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Set what health says, for the whole server and for each service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def stop(self) -> None:
        """Drain, as `Server.stop`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._config.drain_seconds)


def _bind(server: Any, listen: str) -> int:
    message = (
        f"cannot listen on {listen}: the port is taken or the host is not this machine's; "
        "stop what holds it, or set another listen address"
    )
    try:
        port = int(server.add_insecure_port(listen))
    except RuntimeError as error:
        raise PortTakenError(message) from error
    if port == 0:
        raise PortTakenError(message)
    return port


class _StatusInterceptor(grpc.ServerInterceptor):
    """Turns Paceline errors into statuses, and admits a bounded number of streams."""

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._streams = threading.BoundedSemaphore(max_streams)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(details)
        if handler is None or not details.method.startswith(_OURS):
            return handler
        method = details.method
        if handler.unary_unary:
            unary = handler.unary_unary

            def answer(request: Any, context: grpc.ServicerContext) -> Any:
                try:
                    return unary(request, context)
                except Exception as error:
                    _abort(context, error, method)

            return grpc.unary_unary_rpc_method_handler(
                answer, handler.request_deserializer, handler.response_serializer
            )
        if handler.stream_stream:
            stream = handler.stream_stream

            def answer_stream(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
                try:
                    if not self._streams.acquire(blocking=False):
                        raise TooManyStreamsError(
                            f"{self._max_streams} streams are open, as many as replay.max_streams admits: "
                            "retry later, or raise it"
                        )
                    try:
                        yield from stream(requests, context)
                    finally:
                        self._streams.release()
                except Exception as error:
                    _abort(context, error, method)

            return grpc.stream_stream_rpc_method_handler(
                answer_stream, handler.request_deserializer, handler.response_serializer
            )
        raise TypeError(f"{method}: the thread-pool server serves unary and bidirectional calls")


class _AioStatusInterceptor(grpc.aio.ServerInterceptor):
    """Turns Paceline errors into statuses."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(_OURS):
            return handler
        method = details.method
        if handler.unary_unary:
            unary = handler.unary_unary

            async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
                try:
                    return await unary(request, context)
                except Exception as error:
                    await _abort_aio(context, error, method)

            return grpc.unary_unary_rpc_method_handler(
                answer, handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream:
            stream = handler.unary_stream

            async def answer_stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
                try:
                    async for response in stream(request, context):
                        yield response
                except Exception as error:
                    await _abort_aio(context, error, method)

            return grpc.unary_stream_rpc_method_handler(
                answer_stream, handler.request_deserializer, handler.response_serializer
            )
        raise TypeError(f"{method}: the event-loop server serves unary and server-streaming calls")


def _abort(context: grpc.ServicerContext, error: Exception, method: str) -> None:
    if isinstance(error, PacelineError):
        context.set_trailing_metadata(metadata_of(error))
        context.abort(code_of(error), str(error)[:_MAX_DETAILS_LENGTH])
    if not context.is_active():
        return  # the caller went away; nobody is left to tell
    get_logger().error("call_failed", method=method, exc_info=error)
    context.abort(grpc.StatusCode.INTERNAL, f"{method}: {type(error).__name__}: {error}"[:_MAX_DETAILS_LENGTH])


async def _abort_aio(context: grpc.aio.ServicerContext, error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, PacelineError):
        await context.abort(code_of(error), str(error)[:_MAX_DETAILS_LENGTH], metadata_of(error))
    get_logger().error("call_failed", method=method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{method}: {type(error).__name__}: {error}"[:_MAX_DETAILS_LENGTH])
