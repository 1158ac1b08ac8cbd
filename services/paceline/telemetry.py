"""Logs and /metrics, the same in every process."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any, ClassVar, TextIO
from wsgiref.simple_server import WSGIServer

import numpy as np
import numpy.typing as npt
import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
    make_wsgi_app,
    start_http_server,
)
from prometheus_client.core import HistogramMetricFamily

from paceline import __version__
from paceline.errors import PortTakenError
from paceline.health import Doing, Health, answering

LAG_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 50, 64, 80, 100, 128, 160, 200, 256, 400, 600, 1000)
"""Versions. Dense where a healthy run lies, and finite for every lag that a bound may allow."""

SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


LAST_PAGE_VARIABLE = "_PACELINE_LAST_PAGE"
"""Names the file of `MetricsServer.last_page` to a process that the launcher starts. No setting, so no name of one."""


def configure_logging(service: str, *, file: TextIO | None = None, **fields: Any) -> None:
    """One JSON line per event on standard error, or in `file`, each with the service's name and the given fields."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file or sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    # Bound in the logger itself: context variables do not reach other threads.
    structlog.configure(processors=[_adder(service=service, **fields), *structlog.get_config()["processors"]])


def _adder(**fields: Any) -> Any:
    def add(_logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        return {**fields, **event}

    return add


def serve_metrics(
    registry: CollectorRegistry, listen: str, service: str, health: Health | None = None
) -> MetricsServer:
    """Serve `registry` on /metrics at `listen` ("host:port"; port 0 takes any free one), and `health` beside it.

    Raises:
        PortTakenError: the port is not free.
    """
    Gauge(
        "paceline_build_info", "Always 1; the labels say what runs.", ["version", "service"], registry=registry
    ).labels(__version__, service).set(1)
    ProcessCollector(registry=registry)
    host, _, port = listen.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry=registry)
    except OSError as error:
        raise PortTakenError(
            f"/metrics of {service} cannot listen on {listen}: {error.strerror}; "
            "stop what holds the port, or set another metrics_listen"
        ) from error
    server.set_app(answering(health, make_wsgi_app(registry)))
    return MetricsServer(server, thread, registry)


class MetricsServer:
    """A running /metrics."""

    last_page: ClassVar[Path | None] = None
    """Where this process leaves its page when it serves it no more, for whoever adds up what it counted until its end;
    set by who starts the process. None: nowhere."""

    def __init__(self, server: WSGIServer, thread: Thread, registry: CollectorRegistry) -> None:
        self._server, self._thread, self._registry = server, thread, registry
        self.port: int = server.server_port

    def close(self) -> None:
        """Stop serving."""
        # The loop that serves looks up only twice a second: a socket that takes no more wakes it at once.
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
        if self.last_page is not None:
            partial = self.last_page.with_suffix(".new")
            try:
                partial.write_bytes(generate_latest(self._registry))
                partial.replace(self.last_page)
            except OSError as error:  # figures of a second or two are not worth an end with an error
                get_logger().warning("last_page_not_written", file=str(self.last_page), error=str(error))


class BulkHistogram:
    """A histogram that takes whole arrays: one observation per row costs too much in a training loop."""

    def __init__(self, name: str, documentation: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = np.asarray(buckets, np.float64)
        self._counts = np.zeros(len(buckets) + 1, np.int64)
        self._sum = 0.0
        self._lock = Lock()
        registry.register(self)

    def observe(self, values: npt.NDArray[Any]) -> None:
        """Count every element of `values`."""
        counts = np.bincount(self._bounds.searchsorted(values.ravel(), side="left"), minlength=len(self._counts))
        with self._lock:
            self._counts += counts
            self._sum += float(values.sum())

    def counts(self) -> dict[str, int]:
        """Observations by the upper bound of their bucket, not accumulated; buckets that are empty are left out."""
        with self._lock:
            counts = self._counts.copy()
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return {bound: int(count) for bound, count in zip(bounds, counts, strict=True) if count}

    def quantile(self, fraction: float) -> float | None:
        """The upper bound of the bucket that holds the quantile; None before the first observation."""
        with self._lock:
            accumulated = self._counts.cumsum()
        if accumulated[-1] == 0:
            return None
        index = int(accumulated.searchsorted(fraction * accumulated[-1], side="left"))
        return float(self._bounds[index]) if index < len(self._bounds) else float("inf")

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry. Absent before the first observation."""
        with self._lock:
            accumulated, total = self._counts.cumsum(), self._sum
        if accumulated[-1]:
            bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
            yield HistogramMetricFamily(
                self._name,
                self._documentation,
                buckets=[(bound, float(count)) for bound, count in zip(bounds, accumulated, strict=True)],
                sum_value=total,
            )

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """For the registry: the name, so that a second metric of that name is refused."""
        yield HistogramMetricFamily(self._name, self._documentation)


class ActivityClock:
    """Counts the seconds that a loop spends in each of a closed set of activities, on one thread.

    The parts sum to the whole: `switch` ends one activity and begins the next.
    """

    def __init__(self, counter: Counter, activities: tuple[str, ...], first: str) -> None:
        self._seconds = {activity: counter.labels(activity) for activity in activities}
        self._current, self._since = first, time.perf_counter()
        self._doing = (first, self._since)

    def switch(self, activity: str) -> None:
        """From now on the time belongs to `activity`."""
        now = time.perf_counter()
        self._seconds[self._current].inc(now - self._since)
        self._current, self._since = activity, now
        self._doing = (activity, now)

    def turn(self) -> None:
        """The same activity goes on, and the loop is alive: for each slice of a wait."""
        self.switch(self._current)

    def doing(self) -> Doing:
        """What the loop does, and since how many seconds. From any thread."""
        activity, since = self._doing
        return activity, time.perf_counter() - since

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """The time within belongs to `activity`, the time after to what it was before."""
        before = self._current
        self.switch(activity)
        try:
            yield
        finally:
            self.switch(before)


def get_logger() -> Any:
    """The process's logger: `log.info("snapshot_published", policy_version=7)`."""
    return structlog.get_logger()
