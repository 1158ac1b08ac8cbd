"""Bearer tokens: a secret for each role of a run, in a file of its own, which may be replaced while the run goes on.

A replaced token stays good for a while at the servers, and a client that is refused tries the other of the two that it
knows. So neither side has to get the new file first.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.errors import ConfigError
from paceline.rpc.watched import Contents, WatchedFiles

COLLECTOR, LEARNER, READER = "collector", "learner", "reader"
"""Roles: who steps environments; who trains; who only looks (evaluators, relays, tools)."""
ROLES = (COLLECTOR, LEARNER, READER)

METADATA_KEY = "authorization"
_SCHEME = "Bearer "

MIN_LENGTH = 16
"""Characters of a token."""


def _token_of(path: Path, data: bytes) -> str:
    # The message must never say what the file holds.
    try:
        token = data.decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if len(token) < MIN_LENGTH or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{path} holds no token: expected one line of {MIN_LENGTH} or more ASCII characters without spaces; "
            "`paceline certs FOLDER` makes tokens"
        )
    return token


class ServerTokens:
    """The tokens that a server admits."""

    def __init__(self, folder: Path, *, grace_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the tokens of `folder`. Raises ConfigError when there is none, or one is malformed."""
        self._folder, self._grace_seconds, self._clock = folder, grace_seconds, clock
        self._lock = threading.Lock()
        self._newest: frozenset[tuple[bytes, str]] = frozenset()
        self._replaced: dict[tuple[bytes, str], float] = {}
        self._files = WatchedFiles(folder, ROLES, self._make)

    def roles_of(self, metadata: Mapping[str, str | bytes]) -> frozenset[str] | None:
        """The roles of the token in a call's metadata, none if it is unknown; None where there is no token."""
        shown = metadata.get(METADATA_KEY, "")
        if not isinstance(shown, str) or not shown.startswith(_SCHEME):
            return None
        digest, newest = _digest(shown.removeprefix(_SCHEME)), self._files.current()
        now = self._clock()  # after the look at the files, which may have begun a grace
        with self._lock:
            admitted = [*newest, *(pair for pair, until in self._replaced.items() if now < until)]
        # Every known token is compared, of equal length and in constant time: how long it takes says nothing.
        return frozenset([role for known, role in admitted if hmac.compare_digest(known, digest)])

    def _make(self, contents: Contents) -> frozenset[tuple[bytes, str]]:
        if not contents:
            raise ConfigError(
                f"{self._folder} has no token: expected files named {', '.join(ROLES)}, or some of them; "
                "`paceline certs FOLDER` makes tokens"
            )
        made = frozenset((_digest(_token_of(self._folder / role, data)), role) for role, data in contents.items())
        now = self._clock()
        with self._lock:
            kept = {pair: until for pair, until in self._replaced.items() if now < until and pair not in made}
            self._replaced = kept | dict.fromkeys(self._newest - made, now + self._grace_seconds)
            self._newest = made
        return made


class ClientToken:
    """The token that a client shows."""

    def __init__(self, folder: Path, role: str) -> None:
        """Read the token of `role` from `folder`. Raises ConfigError when there is none, or it is malformed."""
        self._folder, self._role = folder, role
        self._accepted: str | None = None
        self._files = WatchedFiles(folder, (role,), self._make)

    def candidates(self) -> list[str]:
        """What to show, in this order: the token that was good the last time, then that which the file has now."""
        newest = self._files.current()
        return [newest] if self._accepted in (None, newest) else [str(self._accepted), newest]

    def accept(self, token: str) -> None:
        """The server took this one."""
        self._accepted = token

    def refuse(self, token: str) -> None:
        """The server refused this one: the file's is tried first from now on."""
        if self._accepted == token:
            self._accepted = None

    def _make(self, contents: Contents) -> str:
        path = self._folder / self._role
        if self._role not in contents:
            raise ConfigError(
                f"{path}: no such file: expected the token of role {self._role!r}; `paceline certs FOLDER` makes tokens"
            )
        return _token_of(path, contents[self._role])


def metadata_with(token: str) -> tuple[str, str]:
    """The metadata that shows a token."""
    return METADATA_KEY, _SCHEME + token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
