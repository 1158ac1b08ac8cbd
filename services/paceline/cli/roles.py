"""Commands that train: everything on this machine, or one role."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from paceline import __version__, config, process
from paceline.cli.starting import (
    ConfigPath,
    Overrides,
    Parent,
    Resume,
    ResumeOrStart,
    explained,
    load,
    start,
)

app = typer.Typer(
    help="Reinforcement learning with separate services, and a policy lag that is known.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


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
        with process.importing():
            from paceline.local import launcher

        launcher.run(settings, resume=resume, plain=plain, stop=stop, environment=os.environ)

    start("train", path, [*(overrides or []), *extra], run, logs=False, name_run=not resume)


@app.command()
def learner(
    path: ConfigPath = None,
    overrides: Overrides = None,
    resume: Resume = False,
    resume_or_start: ResumeOrStart = False,
    parent: Parent = None,
) -> None:
    """Run the learner: train, and serve snapshots of the actor."""

    def run(settings: config.Config, stop: process.StopSignal) -> None:
        with process.importing():
            from paceline.learner import main

        main.run(settings, resume=resume or resume_or_start, stop=stop)

    start("learner", path, overrides, run, parent=parent)


@app.command()
def collector(
    path: ConfigPath = None,
    overrides: Overrides = None,
    index: Annotated[int | None, typer.Option(help="Stable index; the lowest free one otherwise.")] = None,
    parent: Parent = None,
) -> None:
    """Run a collector: step environments under the newest policy, and append rows."""

    def run(settings: config.Config, stop: process.StopSignal) -> None:
        with process.importing():
            from paceline.collector import main

        main.run(settings, index=index, stop=stop)

    start("collector" if index is None else f"collector-{index}", path, overrides, run, parent=parent)


@app.command()
def evaluator(path: ConfigPath = None, overrides: Overrides = None, parent: Parent = None) -> None:
    """Run the evaluator: judge each n-th snapshot by deterministic episodes."""

    def run(settings: config.Config, stop: process.StopSignal) -> None:
        with process.importing():
            from paceline.evaluator import main

        main.run(settings, stop=stop)

    start("evaluator", path, overrides, run, parent=parent)


@app.command()
def relay(path: ConfigPath = None, overrides: Overrides = None, parent: Parent = None) -> None:
    """Run a relay: serve the learner's snapshots again, to many collectors or further relays."""

    def run(settings: config.Config, stop: process.StopSignal) -> None:
        with process.importing():
            from paceline.relay import main

        main.run(settings, stop=stop)

    start("relay", path, overrides, run, parent=parent)


@app.command(name="config")
def show_config(
    path: ConfigPath = None,
    overrides: Overrides = None,
    check: Annotated[bool, typer.Option("--check", help="Only say whether the settings are right.")] = False,
    describe: Annotated[bool, typer.Option("--describe", help="Print every key with default and meaning.")] = False,
) -> None:
    """Print the resolved settings as YAML, passwords hidden."""
    with explained():
        if describe:
            print(config.describe(), end="")
            return
        settings = load(path, overrides)
        print("The settings are right." if check else config.dump(settings), end="\n" if check else "")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)
