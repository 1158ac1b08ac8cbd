"""What replay asks of a Redis: that it keeps rows, and whose the run's keys are. `link` says how it is reached."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.errors import ConfigError, ConflictError, PacelineError, ReplacedError, UnavailableError
from paceline.replay.durability import describe_durability, parse_info
from paceline.replay.link import Argument, RedisLink, ScriptFlagsError
from paceline.replay.scripts import CLAIM, Script
from paceline.replay.values import Values
from paceline.telemetry import get_logger

FORMAT = "3"
"""Of the keys and values in Redis."""
OLDER_FORMAT = "2"
"""What the release before wrote, which is gone on with in the new format; a record of any other is refused."""


def key_of(run_id: str, shard: int | None, *parts: str) -> bytes:
    """A key of a run, and of one of its shards (None: it has but one).

    The braces keep all keys of a shard on one node of a cluster.
    """
    space = run_id if shard is None else f"{run_id}:{shard}"
    return ":".join((f"paceline:{{{space}}}", *parts)).encode()


class RedisMemory(NamedTuple):
    """Bytes that a Redis uses, whatever for, and may use; 0: any number."""

    used: int
    maximum: int


class RedisStore:
    """One Redis, for one run."""

    def __init__(self, url: str, run_id: str, *, deadline_seconds: float, shard: int | None = None) -> None:
        """Connects at the first command.

        Args:
            url: as `replay.redis_url`, with the shard's number in it where it wants one.
            run_id: whose keys they are.
            deadline_seconds: of one command.
            shard: which of several shards of the run this is; None where there is but one.

        Raises:
            ConfigError: `url` is none, or names a file that is not there.
        """
        self._link = RedisLink(url, deadline_seconds=deadline_seconds)
        self._run_id = run_id
        self._shard = shard
        self._token = uuid.uuid4().hex.encode()
        self._checked: dict[str, object] = {}
        self.fenced = threading.Event()
        """Set when another replay process has taken the run over."""

    @property
    def token(self) -> bytes:
        """Identifies this process as the owner of the run's keys."""
        return self._token

    @property
    def is_loading(self) -> bool:
        """Whether the last failure was that Redis is still loading its data."""
        return self._link.is_loading

    @property
    def shown(self) -> str:
        """The URL, passwords hidden."""
        return self._link.shown

    def key(self, *parts: str) -> bytes:
        """A key of this run and shard."""
        return key_of(self._run_id, self._shard, *parts)

    def note_admitted(self) -> None:
        """Take the credentials for right: from now on a Redis that refuses them is one that is away.

        Its password is being replaced, or its users are: before, ConfigError says at once what no wait would mend.
        """
        self._link.was_admitted = True

    def check(self) -> None:
        """See that Redis is there, admits us and cannot evict our keys; log what its settings mean for the rows.

        Another check logs only what has changed.

        Raises:
            UnavailableError: it cannot be reached, is still loading, or is a replica.
            ConfigError: wrong password or certificate, an ACL user that lacks a command, or an evicting policy.
        """
        memory, persistence, server, replication = (
            parse_info(self.command("INFO", part)) for part in ("memory", "persistence", "server", "replication")
        )
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy.startswith("allkeys-"):
            raise ConfigError(
                f"Redis at {self._link.shown} has maxmemory-policy {policy}, which removes rows of the record when "
                "memory is short: expected noeviction; run `redis-cli CONFIG SET maxmemory-policy noeviction` and set "
                "it in redis.conf"
            )
        self._link.is_loading = persistence.get("loading") == "1"
        if self.is_loading:
            raise UnavailableError(f"Redis at {self._link.shown} is still loading its data")
        if replication.get("role") == "slave" and replication.get("slave_read_only", "1") == "1":
            self._link.close()  # the next try resolves its name again
            raise UnavailableError(
                f"Redis at {self._link.shown} is a read-only replica of {replication.get('master_host')}:"
                f"{replication.get('master_port')}: expected the primary; name that in replay.redis_url"
            )
        durability = describe_durability(persistence, self._read_setting("appendfsync"), self._read_setting("save"))
        checked: dict[str, object] = {
            "redis": self._link.shown,
            "version": server.get("redis_version", "unknown"),
            "maxmemory_bytes": int(memory.get("maxmemory", 0)),
            "maxmemory_policy": policy,
            "appendonly": durability.appendonly,
            "appendfsync": durability.appendfsync,
            "save": durability.save,
            "meaning": durability.meaning,
        }
        if checked != self._checked:
            self._checked = checked
            say = get_logger().info if durability.keeps_rows else get_logger().warning
            say("redis_checked", **checked)

    def read_server(self) -> str:
        """Which run of which server this is: it changes at each restart, and where a script was broken off.

        Raises UnavailableError while it is away.
        """
        return self._link.read_server()

    def read_memory(self) -> RedisMemory:
        """How much of its memory Redis uses. Raises UnavailableError while it is away."""
        memory = parse_info(self.command("INFO", "memory"))
        return RedisMemory(int(memory.get("used_memory", 0)), int(memory.get("maxmemory", 0)))

    def claim(self, *, resume: bool) -> bool:
        """Take the run's keys over from whatever process had them; whether the run was there before.

        A repeat after a lost answer is safe. A Redis that is full is taken over as well, from version 7 on.

        Raises:
            ConflictError: it was, and `resume` is False; or its record has another format.
            StoreFullError: it is full and older.
        """
        keys = [self.key("owner"), self.key("meta")]
        try:
            found = self._link.run_script(CLAIM, keys, [self._token, FORMAT, OLDER_FORMAT, int(resume)])
        except ScriptFlagsError:
            found = self._claim_by_commands(resume=resume)
        if found is not None:
            if not resume:
                raise ConflictError(
                    f"run id {self._run_id!r} has a record in Redis at {self._link.shown} already: "
                    "go on with it by --resume, or choose another run.id"
                )
            self._require_format(found)
        return found is not None

    def require_format(self) -> None:
        """Raise ConflictError if the record is not of this version's format."""
        self._require_format(self.command("HGET", self.key("meta"), "format") or b"(none)")

    def command(self, *arguments: Argument) -> Any:
        """Run one command and give its reply as it came. Raises the Paceline error that its failure stands for."""
        return self._link.command(*arguments)

    def read_each(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """The replies to commands that change nothing, sent in one go; None to one that this user may not run."""
        return self._link.read_each(commands)

    def read_values(self, keys: Sequence[bytes]) -> Values:
        """The strings at these keys, None where there is none."""
        return self._link.read_values(keys)

    def read_by_script(self, script: Script, keys: Sequence[bytes]) -> Any:
        """What a script that changes nothing returns: values of one moment."""
        return self._link.read_by_script(script, keys)

    def run_script(
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[Argument],
        before: Sequence[Sequence[Argument]] = (),
        *,
        server: str | None = None,
    ) -> str:
        """Run a script that writes, right after the commands `before` it, and give the words that it ends in.

        Args:
            server: what `read_server` gave, where the script is for no other run of it.

        Raises:
            ServerChangedError: Redis has restarted or broken a script off since, or another one is in its place;
                nothing was done.
            ReplacedError: another process owns the run.
            PacelineError: what its failure stands for.
        """
        words = bytes(self._link.run_script(script, keys, arguments, before, server=server)).decode()
        if words == "fenced":
            self.fenced.set()
            raise ReplacedError(
                f"another replay process has taken over run {self._run_id!r}; this one no longer stores rows and stops"
            )
        return words

    def close(self) -> None:
        """Close every connection."""
        self._link.close()

    def _claim_by_commands(self, *, resume: bool) -> bytes | None:
        """What CLAIM does and gives, for a server older than Redis 7."""
        if self.command("HSETNX", self.key("meta"), "format", FORMAT):
            found = None
        else:
            found = bytes(self.command("HGET", self.key("meta"), "format") or b"(none)")
            if not resume or found.decode(errors="replace") not in (FORMAT, OLDER_FORMAT):
                return found
            self.command("HSET", self.key("meta"), "format", FORMAT)
        self.command("SET", self.key("owner"), self._token)
        return found

    def _require_format(self, found: bytes) -> None:
        if found.decode(errors="replace") not in (FORMAT, OLDER_FORMAT):
            raise ConflictError(
                f"the record of run {self._run_id!r} has format {found.decode(errors='replace')}: expected "
                f"{OLDER_FORMAT} or {FORMAT}; use the version of Paceline that wrote it, or another run.id"
            )

    def _read_setting(self, name: str) -> str | None:
        """A setting of the server, or None where we may not see it."""
        try:
            (reply,) = self.read_each([("CONFIG", "GET", name)])
        except UnavailableError:
            raise
        except PacelineError:
            return None
        return bytes(reply[1]).decode() if reply and len(reply) == 2 else None
