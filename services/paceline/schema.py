"""Every metric that Paceline serves: what it counts, in which unit, who serves it, and what a bad value is.

The schema is closed: a service serves what is here and nothing else, and dashboards and alert rules may name only what
is here. Tests hold both. It imports nothing, so that whoever writes dashboards or documents may read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["counter", "gauge", "histogram", "summary"]
Owner = Literal["every process", "replay", "learner", "endpoint", "relay", "collector", "evaluator"]
Unit = Literal[
    "rows", "blocks", "bytes", "pages", "versions", "updates", "steps", "seconds", "episodes", "return", "snapshots",
    "collectors", "streams", "polls", "times", "ratio", "flag", "count",
]  # fmt: skip
"""`flag` is 0 or 1; `times` counts events; `return` is in units of the environment's reward."""

OWNERS: tuple[Owner, ...] = get_args(Owner)
_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}


@dataclass(frozen=True)
class Label:
    """A label, and why its values are few: they are a closed set, or a setting bounds their number."""

    name: str
    values: tuple[str, ...] = ()
    """Every value there is; empty where `bound` says how many there may be."""
    bound: str = ""


@dataclass(frozen=True)
class Metric:
    """One metric, by its full name; for a counter that includes `_total`."""

    name: str
    kind: Kind
    unit: Unit
    owner: Owner
    labels: tuple[Label, ...]
    meaning: str
    bad: str
    """What a bad value is, in words that follow "Bad:"."""
    remedy: str
    """What to do then, in words that follow "Do:"."""

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus keeps it."""
        return tuple(self.name + suffix for suffix in _SUFFIXES[self.kind])


_TABLE = Label("table", bound="tables declared in replay.tables")
_SIDE = Label("side", ("insert", "sample"))
_SHARD = Label("shard", bound="replay.shards")
_COLLECTOR = Label("collector", bound="collector.max_count; a series ends after learner.silence_seconds")
_ERROR = Label("reason", bound="error classes of paceline.errors")
_PART = Label("part", ("transfer", "rollout", "queue", "residence", "unattributed"))

_Make = Callable[..., Metric]


def _makers(owner: Owner, prefix: str) -> tuple[_Make, _Make, _Make]:
    """Makers of an owner's counters, gauges and histograms; each takes name, unit, meaning, labels, `bad` and `do`."""

    def maker(kind: Kind) -> _Make:
        def make(name: str, unit: Unit, meaning: str, *labels: Label, bad: str, do: str) -> Metric:
            return Metric(prefix + name, kind, unit, owner, labels, meaning, bad, do)

        return make

    return maker("counter"), maker("gauge"), maker("histogram")


# The tables below are laid out by hand: name, unit and meaning, then what is bad and what to do.
# fmt: off
def _process() -> list[Metric]:
    counter, gauge, _ = _makers("every process", "")
    return [
        gauge("paceline_build_info", "flag", "Always 1; the labels say what runs.",
              Label("version", bound="one for each process"),
              Label("service", ("replay", "learner", "endpoint", "relay", "collector", "evaluator")),
              bad="two versions at once, for longer than an upgrade takes", do="upgrade what was left behind"),
        counter("process_cpu_seconds_total", "seconds", "Processor time of the process.",
                bad="a rate far above its compute threads", do="look for other processes on its cores; set threads"),
        gauge("process_resident_memory_bytes", "bytes", "Memory that the process holds.",
              bad="growing without end after the tables are full", do="compare with table_memory_bytes; restart it"),
        gauge("process_virtual_memory_bytes", "bytes", "Address space of the process.",
              bad="none by itself", do="look at resident memory instead"),
        gauge("process_start_time_seconds", "seconds", "When the process started, in seconds since 1970.",
              bad="changing often", do="read why it ended in the log of the one before"),
        gauge("process_open_fds", "count", "Files and connections that are open.",
              bad="near process_max_fds, or growing without end", do="raise the limit of open files; restart it"),
        gauge("process_max_fds", "count", "Files and connections that may be open.",
              bad="below some hundreds", do="raise the limit of open files"),
    ]


def _replay() -> list[Metric]:
    counter, gauge, histogram = _makers("replay", "paceline_replay_")
    restore = "check the disk and the settings of Redis with `paceline replay inspect RUN --check`"
    return [
        counter("appended_rows_total", "rows", "Rows stored.", _TABLE,
                bad="flat while collectors run: they are held back", do="see which side waits for the limiter"),
        counter("appended_blocks_total", "blocks", "Blocks stored.", _TABLE,
                bad="far more than rows divided by collector.block_rows", do="raise collector.block_seconds"),
        counter("appended_bytes_total", "bytes", "Bytes of rows stored.", _TABLE,
                bad="near what memory or network carries", do="add shards"),
        counter("appended_payload_bytes_total", "bytes",
                "Bytes of blocks as collectors sent them and Redis has them.", _TABLE,
                bad="above the bytes of rows", do="send larger blocks: raise collector.block_rows"),
        counter("duplicate_blocks_total", "blocks", "Blocks that were stored already when they came.", _TABLE,
                bad="a steady rate: answers are lost", do="check the network between collectors and replay"),
        counter("refused_blocks_total", "blocks", "Blocks refused, by reason.",
                Label("reason", ("malformed", "row_spec", "run", "table", "replaced", "store_full", "store_read_only",
                                 "unavailable", "limiter", "other")),
                bad="anything but limiter and unavailable", do="read the collector's log: it has the whole reason"),
        counter("sequence_gaps_total", "times", "Times that blocks of a collector were missing before the next.",
                _TABLE, bad="above 0: Redis lost stored rows", do=restore),
        counter("damaged_blocks_total", "blocks", "Damaged or missing blocks that the restore left out.", _TABLE,
                bad="above 0", do=restore),
        counter("damaged_pages_total", "pages", "Damaged pages of priorities that the restore left out.", _TABLE,
                bad="above 0; their rows count as new", do=restore),
        counter("rewritten_blocks_total", "blocks", "Blocks written again, since Redis lost them.", _TABLE,
                bad="above 0: Redis has crashed", do="find out why; use appendfsync always to lose nothing"),
        counter("removed_rows_total", "rows", "Rows that left because the table was full.", _TABLE,
                bad="none by itself: normal in a long run", do="raise capacity_rows to keep rows for longer"),
        counter("skipped_rows_total", "rows",
                "Draws that gave a row over lag.max_lag_versions, in whose place another was drawn: one row counts as "
                "often as it was drawn. Only of tables drawn by priority or age; of the others the learner counts.",
                _TABLE,
                bad="a rate above that of sampled rows: most of what is drawn is too old",
                do="lower capacity_rows, or raise the bound"),
        counter("sampled_rows_total", "rows", "Rows that replay drew for learners.", _TABLE,
                bad="flat while a learner that samples runs", do="see which side waits for the limiter"),
        counter("sampled_bytes_total", "bytes", "Bytes of rows drawn.", _TABLE,
                bad="near what the network carries", do="follow the table instead: replay.read"),
        counter("followed_rows_total", "rows", "Rows sent to followers.", _TABLE,
                bad="behind the appended rows for long", do="see what the learner spends its time on"),
        counter("followed_bytes_total", "bytes", "Bytes of rows sent to followers.", _TABLE,
                bad="near what the network carries", do="bring learner and replay closer, or add shards"),
        counter("consumed_rows_total", "rows", "Rows of a queue that its follower consumed.", _TABLE,
                bad="flat while rows come", do="see what the learner spends its time on"),
        counter("dropped_rows_total", "rows",
                "Rows that a full queue dropped before anybody learned from them.", _TABLE,
                bad="above a twentieth of the appended rows", do="use fewer collectors, or overflow: block"),
        counter("replaced_followers_total", "times", "Followers that a newer one took over from.", _TABLE,
                bad="growing: two learners take turns", do="stop one of them"),
        counter("updated_priorities_total", "rows", "Rows whose priority was set.", _TABLE,
                bad="flat while a learner of a prioritised table runs", do="read the learner's log"),
        counter("unknown_priorities_total", "rows", "Priorities that came for rows that had left.", _TABLE,
                bad="near the updated ones: rows leave before they are learned from", do="raise capacity_rows"),
        counter("saved_pages_total", "pages", "Pages of priorities and times sampled, written to Redis.", _TABLE,
                bad="flat while priorities are set", do="check that Redis takes commands"),
        gauge("unsaved_pages", "pages", "Pages of priorities that Redis does not have yet.", _TABLE,
              bad="growing: a crash would lose them", do="give Redis a faster disk"),
        gauge("table_rows", "rows", "Rows in the table now.", _TABLE,
              bad="falling to 0 in a run", do="read replay's log: what was restored"),
        gauge("table_capacity_rows", "rows", "Rows that the table can hold.", _TABLE,
              bad="below what the algorithm wants", do="raise capacity_rows"),
        gauge("table_memory_bytes", "bytes", "Memory set aside for the table's rows.", _TABLE,
              bad="near the memory of the machine", do="lower capacity_rows or capacity_bytes, or add shards"),
        gauge("table_log_bytes", "bytes", "Bytes of the table's blocks in Redis.", _TABLE,
              bad="near redis_max_bytes", do="raise maxmemory, or lower capacity_rows"),
        gauge("table_whole", "flag", "1 when all rows of the table are in memory; appends wait for it.", _TABLE,
              bad="0 for longer than a restore takes", do="read replay's log"),
        gauge("table_settings_differ", "flag", "1 when the table's record was begun with other settings.", _TABLE,
              bad="1, unless it was meant; the current settings hold", do="compare the settings"),
        counter("limiter_wait_seconds_total", "seconds", "Seconds that the limiter held streams back, by side.",
                _TABLE, _SIDE, bad="both sides at once; the side that waits most is the faster one",
                do="add to the side that does not wait"),
        counter("limiter_timeouts_total", "times", "Waits for the limiter that ended at their deadline.",
                _TABLE, _SIDE, bad="growing on both sides at once", do="widen limiter.window_rows"),
        histogram("redis_append_seconds", "seconds", "Seconds until Redis had the blocks of a step.",
                  bad="a p99 above 0.1: collectors wait", do="give Redis a faster disk, or appendfsync everysec"),
        gauge("redis_used_bytes", "bytes", "Memory that Redis uses, for rows, their index and all else.",
              bad="close to redis_max_bytes", do="raise maxmemory, or lower capacity_rows"),
        gauge("redis_max_bytes", "bytes", "maxmemory of Redis; 0 where it has none.",
              bad="below what the tables are to hold", do="raise maxmemory, or lower capacity_rows"),
        gauge("redis_available", "flag",
              "1 while Redis answers, even if it is full or refuses writes: then blocks are refused as store_full or "
              "store_read_only. 0 until it answered first.",
              bad="0, appends wait for it", do="see whether Redis is up, reachable, and has loaded its data"),
        gauge("open_streams", "streams", "Streams open now.", Label("rpc", ("Append", "Sample", "Follow")),
              bad="at replay.max_streams: further ones are refused", do="raise replay.max_streams"),
        gauge("shared_memory_streams", "streams",
              "Streams open now for whose rows client and replay share memory; small blocks do without it.",
              Label("rpc", ("Append", "Sample")),
              bad="0 where client and replay run side by side on one machine: rows go through a connection, which is "
              "slower", do="have clients call a loopback address, as the same user and not in containers of their own"),
        gauge("restore_seconds", "seconds", "How long the restore took when this process began.",
              bad="above what a restart may cost", do="lower capacity_rows, or add shards"),
        counter("activity_seconds_total", "seconds", "Seconds of the streams' threads, by what they did.",
                Label("activity", ("receive", "check", "limiter", "store", "memory", "credit", "gather", "send",
                                   "idle", "read")),
                bad="mostly store: Redis bounds the insert rate", do="give Redis a faster disk, or add shards"),
    ]


def _learner() -> list[Metric]:
    counter, gauge, histogram = _makers("learner", "paceline_learner_")
    return [
        counter("updates_total", "updates", "Optimiser updates since this process started.",
                bad="a rate of 0 while rows arrive", do="see what the learner spends its time on; read its log"),
        counter("passed_over_batches_total", "times",
                "Batches not trained on: the run's steps did not ask for an update yet.",
                bad="growing while no shard is behind the others", do="see which shard its collectors leave behind"),
        gauge("step", "updates", "Updates of the run, over all incarnations.",
              bad="standing still while rows arrive", do="see what the learner spends its time on"),
        gauge("environment_steps", "steps", "Environment steps of the run, as stored by replay.",
              bad="standing still", do="look at the collectors"),
        gauge("policy_version", "versions", "Version of the newest snapshot handed to the endpoint.",
              bad="unchanged while updates go on", do="lower learner.publish_every_updates"),
        gauge("update_ratio", "ratio", "Updates per environment step since learning started.",
              bad="off learner.updates_per_step", do="see which side waits; the other one is the slow one"),
        gauge("replay_rows", "rows", "Rows in the table that is learned from, as of the last batch.",
              bad="far below the table's capacity after a long run", do="read replay's log"),
        gauge("follow_behind_rows", "rows", "Rows that replay stored and the following learner has not received.",
              _SHARD, bad="growing", do="see what the learner spends its time on; check the network"),
        gauge("ring_rows", "rows", "Rows that the following learner holds itself.", _SHARD,
              bad="far below the rows of replay's table", do="wait for the catch-up, or read the learner's log"),
        histogram("training_lag_versions", "versions",
                  "Learner's version minus the row's, for each row trained on; rows with weight 0 left out.",
                  bad="a p99 that grows without end, or above what the algorithm bears",
                  do="see its parts: the largest names what to change"),
        histogram("training_lag_updates", "updates",
                  "Updates between the policy that acted and the one in training, for each row trained on.",
                  bad="growing without end", do="see the parts of the training lag"),
        histogram("row_age_seconds", "seconds",
                  "Seconds since a row was collected, when it is trained on; rows of which it is not known left out.",
                  bad="far above capacity divided by the insert rate", do="see the parts of the training lag"),
        counter("trained_rows_total", "rows", "Rows trained on; rows with weight 0 left out.",
                bad="a rate of 0 while rows arrive", do="see what the learner spends its time on"),
        counter("training_lag_part_versions_total", "versions",
                "Training lag of all rows trained on, by what its versions were published during.", _PART,
                bad="transfer or queue above residence; unattributed for long after a start",
                do="transfer: smaller or rarer snapshots; rollout: smaller blocks; queue: a faster replay"),
        counter("row_part_seconds_total", "seconds",
                "Seconds from publication to training of all rows trained on, by where they passed.", _PART,
                bad="transfer or queue above residence", do="as for the parts in versions"),
        counter("skipped_rows_total", "rows",
                "Draws, not distinct rows: how many of rows over lag.max_lag_versions would have come with those made, "
                "had the bound not kept them from it; one row counts again and again.",
                bad="a rate above that of rows trained on: over half of the table is over the bound",
                do="lower capacity_rows, or raise the bound"),
        counter("masked_rows_total", "rows",
                "Draws, not distinct rows, of rows over lag.max_lag_versions that were made and got weight 0.",
                bad="above a hundredth of the rows trained on", do="fewer batches in flight: learner.prefetch_batches"),
        gauge("max_lag_versions", "versions", "The bound, lag.max_lag_versions; absent without one.",
              bad="below publish lag: collectors pause all the time", do="raise it to what the run can hold"),
        counter("starved_seconds_total", "seconds", "Seconds without a batch that the bound lets through.",
                bad="growing", do="set lag.max_lag_versions to paceline_learner_workable_lag_versions"),
        gauge("workable_lag_versions", "versions",
              "The smallest lag.max_lag_versions, not below the one in force, under which less than 1 % of the time so "
              "far would have been starved, if nothing else changed; absent where the bound never starved.",
              bad="above the bound in force", do="set lag.max_lag_versions to it, or have collectors act sooner"),
        gauge("replay_clock_offset_seconds", "seconds", "Replay's clock minus the learner's, estimated.", _SHARD,
              bad="seconds; attribution corrects for it, logs do not", do="synchronise the clocks of the hosts"),
        gauge("replay_clock_uncertainty_seconds", "seconds", "How far the estimated offset may be off.", _SHARD,
              bad="above the time between two snapshots: parts blur", do="bring the hosts closer"),
        counter("non_finite_total", "times",
                "Updates of the run whose loss, gradient or weights were NaN or infinite; each ends the learner.",
                bad="above 0", do="look at the rewards; resume with lower learning rates"),
        histogram("snapshot_publish_seconds", "seconds", "Seconds that the training loop spends on one snapshot.",
                  bad="above a tenth of the time between two", do="raise learner.publish_every_updates"),
        histogram("checkpoint_seconds", "seconds", "Seconds that one checkpoint takes.",
                  bad="above the grace period of a stop", do="use a faster disk, or rarer checkpoints"),
        counter("activity_seconds_total", "seconds", "Seconds of the training loop, by what it did.",
                Label("activity", ("starting", "waiting", "updating", "publishing", "checkpointing", "recording",
                                   "finishing")),
                bad="waiting above a third while updates are wanted; publishing above a tenth",
                do="waiting: more collectors; publishing: raise learner.publish_every_updates"),
        counter("sample_failures_total", "times", "Times that a stream of rows was cut and opened again, by reason.",
                _ERROR, bad="a steady rate", do="read the learner's log; check the network and replay"),
        counter("shard_skips_total", "times", "Batches put together without rows of a shard that was away.", _SHARD,
                bad="growing for longer than the shard takes to start", do="start the shard again"),
        counter("priority_updates_total", "rows", "Rows whose new priority replay took.",
                bad="a rate of 0 while a learner of a prioritised table updates", do="read the learner's log"),
        counter("priority_updates_dropped_total", "rows", "Rows whose new priority was dropped.",
                bad="a steady rate: priorities are out of date", do="check replay: it is away or slow"),
    ]


def _polls(owner: Literal["endpoint", "relay"]) -> list[Metric]:
    counter, gauge, _ = _makers(owner, f"paceline_{owner}_")
    return [
        counter("polls_total", "polls", "Answered GetSnapshot calls, by result.",
                Label("result", ("snapshot", "not_modified", "refused", "unavailable", "cancelled")),
                bad="refused: a peer of another run or release", do=f"find the peer in the {owner}'s log"),
        gauge("waiting_polls", "polls", "GetSnapshot calls held until something newer is there.",
              bad="0 while collectors live", do=f"read a collector's log: does it reach the {owner}?"),
        gauge("sending_polls", "polls", "GetSnapshot calls that a snapshot is sent to now; each keeps it in memory.",
              bad="growing: readers are slower than snapshots come", do="start relays, or publish more rarely"),
        counter("snapshot_sent_bytes_total", "bytes", "Bytes of snapshots sent.",
                bad="near what the network carries", do="start relays, or raise learner.publish_every_updates"),
    ]


def _endpoint() -> list[Metric]:
    counter, gauge, histogram = _makers("endpoint", "paceline_endpoint_")
    return [
        *_polls("endpoint"),
        histogram("poll_lag_versions", "versions",
                  "Versions between the published one and the one a collector acts with, at each of its polls.",
                  bad="above 1 or 2 for long", do="raise learner.publish_every_updates: they come too fast"),
        histogram("snapshot_durable_seconds", "seconds", "Seconds until a published version is on disk and served.",
                  bad="above the time between two", do="use a faster disk for run.directory"),
        counter("skipped_snapshots_total", "snapshots", "Snapshots that a newer one replaced before they were served.",
                bad="growing: the disk is too slow", do="use a faster disk, or publish more rarely"),
        counter("episodes_total", "episodes", "Finished episodes that collectors reported.",
                bad="a rate of 0 for many times their length", do="look at the collectors"),
        counter("activity_seconds_total", "seconds", "Seconds of the loop that serves the training process.",
                Label("activity", ("waiting", "taking_snapshot", "recording")),
                bad="little waiting", do="publish more rarely, or raise learner.record_every_seconds"),
        gauge("published_version", "versions", "Policy version served now.",
              bad="standing still while rows arrive", do="look at the learner"),
        gauge("published_incarnation", "times", "Incarnation of the learner that published it.",
              bad="growing often", do="read why the learner ended in its log"),
        gauge("snapshot_age_seconds", "seconds", "Seconds since the served snapshot was published.",
              bad="growing far beyond the publish interval", do="the training process is stuck: read its log"),
        gauge("applied_version", "versions", "Policy version that a collector acts with, by its last poll.",
              _COLLECTOR, bad="standing still below the published one", do="read that collector's log"),
        gauge("publish_lag_versions", "versions", "Published version minus the one a collector acts with.",
              _COLLECTOR, bad="above 2 for long, or growing", do="see where the collector's fetch spends its time"),
        gauge("publish_lag_updates", "updates",
              "Learner updates between the published snapshot and the one a collector acts with.",
              _COLLECTOR, bad="growing", do="see where the collector's fetch spends its time"),
        gauge("publish_lag_seconds", "seconds", "Seconds since something newer than a collector acts with was there.",
              _COLLECTOR, bad="above the time between two snapshots", do="see where its fetch spends its time"),
        gauge("paused_collectors", "collectors", "Collectors that paused over the lag bound, at their last poll.",
              bad="above 0 for longer than a fetch takes", do="read the log of one that pauses; raise the bound"),
        gauge("collectors", "collectors", "Collectors heard within learner.silence_seconds.",
              bad="fewer than were started", do="look at those that are missing"),
        gauge("environment_steps", "steps", "Environment steps of the run, by snapshots and reports.",
              bad="standing still", do="look at the collectors"),
        gauge("episode_return_mean", "return", "Mean return of the last 100 episodes, under the exploring policy.",
              bad="falling for long", do="compare with the evaluation; look at lag and losses"),
        gauge("evaluation_version", "versions", "Policy version of the newest evaluation.",
              bad="far behind the published one", do="raise evaluator.every_versions, or lower its episodes"),
        gauge("evaluation_return_mean", "return", "Mean return of the newest evaluation.",
              bad="falling for long", do="look at lag and losses; lower the learning rates"),
    ]


def _relay() -> list[Metric]:
    counter, gauge, histogram = _makers("relay", "paceline_relay_")
    return [
        *_polls("relay"),
        counter("upstream_polls_total", "polls", "Polls that this relay made, by what came of them.",
                Label("result", ("snapshot", "not_modified", "older", "damaged", "failed")),
                bad="damaged, or failed for long", do="read the relay's log; look at what it polls"),
        counter("received_bytes_total", "bytes", "Bytes of snapshots received, damaged ones included.",
                bad="near what the network carries", do="raise learner.publish_every_updates"),
        histogram("fetch_seconds", "seconds", "Seconds from a snapshot's header until it is verified.",
                  bad="near the time between two snapshots", do="publish more rarely; check the network"),
        histogram("publish_delay_seconds", "seconds",
                  "Seconds from a snapshot's publication, by the learner's clock, until it is served here.",
                  bad="near the time between two snapshots", do="make the tree flatter, or publish more rarely"),
        gauge("served_version", "versions", "Policy version served now.",
              bad="below the published one for long", do="read the relay's log"),
        gauge("served_incarnation", "times", "Incarnation of the learner that published it.",
              bad="below the published one", do="read the relay's log"),
        gauge("behind_versions", "versions", "Newest version that upstream told of minus the one served.",
              bad="above 1 for long", do="see where fetch_seconds go"),
        gauge("snapshot_age_seconds", "seconds", "Seconds since the served snapshot was published.",
              bad="growing far beyond the publish interval", do="look at the learner and at what is polled"),
        gauge("upstream_silence_seconds", "seconds", "Seconds since upstream answered.",
              bad="above two relay.poll_seconds: it is away", do="read the relay's log; look at what it polls"),
        gauge("collectors", "collectors", "Collectors below this relay, heard within learner.silence_seconds.",
              bad="fewer than were started there", do="look at those that are missing"),
        gauge("clock_offset_seconds", "seconds", "The learner's clock minus this host's; absent until known.",
              bad="changing by leaps", do="see which host slept, or whose process started again by another clock"),
        gauge("clock_uncertainty_seconds", "seconds", "How far that offset may be off.",
              bad="above the delays that it serves to measure", do="make round trips shorter: place the relay nearer"),
    ]


def _replica(owner: Literal["collector", "evaluator"]) -> list[Metric]:
    counter, gauge, histogram = _makers(owner, f"paceline_{owner}_")
    return [
        histogram("snapshot_fetch_seconds", "seconds", "Seconds from a snapshot's header to its last chunk.",
                  bad="near the time between two snapshots", do="publish more rarely; check the network"),
        histogram("snapshot_stage_seconds", "seconds", "Seconds to verify a snapshot and lay it ready, beside acting.",
                  bad="near the time between two snapshots", do="publish more rarely, or use a smaller actor"),
        histogram("snapshot_apply_seconds", "seconds", "Seconds that acting stands still for one snapshot.",
                  bad="above a tenth of an environment step", do="publish more rarely, or use a smaller actor"),
        counter("snapshot_apply_failures_total", "snapshots", "Snapshots that broke off, were damaged or did not fit.",
                bad="any steady rate; the last good one acts on", do="read the log of this process"),
        counter("snapshot_poll_failures_total", "polls", "Polls that brought no valid answer.",
                bad="growing: the learner is away", do="look at the endpoint"),
        gauge("snapshot_age_seconds", "seconds", "Seconds since the learner told of a newer snapshot.",
              bad="growing while the run goes on", do="look at the learner: it is away or stands still"),
        gauge("known_version", "versions", "Newest policy version that the learner told of.",
              bad="below the published one", do="check the network to the endpoint"),
        gauge("applied_version", "versions", "Policy version that acts.",
              bad="standing still below the known one", do="read the log of this process"),
    ]


def _collector() -> list[Metric]:
    counter, gauge, histogram = _makers("collector", "paceline_collector_")
    return [
        counter("environment_steps_total", "steps", "Environment steps taken; steps that only reset do not count.",
                bad="a rate of 0 while the run goes on", do="see what the collector spends its time on"),
        histogram("acting_lag_versions", "versions",
                  "Newest known version minus the version that acts, at each environment step.",
                  bad="a p99 above a few", do="see fetch, stage and apply seconds; publish more rarely"),
        histogram("acting_lag_updates", "updates",
                  "Learner updates between the newest known version and the one that acts, at each environment step.",
                  bad="a p99 above a few times learner.publish_every_updates", do="publish more rarely"),
        histogram("acting_lag_seconds", "seconds",
                  "Seconds since a version newer than the one that acts was known, at each environment step.",
                  bad="a p99 above the time between two snapshots", do="see fetch, stage and apply seconds"),
        gauge("paused", "flag", "1 while the collector pauses, since it is over lag.max_lag_versions.",
              bad="1 for longer than a fetch takes", do="see fetch, stage and apply seconds; raise the bound"),
        counter("pauses_total", "times", "Times that the collector paused over lag.max_lag_versions.",
                bad="a rate near that of snapshots", do="raise lag.max_lag_versions, or publish more rarely"),
        gauge("clock_offset_seconds", "seconds", "The learner's clock minus this host's, estimated from polls.",
              bad="seconds; attribution corrects for it, logs do not", do="synchronise the clocks of the hosts"),
        gauge("clock_uncertainty_seconds", "seconds", "How far the estimated offset may be off.",
              bad="above the time between two snapshots: parts blur", do="bring the hosts closer"),
        counter("episodes_total", "episodes", "Episodes that ended.",
                bad="none, for many times their length", do="look at the environment"),
        Metric("paceline_collector_episode_return", "summary", "return", "collector", (),
               "Returns of finished episodes, under the exploring policy.",
               "a falling mean", "compare with the evaluation; look at lag and losses"),
        counter("environment_faults_total", "times", "Times that an environment raised or returned nonsense.",
                bad="above 0", do="read the collector's log: it has the error of the environment"),
        counter("rows_dropped_total", "rows", "Unsealed rows of episodes that an environment fault ended.",
                bad="growing", do="mend the environment"),
        counter("rows_appended_total", "rows", "Rows that replay acknowledged.",
                bad="a rate below that of environment steps", do="see append seconds, and which side waits"),
        counter("bytes_appended_total", "bytes", "Bytes of blocks that replay acknowledged, in the form sent.",
                bad="near what the network carries", do="bring collector and replay closer, or add shards"),
        counter("blocks_appended_total", "blocks", "Blocks that replay acknowledged.",
                bad="a rate of 0 while environment steps go on", do="read the collector's log; look at replay"),
        counter("duplicate_blocks_total", "blocks", "Blocks sent again after a lost answer, that replay had.",
                bad="a steady rate", do="check the network to replay"),
        gauge("blocks_in_flight", "blocks", "Blocks sealed and not acknowledged.",
              bad="always at collector.max_blocks_in_flight", do="see append seconds: replay is slow or full"),
        histogram("append_seconds", "seconds", "Seconds from a block's sealing to its acknowledgement.",
                  bad="a p99 near the limiter's deadline", do="see which side waits; give Redis a faster disk"),
        counter("append_failures_total", "times", "Times that the stream of appends was cut and opened again.",
                Label("reason", ("limiter", "full", "read_only", "away")),
                bad="a steady rate",
                do="limiter: the learner is the slow side; full, read_only: look at Redis; away: look at replay"),
        counter("report_failures_total", "times", "Reports of episodes that the learner did not take at once.",
                bad="growing: the learner is away", do="look at the endpoint"),
        counter("episodes_unreported_total", "episodes", "Episodes left out of the reports: too many waited.",
                bad="above 0", do="look at the endpoint: it was away for long"),
        counter("activity_seconds_total", "seconds", "Seconds of the collecting loop, by what it did.",
                Label("activity", ("starting", "waiting", "snapshot_apply", "acting", "environment", "filling",
                                   "append_wait", "lag_pause", "finishing")),
                bad="append_wait, lag_pause or snapshot_apply above a tenth",
                do="append_wait: the learner is the slow side; the others: publish more rarely"),
        *_replica("collector"),
    ]


def _evaluator() -> list[Metric]:
    counter, gauge, histogram = _makers("evaluator", "paceline_evaluator_")
    return [
        counter("evaluations_total", "snapshots", "Snapshots evaluated.",
                bad="a rate of 0 while the learner publishes", do="read the evaluator's log"),
        counter("environment_steps_total", "steps", "Environment steps of evaluations.",
                bad="a rate of 0 in the middle of one", do="look at the environment"),
        counter("environment_faults_total", "times", "Evaluations that an environment fault ended.",
                bad="above 0", do="read the evaluator's log: it has the error of the environment"),
        histogram("evaluation_seconds", "seconds", "Seconds of one evaluation.",
                  bad="above the time between two evaluated versions", do="raise evaluator.every_versions"),
        counter("activity_seconds_total", "seconds", "Seconds of the evaluating loop, by what it did.",
                Label("activity", ("starting", "waiting", "acting", "environment", "reporting", "finishing")),
                bad="no waiting at all: evaluations come late", do="raise evaluator.every_versions"),
        gauge("mean_return", "return", "Mean return of the newest evaluation.",
              bad="falling for long", do="look at lag and losses"),
        *_replica("evaluator"),
    ]
# fmt: on


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metrics in (_process(), _replay(), _learner(), _endpoint(), _relay(), _collector(), _evaluator())
    for metric in metrics
}
"""Every metric by its name, in the order of a row's way."""

SERIES: dict[str, Metric] = {name: metric for metric in METRICS.values() for name in metric.series}
"""Every metric by each name under which Prometheus keeps it."""


def markdown(metrics: Iterable[Metric] = METRICS.values()) -> str:
    """The metrics as Markdown: a table for each owner that has some."""
    chosen = list(metrics)
    return "\n".join(
        _markdown_table(owner, owned) for owner in OWNERS if (owned := [m for m in chosen if m.owner == owner])
    )


def _markdown_table(owner: Owner, metrics: Iterable[Metric]) -> str:
    lines = [f"**{owner}**", "", "| metric | kind | unit | meaning | bad | what to do |", "| --- " * 6 + "|"]
    for metric in metrics:
        labels = "{" + ", ".join(label.name for label in metric.labels) + "}" if metric.labels else ""
        cells = (f"`{metric.name}{labels}`", metric.kind, metric.unit, metric.meaning, metric.bad, metric.remedy)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])
