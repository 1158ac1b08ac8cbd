"""Reads /metrics of the run's processes, and what its histograms say."""

from __future__ import annotations

import http.client
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

SCRAPE_SECONDS = 1.0


@dataclass(frozen=True)
class Spread:
    """What a histogram says of its observations."""

    buckets: tuple[tuple[float, float], ...]
    """Upper bound and observations of each, not accumulated, lowest first; the last bound may be infinity."""
    sum: float | None
    """Of all observations; None where it is not known."""

    @property
    def count(self) -> float:
        """Observations."""
        return math.fsum(count for _, count in self.buckets)

    @property
    def mean(self) -> float | None:
        """Of all observations."""
        return None if self.sum is None else self.sum / self.count

    @property
    def largest(self) -> float:
        """The upper bound of the highest bucket that holds any."""
        return max(bound for bound, count in self.buckets if count)

    def quantile(self, fraction: float) -> float:
        """The upper bound of the bucket that holds the quantile."""
        below, wanted = 0.0, fraction * self.count
        for bound, count in self.buckets:
            below += count
            if below >= wanted and below > 0:
                return bound
        return self.largest


@dataclass
class Page:
    """The samples of one /metrics page."""

    samples: list[tuple[str, dict[str, str], float]] = field(default_factory=list)
    read_at: float = 0.0
    """Monotonic seconds."""

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

    def known_total(self, name: str, **labels: str) -> float | None:
        """The sum of such samples; None where there is none."""
        found = list(self.values(name, **labels))
        return math.fsum(found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The sum of the samples of that name, for each value of a label."""
        sums: dict[str, float] = defaultdict(float)
        for sample_name, labels, value in self.samples:
            if sample_name == name and label in labels:
                sums[labels[label]] += value
        return dict(sums)

    def spread(self, histogram: str) -> Spread | None:
        """A histogram, over all its labels; None where nothing was observed."""
        accumulated = sorted(
            (float(bound), count) for bound, count in self.by_label(f"{histogram}_bucket", "le").items()
        )
        if not accumulated or accumulated[-1][1] == 0:
            return None
        below = [0.0, *(count for _, count in accumulated)]
        buckets = tuple((bound, count - before) for (bound, count), before in zip(accumulated, below, strict=False))
        return Spread(buckets, self.known_total(f"{histogram}_sum"))

    def quantile(self, histogram: str, fraction: float) -> float | None:
        """The upper bound of the bucket that holds the quantile; None where nothing was observed."""
        spread = self.spread(histogram)
        return None if spread is None else spread.quantile(fraction)

    def activity_seconds(self) -> dict[str, float]:
        """Seconds by activity, of whichever service the page is."""
        sums: dict[str, float] = defaultdict(float)
        for name, labels, value in self.samples:
            if name.endswith("_activity_seconds_total"):
                sums[labels["activity"]] += value
        return dict(sums)


def merge(pages: Iterable[Page]) -> Page:
    """The samples of all pages as one page."""
    return Page([sample for page in pages for sample in page.samples])


def read_page(port: int) -> Page:
    """Read /metrics on this loopback port; a port that does not answer gives an empty page."""
    page = Page()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SCRAPE_SECONDS)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        page.read_at = time.monotonic()
    except (OSError, http.client.HTTPException):
        return page
    finally:
        connection.close()
    _parse(text, page)
    return page


def read_last_page(path: Path) -> Page:
    """What a process left of itself when it ended; an empty page if it left nothing."""
    page = Page()
    try:
        text, age = path.read_text(encoding="utf-8"), time.time() - path.stat().st_mtime
    except OSError:
        return page
    page.read_at = time.monotonic() - max(age, 0.0)
    _parse(text, page)
    return page


def _parse(text: str, page: Page) -> None:
    for family in text_string_to_metric_families(text):
        page.samples.extend((sample.name, dict(sample.labels), sample.value) for sample in family.samples)
