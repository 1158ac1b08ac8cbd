"""What a learner knows of the rows of its shards, which are real replay services with a strict ratio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from integration.replay_harness import SECONDS, SPEC, Client, block, free_port, make_config, request, wait_until
from paceline.config import Config
from paceline.errors import DeadlineError
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import Batch, BatchSource, FollowSource, RowCounts, open_followed, open_samples, sharded
from paceline.local.embedded import EmbeddedRedis
from paceline.rows import numpy_columns
from paceline.rpc.client import open_channel

CPU = torch.device("cpu")
MINIMUM = 20
"""Rows that a shard has to have before the first sample."""


class Pair:
    """Two shards; collector `number` appends blocks of 10 rows to its own, from row 1,000 x `number` on."""

    def __init__(self, config: Config, clients: list[Client]) -> None:
        self.config, self.clients = config, clients
        self._blocks = [0, 0]

    def append(self, number: int, block_count: int = 1) -> None:
        for _ in range(block_count):
            first = 1000 * number + 10 * self._blocks[number]
            self._blocks[number] += 1
            self.clients[number].append(request(self._blocks[number], block(first, 10), collector=number))


@pytest.fixture
def start_pair(bundled_redis: EmbeddedRedis, serve) -> Callable[[str], Pair]:
    """Starts two shards that are to be read as is said. The ratio lets 16 rows be sampled for each one inserted."""

    def start(read: str) -> Pair:
        ports = [free_port() for _ in range(2)]
        address = ",".join(f"127.0.0.1:{port}" for port in ports)
        configs = [
            make_config(
                bundled_redis.url,
                rpc={"backoff_max_seconds": 0.2},
                replay={"read": read, "shards": 2, "address": address, "listen": f"127.0.0.1:{port}"},
                collector={"count": 2, "block_rows": 10},
                learner={"updates": "strict", "updates_per_step": 1.0, "batch_size": 16, "prefetch_batches": 1},
                limiter={"min_rows": 2 * MINIMUM, "deadline_seconds": 1.0},
            )
            for port in ports
        ]
        clients = [serve(config, shard=shard)[1] for shard, config in enumerate(configs)]
        for client in clients:
            client.open()
        return Pair(configs[0], clients)

    return start


@pytest.fixture
def learn() -> Iterator[Callable[[Config], BatchSource]]:
    """Opens the source that a configuration asks for, and closes it."""
    opened: list[tuple[BatchSource, list]] = []

    def start(config: Config) -> BatchSource:
        metrics, channels = LearnerMetrics(CollectorRegistry()), []
        if config.follows:
            channels = [open_channel(address, config.rpc) for address in config.replay.shard_addresses()]
            source = open_followed(config, channels, SPEC, seed=1, metrics=metrics, device=CPU)
        else:
            source = open_samples(config, SPEC, seed=1, metrics=metrics, device=CPU)
        opened.append((source, channels))
        return source

    yield start
    for source, channels in opened:
        source.close()
        for channel in channels:
            channel.close()


def values(batch: Batch) -> np.ndarray:
    return numpy_columns(SPEC, batch.rows.numpy())["value"].astype(int)


def take_until_held_back(source: BatchSource) -> None:
    """Take the batches that the ratio lets pass."""
    with suppress(DeadlineError):
        while True:
            source.next_batch(1.5)


@pytest.mark.parametrize("read", ["sample", "follow"])
def test_a_learner_that_starts_again_goes_on_without_a_shard_whose_collectors_are_gone(
    start_pair, learn, monkeypatch, read
):
    monkeypatch.setattr(sharded, "HELD_BACK_SECONDS", 0.1)
    pair = start_pair(read)
    for number in range(2):
        pair.append(number, MINIMUM // 10)
    first = learn(pair.config)
    first.next_batch(SECONDS)
    take_until_held_back(first)
    first.close()
    pair.append(0)
    second = learn(pair.config)
    batch = second.next_batch(SECONDS)
    assert values(batch).max() < 1000
    assert (batch.table_row_count, batch.inserted_row_count) == (2 * MINIMUM + 10, 2 * MINIMUM + 10)


@pytest.mark.parametrize("read", ["sample", "follow"])
def test_a_shard_that_has_too_few_rows_yet_is_waited_for(start_pair, learn, monkeypatch, read):
    monkeypatch.setattr(sharded, "HELD_BACK_SECONDS", 0.0)
    pair = start_pair(read)
    pair.append(0, MINIMUM // 10)
    pair.append(1, MINIMUM // 10 - 1)
    source = learn(pair.config)

    def first_has_begun() -> bool:
        with pytest.raises(DeadlineError):
            source.next_batch(0.1)
        return source._shards[0].source.counts is not None

    wait_until(first_has_begun, "the rows of the other shard are known")
    with pytest.raises(DeadlineError, match="shard 1: no batch"):
        source.next_batch(0.5)
    pair.append(1)
    batches = [source.next_batch(SECONDS) for _ in range(3)]
    assert {value // 1000 for batch in batches for value in values(batch)} == {0, 1}


def test_what_a_follower_gives_back_counts_as_not_sampled(start_pair, learn):
    pair = start_pair("follow")
    for number in range(2):
        pair.append(number, MINIMUM // 10)
    source = learn(pair.config)
    source.next_batch(SECONDS)
    shard = source._shards[0].source
    assert isinstance(shard, FollowSource)
    before = shard.progress().sampled_row_count
    shard.next_batch(SECONDS)
    shard.give_back(5)
    assert shard.progress().sampled_row_count == before + 8 - 5


def test_rows_of_a_sampled_shard_are_known_though_no_batch_is_taken(start_pair, learn):
    pair = start_pair("sample")
    for number in range(2):
        pair.append(number, MINIMUM // 10)
    source = learn(pair.config)
    source.next_batch(SECONDS)
    pair.append(1)
    shard = source._shards[1].source
    wait_until(lambda: shard.counts == RowCounts(MINIMUM + 10, MINIMUM + 10), "the rows are known")
