"""Files of JSON lines that are appended to until their writer dies, maybe within a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

_BLOCK_BYTES = 1 << 16


def read_lines(path: Path) -> list[dict[str, Any] | None]:
    """The objects of the file, one for each line that is not blank; None for a line that is damaged.

    Raises:
        OSError: the file is not there or cannot be read.
    """
    return [_read_object(text) for text in path.read_bytes().splitlines() if text.strip()]


def open_lines(path: Path) -> TextIO:
    """Open the file, made if need be, to append whole lines; a torn last one is cut off first.

    A line has reached the operating system once its end was written, so it outlives the process but, with a power
    cut, maybe not the machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_torn_line(path)
    return path.open("a", encoding="utf-8", buffering=1)


def cut_torn_line(path: Path) -> int:
    """Cut off a last line without its end, within which its writer died; how many bytes that removes."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        end = keep = file.seek(0, os.SEEK_END)
        while keep > 0:
            start = max(keep - _BLOCK_BYTES, 0)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)
        return end - keep


def _read_object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
