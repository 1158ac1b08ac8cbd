"""What a service that answers polls measures of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

POLL_RESULTS = ("snapshot", "not_modified", "refused", "unavailable", "cancelled")


class PollMetrics:
    """Metrics of the polls of one service, under its name, in the registry of its process."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        """`service` is the middle of each metric's name."""
        polls = Counter(
            f"paceline_{service}_polls_total",
            "Answered GetSnapshot calls by result. Bad: refused (a peer of another run or release), unavailable.",
            ["result"],
            registry=registry,
        )
        self._polls = {result: polls.labels(result) for result in POLL_RESULTS}
        self.waiting_polls = Gauge(
            f"paceline_{service}_waiting_polls",
            "GetSnapshot calls held until something newer is there. Bad: 0 while collectors live.",
            registry=registry,
        )
        self.sending_polls = Gauge(
            f"paceline_{service}_sending_polls",
            "GetSnapshot calls that a snapshot is sent to now; each keeps its own in memory. Bad: growing: readers are "
            "slower than snapshots come.",
            registry=registry,
        )
        self.sent_bytes = Counter(
            f"paceline_{service}_snapshot_sent_bytes_total",
            "Bytes of snapshots sent. Bad: near what the network carries.",
            registry=registry,
        )

    def count_poll(self, result: str) -> None:
        """Count an answered poll by one of `POLL_RESULTS`."""
        self._polls[result].inc()
