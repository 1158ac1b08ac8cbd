"""The replay service as a process: opens its connections, restores, serves, and ends in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from prometheus_client import CollectorRegistry

from paceline.config import Config
from paceline.config.models import SHARD
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


def run(config: Config, *, resume: bool, stop: StopSignal, shard: int = 0) -> None:
    """Serve shard `shard` of the run's rows until `stop`.

    Health says SERVING when every table that has a record can be sampled: the rows that its first sample needs are in
    memory. The rest comes while samplers and followers are served; blocks are taken and wait until their table is
    whole, and UpdatePriorities is refused as UNAVAILABLE as long. While Redis is away health says NOT_SERVING.

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
        config.replay.redis_url.get_secret_value().replace(SHARD, str(shard)),
        config.run_id,
        deadline_seconds=config.replay.redis_deadline_seconds,
        shard=shard if config.replay.shards > 1 else None,
    )
    tables = Tables(config, store, metrics, shard=shard)
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
        tables.load()

        def serve() -> None:
            server.set_serving(True)
            metrics.redis_available.set(1)
            get_logger().info("replay_serving", run_id=config.run_id, port=server.port, resume=resume, shard=shard)

        if _restore(tables, serve, server, stop):
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


def _restore(tables: Tables, serve: Callable[[], None], server: Server, stop: StopSignal) -> bool:
    """Bring the rows, going on after a Redis that is away comes back; False: the stop came first."""
    while True:
        try:
            tables.restore(lambda: UnavailableError("replay is stopping") if stop.is_set() else None, serve)
        except UnavailableError as error:
            if not stop.is_set():
                get_logger().warning("restore_interrupted", error=str(error), meaning="it goes on where it ended")
            server.set_ready(False)
            if stop.wait(KEEP_SECONDS):
                return False
        else:
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
    error = _keep_once(tables, all_pages=True)
    if error is not None:
        log.error("counters_not_saved", error=str(error), meaning="a resume may sample as many rows again")


def _keep_once(tables: Tables, *, all_pages: bool = False) -> PacelineError | None:
    try:
        tables.keep_records(all_pages=all_pages)
    except PacelineError as error:
        return error
    return None
