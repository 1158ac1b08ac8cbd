"""Whether the learner's own rings fit the memory that they shall lie in."""

from __future__ import annotations

import torch

from paceline.errors import ConfigError
from paceline.process import free_memory_bytes

SHARE = 0.9
"""Of the memory that is free at the start; the rest is for everything else."""


def require_room(wanted_bytes: int, *, device: torch.device, table: str, ring_count: int = 1) -> None:
    """Raise ConfigError, with both sizes and what to lower, unless the rings of a table fit the device's memory."""
    available = available_bytes(device)
    if available is None or wanted_bytes <= available * SHARE:
        return
    place = "this host" if device.type == "cpu" else f"device {device}"
    rings = "a ring" if ring_count == 1 else f"{ring_count} rings, one for each shard,"
    raise ConfigError(
        f"the learner follows table {table!r} into {rings} of {_gigabytes(wanted_bytes)} in all, and {place} has "
        f"{_gigabytes(available)} of memory free: expected at most {SHARE:.0%} of it. Lower "
        f"replay.tables.{table}.capacity_rows or .capacity_bytes, or set replay.read=sample, where replay alone holds "
        "the rows"
    )


def available_bytes(device: torch.device) -> int | None:
    """Memory that is free for this process, on a GPU or on the host; None where that cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory_bytes()


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
