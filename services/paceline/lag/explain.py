"""A run's lag in plain words: one paragraph on what limits the run, how far it lags, why, and what to set."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.lag.attribution import PARTS
from paceline.lag.figures import Advice, Distribution, Figures, change, number, percent
from paceline.lag.limits import find_limit

SMALL_VERSIONS = 1.0
"""A part of the lag up to this mean needs no change."""

_PART_WORDS = {
    "transfer": "snapshots on their way to the collectors",
    "rollout": "rows in blocks that are not full yet",
    "queue": "blocks on their way into replay",
    "residence": "rows waiting in the table",
    "unattributed": "no part that is known",
}


@dataclass(frozen=True)
class Explanation:
    """What a person should know of a run, as two findings and as one paragraph."""

    limit: Advice
    lag: Advice
    paragraph: str


def explain(figures: Figures) -> Explanation:
    """Explain a run. The same figures give the same words."""
    limit, lag = find_limit(figures), find_lag_cause(figures)
    sentences = (str(limit), _distributions(figures), str(lag), _beyond_the_bound(figures))
    return Explanation(limit, lag, " ".join(filter(None, sentences)))


def explain_too_short(how: str, rows: float, least_rows: float) -> Explanation:
    """Of a run that "failed" or was "stopped" before it had trained on so many rows: that it cannot be judged."""
    ended = "failed" if how == "failed" else "was stopped"
    limit = Advice(
        "too_short",
        f"This run {ended} before there was enough to judge: it trained on {rows:,.0f} rows, expected at least "
        f"{least_rows:,.0f}. What limits it is not known.",
    )
    lag = Advice("lag_not_measured", "Nor is where its training lag comes from.")
    return Explanation(limit, lag, f"{limit} {lag}")


def find_lag_cause(figures: Figures) -> Advice:
    """What makes most of the training lag, and what to set to have less of it."""
    settings, total = figures.settings, sum(figures.part_versions.values())
    if figures.training_lag is None or not figures.trained_rows or not figures.part_versions:
        return Advice("lag_not_measured", "Where the training lag comes from is not known: no row was attributed yet.")
    if not total:
        return Advice("no_lag", "Every row was trained on before a newer version was published: there is no lag.")
    if settings.injected is not None:
        return Advice(
            "injected",
            f"The lag is made on purpose (lag.inject.mode={settings.injected}), so it says nothing of the run itself.",
            *change("lag.inject.mode", settings.injected, "none"),
        )
    part = max(PARTS, key=lambda name: figures.part_versions.get(name, 0.0))
    mean = figures.part_versions[part] / figures.trained_rows
    finding = (
        f"{percent(figures.part_versions[part] / total)} of the lag is {part}: {_PART_WORDS[part]} "
        f"({mean:.3g} versions for a row on average{_seconds_words(figures, part)})."
    )
    if part == "unattributed":
        return Advice(
            part,
            finding,
            otherwise="Either versions of before a resume or a row's times are unknown, or no clock offset is: see "
            "paceline_collector_clock_uncertainty_seconds and paceline_learner_replay_clock_uncertainty_seconds.",
        )
    if mean <= SMALL_VERSIONS:
        return Advice(part, finding, otherwise="That is no more than one version: nothing needs to change.")
    return _ADVICE[part](figures, finding, mean)


def _transfer(figures: Figures, finding: str, mean: float) -> Advice:
    return _publish_less("transfer", figures, finding, mean)


def _publish_less(rule: str, figures: Figures, finding: str, mean: float) -> Advice:
    before = figures.settings.publish_every_updates
    return Advice(
        rule,
        finding,
        *change("learner.publish_every_updates", before, before * math.ceil(mean)),
        trades="That makes fewer versions of the same lag in seconds; it costs no learning.",
    )


def _rollout(figures: Figures, finding: str, mean: float) -> Advice:
    settings, version_seconds = figures.settings, _version_seconds(figures)
    if version_seconds is not None and settings.block_seconds > version_seconds:
        value = f"{max(version_seconds, 0.001):.1g}"
        return Advice(
            "rollout",
            finding,
            *change("collector.block_seconds", settings.block_seconds, value),
            trades="That sends more and smaller blocks for the same rows; it costs no learning.",
        )
    return _publish_less("rollout", figures, finding, mean)


def _queue(figures: Figures, finding: str, mean: float) -> Advice:
    settings = figures.settings
    if settings.max_blocks_in_flight > 1:
        value = max(math.floor(settings.max_blocks_in_flight / mean), 1)
        return Advice(
            "queue",
            finding,
            *change("collector.max_blocks_in_flight", settings.max_blocks_in_flight, value),
            trades="That has collectors wait sooner while replay is slow; it costs no learning.",
        )
    return Advice(
        "queue",
        finding,
        *change("replay.shards", settings.shards, settings.shards + 1),
        trades="That needs cores and a Redis for another shard, and costs no learning.",
    )


def _residence(figures: Figures, finding: str, mean: float) -> Advice:
    settings = figures.settings
    held = min(figures.table_rows or settings.capacity_rows, settings.capacity_rows)
    name = f"replay.tables.{settings.table}.capacity_rows"
    if settings.is_queue:
        value, otherwise = held / mean, "What waits there waits for the learner."
    elif settings.max_lag_versions is not None:
        # Draws are even over the rows held, so the oldest is about twice as old as the mean.
        value, otherwise = held * settings.max_lag_versions / (2 * mean), "Then the oldest row stays within the bound."
    else:
        value, otherwise = held / 2, "A replay table is there to keep rows: do so only if returns suffer from old ones."
    value = max(math.floor(value), 1)
    if value >= settings.capacity_rows:
        return Advice("residence", finding, otherwise="The bound holds all the same: nothing needs to change.")
    return Advice(
        "residence",
        finding,
        *change(name, settings.capacity_rows, value),
        trades="That trades the variety of old rows for rows of newer policies.",
        otherwise=otherwise,
    )


_ADVICE = {"transfer": _transfer, "rollout": _rollout, "queue": _queue, "residence": _residence}


def _distributions(figures: Figures) -> str:
    told = []
    if figures.training_lag is not None:
        told.append(f"Rows are trained on {_spread(figures.training_lag)}")
    if figures.acting_lag is not None:
        told.append(f"{'collectors' if told else 'Collectors'} act {_spread(figures.acting_lag)}")
    return f"{', and '.join(told)}." if told else ""


def _spread(lag: Distribution) -> str:
    return f"{_lag(lag.p50)} versions late at the median and {_lag(lag.p99)} at the 99th percentile"


def _lag(versions: float) -> str:
    return number(versions) if math.isfinite(versions) else "more than the largest bucket's"


def _seconds_words(figures: Figures, part: str) -> str:
    seconds = figures.part_seconds.get(part)
    return "" if seconds is None or not figures.trained_rows else f", {seconds / figures.trained_rows:.3g} s"


def _beyond_the_bound(figures: Figures) -> str:
    if figures.settings.max_lag_versions is None or not (figures.skipped_rows or figures.masked_rows):
        return ""
    return (
        f"Of rows beyond the bound of {figures.settings.max_lag_versions} versions, {figures.skipped_rows:.0f} draws "
        f"were skipped and {figures.masked_rows:.0f} were made and had no weight."
    )


def _version_seconds(figures: Figures) -> float | None:
    """Seconds from one version to the next."""
    rate = figures.updates_per_second
    return figures.settings.publish_every_updates / rate if rate else None
