"""The folder of a run on this machine: who works in it, whether a run has begun there, and its settings.

`config.yaml` says what the run goes on with. It is replaced as a whole, and by settings that its learner has taken: a
resume that is refused would otherwise leave settings under which the run can never be resumed again.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline import config as settings
from paceline.config import Config
from paceline.errors import ConflictError, NotFoundError
from paceline.local.embedded import find_server
from paceline.process import StopSignal

SETTINGS_FILE = "config.yaml"
RESUMED_FILE = "resumed.yaml"
"""What the services of a resumed run read, for as long as its launcher works."""
LOCK_FILE = "launcher.lock"
SERVER_END_SECONDS = 12.0
"""How long the server of a launcher that was killed is waited for; the kernel has told it to end."""
LOOK_SECONDS = 0.1

_LEFT_BY_A_FAILED_START = frozenset(
    {
        SETTINGS_FILE, RESUMED_FILE, LOCK_FILE, "logs", "redis", "learner", "checkpoints", "tensorboard",
        "metrics.jsonl", "lag.json", "process_time.json", "report.html",
    }
)  # fmt: skip


class RunFolder:
    """The folder of a run that this process holds. Use `open_run_folder`."""

    def __init__(self, path: Path, settings_path: Path, *, is_retry: bool) -> None:
        self.path = path
        self.settings_path = settings_path
        """For the services of this start."""
        self.is_retry = is_retry
        """An earlier start failed here before its run began."""
        self.is_accepted = settings_path.name == SETTINGS_FILE
        """Whether config.yaml says what the services were given."""

    def accept(self) -> None:
        """The learner has taken the settings: from now on they are the run's."""
        if not self.is_accepted:
            partial = self.path / f"{SETTINGS_FILE}.tmp"
            shutil.copyfile(self.settings_path, partial)
            os.replace(partial, self.path / SETTINGS_FILE)
            self.is_accepted = True


@contextmanager
def open_run_folder(config: Config, *, resume: bool, stop: StopSignal) -> Iterator[RunFolder]:
    """Take hold of the folder of a run, for a new run or for one to go on with; nothing of another run is touched.

    Raises:
        NotFoundError: there is none to resume.
        ConflictError: somebody works in the folder, or `resume` is false and a run has begun there.
        OSError: it cannot be made or written.
    """
    path = config.run_folder
    if resume and not (path / SETTINGS_FILE).exists():
        raise NotFoundError(
            f"{path} has no run to resume: expected its {SETTINGS_FILE} there; runs lie in {config.run.directory}/"
        )
    if not resume and not (path / LOCK_FILE).exists():
        _require_unused(path)  # before a lock is put into a folder that is nobody's run
    path.mkdir(parents=True, exist_ok=True)
    with hold(path, "paceline train"):
        if not resume:
            _require_unused(path)
        _require_no_server(path, stop)
        (path / "logs").mkdir(exist_ok=True)
        is_retry = not resume and (path / SETTINGS_FILE).exists()
        settings_path = path / (RESUMED_FILE if resume else SETTINGS_FILE)
        write_settings(config, settings_path)
        try:
            yield RunFolder(path, settings_path, is_retry=is_retry)
        finally:
            (path / RESUMED_FILE).unlink(missing_ok=True)


@contextmanager
def hold(folder: Path, who: str) -> Iterator[None]:
    """Keep others out of the folder of a run: a lock that the kernel takes back however this process ends.

    Raises:
        ConflictError: somebody else holds it.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip() or "another launcher"
            raise ConflictError(
                f"{folder} is in use by {holder}, which works there now: let it end, or stop it (Ctrl-C, or SIGTERM to "
                "it) and go on with the run by --resume; another run needs another run.id"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{who}, process {os.getpid()} on {platform.node()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def write_settings(config: Config, path: Path) -> None:
    """Write the settings; the file is the one before or this one, whole."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(settings.dump(config), encoding="utf-8")
    os.replace(partial, path)


def _require_unused(path: Path) -> None:
    if not _is_unused(path):
        raise ConflictError(
            f"the folder {path} is in use: expected a new run; go on with it by --resume, or choose another run.id"
        )


def _is_unused(path: Path) -> bool:
    """Nothing is there, or only what a start leaves that failed before its run began.

    A run begins with the learner's first record and first checkpoint, which come before any row is stored and before
    anybody is given a place in it.
    """
    if not path.exists():
        return True
    names = {entry.name for entry in path.iterdir()} - {f"{SETTINGS_FILE}.tmp", f"{RESUMED_FILE}.tmp"}
    if SETTINGS_FILE not in names:
        return names <= {LOCK_FILE}
    metrics = path / "metrics.jsonl"
    return (
        names <= _LEFT_BY_A_FAILED_START
        and not (metrics.exists() and metrics.stat().st_size)
        and not any((path / "checkpoints").glob("*"))
        and not (path / "learner" / "members.json").exists()
    )


def _require_no_server(path: Path, stop: StopSignal) -> None:
    """Nobody else holds the folder, so a server that works on its data is ending, or was forgotten."""
    deadline = time.monotonic() + SERVER_END_SECONDS
    while (server := find_server(path / "redis")) is not None:
        if time.monotonic() > deadline or stop.is_set():
            raise ConflictError(
                f"the Redis server of process {server.pid} still works on {path / 'redis'}, though no launcher holds "
                f"the run, and a second one would ruin its data: expected it to end within {SERVER_END_SECONDS:g} s; "
                f"stop it (kill {server.pid}) and try again"
            )
        stop.wait(LOOK_SECONDS)
