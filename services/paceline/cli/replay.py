"""`paceline replay`: run the replay service, or look after the record of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from paceline import config, process
from paceline.cli.starting import ConfigPath, Overrides, Parent, Resume, ResumeOrStart, explained, start
from paceline.errors import ConflictError

if TYPE_CHECKING:
    from paceline.local.records import Place
    from paceline.replay.record import RunRecord


class _ServesByDefault(typer.core.TyperGroup):
    """`paceline replay CONFIG` is short for `paceline replay serve CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, "--help"}:
            args = ["serve", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_ServesByDefault, help="Run the replay service, or look after the record of a run.")

RedisUrl = Annotated[
    str | None,
    typer.Option("--redis-url", help="Where the record is; PACELINE_REPLAY__REDIS_URL or the run's folder otherwise."),
]
Shards = Annotated[int | None, typer.Option("--shards", min=1, max=256, help="Shards of the run; found out otherwise.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The id of a run, or its folder, such as runs/first-try.")]


@app.command()
def serve(
    path: ConfigPath = None,
    overrides: Overrides = None,
    resume: Resume = False,
    resume_or_start: ResumeOrStart = False,
    shard: Annotated[int, typer.Option(help="Which of replay.shards this is, from 0 on.")] = 0,
    parent: Parent = None,
) -> None:
    """Run the replay service: keep rows in Redis, serve them from memory. The default."""

    def run(settings: config.Config, stop: process.StopSignal) -> None:
        with process.importing():
            from paceline.replay import main

        main.run(settings, resume=resume or resume_or_start, stop=stop, shard=shard)

    start("replay", path, overrides, run, parent=parent)


@app.command()
def inspect(
    run: Run,
    redis_url: RedisUrl = None,
    shards: Shards = None,
    check: Annotated[bool, typer.Option("--check", help="Read every block and verify it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what the record of a run holds, and whether it is whole. Exit code 1: a table cannot be read, or --check
    found damage."""
    with explained(), _open_record(run, redis_url, shards) as record:
        from paceline.local import records, survey

        with records.open_progress("checking", sizes=True) as progress:
            tables = record.survey(check=check, progress=progress)
        print(survey.to_json(record, tables) if as_json else survey.to_text(record, tables))
        _tell_problems(record)
        if record.problems or any(table.damage for table in tables):
            raise SystemExit(1)


@app.command()
def export(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, such as first-try.tar.")],
    redis_url: RedisUrl = None,
    shards: Shards = None,
) -> None:
    """Write the record of a run to one file, with its settings where its folder is known. The run may go on."""
    with explained(), _open_place(run, redis_url, shards) as (place, record):
        from paceline.local import records, survey
        from paceline.replay.archive import export_run

        with records.open_progress("exporting", sizes=True) as progress:
            manifest = export_run(record, file, progress=progress, settings=place.read_settings())
        print(survey.describe_archive(manifest, f"exported to {file}"))
        _tell_problems(record)


@app.command(name="import")
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
    with explained():
        from paceline.local import records, survey
        from paceline.replay.archive_import import import_run, read_manifest

        if name is not None:
            config.with_run_id(config.Config(), name)  # refuses what is no run id
        manifest = read_manifest(file)
        run_id = name or manifest.run_id
        begun = records.settings_for(folder, manifest, run_id) if folder is not None else None
        with (
            records.open_target(folder, redis_url, os.environ) as url,
            records.open_progress("importing", sizes=True) as progress,
        ):
            manifest = import_run(file, url, run_id=name, progress=progress)
        if folder is not None and begun is not None:
            records.begin_folder(folder, begun, manifest)
        print(survey.describe_archive(manifest, f"imported as {run_id}"))
        print(survey.describe_use(manifest, run_id, folder=folder, redis_url=redis_url))


@app.command()
def delete(
    run: Run,
    redis_url: RedisUrl = None,
    shards: Shards = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even while a replay process seems to serve it.")] = False,
) -> None:
    """Remove the record of a run from Redis. Its folder stays."""
    with explained(), _open_record(run, redis_url, shards) as record:
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
        _tell_problems(record)


def _tell_problems(record: RunRecord) -> None:
    for problem in (*record.problems, *record.others()):
        print(f"paceline: {problem}", file=sys.stderr)


@contextmanager
def _open_record(run: str, redis_url: str | None, shards: int | None) -> Iterator[RunRecord]:
    with _open_place(run, redis_url, shards) as (_, record):
        yield record


@contextmanager
def _open_place(run: str, redis_url: str | None, shards: int | None) -> Iterator[tuple[Place, RunRecord]]:
    from paceline.local import records
    from paceline.replay.record import RunRecord

    with records.open_place(run, redis_url=redis_url, shards=shards, environment=os.environ) as place:
        record = RunRecord(place.redis_url, place.run_id, shards=place.shards)
        try:
            yield place, record
        finally:
            record.close()
