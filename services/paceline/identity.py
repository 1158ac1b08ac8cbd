"""Which policy: (run, incarnation, version), and its order."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import RunMismatchError

PROTOCOL_VERSION = 1
"""Version of the wire protocol, which a caller says. It grows only where an addition would not do: where what is there
gets another meaning."""

OLDEST_PROTOCOL_VERSION = max(1, PROTOCOL_VERSION - 1)
"""The oldest that is served: the one of the release before, since servers are replaced before their clients."""


@dataclass(frozen=True, order=True)
class PolicyIdentity:
    """A policy of one run. A newer incarnation is newer whatever its version; versions are never reused in a run."""

    incarnation: int
    version: int

    def __post_init__(self) -> None:
        if self.incarnation < 1 or self.version < 1:
            raise ValueError(f"a policy has incarnation >= 1 and version >= 1, not {self}")

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.version}"


def is_newer(candidate: PolicyIdentity, current: PolicyIdentity | None) -> bool:
    """Whether `candidate` may replace `current`; anything may replace nothing."""
    return current is None or candidate > current


def require_same_run(mine: str, theirs: str) -> None:
    """Raise RunMismatchError unless both sides name the same run."""
    if mine != theirs:
        raise RunMismatchError(
            f"this service belongs to run {mine!r}, the caller to run {theirs!r}: "
            "point the caller at its own run's services, or give both the same run.id"
        )
