"""Reads /metrics of the run's processes."""

from __future__ import annotations

import http.client
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

SCRAPE_SECONDS = 1.0


@dataclass
class Page:
    """The samples of one /metrics page."""

    samples: list[tuple[str, dict[str, str], float]] = field(default_factory=list)

    def values(self, name: str, **labels: str) -> Iterator[float]:
        """Every sample of that name whose labels include the given ones."""
        for sample_name, sample_labels, value in self.samples:
            if sample_name == name and labels.items() <= sample_labels.items():
                yield value

    def value(self, name: str, **labels: str) -> float | None:
        """The first such sample; None where it is absent."""
        return next(self.values(name, **labels), None)

    def total(self, name: str, **labels: str) -> float:
        """The sum of such samples; 0 where there is none."""
        return math.fsum(self.values(name, **labels))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The sum of the samples of that name, for each value of a label."""
        sums: dict[str, float] = defaultdict(float)
        for sample_name, labels, value in self.samples:
            if sample_name == name and label in labels:
                sums[labels[label]] += value
        return dict(sums)

    def quantile(self, histogram: str, fraction: float) -> float | None:
        """The upper bound of the bucket that holds the quantile; None where nothing was observed."""
        buckets = sorted((float(bound), count) for bound, count in self.by_label(f"{histogram}_bucket", "le").items())
        if not buckets or buckets[-1][1] == 0:
            return None
        return next(bound for bound, count in buckets if count >= fraction * buckets[-1][1])

    def activity_seconds(self) -> dict[str, float]:
        """Seconds by activity, of whichever service the page is."""
        sums: dict[str, float] = defaultdict(float)
        for name, labels, value in self.samples:
            if name.endswith("_activity_seconds_total"):
                sums[labels["activity"]] += value
        return dict(sums)


def read_page(port: int) -> Page:
    """Read /metrics on this loopback port; a port that does not answer gives an empty page."""
    page = Page()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SCRAPE_SECONDS)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException):
        return page
    finally:
        connection.close()
    for family in text_string_to_metric_families(text):
        page.samples.extend((sample.name, dict(sample.labels), sample.value) for sample in family.samples)
    return page
