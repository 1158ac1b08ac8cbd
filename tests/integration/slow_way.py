"""A way to a server that carries little, and that a test can make stand still."""

from __future__ import annotations

import math
import socket
import threading
from contextlib import suppress

_PIECE_BYTES = 1 << 12


class SlowWay:
    """Carries TCP connections to a port of this machine: at once there, `bytes_per_second` of each back."""

    def __init__(self, port: int, *, bytes_per_second: float = math.inf) -> None:
        self._upstream, self._bytes_per_second = port, bytes_per_second
        self._changed = threading.Condition()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._may_carry: int | None = None
        self._is_closed = False
        self.carried = 0
        """Bytes that went back."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._run(self._accept)

    def stand_still_after(self, count: int) -> None:
        """Carry so many bytes more back, and then none."""
        with self._changed:
            self._may_carry = self.carried + count

    def go_on(self) -> None:
        with self._changed:
            self._may_carry = None
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            sockets = [self._listener, *self._sockets]
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(20)

    def _run(self, work, *arguments) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket()
                # Little is under way at a time, so that who stands still is one that sends nothing.
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _PIECE_BYTES)
                with self._changed:
                    self._sockets += [near, far]
                try:
                    far.connect(("127.0.0.1", self._upstream))
                except OSError:
                    near.close()
                    continue
                self._run(self._carry, near, far, False)
                self._run(self._carry, far, near, True)

    def _carry(self, source: socket.socket, target: socket.socket, is_back: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                if is_back and not self._pass(len(piece)):
                    return
                target.sendall(piece)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _pass(self, count: int) -> bool:
        """Wait until so many bytes may go back; False: they never will."""
        with self._changed:
            if not math.isinf(self._bytes_per_second):
                self._changed.wait_for(lambda: self._is_closed, count / self._bytes_per_second)
            self._changed.wait_for(lambda: self._is_closed or self._may_carry is None or self.carried < self._may_carry)
            self.carried += count
            return not self._is_closed
