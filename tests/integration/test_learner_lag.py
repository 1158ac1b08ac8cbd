"""Lag, from rows in a real replay process whose clock is wrong, to the metrics of the learner that trains on them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from integration.replay_harness import Client, free_port, make_config, request, wait_until
from paceline.config import Config
from paceline.errors import DeadlineError, StarvedError
from paceline.lag.attribution import PARTS
from paceline.lag.bound import LagBound
from paceline.lag.publications import Publication, Publications
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import Batch, BatchSource, open_followed, open_samples
from paceline.learner.training_lag import TrainingLag
from paceline.rows import Block, Column, numpy_columns, transition_spec
from paceline.rpc.client import open_channel

SECONDS = 30.0
CPU = torch.device("cpu")
SPEC = transition_spec(Column("observation", "float32", (3,)), Column("action", "float32", (1,)))
READS = {
    "follow": {"read": "follow"},
    "sample": {"read": "sample"},
    "queue": {"queue": True},
    "prioritised": {"sampler": "prioritised"},
    "recent": {"sampler": "recent"},
}

_PROGRAM = """
import json, sys, time
ahead, clock = int(float(sys.argv[2]) * 1e9), time.time_ns
time.time_ns = lambda: clock() + ahead  # what replay stamps with; gRPC's deadlines go by time.time
from paceline.config import build
from paceline.process import StopSignal
from paceline.replay.main import run
run(build(json.loads(sys.argv[1])), resume=False, stop=StopSignal.install())
"""


def config_of(redis_url: str, read: str, *, batch_size: int = 4, **sections: Any) -> Config:
    table = dict(READS[read])
    return make_config(
        redis_url,
        port=free_port(),
        limiter={"deadline_seconds": 60.0},
        replay={"read": table.pop("read", "auto")},
        table=table,
        rpc={"backoff_max_seconds": 0.2},
        learner={"batch_size": batch_size, "prefetch_batches": 1},
        **sections,
    )


@pytest.fixture
def spawn_ahead(redis_server) -> Iterator[Callable[..., Client]]:
    """Starts a replay process whose clock is so many seconds ahead of this one's."""
    started = []

    def start(config: Config, ahead: float = 0.0) -> Client:
        tree = config.model_dump(mode="json")
        tree["replay"]["redis_url"] = redis_server.url
        process = subprocess.Popen([sys.executable, "-c", _PROGRAM, json.dumps(tree), str(ahead)])
        client = Client(config)
        started.append((process, client))
        client.wait_until_serving()
        client.open(SPEC)
        return client

    yield start
    for process, client in started:
        client.close()
        process.kill()
        process.wait(SECONDS)


@pytest.fixture
def learn() -> Iterator[Callable[..., BatchSource]]:
    """Opens the source that a configuration asks for, and closes it."""
    opened = []

    def start(config: Config, metrics: LearnerMetrics, base_version: int = 0) -> BatchSource:
        options: dict[str, Any] = {"seed": 1, "metrics": metrics, "device": CPU}
        channels = [open_channel(address, config.rpc) for address in config.replay.shard_addresses()]
        if config.follows:
            source = open_followed(config, channels, SPEC, base_version=base_version, **options)
        else:
            source = open_samples(config, SPEC, **options)
        opened.append((source, channels))
        return source

    yield start
    for source, channels in opened:
        source.close()
        for channel in channels:
            channel.close()


def rows_of(versions: list[int], **stamps: float) -> Block:
    block = Block.empty(SPEC, len(versions))
    block.columns["policy_version"] = versions
    for name, value in stamps.items():
        block.columns[name] = value
    return block


def versions_of(batch: Batch) -> list[int]:
    versions: list[int] = numpy_columns(SPEC, batch.rows.numpy())["policy_version"].tolist()
    return versions


@pytest.mark.parametrize(
    ("read", "ahead"),
    [
        ("follow", 5000.0),
        ("sample", -5000.0),
        ("queue", 5000.0),
        *(pytest.param(read, ahead, marks=pytest.mark.slow) for read in READS for ahead in (0.0, 5000.0, -5000.0)),
    ],
)
def test_lag_is_split_exactly_where_a_block_was_held_back_and_replays_clock_is_wrong(
    redis_server, spawn_ahead, learn, read, ahead
):
    config = config_of(redis_server.url, read)
    client = spawn_ahead(config, ahead)
    # A block that was sealed a hundred seconds ago, and is stored only now.
    now = time.time()
    stamps = {"policy_applied_at": now - 120, "sealed_at": now - 100, "collected_at": now - 110}
    client.append(request(1, rows_of([2, 2, 2, 2], **stamps)))
    publications = Publications()
    published = [now - 300, now - 150, now - 130, now - 119, now - 110, now - 80, now - 50, now - 20, now + 60]
    for version, seconds in enumerate(published, 1):
        publications.add(Publication(version, seconds, version))

    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    source = learn(config, metrics)
    # Trained on ninety seconds from now: what a wrong clock or a few milliseconds would spoil lies far off.
    lag = TrainingLag(SPEC, bound=LagBound(None), publications=publications, metrics=metrics, clock=lambda: now + 90)

    def train() -> bool:
        batch = source.next_batch(SECONDS)
        assert batch.stored_at is not None
        if not batch.stored_at.all():
            return False  # drawn ahead, before the first round trip
        lag.take(batch, policy_version=9, learner_step=9)
        lag.count()
        return True

    if read == "queue":
        assert train()  # each row comes once
    else:
        wait_until(train, "replay's clock is known")

    def value(thing: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"paceline_learner_{thing}", labels)

    parts = {part: value("training_lag_part_versions_total", part=part) for part in PARTS}
    assert parts == {"transfer": 4 * 1, "rollout": 4 * 2, "queue": 4 * 3, "residence": 4 * 1, "unattributed": 0}
    assert sum(parts.values()) == value("training_lag_versions_sum") == 4 * 7
    seconds = {part: value("row_part_seconds_total", part=part) for part in PARTS}
    expected = {"transfer": 30, "rollout": 20, "queue": 100, "residence": 90, "unattributed": 0}
    assert seconds == pytest.approx({part: 4 * each for part, each in expected.items()}, abs=4 * SECONDS)
    assert sum(seconds.values()) == pytest.approx(4 * 240)
    if read in ("follow", "queue"):
        wait_until(lambda: value("replay_clock_offset_seconds", shard="0"), "the offset is shown")
    offset, uncertainty = (value(f"replay_clock_{thing}_seconds", shard="0") for thing in ("offset", "uncertainty"))
    assert offset is not None
    assert uncertainty is not None
    assert abs(offset - ahead) <= uncertainty < SECONDS


@pytest.mark.parametrize("read", ["follow", "sample", "recent"])
def test_rows_beyond_the_bound_are_not_drawn_and_a_bound_that_starves_is_told(redis_server, spawn_ahead, learn, read):
    config = config_of(redis_server.url, read, batch_size=20, lag={"max_lag_versions": 3, "attribution": False})
    client = spawn_ahead(config)
    assert client.describe().sampler == "recent"
    client.append(request(1, rows_of([1] * 30 + [6] * 5 + [9] * 5)))
    registry = CollectorRegistry()
    source = learn(config, LearnerMetrics(registry))
    source.set_policy_version(9)

    def skipped(source: BatchSource = source) -> float:
        return source.next_batch(SECONDS).skipped_row_count

    wait_until(lambda: skipped() == 20 * 30 / 10, "the first order that says the version")
    batch = source.next_batch(SECONDS)
    assert set(versions_of(batch)) == {6, 9}
    assert batch.stored_at is None
    assert (batch.table_row_count, batch.drawable_row_count) == (40, 10)

    source.set_policy_version(20)
    reasons: list[str] = []

    def is_starved() -> bool:
        try:
            source.next_batch(0.2)
        except DeadlineError as error:  # of a draw by replay the reason comes after some seconds
            reasons.extend([str(error)] if isinstance(error, StarvedError) else [])
        return bool(reasons)

    wait_until(is_starved, "the bound starves the learner")
    assert "at most 3 versions (lag.max_lag_versions) behind 20" in reasons[0]
    assert "with lag.max_lag_versions=11 they would do" in reasons[0]
    assert not source.is_away  # type: ignore[attr-defined]
    assert registry.get_sample_value("paceline_learner_starved_seconds_total") > 0
    client.append(request(2, rows_of([17])))
    assert versions_of(source.next_batch(SECONDS)) == [17] * 20


def test_a_learner_that_resumed_draws_the_rows_of_before_until_it_has_moved_on(redis_server, spawn_ahead, learn):
    config = config_of(redis_server.url, "follow", lag={"max_lag_versions": 3})
    spawn_ahead(config).append(request(1, rows_of([1] * 10)))
    source = learn(config, LearnerMetrics(CollectorRegistry()), base_version=40)
    source.set_policy_version(43)
    assert versions_of(source.next_batch(SECONDS)) == [1] * 4
    source.set_policy_version(44)
    with pytest.raises(StarvedError, match=r"with lag\.max_lag_versions=4 they would do"):
        source.next_batch(0.1)
