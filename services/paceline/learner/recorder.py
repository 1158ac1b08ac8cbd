"""The record of a run: `metrics.jsonl` and TensorBoard, written as things happen."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from paceline.lag.lines import cut_torn_line
from paceline.telemetry import get_logger

SCALAR_KINDS = frozenset({"training", "episode", "evaluation"})
"""Kinds of record whose numbers are drawn over environment steps."""
_NOT_SCALARS = frozenset({"environment_steps", "collector_index", "collector_incarnation", "sequence", "incarnation"})
RECALL_BYTES = 4 << 20
"""How much of an existing record is read again at start, to know what is repeated: a repeat follows within minutes."""


class Recorder:
    """Appends records to `<run folder>/metrics.jsonl`, and their numbers to `<run folder>/tensorboard/`.

    Each record has reached the operating system when `write` returns, so it survives the death of this process.
    Use it from one thread at a time.
    """

    def __init__(self, run_folder: Path) -> None:
        """Go on with the record of the run; a line torn by a crash is cut off."""
        run_folder.mkdir(parents=True, exist_ok=True)
        self._path = run_folder / "metrics.jsonl"
        removed = cut_torn_line(self._path)
        if removed:
            get_logger().warning("torn_line_removed", file=str(self._path), removed_bytes=removed)
        self._lines = self._path.open("a", encoding="utf-8", buffering=1)
        self._scalars = ScalarWriter(run_folder / "tensorboard")

    def recall(self) -> Iterator[dict[str, Any]]:
        """The latest records of earlier processes, oldest first: the last few MiB."""
        with self._path.open("rb") as file:
            start = max(os.path.getsize(self._path) - RECALL_BYTES, 0)
            file.seek(start)
            lines = file.read().splitlines()
        for line in lines[1:] if start else lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # someone's editor; not worth a run
            if isinstance(record, dict):
                yield record

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Append one record: a JSON line with `time` (seconds since 1970), `kind` and the fields.

        A number that is not finite is written as null, since JSON has no other word for it.
        """
        record = {"time": time.time(), "kind": kind, **fields}
        self._lines.write(json.dumps(_finite(record), allow_nan=False) + "\n")
        step = fields.get("environment_steps")
        if kind in SCALAR_KINDS and isinstance(step, int):
            scalars = {f"{kind}/{name}": float(value) for name, value in fields.items() if _is_scalar(name, value)}
            if scalars:
                self._scalars.write(scalars, step=step, seconds=record["time"])

    def close(self) -> None:
        """End both files."""
        self._lines.close()
        self._scalars.close()


class ScalarWriter:
    """Writes scalars as a TensorBoard event file, with neither torch nor TensorFlow, and no thread.

    tensorboard's own `EventFileWriter` imports TensorFlow where that is installed; its record format does not.
    """

    def __init__(self, folder: Path) -> None:
        """Begin a file of its own beside those of earlier processes."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{platform.node()}.{os.getpid()}.{time.time_ns()}"
        self._file: IO[bytes] = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, scalars: Mapping[str, float], *, step: int, seconds: float) -> None:
        """Write the scalars of one step; `seconds` since 1970."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(wall_time=seconds, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()


def _is_scalar(name: str, value: object) -> bool:
    if name in _NOT_SCALARS or isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
