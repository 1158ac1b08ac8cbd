"""Which role may make which call: one table, which servers look at before they parse a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config import SecurityConfig
from paceline.errors import ForbiddenError, UnauthenticatedError
from paceline.rpc.tokens import COLLECTOR, LEARNER, READER, ROLES, ServerTokens
from paceline.v1 import run_pb2

_RUN, _PARAMETERS, _REPLAY = ("/paceline.v1." + name for name in ("RunService/", "ParameterService/", "ReplayService/"))
JOIN = _RUN + "Join"

ROLES_OF_METHOD: Mapping[str, frozenset[str]] = {
    JOIN: frozenset({COLLECTOR, READER}),
    _RUN + "ReportEpisodes": frozenset({COLLECTOR}),
    _RUN + "ReportEvaluation": frozenset({READER}),
    _PARAMETERS + "GetSnapshot": frozenset({COLLECTOR, READER}),
    _REPLAY + "OpenTable": frozenset({COLLECTOR, LEARNER}),
    _REPLAY + "Append": frozenset({COLLECTOR}),
    _REPLAY + "Sample": frozenset({LEARNER}),
    _REPLAY + "UpdatePriorities": frozenset({LEARNER}),
    _REPLAY + "Follow": frozenset({LEARNER}),
    _REPLAY + "DescribeTables": frozenset({LEARNER, READER}),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": frozenset(ROLES),
}
"""A method that is not here is refused to everybody."""

_ROLE_OF_JOIN = {run_pb2.ROLE_COLLECTOR: COLLECTOR, run_pb2.ROLE_EVALUATOR: READER}
"""The token that a peer needs to join as what it says it is."""

_OPEN = "/grpc.health.v1.Health/"
"""Probes have no token."""

EVERYBODY = frozenset(ROLES)


def is_open(method: str) -> bool:
    """Whether a method is served to anybody."""
    return method.startswith(_OPEN)


class Access:
    """Admits calls by their token."""

    def __init__(self, security: SecurityConfig) -> None:
        """Raises ConfigError when `security.tokens` is set and holds no tokens."""
        self._folder = security.tokens
        self._tokens = (
            None
            if security.tokens is None
            else ServerTokens(security.tokens, grace_seconds=security.token_grace_seconds)
        )

    def admit(self, method: str, metadata: Mapping[str, str | bytes]) -> frozenset[str]:
        """The roles of the caller, one of which may make the call; everybody's where tokens are off.

        Raises:
            UnauthenticatedError: no token, or an unknown one. ForbiddenError: of another role.
        """
        if self._tokens is None:
            return EVERYBODY
        roles = self._tokens.roles_of(metadata)
        if roles is None:
            raise UnauthenticatedError(
                f"{method} was called without a token: expected the metadata 'authorization: Bearer TOKEN'; set "
                "security.tokens to the folder with the run's tokens"
            )
        if not roles:
            raise UnauthenticatedError(
                f"{method} was called with an unknown token: expected one of this run and server; give both sides the "
                "same files in security.tokens"
            )
        allowed = ROLES_OF_METHOD.get(method, frozenset())
        if not roles & allowed:
            raise _forbidden(method, roles, allowed)
        return roles

    def check_request(self, method: str, request: Any, roles: frozenset[str]) -> None:
        """Check what a request says of its sender. Raises ForbiddenError: it wants to join as what it may not be."""
        if method != JOIN:
            return
        needed = _ROLE_OF_JOIN.get(request.role)
        if needed is not None and needed not in roles:
            raise _forbidden(f"{method} as {run_pb2.Role.Name(request.role)}", roles, frozenset({needed}))


def _forbidden(what: str, roles: frozenset[str], allowed: frozenset[str]) -> ForbiddenError:
    return ForbiddenError(
        f"{what} is not for role {' or '.join(sorted(roles))}: expected a token of role "
        f"{' or '.join(sorted(allowed)) or 'none that there is'}; give the caller the token of its own role"
    )
