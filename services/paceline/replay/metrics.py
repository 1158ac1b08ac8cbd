"""Every metric of the replay service."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.errors import LimiterTimeoutError
from paceline.telemetry import SECONDS_BUCKETS

APPEND_ACTIVITIES = ("receive", "check", "limiter", "store", "memory")
SAMPLE_ACTIVITIES = ("credit", "limiter", "gather", "send")
FOLLOW_ACTIVITIES = ("idle", "read", "send")
"""What a stream's thread does; the seconds of all streams are summed."""

SIDES = ("insert", "sample")
REFUSALS = (
    "malformed",
    "row_spec",
    "run",
    "table",
    "replaced",
    "store_full",
    "store_read_only",
    "unavailable",
    "limiter",
    "other",
)


class ReplayMetrics:
    """The metrics of one replay service, in the registry given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline_replay_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"paceline_replay_{name}", text, labels, registry=registry)

        self.appended_rows = counter(
            "appended_rows_total", "Rows stored. Flat while collectors run: bad, they are held back.", "table"
        )
        self.appended_blocks = counter("appended_blocks_total", "Blocks stored.", "table")
        self.appended_bytes = counter("appended_bytes_total", "Bytes of rows stored.", "table")
        self.appended_payload_bytes = counter(
            "appended_payload_bytes_total",
            "Bytes of blocks as collectors sent them and Redis has them; below the bytes of rows by what the compact "
            "form saves.",
            "table",
        )
        self.duplicate_blocks = counter(
            "duplicate_blocks_total",
            "Blocks that were stored already when they came. Each lost answer makes one; many mean a bad connection.",
            "table",
        )
        self.refused_blocks = counter(
            "refused_blocks_total",
            "Blocks refused, by reason. Anything but limiter and unavailable needs a person.",
            "reason",
        )
        for reason in REFUSALS:
            self.refused_blocks.labels(reason)  # served as 0: the first one is no growth otherwise
        self.sequence_gaps = counter(
            "sequence_gaps_total",
            "Times that blocks of a collector were missing before the one that came. Above 0: Redis lost stored rows.",
            "table",
        )
        self.damaged_blocks = counter(
            "damaged_blocks_total",
            "Blocks that were damaged or missing in Redis and left out of the restore. Above 0 is bad: check its disk.",
            "table",
        )
        self.damaged_pages = counter(
            "damaged_pages_total",
            "Pages of priorities that were damaged in Redis and left out of the restore; their rows count as new.",
            "table",
        )
        self.rewritten_blocks = counter(
            "rewritten_blocks_total",
            "Blocks written to Redis again, because it had lost them and memory had not. Above 0: Redis has crashed.",
            "table",
        )
        self.removed_rows = counter(
            "removed_rows_total", "Rows that left because the table was full; normal in a long run.", "table"
        )
        self.sampled_rows = counter(
            "sampled_rows_total", "Rows sampled. Flat while the learner runs: bad, it is held back.", "table"
        )
        self.sampled_bytes = counter("sampled_bytes_total", "Bytes of rows sampled.", "table")
        self.skipped_rows = counter(
            "skipped_rows_total",
            "Draws that gave a row over lag.max_lag_versions, in whose place another was drawn; of tables drawn by "
            "priority or age. A rate above that of sampled rows is bad: most of what is drawn is too old.",
            "table",
        )
        self.followed_rows = counter(
            "followed_rows_total", "Rows sent to followers. Behind appended rows for long: a follower is slow.", "table"
        )
        self.followed_bytes = counter("followed_bytes_total", "Bytes of rows sent to followers.", "table")
        self.consumed_rows = counter(
            "consumed_rows_total", "Rows of a queue that its follower consumed. Flat while rows come: bad.", "table"
        )
        self.dropped_rows = counter(
            "dropped_rows_total",
            "Rows that a full queue dropped before anybody learned from them. Growing: the learner is too slow for it.",
            "table",
        )
        self.replaced_followers = counter(
            "replaced_followers_total",
            "Followers that a newer one took over from. Growing: two learners follow one table and take turns.",
            "table",
        )
        self.updated_priorities = counter("updated_priorities_total", "Rows whose priority was set.", "table")
        self.unknown_priorities = counter(
            "unknown_priorities_total",
            "Priorities that came for rows that had left; close to the updated ones: rows leave faster than they are "
            "learned from.",
            "table",
        )
        self.saved_pages = counter(
            "saved_pages_total", "Pages of priorities and times sampled that were written to Redis.", "table"
        )
        self.unsaved_pages = gauge(
            "unsaved_pages",
            "Pages of priorities and times sampled that Redis does not have yet. Growing: a crash would lose more "
            "than the last seconds of them.",
            "table",
        )
        self.rows = gauge("table_rows", "Rows in the table now.", "table")
        self.capacity_rows = gauge("table_capacity_rows", "Rows that the table can hold.", "table")
        self.memory_bytes = gauge("table_memory_bytes", "Memory set aside for the table's rows.", "table")
        self.log_bytes = gauge("table_log_bytes", "Bytes of the table's blocks in Redis, as they were sent.", "table")
        self.whole = gauge(
            "table_whole", "Whether all rows of the table are in memory; 0 after a start: appends wait for it.", "table"
        )
        self.settings_differ = gauge(
            "table_settings_differ",
            "Whether the table's record was begun with other settings; 1 is worth a look: the current ones hold.",
            "table",
        )
        self.limiter_wait_seconds = counter(
            "limiter_wait_seconds_total",
            "Seconds that the limiter held streams back, by side. The side that waits most is the faster one.",
            "table",
            "side",
        )
        self.limiter_timeouts = counter(
            "limiter_timeouts_total",
            "Waits that ended at their deadline. Growing on both sides at once is bad: check the window.",
            "table",
            "side",
        )
        self.redis_append_seconds = Histogram(
            "paceline_replay_redis_append_seconds",
            "Seconds until Redis had the blocks of a step. Above 0.1: Redis or its disk is slow, collectors wait.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.redis_used_bytes = gauge("redis_used_bytes", "Memory that Redis uses, whatever for.")
        self.redis_max_bytes = gauge("redis_max_bytes", "Redis' maxmemory; 0 where it has none.")
        self.redis_available = gauge("redis_available", "Whether Redis takes commands; 0 is bad: appends wait for it.")
        self.streams = gauge("open_streams", "Streams open now; at replay.max_streams further ones are refused.", "rpc")
        self.shared_memory_streams = gauge(
            "shared_memory_streams",
            "Streams open now for whose rows client and replay share memory, as on one machine.",
            "rpc",
        )
        self.restore_seconds = gauge("restore_seconds", "How long the restore from Redis took when this process began.")
        self.activity_seconds = counter(
            "activity_seconds_total",
            "Seconds that the threads of streams spent on each activity; mostly store: Redis bounds the insert rate.",
            "activity",
        )


class TableMetrics:
    """The series of one table: looked up once, since an append counts a dozen of them."""

    def __init__(self, metrics: ReplayMetrics, table: str) -> None:
        self.redis_append_seconds = metrics.redis_append_seconds
        self.appended_rows = metrics.appended_rows.labels(table)
        self.appended_blocks = metrics.appended_blocks.labels(table)
        self.appended_bytes = metrics.appended_bytes.labels(table)
        self.appended_payload_bytes = metrics.appended_payload_bytes.labels(table)
        self.duplicate_blocks = metrics.duplicate_blocks.labels(table)
        self.sequence_gaps = metrics.sequence_gaps.labels(table)
        self.damaged_blocks = metrics.damaged_blocks.labels(table)
        self.damaged_pages = metrics.damaged_pages.labels(table)
        self.rewritten_blocks = metrics.rewritten_blocks.labels(table)
        self.removed_rows = metrics.removed_rows.labels(table)
        self.sampled_rows = metrics.sampled_rows.labels(table)
        self.sampled_bytes = metrics.sampled_bytes.labels(table)
        self.followed_rows = metrics.followed_rows.labels(table)
        self.followed_bytes = metrics.followed_bytes.labels(table)
        self.consumed_rows = metrics.consumed_rows.labels(table)
        self.dropped_rows = metrics.dropped_rows.labels(table)
        self.replaced_followers = metrics.replaced_followers.labels(table)
        self.updated_priorities = metrics.updated_priorities.labels(table)
        self.unknown_priorities = metrics.unknown_priorities.labels(table)
        self.saved_pages = metrics.saved_pages.labels(table)
        self.unsaved_pages = metrics.unsaved_pages.labels(table)
        self.rows = metrics.rows.labels(table)
        self.capacity_rows = metrics.capacity_rows.labels(table)
        self.memory_bytes = metrics.memory_bytes.labels(table)
        self.log_bytes = metrics.log_bytes.labels(table)
        self.whole = metrics.whole.labels(table)
        self.settings_differ = metrics.settings_differ.labels(table)
        self._skipped_rows, self._table = metrics.skipped_rows, table
        self._waits = {side: metrics.limiter_wait_seconds.labels(table, side) for side in SIDES}
        self._timeouts = {side: metrics.limiter_timeouts.labels(table, side) for side in SIDES}

    def count_appended(
        self, redis_seconds: float, *, blocks: int, rows: int, rows_bytes: int, payload_bytes: int
    ) -> None:
        """Blocks were stored, all by one exchange with Redis."""
        self.redis_append_seconds.observe(redis_seconds)
        self.appended_blocks.inc(blocks)
        self.appended_rows.inc(rows)
        self.appended_bytes.inc(rows_bytes)
        self.appended_payload_bytes.inc(payload_bytes)

    def count_skipped(self, draws: int) -> None:
        """So many draws were skipped; from the first call on the series is there."""
        self._skipped_rows.labels(self._table).inc(draws)

    @contextmanager
    def waiting_for_limiter(self, side: str) -> Iterator[None]:
        """The time within is a wait for the table's limiter, and may end in its timeout."""
        began = time.perf_counter()
        try:
            yield
        except LimiterTimeoutError:
            self._timeouts[side].inc()
            raise
        finally:
            self.count_wait(side, time.perf_counter() - began)

    def count_wait(self, side: str, seconds: float) -> None:
        """The limiter held `side` back for so long."""
        self._waits[side].inc(seconds)
