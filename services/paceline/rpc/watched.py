"""Files that somebody may replace while the process runs, such as certificates and tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from paceline.errors import ConfigError
from paceline.telemetry import get_logger

ValueT = TypeVar("ValueT")
Contents = Mapping[str, bytes]
"""What the files hold, by name; a file that is not there is left out."""

_READ_TRIES = 3
"""A folder that changes while it is read is read again so often."""


class WatchedFiles(Generic[ValueT]):
    """What a few files of a folder mean, made anew whenever one of them was replaced. Any thread may ask.

    Files that are wrong at the start are an error. Later the value before stays, with one line in the log: whoever
    replaces them writes one after the other, and a running service must not end over it.
    """

    def __init__(self, folder: Path, names: Sequence[str], make: Callable[[Contents], ValueT]) -> None:
        """`make` gives the meaning of what the files hold. Raises ConfigError, from `make` or for the folder."""
        self._folder, self._names, self._make = folder, names, make
        self._lock = threading.Lock()
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder: expected one with {', '.join(names)}")
        self._seen, contents = self._read()
        self._value = make(contents)

    def current(self) -> ValueT:
        """The value of now. Costs a look at each file, some microseconds."""
        if self._stamps() == self._seen:
            return self._value
        with self._lock:
            stamps = self._stamps()
            if stamps == self._seen:
                return self._value
            try:
                self._seen, contents = self._read()
                self._value = self._make(contents)
            except ConfigError as error:
                self._seen = stamps
                get_logger().warning(
                    "files_not_renewed", reason=str(error), meaning="what was there before stays in use until they fit"
                )
            else:
                get_logger().info("files_renewed", folder=str(self._folder))
            return self._value

    def _read(self) -> tuple[object, Contents]:
        for _ in range(_READ_TRIES):
            stamps, contents = self._stamps(), {}
            for name in self._names:
                try:
                    contents[name] = (self._folder / name).read_bytes()
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise ConfigError(
                        f"{self._folder / name} cannot be read: {error.strerror}; give this user the right to read it"
                    ) from error
            if stamps == self._stamps():
                return stamps, contents
        raise ConfigError(f"{self._folder} changes while it is read: expected that its files are replaced at once")

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(self._folder / name) for name in self._names]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    # A replaced file is another inode, even one of the same length within the clock's tick.
    return status.st_mtime_ns, status.st_size, status.st_ino
