"""The learner's ways to rows, as a configuration chooses them, against real replay services that are killed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from integration.replay_harness import SPEC, TABLE, Client, block, free_port, make_config, request, wait_until
from integration.replay_program import start_replay
from paceline.config import Config
from paceline.errors import ConfigError, DeadlineError
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import Batch, BatchSource, open_followed, open_samples, require_ring_fits
from paceline.local.embedded import EmbeddedRedis
from paceline.rows import numpy_columns
from paceline.rpc.client import open_channel

SECONDS = 30.0
CPU = torch.device("cpu")
QUICK = {"backoff_max_seconds": 0.2}


@pytest.fixture
def redis_server(bundled_redis: EmbeddedRedis) -> EmbeddedRedis:
    return bundled_redis


@pytest.fixture
def learn() -> Iterator[Callable[..., BatchSource]]:
    """Opens the source that a configuration asks for, and closes it."""
    opened = []

    def start(config: Config, registry: CollectorRegistry | None = None) -> BatchSource:
        metrics, channels = LearnerMetrics(registry or CollectorRegistry()), []
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


class Shards:
    """Two replay processes of one run, on one Redis."""

    def __init__(self, redis_url: str, *, read: str) -> None:
        ports = [free_port() for _ in range(2)]
        self.config = make_config(
            redis_url,
            rpc={"backoff_max_seconds": 0.2},
            replay={"read": read, "shards": 2, "address": ",".join(f"127.0.0.1:{port}" for port in ports)},
            collector={"count": 2},
            learner={"batch_size": 64, "prefetch_batches": 2},
        )
        self._redis_url = redis_url
        self.processes: dict[int, BaseProcess] = {}
        self.clients: dict[int, Client] = {}

    def start(self, number: int, *, resume: bool = False) -> Client:
        address = self.config.replay.shard_addresses()[number]
        tree = self.config.model_dump(mode="json")
        tree["replay"] |= {"redis_url": self._redis_url, "listen": address, "metrics_listen": "127.0.0.1:0"}
        self.processes[number] = start_replay(tree, resume=resume, shard=number)
        self.clients[number] = client = Client(self.config, shard=number)
        client.wait_until_serving()
        return client

    def kill(self, number: int) -> None:
        self.clients.pop(number).close()
        process = self.processes.pop(number)
        process.kill()
        process.join(SECONDS)


@pytest.fixture
def shards(redis_server: EmbeddedRedis) -> Iterator[Callable[..., Shards]]:
    """Makes pairs of replay processes, and kills them."""
    made: list[Shards] = []

    def make(read: str) -> Shards:
        made.append(Shards(redis_server.url, read=read))
        return made[-1]

    yield make
    for pair in made:
        for number in list(pair.processes):
            pair.kill(number)


def test_following_gives_the_batches_that_sampling_gives_with_the_same_seed(redis_server, serve, learn):
    config = make_config(redis_server.url, learner={"batch_size": 48})
    _, client = serve(config)
    client.open()
    client.append_rows(50)
    followed, sampled = learn(config), learn(config.model_copy(update={"replay": _sampling(config)}))
    for _ in range(10):
        np.testing.assert_array_equal(values(followed.next_batch(SECONDS)), values(sampled.next_batch(SECONDS)))


def _sampling(config: Config):
    return config.replay.model_copy(update={"read": "sample"})


def test_following_survives_the_death_of_replay_without_losing_or_repeating_a_row(redis_server, spawn, learn):
    config = make_config(redis_server.url, port=free_port(), rpc=QUICK)
    process, client = spawn(config)
    client.open()
    client.append_rows(20)
    source = learn(config)
    source.next_batch(SECONDS)
    process.kill()
    assert len(source.next_batch(SECONDS).rows) == 256  # from its own ring
    _, client = spawn(config, resume=True)
    client.append_rows(20, first=20)
    wait_until(lambda: source._end == 400, "the new rows come")
    _, rows, _ = source._memory.read(0, 1000)
    np.testing.assert_array_equal(numpy_columns(SPEC, rows)["value"], np.arange(400))


def test_what_a_follower_samples_holds_inserts_back_and_lets_them_pass(redis_server, serve, learn):
    limits = {"learner": {"updates": "strict", "updates_per_step": 1.0, "batch_size": 16}}
    config = make_config(redis_server.url, limiter={"min_rows": 10, "deadline_seconds": 0.3}, **limits)
    replay, client = serve(config)
    client.open()
    source = learn(config)
    with pytest.raises(DeadlineError, match="0 of the 10 rows needed before the first sample"):
        source.next_batch(0.3)
    sequence, updates = 0, 0

    def append() -> bool:
        nonlocal sequence
        try:
            client.append(request(sequence + 1, block(sequence * 10, 10)))
        except Exception:
            return False
        sequence += 1
        return True

    for _ in range(8):
        while append():
            pass
        while True:
            try:
                source.next_batch(0.1)
            except DeadlineError:
                break
            updates += 1
    # One update for each row after the first ten, within the band of 2 * (16 + 160) sampled rows.
    assert abs(updates - (sequence * 10 - 10)) * 16 <= 176
    assert sequence > 10
    assert client.describe().sampled_row_count == updates * 16
    # Either side waits for the other, and replay tells of both.
    waits = 'paceline_replay_limiter_wait_seconds_total{{side="{}",table="{}"}}'
    waited = [waits.format(side, TABLE) for side in ("insert", "sample")]
    wait_until(lambda: all(replay.metrics()[name] > 0.5 for name in waited), "both waits are counted")


def test_a_queue_is_read_once_across_the_death_of_replay(redis_server, spawn, learn):
    config = make_config(
        redis_server.url, port=free_port(), table={"queue": True}, rpc=QUICK, learner={"batch_size": 15}
    )
    process, client = spawn(config)
    client.open()
    client.append_rows(20)
    source, taken = learn(config), []
    for _ in range(5):
        taken += values(source.next_batch(SECONDS)).tolist()
    process.kill()
    _, client = spawn(config, resume=True)
    client.append_rows(10, first=20)
    for _ in range(15):
        taken += values(source.next_batch(SECONDS)).tolist()
    assert taken == list(range(300))
    wait_until(lambda: client.describe().consumed_row == 285, "what was learned from has left")


@pytest.mark.parametrize(("capacity", "overflow"), [(23, "block"), (10, "drop_oldest")])
def test_the_smallest_queue_gives_batches_without_end(redis_server, serve, learn, capacity, overflow):
    # At worst 13 rows wait, one less than a batch, and a block of 10 comes.
    config = make_config(
        redis_server.url,
        capacity=capacity,
        table={"queue": True, "overflow": overflow},
        rpc=QUICK,
        learner={"batch_size": 14},
    )
    _, client = serve(config)
    client.open()
    source, ended, appended = learn(config), threading.Event(), [0]

    def append() -> None:
        for sequence in itertools.count(1):
            if ended.is_set():
                return
            count = (4, 8, 1, 10)[sequence % 4]
            client.append(request(sequence, block(appended[0], count)))
            appended[0] += count

    thread = threading.Thread(target=append)
    thread.start()
    taken: list[int] = []
    for _ in range(100):
        taken += values(source.next_batch(SECONDS)).tolist()
    ended.set()
    source.consume()
    while thread.is_alive():  # the last append waits for room
        with suppress(DeadlineError):
            source.next_batch(0.1)
    assert taken == sorted(set(taken))
    if overflow == "block":
        assert taken == list(range(1400))


@pytest.mark.parametrize("queue", [False, True], ids=["follow", "queue"])
def test_rows_with_keys_that_were_given_before_are_not_missed(redis_server, redis_client, serve, spawn, learn, queue):
    # Redis and replay die together, Redis without its last second, and collectors are back before the learner is.
    options: dict[str, Any] = {"table": {"queue": queue}, "rpc": QUICK, "learner": {"batch_size": 10}}
    config = make_config(redis_server.url, port=free_port(), **options)
    replay, client = spawn(config)
    client.open()
    client.append_rows(10)
    source, taken = learn(config), []
    if queue:
        for _ in range(10):
            taken += values(source.next_batch(SECONDS)).tolist()
        source.consume()
        wait_until(lambda: client.describe().consumed_row == 100, "what was learned from has left")
    on_disk = {key: redis_client.dump(key) for key in redis_client.scan_iter("paceline:*")}
    client.append_rows(5, first=10)
    if queue:
        for _ in range(5):
            taken += values(source.next_batch(SECONDS)).tolist()
    wait_until(lambda: source._end == 150, "every row has come")
    replay.kill()
    redis_client.flushall()
    for key, value in on_disk.items():
        redis_client.restore(key, 0, value)
    # Where the learner does not look.
    elsewhere, collector = serve(make_config(redis_server.url, **options), resume=True)
    for number in range(10):  # the first half of these rows has keys that the learner knows
        collector.append(request(16 + number, block(1000 + 10 * number, 10)))
    elsewhere.stop()
    _, client = spawn(config, resume=True)
    assert client.describe().inserted_row_count == 200
    if queue:
        while len(taken) < 150 + 100:
            taken += values(source.next_batch(SECONDS)).tolist()
        assert taken[150:] == list(range(1000, 1100))
        return
    wait_until(lambda: source._end == 200, "the new rows come")
    source.next_batch(SECONDS)
    _, rows, _ = source._memory.read(0, 1000)
    np.testing.assert_array_equal(numpy_columns(SPEC, rows)["value"], [*range(100), *range(1000, 1100)])


def test_priorities_steer_what_is_drawn(redis_server, serve, learn):
    config = make_config(
        redis_server.url,
        table={"sampler": "prioritised", "prioritised": {"exponent": 1.0}},
        learner={"batch_size": 200, "prefetch_batches": 1},
    )
    _, client = serve(config)
    client.open()
    client.append_rows(10)
    source = learn(config)
    batch = source.next_batch(SECONDS)
    np.testing.assert_array_equal(batch.keys, values(batch))
    np.testing.assert_allclose(batch.probabilities, 0.01)
    source.update_priorities(np.arange(100), np.where(np.arange(100) == 37, 1.0, 0.0).astype(np.float32))
    wait_until(lambda: set(values(source.next_batch(SECONDS))) == {37}, "only the row with a priority is drawn")
    assert source.next_batch(SECONDS).probabilities.tolist() == [1.0] * 200


@pytest.mark.parametrize("read", ["sample", "follow"])
def test_training_goes_on_without_a_shard_and_gets_its_new_rows_when_it_is_back(shards, learn, read):
    pair, registry = shards(read), CollectorRegistry()
    for number in range(2):
        client = pair.start(number)
        client.open()
        client.append(request(1, block(1000 * number, 100), collector=number))
    source = learn(pair.config, registry)

    def drawn() -> set[int]:
        return set(values(source.next_batch(SECONDS)))

    batch = source.next_batch(SECONDS)
    assert {value // 1000 for value in values(batch)} == {0, 1}
    assert (batch.table_row_count, batch.inserted_row_count) == (200, 200)
    pair.kill(1)
    pair.clients[0].append(request(2, block(100, 100)))
    wait_until(lambda: any(100 <= value < 200 for value in drawn()), "new rows of the other shard come")
    if read == "sample":
        wait_until(lambda: max(drawn()) < 1000, "the shard that is away is left out")
        assert registry.get_sample_value("paceline_learner_shard_skips_total", {"shard": "1"}) >= 1
    else:
        assert max(drawn()) >= 1000  # its ring is here
    assert source.next_batch(SECONDS).inserted_row_count == 300
    pair.start(1, resume=True).append(request(2, block(1100, 100), collector=1))
    wait_until(lambda: max(drawn()) >= 1100, "the rows of the shard that is back come")
    assert source.next_batch(SECONDS).inserted_row_count == 400


def test_a_ring_that_cannot_fit_is_refused(redis_server, monkeypatch):
    monkeypatch.setattr("paceline.learner.sources.room.available_bytes", lambda device: 1_000_000)
    config = make_config(redis_server.url, capacity=100_000)
    with pytest.raises(ConfigError, match=r"follows table 'transitions' into a ring of .* GB .*read=sample"):
        require_ring_fits(config, SPEC, CPU)
    require_ring_fits(config.model_copy(update={"replay": _sampling(config)}), SPEC, CPU)
