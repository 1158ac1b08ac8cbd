"""Replay and Redis are killed over and over under load, and every acknowledged row is accounted for."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest
import redis

from integration.replay_harness import (
    RUN,
    SPEC,
    Client,
    Following,
    ReplayProcess,
    block,
    make_config,
    request,
    together,
    values_of,
    wait_until,
)
from paceline.config import Config
from paceline.errors import PacelineError, UnavailableError
from paceline.local.embedded import EmbeddedRedis
from paceline.v1 import replay_pb2 as pb
from redis_record import keys_of_payloads, read_record
from redis_servers import SERVERS, start_redis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KILLS = 50
"""For each of the two kinds of server: 100 in all."""
WRITERS = 5
BLOCK_ROWS = 10
IN_FLIGHT = 4
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)


def value_of(collector: int, sequence: int) -> int:
    """The value of the first row of a block; the others count up from it."""
    return (collector * 1_000_000 + sequence) * BLOCK_ROWS


@dataclass
class Writer:
    """A collector that sends a block again until it is acknowledged."""

    config: Config
    collector: int
    acknowledged: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.randomness = random.Random(self.collector)

    def run(self) -> None:
        client = Client(self.config)
        try:
            while not self.done.is_set():
                self._append(client)
        except BaseException as error:
            self.failure = error
        finally:
            client.close()

    def _append(self, client: Client) -> None:
        window, ended = threading.Semaphore(IN_FLIGHT), threading.Event()
        first = self.acknowledged + 1

        def requests() -> Iterator:
            sequence = first
            while window.acquire() and not (ended.is_set() or self.done.is_set()):
                blocks = [self._request(sequence)]
                # As in a collector, blocks that may be sent at once share a message.
                while len(blocks) < IN_FLIGHT and self.randomness.random() < 0.5 and window.acquire(blocking=False):
                    blocks.append(self._request(sequence + len(blocks)))
                sequence += len(blocks)
                yield together(*blocks)

        try:
            for answer in client.stub.Append(requests(), timeout=30):
                for each in (answer, *answer.further):
                    assert each.sequence == self.acknowledged + 1
                    self.acknowledged += 1
                    window.release()
        except grpc.RpcError as error:
            if error.code() not in PASSING:
                raise
            self.done.wait(0.05)  # as a collector backs off
        finally:
            ended.set()
            window.release()

    def _request(self, sequence: int) -> pb.AppendRequest:
        return request(sequence, block(value_of(self.collector, sequence), BLOCK_ROWS), collector=self.collector)


@dataclass
class Reader:
    """A learner that follows: it goes on from its cursor after each cut."""

    config: Config
    values: list[float] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None

    def run(self) -> None:
        client = Client(self.config)
        try:
            while not self.done.is_set():
                try:
                    self._follow(client)
                except UnavailableError:
                    self.done.wait(0.05)
        except BaseException as error:
            self.failure = error
        finally:
            client.close()

    def _follow(self, client: Client) -> None:
        with Following(client, from_row=len(self.values)) as following:
            while not self.done.is_set():
                answer = following.next()
                assert not answer.rows_lost
                assert answer.first_row == len(self.values)
                self.values += values_of(answer)


@pytest.fixture(params=SERVERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = start_redis(request.param, tmp_path / "redis", appendfsync="always")
    yield server
    server.stop()


def test_no_acknowledged_row_is_lost_doubled_or_reordered_by_kills_at_random_moments(store: EmbeddedRedis):
    randomness = random.Random(20)
    config = make_config(store.url, capacity=10_000_000)
    replay = ReplayProcess(config)
    client = Client(config)
    client.wait_until_serving()
    client.open()
    writers = [Writer(config, collector) for collector in range(WRITERS)]
    reader = Reader(config)
    threads = [threading.Thread(target=each.run, daemon=True) for each in (*writers, reader)]
    for thread in threads:
        thread.start()
    for _ in range(KILLS):
        goal = sum(writer.acknowledged for writer in writers) + randomness.randint(1, 60)
        wait_until(
            lambda goal=goal: sum(writer.acknowledged for writer in writers) >= goal or _failures(writers, reader),
            "progress",
        )
        assert not _failures(writers, reader)
        kills_redis, kills_replay = randomness.choice([(True, False), (True, True), (False, True), (False, True)])
        if kills_redis:
            store.process.kill()
        if kills_replay:
            replay.kill()
        if kills_redis:
            store.process.wait()
            store.restart()
        if kills_replay:
            replay = ReplayProcess(config, resume=True)
    client.wait_until_serving()
    for writer in writers:
        writer.done.set()
    for thread in threads[:-1]:
        thread.join(60)
        assert not thread.is_alive()
    inserted = client.describe().inserted_row_count
    wait_until(lambda: len(reader.values) == inserted or _failures(writers, reader), "the follower has every row")
    reader.done.set()
    assert not _failures(writers, reader)
    _check_record(store, writers, reader)
    _check_memory(client, writers)
    client.close()
    replay.stop()


def _failures(writers: list[Writer], reader: Reader) -> list[BaseException]:
    return [each.failure for each in (*writers, reader) if each.failure is not None]


def _check_record(store: EmbeddedRedis, writers: list[Writer], reader: Reader) -> None:
    sequences: dict[int, list[int]] = {writer.collector: [] for writer in writers}
    next_row, first_rows = 0, set()
    with redis.Redis.from_url(store.url) as client:
        for header, payload in read_record(client, RUN):
            assert header.first_row == next_row
            first_rows.add(next_row)
            next_row += header.row_count
            sequences[header.collector_index].append(header.sequence)
            values = np.frombuffer(payload, SPEC.dtype)["value"]
            first = value_of(header.collector_index, header.sequence)
            assert values.tolist() == list(range(first, first + BLOCK_ROWS))
            assert reader.values[header.first_row : next_row] == values.tolist()
        # One payload at most was staged for a block that was never committed, where the next block will lie.
        assert keys_of_payloads(client, RUN) - first_rows <= {next_row}
    for writer in writers:
        stored = sequences[writer.collector]
        assert stored == list(range(1, len(stored) + 1))
        assert writer.acknowledged <= len(stored) <= writer.acknowledged + IN_FLIGHT


def _check_memory(client: Client, writers: list[Writer]) -> None:
    described = client.describe()
    acknowledged = sum(writer.acknowledged for writer in writers)
    assert acknowledged * BLOCK_ROWS <= described.row_count <= (acknowledged + IN_FLIGHT * WRITERS) * BLOCK_ROWS
    stored = {position.collector_index: position.sequence for position in described.collectors}
    last = {collector: value_of(collector, sequence) + BLOCK_ROWS for collector, sequence in stored.items()}
    for value in client.sample_values(5_000).tolist():
        collector = int(value // (1_000_000 * BLOCK_ROWS))
        assert value_of(collector, 1) <= value < last[collector]


def test_a_restart_finds_out_of_two_sequences_which_one_was_stored(store: EmbeddedRedis):
    """A repeat of the newest acknowledged block is known, and the one after it is new, however the process ended."""
    config = make_config(store.url)
    replay = ReplayProcess(config)
    client = Client(config)
    client.wait_until_serving()
    client.open()
    client.append_rows(3)
    replay.kill()
    replay = ReplayProcess(config, resume=True)
    client.wait_until_serving()
    answers = client.append(request(3, block(20, 10)), request(4, block(30, 10)))
    assert [answer.duplicate for answer in answers] == [True, False]
    damaged = request(5, block(40, 10))
    damaged.rows = bytes(len(damaged.rows))
    with pytest.raises(PacelineError, match="checksum"):
        client.append(damaged)
    client.close()
    replay.stop()
