"""Traces of lag: which version a collector applied, how far into its work, knowing of which newest one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

from paceline.errors import InvalidInputError, NotFoundError
from paceline.lag.lines import open_lines, read_lines

_NAME = re.compile(r"collector-(\d+)\.jsonl")
_FIELDS = ("collector", "environment_steps", "known_version", "applied_version")


@dataclass(frozen=True)
class Application:
    """One snapshot that a collector began to act with."""

    collector: int
    environment_steps: int
    """That the collector has taken before, over all its incarnations."""
    known_version: int
    """The newest that it knew of."""
    applied_version: int

    @property
    def lag_versions(self) -> int:
        """How far behind it acts from then on."""
        return self.known_version - self.applied_version


class TraceWriter:
    """Appends the applications of one collector to `collector-<index>.jsonl`; each is written at once."""

    def __init__(self, file: TextIO, collector: int, steps_before: int) -> None:
        """Use `open`."""
        self._file, self._collector, self._steps_before = file, collector, steps_before

    @classmethod
    def open(cls, folder: Path, collector: int) -> Self:
        """Go on with the collector's trace in `folder` (`runs/RUN/lag-trace`), or begin it.

        A collector that is started anew counts its steps from 0: they follow those of the last line.
        Raises InvalidInputError if what is there is not a trace.
        """
        path = trace_path(folder, collector)
        lines = _read(path) if path.exists() else []
        return cls(open_lines(path), collector, lines[-1].environment_steps if lines else 0)

    def write(self, *, environment_steps: int, known_version: int, applied_version: int) -> None:
        """Append one application, `environment_steps` after this collector started."""
        values = (self._collector, self._steps_before + environment_steps, known_version, applied_version)
        self._file.write(json.dumps(dict(zip(_FIELDS, values, strict=True))) + "\n")

    def close(self) -> None:
        """End the file."""
        self._file.close()


def trace_path(folder: Path, collector: int) -> Path:
    """Where a collector's trace lies in the folder of a run's traces."""
    return folder / f"collector-{collector}.jsonl"


def read_trace(path: Path, collector: int) -> list[Application]:
    """The applications that a collector is to repeat, oldest first; at least one.

    Args:
        path: one collector's file, which then holds for every collector, or a folder with a file for each.
        collector: the index of the collector that asks.

    Raises:
        NotFoundError: there is no such file.
        InvalidInputError: a line other than the last is damaged, or the lines make no trace.
    """
    file = trace_path(path, collector) if path.is_dir() else path
    if not file.is_file():
        raise NotFoundError(
            f"lag.inject.trace is {path}: expected {_expected(path, collector)}; record one with lag.record=true"
        )
    applications = _read(file)
    if not applications:
        raise InvalidInputError(f"{file} holds no application: expected at least one line of a recorded trace")
    return applications


def _expected(path: Path, collector: int) -> str:
    if not path.is_dir():
        return "a file that a run recorded, or the folder of its traces (runs/RUN/lag-trace)"
    indices = sorted(int(match[1]) for entry in path.iterdir() if (match := _NAME.fullmatch(entry.name)))
    return f"collector-{collector}.jsonl in it, and it has those of collectors {indices}"


def _read(path: Path) -> list[Application]:
    lines = read_lines(path)
    if lines and lines[-1] is None:
        del lines[-1]  # its writer was killed within it
    applications: list[Application] = []
    for number, line in enumerate(lines, start=1):
        application = _application(line)
        if application is None:
            raise InvalidInputError(
                f"{path}, line {number} is no line of a trace: expected an object with the whole numbers "
                f"{', '.join(_FIELDS)}, none negative and applied_version at most known_version"
            )
        if applications and application.environment_steps < applications[-1].environment_steps:
            raise InvalidInputError(
                f"{path}, line {number} is at {application.environment_steps} environment steps, after "
                f"{applications[-1].environment_steps}: expected the lines of one collector, in its order"
            )
        applications.append(application)
    return applications


def _application(line: dict[str, Any] | None) -> Application | None:
    values = [] if line is None else [line.get(name) for name in _FIELDS]
    numbers = [value for value in values if isinstance(value, int) and value >= 0]
    if len(numbers) != len(_FIELDS) or numbers[3] > numbers[2]:
        return None
    return Application(*numbers)
