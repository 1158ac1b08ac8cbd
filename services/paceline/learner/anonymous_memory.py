"""Memory that two processes share through a descriptor that one inherits from the other.

It has no name, so nothing is left behind however the processes end, and the size limit of /dev/shm in containers does
not hold for it.
"""

from __future__ import annotations

import os
import sys
import tempfile


def create_anonymous_file(name: str) -> int:
    """The descriptor of a new, empty file in memory (on disk where the system has no such thing)."""
    if sys.platform == "linux":
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
