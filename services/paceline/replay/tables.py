"""The tables of a run: which are configured, which are open, and their restore from Redis."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from paceline.config import Config
from paceline.errors import ConflictError, NotFoundError, PacelineError, UnavailableError
from paceline.replay.learners import LearnerHold
from paceline.replay.log import RedisLog
from paceline.replay.logged import LogState
from paceline.replay.metrics import ReplayMetrics, TableMetrics
from paceline.replay.settings import (
    limiter_settings,
    memory_settings,
    require_memory,
    row_limit,
    settings_json,
)
from paceline.replay.store import RedisStore
from paceline.replay.table import Table
from paceline.rows import RowSpec
from paceline.tables.limiter import Ended
from paceline.telemetry import get_logger


class Tables:
    """The tables of one run. Closed to callers until it is known which have a record."""

    def __init__(self, config: Config, store: RedisStore, metrics: ReplayMetrics, *, shard: int = 0) -> None:
        """Raises ConfigError when a limiter's window could hold both sides back for ever."""
        self._config, self._store, self._metrics, self._shard = config, store, metrics, shard
        self._opening = threading.Lock()
        self._open: dict[str, Table] = {}
        self._ready = False
        self.learner = LearnerHold(store)
        """Who may train on the rows."""
        self._limiters = {name: limiter_settings(config, name) for name in config.replay.tables}

    @property
    def open_tables(self) -> list[Table]:
        """Every open table, by name."""
        return [table for _, table in sorted(self._open.items())]

    def load(self) -> None:
        """Open every table that has a record, with its counters and without its rows, and let callers in.

        Raises what Redis does; called again it goes on where it ended.
        """
        self.learner.load()
        for name in self._config.replay.tables:
            if name in self._open:
                continue
            log = RedisLog(self._store, name)
            state = log.read_state()
            if state is not None:
                self._open[name] = self._make(name, state.row_spec, log, state)
                self._warn_if_beyond_redis(name)
        self._ready = True

    def restore(self, ended: Ended, on_readable: Callable[[], None]) -> None:
        """Bring the rows of every open table; `on_readable` is called when all of them can be sampled.

        First each table gets the rows that its first sample needs, then each the rest, the learner's before the others.
        Raises what `ended` gives, and what Redis does; called again it goes on where it ended.
        """
        began = time.perf_counter()
        tables = sorted(self.open_tables, key=lambda table: table.name != self._config.learner.table)
        steps = {table.name: table.restore() for table in tables}
        for table in tables:
            while not table.is_readable:
                _take_step(steps[table.name], ended)
        on_readable()
        for table in tables:
            while not table.is_whole:
                _take_step(steps[table.name], ended)
        self._metrics.restore_seconds.set(time.perf_counter() - began)

    def has_rows(self) -> bool:
        """Whether any table ever got a row."""
        return any(table.inserted for table in self.open_tables)

    def require_ready(self) -> None:
        """Raise UnavailableError while it is not known yet which tables have a record."""
        if not self._ready:
            raise UnavailableError("replay is still restoring its tables from Redis; retry")

    def __getitem__(self, name: str) -> Table:
        """An open table. Raises NotFoundError."""
        try:
            return self._open[name]
        except KeyError:
            self._require_configured(name)
            raise NotFoundError(f"table {name!r} is not open yet: OpenTable must come first") from None

    def open(self, name: str, spec: RowSpec) -> Table:
        """Open a table with rows of `spec`; the same again changes nothing.

        Raises:
            NotFoundError: it is not configured.
            ConflictError: it is open with another spec.
            RowSpecError: so many such rows do not fit this machine's memory, or no block fits the table.
        """
        self._require_configured(name)
        with self._opening:
            table = self._open.get(name)
            if table is None:
                table = self._make(name, spec, RedisLog(self._store, name))
                table.begin()
                self._open[name] = table
                get_logger().info(
                    "table_opened", table=name, row_bytes=spec.row_bytes, capacity_rows=table.capacity_rows
                )
                self._warn_if_beyond_redis(name)
            elif table.spec != spec:
                raise ConflictError(
                    f"table {name!r} has columns {_describe(table.spec)}: it cannot also have {_describe(spec)}; "
                    "choose another run.id for another environment or algorithm"
                )
            return table

    def wake(self) -> None:
        """Have every wait look whether it must end."""
        for table in list(self._open.values()):
            table.limiter.wake()
            table.wake()

    def keep_records(self, *, all_pages: bool = False) -> None:
        """Write counters and changed pages of every table to Redis and mend what differs.

        Raises:
            UnavailableError: Redis is away.
        """
        for table in list(self._open.values()):
            table.keep_record(all_pages=all_pages)
        self.learner.keep(again=True)
        if not self._open:
            self._store.command("PING")

    def _make(self, name: str, spec: RowSpec, log: RedisLog, state: LogState | None = None) -> Table:
        config, limiter = self._config.replay.tables[name], self._limiters[name]
        memory = memory_settings(self._config, name, spec)
        used = settings_json(config, limiter, memory)
        if state is not None and config.queue:
            # Rows that wait are never dropped for a capacity that is lower now. Those that were dropped wait no more,
            # though nobody consumed them: the record's first row tells.
            oldest = log.read_oldest_row()
            first = state.inserted if oldest is None else max(state.consumed, oldest)
            memory = replace(memory, capacity_rows=max(memory.capacity_rows, state.inserted - first))
        needed = memory.physical_rows * spec.row_bytes
        require_memory(name, needed, held=sum(table.memory.memory_bytes for table in self._open.values()))
        table = Table(
            name,
            spec,
            config,
            log,
            TableMetrics(self._metrics, name),
            capacity_rows=config.rows_that_fit(spec.row_bytes),
            memory=memory,
            limiter=limiter,
            row_limit=row_limit(self._config, name, self._shard),
            settings_json=used,
        )
        if state is not None:
            table.load(state)
            _report_differences(table, state.limiter_json, used)
        return table

    def _warn_if_beyond_redis(self, name: str) -> None:
        """Say that Redis will be full before the tables are, of which table `name` was opened last."""
        maxmemory = 0
        with suppress(PacelineError):  # rows matter more than a warning
            maxmemory = self._store.read_memory().maximum
        needed = sum(self._full_bytes(table) for table in self._open.values())
        if 0 < maxmemory < needed:
            get_logger().warning(
                "table_exceeds_redis",
                table=name,
                tables=sorted(self._open),
                needed_bytes=needed,
                maxmemory_bytes=maxmemory,
                meaning="when Redis is full, before the tables are, inserts are refused and sampling goes on; raise "
                f"maxmemory of Redis, or lower capacity_rows or capacity_bytes of replay.tables.{name}",
            )

    def _full_bytes(self, table: Table) -> int:
        """Bytes of the rows that a table is to hold, or will ever get."""
        limit = row_limit(self._config, table.name, self._shard)
        rows = table.capacity_rows if limit is None else min(table.capacity_rows, limit)
        return rows * table.spec.row_bytes

    def _require_configured(self, name: str) -> None:
        if name not in self._config.replay.tables:
            raise NotFoundError(f"no table {name[:80]!r}: replay.tables has {', '.join(self._config.replay.tables)}")


def _take_step(steps: Iterator[None], ended: Ended) -> None:
    error = ended()
    if error is not None:
        raise error
    next(steps, None)


def _report_differences(table: Table, stored: str, used: str) -> None:
    table.metrics.settings_differ.set(stored != used)
    if stored != used:
        before, now = _parse_settings(stored), json.loads(used)
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        get_logger().warning(
            "table_settings_differ",
            table=table.name,
            stored={key: before.get(key) for key in changed},
            used={key: now.get(key) for key in changed},
            meaning="the current configuration holds; the record was begun with the stored one",
        )


def _parse_settings(text: str) -> dict[str, object]:
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    return settings if isinstance(settings, dict) else {"unreadable": text}


def _describe(spec: RowSpec) -> str:
    return ", ".join(f"{column.name} {column.dtype}{list(column.shape)}" for column in spec.columns)
