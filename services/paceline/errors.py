"""Every failure that a caller may handle, in one tree.

A message says what was wrong, the value, what was expected, and how to mend it. Domain code raises these and never
sees gRPC; `paceline.rpc.status` maps each class to a status code and back.
"""

from __future__ import annotations


class PacelineError(Exception):
    """The root: something that a person or a caller can act on."""


class ConfigError(PacelineError):
    """A setting is unknown, of the wrong type, out of range, or at odds with another."""


class InvalidInputError(PacelineError):
    """A peer or a user sent something malformed; repeating it will not help."""


class RowSpecError(InvalidInputError):
    """A row layout is malformed, or differs from the one that was agreed."""


class BlockError(InvalidInputError):
    """A block does not hold what its header or its row spec says."""


class SnapshotError(InvalidInputError):
    """Snapshot bytes are damaged, incomplete, or do not fit the actor."""


class ActorSemanticsError(InvalidInputError):
    """Weights belong to an actor with another meaning; names the field."""


class RunMismatchError(InvalidInputError):
    """The peer belongs to another run."""


class ProtocolMismatchError(InvalidInputError):
    """The peer speaks another protocol version."""


class UnauthenticatedError(PacelineError):
    """The caller shows no token, or one that the server does not know."""


class ForbiddenError(PacelineError):
    """The caller's role may not make this call."""


class NotFoundError(PacelineError):
    """No table, run or file of that name."""


class ConflictError(PacelineError):
    """The state forbids it: a run id in use, a table with another spec."""


class ReplacedError(ConflictError):
    """A newer incarnation of this collector, or another replay process, took over."""


class LimiterTimeoutError(PacelineError):
    """The limiter held one side back for longer than its deadline; the message says what it waits for."""


class DeadlineError(PacelineError):
    """A wait ended at its deadline; the message says what it waited for."""


class StarvedError(LimiterTimeoutError, DeadlineError):
    """The lag bound leaves too few rows to draw a batch; the message names the smallest bound that would do."""


class StarvedForGoodError(StarvedError):
    """And no newer row will come: all that the run asked for are there."""


class UnavailableError(PacelineError):
    """A peer or the store is away; worth a retry."""


class HelperLostError(UnavailableError):
    """A process that this one had started is gone, or hangs; nothing is wrong that starting this one again would not
    mend."""


class HandshakeError(UnavailableError):
    """Client and server do not agree on TLS; names the file. Mending it is enough: each try reads it."""


class StoreFullError(PacelineError):
    """The store has no room; nothing of the write was kept; worth a retry later."""


class StoreReadOnlyError(PacelineError):
    """The store refuses writes until someone mends it (a full disk, say)."""


class TooManyStreamsError(PacelineError):
    """Every stream that the server admits is open; worth a retry later."""


class TooManyCallsError(PacelineError):
    """The caller makes more calls than the server takes of one peer; worth a retry later."""


class RunFullError(PacelineError):
    """Every index of the run is taken; worth a retry later, when one that died is free."""


class EnvironmentFaultError(PacelineError):
    """An environment raised, or returned what it must not; names the environment, step and seed."""

    episode: int | None = None
    """The collector's number of the episode that it happened in, where one is known."""
    environment: int | None = None
    """Which of the environments that are stepped together it was, where one is known."""


class NonFiniteError(PacelineError):
    """A loss, gradient or weight is not finite; the learner stops and publishes nothing of it."""


class CheckpointError(PacelineError):
    """A checkpoint is damaged, of another run, or does not fit."""


class PortTakenError(PacelineError):
    """The address cannot be owned exclusively; names it."""


class ServiceFailedError(PacelineError):
    """A service that the launcher started ended with an error; carries its last lines."""
