"""The training process's end of the link to its endpoint process: what was started, and the socket to it."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from paceline import errors
from paceline.errors import HelperLostError, PacelineError, UnavailableError
from paceline.learner.control import Message, take_messages
from paceline.process import StopSignal

SEND_SECONDS = 10.0
"""The endpoint has to take a message by then; it does within milliseconds."""
_EXIT_SECONDS = 5.0
"""A process that closed its end of the socket has to be gone by then."""
_LOOK_UP_SECONDS = 0.2
"""A wait looks up this often for a stop signal."""


class EndpointLink:
    """A child process and the socket to it. Nothing is read by a thread: every method takes in what has arrived.

    `lock` guards the link and whatever the messages change.
    """

    def __init__(self, memory_descriptor: int, on_message: Callable[[Message], None]) -> None:
        """Start the process, which inherits the descriptor; `on_message` is called with what it says."""
        mine, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "paceline.learner.endpoint_process",
                    str(theirs.fileno()),
                    str(memory_descriptor),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory_descriptor),
            )
        # Two objects of one socket, since a timeout belongs to the object: sending waits, receiving never does.
        self._outgoing, self._incoming = mine, mine.dup()
        self._outgoing.settimeout(SEND_SECONDS)
        self._incoming.setblocking(False)
        self.lock = threading.RLock()
        self._on_message = on_message
        self._buffer = bytearray()
        self._failure: PacelineError | None = None
        self.closed = False

    def send(self, message: Message) -> None:
        """Send a message. Raises UnavailableError, or what ended the process, when nobody takes it."""
        data = message.encode()
        with self.lock:
            self.check()
            try:
                self._outgoing.sendall(data)
            except OSError as error:
                self._receive()
                # A message may be sent in part: nothing after it would be understood.
                self._failure = self._failure or HelperLostError(
                    f"the endpoint process {self.process.pid} takes no message: {error or 'it hangs'}"
                )
                raise self._failure from error

    def check(self) -> None:
        """Raise what ended the process, if it has ended. Takes microseconds."""
        with self.lock:
            if self.closed:
                raise UnavailableError("the endpoint is closed")
            self._receive()
            if self._failure is not None:
                raise self._failure
            code = self.process.poll()
            if code is not None:
                raise HelperLostError(
                    f"the endpoint process {self.process.pid} ended with exit code {code}: without it no collector "
                    "gets a snapshot, so the learner ends too; resume the run"
                )

    def wait(self, is_true: Callable[[], bool], seconds: float, stop: StopSignal | None = None) -> bool:
        """Take in what the process says until something is true; whether it is, within `seconds`.

        Raises what ended the process, if it ends meanwhile.
        """
        deadline = time.monotonic() + seconds
        while True:
            with self.lock:
                if not self.closed:
                    self._receive()
                if is_true():
                    return True
                self.check()
            left = deadline - time.monotonic()
            if left <= 0 or (stop is not None and stop.is_set()):
                return False
            readable, _, _ = select.select([self._incoming], [], [], min(left, _LOOK_UP_SECONDS))
            if readable and self._is_at_end():
                try:
                    self.process.wait(_EXIT_SECONDS)
                except subprocess.TimeoutExpired:
                    return False

    def kill(self) -> None:
        """End the process now, if it has not ended, and let go of the socket."""
        with self.lock:
            self.closed = True
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
            self._outgoing.close()
            self._incoming.close()

    def _receive(self) -> None:
        while True:
            try:
                data = self._incoming.recv(65536)
            except OSError:  # nothing there now; or the end, which `check` says by the process
                break
            if not data:
                break
            self._buffer += data
            for message in take_messages(self._buffer):
                if message.kind == "failed":
                    named = getattr(errors, message.fields["error"], UnavailableError)
                    self._failure = named(message.fields["message"])
                else:
                    self._on_message(message)

    def _is_at_end(self) -> bool:
        try:
            return not self._incoming.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
