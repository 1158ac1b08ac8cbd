"""What every process has alike: allocator, threads, memory, clock, stop signals."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

# glibc's mallopt parameters, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3

MIN_PYTHON = (3, 11)


def tune_allocator() -> bool:
    """Keep freed message buffers in the process instead of returning them to the kernel; whether it took effect.

    Each message is a fresh buffer; faulting its pages in again costs ten times its copy. Measured: 1.3-2 x on raw
    gRPC messages, 4 x on protobuf ones. glibc only; all three thresholds are needed.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(
        [
            mallopt(_M_MMAP_THRESHOLD, 1 << 30) == 1,
            # mallopt takes an int: 2 GiB - 1 is the largest threshold it can say.
            mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1) == 1,
            mallopt(_M_TOP_PAD, 64 << 20) == 1,
        ]
    )


@contextmanager
def importing() -> Iterator[None]:
    """Imports of much code within, such as torch: what they make stays, so the garbage collector never looks at it.

    Measured with torch: a fifth of the import's time, and 150 ms of each full collection later on.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _read_epoch_ns() -> int:
    """The monotonic clock's zero in nanoseconds since 1970, by that of a few readings which was interrupted least."""
    readings = []
    for _ in range(5):
        before, now, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, now - (before + after) // 2))
    return min(readings)[1]


_EPOCH_NS = _read_epoch_ns()


def own_epoch_ns() -> int:
    """Where this process counts its own time from: the monotonic clock's zero, in nanoseconds since 1970."""
    return _EPOCH_NS


def adopt_epoch(epoch_ns: int) -> None:
    """Count time as the process of this host does whose `own_epoch_ns` this is: a helper as the one that started it."""
    global _EPOCH_NS
    _EPOCH_NS = epoch_ns


def own_time_ns() -> int:
    """Nanoseconds since 1970 as this process counts them from its start on: a clock that is set meanwhile, by a person
    or after a host has slept, makes no age or lag false until a process starts again."""
    return _EPOCH_NS + time.monotonic_ns()


def own_time() -> float:
    """The same in seconds."""
    return own_time_ns() * 1e-9


def memory_bytes() -> int:
    """Memory that this process could have at most: the host's, or that of its container if it is limited to less."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = _memory_of_container()
    return host if container is None else min(host, container[0])


def free_memory_bytes() -> int | None:
    """Memory that is free for this process now, on the host and in its container; None where that cannot be known."""
    container = _memory_of_container()
    found = [] if container is None else [max(0, container[0] - container[1])]
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) << 10)
    return min(found, default=None)


def _memory_of_container() -> tuple[int, int] | None:
    """Limit and use of the cgroup, of version 2 or 1, as a container sees its own; None: no limit."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        bound, taken = _read(limit).strip(), _read(used).strip()
        if bound.isdigit() and taken.isdigit():  # "max": no limit
            return int(bound), int(taken)
    return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


def limit_threads(environment: MutableMapping[str, str], threads: int = 1) -> None:
    """Set the compute threads in `environment`, unless it says otherwise. Before numpy or torch are imported.

    Processes share cores: a spinning OpenMP thread that loses its core stalls every parallel region (measured:
    4-24 updates/s against 60), hence PASSIVE.
    """
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("OPENBLAS_NUM_THREADS", str(threads))
    environment.setdefault("MKL_NUM_THREADS", str(threads))
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def yield_to_others() -> bool:
    """Have this process, and the threads that it starts, wait for its turn instead of interrupting whom it shares cores
    with; whether it took effect.

    Its share of a busy core stays the same, and so does what it gets of an idle one: what changes is that data which
    comes for it does not interrupt another process amid its work. For work that others wait for seldom. Linux only.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return False  # a sandbox may refuse the call, or not know it; it is for speed alone
    return True


class StopSignal:
    """Set by SIGTERM or SIGINT. A second signal changes nothing, so it cannot harm what the first began."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @classmethod
    def install(cls) -> StopSignal:
        """Take over SIGTERM and SIGINT of this process. Call from the main thread."""
        stop = cls()
        # A handler runs amid whatever the main thread does, such as a wait for this very event, whose lock it may hold:
        # setting the event there could wait for itself. A SimpleQueue may be put into anywhere.
        came: SimpleQueue[int] = SimpleQueue()

        def take() -> None:
            came.get()
            stop.set()

        threading.Thread(target=take, name="signals", daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: came.put(number))
        return stop

    def set(self) -> None:
        """Ask for the stop from within."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether the stop was asked for."""
        return self._event.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the stop; whether it came."""
        return self._event.wait(seconds)


EXIT_STOPPED = 128 + signal.SIGTERM
"""Exit status, as shells say it, of a launcher's service that was asked to stop before its work was done."""
EXIT_HELPER_LOST = os.EX_TEMPFAIL
"""Exit status of a process that lost one which it had started: run again it is as good as before."""


def die_with_parent(how: signal.Signals = signal.SIGTERM, *, parent: int | None = None) -> None:
    """Have the kernel end this process when its parent ends, however it ends. Linux only; elsewhere nothing.

    Args:
        how: SIGKILL ends one that is stopped as well. The parent is the thread that started this process.
        parent: process id of the one that started this; if that has ended before this call, this ends now. None: who
            has no parent any more finds that out by itself.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, how)
        if parent not in (None, os.getppid()):
            os.kill(os.getpid(), how)


def dying_with_parent(command: list[str]) -> list[str]:
    """The command that runs `command`, a path and its arguments, and has the kernel end it when its parent ends.

    Linux only; elsewhere `command` itself. A `preexec_fn` would do it in a fork of this process, which may not be
    forked: its gRPC threads are not in the child, whose locks they hold.
    """
    if sys.platform != "linux":
        return command
    program = (
        "import ctypes, os, signal, sys\n"
        "ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
        # It may have ended while this interpreter started.
        "if os.getppid() != int(sys.argv[1]): os.kill(os.getpid(), signal.SIGTERM)\n"
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    return [sys.executable, "-I", "-S", "-c", program, str(os.getpid()), *command]


def require_python(version: tuple[int, ...] = sys.version_info[:3]) -> str | None:
    """What is wrong with this Python, or None."""
    if version[:2] < MIN_PYTHON:
        have, want = ".".join(map(str, version)), ".".join(map(str, MIN_PYTHON))
        return f"Python {have} is too old: Paceline needs {want} or newer; install it and run `make setup` again"
    return None


def process_id() -> str:
    """Identifies this process among all hosts of a run."""
    return f"{platform.node()}:{os.getpid()}"
