"""A learner that follows: what rows beyond the bound on the lag, and rows that are still restored, make it do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from integration.replay_harness import Client, make_config, request, retry, wait_until
from paceline.config import Config
from paceline.errors import (
    DeadlineError,
    LimiterTimeoutError,
    StarvedError,
    StarvedForGoodError,
    UnavailableError,
)
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import Batch, FollowSource, followed, open_followed
from paceline.local.embedded import EmbeddedRedis
from paceline.replay import draws, service
from paceline.replay.log import RedisLog
from paceline.rows import Block, Column, RowSpec, numpy_columns
from paceline.rpc.client import open_channel
from paceline.rpc.status import raising

SECONDS = 30.0
SPEC = RowSpec((Column("value", "float64"), Column("policy_version", "int64")))
BATCH, BLOCK = 16, 64
WINDOW_ROWS = 2 * (1 + BLOCK)
"""Rows that the limiter's window, of a batch and a block twice, lets pass at once."""


@pytest.fixture
def redis_server(bundled_redis: EmbeddedRedis) -> EmbeddedRedis:
    return bundled_redis


@pytest.fixture
def learn() -> Iterator[Callable[..., FollowSource]]:
    """Opens the source that a configuration asks for, and closes it."""
    opened = []

    def start(config: Config, registry: CollectorRegistry | None = None) -> FollowSource:
        channels = [open_channel(address, config.rpc) for address in config.replay.shard_addresses()]
        metrics = LearnerMetrics(registry or CollectorRegistry())
        source = open_followed(config, channels, SPEC, seed=1, metrics=metrics, device=torch.device("cpu"))
        assert isinstance(source, FollowSource)
        opened.append((source, channels))
        return source

    yield start
    for source, channels in opened:
        source.close()
        for channel in channels:
            channel.close()


def bounded(redis_url: str, **sections: dict) -> Config:
    """One update of 16 rows for each row, blocks of 64, and rows of at most 3 versions ago."""
    return make_config(
        redis_url,
        learner={"updates": "strict", "updates_per_step": 1.0, "batch_size": BATCH},
        collector={"block_rows": BLOCK, "max_blocks_in_flight": 4},
        lag={"max_lag_versions": 3},
        limiter={"min_rows": BLOCK, "deadline_seconds": sections.pop("deadline_seconds", 0.2)},
        rpc={"backoff_max_seconds": 0.05},
        **sections,
    )


class Collector:
    """Sends blocks one after the other, each of rows of one policy version."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.blocks = 0

    def append(self, version: int, rows: int = BLOCK) -> None:
        """One block. Raises LimiterTimeoutError when it was held back."""
        made = Block.empty(SPEC, rows)
        made.columns["value"] = np.arange(rows)
        made.columns["policy_version"] = version
        self.client.append(request(self.blocks + 1, made))
        self.blocks += 1

    def append_until_held_back(self, version: int) -> int:
        """Blocks until the limiter holds one back; how many passed."""
        before = self.blocks
        while self.blocks < before + 100:
            try:
                self.append(version)
            except LimiterTimeoutError:
                break
        return self.blocks - before


def versions(batch: Batch) -> set[int]:
    return set(numpy_columns(SPEC, batch.rows.numpy())["policy_version"].tolist())


def starve(source: FollowSource) -> None:
    with pytest.raises(StarvedError, match="at most 3 versions"):
        source.next_batch(0.1)


def test_rows_beyond_the_bound_hold_no_inserts_back_until_newer_ones_are_there(redis_server, serve, learn):
    config, registry = bounded(redis_server.url, deadline_seconds=SECONDS), CollectorRegistry()
    _, client = serve(config)
    client.open(SPEC)
    collector, source = Collector(client), learn(config, registry)
    collector.append(version=1)
    for _ in range(3):
        source.next_batch(SECONDS)
    source.set_policy_version(10)
    # The blocks that were in flight are of an old policy, too: more than the limiter's window lets pass.
    thread = threading.Thread(target=lambda: [collector.append(version) for version in (*[1] * 8, 10)], daemon=True)
    thread.start()
    batches = 3

    def draw() -> bool:
        nonlocal batches
        try:
            batch = source.next_batch(0.1)
        except StarvedError:
            return False
        batches += 1
        return versions(batch) == {10}

    wait_until(draw, "the row of the newest policy comes")
    thread.join(SECONDS)
    assert collector.blocks == 10
    # It stays reported, and neither side's record says that more was sampled than was.
    assert registry.get_sample_value("paceline_learner_starved_seconds_total") > 0
    source.close()
    wait_until(lambda: client.describe().sampled_row_count == batches * BATCH, "what was sampled is reported")


def test_a_window_of_rows_at_once_is_let_pass_and_no_more_when_newer_ones_are_there(
    redis_server, serve, learn, monkeypatch
):
    monkeypatch.setattr(followed, "WAIVE_SECONDS", 1e6)
    config = bounded(redis_server.url)
    _, client = serve(config)
    client.open(SPEC)
    collector, source = Collector(client), learn(config)
    collector.append(version=1)
    collector.append_until_held_back(version=1)
    source.next_batch(SECONDS)
    source.set_policy_version(10)
    before = collector.blocks
    starve(source)
    wait_until(lambda: collector.append_until_held_back(version=1), "inserts pass again")
    assert collector.blocks - before <= WINDOW_ROWS / BLOCK
    starve(source)
    assert collector.append_until_held_back(version=1) == 0


@pytest.mark.parametrize("restarted", ["replay", "learner"])
def test_a_restart_amid_the_starvation_neither_ends_the_run_nor_changes_its_counts(
    redis_server, serve, learn, restarted
):
    config = bounded(redis_server.url, deadline_seconds=1.0)
    replay, client = serve(config)
    client.open(SPEC)
    collector, source = Collector(client), learn(config)
    collector.append(version=1)
    collector.append_until_held_back(version=1)
    for _ in range(2):
        source.next_batch(SECONDS)
    source.set_policy_version(10)
    starve(source)
    wait_until(lambda: collector.append_until_held_back(version=1), "inserts pass again")
    wait_until(lambda: client.describe().sampled_row_count == 2 * BATCH, "what was sampled is reported")
    if restarted == "replay":
        replay.stop()
        wait_until(lambda: source.is_away, "the stream is cut")
        replay, client = serve(config, resume=True)
        collector.client = client
        wait_until(lambda: not source.is_away, "it goes on")
    else:
        source.close()
        source = learn(config)
        source.set_policy_version(10)
    assert client.describe().sampled_row_count == 2 * BATCH
    drawn: set[int] = set()

    def draw() -> set[int]:
        with suppress(LimiterTimeoutError):
            collector.append(version=10)
        with suppress(StarvedError):
            drawn.update(versions(source.next_batch(0.1)))
        return drawn

    assert wait_until(draw, "the row of the newest policy comes") == {10}
    # As the learner's own limiter counts, from what the record says on.
    assert source._limiter.sampled == 3 * BATCH


@pytest.fixture
def restoring(redis_server, serve, monkeypatch) -> Iterator[tuple[Config, threading.Event]]:
    """A replay that has restored 20 of 100 rows and goes on when the event is set."""
    config = make_config(redis_server.url, limiter={"min_rows": 50}, rpc={"backoff_max_seconds": 0.05})
    go_on = begin_to_restore(config, serve, monkeypatch)
    yield config, go_on
    go_on.set()


def begin_to_restore(config: Config, serve, monkeypatch) -> threading.Event:
    replay, client = serve(config)
    client.open(SPEC)
    collector = Collector(client)
    for _ in range(10):
        collector.append(version=1, rows=10)
    replay.stop()
    read_blocks, go_on = RedisLog.read_blocks, threading.Event()

    def read_some(self, *args, **kwargs):
        for number, each in enumerate(read_blocks(self, *args, **kwargs)):
            if number == 2:
                assert go_on.wait(SECONDS)
            yield each

    monkeypatch.setattr(RedisLog, "read_blocks", read_some)
    serve(config, resume=True, ready=False)
    return go_on


def test_rows_that_are_still_restored_may_be_within_the_bound_so_nothing_is_starved_for_good(
    redis_server, serve, monkeypatch
):
    monkeypatch.setattr(draws, "STARVED_SECONDS", 0.2)
    config = make_config(
        redis_server.url,
        run={"environment_steps": 100},
        lag={"max_lag_versions": 3},
        limiter={"min_rows": 10},
        rpc={"backoff_max_seconds": 0.05},
    )
    go_on = begin_to_restore(config, serve, monkeypatch)
    client = Client(config)

    def sample() -> None:
        message = client.sample_request(4)
        message.policy_version = 10
        with raising("replay"):
            next(iter(client.stub.Sample(iter([message]), timeout=SECONDS)))

    try:
        wait_until(lambda: retry(client.describe, (UnavailableError,)).row_count >= 20, "some rows are there")
        with pytest.raises(StarvedError) as raised:
            sample()
        assert type(raised.value) is StarvedError
        go_on.set()
        wait_until(lambda: client.describe().whole, "it is whole")
        with pytest.raises(StarvedForGoodError):
            sample()
    finally:
        go_on.set()
        client.close()


def test_a_learner_that_follows_a_replay_amid_its_restore_waits_for_all_of_its_rows(restoring, learn):
    config, go_on = restoring
    source = learn(config)
    wait_until(lambda: source._end == 20, "the rows that are there come")
    with pytest.raises(DeadlineError, match=r"20 rows came so far, and replay is restoring .* ends at row 100"):
        source.next_batch(0.05)
    go_on.set()
    assert source.next_batch(SECONDS).table_row_count == 100


def test_beside_a_replay_that_does_not_say_whether_it_is_whole_the_least_rows_are_waited_for(
    restoring, learn, monkeypatch
):
    describe = service.describe

    def describe_as_before(table):
        described = describe(table)
        described.ClearField("whole")
        return described

    monkeypatch.setattr(service, "describe", describe_as_before)
    config, go_on = restoring
    source = learn(config)
    wait_until(lambda: source._end == 20, "the rows that are there come")
    with pytest.raises(DeadlineError, match="20 of the 50 rows"):
        source.next_batch(0.05)
    go_on.set()
    assert source.next_batch(SECONDS).table_row_count >= 50


def test_replay_says_whether_a_table_is_whole(restoring):
    config, go_on = restoring
    client = Client(config)
    try:
        described = retry(client.describe, (UnavailableError,))
        assert described.HasField("whole")
        assert not described.whole
        go_on.set()
        wait_until(lambda: client.describe().whole, "it is whole")
        assert client.describe().row_count == 100
    finally:
        client.close()
