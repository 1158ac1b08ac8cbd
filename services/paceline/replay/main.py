"""The replay service as a process: opens its connections, restores, serves, and ends in order."""

from __future__ import annotations

from contextlib import ExitStack

from prometheus_client import CollectorRegistry

from paceline.config import Config
from paceline.errors import ConfigError, PacelineError, ReplacedError, UnavailableError
from paceline.process import StopSignal
from paceline.replay.metrics import ReplayMetrics
from paceline.replay.service import SERVICE, ReplayService
from paceline.replay.store import RedisStore
from paceline.replay.tables import Tables
from paceline.rpc.server import Server
from paceline.telemetry import get_logger, serve_metrics

KEEP_SECONDS = 1.0
"""How often the counters are written to Redis, and Redis is asked whether it is there."""


def run(config: Config, *, resume: bool, stop: StopSignal) -> None:
    """Serve until `stop`. Health says NOT_SERVING until the tables are restored, and while Redis is away.

    Raises:
        ConfigError: no redis_url, a wrong password, an evicting policy, a limiter window that is too small.
        ConflictError: the run id is in use and `resume` is False.
        PortTakenError: an address cannot be owned.
        ReplacedError: another replay process took the run over.
        UnavailableError: Redis cannot be reached at the start.
    """
    if config.replay.redis_url is None:
        raise ConfigError(
            "replay.redis_url is not set: start Redis and name it, as replay.redis_url=redis://127.0.0.1:6379/0, "
            "or use `paceline train`, which starts its own"
        )
    registry = CollectorRegistry()
    metrics = ReplayMetrics(registry)
    store = RedisStore(
        config.replay.redis_url.get_secret_value(),
        config.run_id,
        deadline_seconds=config.replay.redis_deadline_seconds,
    )
    tables = Tables(config, store, metrics)
    service = ReplayService(config.run_id, tables, metrics, max_collectors=config.collector.max_count)
    with ExitStack() as stack:
        stack.callback(store.close)
        server = Server(
            config.replay.listen,
            config.rpc,
            services=[SERVICE],
            register=[],
            handlers=[service.handler()],
            max_streams=config.replay.max_streams,
        )
        server.start()
        stack.callback(server.stop)
        stack.callback(service.drain)
        stack.callback(serve_metrics(registry, config.replay.metrics_listen, "replay").close)
        if not _claim(store, resume=resume, stop=stop):
            return
        try:
            tables.restore(lambda: UnavailableError("replay is stopping") if stop.is_set() else None)
        except UnavailableError:
            if stop.is_set():
                return
            raise
        server.set_serving(True)
        metrics.redis_available.set(1)
        get_logger().info("replay_serving", run_id=config.run_id, port=server.port, resume=resume)
        _keep_records(tables, store, server, metrics, stop)


def _claim(store: RedisStore, *, resume: bool, stop: StopSignal) -> bool:
    """Check Redis and take the run over, waiting while it loads its data; False: the stop came first."""
    while True:
        try:
            store.check()
            found = store.claim(resume=resume)
        except UnavailableError as error:
            if not store.is_loading:
                raise
            get_logger().info("redis_loading", error=str(error))
            if stop.wait(KEEP_SECONDS):
                return False
        else:
            if resume and not found:
                get_logger().warning("nothing_to_resume", meaning="Redis has no record of this run; it begins anew")
            return True


def _keep_records(tables: Tables, store: RedisStore, server: Server, metrics: ReplayMetrics, stop: StopSignal) -> None:
    log, problem, available = get_logger(), "", True
    while not stop.wait(KEEP_SECONDS):
        error = _keep_once(tables)
        if store.fenced.is_set():
            raise ReplacedError("another replay process has taken this run over; this one stops")
        if error is not None and type(error).__name__ != problem:
            log.error("record_not_kept", error=str(error), meaning="sampling goes on, appends wait for Redis")
        if error is None and problem:
            log.info("record_kept_again")
        problem = "" if error is None else type(error).__name__
        # A store that is full or read-only answers, and rows can be sampled: the service stays ready.
        if available != (not isinstance(error, UnavailableError)):
            available = not available
            server.set_ready(available)
            metrics.redis_available.set(float(available))
    error = _keep_once(tables)
    if error is not None:
        log.error("counters_not_saved", error=str(error), meaning="a resume may sample as many rows again")


def _keep_once(tables: Tables) -> PacelineError | None:
    try:
        tables.keep_records()
    except PacelineError as error:
        return error
    return None
