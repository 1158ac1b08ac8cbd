"""Waits for what another thread or process is to bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SECONDS = 20.0


def wait_until(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """What `condition` returns as soon as it is true. Fails after `seconds`."""
    until = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < until, f"still not true after {seconds} s"
        time.sleep(0.005)
    return answer
