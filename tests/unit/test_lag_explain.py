"""What limits a run is said by rules: each fires on its figures, with the setting and the number."""

import math
import re
from dataclasses import replace

import pytest

from paceline.lag.explain import explain, find_lag_cause
from paceline.lag.figures import Distribution, Figures, Settings
from paceline.lag.limits import find_limit

SETTINGS = Settings(
    publish_every_updates=10,
    updates_per_step=1.0,
    collector_count=2,
    max_blocks_in_flight=4,
    block_seconds=0.1,
    table="transitions",
    capacity_rows=100_000,
    window_rows=1_000,
)
LEARNER = {"waiting": 0.1, "updating": 0.87, "publishing": 0.03}
COLLECTORS = {"acting": 0.4, "environment": 0.53, "append_wait": 0.05, "snapshot_apply": 0.02}
BALANCED = Figures(
    SETTINGS,
    training_lag=Distribution(40.0, 96.0),
    acting_lag=Distribution(0.0, 1.0),
    part_versions={"transfer": 500.0, "rollout": 300.0, "queue": 200.0, "residence": 39_000.0, "unattributed": 0.0},
    part_seconds={"transfer": 5.0, "rollout": 3.0, "queue": 2.0, "residence": 4_000.0},
    trained_rows=1_000.0,
    collector_shares=COLLECTORS,
    learner_shares=LEARNER,
    updates_per_second=200.0,
    table_rows=20_000.0,
)


def given(*, learner: dict[str, float] | None = None, collectors: dict[str, float] | None = None, **changes) -> Figures:
    settings = changes.pop("settings", {})
    return replace(
        BALANCED,
        learner_shares={**LEARNER, **(learner or {})},
        collector_shares={**COLLECTORS, **(collectors or {})},
        settings=replace(SETTINGS, **settings),
        **changes,
    )


BOUND = {"max_lag_versions": 8}


@pytest.mark.parametrize(
    ("figures", "rule", "setting", "value"),
    [
        (given(), "balanced", None, None),
        (replace(BALANCED, learner_shares={}), "not_measured", None, None),
        (replace(BALANCED, collector_shares={}), "not_measured", None, None),
        (
            given(settings=BOUND, starved_share=0.2, smallest_bound=13),
            "starved_by_bound",
            "lag.max_lag_versions",
            "13",
        ),
        # 8 / (1 - 0.5)
        (given(settings=BOUND, collectors={"lag_pause": 0.5}), "paused_by_bound", "lag.max_lag_versions", "16"),
        # Of 80 parts that are not publishing, 10 % of the whole is 8.9: 20 parts must be 2.25 times as rare.
        (given(learner={"publishing": 0.2}), "learner_syncs", "learner.publish_every_updates", "23"),
        (given(collectors={"snapshot_apply": 0.25}), "collectors_sync", "learner.publish_every_updates", "30"),
        # 2 collectors keep the learner busy half of its time.
        (given(learner={"waiting": 0.5}), "collectors_limit", "collector.count", "4"),
        (given(learner={"waiting": 0.6}), "collectors_limit", "collector.count", "5"),
        # 2 / (1 - 0.95) are 40, which is more than the machine has cores for.
        (given(learner={"waiting": 0.95}, settings={"cores": 16}), "collectors_limit", "collector.count", "16"),
        (given(learner={"waiting": 0.5}, settings={"cores": 16}), "collectors_limit", "collector.count", "4"),
        (given(learner={"waiting": 0.95}, settings={"cores": 2}), "collectors_limit", None, None),
        # What costs no learning comes first: 3 % of the learner's time goes to publishing.
        (given(collectors={"append_wait": 0.4}), "learner_limits", "learner.publish_every_updates", "20"),
        (
            given(collectors={"append_wait": 0.4}, learner={"publishing": 0.02, "checkpointing": 0.04}),
            "learner_limits",
            "learner.checkpoint.every_updates",
            "20000",
        ),
        (
            given(
                collectors={"append_wait": 0.4},
                learner={"publishing": 0.0},
                settings={"updates_per_step": None, "collector_count": 5},
            ),
            "learner_limits",
            "collector.count",
            "3",
        ),
        (
            given(
                collectors={"append_wait": 0.4},
                learner={"publishing": 0.0},
                settings={"updates_per_step": None, "collector_count": 1},
            ),
            "learner_limits",
            "learner.threads",
            "2",
        ),
        (
            given(collectors={"append_wait": 0.4}, learner={"waiting": 0.4}),
            "both_wait",
            "replay.tables.transitions.limiter.window_rows",
            "2000",
        ),
        (
            given(collectors={"append_wait": 0.4}, learner={"waiting": 0.4}, settings={"window_rows": None}),
            "both_wait",
            "replay.shards",
            "2",
        ),
    ],
)
def test_the_rule_that_holds_names_the_limit_the_setting_and_the_number(figures, rule, setting, value):
    advice = find_limit(figures)
    assert (advice.rule, advice.setting, advice.value) == (rule, setting, value)


def test_what_costs_learning_is_named_last_and_every_change_says_what_it_trades():
    figures = given(
        collectors={"append_wait": 0.4},
        learner={"publishing": 0.03, "checkpointing": 0.015, "waiting": 0.02},
        settings={"prefetch_batches": 4},
    )
    advice = find_limit(figures)
    settings = [advice.setting, *(option.setting for option in advice.further)]
    assert settings == [
        "learner.publish_every_updates",
        "learner.prefetch_batches",
        "learner.checkpoint.every_updates",
        "learner.threads",
        "learner.updates_per_step",
    ]
    trades = [advice.trades, *(option.trades for option in advice.further)]
    assert all("costs no learning" in each for each in trades[:-1])
    assert "trades learning for speed" in trades[-1]
    assert advice.further[-1].value == "0.6"
    assert "Then set learner.updates_per_step=0.6 (now 1). That one trades" in str(advice)
    # From a ring of its own a learner draws when it wants, and what takes next to no time is not named.
    quick = find_limit(given(collectors={"append_wait": 0.4}, learner={"publishing": 0.009, "waiting": 0.3}))
    assert [quick.setting, *(option.setting for option in quick.further)] == settings[-2:]


def test_a_bound_is_named_before_what_it_hides():
    figures = given(settings=BOUND, starved_share=0.2, learner={"waiting": 0.6}, collectors={"lag_pause": 0.5})
    assert find_limit(figures).rule == "starved_by_bound"


def test_a_share_at_the_edge_of_a_rule_does_not_fire_it():
    figures = given(
        learner={"publishing": 0.1, "waiting": 1 / 3}, collectors={"append_wait": 0.1, "snapshot_apply": 0.1}
    )
    assert find_limit(figures).rule == "balanced"


def test_an_interval_that_is_advised_brings_synchronisation_down_to_the_edge():
    for share in (0.11, 0.2, 0.5, 0.9):
        advice = find_limit(given(learner={"publishing": share}))
        rarer = int(advice.value) / SETTINGS.publish_every_updates
        assert share / rarer / (1 - share + share / rarer) <= 0.1 + 1e-9


def mostly(part: str, versions: float, **changes) -> Figures:
    return given(part_versions={**dict.fromkeys(BALANCED.part_versions, 100.0), part: versions}, **changes)


@pytest.mark.parametrize(
    ("figures", "rule", "setting", "value"),
    [
        (replace(BALANCED, training_lag=None), "lag_not_measured", None, None),
        (replace(BALANCED, part_versions={}), "lag_not_measured", None, None),
        (replace(BALANCED, part_versions={"residence": 0.0}), "no_lag", None, None),
        (given(settings={"injected": "fixed"}), "injected", "lag.inject.mode", "none"),
        (mostly("unattributed", 9_000.0), "unattributed", None, None),
        (mostly("transfer", 900.0), "transfer", None, None),
        (mostly("transfer", 2_500.0), "transfer", "learner.publish_every_updates", "30"),
        # A version is there for 10 / 200 = 0.05 s, half of the seconds after which a block is sealed.
        (mostly("rollout", 2_500.0), "rollout", "collector.block_seconds", "0.05"),
        (mostly("rollout", 2_500.0, updates_per_second=20.0), "rollout", "learner.publish_every_updates", "30"),
        (mostly("rollout", 2_500.0, updates_per_second=None), "rollout", "learner.publish_every_updates", "30"),
        (mostly("queue", 2_000.0), "queue", "collector.max_blocks_in_flight", "2"),
        (mostly("queue", 1_000.0), "queue", None, None),
        (mostly("queue", 1_100.0), "queue", "collector.max_blocks_in_flight", "3"),
        (mostly("queue", 2_000.0, settings={"max_blocks_in_flight": 1}), "queue", "replay.shards", "2"),
        (mostly("residence", 39_000.0), "residence", "replay.tables.transitions.capacity_rows", "10000"),
        # 20,000 rows for twice 40 versions, and 8 are allowed.
        (
            mostly("residence", 40_000.0, settings=BOUND),
            "residence",
            "replay.tables.transitions.capacity_rows",
            "2000",
        ),
        (mostly("residence", 1_500.0, settings={"max_lag_versions": 90}), "residence", None, None),
        (
            mostly("residence", 4_000.0, settings={"is_queue": True}),
            "residence",
            "replay.tables.transitions.capacity_rows",
            "5000",
        ),
    ],
)
def test_the_part_that_makes_most_of_the_lag_names_the_setting_and_the_number(figures, rule, setting, value):
    advice = find_lag_cause(figures)
    assert (advice.rule, advice.setting, advice.value) == (rule, setting, value)


def test_the_paragraph_says_limit_lags_cause_and_what_the_bound_left_out():
    figures = given(
        settings=BOUND,
        learner={"waiting": 0.5},
        collectors={"append_wait": 0.004},
        skipped_rows=1_200.0,
        masked_rows=3.0,
        training_lag=Distribution(40.0, math.inf),
    )
    assert explain(figures).paragraph == (
        "This run is limited by collecting: the learner waits 50% of its time for rows, and collectors are hardly held "
        "back (they wait less than 1% of theirs). Set collector.count=4 (now 2). That needs cores for them, and costs "
        "no learning. More environments in each (collector.environments) need fewer. Rows are trained on 40 versions "
        "late at the median and more than the largest bucket's at the 99th percentile, and collectors act 0 versions "
        "late at the median and 1 at the 99th percentile. 98% of the lag is residence: rows waiting in the table (39 "
        "versions for a row on average, 4 s). Set replay.tables.transitions.capacity_rows=2051 (now 100000). That "
        "trades the variety of old rows for rows of newer policies. Then the oldest row stays within the bound. Of "
        "rows beyond the bound of "
        "8 versions, 1200 draws were skipped and 3 were made and had no weight."
    )


def test_a_run_of_which_nothing_is_known_is_explained_without_a_number():
    explanation = explain(Figures(SETTINGS))
    assert explanation.paragraph == (
        "What limits this run is not known: the learner and the collectors told of no time spent. Where the training "
        "lag comes from is not known: no row was attributed yet."
    )


def test_the_same_figures_give_the_same_words_and_every_advised_value_differs_from_the_present_one():
    for figures in (BALANCED, given(learner={"publishing": 0.2}), mostly("queue", 1_100.0)):
        first, second = explain(figures), explain(figures)
        assert first == second
        for advice in (first.limit, first.lag):
            assert advice.setting is None or advice.value != advice.before
        assert not re.search(r"  |\bNone\b|\bnan\b", first.paragraph)
