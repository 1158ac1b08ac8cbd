"""Logs and /metrics, the same in every process."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from paceline import __version__
from paceline.errors import PortTakenError

LAG_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 50, 64, 80, 100, 128, 160, 200, 256, 400, 600, 1000)
"""Versions. Dense where a healthy run lies, and finite for every lag that a bound may allow."""

SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


def configure_logging(service: str, **fields: Any) -> None:
    """One JSON line per event on standard error, each with the service's name and the given fields."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    # Bound in the logger itself: context variables do not reach other threads.
    structlog.configure(processors=[_adder(service=service, **fields), *structlog.get_config()["processors"]])


def _adder(**fields: Any) -> Any:
    def add(_logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        return {**fields, **event}

    return add


def serve_metrics(registry: CollectorRegistry, listen: str, service: str) -> MetricsServer:
    """Serve `registry` on /metrics at `listen` ("host:port"; port 0 takes any free one).

    Raises:
        PortTakenError: the port is not free.
    """
    Gauge(
        "paceline_build_info", "Always 1; the labels say what runs.", ["version", "service"], registry=registry
    ).labels(__version__, service).set(1)
    host, _, port = listen.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry=registry)
    except OSError as error:
        raise PortTakenError(
            f"/metrics of {service} cannot listen on {listen}: {error.strerror}; "
            "stop what holds the port, or set another metrics_listen"
        ) from error
    return MetricsServer(server, thread)


class MetricsServer:
    """A running /metrics."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server, self._thread = server, thread
        self.port: int = server.server_port

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class ActivityClock:
    """Counts the seconds that a loop spends in each of a closed set of activities, on one thread.

    The parts sum to the whole: `switch` ends one activity and begins the next.
    """

    def __init__(self, counter: Counter, activities: tuple[str, ...], first: str) -> None:
        self._seconds = {activity: counter.labels(activity) for activity in activities}
        self._current, self._since = first, time.perf_counter()

    def switch(self, activity: str) -> None:
        """From now on the time belongs to `activity`."""
        now = time.perf_counter()
        self._seconds[self._current].inc(now - self._since)
        self._current, self._since = activity, now

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
