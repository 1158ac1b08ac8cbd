"""The replay service as a process: opens its connections, restores, serves, and ends in order."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from paceline.config import Config
from paceline.config.models import SHARD
from paceline.errors import (
    ConfigError,
    PacelineError,
    ReplacedError,
    StoreFullError,
    StoreReadOnlyError,
    UnavailableError,
)
from paceline.health import Health
from paceline.process import StopSignal
from paceline.replay.metrics import ReplayMetrics
from paceline.replay.record import note_shards
from paceline.replay.service import SERVICE, ReplayService
from paceline.replay.store import RedisStore
from paceline.replay.tables import Tables
from paceline.rpc.server import Server
from paceline.telemetry import get_logger, serve_metrics

KEEP_SECONDS = 1.0
"""How often the counters are written to Redis, and Redis is asked whether it is there."""

_PASSING = (UnavailableError, StoreFullError, StoreReadOnlyError)
"""States of a Redis that end without replay: it starts, fails over, its disk or memory is made free."""


def run(config: Config, *, resume: bool, stop: StopSignal, shard: int = 0) -> None:
    """Serve shard `shard` of the run's rows until `stop`.

    Health says SERVING when every table that has a record can be sampled: the rows that its first sample needs are in
    memory. The rest comes while samplers and followers are served; blocks are taken and wait until their table is
    whole, and UpdatePriorities is refused as UNAVAILABLE as long. While Redis is away health says NOT_SERVING; at the
    start it is waited for, so that it does not matter in which order the two of them start. So it is where Redis
    refuses a user whom it admitted at the start: a password or an ACL that is being changed ends nobody's work.

    Args:
        resume: go on with the record of the run where there is one; it begins where there is none.

    Raises:
        ConfigError: no redis_url, a wrong password, an evicting policy, a limiter window that is too small.
        ConflictError: the run id is in use and `resume` is False, or its record has another number of shards.
        PortTakenError: an address cannot be owned.
        ReplacedError: another replay process took the run over.
        UnavailableError: Redis cannot be reached within `replay.redis_start_seconds` of the start; StoreFullError,
            StoreReadOnlyError: it takes no writes as long.
    """
    redis_address = config.replay.redis_address()
    if redis_address is None:
        raise ConfigError(
            "replay.redis_url is not set: start Redis and name it, as replay.redis_url=redis://127.0.0.1:6379/0, "
            "or use `paceline train`, which starts its own"
        )
    registry = CollectorRegistry()
    metrics, health = ReplayMetrics(registry), Health(config.run.stuck_seconds)
    store = RedisStore(
        redis_address.replace(SHARD, str(shard)),
        config.run_id,
        deadline_seconds=config.replay.redis_deadline_seconds,
        shard=shard if config.replay.shards > 1 else None,
    )
    tables = Tables(config, store, metrics, shard=shard)
    service = ReplayService(
        config.run_id,
        tables,
        metrics,
        max_collectors=config.collector.max_count,
        rpc=config.rpc,
    )
    with ExitStack() as stack:
        stack.callback(store.close)
        server = Server(
            config.replay.listen,
            config.rpc,
            services=[SERVICE],
            register=[],
            handlers=[service.handler()],
            max_streams=config.replay.max_streams,
            security=config.security,
        )
        server.start()
        stack.callback(server.stop)
        stack.callback(service.drain)
        stack.callback(serve_metrics(registry, config.replay.metrics_listen, "replay", health).close)
        waiting = _Waiting(store, health, stop, config.replay.redis_start_seconds)
        if not waiting.until(lambda: _claim(store, config, shard, resume=resume)) or not waiting.until(tables.load):
            return
        store.note_admitted()
        metrics.redis_available.set(1)

        def serve() -> None:
            server.set_serving(True)
            health.set_ready()
            get_logger().info("replay_serving", run_id=config.run_id, port=server.port, resume=resume, shard=shard)

        if _restore(tables, serve, server, health, metrics, stop):
            _keep_records(tables, store, server, health, metrics, stop)


def _claim(store: RedisStore, config: Config, shard: int, *, resume: bool) -> None:
    """Check Redis and take the run over."""
    store.check()
    note_shards(store, config.run_id, config.replay.shards, shard)
    if not store.claim(resume=resume) and resume:
        get_logger().warning("nothing_to_resume", meaning="Redis has no record of this run; it begins anew")


@dataclass(frozen=True)
class _Waiting:
    """Waits at the start for a Redis in a state that passes, each time up to `seconds`.

    A Redis that loads its data says so, and is waited for as long as that takes. A wrong password or a database that
    is not there raises at once: no wait would mend it.
    """

    store: RedisStore
    health: Health
    stop: StopSignal
    seconds: float

    def until(self, attempt: Callable[[], None]) -> bool:
        """Wait until `attempt` raises nothing; False: the stop came first. Raises what it does, at the end."""
        until, said = time.monotonic() + self.seconds, ""
        while True:
            self.health.turn()
            try:
                attempt()
            except _PASSING as error:
                if self.store.is_loading:
                    until = time.monotonic() + self.seconds
                elif time.monotonic() >= until:
                    waited = f"waited for {self.seconds:g} s, as replay.redis_start_seconds says"
                    if isinstance(error, StoreFullError):
                        waited += "; before version 7 only more memory helps, as no run can be taken over to trim it"
                    raise type(error)(f"{error} ({waited})") from error
                if str(error) != said:
                    said = str(error)
                    self.health.set_unready(said)
                    get_logger().warning("waiting_for_redis", reason=said, at_most_seconds=self.seconds)
                if self.stop.wait(KEEP_SECONDS):
                    return False
            else:
                if said:
                    get_logger().info("redis_answers")
                return True


def _restore(
    tables: Tables,
    serve: Callable[[], None],
    server: Server,
    health: Health,
    metrics: ReplayMetrics,
    stop: StopSignal,
) -> bool:
    """Bring the rows, going on after a Redis that is away comes back; False: the stop came first."""

    def ended() -> PacelineError | None:
        health.turn()  # asked after each piece
        return UnavailableError("replay is stopping") if stop.is_set() else None

    health.set_unready("its rows are not restored yet")
    while True:
        try:
            tables.restore(ended, serve)
        except UnavailableError as error:
            if not stop.is_set():
                get_logger().warning("restore_interrupted", error=str(error), meaning="it goes on where it ended")
            server.set_ready(False)
            health.set_unready(f"its store is away: {error}")
            metrics.redis_available.set(0)
            if stop.wait(KEEP_SECONDS):
                return False
        else:
            metrics.redis_available.set(1)
            return True


def _keep_records(
    tables: Tables, store: RedisStore, server: Server, health: Health, metrics: ReplayMetrics, stop: StopSignal
) -> None:
    log, problem, available = get_logger(), "", True
    while not stop.wait(KEEP_SECONDS):
        health.turn()
        error = _keep_once(tables)
        with suppress(PacelineError):  # of a Redis that is away nothing new is known
            used, maximum = store.read_memory()
            metrics.redis_used_bytes.set(used)
            metrics.redis_max_bytes.set(maximum)
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
            if available:
                health.set_ready()
            else:
                health.set_unready(f"its store is away: {error}")
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
