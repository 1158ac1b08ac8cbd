"""What the settings of a Redis server mean for rows when it dies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Replay has every row that it acknowledged in memory too, and writes again what Redis lost (`tiers.py`). So rows are
# lost only where both die, or where Redis loses them while replay is down.
_BOTH = "if it and replay both die"
_FSYNC = {
    "always": "every acknowledged row is on its disk: none is lost",
    "everysec": f"{_BOTH}, rows of the last second or two are lost; appendfsync always loses none",
    "no": f"{_BOTH} with their machine, rows of the last half minute are lost; set appendfsync everysec",
    None: f"{_BOTH}, rows since it last wrote to disk are lost, a second's with appendfsync everysec",
}


@dataclass(frozen=True)
class Durability:
    """How a server keeps what it is given; None stands for what it does not let us see."""

    appendonly: bool
    appendfsync: str | None
    save: str | None
    meaning: str

    @property
    def keeps_rows(self) -> bool:
        """Whether at most seconds of rows are lost with the server."""
        return self.appendonly


def describe_durability(persistence: Mapping[str, str], appendfsync: str | None, save: str | None) -> Durability:
    """What the section `persistence` of INFO, and the two settings, mean."""
    appendonly = persistence.get("aof_enabled") == "1"
    if appendonly:
        meaning = _FSYNC.get(appendfsync, _FSYNC[None])
    elif save == "":
        meaning = f"{_BOTH}, or it restarts while replay is down, every row is lost; set appendonly yes"
    else:
        meaning = f"{_BOTH}, or it restarts while replay is down, rows since its last snapshot are lost; "
        meaning += "set appendonly yes"
    return Durability(appendonly, appendfsync, save, meaning)


def parse_info(reply: bytes) -> dict[str, str]:
    """The fields of an answer to INFO."""
    pairs = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, separator, value in pairs if separator}
