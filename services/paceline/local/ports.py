"""Ports for services that are started later, and again on the same one when they died."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from paceline.errors import PortTakenError

PORTS = range(20_000, 32_000)
"""Below those that Linux gives to connections and to whoever asks for any (32768 and up): what is given by chance
between the choice and the start would keep the service from its port."""


class PortChooser:
    """Chooses ports of 127.0.0.1 that nobody listens on and no other process of this user has chosen.

    Several runs begin on one machine at the same time, and their services listen seconds after the choice. So a chosen
    port is noted by a lock on the byte of that number in a file, which the system takes back when this process ends.
    """

    def __init__(self, ports: range = PORTS, path: Path | None = None) -> None:
        """`path`: the file that all share; None: one in the folder for temporary files."""
        self._ports = ports
        self._path = path or Path(tempfile.gettempdir()) / f"paceline-ports-{os.getuid()}"
        self._choosing = threading.Lock()
        self._file: int | None = None
        self._chosen: set[int] = set()

    def choose(self) -> str:
        """An address with a port that this process has not chosen before.

        Raises:
            PortTakenError: every port is taken.
        """
        with self._choosing:
            for port in random.sample(self._ports, len(self._ports)):
                if port not in self._chosen and self._lock(port) and _is_free(port):
                    self._chosen.add(port)
                    return f"127.0.0.1:{port}"
        raise PortTakenError(
            f"every port of 127.0.0.1 from {self._ports.start} to {self._ports.stop - 1} is taken: expected a free one "
            "for each service; stop what holds them, or set the services' listen addresses"
        )

    def _lock(self, port: int) -> bool:
        """Whether no other process has chosen the port. Stays in force, as a lock of a process is not taken twice."""
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError:
                return True  # a folder that we may not write: then the choice is left to chance
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError:
            return False
        return True


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return True
    return False


choose_address = PortChooser().choose
