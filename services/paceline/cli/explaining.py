"""Commands that say how a run goes or went: its report, its lag, a live table from afar, a study of many runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline import config, process
from paceline.cli.starting import ConfigPath, Overrides, explained, load, split
from paceline.errors import ConfigError

study_app = typer.Typer(help="Run the same training several times, and compare.")

Job = Annotated[
    str | None, typer.Option("--job", help="With a URL: a regular expression for the label job of the run's targets.")
]
RunLabel = Annotated[
    str | None, typer.Option("--run", help="With a URL: the value of the label run, where targets have one.")
]
RunConfigPath = Annotated[
    Path | None, typer.Option("--config", help="With a URL: the run's settings, so that advice names the value to set.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of what moves.")]


def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/first-try.")],
) -> None:
    """Write report.html of a run anew."""
    with explained():
        from paceline.report import write_report

        print(write_report(run_folder))


def lag(
    run: Annotated[
        str, typer.Argument(metavar="RUN|URL", help="The folder or the id of a run, or a Prometheus that scrapes it.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    job: Job = None,
    run_label: RunLabel = None,
    since: Annotated[
        str | None, typer.Option("--since", help="With a URL: only what was counted within it, such as 10m.")
    ] = None,
    config_path: RunConfigPath = None,
) -> None:
    """Say how far a run lags, why, and which setting to change."""
    with explained():
        from paceline.local import lag_data, lag_text, lag_view, prometheus

        if "://" in run:
            server = prometheus.Prometheus(run, job=job, run=run_label)
            data = lag_data.read_prometheus(server, since=since, config=_load_if_named(config_path))
        else:
            _require_url(run, {"--job": job, "--run": run_label, "--since": since, "--config": config_path})
            data = lag_data.read_folder(run, os.environ)
        view = lag_view.make_view(data)
        if as_json:
            print(lag_text.to_json(view))
        else:
            lag_text.show(view, lag_text.open_console())


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="A Prometheus, such as http://127.0.0.1:9090.")],
    job: Job = None,
    run_label: RunLabel = None,
    config_path: RunConfigPath = None,
    plain: Plain = False,
) -> None:
    """Follow a run through the Prometheus that scrapes it, until Ctrl-C."""
    with explained():
        from paceline.local import prometheus
        from paceline.local import top as follower

        stop = process.StopSignal.install()
        server = prometheus.Prometheus(url, job=job, run=run_label)
        follower.follow(server, _load_if_named(config_path), plain=plain, stop=stop)


@study_app.command(name="lag")
def study_lag(
    path: ConfigPath = None,
    overrides: Overrides = None,
    versions: Annotated[str, typer.Option(help="Policy versions to lag behind, one run for each.")] = "0,1,2,4,8",
    seeds: Annotated[str, typer.Option(help="Seeds, each with every lag.")] = "0,1",
    folder: Annotated[
        Path | None, typer.Option(help="Where the runs and the study go; runs/study-lag-CONFIG otherwise.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="A return; 90 % of the way to the best evaluation otherwise.")
    ] = None,
    plain: Plain = False,
) -> None:
    """Train with each lag held, one run after another, and draw return against steps and seconds. It can go on."""
    with explained():
        from paceline.local import study

        stop = process.StopSignal.install()
        file, arguments = split(path, overrides)
        base = config.load(file, arguments, os.environ)
        plan = study.Plan(
            file,
            tuple(arguments),
            study.whole_numbers(versions, "--versions"),
            study.whole_numbers(seeds, "--seeds"),
            folder or base.run.directory / f"study-lag-{file.stem if file else 'run'}",
            threshold,
        )
        study.run_study(plan, plain=plain, stop=stop, environment=os.environ)


def _load_if_named(path: Path | None) -> config.Config | None:
    return None if path is None else load(path, [])


def _require_url(run: str, options: dict[str, object]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{given[0]} is given with {run!r}, which is no URL: expected http://..., or no {given[0]}")
