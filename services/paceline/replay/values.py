"""The reply to MGET, each value received into memory of its own.

redis-py collects a reply, copies every value out of it, and holds the interpreter lock for both. A restore has another
thread check and copy the blocks before: here that thread runs on while the kernel copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

AHEAD_BYTES = 4096
"""Read at once for a line: what follows it is the beginning of a value, and copied once more."""
MAX_VALUE_BYTES = 512 << 20
"""Of a string in Redis."""

Values = list[memoryview | None]


def read_values(connection: Any, count: int) -> Values | ResponseError:
    """What a connection of redis-py that has sent an MGET of `count` keys gets: the values, None where there is none.

    An error of the server is given, not raised: it is a whole reply. Raises what redis-py does when the connection
    breaks or its deadline passes.
    """
    return _Reply(connection._sock).read(count)


class _Reply:
    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._ahead = bytearray(AHEAD_BYTES)
        self._begin = self._end = 0

    def read(self, count: int) -> Values | ResponseError:
        line = self._line()
        if line.startswith(b"-"):
            return ResponseError(line[1:].decode(errors="replace"))
        if line != b"*%d" % count:
            raise RedisConnectionError(f"Redis answers MGET of {count} keys by {line[:80]!r}")
        return [self._value() for _ in range(count)]

    def _value(self) -> memoryview | None:
        line = self._line()
        if line == b"$-1":
            return None
        if not (line.startswith(b"$") and line[1:].isdigit() and int(line[1:]) <= MAX_VALUE_BYTES):
            raise RedisConnectionError(f"Redis announces a value by {line[:80]!r}")
        size = int(line[1:])
        value = np.empty(size, np.uint8).data  # not bytearray: it would be cleared first
        done = min(size, self._end - self._begin)
        value[:done] = self._ahead[self._begin : self._begin + done]
        self._begin += done
        while done < size:
            done += self._receive(value[done:])
        if self._line():
            raise RedisConnectionError(f"Redis sent more than the {size} bytes of a value")
        return value

    def _line(self) -> bytes:
        while (at := self._ahead.find(b"\r\n", self._begin, self._end)) < 0:
            rest = self._ahead[self._begin : self._end]
            self._begin, self._end = 0, len(rest)
            self._ahead[: self._end] = rest
            if self._end == AHEAD_BYTES:
                raise RedisConnectionError(f"Redis sent a line of more than {AHEAD_BYTES} bytes")
            self._end += self._receive(memoryview(self._ahead)[self._end :])
        line = bytes(self._ahead[self._begin : at])
        self._begin = at + 2
        return line

    def _receive(self, into: memoryview) -> int:
        try:
            received: int = self._socket.recv_into(into)
        except TimeoutError as error:
            raise RedisTimeoutError("Timeout reading from socket") from error
        except OSError as error:
            raise RedisConnectionError(f"Error while reading from socket: {error}") from error
        if not received:
            raise RedisConnectionError("Connection closed by server.")
        return received
