"""A server between replay and a real Redis, which answers with errors, or late, or moves on, when it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import BinaryIO


class FaultyRedis:
    """Passes commands on to the Unix socket `upstream`; while `fault` is set, answers each with that error."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        """Where connections that come from now on lead; those that are open stay where they are."""
        self.fault: str | None = None
        self.only: bytes | None = None
        """Where set, only commands of this name meet the fault, or are held."""
        self.spared = 0
        """So many commands that would meet the fault next do not."""
        self.pass_first: int | None = None
        """Where set, so many commands named `only` are answered, and those after them when `released` is set."""
        self.released = threading.Event()
        self.delay: Callable[[], float] = float
        """Seconds that a reply waits."""
        self.lose_replies_to: bytes | None = None
        """A command that holds these bytes is carried out, and its connection cut instead of the reply; once."""
        self.attempts = 0
        """Commands that met the fault, less what a client library says of itself."""
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def close(self) -> None:
        self.released.set()
        for connection in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in accept or recv
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            upstream = socket.socket(socket.AF_UNIX)
            try:
                upstream.connect(self.upstream)
            except OSError:  # it is down: so is what stands before it
                client.close()
                continue
            self._open += [client, upstream]
            threading.Thread(target=self._serve, args=(client, upstream), daemon=True).start()

    def _serve(self, client: socket.socket, upstream: socket.socket) -> None:
        with client.makefile("rb") as commands, upstream.makefile("rb") as replies:
            try:
                while command := _read_value(commands):
                    if self._meets_fault(command):
                        self.attempts += b"\r\nCLIENT\r\n" not in command
                        client.sendall(f"-{self.fault}\r\n".encode())
                        continue
                    upstream.sendall(command)
                    reply = _read_value(replies)
                    if self.lose_replies_to is not None and self.lose_replies_to in command:
                        self.lose_replies_to = None
                        break
                    self._hold(command)
                    threading.Event().wait(self.delay())
                    client.sendall(reply)
            except (OSError, ValueError):
                pass  # either side has closed
        client.close()
        upstream.close()

    def _meets_fault(self, command: bytes) -> bool:
        meets = self.fault is not None and (self.only is None or self.only in command[:32])
        if meets and self.spared > 0:
            self.spared -= 1
            return False
        return meets

    def _hold(self, command: bytes) -> None:
        if self.pass_first is not None and self.only is not None and self.only in command[:32]:
            self.pass_first -= 1
            if self.pass_first < 0:
                self.released.wait()


def _read_value(stream: BinaryIO) -> bytes:
    """One value of the protocol, as its bytes; empty at the end."""
    line = stream.readline()
    if line[:1] == b"$" and int(line[1:]) >= 0:
        return line + stream.read(int(line[1:]) + 2)
    if line[:1] == b"*":
        return line + b"".join(_read_value(stream) for _ in range(int(line[1:])))
    return line
