"""The tables of a run: which are configured, which are open, and their restore from Redis."""

from __future__ import annotations

import os
import threading
import time

from paceline.config import Config
from paceline.errors import ConflictError, NotFoundError, RowSpecError, UnavailableError
from paceline.replay.log import RedisLog
from paceline.replay.metrics import ReplayMetrics
from paceline.replay.store import RedisStore
from paceline.replay.table import Table
from paceline.rows import RowSpec
from paceline.tables.limiter import Ended, LimiterSettings
from paceline.telemetry import get_logger


class Tables:
    """The tables of one run. Closed to callers until they are restored."""

    def __init__(self, config: Config, store: RedisStore, metrics: ReplayMetrics) -> None:
        """Raises ConfigError when a limiter's window could hold both sides back for ever."""
        self._config, self._store, self._metrics = config, store, metrics
        self._opening = threading.Lock()
        self._open: dict[str, Table] = {}
        self._ready = False
        self._settings = {name: _limiter_settings(config, name) for name in config.replay.tables}

    @property
    def open_tables(self) -> list[Table]:
        """Every open table, by name."""
        return [table for _, table in sorted(self._open.items())]

    def restore(self, ended: Ended) -> None:
        """Fill every table that has a record, and let callers in. Raises what `ended` gives, and what Redis does."""
        began = time.perf_counter()
        for name in self._config.replay.tables:
            log = RedisLog(self._store, name)
            state = log.read_state()
            if state is not None:
                table = self._make(name, state.row_spec, log)
                table.restore(state, ended)
                self._open[name] = table
        self._metrics.restore_seconds.set(time.perf_counter() - began)
        self._ready = True

    def require_ready(self) -> None:
        """Raise UnavailableError while the tables are being restored."""
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
            RowSpecError: so many such rows do not fit this machine's memory.
        """
        self._require_configured(name)
        with self._opening:
            table = self._open.get(name)
            if table is None:
                table = self._make(name, spec, RedisLog(self._store, name))
                table.begin()
                self._open[name] = table
                get_logger().info("table_opened", table=name, row_bytes=spec.row_bytes)
            elif table.spec != spec:
                raise ConflictError(
                    f"table {name!r} has columns {_describe(table.spec)}: it cannot also have {_describe(spec)}; "
                    "choose another run.id for another environment or algorithm"
                )
            return table

    def wake(self) -> None:
        """Have every wait for a limiter look whether it must end."""
        for table in list(self._open.values()):
            table.limiter.wake()

    def keep_records(self) -> None:
        """Write the counters of every table to Redis and mend what differs. Raises UnavailableError if it is away."""
        for table in list(self._open.values()):
            table.keep_record()
        if not self._open:
            self._store.command("PING")

    def _make(self, name: str, spec: RowSpec, log: RedisLog) -> Table:
        table = self._config.replay.tables[name]
        needed, there = table.capacity_rows * spec.row_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > there:
            raise RowSpecError(
                f"table {name!r} of {table.capacity_rows} rows of {spec.row_bytes} bytes needs {needed} bytes: "
                f"expected at most {there}, the memory of this machine; lower replay.tables.{name}.capacity_rows"
            )
        learners = name == self._config.learner.table
        limit = self._config.run.environment_steps if learners else None
        return Table(name, spec, table, self._settings[name], log, self._metrics, row_limit=limit)

    def _require_configured(self, name: str) -> None:
        if name not in self._config.replay.tables:
            raise NotFoundError(f"no table {name[:80]!r}: replay.tables has {', '.join(self._config.replay.tables)}")


def _limiter_settings(config: Config, name: str) -> LimiterSettings:
    limiter = config.replay.tables[name].limiter
    learners = name == config.learner.table
    settings = LimiterSettings(
        min_rows=limiter.min_rows,
        samples_per_insert=config.samples_per_insert() if learners else None,
        window_rows=config.limiter_window_rows() if learners else None,
        deadline_seconds=limiter.deadline_seconds,
    )
    settings.require_room(batch_rows=config.learner.batch_size, block_rows=config.collector.block_rows)
    return settings


def _describe(spec: RowSpec) -> str:
    return ", ".join(f"{column.name} {column.dtype}{list(column.shape)}" for column in spec.columns)
