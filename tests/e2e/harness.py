"""`paceline train` as a person runs it: in a process of its own, watched through its files and its children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

PACELINE = (sys.executable, "-m", "paceline")

# Small networks and batches: what is proved here does not need the speed of learning that the preset has.
SMALL = (
    "learner.algorithm.hidden=[64,64]",
    "learner.batch_size=64",
    "learner.record_every_seconds=0.5",
    "learner.checkpoint.every_updates=200",
    "evaluator.episodes=4",
    "evaluator.every_versions=50",
)


class Training:
    """One `paceline train`."""

    def __init__(self, folder: Path, arguments: Sequence[str], module_folder: Path | None = None) -> None:
        self.folder = folder
        self.output = folder.parent / f"{folder.name}.out"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*PACELINE, "train", *arguments],
                cwd=ROOT,
                env={**os.environ, **({"PYTHONPATH": str(module_folder)} if module_folder else {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text()

    def records(self, kind: str) -> list[dict[str, Any]]:
        return records_of(self.folder, kind)

    def events(self, service: str, event: str) -> list[dict[str, Any]]:
        """Lines of that event in the log of a service."""
        lines = (self.folder / "logs" / f"{service}.log").read_text().splitlines()
        return [record for record in map(_record, lines) if record.get("event") == event]

    def environment_steps(self) -> int:
        records = self.records("training")
        return int(records[-1]["environment_steps"]) if records else 0

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended while waiting for {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {what} after {seconds} s:\n{self.text()}"
            time.sleep(0.05)  # between two looks at a condition that has a deadline

    def wait_for_steps(self, count: int, seconds: float = 90.0) -> None:
        self.wait_for(lambda: self.environment_steps() >= count, f"{count} environment steps", seconds)

    def children(self) -> list[int]:
        return [pid for pid, _ in _children(self.process.pid)]

    def child(self, *words: str) -> int:
        """The process id of the service whose command line holds these words."""
        found = [pid for pid, line in _children(self.process.pid) if set(words) <= set(line)]
        assert len(found) == 1, f"{words} are {found}"
        return found[0]

    def helper(self, module: str) -> int:
        """The process id of the one that the learner started of this module."""
        (found,) = [pid for pid, line in _children(self.child("learner")) if f"paceline.learner.{module}" in line]
        return found

    def child_of(self, program: str) -> int | None:
        """The process id of a child whose program's name holds this word."""
        found = [pid for pid, line in _children(self.process.pid) if program in line[0]]
        return found[0] if found else None

    def metrics_addresses(self) -> dict[str, list[str]]:
        """Where the processes serve /metrics, by their roles and the command lines that the launcher gave them."""
        found: dict[str, list[str]] = {}
        for _, arguments in _children(self.process.pid):
            role = next((each for each in ("replay", "learner", "collector", "evaluator") if each in arguments), None)
            for argument in arguments:
                key, _, address = argument.partition("=")
                if key == f"{role}.metrics_listen" or (role == "learner" and key == "learner.endpoint_metrics_listen"):
                    found.setdefault("endpoint" if "endpoint" in key else str(role), []).append(address)
        return found

    def kill(self, *words: str) -> None:
        """Kill a service at once, and wait until the launcher has started it again."""
        pid = self.child(*words)
        os.kill(pid, signal.SIGKILL)
        self.wait_for(lambda: self._new_child(words, pid), f"another {words}", 30)

    def _new_child(self, words: tuple[str, ...], old: int) -> bool:
        found = [pid for pid, line in _children(self.process.pid) if set(words) <= set(line)]
        return len(found) == 1 and found[0] != old

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait(self, seconds: float = 120.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.text()}") from None


def processes_of(folder: Path) -> list[int]:
    """The process ids of all whose command line names this folder, or a file in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def records_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The records of that kind in the metrics.jsonl of a run."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(_record, lines) if record.get("kind") == kind]


def _record(line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except ValueError:
        return {}  # the line that is being written


def _children(pid: int) -> list[tuple[int, list[str]]]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    found = []
    for child in map(int, text.split()):
        try:
            found.append((child, Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")))
        except FileNotFoundError:
            continue
    return found
