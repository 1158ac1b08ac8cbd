"""A counting environment that waits in a step to be killed, registered as `mortal_environment:Mortal-v0`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium

from counting_environment import Counting


class Mortal(Counting):
    """As `Counting`; from its `step`-th step on, the first of a vector of them tells its process id and waits.

    It does so while the named pipe `tells` exists, for whose reader it waits already.
    """

    def __init__(self, tells: str, step: int = 1, is_stubborn: bool = False) -> None:
        super().__init__()
        self._tells, self._at, self._all_steps = Path(tells), step, 0
        self._is_first = multiprocessing.current_process().name.endswith("-0")
        if is_stubborn and multiprocessing.parent_process() is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._all_steps += 1
        if self._is_first and self._all_steps >= self._at and self._tells.exists():
            self._tells.write_text(str(os.getpid()))
            threading.Event().wait()
        return super().step(action)


@contextmanager
def killed_in_its_step(tells: Path) -> Iterator[None]:
    """Within, the first environment's process is killed in the step in which it waits; one built anew does not wait."""
    os.mkfifo(tells)

    def kill() -> None:
        process = int(tells.read_text())
        tells.unlink()
        os.kill(process, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive(), "no environment came to the step in which it was to be killed"


if "Mortal-v0" not in gymnasium.registry:
    gymnasium.register("Mortal-v0", entry_point="mortal_environment:Mortal")
