"""SIGTERM to a collector and all its processes at once, as batch systems, systemd and terminals send it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.apart import Services
from paceline.local.embedded import EmbeddedRedis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAINING = ("replay", "learner", "collector")


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    store = EmbeddedRedis.start(tmp_path / "store")
    services = Services(
        tmp_path,
        store.url,
        # Its environments step all the time: nothing of the learner holds its rows back.
        settings=["env.vectorization=async", "collector.environments=2", "learner.updates=learner_bound"],
    )
    yield services
    services.close()
    store.stop()


@pytest.mark.parametrize("setting", ["stop", "reset"])
def test_a_stop_that_reaches_the_environments_first_ends_the_collector_in_order(services: Services, setting: str):
    services.settings["collector.on_environment_error"] = setting
    for role in TRAINING:
        services.start(role)
    services.wait_for_updates(100)
    started = descendants_of(services.processes["collector"].pid)
    workers = [process for process in started if b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes()]
    assert len(workers) == 2
    for process in started:
        os.kill(process, signal.SIGTERM)
    services.wait_for(lambda: all(map(has_ended, workers)), "their end", 10)
    services.stop("collector")
    (ended,) = services.events("collector", "collector_ended")
    assert ended["stopped"]
    assert "leaked" not in services.log("collector")
    services.wait_for(lambda: all(map(has_ended, started)), "the end of what it had started", 10)


def has_ended(process: int) -> bool:
    """Whether it is gone, or waits only for its parent to learn of its end."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def descendants_of(process: int) -> list[int]:
    """The processes that it has started, and those that they have."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return children + [each for child in children for each in descendants_of(child)]
