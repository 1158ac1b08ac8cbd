"""How a run goes, in one look: computed from what the services say on /metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.config import Config
from paceline.local.scrape import Page

RATE_SECONDS = 10.0
"""Rates are taken over so long."""

SYNC_ACTIVITIES = ("publishing", "snapshot_apply")
"""What counts as weight synchronisation in the loops of learner and collectors."""


@dataclass(frozen=True)
class RunStatus:
    """Figures of one moment; None where a figure is not known yet."""

    seconds: float
    environment_steps: int | None
    environment_step_limit: int
    steps_per_second: float | None
    learner_step: int | None
    updates_per_second: float | None
    update_ratio: float | None
    episode_return: float | None
    evaluation_return: float | None
    published_version: int | None
    applied_versions: Mapping[str, int]
    lag_p50: float | None
    lag_p99: float | None
    collector_sync_share: float | None
    learner_sync_share: float | None
    replay_rows: int | None
    replay_capacity: int
    waiting: str | None
    """Which side the limiter holds back: insert or sample."""

    @property
    def share_done(self) -> float:
        """0 to 1, by environment steps."""
        return min((self.environment_steps or 0) / self.environment_step_limit, 1.0)

    @property
    def seconds_left(self) -> float | None:
        """At the present rate."""
        if not self.steps_per_second or self.environment_steps is None:
            return None
        return max(self.environment_step_limit - self.environment_steps, 0) / self.steps_per_second


class StatusReader:
    """Reads the pages and keeps what rates need."""

    def __init__(self, config: Config, read_pages: Callable[[], Mapping[str, Page]]) -> None:
        self._config, self._read_pages = config, read_pages
        self._started = time.monotonic()
        self._pages: dict[str, Page] = {}
        self._limiter: tuple[float, dict[str, float]] | None = None
        self._history: deque[tuple[float, float | None, float | None]] = deque()

    def read(self) -> RunStatus:
        """The status now."""
        # What was known of a process that is away for a moment, or has just ended, is still the run's figure.
        self._pages.update({name: page for name, page in self._read_pages().items() if page.samples})
        pages, now = self._pages, time.monotonic()
        learner, endpoint = (pages.get(name, Page()) for name in ("learner", "endpoint"))
        # The shards as if they were one.
        replay = Page([sample for name, page in pages.items() if name.startswith("replay") for sample in page.samples])
        collectors = [page for name, page in pages.items() if name.startswith("collector")]
        steps = learner.value("paceline_learner_environment_steps")
        updates = learner.value("paceline_learner_step")
        self._history.append((now, steps, updates))
        while now - self._history[0][0] > RATE_SECONDS and len(self._history) > 2:
            self._history.popleft()
        table = self._config.learner.table
        return RunStatus(
            seconds=now - self._started,
            environment_steps=_whole(steps),
            environment_step_limit=self._config.run.environment_steps,
            steps_per_second=self._rate(1),
            learner_step=_whole(updates),
            updates_per_second=self._rate(2),
            update_ratio=learner.value("paceline_learner_update_ratio"),
            episode_return=endpoint.value("paceline_endpoint_episode_return_mean"),
            evaluation_return=endpoint.value("paceline_endpoint_evaluation_return_mean"),
            published_version=_whole(endpoint.value("paceline_endpoint_published_version")),
            applied_versions={
                index: int(version)
                for index, version in endpoint.by_label("paceline_endpoint_applied_version", "collector").items()
            },
            lag_p50=learner.quantile("paceline_learner_training_lag_versions", 0.5),
            lag_p99=learner.quantile("paceline_learner_training_lag_versions", 0.99),
            collector_sync_share=_sync_share(collectors),
            learner_sync_share=_sync_share([learner]),
            replay_rows=_whole(replay.by_label("paceline_replay_table_rows", "table").get(table)),
            replay_capacity=self._config.replay.tables[table].capacity_rows * self._config.replay.shards,
            waiting=self._waiting_side(replay, now),
        )

    def _waiting_side(self, replay: Page, now: float) -> str | None:
        """The side that the limiter held back for most of the time since the last look, if any."""
        before, self._limiter = (
            self._limiter,
            (now, replay.by_label("paceline_replay_limiter_wait_seconds_total", "side")),
        )
        if before is None:
            return None
        held = {side: seconds - before[1].get(side, 0.0) for side, seconds in self._limiter[1].items()}
        side = max(held, key=lambda name: held[name], default=None)
        return side if side is not None and held[side] > (now - before[0]) / 2 else None

    def _rate(self, column: int) -> float | None:
        known = [(entry[0], entry[column]) for entry in self._history if entry[column] is not None]
        if len(known) < 2 or known[-1][0] == known[0][0]:
            return None
        first, last = known[0][1], known[-1][1]
        return ((last or 0.0) - (first or 0.0)) / (known[-1][0] - known[0][0])


def _sync_share(pages: list[Page]) -> float | None:
    seconds: dict[str, float] = {}
    for page in pages:
        for activity, value in page.activity_seconds().items():
            seconds[activity] = seconds.get(activity, 0.0) + value
    whole = sum(seconds.values())
    return sum(seconds.get(activity, 0.0) for activity in SYNC_ACTIVITIES) / whole if whole else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
