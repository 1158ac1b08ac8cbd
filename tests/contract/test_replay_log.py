"""What replay relies on, of its log in Redis (the bundled server, and Redis itself) and of the tests' double alike."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import redis

from contract.memory_log import MemoryLog, Shelf
from paceline.errors import ConflictError, PacelineError, ReplacedError, StoreFullError
from paceline.replay import log as log_module
from paceline.replay import log_reader
from paceline.replay.blocks import HeldBlock
from paceline.replay.log import OutOfStepError, RedisLog
from paceline.replay.logged import BlockWrite, LoggedBlock, LogState, Position
from paceline.replay.store import RedisStore
from paceline.rows import Column, RowSpec
from paceline.v1 import rows_pb2
from redis_record import held, settle
from redis_servers import SERVERS, start_redis

SPEC = RowSpec((Column("value", "float32", (3,)), Column("step", "int64")))
TABLE = "transitions"
BEGUN = LogState(row_spec=SPEC, limiter_json="{}")


real_servers = pytest.mark.parametrize("server", SERVERS, indirect=True, scope="module")
"""For what only a server has: scripts, keys, runs."""


class Place:
    """Where a log lives: `open` makes another process's view of it, `forget` loses everything."""

    def __init__(self, open_log: Callable[..., RedisLog | MemoryLog], forget: Callable[[], None]) -> None:
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
        yield Place(lambda settled=True: opened(MemoryLog(shelf), settled), shelf.lose)
        return
    stores: list[RedisStore] = []
    run_id = uuid.uuid4().hex

    def open_log(settled: bool = True) -> RedisLog:
        stores.append(RedisStore(server.url, run_id, deadline_seconds=10))
        stores[-1].claim(resume=True)
        return opened(RedisLog(stores[-1], TABLE), settled)

    def forget() -> None:
        with redis.Redis.from_url(server.url) as client:
            client.flushall()

    yield Place(open_log, forget)
    for store in stores:
        store.close()


def opened(log, settled):
    """As a process takes a table over, if it is there."""
    if settled:
        settle(log)
    return log


ROWS = 10
"""In the blocks of these tests: block n has the keys from 10 n on."""


def header(
    sequence: int, *, collector: int = 0, incarnation: int = 1, rows: int = ROWS, first_row: int = 0
) -> rows_pb2.BlockHeader:
    return rows_pb2.BlockHeader(
        collector_index=collector,
        collector_incarnation=incarnation,
        sequence=sequence,
        row_count=rows,
        first_row=first_row,
    )


def block(number: int, stamp: rows_pb2.BlockHeader) -> LoggedBlock:
    return LoggedBlock(ROWS * number, ROWS, stamp.SerializeToString(), b"rows of %d" % number * 1000)


def append(log, number: int, stamp: rows_pb2.BlockHeader, *, removed: Sequence[int] = (), **options: int) -> bool:
    return log.append([write(number, stamp, removed=held(log, *removed), **options)]) == 1


def write(number: int, stamp: rows_pb2.BlockHeader, *, removed: Sequence[HeldBlock] = (), **options: int) -> BlockWrite:
    return BlockWrite(block(number, stamp), stamp, removed=removed, sampled=7 * number, **options)


def test_blocks_that_are_appended_together_are_what_they_are_one_by_one(place):
    log = place.open()
    log.begin(BEGUN)
    assert append(log, 0, header(1))
    more = [write(1, header(2)), write(2, header(1, collector=3), removed=held(log, 0)), write(3, header(3), dropped=5)]
    assert log.append(more) == 3
    assert list(log.read_blocks()) == [each.block for each in more]
    state = log.read_state()
    assert (state.inserted, state.sampled, state.dropped) == (40, 21, 5)
    assert state.positions == {0: Position(1, 3, ROWS), 3: Position(1, 1, ROWS)}
    assert log.payload_bytes() == sum(len(each.block.payload) for each in more)


@pytest.mark.parametrize(
    "second",
    [
        lambda: write(1, header(1)),
        lambda: write(1, header(1, collector=3)),
        lambda: write(5, header(2)),
    ],
    ids=["duplicate", "replaced", "out of step"],
)
def test_a_block_that_is_not_stored_ends_those_that_came_with_it(place, second):
    log = place.open()
    log.begin(replace(BEGUN, positions={3: Position(2, 4, 1)}))
    refused = second()
    assert log.append([write(0, header(1)), refused, write(2, header(3))]) == 1
    assert first_rows(log) == [0]
    assert log.read_state().inserted == 10
    assert log.append([write(1, header(2)), write(2, header(3))]) == 2
    assert first_rows(log) == [0, 10, 20]


def test_of_blocks_that_come_together_the_failure_of_the_first_is_raised(place):
    log = place.open()
    log.begin(replace(BEGUN, positions={3: Position(2, 4, 1)}))
    with pytest.raises(OutOfStepError):
        log.append([write(1, header(1)), write(2, header(2))])
    with pytest.raises(ReplacedError):
        log.append([write(0, header(1, collector=3)), write(1, header(1))])
    assert log.append([write(0, header(4, collector=3, incarnation=2)), write(1, header(1))]) == 0
    assert first_rows(log) == []
    place.open()
    with pytest.raises(ReplacedError):
        log.append([write(0, header(1)), write(1, header(2))])
    assert log.replaced


def test_no_block_is_stored_without_the_one_before_it_though_the_record_is_where_it_expects_it(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1, collector=3))  # and its reply is lost: whoever appends next knows nothing of it
    with pytest.raises(OutOfStepError):
        log.append([write(0, header(1)), write(1, header(2))])
    assert first_rows(log) == [0]
    assert log.read_state().positions == {3: Position(1, 1, ROWS)}


def first_rows(log, first_row: int = 0) -> list[int]:
    return [block.first_row for block in log.read_blocks(first_row)]


def test_a_table_that_nobody_began_has_no_state(place):
    assert place.open().read_state() is None


def test_what_is_appended_is_read_back_with_counters_and_positions(place):
    log = place.open()
    log.begin(BEGUN)
    stamps = [header(1), header(1, collector=3, incarnation=2, rows=5)]
    assert append(log, 0, stamps[0])
    assert append(log, 1, stamps[1], consumed=4, dropped=3)
    assert list(log.read_blocks()) == [block(0, stamps[0]), block(1, stamps[1])]
    assert log.payload_bytes() == sum(len(block.payload) for block in log.read_blocks())
    assert log.read_state() == LogState(
        row_spec=SPEC,
        limiter_json="{}",
        inserted=20,
        sampled=7,
        consumed=4,
        dropped=3,
        positions={0: Position(1, 1, 10), 3: Position(2, 1, 5)},
    )


def test_a_payload_may_be_a_view_of_another_buffer(place):
    log = place.open()
    log.begin(BEGUN)
    stamp = header(1)
    payload = memoryview(bytearray(range(256)) * 40)[16:]
    log.append([BlockWrite(LoggedBlock(0, ROWS, stamp.SerializeToString(), payload), stamp)])
    (found,) = log.read_blocks()
    assert found.payload == payload


def test_blocks_are_read_in_order_from_any_key_on(place):
    log = place.open()
    log.begin(BEGUN)
    for number in range(40):
        append(log, number, header(number + 1))
    assert first_rows(log) == list(range(0, 400, 10))
    assert first_rows(log, 370) == [370, 380, 390]
    assert first_rows(log, 379) == [370, 380, 390]
    assert first_rows(log, 400) == []
    assert log.block_count() == 40


def test_the_first_row_is_that_of_the_oldest_block_that_is_left(place):
    log = place.open()
    log.begin(BEGUN)
    assert log.read_oldest_row() is None
    for number in range(4):
        append(log, number, header(number + 1, first_row=ROWS * number))
    assert log.read_oldest_row() == 0
    log.save(inserted=40, sampled=0, removed=held(log, 0, 10))
    assert log.read_oldest_row() == 20
    assert place.open().read_oldest_row() == 20


@real_servers
def test_a_damaged_first_entry_is_not_asked_for_the_first_row(bare):
    log, client = bare
    log.begin(BEGUN)
    for number in range(4):
        append(log, number, header(number + 1, first_row=ROWS * number))
    log.save(inserted=40, sampled=0, removed=held(log, 0, 10))
    change_entry(client, b"1-30", first_row=0)
    assert log.read_oldest_row() == 30


@real_servers
def test_an_entry_that_claims_rows_of_intact_blocks_takes_none_of_them_along(bare):
    log, client = bare
    log.begin(BEGUN)
    for number in range(10):
        append(log, number, header(number + 1, first_row=ROWS * number))
    change_entry(client, b"1-90", first_row=0)
    assert first_rows(log) == list(range(0, 100, 10))
    assert settle(log).inserted == 100
    assert [len(block.payload) for block in log.read_blocks()] == [9000] * 10  # no payload is taken for left behind


@real_servers
def test_an_entry_of_a_later_epoch_that_its_header_contradicts_takes_no_block_before_it_along(bare):
    log, client = bare
    log.begin(BEGUN)
    for number in range(5):
        append(log, number, header(number + 1, first_row=ROWS * number))
    settle(log)
    append(log, 5, header(6, first_row=50))
    append(log, 6, header(7, first_row=60))
    change_entry(client, b"2-60", first_row=10)
    assert first_rows(log) == list(range(0, 70, 10))
    change_entry(client, b"2-60", header=b"\xff")
    settle(log)
    assert [len(block.payload) for block in log.read_blocks()] == [9000] * 7


def change_entry(client: redis.Redis, changed: bytes, **fields: object) -> None:
    """Write an entry of the index anew with other fields, as damage would leave it."""
    index = f"{PREFIX}table:{TABLE}:blocks"
    entries = client.xrange(index)
    client.delete(index)
    for identifier, kept in entries:
        new = {name.encode(): value for name, value in fields.items()} if identifier == changed else {}
        client.xadd(index, {**kept, **new}, id=identifier)


def test_blocks_that_need_several_steps_to_be_read_come_whole_and_once(place, monkeypatch):
    monkeypatch.setattr(log_reader, "READ_BYTES", 30_000)
    monkeypatch.setattr(log_reader, "INDEX_STEP", 7)
    log = place.open()
    log.begin(BEGUN)
    for number in range(30):
        append(log, number, header(number + 1))
    assert list(log.read_blocks()) == [block(number, header(number + 1)) for number in range(30)]
    reading = log.read_blocks()
    assert next(reading).first_row == 0
    reading.close()  # a reader that stops early leaves the log usable
    assert append(log, 30, header(31))


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_block_that_is_there_is_recognised_and_changes_nothing(place, sequence):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1))
    append(log, 1, header(2))
    before = log.read_state(), list(log.read_blocks())
    assert not append(log, 2, header(sequence))
    assert (log.read_state(), list(log.read_blocks())) == before


def test_a_later_incarnation_begins_anew_and_retires_the_earlier(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(9))
    assert append(log, 1, header(1, incarnation=2))
    with pytest.raises(ReplacedError):
        append(log, 2, header(10))
    assert append(log, 2, header(1, collector=1))
    assert first_rows(log) == [0, 10, 20]


def test_a_gap_in_a_sequence_is_accepted(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1))
    assert append(log, 1, header(7))


def test_an_append_removes_the_oldest_blocks_with_their_payloads(place):
    log = place.open()
    log.begin(BEGUN)
    for number in range(4):
        append(log, number, header(number + 1))
    append(log, 4, header(5), removed=[0, 10, 20])
    assert first_rows(log) == [30, 40]
    assert log.payload_bytes() == 2 * len(block(3, header(4)).payload)


def test_a_save_removes_the_oldest_blocks_and_may_be_repeated(place, monkeypatch):
    monkeypatch.setattr(log_module, "INDEX_STEP", 2)
    log = place.open()
    log.begin(BEGUN)
    for number in range(6):
        append(log, number, header(number + 1))
    for _ in range(2):
        log.save(inserted=60, sampled=1, removed=held(log, 0, 10, 20, 30, 40))
        assert first_rows(log) == [50]
        assert log.payload_bytes() == len(block(5, header(6)).payload)
    log.save(inserted=60, sampled=1, removed=held(log, 50))
    assert first_rows(log) == []
    assert (log.block_count(), log.payload_bytes(), log.read_state().inserted) == (0, 0, 60)


def test_a_block_may_take_the_place_of_every_other(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1))
    append(log, 1, header(2), removed=[0])
    assert first_rows(log) == [10]


@pytest.mark.parametrize("wrong", [0, 20])
def test_a_process_that_believes_in_another_next_row_is_told_and_harms_nothing(place, wrong):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1))
    with pytest.raises(OutOfStepError):
        append(log, wrong // ROWS, header(2))
    with pytest.raises(OutOfStepError):
        log.save(inserted=wrong, sampled=1, removed=held(log, 0), pages={0: b"page"})
    assert list(log.read_blocks()) == [block(0, header(1))]
    assert list(log.read_pages()) == []


def test_a_hole_before_a_block_must_be_known_to_its_sender(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1))
    assert append(log, 5, header(2), after=10)
    assert first_rows(log) == [0, 50]
    assert log.read_state().inserted == 60


def test_the_counters_are_saved_alone(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1))
    log.save(inserted=10, sampled=1234, consumed=7, dropped=2)
    state = log.read_state()
    assert (state.inserted, state.sampled, state.consumed, state.dropped) == (10, 1234, 7, 2)


def test_a_record_can_be_made_to_say_what_another_said(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1, collector=5))
    said = LogState(SPEC, "{}", inserted=90, sampled=8, consumed=7, dropped=6, positions={1: Position(2, 3, 4)})
    log.restate(said, 10)
    assert log.read_state() == said
    assert first_rows(log) == [0]
    assert append(log, 9, header(4, collector=1, incarnation=2))


def test_pages_are_kept_replaced_and_left_behind(place, monkeypatch):
    monkeypatch.setattr(log_module, "PAGE_STEP", 3)
    monkeypatch.setattr(log_reader, "PAGE_STEP", 3)
    log = place.open()
    log.begin(BEGUN)
    pages = {number: b"%d" % number * 2000 for number in range(10)}
    log.save(inserted=0, sampled=0, pages=pages)
    assert dict(log.read_pages()) == pages
    log.save(inserted=0, sampled=0, pages={9: b"new", 10: b"more"}, first_page=4)
    kept = {number: pages[number] for number in range(4, 9)}
    assert dict(log.read_pages()) == {**kept, 9: b"new", 10: b"more"}
    log.save(inserted=0, sampled=0, first_page=10)
    assert dict(log.read_pages()) == {10: b"more"}
    log.begin(BEGUN)
    assert dict(log.read_pages()) == {}


def test_a_newer_process_takes_over_and_the_older_stores_and_harms_nothing(place):
    older = place.open()
    older.begin(BEGUN)
    append(older, 0, header(1))
    newer = place.open()
    assert newer.read_state().inserted == 10
    # Its first block has the key that the older one's next would have.
    assert append(newer, 1, header(2))
    kept = list(newer.read_blocks())
    for attempt in (
        lambda: append(older, 1, header(3, rows=9)),
        lambda: older.save(inserted=10, sampled=1),
        lambda: older.save(inserted=20, sampled=1, removed=held(older, 0)),
        lambda: older.begin(BEGUN),
    ):
        assert not newer.replaced
        with pytest.raises(ReplacedError):
            attempt()
        assert older.replaced
        assert list(newer.read_blocks()) == kept
    assert append(newer, 2, header(3))


def test_a_record_that_was_lost_is_begun_again_by_its_owner(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1))
    place.forget()
    assert log.read_state() is None
    with pytest.raises(OutOfStepError):
        append(log, 1, header(2))
    log.begin(LogState(row_spec=SPEC, limiter_json="{}", inserted=40, positions={2: Position(1, 3, 2)}))
    assert not append(log, 4, header(3, collector=2))
    assert append(log, 4, header(4, collector=2))
    assert log.read_state().positions == {2: Position(1, 4, 10)}


def test_beginning_again_leaves_no_block(place, monkeypatch):
    monkeypatch.setattr(log_module, "INDEX_STEP", 2)
    log = place.open()
    log.begin(BEGUN)
    for number in range(5):
        append(log, number, header(number + 1))
    log.begin(BEGUN)
    assert first_rows(log) == []
    assert log.payload_bytes() == 0
    assert append(log, 0, header(1))


@real_servers
def test_a_script_that_the_server_has_forgotten_is_sent_again(server, place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1))
    with redis.Redis.from_url(server.url) as client:
        client.script_flush()
    assert append(log, 1, header(2))
    assert list(log.read_blocks()) == [block(0, header(1)), block(1, header(2))]
    with redis.Redis.from_url(server.url) as client:
        client.script_flush()
    assert log.append([write(2, header(3)), write(3, header(4)), write(4, header(5))]) == 3
    assert first_rows(log) == [0, 10, 20, 30, 40]


@pytest.fixture
def bare(server):
    """A log and a client of an empty server."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        store = RedisStore(server.url, "my-run", deadline_seconds=10)
        store.claim(resume=False)
        yield RedisLog(store, TABLE), client
        store.close()


PREFIX = "paceline:{my-run}:"


def keys(client: redis.Redis) -> set[str]:
    return {key.decode() for key in client.scan_iter()}


@real_servers
def test_every_key_lies_under_the_run_id_and_leaves_with_its_block(bare):
    log, client = bare
    log.begin(BEGUN)
    append(log, 0, header(1))
    append(log, 1, header(2))
    log.save(inserted=20, sampled=0, pages={0: b"page"})
    assert not append(log, 2, header(2))
    table = {f"table:{TABLE}:{part}" for part in ("spec", "state", "positions", "blocks", "pages")}
    payloads = {f"table:{TABLE}:block:{first}" for first in (0, 10)}
    assert keys(client) == {PREFIX + part for part in ("owner", "meta", *table, *payloads)}
    assert client.get(f"{PREFIX}table:{TABLE}:block:10") == block(1, header(2)).payload
    log.save(inserted=20, sampled=0, removed=held(log, 0, 10))
    assert keys(client) == {PREFIX + part for part in ("owner", "meta", *table)}
    append(log, 2, header(3))
    log.begin(BEGUN)
    assert keys(client) == {PREFIX + part for part in ("owner", "meta", f"table:{TABLE}:spec", f"table:{TABLE}:state")}


@real_servers
def test_shards_of_a_run_have_keys_of_their_own(server):
    stores = [RedisStore(server.url, "sharded", deadline_seconds=10, shard=shard) for shard in (0, 1)]
    for store in stores:
        assert not store.claim(resume=False)
    assert [store.key("meta") for store in stores] == [b"paceline:{sharded:0}:meta", b"paceline:{sharded:1}:meta"]
    for store in stores:
        store.close()


@real_servers
def test_a_payload_or_an_entry_that_is_gone_leaves_the_others_readable(bare):
    log, client = bare
    log.begin(BEGUN)
    for number in range(4):
        append(log, number, header(number + 1))
    client.delete(f"{PREFIX}table:{TABLE}:block:10")
    index = f"{PREFIX}table:{TABLE}:blocks"
    entries = client.xrange(index)
    client.delete(index)
    for identifier, fields in entries:
        client.xadd(index, {"header": b"\xff"} if identifier == b"1-30" else fields, id=identifier)
    assert [(block.first_row, block.end_row, len(block.payload)) for block in log.read_blocks()] == [
        (0, 10, 9000),
        (10, 20, 0),
        (20, 30, 9000),
        (30, 40, 9000),
    ]
    assert [block.header for block in log.read_blocks(20)] == [b"\xff", header(4).SerializeToString()]
    log.save(inserted=40, sampled=0, removed=held(log, 0, 10, 20))
    assert first_rows(log) == [30]


def fill(log: RedisLog, at_once: int) -> int:
    """Append so many blocks at once until the store is full; how many blocks it took."""
    for first in range(0, 1000, at_once):
        stamps = [header(number + 1) for number in range(first, first + at_once)]
        large = [
            LoggedBlock(ROWS * number, ROWS, stamp.SerializeToString(), b"x" * 65536)
            for number, stamp in enumerate(stamps, start=first)
        ]
        try:
            assert log.append(list(map(BlockWrite, large, stamps))) == at_once
        except StoreFullError:
            return first
    return 1000


@real_servers
@pytest.mark.parametrize("at_once", [1, 3])
def test_a_full_store_takes_nothing_of_blocks_and_still_lets_blocks_leave(bare, at_once):
    log, client = bare
    log.begin(BEGUN)
    client.config_set("maxmemory", str(int(client.info("memory")["used_memory"]) + (4 << 20)))
    try:
        stored = fill(log, at_once)
        assert 4 < stored < 1000
        payloads = {f"{PREFIX}table:{TABLE}:block:{ROWS * number}" for number in range(stored)}
        assert {key for key in keys(client) if ":block:" in key or ":staged" in key} == payloads
        assert first_rows(log) == [ROWS * number for number in range(stored)]
        assert log.read_state().inserted == ROWS * stored
        leaving = [ROWS * number for number in range(stored // 4)]
        log.save(inserted=ROWS * stored, sampled=0, removed=held(log, *leaving))
        assert append(log, stored, header(stored + 1))
    finally:
        client.config_set("maxmemory", "0")


@real_servers
def test_a_script_that_finds_the_store_full_leaves_nothing_of_the_block(bare):
    # The payload was taken, the script is refused: as where another client fills the store in between.
    log, client = bare
    log.begin(BEGUN)
    append(log, 0, header(1))
    before = keys(client)
    client.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreFullError):
            append(log, 1, header(2))
        with pytest.raises(StoreFullError):
            log.save(inserted=10, sampled=5)
        assert keys(client) == before
        assert first_rows(log) == [0]
    finally:
        client.config_set("maxmemory", "0")
    assert append(log, 1, header(2))


@real_servers
def test_where_the_index_is_damaged_no_block_is_stored(bare):
    log, client = bare
    log.begin(BEGUN)
    append(log, 0, header(1))
    client.xadd(f"{PREFIX}table:{TABLE}:blocks", {"header": b"of another row"}, id="1000-0")
    before, state = keys(client), log.read_state()
    with pytest.raises(PacelineError, match="smaller than the target stream top item"):
        log.append([write(1, header(2)), write(2, header(3))])
    # The payload lies where the next block's will.
    assert {key for key in keys(client) if ":staged" not in key} == before | {f"{PREFIX}table:{TABLE}:block:10"}
    assert log.read_state() == state


def lose_field(key: str, field: str) -> Callable[[redis.Redis], object]:
    return lambda client: client.hdel(f"{PREFIX}table:{TABLE}:{key}", field)


def spoil_field(key: str, field: str, value: str) -> Callable[[redis.Redis], object]:
    return lambda client: client.hset(f"{PREFIX}table:{TABLE}:{key}", field, value)


def lose(*keys: str) -> Callable[[redis.Redis], object]:
    return lambda client: client.delete(*(f"{PREFIX}table:{TABLE}:{key}" for key in keys))


@real_servers
@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lose("spec"), ":spec is missing"),
        (lose("state"), ":state is missing"),
        (lose("spec", "state"), ":spec is missing"),
        (lose("spec", "state", "positions", "blocks", "pages"), ":spec is missing"),
        (lambda client: client.set(f"{PREFIX}table:{TABLE}:spec", b"\xff"), ":spec is unreadable"),
        *((lose_field("state", field), f":state has no field '{field}'") for field in ("inserted", "limiter")),
        (lose_field("state", "consumed"), ":state has no field 'consumed'; expected a count"),
        (spoil_field("state", "sampled", "many"), ":state has 'many' as its field 'sampled'"),
        (spoil_field("state", "epoch", "last"), ":state has 'last' as its field 'epoch'"),
        (spoil_field("positions", "0", "1 x 2"), ":positions has '1 x 2' as its field '0'; expected by the collector"),
        (spoil_field("positions", "first", "1 2 3"), "as its field 'first'"),
    ],
)
def test_a_record_that_lacks_what_it_should_say_is_named_and_left_as_it_is(server, bare, harm, named):
    log, client = bare
    log.begin(BEGUN)
    for number in range(3):
        append(log, number, header(number + 1))
    harm(client)
    before = keys(client)
    store = RedisStore(server.url, "my-run", deadline_seconds=10)
    store.claim(resume=True)
    try:
        with pytest.raises(ConflictError) as raised:
            RedisLog(store, TABLE).read_state()
    finally:
        store.close()
    assert f"the record of table '{TABLE}' is damaged: {PREFIX}table:{TABLE}:" in str(raised.value)
    assert named in str(raised.value)
    assert "`paceline replay delete RUN`" in str(raised.value)
    assert keys(client) == before


@real_servers
def test_a_process_that_has_stored_all_rows_makes_a_record_anew_that_lost_its_state(bare):
    log, client = bare
    log.begin(BEGUN)
    append(log, 0, header(1))
    client.delete(f"{PREFIX}table:{TABLE}:state")
    assert log.read_state() is None
    log.begin(replace(BEGUN, inserted=10))
    assert log.read_state().inserted == 10


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
    store = RedisStore(server.url, "past", deadline_seconds=10)
    store.claim(resume=False)
    store.command("HSET", store.key("meta"), "format", "1")
    with pytest.raises(ConflictError, match="has format 1: expected 2 or 3"):
        store.claim(resume=True)
    store.close()


def test_a_process_begins_an_epoch_before_it_writes(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1))
    another = place.open()
    assert another.epoch > log.epoch
    assert append(another, 1, header(2))
    assert [block.epoch for block in another.read_blocks()] == [log.epoch, another.epoch]


@real_servers
def test_a_process_that_has_begun_no_epoch_writes_nothing(bare, server):
    log, client = bare
    log.begin(BEGUN)
    append(log, 0, header(1))
    before = {key: client.dump(key) for key in client.scan_iter()}
    another = RedisLog(log._store, TABLE)
    with pytest.raises(OutOfStepError, match="has yet to begin an epoch"):
        append(another, 1, header(2))
    with pytest.raises(OutOfStepError, match="has yet to begin an epoch"):
        another.save(inserted=10, sampled=5)
    assert {key: client.dump(key) for key in client.scan_iter()} == before


@pytest.mark.parametrize("kind", SERVERS)
def test_after_a_restart_of_redis_a_process_begins_an_epoch_before_it_writes(kind, tmp_path):
    server = start_redis(kind, tmp_path, appendfsync="always")
    store = RedisStore(server.url, "my-run", deadline_seconds=10)
    store.claim(resume=False)
    log = RedisLog(store, TABLE)
    log.begin(BEGUN)
    append(log, 0, header(1))
    server.restart()
    before = log.read_state()
    for attempt in (lambda: append(log, 1, header(2)), lambda: log.save(inserted=10, sampled=5)):
        with pytest.raises(OutOfStepError, match="has restarted"):
            attempt()
        assert log.read_state() == before
    epoch = log.epoch
    assert settle(log) == before
    assert log.epoch > epoch
    assert append(log, 1, header(2))
    log.save(inserted=20, sampled=5)
    assert first_rows(log) == [0, 10]
    store.close()
    server.stop()


@real_servers
def test_what_a_later_epoch_wrote_takes_the_place_of_what_an_earlier_one_did(bare):
    log, client = bare
    log.begin(BEGUN)
    append(log, 0, header(1))
    index, payload = f"{PREFIX}table:{TABLE}:blocks", f"{PREFIX}table:{TABLE}:block:"
    settle(log)
    log.append([BlockWrite(LoggedBlock(10, 5, header(1, rows=5).SerializeToString(), b"later"), header(2, rows=5))])
    entries = client.xrange(index)
    client.delete(index)
    stale = {"first_row": 10, "header": header(2, first_row=10).SerializeToString()}
    client.xadd(index, entries[0][1], id=entries[0][0])
    client.xadd(index, stale, id="1-20")
    client.xadd(index, {**stale, "first_row": 20}, id="1-30")
    client.set(f"{payload}20", "left over")
    client.xadd(index, entries[1][1], id=entries[1][0])
    expected = [(0, 10), (10, 15)]
    assert [(block.first_row, block.end_row) for block in log.read_blocks()] == expected
    settle(log)
    assert not client.exists(f"{payload}20")
    assert [(block.first_row, block.end_row, len(block.payload)) for block in log.read_blocks()] == [
        (0, 10, 9000),
        (10, 15, 5),
    ]
    log.save(inserted=15, sampled=0, removed=[HeldBlock(0, ROWS, 9000, None, epoch=1)])
    assert first_rows(log) == [10]


@real_servers
def test_blocks_of_a_step_that_came_about_in_part_are_taken_for_stored(bare):
    log, client = bare
    log.begin(BEGUN)
    append(log, 0, header(1))
    table = f"{PREFIX}table:{TABLE}"
    stamp = header(4, collector=2, incarnation=7, first_row=10)
    client.set(f"{table}:block:10", "a payload")
    client.xadd(f"{table}:blocks", {"first_row": 10, "header": stamp.SerializeToString()}, id="1-20")
    client.xadd(f"{table}:blocks", {"first_row": 20, "header": "damaged"}, id="1-30")
    state = log.read_state()
    assert (state.inserted, state.positions) == (20, {0: Position(1, 1, ROWS), 2: Position(7, 4, ROWS)})
    with pytest.raises(OutOfStepError):
        append(log, 2, header(2))
    assert settle(log) == state
    assert log.payload_bytes() == 9000 + len("a payload")
    assert append(log, 2, header(2))
    assert first_rows(log) == [0, 10, 20]
    assert log.read_state().inserted == 30


@pytest.mark.parametrize("wrong", ["epoch", "next row"])
def test_a_record_that_has_changed_since_it_was_read_is_not_settled(place, wrong):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1))
    view = log.view()
    if wrong == "epoch":
        settle(log)
    else:
        append(log, 1, header(2))
    before = log.read_state()
    with pytest.raises(OutOfStepError):
        log.settle(view, view.state)  # as one that comes late
    assert log.read_state() == before
    settle(log)
    assert append(log, before.inserted // ROWS, header(3))


def test_a_record_is_not_made_anew_by_who_does_not_know_of_its_epoch(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1))
    settle(place.open())  # as where the same process has begun one, and an earlier call of its comes late
    another = place.open(settled=False)
    with pytest.raises(OutOfStepError):
        another.begin(BEGUN)
    assert first_rows(another) == [0]
    another.begin(replace(BEGUN, inserted=10), another.view())
    assert first_rows(another) == []
    assert append(another, 1, header(2))


@real_servers
def test_a_step_of_an_earlier_epoch_that_comes_late_changes_nothing(bare):
    log, client = bare
    log.begin(BEGUN)
    append(log, 0, header(1))
    client.hset(f"{PREFIX}table:{TABLE}:state", "epoch", 2)
    for attempt in (lambda: append(log, 1, header(2)), lambda: log.save(inserted=10, sampled=5)):
        with pytest.raises(OutOfStepError):
            attempt()
    assert first_rows(log) == [0]
    assert log.read_state().sampled == 0


def test_a_record_is_made_to_say_what_another_said_only_if_it_has_all_blocks(place):
    log = place.open()
    log.begin(BEGUN)
    append(log, 0, header(1))
    with pytest.raises(OutOfStepError):
        log.restate(replace(BEGUN, inserted=20), 20)
    assert log.read_state().inserted == 10


def test_a_block_that_is_written_again_need_not_be_new_to_its_collector(place):
    log = place.open()
    log.begin(replace(BEGUN, positions={0: Position(2, 9, ROWS)}))
    assert not append(log, 0, header(3, incarnation=2))
    assert append(log, 0, header(3, incarnation=2), again=True)
    assert append(log, 1, header(8, incarnation=1), again=True)
    assert log.read_state().positions == {0: Position(1, 8, ROWS)}


def as_before(client: redis.Redis) -> None:
    """Have the record be as the release before would have written it."""
    table = f"{PREFIX}table:{TABLE}"
    entries = client.xrange(f"{table}:blocks")
    client.delete(f"{table}:blocks")
    for identifier, fields in entries:
        client.xadd(f"{table}:blocks", fields, id=f"{int(identifier.split(b'-')[1])}-0")
    client.hdel(f"{table}:state", "epoch")
    client.hset(f"{PREFIX}meta", "format", "2")


@real_servers
def test_what_turns_up_of_a_step_of_the_format_before_takes_no_place(bare):
    log, client = bare
    log.begin(BEGUN)
    log.append([write(number, header(number + 1, first_row=ROWS * number)) for number in range(2)])
    as_before(client)
    table = f"{PREFIX}table:{TABLE}"
    another = RedisLog(log._store, TABLE)
    settle(another)
    later = [write(number, header(number, collector=3, first_row=ROWS * number)) for number in (2, 3)]
    # What Redis carries out first, at the load after the next kill: it knew nothing of it when the epoch began.
    stale = {"first_row": 20, "header": header(1, collector=4, first_row=20).SerializeToString()}
    client.xadd(f"{table}:blocks", stale, id="30-0")
    client.xadd(f"{table}:blocks", {**stale, "first_row": 30}, id="40-0")
    assert another.append(later) == 2
    assert list(another.read_blocks())[2:] == [each.block for each in later]


@real_servers
def test_an_entry_of_the_format_before_that_has_no_payload_yet_is_not_taken_for_stored(bare):
    log, client = bare
    log.begin(BEGUN)
    append(log, 0, header(1))
    as_before(client)
    stale = {"first_row": 10, "header": header(1, collector=4, first_row=10).SerializeToString()}
    client.xadd(f"{PREFIX}table:{TABLE}:blocks", stale, id="20-0")
    another = RedisLog(log._store, TABLE)
    state = settle(another)
    assert (state.inserted, state.positions) == (10, {0: Position(1, 1, ROWS)})
    assert append(another, 1, header(1, collector=4))
    assert first_rows(another) == [0, 10]
    assert bytes(list(another.read_blocks())[1].payload) == block(1, header(1)).payload


@real_servers
def test_a_record_of_the_format_before_is_read_and_gone_on_with(bare, server):
    log, client = bare
    log.begin(BEGUN)
    log.append([write(number, header(number + 1, first_row=ROWS * number)) for number in range(4)])
    as_before(client)
    before = list(log.read_blocks())
    assert [block.first_row for block in before] == [0, 10, 20, 30]
    assert first_rows(log, 25) == [20, 30]

    store = RedisStore(server.url, "my-run", deadline_seconds=10)
    store.require_format()
    assert store.claim(resume=True)
    assert client.hget(f"{PREFIX}meta", "format") == b"3"
    newer = RedisLog(store, TABLE)
    state = settle(newer)
    assert (state.inserted, state.positions) == (40, {0: Position(1, 4, ROWS)})
    assert append(newer, 4, header(5))
    assert first_rows(newer) == [0, 10, 20, 30, 40]
    leaving = [HeldBlock(each.first_row, each.row_count, 0, None, each.epoch) for each in newer.read_blocks()]
    newer.save(inserted=50, sampled=0, removed=leaving[:2])
    assert first_rows(newer) == [20, 30, 40]
    newer.save(inserted=50, sampled=0, removed=leaving[2:4])
    assert first_rows(newer) == [40]
    assert newer.payload_bytes() == 9000
    store.close()
