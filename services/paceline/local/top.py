"""`paceline top`: follows a run through the Prometheus that scrapes it."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.config import Config
from paceline.errors import PacelineError
from paceline.local import lag_metrics as names
from paceline.local.display import open_display
from paceline.local.prometheus import Prometheus
from paceline.local.scrape import Page
from paceline.local.status import StatusReader, Watched
from paceline.process import StopSignal


def follow(server: Prometheus, config: Config | None, *, plain: bool, stop: StopSignal) -> None:
    """Show how the run goes until the stop. A server that is away for a while is asked again.

    Raises:
        UnavailableError, InvalidInputError, NotFoundError, ConfigError: the first question got no answer.
    """
    server.read_pages(names.SHOWN)  # the commonest mistakes are in the URL: an error then, not a table without figures
    title = f"run at {server.shown}"
    watched = Watched(title)
    if config is not None:
        watched = Watched.of(config, f"{config.run.id or title}: {config.learner.algorithm.name} on {config.env.id}")
    with open_display(watched.title, plain=plain) as display:
        away: str | None = None

        def read_pages() -> Mapping[str, Page]:
            nonlocal away
            try:
                pages = server.read_pages(names.SHOWN)
            except PacelineError as error:
                if str(error) != away:
                    away = str(error)
                    display.say(f"{away}; the last known figures stay")
                return {}
            if away is not None:
                away = None
                display.say(f"{server.shown} answers again")
            return pages

        reader = StatusReader(watched, read_pages)
        while not stop.is_set():
            display.show(reader.read())
            stop.wait(display.interval_seconds)
