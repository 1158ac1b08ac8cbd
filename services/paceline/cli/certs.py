"""`paceline certs`: a certificate authority, certificates, tokens and a Redis password for one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.starting import explained


def certs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where they go; what is there already stays.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="A further name or address of the servers; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="How long new certificates are valid.")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Write the certificates anew; authority, tokens and password stay.")
    ] = False,
) -> None:
    """Make what TLS, tokens and Redis need: an authority of one's own, and a folder for each service."""
    with explained():
        from paceline.local.issuing import issue

        for line in issue(folder, hosts=host or (), days=days, renew=renew):
            print(line)
