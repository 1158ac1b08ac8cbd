"""Servers and clients in processes of their own, and the CPU time of each."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.process import die_with_parent, tune_allocator

_PROCESSES = multiprocessing.get_context("spawn")  # a fork of a process that uses gRPC does not work
_END_SECONDS = 30.0


class Remote:
    """An object that lives in a process of its own, whose methods are called over a pipe."""

    def __init__(self, stack: ExitStack, make: Callable[..., object], *arguments: object) -> None:
        """Have `make(*arguments)` made there, and ended with `stack`; wait with `ready` before the first call."""
        self._pipe, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=_answer_calls, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        stack.callback(self._end)

    def ready(self) -> Remote:
        """Wait until the object is made; raises what its making raised."""
        self.result()
        return self

    def call(self, method: str, *arguments: object) -> Any:
        """What the method returns; raises what it raises."""
        self.start(method, *arguments)
        return self.result()

    def start(self, method: str, *arguments: object) -> None:
        """Begin a call; `result` ends it."""
        self._pipe.send((method, arguments))

    def result(self) -> Any:
        """What the call that was begun returns; raises what it raises."""
        try:
            value, error = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"a process of the benchmark ended with code {self._process.exitcode}") from None
        if error is not None:
            raise RuntimeError(f"a process of the benchmark failed:\n{error}")
        return value

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        return _cpu_seconds(self._process.pid)

    def _end(self) -> None:
        self._pipe.close()
        self._process.join(_END_SECONDS)
        self._process.kill()


class ServerProcess:
    """A function that serves until SIGTERM, in a process of its own."""

    def __init__(self, stack: ExitStack, serve: Callable[..., None], *arguments: object) -> None:
        self._process = _PROCESSES.Process(target=_serve, args=(serve, arguments), daemon=True)
        self._process.start()
        stack.callback(self.stop)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        return _cpu_seconds(self._process.pid)

    def stop(self) -> None:
        """End it, if it has not ended."""
        self._process.terminate()
        self._process.join(_END_SECONDS)
        self._process.kill()


class CpuMeter:
    """CPU time that processes take within a `with`."""

    def __init__(self, *processes: Remote | ServerProcess) -> None:
        self._processes = processes
        self.seconds = 0.0

    def __enter__(self) -> CpuMeter:
        self.seconds = -self._total()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += self._total()

    def _total(self) -> float:
        return sum(process.cpu_seconds for process in self._processes)


def free_address() -> str:
    """An address of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def _serve(serve: Callable[..., None], arguments: tuple[object, ...]) -> None:
    die_with_parent()
    tune_allocator()
    serve(*arguments)


def _answer_calls(pipe: Connection, make: Callable[..., object], arguments: tuple[object, ...]) -> None:
    die_with_parent()
    tune_allocator()
    try:
        made = make(*arguments)
        pipe.send((None, None))
        while True:
            method, given = pipe.recv()
            pipe.send((getattr(made, method)(*given), None))
    except EOFError:
        pass  # nobody will call any more
    except Exception:
        pipe.send((None, traceback.format_exc()))


def _cpu_seconds(pid: int | None) -> float:
    path = Path(f"/proc/{pid}/stat")
    if not path.exists():
        return math.nan  # not Linux: the measures of CPU time stay empty
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
