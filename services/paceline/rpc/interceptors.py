"""What every call of a server goes through, in both kinds: the token first, limits, and errors as statuses.

A call whose token is refused is answered before its request is parsed.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio

from paceline.errors import PacelineError, TooManyStreamsError
from paceline.rpc.access import Access, is_open
from paceline.rpc.limits import PeerLimits
from paceline.rpc.status import code_of, metadata_of
from paceline.telemetry import get_logger

_MAX_DETAILS_LENGTH = 2_000
"""Of a status message: a peer refuses trailers above 8 KiB, and would see no reason at all."""


class ThreadPoolInterceptor(grpc.ServerInterceptor):
    """For unary and bidirectional calls, of which it admits a bounded number at once."""

    def __init__(self, access: Access, limits: PeerLimits, max_streams: int) -> None:
        self._access, self._limits, self._max_streams = access, limits, max_streams
        self._streams = threading.BoundedSemaphore(max_streams)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Wrap a method's handler."""
        handler, method = continuation(details), details.method
        if handler is None or is_open(method):
            return handler
        try:
            roles = self._access.admit(method, dict(details.invocation_metadata))
        except PacelineError as error:
            return self._refusing(handler, error, method)
        if handler.unary_unary:
            unary = handler.unary_unary

            def answer(request: Any, context: grpc.ServicerContext) -> Any:
                try:
                    self._limits.take_call(context.peer())
                    self._access.check_request(method, request, roles)
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
                    peer = context.peer()
                    self._limits.take_call(peer)
                    with self._limits.stream(peer):
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

    def _refusing(self, handler: grpc.RpcMethodHandler, error: PacelineError, method: str) -> grpc.RpcMethodHandler:
        def refuse(request: Any, context: grpc.ServicerContext) -> Any:
            _abort(context, error, method)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)


class AioInterceptor(grpc.aio.ServerInterceptor):
    """For unary calls and those that stream answers."""

    def __init__(self, access: Access, limits: PeerLimits) -> None:
        self._access, self._limits = access, limits

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wrap a method's handler."""
        handler, method = await continuation(details), details.method
        if handler is None or is_open(method):
            return handler
        try:
            roles = self._access.admit(method, dict(details.invocation_metadata))
        except PacelineError as error:
            return self._refusing(handler, error, method)
        if handler.unary_unary:
            unary = handler.unary_unary

            async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
                try:
                    self._limits.take_call(context.peer())
                    self._access.check_request(method, request, roles)
                    return await unary(request, context)
                except Exception as error:
                    await _abort_aio(context, error, method)

            return grpc.unary_unary_rpc_method_handler(
                answer, handler.request_deserializer, handler.response_serializer
            )
        stream = handler.unary_stream or handler.stream_stream  # of the latter kind is reflection
        if stream is None:
            raise TypeError(f"{method}: the event-loop server serves unary calls and those that stream answers")

        async def answer_stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                peer = context.peer()
                self._limits.take_call(peer)
                with self._limits.stream(peer):
                    async for response in stream(request, context):
                        yield response
            except Exception as error:
                await _abort_aio(context, error, method)

        make = grpc.unary_stream_rpc_method_handler if handler.unary_stream else grpc.stream_stream_rpc_method_handler
        return make(answer_stream, handler.request_deserializer, handler.response_serializer)

    def _refusing(self, handler: grpc.RpcMethodHandler, error: PacelineError, method: str) -> grpc.RpcMethodHandler:
        async def refuse(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await _abort_aio(context, error, method)

        async def refuse_stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            await _abort_aio(context, error, method)
            yield  # makes it a stream; never reached

        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(refuse)
        make = grpc.unary_stream_rpc_method_handler if handler.unary_stream else grpc.stream_stream_rpc_method_handler
        return make(refuse_stream)


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
