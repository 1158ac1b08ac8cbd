"""What the carrying of blocks to replay measures, within a collector's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.telemetry import SECONDS_BUCKETS

APPEND_FAILURES = ("limiter", "full", "read_only", "away")
"""Why a stream of appends is cut. full, read_only: Redis has no room, or refuses writes; the rows wait here."""


class AppendMetrics:
    """Metrics of one collector's appends."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register them."""
        self.rows_appended = Counter(
            "paceline_collector_rows_appended_total",
            "Rows that replay acknowledged. Bad: a rate below that of environment steps.",
            registry=registry,
        )
        self.bytes_appended = Counter(
            "paceline_collector_bytes_appended_total",
            "Bytes of blocks that replay acknowledged, in the form sent. Bad: near what the network carries.",
            registry=registry,
        )
        self.blocks_appended = Counter(
            "paceline_collector_blocks_appended_total",
            "Blocks that replay acknowledged. Bad: a rate of 0 while environment steps go on.",
            registry=registry,
        )
        self.duplicates = Counter(
            "paceline_collector_duplicate_blocks_total",
            "Blocks that replay had already, sent again after a lost answer. Bad: a steady rate.",
            registry=registry,
        )
        self.blocks_in_flight = Gauge(
            "paceline_collector_blocks_in_flight",
            "Blocks sealed and not acknowledged. Bad: always at collector.max_blocks_in_flight, replay is slow.",
            registry=registry,
        )
        self.append_seconds = Histogram(
            "paceline_collector_append_seconds",
            "Seconds from a block's sealing to its acknowledgement. Bad: a p99 near the limiter's deadline.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.append_failures = Counter(
            "paceline_collector_append_failures_total",
            "Times that the stream of appends was cut and opened again, by reason. Bad: a steady rate.",
            ["reason"],
            registry=registry,
        )
        for reason in APPEND_FAILURES:
            self.append_failures.labels(reason)  # served as 0: the first one is no growth otherwise
