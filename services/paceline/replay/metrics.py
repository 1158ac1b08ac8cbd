"""Every metric of the replay service."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.telemetry import SECONDS_BUCKETS

APPEND_ACTIVITIES = ("receive", "check", "limiter", "store", "memory")
SAMPLE_ACTIVITIES = ("credit", "limiter", "gather", "send")
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
        self.sequence_gaps = counter(
            "sequence_gaps_total",
            "Times that blocks of a collector were missing before the one that came. Above 0: Redis lost stored rows.",
            "table",
        )
        self.damaged_blocks = counter(
            "damaged_blocks_total",
            "Blocks that were damaged in Redis and left out of the restore. Above 0 is bad: check its disk.",
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
        self.rows = gauge("table_rows", "Rows in the table now.", "table")
        self.capacity_rows = gauge("table_capacity_rows", "Rows that the table can hold.", "table")
        self.memory_bytes = gauge("table_memory_bytes", "Memory set aside for the table's rows.", "table")
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
            "Seconds until Redis had a block. Above 0.1: Redis or its disk is slow, and collectors wait.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.redis_available = gauge("redis_available", "Whether Redis takes commands; 0 is bad: appends wait for it.")
        self.streams = gauge("open_streams", "Streams open now; at replay.max_streams further ones are refused.", "rpc")
        self.restore_seconds = gauge("restore_seconds", "How long the restore from Redis took when this process began.")
        self.activity_seconds = counter(
            "activity_seconds_total",
            "Seconds that the threads of streams spent on each activity; mostly store: Redis bounds the insert rate.",
            "activity",
        )
