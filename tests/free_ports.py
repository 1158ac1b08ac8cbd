"""Ports for servers that a test starts later, or stops and starts again: chosen now, and still free then."""

from __future__ import annotations

import itertools
import os
import socket

# Below what Linux gives to those who ask for any port (32768 and up): between its choice and its use, none of these is
# given to somebody else, and `paceline train` gives its services higher ones. Tests that run at the same time share
# them out, for one may choose what another has chosen.
_FIRST, _COUNT = 10_000, 10_000
_PARTS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PART = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PART_COUNT = _COUNT // _PARTS
_numbers = itertools.count(os.getpid() * 397)


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on, and that this process chooses only once."""
    for number in _numbers:
        port = _FIRST + _PART * _PART_COUNT + number % _PART_COUNT
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError("the numbers do not end")
