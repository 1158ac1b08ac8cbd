"""One table between Paceline's errors and gRPC's status codes, for every kind of RPC, both ways.

The class's name travels in the trailing metadata, so that a client raises the very class that the server raised; so
does the delay before the next try, where one is worth waiting for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from paceline import errors
from paceline.errors import PacelineError

REASON_KEY = "paceline-error"
RETRY_DELAY_KEY = "grpc-retry-pushback-ms"
"""gRPC's own name for it, which foreign clients know. Where gRPC itself retries, it acts upon it; ours does not."""

RETRY_DELAY_MS = 1_000
"""Room in a store, a place for a stream and a free index come about within seconds, as replay looks after Redis and
limits of calls are counted once a second: a try that comes sooner would be refused again."""
_MAX_RETRY_DELAY_SECONDS = 60.0
"""What a server asks for is heeded up to this: none may lay a client up with one number."""

CODES: dict[type[PacelineError], grpc.StatusCode] = {
    errors.InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.ConflictError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StoreReadOnlyError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LimiterTimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.StoreFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TooManyStreamsError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TooManyCallsError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RunFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
}
"""A class that is not here has the code of its nearest parent that is."""

RETRYABLE = (
    errors.UnavailableError,
    errors.LimiterTimeoutError,
    errors.StoreFullError,
    errors.StoreReadOnlyError,
    errors.TooManyStreamsError,
    errors.TooManyCallsError,
    errors.RunFullError,
    errors.DeadlineError,
)
"""What a client may try again, after a wait. Anything else would fail again."""

DELAYED = (
    errors.StoreFullError,
    errors.StoreReadOnlyError,
    errors.TooManyStreamsError,
    errors.TooManyCallsError,
    errors.RunFullError,
)
"""What of it the server names a delay for. After a limiter's timeout it has done the waiting already, and a peer that
was away may be there at any moment."""

_BY_CODE: dict[grpc.StatusCode, type[PacelineError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidInputError,
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.ForbiddenError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.ConflictError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.TooManyStreamsError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.CANCELLED: errors.UnavailableError,
}


def code_of(error: PacelineError) -> grpc.StatusCode:
    """The status code of an error."""
    for cls in type(error).__mro__:
        if cls in CODES:
            return CODES[cls]
    return grpc.StatusCode.INTERNAL


def metadata_of(error: PacelineError) -> tuple[tuple[str, str], ...]:
    """The trailing metadata that names the error's class, and the delay before the next try where it has one."""
    reason = (REASON_KEY, type(error).__name__)
    return (reason, (RETRY_DELAY_KEY, str(RETRY_DELAY_MS))) if isinstance(error, DELAYED) else (reason,)


def error_of(call_error: grpc.RpcError, peer: str) -> PacelineError:
    """The Paceline error that a failed call stands for; `peer` says whom it was made to."""
    metadata: dict[str, str] = dict(call_error.trailing_metadata() or ())
    named = getattr(errors, str(metadata.get(REASON_KEY, "")), None)
    code, details = call_error.code(), call_error.details() or "no details"
    if isinstance(named, type) and issubclass(named, PacelineError):
        return named(details)
    return _BY_CODE.get(code, PacelineError)(f"{peer}: {code.name}: {details}")


def retry_delay_seconds(error: PacelineError) -> float:
    """How many seconds the server wants to pass before the next try, of an error that `raising` raised; 0: any."""
    if not isinstance(error.__cause__, grpc.RpcError):
        return 0.0
    metadata: dict[str, str] = dict(error.__cause__.trailing_metadata() or ())
    milliseconds = int(metadata.get(RETRY_DELAY_KEY, 0))  # gRPC brings what is no number as the least of 64 bits
    return min(max(milliseconds / 1000, 0.0), _MAX_RETRY_DELAY_SECONDS)


@contextmanager
def raising(peer: str) -> Iterator[None]:
    """Turn a failed call within into the Paceline error that it stands for."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error, peer) from error
