"""What the configuration means for one table of one shard."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

from paceline.config import Config, TableConfig
from paceline.errors import RowSpecError
from paceline.process import memory_bytes
from paceline.rows import RowSpec
from paceline.tables.limiter import LimiterSettings
from paceline.tables.memory import MemorySettings


def limiter_settings(config: Config, name: str) -> LimiterSettings:
    """The limiter of table `name` on each shard.

    Every shard needs its part of the rows before the first sample. The band is whole on each: it must admit one batch
    and one block, and a batch may come from one shard alone.

    Raises:
        ConfigError: the window could hold both sides back for ever; says the smallest valid one.
    """
    limiter = config.replay.tables[name].limiter
    ratio: float | None
    window: float | None
    if name == config.learner.table:
        ratio, window = config.samples_per_insert(), config.limiter_window_rows()
    elif config.replay.tables[name].queue or limiter.samples_per_insert is None:
        ratio = window = None
    else:
        ratio = limiter.samples_per_insert
        smallest = config.learner.batch_size + math.ceil(config.collector.block_rows * ratio)
        window = limiter.window_rows or 2 * smallest
    settings = LimiterSettings(
        min_rows=math.ceil(limiter.min_rows / config.replay.shards),
        samples_per_insert=ratio,
        window_rows=window,
        deadline_seconds=limiter.deadline_seconds,
    )
    settings.require_room(
        batch_rows=config.learner.batch_size,
        block_rows=config.collector.block_rows,
        setting=f"replay.tables.{name}.limiter.window_rows",
    )
    return settings


def row_limit(config: Config, name: str, shard: int) -> int | None:
    """Rows that shard `shard` of table `name` ever takes: its part of the run's steps; None: any number.

    Only the learner's table has a limit. The first shards get what does not divide.
    """
    if name != config.learner.table:
        return None
    each, rest = divmod(config.run.environment_steps, config.replay.shards)
    return each + (shard < rest)


def memory_settings(config: Config, name: str, spec: RowSpec) -> MemorySettings:
    """How table `name` keeps and draws rows of `spec`.

    Raises:
        RowSpecError: not even one block fits, so few rows fit that learner and collectors would wait for each other,
            or the rows lack what the sampler weighs them by.
    """
    table, block_rows = config.replay.tables[name], 1
    if name == config.learner.table:
        block_rows = config.collector.block_rows
    fit = table.rows_that_fit(spec.row_bytes)
    if fit < block_rows:
        raise RowSpecError(
            f"table {name!r} may hold {table.capacity_bytes} bytes, {fit} rows of {spec.row_bytes} bytes: expected "
            f"room for a block of {block_rows} rows, {block_rows * spec.row_bytes} bytes; raise "
            f"replay.tables.{name}.capacity_bytes or lower collector.block_rows"
        )
    if fit < table.capacity_rows and (why := config.why_stuck(name, fit)) is not None:
        raise RowSpecError(
            f"table {name!r} may hold {table.capacity_bytes} bytes, {fit} rows of {spec.row_bytes} bytes; with so "
            f"many rows {why}; or raise replay.tables.{name}.capacity_bytes"
        )
    settings = MemorySettings(
        capacity_rows=fit,
        sampler=table.sampler,
        exponent=table.prioritised.exponent,
        max_lag_versions=table.recent.max_lag_versions if table.sampler == "recent" else None,
        half_life_versions=table.recent.half_life_versions,
        remover=table.remover,
        max_times_sampled=table.max_times_sampled,
        capacity_setting="capacity_rows" if fit == table.capacity_rows else "the rows that fit in capacity_bytes",
    )
    if name == config.learner.table and not table.queue:
        settings = settings.bounded(config.lag.max_lag_versions)
        if settings.sampler != "recent" and config.lag.max_lag_versions is not None:
            # Draws by priority or age: replay skips what they give beyond the bound.
            settings = replace(
                settings, max_lag_versions=config.lag.max_lag_versions, bound_setting="lag.max_lag_versions"
            )
    needs_versions = settings.sampler == "recent" or settings.max_lag_versions is not None
    if needs_versions and ("policy_version" not in spec or spec["policy_version"].dtype != "int64"):
        raise RowSpecError(
            f"table {name!r} is sampled by policy version, and its rows have columns {', '.join(spec.offsets)}: "
            "expected an int64 column policy_version"
        )
    return settings


def require_memory(name: str, needed: int, held: int) -> None:
    """Raise RowSpecError if a table of `needed` bytes fits no memory here beside `held` bytes of others."""
    there = memory_bytes()
    if needed + held > there:
        raise RowSpecError(
            f"table {name!r} needs {needed} bytes of memory beside {held} of the other tables: expected at most "
            f"{there} in all, what this machine or its container has; lower replay.tables.{name}.capacity_rows or "
            "capacity_bytes"
        )


def settings_json(table: TableConfig, limiter: LimiterSettings, memory: MemorySettings) -> str:
    """Canonical JSON of what holds for a table, to compare with what its record was begun with."""
    settings = {
        **asdict(limiter),
        **asdict(memory),
        "queue": table.queue,
        "overflow": table.overflow,
        "kind": table.kind,
    }
    del settings["bound_setting"], settings["capacity_setting"]
    return json.dumps(settings, sort_keys=True)
