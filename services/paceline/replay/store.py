"""The connection to Redis: its checks at start, its failures as Paceline's errors, and who owns the run's keys."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from paceline.config import redact_url
from paceline.errors import (
    ConfigError,
    ConflictError,
    PacelineError,
    ReplacedError,
    StoreFullError,
    StoreReadOnlyError,
    UnavailableError,
)
from paceline.replay.scripts import Script
from paceline.telemetry import get_logger

FORMAT = "1"
"""Of the keys and values in Redis; a record of another format is refused."""

PAUSE_SECONDS = 0.25
"""After a lost connection, commands fail at once for so long: many collectors must not hammer a store that starts."""

_AWAY = (BusyLoadingError, ClusterDownError, TryAgainError)
_AWAY_CODES = ("LOADING", "NOREPLICAS", "BUSY")
"""Replies that redis-py has no class for keep their first word."""

Argument = bytes | memoryview


class RedisStore:
    """One Redis, for one run. Commands are never repeated by themselves: not every one may be."""

    def __init__(self, url: str, run_id: str, *, deadline_seconds: float) -> None:
        """Connects at the first command. Raises ConfigError when `url` is none."""
        self._shown = redact_url(url)
        self._deadline_seconds = deadline_seconds
        self._run_id = run_id
        self._token = uuid.uuid4().hex.encode()
        self._paused_until, self._reason = 0.0, ""
        self.is_loading = False
        """Whether the last failure was that Redis is still loading its data."""
        self.fenced = threading.Event()
        """Set when another replay process has taken the run over."""
        try:
            self._pool = redis.ConnectionPool.from_url(
                url,
                socket_timeout=deadline_seconds,
                socket_connect_timeout=deadline_seconds,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
            self._client = redis.Redis(connection_pool=self._pool)
        except ValueError as error:
            raise ConfigError(
                f"replay.redis_url {self._shown}: {error}: expected redis://host:port/number, rediss:// or unix://path"
            ) from error

    @property
    def token(self) -> bytes:
        """Identifies this process as the owner of the run's keys."""
        return self._token

    def key(self, *parts: str) -> bytes:
        """A key of this run. The braces keep all keys of a run on one shard of a cluster."""
        return ":".join((f"paceline:{{{self._run_id}}}", *parts)).encode()

    def check(self) -> None:
        """See that Redis is there, admits us, cannot evict our keys, and keeps what it is given.

        Raises:
            UnavailableError: it cannot be reached, or is still loading.
            ConfigError: wrong password, or an evicting policy.
        """
        try:
            memory = self._client.info("memory")
            persistence = self._client.info("persistence")
        except (AuthenticationError, AuthorizationError) as error:
            raise ConfigError(
                f"Redis at {self._shown} does not admit us: {error}; "
                "set the password in replay.redis_url, as redis://:password@host:port/0"
            ) from error
        except RedisError as error:
            if str(error).startswith(("NOAUTH", "WRONGPASS")) or "uthentication" in str(error):
                raise ConfigError(
                    f"Redis at {self._shown} does not admit us: {error}; "
                    "set the password in replay.redis_url, as redis://:password@host:port/0"
                ) from error
            raise self._as_error(error) from error
        policy = str(memory.get("maxmemory_policy", "noeviction"))
        if policy.startswith("allkeys-"):
            raise ConfigError(
                f"Redis at {self._shown} has maxmemory-policy {policy}, which removes rows of the record when memory "
                "is short: expected noeviction; run `redis-cli CONFIG SET maxmemory-policy noeviction` and set it in "
                "redis.conf"
            )
        self.is_loading = bool(persistence.get("loading"))
        if self.is_loading:
            raise UnavailableError(f"Redis at {self._shown} is still loading its data")
        if not persistence.get("aof_enabled"):
            get_logger().warning(
                "redis_without_append_only_file",
                redis=self._shown,
                meaning="rows since its last snapshot are lost when Redis dies while replay is down as well; "
                "set appendonly yes",
            )

    def claim(self, *, resume: bool) -> bool:
        """Take the run's keys over from whatever process had them; whether the run was there before.

        Raises:
            ConflictError: it was, and `resume` is False; or its record has another format.
        """
        new = bool(self.command("HSETNX", self.key("meta"), "format", FORMAT))
        if not new:
            found = self.command("HGET", self.key("meta"), "format").decode()
            if not resume:
                raise ConflictError(
                    f"run id {self._run_id!r} has a record in Redis at {self._shown} already: "
                    "go on with it by --resume, or choose another run.id"
                )
            if found != FORMAT:
                raise ConflictError(
                    f"the record of run {self._run_id!r} has format {found}: expected {FORMAT}; "
                    "use the version of Paceline that wrote it, or another run.id"
                )
        self.command("SET", self.key("owner"), self._token)
        return not new

    def command(self, *arguments: str | bytes | int) -> Any:
        """Run one command and give its reply. Raises the Paceline error that its failure stands for."""
        self._refuse_while_paused()
        try:
            return self._client.execute_command(*arguments)  # type: ignore[no-untyped-call]
        except RedisError as error:
            raise self._as_error(error) from error

    def run_script(self, script: Script, keys: Sequence[bytes], arguments: Sequence[Argument]) -> str:
        """Run a script, which Redis need not know yet, and give the word that it ends in.

        Raises:
            ReplacedError: another process owns the run.
            PacelineError: what its failure stands for.
        """
        self._refuse_while_paused()
        try:
            try:
                word = self._send(b"EVALSHA", script.sha, keys, arguments)
            except NoScriptError:
                # Nothing of it ran; Redis has restarted, or this is its first time.
                word = self._send(b"EVAL", script.text.encode(), keys, arguments)
        except RedisError as error:
            raise self._as_error(error) from error
        if word == b"fenced":
            self.fenced.set()
            raise ReplacedError(
                f"another replay process has taken over run {self._run_id!r}; this one no longer stores rows and stops"
            )
        return bytes(word).decode()

    def close(self) -> None:
        """Close every connection."""
        self._pool.disconnect()

    def _send(self, verb: bytes, name: bytes, keys: Sequence[bytes], arguments: Sequence[Argument]) -> Any:
        # redis-py would copy a block twice to pack it; here its bytes go to the socket as they are.
        parts = _pack([verb, name, b"%d" % len(keys), *keys, *arguments])
        connection = self._pool.get_connection()
        try:
            connection.send_packed_command(parts)  # type: ignore[no-untyped-call]
            # Closes the connection unless the reply was read whole: nobody else must read the rest of it.
            return connection.read_response()
        finally:
            self._pool.release(connection)

    def _refuse_while_paused(self) -> None:
        if time.monotonic() < self._paused_until:
            raise UnavailableError(self._reason)

    def _as_error(self, error: RedisError) -> PacelineError:
        text, self.is_loading = str(error), False
        if isinstance(error, OutOfMemoryError) or text.startswith("OOM"):
            return StoreFullError(
                f"Redis at {self._shown} is full, nothing of the write was kept: raise its maxmemory, "
                "or lower capacity_rows of the tables"
            )
        if text.startswith("MISCONF"):
            return StoreReadOnlyError(
                f"Redis at {self._shown} refuses writes: {text}; free its disk, and it takes writes again"
            )
        if isinstance(error, ReadOnlyError) or text.startswith("READONLY"):
            # The primary is elsewhere now: the next command resolves its name again.
            self._pool.disconnect()
            return self._pause(f"Redis at {self._shown} is a read-only replica: its primary has moved")
        if isinstance(error, _AWAY) or text.startswith(_AWAY_CODES):
            self.is_loading = isinstance(error, BusyLoadingError) or text.startswith("LOADING")
            return self._pause(f"Redis at {self._shown} is not ready: {text or 'it is loading its data'}")
        if isinstance(error, RedisTimeoutError):
            return self._pause(f"Redis at {self._shown} did not answer within {self._deadline_seconds:g} s")
        if isinstance(error, RedisConnectionError):
            return self._pause(f"Redis at {self._shown} cannot be reached: {text}; is it running?")
        return PacelineError(f"Redis at {self._shown} refused a command: {type(error).__name__}: {text}")

    def _pause(self, reason: str) -> UnavailableError:
        self._paused_until, self._reason = time.monotonic() + PAUSE_SECONDS, reason
        return UnavailableError(reason)


def _pack(arguments: Sequence[Argument]) -> list[Argument]:
    """A command in the protocol of Redis, in pieces: large arguments stay the objects that they are."""
    pieces: list[Argument] = []
    text = bytearray(b"*%d\r\n" % len(arguments))
    for argument in arguments:
        text += b"$%d\r\n" % len(argument)
        if len(argument) > 4096:
            pieces += [bytes(text), argument]
            text = bytearray()
        else:
            text += argument
        text += b"\r\n"
    return [*pieces, bytes(text)]
