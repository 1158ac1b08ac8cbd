"""Where the record of a run lies, for the commands that look after it: a Redis that runs, or the run's own, started."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from paceline import config as settings
from paceline.errors import ConfigError, ConflictError, NotFoundError
from paceline.learner.ledger import EndpointLedger
from paceline.learner.registry import COLLECTOR
from paceline.local.embedded import EmbeddedRedis, find_server
from paceline.local.run_folder import SETTINGS_FILE, hold, write_settings
from paceline.replay import record
from paceline.replay.archive_format import Manifest

LINE_SECONDS = 5.0
"""Between two plain lines of progress."""


@dataclass(frozen=True)
class Place:
    """A run and the Redis of its record. `shards`: None where nobody said."""

    run_id: str
    redis_url: str
    shards: int | None
    folder: Path | None = None
    """Of the run, where it is known."""

    def read_settings(self) -> dict[str, Any] | None:
        """What the run's config.yaml says, without where its Redis is; None: no folder is known."""
        if self.folder is None:
            return None
        return _without_redis(settings.load(self.folder / "config.yaml").model_dump(mode="json"))


@contextmanager
def open_place(
    run: str, *, redis_url: str | None, shards: int | None, environment: Mapping[str, str]
) -> Iterator[Place]:
    """The place of a run, given by its id or its folder.

    What is not said is looked up: in the folder's config.yaml, in PACELINE_REPLAY__REDIS_URL, in a folder of that name
    under runs/. A run that has no redis_url has a server of its own, which is started for as long as this is open, or
    used where it runs.

    Raises:
        ConfigError: nothing says where the record is. NotFoundError: the folder has none.
    """
    folder = folder_of(run)
    if folder is None:
        config = settings.load(None, [], environment)
        url = redis_url or _url_of(config)
        if url is None:
            raise ConfigError(
                f"nothing says where the record of run {run!r} is: expected --redis-url, PACELINE_REPLAY__REDIS_URL, "
                "or the folder of the run, such as runs/first-try"
            )
        yield Place(run, url, shards)
        return
    config = settings.load(folder / "config.yaml", [], environment)
    run_id = config.run.id or folder.name
    count = config.replay.shards if shards is None else shards
    url = redis_url or _url_of(config)
    if url is not None:
        yield Place(run_id, url, count, folder)
        return
    with open_own_redis(folder) as own:
        yield Place(run_id, own, count, folder)


@contextmanager
def open_target(folder: Path | None, redis_url: str | None, environment: Mapping[str, str]) -> Iterator[str]:
    """The URL of the Redis that an import goes to. Raises ConfigError: nothing says which."""
    if folder is not None and redis_url is not None:
        raise ConfigError(f"--into {folder} and --redis-url are both given: expected one of them")
    if folder is not None:
        (folder / "redis").mkdir(parents=True, exist_ok=True)
        with open_own_redis(folder) as url:
            yield url
        return
    named = redis_url or _url_of(settings.load(None, [], environment))
    if named is None:
        raise ConfigError(
            "nothing says which Redis the record goes to: expected --redis-url, PACELINE_REPLAY__REDIS_URL, or "
            "--into with the folder of a run"
        )
    yield named


def settings_for(folder: Path, manifest: Manifest, run_id: str) -> settings.Config | None:
    """What config.yaml has to say in the folder that an archive is imported into; None: what it says is right.

    Where the archive carries no settings, those are the defaults, but for what is known.

    Raises:
        ConflictError: it is the folder of another run, or of a run with another number of shards.
        ConfigError: its run keeps its record in another Redis, or is not found by the name of the folder.
    """
    if (folder / "config.yaml").is_file():
        there = settings.load(folder / "config.yaml")
        there_id = there.run.id or folder.name
        if there_id != run_id:
            raise ConflictError(
                f"{folder} is the folder of run {there_id!r}: expected that of run {run_id!r} or a new one, such as "
                f"--into {folder.parent / run_id}"
            )
        if there.replay.shards != manifest.shards:
            raise ConflictError(
                f"{folder}/config.yaml has replay.shards {there.replay.shards}: expected {manifest.shards}, as the "
                "archive has; choose a new run and folder by --as and --into"
            )
        url = there.replay.redis_address()
        if url is not None:
            raise ConfigError(
                f"the run of {folder} keeps its record in Redis at {settings.redact_url(url)}: name that by "
                "--redis-url, instead of --into"
            )
        return None
    if folder.resolve().name != run_id:
        raise ConfigError(
            f"--into {folder}: expected a folder named {run_id}, since a run lies in one of its name; "
            f"such as --into {folder.parent / run_id}"
        )
    tree = _without_redis(manifest.settings or {})
    tree["run"] = {**_section(tree, "run"), "id": run_id, "directory": str(folder.parent)}
    tree["replay"] = {**_section(tree, "replay"), "shards": manifest.shards}
    if manifest.settings is None:
        tree["collector"] = {"count": max(settings.Config().collector.count, manifest.shards)}
    return settings.build(tree, source="the settings in the archive")


def begin_folder(folder: Path, config: settings.Config, manifest: Manifest) -> None:
    """Make the folder that of a run: its config.yaml, and what its learner has to know of the collectors before it."""
    members: dict[int, int] = {}
    for table in manifest.tables:
        for position in table.positions:
            index = position.collector_index
            members[index] = max(members.get(index, 0), position.incarnation)
    # A collector whose incarnation came again would have its first blocks taken for those that are there already.
    ledger = EndpointLedger.open(folder)
    try:
        ledger.write_members({COLLECTOR: members})
    finally:
        ledger.close()
    write_settings(config, folder / SETTINGS_FILE)


@contextmanager
def open_own_redis(folder: Path) -> Iterator[str]:
    """The URL of the server that `paceline train` keeps in the folder of a run; started unless it runs.

    Raises:
        NotFoundError: it has none. ConflictError: a launcher is about to start it.
    """
    data = folder / "redis"
    if not data.is_dir():
        raise NotFoundError(
            f"{data} is not there: expected the data of the run's own Redis; name another by --redis-url"
        )
    running = find_server(data)
    if running is not None:
        yield running.url
        return
    with hold(folder, "paceline replay"):  # or a launcher that starts now would start a second server
        server = EmbeddedRedis.start(data)
        try:
            yield server.url
        finally:
            server.stop()


@contextmanager
def open_progress(what: str, *, sizes: bool) -> Iterator[record.Progress]:
    """Shows how far a task is, on standard error: a bar on a terminal, a line every few seconds elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(what)
        return
    columns = [TextColumn(what), BarColumn(), *([DownloadColumn()] if sizes else []), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    def __init__(self, what: str) -> None:
        self._what, self._next = what, time.monotonic() + LINE_SECONDS

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_SECONDS
            Console(stderr=True).print(f"{self._what}: {done / max(total, 1):.0%}", highlight=False)


def folder_of(run: str) -> Path | None:
    """The folder of a run, given by it or by its id; None: there is no run of that id here.

    Raises:
        NotFoundError: it can only be a folder, and is none of a run.
    """
    for folder in (Path(run), settings.build({}).run.directory / run):
        if (folder / "config.yaml").is_file():
            return folder
    if Path(run).is_dir() or "/" in run:
        raise NotFoundError(f"{run} is no folder of a run: expected its config.yaml there, or the id of a run")
    return None


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, dict) else {}


def _without_redis(tree: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "replay": {**_section(tree, "replay"), "redis_url": None, "redis_password_file": None}}


def _url_of(config: settings.Config) -> str | None:
    url = config.replay.redis_address()
    if url is None:
        return None
    if ":***@" in url or "=***" in url:
        raise ConfigError(
            f"config.yaml of the run says {url} and hides the password: give the whole URL by --redis-url or in "
            "PACELINE_REPLAY__REDIS_URL"
        )
    return url
