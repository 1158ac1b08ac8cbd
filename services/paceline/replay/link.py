"""How commands reach a Redis: as they are, never twice by themselves, and with its failures as Paceline's errors.

`replay.redis_url` says where it is and how it is reached; names and passwords in it are percent-encoded:

    redis://host:6379/0                              TCP, database 0
    redis://:password@host:6379/0                    with a password
    redis://name:password@host:6379/0                as an ACL user
    rediss://host:6379/0?ssl_ca_certs=/etc/ca.pem    TLS, the server's certificate signed by this CA; a certificate of
                                                     one's own by ssl_certfile= and ssl_keyfile=
    unix:///run/redis.sock?db=0                      a Unix socket; unix://name:password@/run/redis.sock as a user

With `?password_file=/a/path`, as `replay.redis_password_file` has it, the password is read from a file at each
connection; a user's name may stand in the URL all the same, as redis://name@host:6379/0.

An ACL user needs these commands and keys, and no others:

    ACL SETUSER paceline on >password ~paceline:* +ping +info +time +select +multi +exec +get +set +unlink +strlen
        +rename +hget +hset +hsetnx +hdel +hgetall +hlen +hincrby +hscan +xadd +xtrim +xrange +xlen +mget +eval +evalsha

With `+config|get` the line at the start can also say when the server writes to disk. `paceline replay import` and
`delete` want `+scan` too.
"""

from __future__ import annotations

import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
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
    StoreFullError,
    StoreReadOnlyError,
    UnavailableError,
)
from paceline.replay.durability import parse_info
from paceline.replay.scripts import Script
from paceline.replay.values import Values, read_values

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.25, 1.0
"""After a failure commands fail at once for so long, twice as long after each further one: many collectors must not
hammer a store that starts."""

COPIED_BYTES = 64 << 10
"""An argument up to this size is copied to the others: that costs less than a write to the socket of its own."""

_AWAY = (BusyLoadingError, ClusterDownError, TryAgainError)
_AWAY_CODES = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "BUSY")
_STRANGE_PEER = (
    "CERTIFICATE_VERIFY_FAILED",
    "WRONG_VERSION_NUMBER",
    "CERTIFICATE_REQUIRED",
    "UNKNOWN_CA",
    "HANDSHAKE_FAILURE",
    "BAD_CERTIFICATE",
)
_CUT = ("reset by peer", "closed by server", "Broken pipe", "EOF occurred")
"""How a peer ends a connection on which it does not understand us, as one that dies does."""
_NO_DATABASE = ("DB index is out of range", "invalid DB index")
_UNKNOWN_FLAGS = ("Error compiling script", "Unexpected flag in script shebang", "Unexpected engine in script shebang")
_FORBIDDEN = ("NOPERM", "ACL failure in script", "can't run this command")
_ABORTED = "Transaction discarded because of: "

_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_OPTIONS = ("db", *_FILES, "password_file")

Argument = bytes | memoryview | str | int
_BINARY = (bytes, memoryview)
"""Made once: a message has dozens of arguments."""


class ScriptFlagsError(PacelineError):
    """The server cannot read the flags of a script: it is older than Redis 7."""


class ServerChangedError(UnavailableError):
    """What was meant for one run of a server would have gone to another."""


class RedisLink:
    """One Redis. Any number of threads may use it; each command takes a connection of its own.

    It belongs to the process that made it: in a fork of that every command raises ConflictError, and sends nothing.
    """

    def __init__(self, url: str, *, deadline_seconds: float) -> None:
        """Connects at the first command, each of which ends within `deadline_seconds`.

        Raises:
            ConfigError: `url` is none, has an option of which nothing is known, or names a file that is not there or
                holds something else.
        """
        self.shown = redact_url(url)
        """The URL, passwords hidden."""
        self._speaks_tls = url.startswith("rediss://")
        self.is_loading = False
        """Whether the last failure was that Redis is still loading its data."""
        self.was_admitted = False
        """Set by who has got by with this URL: a Redis that refuses it later may have its password, users, certificate
        or databases changed just now, so UnavailableError says that, and no ConfigError."""
        self._pid = os.getpid()
        self._broken_off = 0  # scripts of which a part may be done: what comes after must not build upon it
        self._deadline_seconds = deadline_seconds
        self._pausing = threading.Lock()
        self._failures, self._paused_until, self._pause_error = 0, 0.0, PacelineError()
        self._pool = self._open(url)

    def command(self, *arguments: Argument) -> Any:
        """Run one command and give its reply as it came. Raises the Paceline error that its failure stands for."""
        self._refuse_while_paused(writes=False)
        return self._first_error_raised(self._exchange([arguments]))[0]

    def read_each(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """The replies to commands that change nothing, sent in one go; None to one that this user may not run."""
        self._refuse_while_paused(writes=False)
        replies = [None if isinstance(reply, NoPermissionError) else reply for reply in self._exchange(commands)]
        return self._first_error_raised(replies)

    def run_script(
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[Argument],
        before: Sequence[Sequence[Argument]] = (),
        *,
        server: str | None = None,
    ) -> Any:
        """Run a script that writes, which Redis need not know yet; what it returned.

        Args:
            before: commands that are carried out right before it; all of it happens, or nothing.
            server: what `read_server` gave, where the script is for no other run of it.

        Raises:
            ServerChangedError: it is another, or a script was broken off since; nothing was sent.
        """
        self._refuse_while_paused(writes=True)
        if self._failures and before:
            self._first_error_raised(self._exchange([("PING",)]))  # a block is not sent to a store that is still away
        try:
            returned = self._call_script(script, keys, arguments, before, server)
        except ServerChangedError:
            self._paused_until = 0.0  # it answers
            raise
        self._failures, self._paused_until = 0, 0.0
        return returned

    def read_server(self) -> str:
        """Which run of which server this is: another one after a restart, and after a script that was broken off.

        That is one whose user lost a right that it needs half-way: what it did before that stays done.
        """
        return self._in_state(parse_info(self.command("INFO", "server")).get("run_id", ""))

    def read_values(self, keys: Sequence[bytes]) -> Values:
        """The strings at these keys, None where there is none; as `command` with MGET, and twice as fast."""
        self._refuse_while_paused(writes=False)
        replies = self._exchange([("MGET", *keys)], lambda connection: read_values(connection, len(keys)))
        values: Values = self._first_error_raised(replies)[0]
        return values

    def read_by_script(self, script: Script, keys: Sequence[bytes]) -> Any:
        """What a script that changes nothing returns: values of one moment. (A full Redis refuses transactions.)"""
        self._refuse_while_paused(writes=False)
        return self._call_script(script, keys)

    def close(self) -> None:
        """Close every connection. Another command opens one anew. In a fork: nothing, they are its parent's."""
        if os.getpid() == self._pid:
            self._pool.disconnect()

    def _open(self, url: str) -> redis.ConnectionPool:
        try:
            _require_known_parts(url)
            url, password = _take_password_file(url)
            pool = redis.ConnectionPool.from_url(
                url,
                credential_provider=password,
                socket_timeout=self._deadline_seconds,
                socket_connect_timeout=self._deadline_seconds,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
            # What redis-py would only say at the first command.
            pool.connection_class(**pool.connection_kwargs)
            files = {name: paths[0] for name, paths in parse_qs(urlsplit(url).query).items() if name in _FILES}
        except (ValueError, TypeError, RedisError) as error:
            raise ConfigError(
                f"replay.redis_url {self.shown}: {redact_url(str(error))}: expected redis://host:port/number, "
                "rediss://host:port/number?ssl_ca_certs=file or unix://path?db=number"
            ) from error
        try:
            _require_readable(files)
        except ConfigError as error:
            raise ConfigError(f"replay.redis_url {self.shown}: {error}") from error
        return pool

    def _call_script(
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[Argument] = (),
        before: Sequence[Sequence[Argument]] = (),
        server: str | None = None,
    ) -> Any:
        def send(*name: Argument) -> list[Any]:
            call = (*name, len(keys), *keys, *arguments)
            return self._exchange([("MULTI",), *before, call, ("EXEC",)] if before else [call], server=server)

        replies = send("EVALSHA", script.sha)
        if isinstance(_result(replies), NoScriptError):
            # It did not run; Redis has restarted, or this is its first time.
            replies = send("EVAL", script.text)
        return _result(self._first_error_raised(replies))

    def _exchange(
        self,
        commands: Sequence[Sequence[Argument]],
        read: Callable[[Any], Any] | None = None,
        *,
        server: str | None = None,
    ) -> list[Any]:
        """Send commands in one go and `read` a reply to each; one that is an error is given as that."""
        read = read or _read_reply
        try:
            connection = self._pool.get_connection()
            try:
                if server is not None:
                    self._require_server(connection, server)
                # redis-py would copy a block twice to pack it; here its bytes go to the socket as they are.
                connection.send_packed_command(_pack(commands))  # type: ignore[no-untyped-call]
                replies = [read(connection) for _ in commands]
                if len(commands) > 1 and any(isinstance(reply, RedisError) for reply in replies):
                    connection.disconnect()  # type: ignore[no-untyped-call]  # it may still be within its transaction
                return replies
            except BaseException:
                # Nobody else must read the rest of the replies.
                connection.disconnect()  # type: ignore[no-untyped-call]
                raise
            finally:
                self._pool.release(connection)
        except RedisError as error:
            raise self._as_error(error) from error

    def _in_state(self, run_id: str) -> str:
        return f"{run_id}+{self._broken_off}"

    def _require_server(self, connection: Any, server: str) -> None:
        run_id = _server_of(connection)
        if self._in_state(run_id) == server:
            return
        if run_id == server.rpartition("+")[0]:
            raise ServerChangedError(
                f"Redis at {self.shown} broke a script off half-way, as its user lost rights; retry"
            )
        raise ServerChangedError(f"Redis at {self.shown} has restarted, or another is in its place; retry")

    def _first_error_raised(self, replies: list[Any]) -> list[Any]:
        error = _first_error(replies)
        if error is not None:
            raise self._as_error(error) from error
        if isinstance(self._pause_error, UnavailableError):
            self._paused_until = 0.0
        return replies

    def _refuse_while_paused(self, *, writes: bool) -> None:
        self._require_own_process()  # first: in a fork the lock may be held for good
        with self._pausing:
            error = self._pause_error
            if writes or isinstance(error, UnavailableError):
                if time.monotonic() < self._paused_until:
                    raise type(error)(str(error))
                if self._failures:
                    # This caller tries; the others wait for what it finds.
                    self._paused_until = time.monotonic() + FIRST_PAUSE_SECONDS

    def _require_own_process(self) -> None:
        pid = os.getpid()
        if pid != self._pid:
            raise ConflictError(
                f"the connections to Redis at {self.shown} were made in process {self._pid} and are used in its fork, "
                f"process {pid}: two processes would read each other's replies; make a RedisLink in the process that "
                "uses it, and start processes with spawn, as multiprocessing.get_context('spawn')"
            )

    def _pause(self, error: PacelineError) -> PacelineError:
        with self._pausing:
            seconds = min(FIRST_PAUSE_SECONDS * 2**self._failures, LAST_PAUSE_SECONDS)
            self._failures = min(self._failures + 1, 10)
            self._paused_until, self._pause_error = time.monotonic() + seconds, error
        return error

    def _as_error(self, error: RedisError) -> PacelineError:
        text, self.is_loading = str(error).removeprefix(_ABORTED), False
        if isinstance(error, OutOfMemoryError) or text.startswith("OOM"):
            return StoreFullError(
                f"Redis at {self.shown} is full, nothing of the write was kept: raise its maxmemory, "
                "or lower capacity_rows of the tables"
            )
        if text.startswith("MISCONF"):
            return self._pause(
                StoreReadOnlyError(
                    f"Redis at {self.shown} refuses writes: {text}; free its disk, and it takes writes again"
                )
            )
        if isinstance(error, ReadOnlyError) or text.startswith("READONLY"):
            # The primary is elsewhere now: the next command resolves its name again.
            self._pool.disconnect(inuse_connections=False)
            return self._pause(
                UnavailableError(
                    f"Redis at {self.shown} is a read-only replica: its primary has moved, or replay.redis_url names "
                    "the replica: expected the primary"
                )
            )
        if isinstance(error, _AWAY) or text.startswith(_AWAY_CODES):
            self.is_loading = isinstance(error, BusyLoadingError) or text.startswith("LOADING")
            return self._pause(
                UnavailableError(f"Redis at {self.shown} is not ready: {text or 'it is loading its data'}")
            )
        if isinstance(error, NoPermissionError) or any(word in text for word in _FORBIDDEN):
            self._broken_off += "script" in text
            return self._as_refusal(
                f"Redis at {self.shown} forbids a command to this user: {text}; "
                "give it those that `pydoc paceline.replay.link` lists"
            )
        if isinstance(error, AuthenticationError | AuthorizationError) or text.startswith(("NOAUTH", "WRONGPASS")):
            return self._as_refusal(
                f"Redis at {self.shown} does not admit us: {text}; "
                "set name and password in replay.redis_url, as redis://name:password@host:port/0, "
                "or the password in the file of replay.redis_password_file"
            )
        if isinstance(error, RedisTimeoutError):
            # Redis takes the first words of TLS for a command whose end has yet to come.
            perhaps = "; if it does not speak TLS, use redis:// in replay.redis_url" if "connecting" in text else ""
            return self._pause(
                UnavailableError(
                    f"Redis at {self.shown} did not answer within {self._deadline_seconds:g} s"
                    f"{perhaps if self._speaks_tls else ''}"
                )
            )
        if isinstance(error, RedisConnectionError) and any(word in text for word in _STRANGE_PEER):
            return self._as_refusal(
                f"Redis at {self.shown} and we cannot agree on TLS: {text}; name its CA by ssl_ca_certs= in "
                "replay.redis_url, and a certificate of ours by ssl_certfile= and ssl_keyfile= where it wants one; use "
                "rediss:// where it speaks TLS and redis:// where it does not"
            )
        if isinstance(error, RedisConnectionError):
            perhaps = ""
            if any(word in text for word in _CUT):
                perhaps = " If it is, it may speak TLS: then use rediss:// in replay.redis_url"
                if self._speaks_tls:
                    perhaps = (
                        " If it is, it may want a certificate of ours (ssl_certfile= and ssl_keyfile= in "
                        "replay.redis_url), or not speak TLS (redis://)"
                    )
            return self._pause(
                UnavailableError(f"Redis at {self.shown} cannot be reached: {text}; is it running?{perhaps}")
            )
        if any(word in text for word in _NO_DATABASE):
            return self._as_refusal(
                f"Redis at {self.shown} has no database {self._pool.connection_kwargs.get('db')}: {text}; expected a "
                "number below its setting databases, which is 16 unless redis.conf says otherwise"
            )
        if any(word in text for word in _UNKNOWN_FLAGS):
            return ScriptFlagsError(f"Redis at {self.shown} refused a script: {text}")
        return PacelineError(f"Redis at {self.shown} refused a command: {type(error).__name__}: {text}")

    def _as_refusal(self, message: str) -> PacelineError:
        """What it means that Redis does not let us in, or not do what we must: a mistake, or a change under way."""
        return self._pause(UnavailableError(message)) if self.was_admitted else ConfigError(message)


class _PasswordFile(redis.CredentialProvider):
    """Name and password for each connection, the latter from a file, which may be replaced."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._read()  # a file that is missing is an error at the start

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """What redis-py logs in with."""
        try:
            password = self._read()
        except ConfigError as error:
            # It was there at the start: whoever replaces it is about to put it back.
            raise RedisConnectionError(str(error)) from error
        return (self._name, password) if self._name else (password,)

    def _read(self) -> str:
        try:
            password = self._path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"replay.redis_password_file {self._path} cannot be read: {type(error).__name__}; expected a file with "
                "the password that this user may read"
            ) from error
        if not password:
            raise ConfigError(f"replay.redis_password_file {self._path} is empty: expected the password of Redis")
        return password


def _require_known_parts(url: str) -> None:
    """Raise ValueError for what redis-py would pass over, or would let change how replies are read."""
    parts = urlsplit(url)
    has_path = parts.scheme in ("redis", "rediss")
    if "@" in parts.query or (has_path and "@" in parts.path):  # perhaps half a password, which nobody is to read
        raise ValueError("an @ comes after a / or ?, which names and passwords have percent-encoded")
    if has_path and re.fullmatch(r"/?\d*", parts.path) is None:
        raise ValueError(f"its path is {parts.path}, which is no number of a database")
    for name in parse_qs(parts.query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise ValueError(f"it has an option {name}, and known ones are {', '.join(_OPTIONS)}")
        if name in _FILES and parts.scheme != "rediss":
            raise ValueError(f"{name} is for TLS, which rediss:// speaks")


def _require_readable(files: dict[str, str]) -> None:
    """Raise ConfigError if a file of TLS would fail at each connection."""
    for name, path in files.items():
        if not Path(path).is_file():
            raise ConfigError(f"{name} is {path}: expected a file that exists")
    authorities, certificate, key = (files.get(name) for name in _FILES)
    context = ssl.create_default_context()
    if authorities is not None:
        try:
            context.load_verify_locations(cafile=authorities)
        except OSError as error:
            raise ConfigError(f"ssl_ca_certs is {authorities}: {error}: expected certificates in PEM form") from error
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key, password="")  # else OpenSSL would ask whoever sits before it
        except OSError as error:
            raise ConfigError(
                f"ssl_certfile is {certificate} and ssl_keyfile is {key or 'not set'}: {error}: expected a certificate "
                "and its key in PEM form, without a password"
            ) from error
    elif key is not None:
        raise ConfigError(f"ssl_keyfile is {key} and ssl_certfile is not set: expected both")


def _take_password_file(url: str) -> tuple[str, _PasswordFile | None]:
    """A URL without `password_file` and the name that belongs to it, and what both stand for."""
    parts = urlsplit(url)
    query = parse_qs(parts.query, keep_blank_values=True)
    paths = query.pop("password_file", None)
    if paths is None:
        return url, None
    host = parts.netloc.rpartition("@")[2]
    rest = urlunsplit((parts.scheme, host, parts.path, urlencode(query, doseq=True), ""))
    # Of a Unix socket nothing but the path is left, which urlunsplit would write without its slashes.
    rest = rest if rest.startswith(f"{parts.scheme}://") else rest.replace(f"{parts.scheme}:", f"{parts.scheme}://", 1)
    return rest, _PasswordFile(unquote(parts.username or ""), Path(paths[-1]))


def _result(replies: list[Any]) -> Any:
    """What the script returned: the last reply, or within a transaction the last one of it."""
    return replies[-1][-1] if len(replies) > 1 and isinstance(replies[-1], list) else replies[-1]


def _first_error(replies: list[Any]) -> RedisError | None:
    within = replies[-1] if isinstance(replies[-1], list) else []
    return next((reply for reply in [*replies, *within] if isinstance(reply, RedisError)), None)


def _server_of(connection: Any) -> str:
    """The `run_id` of the server that a connection leads to, asked for once."""
    socket, server = getattr(connection, "told_by", (None, ""))
    if socket is not connection._sock:
        connection.send_packed_command(_pack([("INFO", "server")]))
        server = parse_info(connection.read_response()).get("run_id", "")
        connection.told_by = connection._sock, server
    return str(server)


def _read_reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error  # a whole reply: those after it are still to be read


def _pack(commands: Sequence[Sequence[Argument]]) -> list[bytes | memoryview]:
    """Commands in the protocol of Redis, in pieces: large arguments stay the objects that they are."""
    pieces: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = []
    for command in commands:
        small.append(b"*%d\r\n" % len(command))
        for argument in command:
            data = argument if isinstance(argument, _BINARY) else str(argument).encode()
            if len(data) > COPIED_BYTES:
                small.append(b"$%d\r\n" % len(data))
                pieces += (b"".join(small), data)
                small = [b"\r\n"]
            else:
                small += (b"$%d\r\n" % len(data), data, b"\r\n")
    return [*pieces, b"".join(small)]
