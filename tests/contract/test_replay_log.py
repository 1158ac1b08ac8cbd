"""What replay relies on, of its log in Redis (the bundled server, and Redis itself) and of the tests' double alike."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
import redis

from contract.memory_log import MemoryLog, Shelf
from paceline.errors import ConflictError, ReplacedError
from paceline.replay.log import LoggedBlock, LogState, OutOfStepError, Position, RedisLog
from paceline.replay.store import RedisStore
from paceline.rows import Column, RowSpec
from paceline.v1 import rows_pb2
from redis_servers import SERVERS, start_redis

SPEC = RowSpec((Column("value", "float32", (3,)), Column("step", "int64")))
TABLE = "transitions"
BEGUN = LogState(row_spec=SPEC, limiter_json="{}")


real_servers = pytest.mark.parametrize("server", SERVERS, indirect=True, scope="module")
"""For what only a server has: scripts, keys, runs."""


class Place:
    """Where a log lives: `open` makes another process's view of it, `forget` loses everything."""

    def __init__(self, open_log: Callable[[], RedisLog | MemoryLog], forget: Callable[[], None]) -> None:
        self.open, self.forget = open_log, forget


@pytest.fixture(scope="module", params=["memory", *SERVERS])
def server(request, tmp_path_factory):
    if request.param == "memory":
        yield None
        return
    server = start_redis(request.param, tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def place(server):
    if server is None:
        shelf = Shelf()

        def lose() -> None:
            shelf.owner, shelf.state, shelf.blocks = None, None, []

        yield Place(lambda: MemoryLog(shelf), lose)
        return
    stores: list[RedisStore] = []
    run_id = uuid.uuid4().hex

    def open_log() -> RedisLog:
        stores.append(RedisStore(server.url, run_id, deadline_seconds=10))
        stores[-1].claim(resume=True)
        return RedisLog(stores[-1], TABLE)

    def forget() -> None:
        with redis.Redis.from_url(server.url) as client:
            client.flushall()

    yield Place(open_log, forget)
    for store in stores:
        store.close()


def header(sequence: int, *, collector: int = 0, incarnation: int = 1, rows: int = 2) -> rows_pb2.BlockHeader:
    return rows_pb2.BlockHeader(
        collector_index=collector, collector_incarnation=incarnation, sequence=sequence, row_count=rows
    )


def append(log, number: int, stamp: rows_pb2.BlockHeader, *, previous: int | None = None, oldest: int = 1) -> bool:
    block = LoggedBlock(number, stamp.SerializeToString(), b"rows of %d" % number * 1000)
    return log.append(
        block,
        stamp,
        previous=number - 1 if previous is None else previous,
        oldest=oldest,
        inserted=2 * number,
        sampled=7 * number,
    )


def numbers(log, after: int = 0) -> list[int]:
    return [block.number for block in log.read_blocks(after)]


def test_a_table_that_nobody_began_has_no_state(place):
    assert place.open().read_state() is None


def test_what_is_appended_is_read_back_with_counters_and_positions(place):
    log = place.open()
    log.begin(BEGUN)
    assert append(log, 1, header(1))
    assert append(log, 2, header(1, collector=3, incarnation=2, rows=5))
    assert list(log.read_blocks()) == [
        LoggedBlock(1, header(1).SerializeToString(), b"rows of 1" * 1000),
        LoggedBlock(2, header(1, collector=3, incarnation=2, rows=5).SerializeToString(), b"rows of 2" * 1000),
    ]
    assert log.read_state() == LogState(
        row_spec=SPEC,
        limiter_json="{}",
        last_block=2,
        inserted=4,
        sampled=14,
        positions={0: Position(1, 1, 2), 3: Position(2, 1, 5)},
    )


def test_blocks_are_read_in_order_from_any_number_on(place):
    log = place.open()
    log.begin(BEGUN)
    for number in range(1, 41):
        append(log, number, header(number))
    assert numbers(log) == list(range(1, 41))
    assert numbers(log, after=37) == [38, 39, 40]
    assert log.block_count() == 40


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_block_that_is_there_is_recognised_and_changes_nothing(place, sequence):
    log = place.open()
    log.begin(BEGUN)
    append(log, 1, header(1))
    append(log, 2, header(2))
    before = log.read_state()
    assert not append(log, 3, header(sequence))
    assert log.read_state() == before
    assert numbers(log) == [1, 2]


def test_a_later_incarnation_begins_anew_and_retires_the_earlier(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 1, header(9))
    assert append(log, 2, header(1, incarnation=2))
    with pytest.raises(ReplacedError):
        append(log, 3, header(10))
    assert append(log, 3, header(1, collector=1))
    assert numbers(log) == [1, 2, 3]


def test_a_gap_in_a_sequence_is_accepted(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 1, header(1))
    assert append(log, 2, header(7))


def test_an_append_removes_the_oldest_blocks(place):
    log = place.open()
    log.begin(BEGUN)
    for number in range(1, 5):
        append(log, number, header(number))
    append(log, 5, header(5), oldest=4)
    assert numbers(log) == [4, 5]
    log.trim(5)
    assert numbers(log) == [5]


@pytest.mark.parametrize("previous", [0, 2])
def test_a_process_that_believes_in_another_last_block_is_told(place, previous):
    log = place.open()
    log.begin(BEGUN)
    append(log, 1, header(1))
    with pytest.raises(OutOfStepError):
        append(log, previous + 1, header(2), previous=previous)
    with pytest.raises(OutOfStepError):
        log.save(last_block=previous, sampled=1)
    assert numbers(log) == [1]


def test_numbers_may_leave_some_out(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 1, header(1))
    assert append(log, 5, header(2), previous=1)
    assert numbers(log) == [1, 5]


def test_the_counter_of_sampled_rows_is_saved_alone(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 1, header(1))
    log.save(last_block=1, sampled=1234)
    state = log.read_state()
    assert (state.inserted, state.sampled) == (2, 1234)


def test_a_newer_process_takes_over_and_the_older_stores_nothing_more(place):
    older = place.open()
    older.begin(BEGUN)
    append(older, 1, header(1))
    newer = place.open()
    assert newer.read_state().last_block == 1
    for attempt in (
        lambda: append(older, 2, header(2)),
        lambda: older.save(last_block=1, sampled=1),
        lambda: older.trim(2),
        lambda: older.begin(BEGUN),
    ):
        assert not newer.replaced
        with pytest.raises(ReplacedError):
            attempt()
        assert older.replaced
    assert append(newer, 2, header(2))
    assert numbers(newer) == [1, 2]


def test_a_record_that_was_lost_is_begun_again_by_its_owner(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 1, header(1))
    place.forget()
    assert log.read_state() is None
    with pytest.raises(OutOfStepError):
        append(log, 2, header(2))
    log.begin(LogState(row_spec=SPEC, limiter_json="{}", last_block=4, inserted=8, positions={2: Position(1, 3, 2)}))
    assert not append(log, 5, header(3, collector=2))
    assert append(log, 5, header(4, collector=2))
    assert log.read_state().positions == {2: Position(1, 4, 2)}


def test_beginning_again_leaves_no_block(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 1, header(1))
    log.begin(BEGUN)
    assert numbers(log) == []
    assert append(log, 1, header(1))


@real_servers
def test_a_script_that_the_server_has_forgotten_is_sent_again(server, place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 1, header(1))
    with redis.Redis.from_url(server.url) as client:
        client.script_flush()
    assert append(log, 2, header(2))


@real_servers
def test_every_key_lies_under_the_run_id(server):
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        store = RedisStore(server.url, "my-run", deadline_seconds=10)
        store.claim(resume=False)
        log = RedisLog(store, TABLE)
        log.begin(BEGUN)
        append(log, 1, header(1))
        assert {key.decode() for key in client.scan_iter()} == {
            "paceline:{my-run}:" + part
            for part in ("meta", "owner", *(f"table:{TABLE}:{p}" for p in ("spec", "state", "positions", "blocks")))
        }
    store.close()


@real_servers
def test_a_used_run_id_is_refused_unless_the_run_is_resumed(server):
    stores = [RedisStore(server.url, "used", deadline_seconds=10) for _ in range(3)]
    assert not stores[0].claim(resume=False)
    with pytest.raises(ConflictError, match=r"'used' has a record .* --resume, or choose another run.id"):
        stores[1].claim(resume=False)
    assert stores[2].claim(resume=True)
    for store in stores:
        store.close()


@real_servers
def test_a_record_of_another_format_is_refused(server):
    store = RedisStore(server.url, "future", deadline_seconds=10)
    store.claim(resume=False)
    store.command("HSET", store.key("meta"), "format", "2")
    with pytest.raises(ConflictError, match="has format 2: expected 1"):
        store.claim(resume=True)
    store.close()
