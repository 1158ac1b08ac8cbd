"""A run's lag, worked out: distributions, what they are made of, where loops spend their time, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config import Config
from paceline.lag.attribution import PARTS
from paceline.lag.explain import Explanation, explain, explain_too_short
from paceline.lag.figures import Distribution, Figures, Settings
from paceline.local import lag_metrics as names
from paceline.local.lag_data import LagData
from paceline.local.scrape import Page, Spread

JUDGED_BATCHES = 100
"""A run that ended before its time is not judged by fewer batches."""


@dataclass(frozen=True)
class Part:
    """One part of the training lag, for a row on average; None where it is not known."""

    name: str
    versions: float | None
    versions_share: float | None
    seconds: float | None
    seconds_share: float | None


@dataclass(frozen=True)
class Loop:
    """Where a loop's time went."""

    seconds: float
    """All turns together, of all processes; starting and finishing left out."""
    shares: Mapping[str, float]
    """0 to 1, by activity, the largest first; their sum is 1."""
    beside: Mapping[str, float]
    """Seconds of starting and finishing."""
    sync_share: float
    accounted: float | None
    """What share of the time that passed the loop told of; None where nobody watched."""


@dataclass(frozen=True)
class PublishLag:
    """How far a collector was behind the published version at its last poll."""

    collector: str
    versions: float
    updates: float | None
    seconds: float | None


@dataclass(frozen=True)
class BoundEffect:
    """What lag.max_lag_versions did; None where it is not known."""

    versions: float | None
    """None: there is no bound, or nobody says which."""
    paused_collectors: float | None
    pauses: float | None
    paused_share: float | None
    """Of the collectors' time."""
    skipped_rows: float | None
    """Draws, not distinct rows; so are those masked."""
    masked_rows: float | None
    starved_seconds: float | None
    workable_versions: float | None
    """The smallest bound under which the learner would hardly have been starved; None where it never was."""


@dataclass(frozen=True)
class ClockOffset:
    """The clock of a peer minus the learner's, as far as it is known."""

    peer: str
    seconds: float
    uncertainty_seconds: float | None


@dataclass(frozen=True)
class LagView:
    """Everything that `paceline lag` shows; None, or empty, where it is not known."""

    data: LagData
    training: Mapping[str, Spread | None]
    """By unit: versions, updates, seconds."""
    acting: Mapping[str, Spread | None]
    trained_rows: float | None
    parts: tuple[Part, ...]
    collector: Loop | None
    learner: Loop | None
    publish: tuple[PublishLag, ...]
    bound: BoundEffect
    clocks: tuple[ClockOffset, ...]
    explanation: Explanation

    @property
    def advice(self) -> str:
        """What limits the run, and which setting to change to what, in one paragraph."""
        if self.data.config is not None:
            return self.explanation.paragraph
        words: list[str] = []
        for advice in (self.explanation.limit, self.explanation.lag):
            words.append(advice.finding)
            if advice.setting is not None:
                words.append(f"The setting to change is {advice.setting}.")
            words.append(advice.trades)
            words += [f"Then it is {option.setting}. {option.trades}" for option in advice.further]
            words.append(advice.otherwise)
        words.append("The settings of the run are not known here: with --config, the value to set is named, too.")
        return " ".join(filter(None, words))

    @property
    def part_sum(self) -> float | None:
        """Of the parts, in versions: the mean training lag."""
        known = [part.versions for part in self.parts if part.versions is not None]
        return sum(known) if known else None


def make_view(data: LagData) -> LagView:
    """Work out what the samples say."""
    page = data.page
    training = {
        "versions": page.spread(names.TRAINING_LAG.format("versions")),
        "updates": page.spread(names.TRAINING_LAG.format("updates")),
        "seconds": page.spread(names.ROW_AGE),
    }
    acting = {unit: page.spread(names.ACTING_LAG.format(unit)) for unit in ("versions", "updates", "seconds")}
    rows = page.known_total("paceline_learner_trained_rows_total")
    if rows is None and training["versions"] is not None:
        rows = training["versions"].count
    collector = _loop(page, "collector", data.accounted)
    learner = _loop(page, "learner", data.accounted)
    bound = _bound(page, data.config, collector)
    return LagView(
        data=data,
        training=training,
        acting=acting,
        trained_rows=rows,
        parts=_parts(page, rows),
        collector=collector,
        learner=learner,
        publish=_publish(page),
        bound=bound,
        clocks=_clocks(data.gauges),
        explanation=_too_short(data, rows or 0)
        or explain(_figures(data, training["versions"], acting["versions"], rows, collector, learner, bound)),
    )


def _too_short(data: LagData, rows: float) -> Explanation | None:
    """Instead of advice, of a run that was cut short while it had hardly begun: its figures are those of starting."""
    if data.ending is None or data.ending.how == "complete" or data.config is None:
        return None
    least = JUDGED_BATCHES * data.config.learner.batch_size
    return explain_too_short(data.ending.how, rows, least) if rows < least else None


def _parts(page: Page, rows: float | None) -> tuple[Part, ...]:
    versions, seconds = (page.by_label(name, "part") for name in (names.PART_VERSIONS, names.PART_SECONDS))
    if not rows or not (versions or seconds):
        return ()
    all_versions, all_seconds = sum(versions.values()), sum(seconds.values())
    return tuple(
        Part(
            name,
            versions[name] / rows if name in versions else None,
            versions[name] / all_versions if name in versions and all_versions else None,
            seconds[name] / rows if name in seconds else None,
            seconds[name] / all_seconds if name in seconds and all_seconds else None,
        )
        for name in PARTS
    )


def _loop(page: Page, service: str, accounted: Mapping[str, float]) -> Loop | None:
    seconds = page.by_label(f"paceline_{service}_activity_seconds_total", "activity")
    turns = {activity: value for activity, value in seconds.items() if activity not in names.STARTS_AND_ENDS}
    whole = sum(turns.values())
    if not whole:
        return None
    shares = {activity: turns[activity] / whole for activity in sorted(turns, key=lambda name: -turns[name])}
    return Loop(
        seconds=whole,
        shares=shares,
        beside={activity: value for activity, value in seconds.items() if activity not in turns},
        sync_share=sum(shares.get(activity, 0.0) for activity in names.SYNC_ACTIVITIES),
        accounted=accounted.get(service),
    )


def _publish(page: Page) -> tuple[PublishLag, ...]:
    versions, updates, seconds = (
        page.by_label(f"paceline_endpoint_publish_lag_{unit}", "collector")
        for unit in ("versions", "updates", "seconds")
    )
    return tuple(
        PublishLag(index, versions[index], updates.get(index), seconds.get(index))
        for index in sorted(versions, key=lambda index: (len(index), index))
    )


def _bound(page: Page, config: Config | None, collector: Loop | None) -> BoundEffect:
    versions = page.value("paceline_learner_max_lag_versions")
    if versions is None and config is not None:
        versions = config.lag.max_lag_versions
    return BoundEffect(
        versions=versions,
        paused_collectors=page.value("paceline_endpoint_paused_collectors"),
        pauses=page.known_total("paceline_collector_pauses_total"),
        paused_share=None if collector is None else collector.shares.get("lag_pause"),
        skipped_rows=_known_sum(
            # Replay counts those of tables that it draws from by priority or age, the learner those of the others.
            page.known_total("paceline_learner_skipped_rows_total"),
            page.known_total("paceline_replay_skipped_rows_total"),
        ),
        masked_rows=page.known_total("paceline_learner_masked_rows_total"),
        starved_seconds=page.known_total("paceline_learner_starved_seconds_total"),
        workable_versions=page.value("paceline_learner_workable_lag_versions"),
    )


def _known_sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _clocks(gauges: Mapping[str, Page]) -> tuple[ClockOffset, ...]:
    clocks = []
    for name, page in gauges.items():
        # A collector says by how much the learner is ahead of it.
        offset = page.value("paceline_collector_clock_offset_seconds")
        if offset is not None:
            clocks.append(ClockOffset(name, -offset, page.value("paceline_collector_clock_uncertainty_seconds")))
        uncertainties = page.by_label("paceline_learner_replay_clock_uncertainty_seconds", "shard")
        for shard, seconds in page.by_label("paceline_learner_replay_clock_offset_seconds", "shard").items():
            clocks.append(ClockOffset(f"replay {shard}", seconds, uncertainties.get(shard)))
    return tuple(sorted(clocks, key=lambda clock: (len(clock.peer), clock.peer)))


def _figures(
    data: LagData,
    training: Spread | None,
    acting: Spread | None,
    rows: float | None,
    collector: Loop | None,
    learner: Loop | None,
    bound: BoundEffect,
) -> Figures:
    page, chosen = data.page, _settings(data)
    # Replay's own figure where it told one: the learner's is of its last batch.
    table_rows = page.known_total("paceline_replay_table_rows", table=chosen.table)
    if table_rows is None:
        table_rows = page.value("paceline_learner_replay_rows")
    updates = page.known_total("paceline_learner_updates_total")
    return Figures(
        settings=chosen,
        training_lag=_distribution(training),
        acting_lag=_distribution(acting),
        part_versions=page.by_label(names.PART_VERSIONS, "part"),
        part_seconds=page.by_label(names.PART_SECONDS, "part"),
        trained_rows=rows,
        collector_shares={} if collector is None else collector.shares,
        learner_shares={} if learner is None else learner.shares,
        updates_per_second=None if updates is None or learner is None else updates / learner.seconds,
        # capacity_rows is of one shard, too.
        table_rows=None if table_rows is None else table_rows / chosen.shards,
        skipped_rows=bound.skipped_rows or 0,
        masked_rows=bound.masked_rows or 0,
        starved_share=(bound.starved_seconds or 0) / learner.seconds if learner is not None else 0.0,
        smallest_bound=None if bound.workable_versions is None else int(bound.workable_versions),
    )


def _settings(data: LagData) -> Settings:
    """As the run had them; where nobody said, what its metrics tell of them, and defaults, which are not shown then."""
    config, page = data.config or Config(), data.page
    table = config.replay.tables[config.learner.table]
    chosen = {
        "collector_count": config.collector.count,
        "shards": config.replay.shards,
        "capacity_rows": table.capacity_rows,
        "max_lag_versions": config.lag.max_lag_versions,
    }
    if data.config is None:
        told = {
            "collector_count": page.value("paceline_endpoint_collectors"),
            "shards": sum(name.startswith("replay") for name in data.gauges),
            "capacity_rows": page.value("paceline_replay_table_capacity_rows", table=config.learner.table),
            "max_lag_versions": page.value("paceline_learner_max_lag_versions"),
        }
        chosen.update({name: int(value) for name, value in told.items() if value})
    inject = config.lag.inject.mode
    return Settings(
        publish_every_updates=config.learner.publish_every_updates,
        updates_per_step=config.learner.updates_per_step if config.learner.updates == "strict" else None,
        collector_count=chosen["collector_count"] or 1,
        max_blocks_in_flight=config.collector.max_blocks_in_flight,
        block_seconds=config.collector.block_seconds,
        table=config.learner.table,
        capacity_rows=chosen["capacity_rows"] or table.capacity_rows,
        is_queue=table.queue,
        window_rows=config.limiter_window_rows(),
        shards=chosen["shards"] or 1,
        max_lag_versions=chosen["max_lag_versions"],
        injected=None if inject == "none" else inject,
        prefetch_batches=None if config.follows and not table.queue else config.learner.prefetch_batches,
        checkpoint_every_updates=config.learner.checkpoint.every_updates,
        learner_threads=config.learner.threads,
        cores=data.cores,
    )


def _distribution(spread: Spread | None) -> Distribution | None:
    return None if spread is None else Distribution(spread.quantile(0.5), spread.quantile(0.99))
