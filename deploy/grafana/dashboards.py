"""Writes the Grafana dashboards into the chart, where compose mounts them too.

    python deploy/grafana/dashboards.py [FOLDER]

Panels follow the way of a row: collect, replay, learn, publish.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from panels import COLUMNS, Board, Panel, Query, each, heat, panel, quantiles, rate, render, share, value

FOLDER = Path(__file__).parents[2] / "helm/paceline/files/dashboards"
STAT = 4
HALF = COLUMNS // 2

COLLECTOR, REPLAY, LEARNER, ENDPOINT, RELAY, EVALUATOR = (
    f"paceline_{service}_" for service in ("collector", "replay", "learner", "endpoint", "relay", "evaluator")
)
LAG = f"{LEARNER}training_lag_versions"
LEARNER_SECONDS, COLLECTOR_SECONDS = f"{LEARNER}activity_seconds_total", f"{COLLECTOR}activity_seconds_total"


def stat(title: str, query: Query, *, signed: bool = False, description: str = "") -> Panel:
    """One figure."""
    return panel(title, query, kind="stat", width=STAT, signed=signed, description=description)


def relay_panel(title: str, *queries: Query | list[Query]) -> Panel:
    """What is empty in a run without relays."""
    return panel(title, *queries, note="Empty where no relay runs.")


def sync_share() -> Panel:
    """What weight synchronisation costs both sides."""
    return panel(
        "Share of time spent on weight synchronisation",
        share(LEARNER_SECONDS, "activity", where='activity="publishing"', legend="learner: publishing"),
        share(COLLECTOR_SECONDS, "activity", where='activity="snapshot_apply"', legend="collectors: applying"),
        description="Time of the learner's loop that goes into publishing, and of the collectors' loops that goes into "
        "applying snapshots. Bad: above a tenth. Do: raise learner.publish_every_updates.",
    )


def activities(title: str, series: str) -> Panel:
    """What a loop spends its time on; the parts sum to 100 %."""
    return panel(title, share(series, "activity"), stacked=True)


def lag_quantiles() -> Panel:
    """Training lag, and the bound where there is one."""
    bound = value(f"{LEARNER}max_lag_versions")
    return panel("Training lag", quantiles(LAG, 0.5, 0.9, 0.99), Query(bound.expression, LAG, bound.unit, "bound"))


def alerts() -> Panel:
    """The alerts that fire."""
    query = Query(
        'sum by (alertname, severity) (ALERTS{alertname=~"Paceline.+", alertstate="firing"})', LAG, "none", ""
    )
    return panel(
        "Alerts that fire now",
        query,
        kind="table",
        description="Bad: any. Do: what docs/runbook.md says under its name. Empty while nothing fires.",
    )


def overview() -> Board:
    """Everything in one look."""
    return Board(
        "paceline-overview",
        "Paceline: overview",
        "Is the run going, how far do policies lag, and which side is the slow one?",
        [
            (
                "Now",
                [
                    stat("Collectors alive", value(f"{ENDPOINT}collectors", how="sum")),
                    stat("Environment steps of the run", value(f"{LEARNER}environment_steps")),
                    stat("Updates of the run", value(f"{LEARNER}step")),
                    stat("Updates per environment step", value(f"{LEARNER}update_ratio")),
                    stat("Training lag, p99", quantiles(LAG, 0.99)[0]),
                    stat("Age of the served snapshot", value(f"{ENDPOINT}snapshot_age_seconds")),
                ],
            ),
            (
                "Collect",
                [
                    panel("Environment steps per second", rate(f"{COLLECTOR}environment_steps_total", "instance")),
                    panel("Acting lag", quantiles(f"{COLLECTOR}acting_lag_versions", 0.5, 0.99)),
                    activities("Share of the collectors' time, by activity", COLLECTOR_SECONDS),
                ],
            ),
            (
                "Replay",
                [
                    panel("Rows stored per second", rate(f"{REPLAY}appended_rows_total", "table")),
                    panel("Rows in the tables", value(f"{REPLAY}table_rows", "table", how="sum")),
                    panel(
                        "Streams held back by the limiter", rate(f"{REPLAY}limiter_wait_seconds_total", "table", "side")
                    ),
                ],
            ),
            (
                "Learn",
                [
                    panel("Updates per second", rate(f"{LEARNER}updates_total")),
                    lag_quantiles(),
                    activities("Share of the learner's time, by activity", LEARNER_SECONDS),
                ],
            ),
            (
                "Publish",
                [
                    panel("Publish lag of each collector", value(f"{ENDPOINT}publish_lag_versions", "collector")),
                    sync_share(),
                    panel(
                        "Mean return",
                        value(f"{ENDPOINT}episode_return_mean"),
                        value(f"{ENDPOINT}evaluation_return_mean"),
                        signed=True,
                    ),
                ],
            ),
            (
                "Processes",
                [
                    panel("Processor time used per second", rate("process_cpu_seconds_total", "job", "instance")),
                    panel("Memory held", value("process_resident_memory_bytes", "job", "instance", how="sum")),
                    alerts(),
                ],
            ),
        ],
    )


def lag() -> Board:
    """How old the policies are that act and that are learned from, and why."""
    parts, seconds = f"{LEARNER}training_lag_part_versions_total", f"{LEARNER}row_part_seconds_total"
    trained = f"{LEARNER}trained_rows_total"
    return Board(
        "paceline-lag",
        "Paceline: lag",
        "How many versions lie between the policy that acts and the one in training, where they come from, and what "
        "the bound does about them.",
        [
            (
                "Training lag: rows that are trained on",
                [
                    lag_quantiles(),
                    panel("Distribution of training lag", heat(LAG), kind="heatmap"),
                    panel("Training lag in updates", quantiles(f"{LEARNER}training_lag_updates", 0.5, 0.99)),
                    panel("Age of rows", quantiles(f"{LEARNER}row_age_seconds", 0.5, 0.99)),
                    panel("Mean training lag of a row, by part", each(parts, trained, "part"), stacked=True),
                    panel("Mean way of a row, by part", each(seconds, trained, "part"), stacked=True),
                ],
            ),
            (
                "Acting lag and publish lag: collectors",
                [
                    panel("Acting lag", quantiles(f"{COLLECTOR}acting_lag_versions", 0.99, by="instance")),
                    panel("Acting lag in updates", quantiles(f"{COLLECTOR}acting_lag_updates", 0.5, 0.99)),
                    panel("Acting lag in seconds", quantiles(f"{COLLECTOR}acting_lag_seconds", 0.5, 0.99)),
                    panel("Publish lag of each collector", value(f"{ENDPOINT}publish_lag_versions", "collector")),
                    panel("Publish lag in updates", value(f"{ENDPOINT}publish_lag_updates", "collector")),
                    panel("Publish lag in seconds", value(f"{ENDPOINT}publish_lag_seconds", "collector")),
                    panel("Lag at polls", quantiles(f"{ENDPOINT}poll_lag_versions", 0.5, 0.99)),
                    panel(
                        "Policy versions, published and applied",
                        value(f"{ENDPOINT}published_version"),
                        value(f"{ENDPOINT}applied_version", "collector"),
                    ),
                    panel("Age of the served snapshot", value(f"{ENDPOINT}snapshot_age_seconds")),
                ],
            ),
            (
                "The bound: lag.max_lag_versions",
                [
                    panel("Collectors paused by the bound", value(f"{COLLECTOR}paused", "instance")),
                    panel("Pauses by the bound per second", rate(f"{COLLECTOR}pauses_total", "instance")),
                    panel(
                        "Rows over the bound per row trained on",
                        each(f"{LEARNER}skipped_rows_total", trained, legend="skipped"),
                        each(f"{LEARNER}masked_rows_total", trained, legend="weight 0"),
                    ),
                    panel("Time without a batch within the bound", rate(f"{LEARNER}starved_seconds_total")),
                ],
            ),
            (
                "What it costs, and how exact it is",
                [
                    sync_share(),
                    panel(
                        "Offsets of clocks",
                        value(f"{COLLECTOR}clock_offset_seconds", "instance"),
                        value(f"{LEARNER}replay_clock_offset_seconds", "shard"),
                        signed=True,
                    ),
                    panel(
                        "Uncertainty of clock offsets",
                        value(f"{COLLECTOR}clock_uncertainty_seconds", "instance"),
                        value(f"{LEARNER}replay_clock_uncertainty_seconds", "shard"),
                    ),
                ],
            ),
        ],
    )


def replay() -> Board:
    """Tables, the limiter and the record."""
    return Board(
        "paceline-replay",
        "Paceline: replay",
        "What comes in, what goes out, which side is held back, and how the record in Redis is doing.",
        [
            (
                "In and out",
                [
                    panel("Rows stored per second", rate(f"{REPLAY}appended_rows_total", "table")),
                    panel("Rows drawn per second", rate(f"{REPLAY}sampled_rows_total", "table")),
                    panel("Rows sent to followers per second", rate(f"{REPLAY}followed_rows_total", "table")),
                    panel(
                        "Bytes per second, in and out",
                        rate(f"{REPLAY}appended_payload_bytes_total", legend="stored"),
                        rate(f"{REPLAY}sampled_bytes_total", legend="drawn"),
                        rate(f"{REPLAY}followed_bytes_total", legend="followed"),
                    ),
                    panel("Rows of queues consumed per second", rate(f"{REPLAY}consumed_rows_total", "table")),
                    panel("Rows dropped by full queues per second", rate(f"{REPLAY}dropped_rows_total", "table")),
                ],
            ),
            (
                "Tables",
                [
                    panel(
                        "Rows in the tables, and what they can hold",
                        value(f"{REPLAY}table_rows", "table", how="sum"),
                        value(f"{REPLAY}table_capacity_rows", "table", how="sum"),
                    ),
                    panel("Memory of the tables", value(f"{REPLAY}table_memory_bytes", "table", how="sum")),
                    panel("Tables that are whole", value(f"{REPLAY}table_whole", "table", "instance", how="min")),
                    panel("Rows removed per second", rate(f"{REPLAY}removed_rows_total", "table")),
                    panel(
                        "Priorities set per second",
                        rate(f"{REPLAY}updated_priorities_total", "table"),
                        rate(f"{REPLAY}unknown_priorities_total", "table", legend="{{table}}: row had left"),
                    ),
                    panel("Blocks refused per second", rate(f"{REPLAY}refused_blocks_total", "reason")),
                ],
            ),
            (
                "Limiter and streams",
                [
                    panel(
                        "Streams held back by the limiter", rate(f"{REPLAY}limiter_wait_seconds_total", "table", "side")
                    ),
                    panel(
                        "Waits that ended at the deadline, per second",
                        rate(f"{REPLAY}limiter_timeouts_total", "table", "side"),
                    ),
                    panel(
                        "Open streams",
                        value(f"{REPLAY}open_streams", "rpc", how="sum"),
                        value(f"{REPLAY}shared_memory_streams", "rpc", how="sum", legend="{{rpc}}, through memory"),
                    ),
                    activities("Share of the streams' time, by activity", f"{REPLAY}activity_seconds_total"),
                ],
            ),
            (
                "The record in Redis",
                [
                    panel("Time until Redis has a block", quantiles(f"{REPLAY}redis_append_seconds", 0.5, 0.99)),
                    panel("Redis takes commands", value(f"{REPLAY}redis_available", "instance", how="min")),
                    panel(
                        "Bytes in Redis",
                        value(f"{REPLAY}table_log_bytes", "table", how="sum"),
                        value(f"{REPLAY}redis_used_bytes", legend="used by all"),
                        value(f"{REPLAY}redis_max_bytes", legend="maxmemory"),
                    ),
                    panel("Pages of priorities not yet saved", value(f"{REPLAY}unsaved_pages", "table", how="sum")),
                    panel(
                        "Signs of loss per second",
                        rate(f"{REPLAY}sequence_gaps_total", legend="sequence gaps"),
                        rate(f"{REPLAY}damaged_blocks_total", legend="damaged blocks"),
                        rate(f"{REPLAY}rewritten_blocks_total", legend="rewritten blocks"),
                        rate(f"{REPLAY}duplicate_blocks_total", legend="duplicate blocks"),
                        unit="suffix: events/s",
                    ),
                    panel("Time of the last restore", value(f"{REPLAY}restore_seconds", "instance")),
                ],
            ),
        ],
    )


def learner() -> Board:
    """The training loop, where its rows come from, and what it serves."""
    return Board(
        "paceline-learner",
        "Paceline: learner",
        "What the training loop spends its time on, and how its snapshots leave.",
        [
            (
                "Learn",
                [
                    panel("Updates per second", rate(f"{LEARNER}updates_total")),
                    panel("Updates per environment step", value(f"{LEARNER}update_ratio")),
                    activities("Share of the learner's time, by activity", LEARNER_SECONDS),
                    panel("Rows trained on per second", rate(f"{LEARNER}trained_rows_total")),
                    panel("Updates that were not finite, per second", rate(f"{LEARNER}non_finite_total")),
                    panel("Time of a checkpoint", quantiles(f"{LEARNER}checkpoint_seconds", 0.5, 0.99)),
                ],
            ),
            (
                "Where rows come from",
                [
                    panel(
                        "Rows held",
                        value(f"{LEARNER}replay_rows"),
                        value(f"{LEARNER}ring_rows", "shard", how="sum"),
                    ),
                    panel("Rows behind the followed table", value(f"{LEARNER}follow_behind_rows", "shard")),
                    panel("Streams of rows cut per second", rate(f"{LEARNER}sample_failures_total", "reason")),
                    panel(
                        "Batches without a shard per second",
                        rate(f"{LEARNER}shard_skips_total", "shard"),
                        note="Empty where replay has one shard.",
                    ),
                    panel(
                        "Priorities sent per second",
                        rate(f"{LEARNER}priority_updates_total", legend="taken"),
                        rate(f"{LEARNER}priority_updates_dropped_total", legend="dropped"),
                    ),
                ],
            ),
            (
                "Publish",
                [
                    panel("Time of a publication", quantiles(f"{LEARNER}snapshot_publish_seconds", 0.5, 0.99)),
                    panel(
                        "Time until a version is durable", quantiles(f"{ENDPOINT}snapshot_durable_seconds", 0.5, 0.99)
                    ),
                    panel(
                        "Policy version, made and served",
                        value(f"{LEARNER}policy_version"),
                        value(f"{ENDPOINT}published_version"),
                    ),
                    panel("Polls answered per second", rate(f"{ENDPOINT}polls_total", "result")),
                    panel("Polls that wait", value(f"{ENDPOINT}waiting_polls", how="sum")),
                    panel("Bytes of snapshots sent per second", rate(f"{ENDPOINT}snapshot_sent_bytes_total")),
                    panel("Snapshots skipped per second", rate(f"{ENDPOINT}skipped_snapshots_total")),
                    activities("Share of the endpoint's time, by activity", f"{ENDPOINT}activity_seconds_total"),
                    panel("Episodes reported per second", rate(f"{ENDPOINT}episodes_total")),
                ],
            ),
            (
                "Relays",
                [
                    relay_panel(
                        "Delay from publication to a relay", quantiles(f"{RELAY}publish_delay_seconds", 0.5, 0.99)
                    ),
                    relay_panel("Versions that a relay is behind", value(f"{RELAY}behind_versions", "instance")),
                    relay_panel("Silence of what a relay polls", value(f"{RELAY}upstream_silence_seconds", "instance")),
                    relay_panel("Polls of relays per second", rate(f"{RELAY}upstream_polls_total", "result")),
                    relay_panel(
                        "Bytes sent by relays per second", rate(f"{RELAY}snapshot_sent_bytes_total", "instance")
                    ),
                    relay_panel("Collectors below relays", value(f"{RELAY}collectors", "instance")),
                ],
            ),
        ],
    )


def collectors() -> Board:
    """Collectors one by one, and the evaluator, which acts as they do."""
    return Board(
        "paceline-collectors",
        "Paceline: collectors",
        "What each collector does, how its snapshots come in and its rows go out; the evaluator beside them.",
        [
            (
                "Collect",
                [
                    panel("Environment steps per second", rate(f"{COLLECTOR}environment_steps_total", "instance")),
                    activities("Share of the collectors' time, by activity", COLLECTOR_SECONDS),
                    panel("Episodes per second", rate(f"{COLLECTOR}episodes_total", "instance")),
                    panel(
                        "Mean return of episodes",
                        each(f"{COLLECTOR}episode_return_sum", f"{COLLECTOR}episode_return_count"),
                        signed=True,
                    ),
                    panel("Environment faults per second", rate(f"{COLLECTOR}environment_faults_total", "instance")),
                    panel("Rows dropped per second", rate(f"{COLLECTOR}rows_dropped_total", "instance")),
                ],
            ),
            (
                "Snapshots in",
                [
                    panel(
                        "Policy version, known and applied",
                        value(f"{COLLECTOR}known_version", "instance"),
                        value(f"{COLLECTOR}applied_version", "instance"),
                    ),
                    panel(
                        "Time of a snapshot, p99",
                        quantiles(f"{COLLECTOR}snapshot_fetch_seconds", 0.99, by="instance"),
                        quantiles(f"{COLLECTOR}snapshot_stage_seconds", 0.99, by="instance"),
                        quantiles(f"{COLLECTOR}snapshot_apply_seconds", 0.99, by="instance"),
                    ),
                    panel("Age of the newest snapshot known", value(f"{COLLECTOR}snapshot_age_seconds", "instance")),
                    panel(
                        "Failures of snapshots per second",
                        rate(f"{COLLECTOR}snapshot_apply_failures_total", "instance", legend="apply {{instance}}"),
                        rate(f"{COLLECTOR}snapshot_poll_failures_total", "instance", legend="poll {{instance}}"),
                        unit="suffix: failures/s",
                    ),
                ],
            ),
            (
                "Rows out",
                [
                    panel("Rows acknowledged per second", rate(f"{COLLECTOR}rows_appended_total", "instance")),
                    panel("Bytes sent per second", rate(f"{COLLECTOR}bytes_appended_total", "instance")),
                    panel("Time until a block is acknowledged", quantiles(f"{COLLECTOR}append_seconds", 0.5, 0.99)),
                    panel("Blocks in flight", value(f"{COLLECTOR}blocks_in_flight", "instance")),
                    panel("Streams of appends cut per second", rate(f"{COLLECTOR}append_failures_total", "reason")),
                    panel(
                        "Reports that went wrong per second",
                        rate(f"{COLLECTOR}report_failures_total", legend="late"),
                        rate(f"{COLLECTOR}episodes_unreported_total", legend="episodes left out"),
                        unit="suffix: events/s",
                    ),
                ],
            ),
            (
                "Evaluate",
                [
                    panel("Mean return of evaluations", value(f"{EVALUATOR}mean_return"), signed=True),
                    panel("Time of an evaluation", quantiles(f"{EVALUATOR}evaluation_seconds", 0.5, 0.99)),
                    activities("Share of the evaluator's time, by activity", f"{EVALUATOR}activity_seconds_total"),
                ],
            ),
        ],
    )


def main(folder: Path) -> None:
    """Write every dashboard into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for board in (overview(), lag(), replay(), learner(), collectors()):
        path = folder / f"{board.uid.removeprefix('paceline-')}.json"
        path.write_text(json.dumps(render(board), indent=2) + "\n", encoding="utf-8")
        print(f"{path}: {sum(len(section) for _, section in board.sections)} panels")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
