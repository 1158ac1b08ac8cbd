"""The `paceline` command. Reads the environment, prepares the process, and starts one role.

Imports of numpy and torch come after the compute threads are limited, so roles are imported within their commands.
"""

from paceline.cli import certs, explaining, health, replay
from paceline.cli.roles import app

app.add_typer(replay.app, name="replay")
app.command()(explaining.report)
app.command()(explaining.lag)
app.command()(explaining.top)
app.command()(health.health)
app.command()(certs.certs)
app.add_typer(explaining.study_app, name="study")


def main() -> None:
    """Entry of the `paceline` command."""
    app()


__all__ = ["app", "main"]
