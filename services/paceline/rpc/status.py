"""One table between Paceline's errors and gRPC's status codes, for every kind of RPC, both ways.

The class's name travels in the trailing metadata, so that a client raises the very class that the server raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from paceline import errors
from paceline.errors import PacelineError

REASON_KEY = "paceline-error"

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
    """The trailing metadata that names the error's class."""
    return ((REASON_KEY, type(error).__name__),)


def error_of(call_error: grpc.RpcError, peer: str) -> PacelineError:
    """The Paceline error that a failed call stands for; `peer` says whom it was made to."""
    metadata: dict[str, str] = dict(call_error.trailing_metadata() or ())
    named = getattr(errors, str(metadata.get(REASON_KEY, "")), None)
    code, details = call_error.code(), call_error.details() or "no details"
    if isinstance(named, type) and issubclass(named, PacelineError):
        return named(details)
    return _BY_CODE.get(code, PacelineError)(f"{peer}: {code.name}: {details}")


@contextmanager
def raising(peer: str) -> Iterator[None]:
    """Turn a failed call within into the Paceline error that it stands for."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error, peer) from error
