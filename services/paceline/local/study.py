"""`paceline study lag`: the same run again and again, each with a lag that is held, and what they say together."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline import config as settings
from paceline.config import Config
from paceline.errors import ConfigError, ConflictError, ServiceFailedError
from paceline.lag.bound import require_reachable
from paceline.local.lag_text import open_console
from paceline.process import StopSignal, dying_with_parent
from paceline.report.record import read_run
from paceline.report.study import Study, StudyRun, make_study
from paceline.report.study_page import HEADINGS, columns, threshold_words, write_study

LINE_SECONDS = 10.0
"""Between two plain lines of progress."""
LOOK_SECONDS = 0.5
STOP_SECONDS = 30.0
"""For a run that is asked to stop; it needs about twelve at most."""
TAIL_LINES = 15
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Plan:
    """What is to be run: a configuration with each lag and each seed."""

    path: Path | None
    overrides: tuple[str, ...]
    versions: tuple[int, ...]
    seeds: tuple[int, ...]
    folder: Path
    threshold: float | None

    def parts(self) -> Iterator[tuple[int, int]]:
        """Lag and seed of each run. All lags with one seed first: whatever is complete can be compared."""
        return ((versions, seed) for seed in self.seeds for versions in self.versions)

    def run_id(self, versions: int, seed: int) -> str:
        """Of a run; with the folder's name, since runs may share a Redis."""
        return f"{self.folder.name}-lag-{versions}-seed-{seed}"

    def arguments(self, versions: int, seed: int) -> list[str]:
        """The settings of a run, after the file's; the last one of a key holds."""
        return [
            *self.overrides,
            f"run.id={self.run_id(versions, seed)}",
            f"run.directory={self.folder}",
            f"run.seed={seed}",
            "lag.inject.mode=fixed",
            f"lag.inject.versions={versions}",
        ]


def run_study(plan: Plan, *, plain: bool, stop: StopSignal, environment: Mapping[str, str]) -> None:
    """Run what is not complete yet, one run after another, and write `study.json` and `study.html`.

    After a stop, the same command goes on: a run that was cut short is resumed.

    Raises:
        ConfigError: the settings are wrong, or a lag is over the bound.
        ConflictError: the folder has runs with other settings.
        ServiceFailedError: a run failed; carries its last lines.
    """
    configs = {
        part: settings.load(plan.path, plan.arguments(*part), environment) for part in dict.fromkeys(plan.parts())
    }
    for (versions, _), config in configs.items():
        require_reachable(config.lag.max_lag_versions, versions)
        _require_same(config)
    study = _gather(plan, configs)
    todo = [part for part in configs if not _is_complete(configs[part])]
    console = open_console()
    console.print(
        f"study {study.name}: {len(configs)} runs, {len(configs) - len(todo)} complete; files in {plan.folder}"
    )
    (plan.folder / "logs").mkdir(parents=True, exist_ok=True)
    page = write_study(plan.folder, study)
    with _open_progress(console, len(configs), plain=plain) as progress:
        for part in todo:
            if stop.is_set():
                break
            name = f"lag {part[0]}, seed {part[1]}"
            _run(plan, configs[part], part, environment, stop, lambda share, name=name: progress.show(name, share))
            if _is_complete(configs[part]):
                progress.finish(name)
            study = _gather(plan, configs)
            page = write_study(plan.folder, study)
    if study.rows:
        console.print(_table(study))
        console.print(threshold_words(study), soft_wrap=True)
    console.print(f"study: {page}", soft_wrap=True)
    if stop.is_set():
        console.print("stopped; the same command goes on")


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Numbers of 0 and more between commas, each once. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ConfigError(f"{option} is {text!r}: expected whole numbers of 0 and more between commas, such as 0,1,2")
    return tuple(dict.fromkeys(map(int, words)))


def _run(
    plan: Plan, config: Config, part: tuple[int, int], environment: Mapping[str, str], stop: StopSignal, show: Any
) -> None:
    """Train until the run ends or the study is to stop."""
    begun = (config.run_folder / "config.yaml").exists()
    path = [] if plan.path is None else [str(plan.path)]
    command = [sys.executable, "-m", "paceline", "train", *path, *plan.arguments(*part), "--plain"]
    log_path = plan.folder / "logs" / f"{config.run_id}.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            dying_with_parent([*command, *(["--resume"] if begun else [])]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            # Ctrl-C reaches the study alone, which then stops the run.
            start_new_session=True,
        )
    try:
        while process.poll() is None and not stop.is_set():
            show(_share_done(config))
            stop.wait(LOOK_SECONDS)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if process.returncode != 0 and not stop.is_set():
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        raise ServiceFailedError(
            f"run {config.run_id} ended with exit code {process.returncode}; the same command tries it again. The last "
            f"lines of {log_path}:\n" + "\n".join(f"    {line}" for line in lines)
        )


def _gather(plan: Plan, configs: Mapping[tuple[int, int], Config]) -> Study:
    runs = [
        StudyRun(versions, seed, read_run(config.run_folder))
        for (versions, seed), config in configs.items()
        if _is_complete(config)
    ]
    return make_study(plan.folder.name, runs, wanted=len(configs), threshold=plan.threshold)


def _is_complete(config: Config) -> bool:
    return config.run_folder.is_dir() and read_run(config.run_folder).finished


def _require_same(config: Config) -> None:
    """Raise ConflictError if the run was begun with other settings: then it compares with none of the others."""
    path = config.run_folder / "config.yaml"
    if not path.exists():
        return
    there, wanted = (
        dict(_flat(settings.load(path, [], {}).model_dump(mode="json"))),
        dict(_flat(config.model_dump(mode="json"))),
    )
    different = sorted(key for key in there.keys() | wanted.keys() if there.get(key) != wanted.get(key))
    if different:
        key = different[0]
        raise ConflictError(
            f"{config.run_folder} was begun with other settings ({len(different)} differ; {key} is {there.get(key)!r} "
            f"there, {wanted.get(key)!r} now): expected the same ones; choose another --folder for another study"
        )


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping) or not tree:
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))


def _share_done(config: Config) -> float:
    """0 to 1, by the environment steps in the newest records of the run."""
    try:
        with (config.run_folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(file.seek(0, 2) - _TAIL_BYTES, 0))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0.0
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn by where the reading began, or being written
        if isinstance(record, dict) and record.get("kind") == "training":
            return min(float(record.get("environment_steps", 0)) / config.run.environment_steps, 1.0)
    return 0.0


def _table(study: Study) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in study.rows:
        table.add_row(*columns(row))
    return table


class _Shows(Protocol):
    def show(self, name: str, share: float) -> None:
        """How far the present run is."""

    def finish(self, name: str) -> None:
        """It is complete."""


@contextmanager
def _open_progress(console: Console, runs: int, *, plain: bool) -> Iterator[_Shows]:
    if plain or not console.is_terminal:
        yield _Lines(runs)
        return
    columns_shown = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns_shown, TimeRemainingColumn(), console=console, transient=True) as bars:
        yield _Bars(bars)


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars, self._task = bars, bars.add_task("", total=1.0)
        self._name = ""

    def show(self, name: str, share: float) -> None:
        if name != self._name:
            self._name = name
            self._bars.reset(self._task, description=name)
        self._bars.update(self._task, completed=share)

    def finish(self, name: str) -> None:
        self._bars.console.print(f"{name}: complete")


class _Lines:
    def __init__(self, runs: int) -> None:
        self._runs, self._next = runs, 0.0

    def show(self, name: str, share: float) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_SECONDS
            print(f"{name}: {share:.0%}", flush=True)

    def finish(self, name: str) -> None:
        print(f"{name}: complete", flush=True)
