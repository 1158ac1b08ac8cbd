"""`paceline health`: ask a process how it is. `python -m paceline health` does the same without this command line."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.health import main


def health(
    targets: Annotated[
        list[str], typer.Argument(metavar="URL|PORT...", help="Where /metrics is: a URL, host:port, or a port of here.")
    ],
    ready: Annotated[bool, typer.Option("--ready", help="Whether it is useful now, not only alive.")] = False,
) -> None:
    """Ask a process whether it makes progress. Exit code 1: it does not, and why is printed."""
    raise SystemExit(main([*targets, *(["--ready"] if ready else [])]))
