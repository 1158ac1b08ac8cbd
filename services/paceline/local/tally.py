"""What the processes of a run counted, over their restarts, in files that outlive them: lag.json, process_time.json.

Counters and histograms of a process begin at 0 when it starts again, so what it had counted before is kept and added.
Both files are written anew every few seconds, whole or not at all, so that a run that was killed can be explained too.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.local.lag_metrics import KEPT, STARTS_AND_ENDS, SUMMED
from paceline.local.scrape import Page

LAG_FILE, TIME_FILE = "lag.json", "process_time.json"

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A name and its labels, sorted."""


@dataclass(frozen=True)
class Ending:
    """How a run ended, or this part of it. Complete: it did all that it should."""

    how: Literal["complete", "stopped", "failed"]
    problem: str = ""
    """Of one that failed: its first error, in a sentence."""


class Tally:
    """Sums up the pages of a run's processes as they are read; goes on with what an earlier part of the run left."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder, self._run_id = folder, run_id
        self._began = time.monotonic()
        self._earlier_seconds, self._earlier_totals = _read_totals(folder / LAG_FILE)
        self._earlier_activities = _read_activities(folder / TIME_FILE)
        self._processes: dict[str, _Process] = {}

    def see(self, pages: Mapping[str, Page], *, last: bool = False) -> None:
        """Take in the newest page of each process that answered; `last`: that each left when it ended."""
        for name, page in pages.items():
            if page.samples:
                self._processes.setdefault(name, _Process()).see(page, last=last)

    def write(self, ending: Ending | None = None) -> None:
        """Write both files. With an `ending` nothing follows."""
        _write(self._folder / LAG_FILE, self._lag(ending))
        _write(self._folder / TIME_FILE, self._activity_seconds())

    def _lag(self, ending: Ending | None) -> dict[str, Any]:
        totals = dict(self._earlier_totals)
        for process in self._processes.values():
            for series, value in process.totals():
                if series[0] in SUMMED:
                    totals[series] = totals.get(series, 0.0) + value
        return {
            "run_id": self._run_id,
            "written_at": time.time(),
            "ended": ending is not None,
            "complete": ending is not None and ending.how == "complete",
            "ending": None if ending is None else ending.how,
            "problem": "" if ending is None else ending.problem,
            "cores": os.cpu_count(),
            "seconds": self._earlier_seconds + time.monotonic() - self._began,
            "totals": _as_json(totals),
            "gauges": {name: _as_json(process.gauges) for name, process in self._processes.items() if process.gauges},
            "watched": {
                name: {"seconds": process.watched_seconds, "activity_seconds": process.watched_activity_seconds}
                for name, process in self._processes.items()
                if process.watched_seconds
            },
        }

    def _activity_seconds(self) -> dict[str, dict[str, float]]:
        seconds = {name: dict(activities) for name, activities in self._earlier_activities.items()}
        for name, process in self._processes.items():
            mine = seconds.setdefault(name, {})
            for (series, labels), value in process.totals():
                if series.endswith("_activity_seconds_total"):
                    activity = dict(labels)["activity"]
                    mine[activity] = mine.get(activity, 0.0) + value
        return seconds


class _Process:
    """One process by its name, over its restarts."""

    def __init__(self) -> None:
        self.gauges: dict[Series, float] = {}
        """As last seen."""
        self.watched_seconds = 0.0
        self.watched_activity_seconds = 0.0
        """What the process said that it spent within `watched_seconds`: of a loop that counts all its time, as much."""
        self._before: dict[Series, float] = {}
        self._page: dict[Series, float] = {}
        self._started: float | None = None
        self._seen = 0.0

    def see(self, page: Page, *, last: bool) -> None:
        """Its newest page."""
        now = page.read_at
        started = page.value("process_start_time_seconds")
        values = {
            (name, tuple(sorted(labels.items()))): value
            for name, labels, value in page.samples
            if (name in KEPT or name.endswith("_activity_seconds_total")) and math.isfinite(value)
        }
        # The start time is told on Linux only.
        if started != self._started or any(values.get(series, value) < value for series, value in self._page.items()):
            for series, value in self._page.items():
                self._before[series] = self._before.get(series, 0.0) + value
        elif _activity(self._page) and not last:
            # From the first turn on: what a loop is about is counted when it ends, and its start may take long. Until
            # the last one: of what comes after it, only the loop's end, nobody counts the time.
            self.watched_seconds += now - self._seen
            self.watched_activity_seconds += _activity(values) - _activity(self._page)
        self.gauges.update({s: value for s, value in values.items() if s[0] in KEPT and s[0] not in SUMMED})
        self._page = {series: value for series, value in values.items() if series not in self.gauges}
        self._started, self._seen = started, now

    def totals(self) -> Iterator[tuple[Series, float]]:
        """What it counted, each series once."""
        for series in self._before.keys() | self._page.keys():
            yield series, self._before.get(series, 0.0) + self._page.get(series, 0.0)


def _activity(values: Mapping[Series, float]) -> float:
    """Seconds of a loop's turns."""
    return sum(
        value
        for (name, labels), value in values.items()
        if name.endswith("_activity_seconds_total") and dict(labels)["activity"] not in STARTS_AND_ENDS
    )


def _as_json(values: Mapping[Series, float]) -> list[dict[str, Any]]:
    return [{"name": name, "labels": dict(labels), "value": values[name, labels]} for name, labels in sorted(values)]


def _read_totals(path: Path) -> tuple[float, dict[Series, float]]:
    """Seconds and totals of the run so far; nothing where there is no file that can be read."""
    tree = _read(path)
    try:
        totals = {
            (str(entry["name"]), tuple(sorted(entry["labels"].items()))): float(entry["value"])
            for entry in tree["totals"]
        }
        return float(tree["seconds"]), totals
    except (KeyError, TypeError, ValueError, AttributeError):
        return 0.0, {}


def _read_activities(path: Path) -> dict[str, dict[str, float]]:
    tree = _read(path)
    try:
        return {
            str(process): {str(activity): float(seconds) for activity, seconds in activities.items()}
            for process, activities in tree.items()
        }
    except (TypeError, ValueError, AttributeError):
        return {}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}


def _write(path: Path, tree: Mapping[str, Any]) -> None:
    partial = path.with_suffix(".json.new")
    partial.write_text(json.dumps(tree, indent=1), encoding="utf-8")
    os.replace(partial, path)
