"""What limits the speed of a run, by fixed rules on its time shares, and which setting to change to what."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from paceline.lag.figures import Advice, Figures, Option, change, number, percent

SYNC_SHARE = 0.1
"""Weight synchronisation above this share of a loop's time is too much."""
WAIT_SHARE = 0.1
"""A collector that waits for more than this share of its time is held back."""
IDLE_SHARE = 1 / 3
"""A learner that waits for more than this share of its time is short of rows."""
SMALL_SHARE = 0.01
"""What takes less of a loop's time than this is not worth a change."""
STARVED_SHARE = 0.05
"""A learner that the bound leaves without rows for more than this share of its time is starved by it."""


_PUBLISH_TRADES = "That lets policies that act be older in seconds, in exchange for time; it costs no learning."
_SHARD_TRADES = "That needs cores and a Redis for another shard, and costs no learning."


def find_limit(figures: Figures) -> Advice:
    """What limits the run: the first rule that holds, in the order of `RULES`."""
    for rule in RULES:
        if (advice := rule(figures)) is not None:
            return advice
    return Advice(
        "balanced",
        f"Nothing holds this run back: its learner waits {percent(_idle(figures))} of its time for rows, its "
        f"collectors {percent(_append_wait(figures))} of theirs for replay.",
    )


def _not_measured(figures: Figures) -> Advice | None:
    if figures.learner_shares and figures.collector_shares:
        return None
    missing = " and ".join(
        name
        for name, shares in (("the learner", figures.learner_shares), ("the collectors", figures.collector_shares))
        if not shares
    )
    return Advice("not_measured", f"What limits this run is not known: {missing} told of no time spent.")


def _starved_by_bound(figures: Figures) -> Advice | None:
    settings = figures.settings
    if settings.max_lag_versions is None or figures.starved_share <= STARVED_SHARE:
        return None
    value = max(figures.smallest_bound or 0, settings.max_lag_versions + 1)
    return Advice(
        "starved_by_bound",
        f"This run is limited by its lag bound: for {percent(figures.starved_share)} of its time the learner finds no "
        "row within it.",
        *change("lag.max_lag_versions", settings.max_lag_versions, value),
        trades="That trains on older rows, in exchange for updates that do not wait.",
    )


def _paused_by_bound(figures: Figures) -> Advice | None:
    settings, share = figures.settings, figures.collector_shares.get("lag_pause", 0.0)
    if settings.max_lag_versions is None or share <= WAIT_SHARE:
        return None
    # While it is paused for a share of its time, that share of what is published passes by beyond the bound.
    value = max(math.ceil(settings.max_lag_versions / max(1 - share, 0.01)), settings.max_lag_versions + 1)
    return Advice(
        "paused_by_bound",
        f"This run is limited by its lag bound: collectors pause for {percent(share)} of their time, until a newer "
        "snapshot arrives.",
        *change("lag.max_lag_versions", settings.max_lag_versions, value),
        trades="That lets older policies act, in exchange for steps that do not wait.",
        otherwise="Publishing less often (learner.publish_every_updates) makes versions last longer, to the same end.",
    )


def _learner_syncs(figures: Figures) -> Advice | None:
    return _syncs(figures, "learner_syncs", "the learner", figures.learner_shares.get("publishing", 0.0))


def _collectors_sync(figures: Figures) -> Advice | None:
    return _syncs(figures, "collectors_sync", "the collectors", figures.collector_shares.get("snapshot_apply", 0.0))


def _syncs(figures: Figures, rule: str, who: str, share: float) -> Advice | None:
    if share <= SYNC_SHARE:
        return None
    before = figures.settings.publish_every_updates
    # Sync time per update goes down with the interval: share / (1 - share) of the rest becomes SYNC_SHARE of it.
    rest = max(1 - share, 0.01)
    value = max(math.ceil(before * (share / rest) * (1 - SYNC_SHARE) / SYNC_SHARE), before + 1)
    return Advice(
        rule,
        f"This run is limited by weight synchronisation, which takes {percent(share)} of the time of {who}.",
        *change("learner.publish_every_updates", before, value),
        trades=_PUBLISH_TRADES,
    )


def _both_wait(figures: Figures) -> Advice | None:
    if _append_wait(figures) <= WAIT_SHARE or _idle(figures) <= IDLE_SHARE:
        return None
    settings = figures.settings
    finding = (
        f"This run is limited by what lies between its sides: collectors wait {percent(_append_wait(figures))} of "
        f"their time for replay, and the learner {percent(_idle(figures))} of its time for rows."
    )
    if settings.window_rows is not None:
        name = f"replay.tables.{settings.table}.limiter.window_rows"
        return Advice(
            "both_wait",
            finding,
            *change(name, settings.window_rows, 2 * settings.window_rows),
            trades="That lets the ratio of updates to steps wander further; on average it stays.",
            otherwise="If that does not help, replay itself is slow: raise replay.shards.",
        )
    return Advice(
        "both_wait", finding, *change("replay.shards", settings.shards, settings.shards + 1), trades=_SHARD_TRADES
    )


def _collectors_limit(figures: Figures) -> Advice | None:
    idle = _idle(figures)
    if idle <= IDLE_SHARE:
        return None
    before, cores = figures.settings.collector_count, figures.settings.cores
    finding = (
        f"This run is limited by collecting: the learner waits {percent(idle)} of its time for rows, and collectors "
        f"are hardly held back (they wait {percent(_append_wait(figures))} of theirs)."
    )
    if cores is not None and before >= cores:
        return Advice(
            "collectors_limit",
            finding,
            otherwise=f"It has {before} of them for the {cores} cores of its machine: expected more from more "
            "environments in each (collector.environments), or from collectors on other machines.",
        )
    value = min(max(math.ceil(before / max(1 - idle, 0.01)), before + 1), cores or math.inf)
    return Advice(
        "collectors_limit",
        finding,
        *change("collector.count", before, value),
        trades="That needs cores for them, and costs no learning.",
        otherwise="More environments in each (collector.environments) need fewer.",
    )


def _learner_limits(figures: Figures) -> Advice | None:
    wait, settings = _append_wait(figures), figures.settings
    if wait <= WAIT_SHARE:
        return None
    finding = (
        f"This run is limited by its learner, which waits only {percent(_idle(figures))} of its time for rows, while "
        f"collectors wait {percent(wait)} of theirs for replay."
    )
    options = list(_learner_options(figures))
    if settings.updates_per_step is not None:
        options.append(
            Option(
                "learner.updates_per_step",
                number(settings.updates_per_step),
                f"{max(settings.updates_per_step * (1 - wait), 0.001):.2g}",
                "That one trades learning for speed: each step is learned from less.",
            )
        )
    return Advice.choose(
        "learner_limits", finding, options, "A faster device for its updates (learner.device) costs no learning either."
    )


def _learner_options(figures: Figures) -> Iterator[Option]:
    """What gives a learner that is busy more time for updates and costs no learning: what frees most, first."""
    settings, shares = figures.settings, figures.learner_shares
    savings: list[tuple[float, Option]] = []

    def save(share: float, setting: str, before: int, what: str) -> None:
        # Twice as rarely, it takes half of its time.
        if share >= SMALL_SHARE:
            trades = f"That frees {percent(share / 2)} of the learner's time: {what}; it costs no learning."
            savings.append((share, Option(setting, number(before), number(2 * before), trades)))

    save(
        shares.get("publishing", 0.0),
        "learner.publish_every_updates",
        settings.publish_every_updates,
        "policies that act are older in seconds",
    )
    save(
        shares.get("checkpointing", 0.0),
        "learner.checkpoint.every_updates",
        settings.checkpoint_every_updates,
        "after a crash more updates are done again",
    )
    if settings.prefetch_batches is not None:
        save(
            _idle(figures),
            "learner.prefetch_batches",
            settings.prefetch_batches,
            "rows are some updates older when they are trained on",
        )
    yield from (option for _, option in sorted(savings, key=lambda saving: -saving[0]))
    if settings.updates_per_step is None and settings.collector_count > 1:
        yield Option(
            "collector.count",
            number(settings.collector_count),
            number(max(math.floor(settings.collector_count * (1 - _append_wait(figures))), 1)),
            "That frees cores that only wait, and costs no learning.",
        )
    yield Option(
        "learner.threads",
        number(settings.learner_threads),
        number(settings.learner_threads + 1),
        "That needs a core that is idle, helps only where updates are large, and costs no learning.",
    )


RULES: tuple[Callable[[Figures], Advice | None], ...] = (
    _not_measured,
    _starved_by_bound,
    _paused_by_bound,
    _learner_syncs,
    _collectors_sync,
    _both_wait,
    _collectors_limit,
    _learner_limits,
)
"""The first that holds names the limit: a bound before what it hides, and two sides together before each alone."""


def _append_wait(figures: Figures) -> float:
    return figures.collector_shares.get("append_wait", 0.0)


def _idle(figures: Figures) -> float:
    return figures.learner_shares.get("waiting", 0.0)
