"""A queue read by the learner: every row in order and once, whatever is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from integration.scripted_replay import RPC, RUN, SECONDS, SPEC, TABLE, ScriptedReplay
from integration.waiting import wait_until
from paceline.errors import DeadlineError, ReplacedError
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import Batch, QueueShards, QueueSource, follower
from paceline.rows import numpy_columns
from paceline.rpc.client import open_channel
from paceline.tables.memory import MemorySettings


@pytest.fixture
def replay() -> Iterator[Callable[..., ScriptedReplay]]:
    """Starts scripted queues."""
    started = []

    def start(**options: Any) -> ScriptedReplay:
        service = ScriptedReplay(MemorySettings(10_000), is_queue=True, **options)
        service.start()
        started.append(service)
        return service

    yield start
    for service in started:
        service.stop()


@pytest.fixture
def read() -> Iterator[Callable[..., QueueSource]]:
    """Opens sources, and closes them."""
    opened = []

    def start(service: ScriptedReplay, *, batch_size: int = 10, prefetch: int = 4, shard: int = 0) -> QueueSource:
        channel = open_channel(service.address, RPC)
        source = QueueSource(
            channel,
            run_id=RUN,
            table=TABLE,
            spec=SPEC,
            batch_size=batch_size,
            prefetch=prefetch,
            rpc=RPC,
            metrics=LearnerMetrics(CollectorRegistry()),
            shard=shard,
        )
        opened.append((source, channel))
        return source

    yield start
    for source, channel in opened:
        source.close()
        channel.close()


def values(batch: Batch) -> list[int]:
    return numpy_columns(SPEC, batch.rows.numpy())["value"].astype(int).tolist()


def test_rows_come_oldest_first_and_once_however_messages_cut_them(replay, read):
    service = replay(message_rows=7)
    source, taken = read(service), []
    for _ in range(5):
        service.append(25)
    for _ in range(12):
        taken += values(source.next_batch(SECONDS))
    assert taken == list(range(120))
    with pytest.raises(DeadlineError, match="5 rows wait and a batch has 10"):
        source.next_batch(0.05)


def test_a_batch_is_consumed_when_the_next_one_is_asked_for(replay, read):
    service = replay()
    service.append(20)
    source = read(service)
    source.next_batch(SECONDS)
    source.next_batch(SECONDS)
    service.wait_for(lambda: service.consumed == 10, "the first batch is consumed")
    with pytest.raises(DeadlineError):  # there is none, and the second is consumed all the same
        source.next_batch(0.05)
    service.wait_for(lambda: service.consumed == 20, "the second batch is consumed")


def test_a_stream_cut_in_the_midst_loses_no_row_and_gives_none_twice(replay, read):
    service = replay(message_rows=3)
    service.append(100)
    service.cut_after = 5
    source, taken = read(service), []
    for turn in range(10):
        if turn == 4:
            service.cut_after = 1
        taken += values(source.next_batch(SECONDS))
    assert taken == list(range(100))
    assert len([request for request in service.follows if request.HasField("from_row")]) >= 1


def test_a_killed_replay_that_forgot_what_was_consumed_gives_no_row_twice(replay, read):
    service = replay()
    service.append(60)
    source = read(service)
    taken = values(source.next_batch(SECONDS)) + values(source.next_batch(SECONDS))
    service.wait_for(lambda: service.consumed == 10, "the first batch is consumed")
    service.stop()
    service.consumed = 0
    service.start()
    for _ in range(4):
        taken += values(source.next_batch(SECONDS))
    assert taken == list(range(60))
    service.wait_for(lambda: service.consumed == 50, "what was consumed is said again")


def test_a_learner_that_died_gets_again_what_it_had_not_consumed(replay, read):
    service = replay()
    service.append(40)
    first = read(service)
    for _ in range(3):
        first.next_batch(SECONDS)
    service.wait_for(lambda: service.consumed == 20, "two batches are consumed")
    first.close()
    assert values(read(service).next_batch(SECONDS)) == list(range(20, 30))


def test_what_was_consumed_is_known_to_replay_when_a_source_has_closed(replay, read):
    service = replay()
    service.append(100)
    taken = []
    for _ in range(4):
        source = read(service)
        taken += values(source.next_batch(SECONDS)) + values(source.next_batch(SECONDS))
        source.consume()
        source.close()
        assert service.consumed == len(taken)
    assert taken == list(range(80))


def test_a_batch_that_was_not_consumed_comes_again_after_a_close(replay, read):
    service = replay()
    service.append(40)
    source = read(service)
    source.next_batch(SECONDS)
    source.next_batch(SECONDS)
    source.close()
    assert service.consumed == 10


def test_a_source_that_cannot_say_what_was_consumed_closes_soon_and_says_why(replay, read, monkeypatch):
    monkeypatch.setattr(follower, "LAST_REPORT_SECONDS", 0.2)
    service = replay()
    service.append(20)
    source = read(service)
    source.next_batch(SECONDS)
    service.stop()
    source.consume()
    with structlog.testing.capture_logs() as events:
        source.close()
        source.close()
    (warning,) = [event for event in events if event["event"] == "rows_not_consumed"]
    assert (warning["consumed_row"], warning["noted_row"]) == (10, 0)
    assert "replay" in warning["reason"]


def test_a_source_closes_though_replay_came_back_without_the_table_and_follows_when_it_is_there(
    replay, read, monkeypatch
):
    monkeypatch.setattr(follower, "LAST_REPORT_SECONDS", 0.2)
    service = replay()
    service.has_table = False
    service.append(20)
    source = read(service)
    with pytest.raises(DeadlineError, match="has no table 'transitions' yet"):
        source.next_batch(0.3)
    service.has_table = True
    source.next_batch(SECONDS)
    service.has_table = False
    source.consume()
    with structlog.testing.capture_logs() as events:
        source.close()
    (warning,) = [event for event in events if event["event"] == "rows_not_consumed"]
    assert "has no table" in warning["reason"]


def test_a_source_that_was_refused_for_good_closes_at_once(replay, read, monkeypatch):
    monkeypatch.setattr(follower, "LAST_REPORT_SECONDS", 10 * SECONDS)
    service = replay()
    service.append(20)
    source = read(service)
    source.next_batch(SECONDS)
    source._follower.failure = ReplacedError("a newer learner took over")
    source._follower.report = lambda: None
    source.consume()
    with structlog.testing.capture_logs() as events:
        source.close()
    (warning,) = [event for event in events if event["event"] == "rows_not_consumed"]
    assert "took over" in warning["reason"]


def test_no_more_rows_are_asked_for_than_the_prefetch(replay, read):
    service = replay(message_rows=1000)
    service.append(500)
    source = read(service, prefetch=3)
    for taken in range(1, 10):
        source.next_batch(SECONDS)
        assert sum(count for _, count in service.rows_sent) <= 10 * (taken + 3)


def test_a_hole_wider_than_the_prefetch_is_passed_over(replay, read):
    service = replay()
    service.append(15)
    service.append(15, skip=1000)
    source = read(service, prefetch=1)
    taken = []
    for _ in range(3):
        taken += values(source.next_batch(SECONDS))
    assert taken == [*range(15), *range(1015, 1030)]


def test_the_last_rows_of_a_run_are_a_smaller_batch(replay, read):
    service = replay()
    service.append(13)
    source = read(service)
    service.finish()
    assert [len(source.next_batch(SECONDS).rows) for _ in range(2)] == [10, 3]
    with pytest.raises(DeadlineError, match="every row that the run asked for was taken"):
        source.next_batch(0.05)
    service.wait_for(lambda: service.consumed == 13, "all is consumed")


def test_the_last_rows_come_though_the_very_last_were_damaged(replay, read):
    service = replay()
    service.append(13)
    service.memory.set_end(30)
    source = read(service)
    service.finish()
    assert [len(source.next_batch(0.2).rows) for _ in range(2)] == [10, 3]


def test_a_queue_that_was_lost_with_its_store_begins_anew(replay, read):
    service = replay()
    service.append(40)
    source = read(service)
    source.next_batch(SECONDS)
    wait_until(lambda: source._end == 40)
    service.stop()
    service.lose()
    service.append(12)
    service.start()
    wait_until(lambda: source._end == 12)
    assert values(source.next_batch(SECONDS)) == list(range(1_000_000, 1_000_010))


def test_several_queues_give_whole_batches_in_turn_and_none_waits_for_the_other(replay, read):
    services = [replay(), replay()]
    shards = QueueShards([read(service, shard=number) for number, service in enumerate(services)])
    services[0].append(20)
    services[1].append(50)
    taken = [values(shards.next_batch(SECONDS)) for _ in range(7)]
    assert sorted(row for batch in taken for row in batch) == sorted([*range(20), *range(50)])
    with pytest.raises(DeadlineError):
        shards.next_batch(0.05)
    for service, rows in zip(services, (20, 50), strict=True):
        service.wait_for(lambda service=service, rows=rows: service.consumed == rows, "all is consumed")


def test_a_batch_of_one_queue_is_consumed_though_the_next_comes_from_another(replay, read):
    services = [replay(), replay()]
    shards = QueueShards([read(service, shard=number) for number, service in enumerate(services)])
    services[1].append(10)
    shards.next_batch(SECONDS)
    services[0].append(10)
    shards.next_batch(SECONDS)
    services[1].wait_for(lambda: services[1].consumed == 10, "the first batch is consumed")
    assert services[0].consumed == 0
