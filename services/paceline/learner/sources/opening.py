"""The source that a configuration asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import grpc
import numpy as np
import torch

from paceline.config import Config
from paceline.lag.bound import LearnerVersion
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources.batch import BatchSource
from paceline.learner.sources.followed import FollowSource
from paceline.learner.sources.queued import QueueSource
from paceline.learner.sources.room import require_room
from paceline.learner.sources.sampled import SampleSource
from paceline.learner.sources.sharded import QueueShards, ShardedSource
from paceline.rows import RowSpec
from paceline.tables.limiter import LimiterSettings
from paceline.tables.memory import MemorySettings


def require_ring_fits(config: Config, spec: RowSpec, device: torch.device) -> None:
    """Raise ConfigError where the learner shall follow its table and the rings cannot fit the memory they lie in."""
    table = config.replay.tables[config.learner.table]
    if not config.follows or table.queue:
        return
    settings, shards = _memory_settings(config, spec), config.replay.shards
    require_room(
        shards * settings.physical_rows * spec.row_bytes, device=device, table=config.learner.table, ring_count=shards
    )


def open_samples(
    config: Config,
    spec: RowSpec,
    *,
    seed: int,
    metrics: LearnerMetrics,
    device: torch.device,
    learner_version: LearnerVersion | None = None,
    learner_id: str = "",
) -> BatchSource:
    """Batches that replay draws. Starts a process for each shard, so call it before any channel is open.

    Args:
        learner_version: what the bound on the lag counts from at the start; None: what replay's rows say.
        learner_id: replay refuses another learner than that of its rows, and asks its incarnation, which
            `learner_version` has; empty: it is not said.
    """
    learner, shards = config.learner, config.replay.shards
    table = config.replay.tables[learner.table]
    sampler = table.sampler
    draws_alike = sampler == "uniform" or (sampler == "recent" and table.recent.half_life_versions is None)
    sources = [
        SampleSource(
            address,
            run_id=config.run_id,
            table=learner.table,
            spec=spec,
            # A batch mixes the shards' rows, so each shard gives its part of one at a time.
            batch_size=math.ceil(learner.batch_size / shards),
            prefetch=learner.prefetch_batches,
            seed=shard_seed,
            rpc=config.rpc,
            security=config.security,
            metrics=metrics,
            device=device,
            shard=shard,
            has_priorities=sampler == "prioritised",
            times=config.lag.attribution,
            is_bounded=config.lag.max_lag_versions is not None and draws_alike,
            tells_rows=shards > 1,
            learner=learner_version,
            learner_id=learner_id,
        )
        for shard, (address, shard_seed) in enumerate(
            zip(config.replay.shard_addresses(), _shard_seeds(seed, shards), strict=True)
        )
    ]
    return _joined(config, sources, seed, metrics)


def open_followed(
    config: Config,
    channels: Sequence[grpc.Channel],
    spec: RowSpec,
    *,
    seed: int,
    metrics: LearnerMetrics,
    device: torch.device,
    base_version: int = 0,
    learner_id: str = "",
    learner_incarnation: int = 0,
) -> BatchSource:
    """Batches from the rows of every shard, which are sent here once.

    Args:
        channels: one to each shard, by its number.
        base_version: rows of an earlier policy version count for the bound on the lag as if they were of this one.
        learner_id, learner_incarnation: replay refuses another learner than that of its rows, and an incarnation that
            was replaced; empty and 0: they are not said.
    """
    learner, shards = config.learner, len(channels)
    table = config.replay.tables[learner.table]
    if table.queue:
        queues = [
            QueueSource(
                channel,
                run_id=config.run_id,
                table=learner.table,
                spec=spec,
                batch_size=learner.batch_size,
                prefetch=learner.prefetch_batches,
                rpc=config.rpc,
                metrics=metrics,
                device=device,
                shard=shard,
                times=config.lag.attribution,
                learner_id=learner_id,
                learner_incarnation=learner_incarnation,
            )
            for shard, channel in enumerate(channels)
        ]
        return queues[0] if shards == 1 else QueueShards(queues)
    limiter = LimiterSettings(
        min_rows=math.ceil(table.limiter.min_rows / shards),
        samples_per_insert=config.samples_per_insert(),
        window_rows=config.limiter_window_rows(),
        deadline_seconds=table.limiter.deadline_seconds,
    )
    sources = [
        FollowSource(
            channel,
            run_id=config.run_id,
            table=learner.table,
            spec=spec,
            memory=_memory_settings(config, spec),
            limiter=limiter,
            batch_size=math.ceil(learner.batch_size / shards),
            seed=shard_seed,
            rpc=config.rpc,
            metrics=metrics,
            device=device,
            shard=shard,
            times=config.lag.attribution,
            base_version=base_version,
            learner_id=learner_id,
            learner_incarnation=learner_incarnation,
        )
        for shard, (channel, shard_seed) in enumerate(zip(channels, _shard_seeds(seed, shards), strict=True))
    ]
    return _joined(config, sources, seed, metrics)


def _joined(
    config: Config, sources: Sequence[SampleSource | FollowSource], seed: int, metrics: LearnerMetrics
) -> BatchSource:
    if len(sources) == 1:
        return sources[0]
    is_bounded = config.replay.tables[config.learner.table].max_times_sampled is not None
    return ShardedSource(
        sources,
        batch_size=config.learner.batch_size,
        seed=seed,
        metrics=metrics,
        counts_draws=not config.follows and (is_bounded or config.samples_per_insert() is not None),
    )


def _shard_seeds(seed: int, shards: int) -> list[int]:
    if shards == 1:
        return [seed]
    return [int(each.generate_state(1, np.uint64)[0]) for each in np.random.SeedSequence(seed).spawn(shards)]


def _memory_settings(config: Config, spec: RowSpec) -> MemorySettings:
    fit = config.replay.tables[config.learner.table].rows_that_fit(spec.row_bytes)
    return MemorySettings(fit).bounded(config.lag.max_lag_versions)
