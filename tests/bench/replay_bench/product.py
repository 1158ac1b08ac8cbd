"""The replay service as a process, with Redis and without."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import structlog
from prometheus_client import CollectorRegistry

from paceline.process import StopSignal
from paceline.replay import tables as replay_tables
from paceline.replay.link import Argument
from paceline.replay.logged import BlockWrite, LogState
from paceline.replay.main import run
from paceline.replay.metrics import ReplayMetrics
from paceline.replay.service import SERVICE, ReplayService
from paceline.replay.store import RedisMemory, RedisStore
from paceline.rpc.server import Server
from paceline.telemetry import configure_logging
from replay_bench.runs import RUN, TABLE, make_config


def serve_product(redis_url: str, address: str, ring_rows: int, tables: Sequence[str] = (TABLE,)) -> None:
    """The replay service, as `paceline replay` runs it."""
    log_problems()
    run(make_config(redis_url, address, ring_rows, tables=tables), resume=False, stop=StopSignal.install())


def serve_unrecorded(address: str, ring_rows: int) -> None:
    """The replay service with a record that keeps nothing: what Redis costs is left out, all else is there."""
    log_problems()
    replay_tables.RedisLog = ForgetfulLog  # the one place that makes logs
    config = make_config("unix:///none", address, ring_rows)
    metrics = ReplayMetrics(CollectorRegistry())
    tables = replay_tables.Tables(config, ForgetfulStore("unix:///none", RUN, deadline_seconds=1), metrics)
    tables.load()
    service = ReplayService(
        RUN,
        tables,
        metrics,
        max_collectors=config.collector.max_count,
        rpc=config.rpc,
    )
    server = Server(address, config.rpc, services=[SERVICE], register=[], handlers=[service.handler()], max_streams=16)
    server.start()
    server.set_serving(True)
    threading.Event().wait()  # until SIGTERM


def log_problems() -> None:
    """Log as a service does, less what is no problem: figures are what this program prints."""
    configure_logging("replay")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


class ForgetfulStore(RedisStore):
    """A Redis that has nothing and takes everything."""

    def command(self, *arguments: Argument) -> None:
        pass

    def read_memory(self) -> RedisMemory:
        return RedisMemory(used=0, maximum=0)


class ForgetfulLog:
    """The record of a table, as RedisLog promises it, less the record."""

    replaced = False
    epoch = 1

    def __init__(self, store: RedisStore, table: str) -> None:
        pass

    def read_state(self) -> None:
        return None

    def begin(self, state: LogState) -> None:
        pass

    def append(self, writes: Sequence[BlockWrite]) -> int:
        return len(writes)
