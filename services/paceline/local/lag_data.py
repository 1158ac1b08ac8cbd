"""What is known of a run's lag, from either of two sources: the folder of a run, or a Prometheus that scrapes it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import config as settings
from paceline.errors import NotFoundError
from paceline.local import lag_metrics as names
from paceline.local.prometheus import Prometheus
from paceline.local.records import folder_of
from paceline.local.scrape import Page, merge
from paceline.local.tally import LAG_FILE, Ending
from paceline.report import record

WATCHED_SECONDS = 10.0
"""Watched for less than this, it says nothing: what a loop is about is counted when it ends."""

_WRITTEN = {
    "complete": "at the end of the run",
    "stopped": "when the run was stopped",
    "failed": "when the run failed",
}


@dataclass(frozen=True)
class LagData:
    """The samples of a run, and where they are from."""

    run: str
    source: str
    """For people: which file, how old; or which server."""
    page: Page
    """All series; those that are summed, over processes and restarts."""
    gauges: Mapping[str, Page]
    """By process, as last seen."""
    config: settings.Config | None
    """None where nobody said."""
    goes_on: bool
    ending: Ending | None = None
    """Where it is known."""
    cores: int | None = None
    """Of the machine, where the whole run is on one."""
    accounted: Mapping[str, float] = field(default_factory=dict)
    """By service: what share of the time that it was watched for its loop said where it went."""
    missing: tuple[str, ...] = ()
    """What is not there, in sentences."""


def read_folder(run: str, environment: Mapping[str, str]) -> LagData:
    """Of a run by its folder or id, whether it goes on or has ended.

    Raises:
        NotFoundError: there is no such run.
    """
    folder = folder_of(run)
    if folder is None:
        raise NotFoundError(
            f"there is no run {run!r} here: expected the folder of a run, its id in "
            f"{settings.Config().run.directory}/, or the URL of a Prometheus such as http://127.0.0.1:9090"
        )
    config = settings.load(folder / "config.yaml", [], {})
    try:
        tree = json.loads((folder / LAG_FILE).read_bytes())
        totals = Page([_sample(entry) for entry in tree["totals"]])
        gauges = {name: Page([_sample(entry) for entry in page]) for name, page in tree["gauges"].items()}
    except FileNotFoundError:
        return _from_older_files(folder, config)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        return _from_older_files(folder, config, f"{LAG_FILE} cannot be read ({error!r})")
    age = max(time.time() - tree["written_at"], 0.0)
    ending = _ending(tree)
    return LagData(
        run=config.run.id or folder.name,
        source=f"{folder / LAG_FILE}, written {f'{age:.0f} s ago' if ending is None else _WRITTEN[ending.how]}",
        page=merge([totals, *gauges.values()]),
        gauges=gauges,
        config=config,
        goes_on=ending is None,
        ending=ending,
        cores=tree.get("cores"),
        accounted=_accounted(tree.get("watched", {})),
    )


def read_prometheus(server: Prometheus, *, since: str | None, config: settings.Config | None) -> LagData:
    """Of a run that a Prometheus scrapes: since its processes started, or within the last `since` ("10m").

    Raises:
        UnavailableError, InvalidInputError, NotFoundError, ConfigError: see `Prometheus.read_pages`.
    """
    pages = server.read_pages(names.KEPT)
    when = "since its processes started"
    if since is not None:
        before, when = server.read_pages(names.SUMMED, ago=since), f"in the last {since}"
        pages = {name: _since(page, before.get(name, Page())) for name, page in pages.items()}
    return LagData(
        run=(config.run.id if config is not None else None) or server.shown,
        source=f"{server.shown}, {when}",
        page=merge(pages.values()),
        gauges=pages,
        config=config,
        goes_on=True,
    )


def _since(page: Page, before: Page) -> Page:
    """What was counted after `before`; a counter that is lower than it was has begun anew."""
    earlier = {(name, *sorted(labels.items())): value for name, labels, value in before.samples}
    samples = []
    for name, labels, value in page.samples:
        was = earlier.get((name, *sorted(labels.items())), 0.0) if name in names.SUMMED else 0.0
        samples.append((name, labels, value - was if value >= was else value))
    return Page(samples)


def _from_older_files(folder: Path, config: settings.Config, why: str = f"there is no {LAG_FILE}") -> LagData:
    """What the files of before lag.json tell: the training lag, and where the time went."""
    run = record.read_run(folder)
    below, buckets = 0, []
    for bound, rows in sorted(run.lag_rows.items()):
        below += rows
        buckets.append((names.TRAINING_LAG.format("versions") + "_bucket", {"le": str(bound)}, float(below)))
    activities = [
        (f"paceline_{name.partition('-')[0]}_activity_seconds_total", {"activity": activity}, value)
        for name, activities in run.process_seconds.items()
        for activity, value in activities.items()
    ]
    return LagData(
        run=run.run_id,
        source=f"{folder}, metrics.jsonl and process_time.json",
        page=Page([*buckets, *activities]),
        gauges={},
        config=config,
        goes_on=not run.finished,
        missing=(f"{why}: acting lag, the parts of the lag and clocks are unknown.",),
    )


def _ending(tree: Mapping[str, Any]) -> Ending | None:
    if not tree["ended"]:
        return None
    # Until it was noted how a run ends, "complete" was said of stopped ones, too: no better is known of those.
    how = tree.get("ending", "complete" if tree["complete"] else "stopped")
    return Ending(how if how in _WRITTEN else "stopped", str(tree.get("problem", "")))


def _accounted(watched: Mapping[str, Any]) -> dict[str, float]:
    sums: dict[str, tuple[float, float]] = {}
    for name, each in watched.items():
        service = name.partition("-")[0]
        seconds, spent = sums.get(service, (0.0, 0.0))
        sums[service] = (seconds + each["seconds"], spent + each["activity_seconds"])
    return {service: spent / seconds for service, (seconds, spent) in sums.items() if seconds >= WATCHED_SECONDS}


def _sample(entry: Mapping[str, Any]) -> tuple[str, dict[str, str], float]:
    return str(entry["name"]), dict(entry["labels"]), float(entry["value"])
