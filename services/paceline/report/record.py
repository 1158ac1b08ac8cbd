"""What a run's folder says about the run: its metrics.jsonl, config.yaml, lag.json, process_time.json, read leniently.

A run that was killed leaves a torn last line and no process times, and one that has just begun has no evaluation. All
of that is read as far as it goes, and `RunRecord.missing` says in sentences what is not there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import NotFoundError
from paceline.report.lag import LagRecord, read_lag


@dataclass(frozen=True)
class Incarnation:
    """One start of the learner. `seconds` is the running time of the whole run when it began."""

    number: int
    resumed: bool
    environment_steps: int
    learner_step: int
    seconds: float


@dataclass(frozen=True)
class Episode:
    """A finished training episode, placed by the run's environment steps and running seconds."""

    seconds: float
    environment_steps: int
    episode_return: float


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one snapshot, placed by the environment steps and running seconds of the run."""

    seconds: float
    incarnation: int
    version: int
    learner_step: int
    environment_steps: int
    mean_return: float
    returns: tuple[float, ...]
    mean_length: float | None


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it; None where it does not.

    `seconds` is running time: the gaps between one learner's end and the next one's start are left out.
    `lag_rows` maps a lag bucket's upper bound, in policy versions, to the rows that were trained on within it.
    `process_seconds` maps process and activity to seconds.
    """

    run_id: str
    environment: str | None
    algorithm: str | None
    configured_ratio: float | None
    config_text: str | None
    finished: bool
    seconds: float
    environment_steps: int | None
    learner_step: int | None
    achieved_ratio: float | None
    incarnations: tuple[Incarnation, ...]
    episodes: tuple[Episode, ...]
    evaluations: tuple[Evaluation, ...]
    lag_rows: Mapping[float, int]
    lag: LagRecord
    process_seconds: Mapping[str, Mapping[str, float]]
    missing: tuple[str, ...]

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the highest mean return."""
        return max(self.evaluations, key=lambda evaluation: evaluation.mean_return, default=None)

    @property
    def last(self) -> Evaluation | None:
        """The evaluation of the newest policy."""
        return max(self.evaluations, key=lambda evaluation: (evaluation.incarnation, evaluation.version), default=None)


def read_run(run_folder: Path) -> RunRecord:
    """Read the folder of a run, finished or not. Raises NotFoundError when there is no such folder."""
    if not run_folder.is_dir():
        raise NotFoundError(f"{run_folder}: no such folder; expected the folder of a run, such as runs/<run id>")
    missing: list[str] = []
    config_text, config = _read_config(run_folder / "config.yaml", missing)
    lines = _read_lines(run_folder / "metrics.jsonl", missing)
    lag = read_lag(run_folder / "lag.json", missing)
    process_seconds = _read_process_seconds(run_folder / "process_time.json", missing)
    story = _Story()
    for line in lines:
        story.add(line)
    if lines and not story.episodes:
        missing.append("No training episode was recorded.")
    if lines and not story.evaluations:
        missing.append("No evaluation was recorded.")
    if lines and not story.finished and lag.ending is None:
        missing.append("The run has not finished, or was killed: its last records may be absent.")
    lag_rows = story.lag_rows()
    if lines and not lag_rows:
        missing.append("No training lag was recorded: nothing was trained on yet.")
    algorithm = _get(config, "learner", "algorithm", "name")
    environment = _get(config, "env", "id") or _get(config, "env", "builder")
    return RunRecord(
        run_id=str(_get(config, "run", "id") or run_folder.resolve().name),
        environment=None if environment is None else str(environment),
        algorithm=None if algorithm is None else str(algorithm),
        configured_ratio=(
            _number(_get(config, "learner"), "updates_per_step")
            if _get(config, "learner", "updates") != "learner_bound"
            else None
        ),
        config_text=config_text,
        finished=story.finished,
        seconds=story.seconds,
        environment_steps=story.environment_steps,
        learner_step=story.learner_step,
        achieved_ratio=story.achieved_ratio,
        incarnations=tuple(story.incarnations),
        episodes=tuple(story.episodes),
        evaluations=tuple(story.evaluations),
        lag_rows=lag_rows,
        lag=lag,
        process_seconds=process_seconds,
        missing=tuple(missing),
    )


class _Story:
    """Goes through the records in order and keeps the run's clock and its highest counters."""

    def __init__(self) -> None:
        self.incarnations: list[Incarnation] = []
        self.episodes: list[Episode] = []
        self.evaluations: list[Evaluation] = []
        self.environment_steps: int | None = None
        self.learner_step: int | None = None
        self.achieved_ratio: float | None = None
        self.finished = False
        self.seconds = 0.0
        self._last_time: float | None = None
        # One per incarnation: counts within a record grow over the incarnation, so its last record counts.
        self._lag_rows: list[Mapping[float, int]] = [{}]

    def add(self, line: Mapping[str, Any]) -> None:
        kind, time = line.get("kind"), _number(line, "time")
        if time is not None:
            # The gap before a start is not running time; a clock that was set back takes nothing away.
            if self._last_time is not None and kind != "start":
                self.seconds += max(0.0, time - self._last_time)
            self._last_time = time
        if kind != "episode":  # those count steps that were taken; the others count steps that are stored
            self.environment_steps = _highest(self.environment_steps, _number(line, "environment_steps"))
        self.learner_step = _highest(self.learner_step, _number(line, "learner_step"))
        match kind:
            case "start":
                self._add_start(line)
            case "training":
                self.achieved_ratio = _number(line, "achieved_ratio", self.achieved_ratio)
                if counts := _lag_counts(line.get("training_lag_counts")):
                    self._lag_rows[-1] = counts
            case "episode":
                episode_return = _number(line, "episode_return")
                if episode_return is not None:
                    steps = int(_number(line, "environment_steps", float(self.environment_steps or 0)) or 0)
                    self.episodes.append(Episode(self.seconds, steps, episode_return))
            case "evaluation":
                self._add_evaluation(line)
            case "finish":
                self.finished = True

    def _add_start(self, line: Mapping[str, Any]) -> None:
        self.finished = False
        self._lag_rows.append({})
        self.incarnations.append(
            Incarnation(
                number=int(_number(line, "incarnation", len(self.incarnations) + 1.0) or 1),
                resumed=bool(line.get("resumed")),
                environment_steps=int(_number(line, "environment_steps", 0.0) or 0),
                learner_step=int(_number(line, "learner_step", 0.0) or 0),
                seconds=self.seconds,
            )
        )

    def _add_evaluation(self, line: Mapping[str, Any]) -> None:
        mean_return = _number(line, "mean_return")
        if mean_return is None:
            return
        returns = line.get("returns")
        self.evaluations.append(
            Evaluation(
                seconds=self.seconds,
                incarnation=int(_number(line, "incarnation", 1.0) or 1),
                version=int(_number(line, "version", 0.0) or 0),
                learner_step=int(_number(line, "learner_step", 0.0) or 0),
                environment_steps=int(_number(line, "environment_steps", 0.0) or 0),
                mean_return=mean_return,
                returns=tuple(filter(_is_finite, returns)) if isinstance(returns, list) else (),
                mean_length=_number(line, "mean_length"),
            )
        )

    def lag_rows(self) -> dict[float, int]:
        total: dict[float, int] = {}
        for counts in self._lag_rows:
            for bound, rows in counts.items():
                total[bound] = total.get(bound, 0) + rows
        return dict(sorted(total.items())) if any(total.values()) else {}


def _read_config(path: Path, missing: list[str]) -> tuple[str | None, Mapping[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
    except FileNotFoundError:
        missing.append("config.yaml is not there: the settings of the run are unknown.")
        return None, {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        missing.append(f"config.yaml cannot be read: {error}.")
        return None, {}
    return text, tree if isinstance(tree, dict) else {}


def _read_lines(path: Path, missing: list[str]) -> list[Mapping[str, Any]]:
    try:
        raw = path.read_bytes().splitlines()
    except FileNotFoundError:
        missing.append("metrics.jsonl is not there: nothing was recorded yet.")
        return []
    lines: list[Mapping[str, Any]] = []
    damaged = 0
    for text in filter(None, raw):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict):
            lines.append(line)
        else:
            damaged += 1
    if damaged:
        missing.append(
            f"{damaged} line(s) of metrics.jsonl could not be read and were left out; a run that is killed "
            "while it writes tears its last line."
        )
    if not lines and not damaged:
        missing.append("metrics.jsonl is empty: nothing was recorded yet.")
    return lines


def _read_process_seconds(path: Path, missing: list[str]) -> dict[str, dict[str, float]]:
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        missing.append("process_time.json is not there: where the processes spent their time is unknown.")
        return {}
    except (OSError, ValueError) as error:
        missing.append(f"process_time.json cannot be read: {error}.")
        return {}
    seconds = {
        str(process): {
            str(activity): float(value) for activity, value in activities.items() if _is_finite(value) and value > 0
        }
        for process, activities in (tree.items() if isinstance(tree, dict) else ())
        if isinstance(activities, dict)
    }
    measured = {process: activities for process, activities in seconds.items() if activities}
    if not measured:
        missing.append("process_time.json names no process: where the processes spent their time is unknown.")
    return measured


def _lag_counts(counts: object) -> dict[float, int]:
    """Bucket bounds as numbers; "+Inf" becomes infinity."""
    if not isinstance(counts, dict):
        return {}
    rows: dict[float, int] = {}
    for bound, count in counts.items():
        try:
            number = float(bound)
        except ValueError:
            continue
        if _is_finite(count) and count >= 0 and not math.isnan(number):
            rows[number] = int(count)
    return rows


def _get(tree: object, *keys: str) -> Any:
    for key in keys:
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(key)
    return tree


def _number(tree: object, key: str, default: float | None = None) -> float | None:
    value = _get(tree, key)
    return float(value) if _is_finite(value) else default


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _highest(known: int | None, seen: float | None) -> int | None:
    values: Iterable[float] = (value for value in (known, seen) if value is not None)
    return int(max(values)) if known is not None or seen is not None else None
