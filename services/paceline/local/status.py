"""How a run goes, in one look: computed from what the services say on /metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.config import Config
from paceline.local import lag_metrics as names
from paceline.local.scrape import Page, merge

RATE_SECONDS = 10.0
"""Rates are taken over so long."""


@dataclass(frozen=True)
class Watched:
    """What is known of a run beside what it says on /metrics; None where it is not."""

    title: str
    table: str | None = None
    """The table that is learned from; where it is not known, all tables count as one."""
    environment_step_limit: int | None = None
    capacity_rows: int | None = None
    began: float | None = None
    """Monotonic seconds; otherwise the run is as old as its learner process."""

    @classmethod
    def of(cls, config: Config, title: str, *, began: float | None = None) -> Watched:
        """As the run's settings say."""
        table = config.learner.table
        return cls(
            title,
            table,
            config.run.environment_steps,
            config.replay.tables[table].capacity_rows * config.replay.shards,
            began,
        )


@dataclass(frozen=True)
class Bound:
    """What lag.max_lag_versions is, and does; None where that is not known."""

    versions: float
    paused_collectors: float | None
    skipped_rows: float | None
    """Draws, not distinct rows; so are those masked."""
    masked_rows: float | None


@dataclass(frozen=True)
class RunStatus:
    """Figures of one moment; None where a figure is not known yet."""

    seconds: float | None
    environment_steps: int | None
    environment_step_limit: int | None
    steps_per_second: float | None
    learner_step: int | None
    updates_per_second: float | None
    update_ratio: float | None
    episode_return: float | None
    evaluation_return: float | None
    published_version: int | None
    applied_versions: Mapping[str, int]
    training_lag: tuple[float, float] | None
    """Median and 99th percentile, in versions; so is the acting lag."""
    acting_lag: tuple[float, float] | None
    lag_parts: Mapping[str, float]
    """Shares of the training lag, by part."""
    bound: Bound | None
    collector_sync_share: float | None
    learner_sync_share: float | None
    replay_rows: int | None
    replay_capacity: int | None
    waiting: str | None
    """Which side the limiter holds back: insert or sample."""

    @property
    def share_done(self) -> float | None:
        """0 to 1, by environment steps."""
        if self.environment_step_limit is None:
            return None
        return min((self.environment_steps or 0) / self.environment_step_limit, 1.0)

    @property
    def seconds_left(self) -> float | None:
        """At the present rate."""
        if not self.steps_per_second or self.environment_steps is None or self.environment_step_limit is None:
            return None
        return max(self.environment_step_limit - self.environment_steps, 0) / self.steps_per_second


class StatusReader:
    """Reads the pages and keeps what rates need."""

    def __init__(self, watched: Watched, read_pages: Callable[[], Mapping[str, Page]]) -> None:
        self._watched, self._read_pages = watched, read_pages
        self._pages: dict[str, Page] = {}
        self._limiter: tuple[float, dict[str, float]] | None = None
        self._history: deque[tuple[float, float | None, float | None]] = deque()

    def read(self) -> RunStatus:
        """The status now."""
        if pages := self._read_pages():
            # What was known of a process that is away for a moment, or has just ended, is still the run's figure. One
            # that is not named any more, since another took its place, is none of the run's.
            self._pages = {name: page if page.samples else self._pages.get(name, page) for name, page in pages.items()}
        now = time.monotonic()
        learner, endpoint, replay, collectors = map(self._of_service, ("learner", "endpoint", "replay", "collector"))
        steps = learner.value("paceline_learner_environment_steps")
        updates = learner.value("paceline_learner_step")
        self._history.append((now, steps, updates))
        while now - self._history[0][0] > RATE_SECONDS and len(self._history) > 2:
            self._history.popleft()
        watched = self._watched
        table = {} if watched.table is None else {"table": watched.table}
        parts = learner.by_label(names.PART_VERSIONS, "part")
        whole = sum(parts.values())
        return RunStatus(
            seconds=sum(learner.activity_seconds().values()) or None if watched.began is None else now - watched.began,
            environment_steps=_whole(steps),
            environment_step_limit=watched.environment_step_limit,
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
            training_lag=_lag(learner, names.TRAINING_LAG),
            acting_lag=_lag(collectors, names.ACTING_LAG),
            lag_parts={part: versions / whole for part, versions in parts.items()} if whole else {},
            bound=_bound(learner, endpoint, replay),
            collector_sync_share=_sync_share(collectors),
            learner_sync_share=_sync_share(learner),
            replay_rows=_whole(replay.known_total("paceline_replay_table_rows", **table)),
            replay_capacity=watched.capacity_rows
            or _whole(replay.known_total("paceline_replay_table_capacity_rows", **table)),
            waiting=self._waiting_side(replay, now),
        )

    def _of_service(self, service: str) -> Page:
        """Its processes as if they were one."""
        return merge(page for name, page in self._pages.items() if name.startswith(service))

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


def _lag(page: Page, name: str) -> tuple[float, float] | None:
    spread = page.spread(name.format("versions"))
    return None if spread is None else (spread.quantile(0.5), spread.quantile(0.99))


def _bound(learner: Page, endpoint: Page, replay: Page) -> Bound | None:
    versions = learner.value("paceline_learner_max_lag_versions")
    if versions is None:
        return None
    return Bound(
        versions,
        endpoint.value("paceline_endpoint_paused_collectors"),
        None
        if (skipped := learner.value("paceline_learner_skipped_rows_total")) is None
        else skipped + replay.total("paceline_replay_skipped_rows_total"),
        learner.value("paceline_learner_masked_rows_total"),
    )


def _sync_share(page: Page) -> float | None:
    seconds = {
        activity: value for activity, value in page.activity_seconds().items() if activity not in names.STARTS_AND_ENDS
    }
    whole = sum(seconds.values())
    return sum(seconds.get(activity, 0.0) for activity in names.SYNC_ACTIVITIES) / whole if whole else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
