"""Which of the metrics tell of lag: what `lag.json` keeps, and what is asked of Prometheus."""

from __future__ import annotations

from paceline.schema import METRICS, Metric

TRAINING_LAG = "paceline_learner_training_lag_{}"
ACTING_LAG = "paceline_collector_acting_lag_{}"
"""Both in versions and updates; acting lag in seconds, too."""
ROW_AGE = "paceline_learner_row_age_seconds"
PART_VERSIONS = "paceline_learner_training_lag_part_versions_total"
PART_SECONDS = "paceline_learner_row_part_seconds_total"

STARTS_AND_ENDS = frozenset({"starting", "finishing"})
"""Activities before and after a loop's turns: no share of a step."""
SYNC_ACTIVITIES = ("publishing", "snapshot_apply")
"""What counts as weight synchronisation in the loops of learner and collectors."""

_ALSO = frozenset({
    ROW_AGE,
    PART_SECONDS,
    "paceline_learner_trained_rows_total",
    "paceline_learner_skipped_rows_total",
    "paceline_learner_masked_rows_total",
    "paceline_learner_max_lag_versions",
    "paceline_learner_starved_seconds_total",
    "paceline_learner_workable_lag_versions",
    "paceline_replay_skipped_rows_total",
    "paceline_learner_replay_clock_offset_seconds",
    "paceline_learner_replay_clock_uncertainty_seconds",
    "paceline_learner_activity_seconds_total",
    "paceline_learner_updates_total",
    "paceline_learner_step",
    "paceline_learner_environment_steps",
    "paceline_learner_policy_version",
    "paceline_learner_replay_rows",
    "paceline_endpoint_applied_version",
    "paceline_endpoint_collectors",
    "paceline_endpoint_paused_collectors",
    "paceline_endpoint_published_version",
    "paceline_endpoint_snapshot_age_seconds",
    "paceline_collector_activity_seconds_total",
    "paceline_collector_clock_offset_seconds",
    "paceline_collector_clock_uncertainty_seconds",
    "paceline_collector_environment_steps_total",
    "paceline_collector_paused",
    "paceline_collector_pauses_total",
    "paceline_replay_table_rows",
    "paceline_replay_table_capacity_rows",
})  # fmt: skip

KEPT: dict[str, Metric] = {
    series: metric for name, metric in METRICS.items() if "_lag_" in name or name in _ALSO for series in metric.series
}
"""Each series that tells of lag, with its metric."""

SUMMED = frozenset(series for series, metric in KEPT.items() if metric.kind != "gauge")
"""Those that only grow within a process, so that restarts and processes add up."""

SHOWN = frozenset({
    *(series for series in SUMMED if "_lag_versions" in series),
    PART_VERSIONS,
    *(name for name in _ALSO if "_clock_" not in name and "row_part" not in name and "row_age" not in name),
    "paceline_learner_update_ratio",
    "paceline_endpoint_episode_return_mean",
    "paceline_endpoint_evaluation_return_mean",
    "paceline_replay_limiter_wait_seconds_total",
})  # fmt: skip
"""What the live table shows."""
