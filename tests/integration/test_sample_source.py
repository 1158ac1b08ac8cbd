"""The learner's source of batches against the real replay service."""

from __future__ import annotations

import numpy as np
import pytest
import redis
from prometheus_client import CollectorRegistry

from integration.replay_harness import RUN, SPEC, TABLE, free_port, make_config, wait_until
from paceline import process
from paceline.config import RpcConfig
from paceline.errors import DeadlineError, PacelineError, RunMismatchError
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import SampleSource
from paceline.local.embedded import EmbeddedRedis
from paceline.process import own_time
from paceline.rows import Column, RowSpec, numpy_columns
from paceline.v1 import replay_pb2

SECONDS = 20.0


@pytest.fixture
def redis_server(bundled_redis: EmbeddedRedis) -> EmbeddedRedis:
    return bundled_redis


@pytest.fixture
def source():
    """Opens sources, and closes them."""
    opened = []

    def start(config, *, spec=SPEC, run_id=RUN, batch_size=16, prefetch=4, registry=None, times=False, **rpc):
        made = SampleSource(
            config.replay.address,
            run_id=run_id,
            table=TABLE,
            spec=spec,
            batch_size=batch_size,
            prefetch=prefetch,
            seed=1,
            rpc=RpcConfig(**rpc),
            metrics=LearnerMetrics(registry or CollectorRegistry()),
            times=times,
        )
        opened.append(made)
        return made

    yield start
    for made in opened:
        made.close()


def is_dry(batches: SampleSource) -> bool:
    try:
        batches.next_batch(0.2)
    except DeadlineError as error:
        return "no batch within" in str(error)
    return False


def values(batch):
    return numpy_columns(SPEC, batch.rows.numpy())["value"].copy()


@pytest.mark.parametrize("batch_size", [1, 16, 40_000])
def test_batches_are_whole_whether_they_share_a_message_or_are_cut(redis_server, serve, source, batch_size):
    config = make_config(redis_server.url)
    _, client = serve(config)
    client.open()
    client.append_rows(10)
    batches = source(config, batch_size=batch_size)
    for _ in range(12):
        batch = batches.next_batch(SECONDS)
        assert batch.rows.shape == (batch_size, SPEC.row_bytes)
        assert set(values(batch)) <= set(range(100))
        assert batch.inserted_row_count == batch.table_row_count == 100


def test_times_are_told_by_the_learners_clock_though_another_process_receives_them(
    redis_server, serve, source, monkeypatch
):
    config = make_config(redis_server.url)
    _, client = serve(config)
    client.open()
    # As if the system's clock had been set an hour back since this process began.
    monkeypatch.setattr(process, "_EPOCH_NS", process._EPOCH_NS + 3600 * 10**9)
    began = own_time()
    client.append_rows(10)
    batches = source(config, times=True)
    times = wait_until(lambda: min(batches.next_batch(SECONDS).stored_at), "replay's clock is known")
    assert began - 1 < times < own_time() + 1


def test_no_more_than_the_prefetch_is_drawn_ahead(redis_server, serve, source):
    config = make_config(redis_server.url)
    _, client = serve(config)
    client.open()
    client.append_rows(10)
    batches = source(config, batch_size=10, prefetch=4)
    for taken in range(1, 9):
        batches.next_batch(SECONDS)
        assert client.describe().sampled_row_count <= 10 * (taken + 4)


def test_a_batch_stays_as_it_is_until_the_next_one_is_taken(redis_server, serve, source):
    config = make_config(redis_server.url)
    _, client = serve(config)
    client.open()
    client.append_rows(10)
    batches = source(config, prefetch=2)
    batch = batches.next_batch(SECONDS)
    before = values(batch)
    client.append_rows(20, first=10)
    np.testing.assert_array_equal(values(batch), before)


def test_a_killed_replay_is_waited_for_and_sampling_goes_on(redis_server, spawn, source):
    config = make_config(redis_server.url, port=free_port())
    process, client = spawn(config)
    client.open()
    client.append_rows(10)
    registry = CollectorRegistry()
    batches = source(config, registry=registry, backoff_max_seconds=0.2)
    batches.next_batch(SECONDS)
    process.kill()
    wait_until(lambda: is_dry(batches), "the source runs dry")
    spawn(config, resume=True)
    assert batches.next_batch(SECONDS).inserted_row_count == 100
    assert registry.get_sample_value("paceline_learner_sample_failures_total", {"reason": "UnavailableError"})


def test_a_table_that_was_lost_with_its_store_is_declared_again(redis_server, spawn, source):
    config = make_config(redis_server.url, port=free_port())
    process, client = spawn(config)
    client.open()
    client.append_rows(10)
    batches = source(config, backoff_max_seconds=0.2)
    batches.next_batch(SECONDS)
    process.kill()
    with redis.Redis.from_url(redis_server.url) as store:
        store.flushall()
    _, client = spawn(config, resume=True)
    request = replay_pb2.DescribeTablesRequest(run_id=RUN)
    wait_until(lambda: client.stub.DescribeTables(request, timeout=SECONDS).tables, "the table is declared again")
    client.append_rows(3)
    inserted = 0
    for _ in range(20):
        inserted = batches.next_batch(SECONDS).inserted_row_count
        if inserted == 30:
            break
    assert inserted == 30


def test_the_reason_for_a_wait_is_told(redis_server, serve, source):
    config = make_config(redis_server.url, limiter={"min_rows": 1000, "deadline_seconds": 0.2})
    serve(config)
    batches = source(config)

    def reason() -> str:
        try:
            batches.next_batch(0.1)
        except DeadlineError as error:
            return str(error)
        return ""

    wait_until(lambda: "of the 1000 rows needed before the first sample" in reason(), "the reason is told")
    assert not batches.is_away


def test_another_run_or_another_row_layout_ends_it(redis_server, serve, source):
    config = make_config(redis_server.url)
    _, client = serve(config)
    client.open()
    with pytest.raises(RunMismatchError, match="other"):
        source(config, run_id="other").next_batch(SECONDS)
    with pytest.raises(PacelineError, match=r"row spec|columns|another") as caught:
        source(config, spec=RowSpec((Column("value", "float32"),))).next_batch(SECONDS)
    assert not isinstance(caught.value, DeadlineError)


def test_closing_while_batches_are_ready_ends_the_process(redis_server, serve, source):
    config = make_config(redis_server.url)
    _, client = serve(config)
    client.open()
    client.append_rows(10)
    batches = source(config)
    batches.next_batch(SECONDS)
    batches.close()
    assert batches.process.poll() == 0
