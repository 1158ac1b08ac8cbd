"""Redis goes away, comes back, has lost something, is full, or refuses writes; nothing acknowledged is lost."""

from __future__ import annotations

import pytest
import redis
import structlog

from contract.faulty_redis import FaultyRedis
from integration.replay_harness import (
    RUN,
    SECONDS,
    SPEC,
    TABLE,
    Client,
    ReplayProcess,
    ReplayThread,
    block,
    free_port,
    make_config,
    one_by_one,
    request,
    retry,
    together,
    values_in_redis,
    wait_until,
    wait_until_whole,
)
from paceline.errors import (
    ConfigError,
    PacelineError,
    PortTakenError,
    StoreFullError,
    StoreReadOnlyError,
    UnavailableError,
)
from paceline.rows import Block, Column, RowSpec
from paceline.rpc.status import raising
from paceline.v1 import rows_pb2
from redis_servers import start_redis

PREFIX = f"paceline:{{{RUN}}}:table:{TABLE}"
BLOCKS = f"{PREFIX}:blocks"


@pytest.fixture
def own_redis(shared_redis, request, tmp_path):
    """A server that the test may kill, of the kind whose turn it is."""
    kind = "redis" if "redis-server" in str(shared_redis._binary) else "embedded"
    server = start_redis(kind, tmp_path / "redis")
    yield server
    server.stop()


@pytest.fixture
def faulty(redis_server):
    faulty = FaultyRedis(redis_server.url.removeprefix("unix://"))
    yield faulty
    faulty.close()


def test_while_redis_is_away_appends_are_refused_and_sampling_goes_on(own_redis, serve):
    replay, client = serve(make_config(own_redis.url))
    client.open()
    client.append_rows(5)
    own_redis.process.kill()
    own_redis.process.wait()
    with pytest.raises(UnavailableError, match="cannot be reached"):
        client.append(request(6, block(50, 10)))
    assert set(client.sample_values(2000).tolist()) == set(range(50))
    wait_until(lambda: client.health() == "NOT_SERVING", "readiness goes off")
    assert client.health("") == "SERVING"  # nobody should restart the process
    assert replay.metrics()["paceline_replay_redis_available"] == 0

    with structlog.testing.capture_logs() as events:
        own_redis.restart()
        wait_until(lambda: client.health() == "SERVING", "readiness comes back")
        (answer,) = retry(lambda: client.append(request(6, block(50, 10))), (UnavailableError,))
    assert not answer.duplicate
    (begun,) = [event for event in events if event["event"] == "record_epoch_begun"]
    assert "has restarted" in begun["reason"]
    with redis.Redis.from_url(own_redis.url) as store:
        assert values_in_redis(store) == list(range(60))
    assert replay.metrics()["paceline_replay_redis_available"] == 1


def what_redis_knows(client: redis.Redis) -> dict[bytes, bytes]:
    """Of the table: what it knows again after a crash, exactly the scripts up to this moment."""
    return {key: client.dump(key) for key in client.scan_iter(f"{PREFIX}:*")}


def have_redis_know(client: redis.Redis, known: dict[bytes, bytes], *more: tuple[object, ...]) -> None:
    """In one step, with `more` commands after it."""
    with client.pipeline() as pipeline:
        for key in client.scan_iter(f"{PREFIX}:*"):
            pipeline.delete(key)
        for key, value in known.items():
            pipeline.restore(key, 0, value)
        for command in more:
            pipeline.execute_command(*command)
        pipeline.execute()


def test_a_redis_that_lost_its_last_second_gets_it_again(redis_server, redis_client, serve):
    config = make_config(redis_server.url, capacity=100)
    replay, client = serve(config)
    client.open()
    client.append_rows(8)
    before = what_redis_knows(redis_client)
    client.append_rows(4, first=8)
    with structlog.testing.capture_logs() as events:
        have_redis_know(redis_client, before)
        client.append(request(13, block(120, 10)))
    assert values_in_redis(redis_client) == list(range(30, 130))
    assert [event["blocks"] for event in events if event["event"] == "record_written_again"] == [4]
    described = client.describe()
    assert (described.row_count, described.inserted_row_count) == (100, 130)
    replay.stop()

    _, client = serve(config, resume=True)
    after = client.describe()
    assert (after.row_count, after.inserted_row_count, after.collectors[0].sequence) == (100, 130, 13)


def test_a_redis_that_gets_back_what_it_had_lost_loses_nothing_when_blocks_leave(redis_server, redis_client, serve):
    """As where one fails over to a replica that lagged, and back."""
    config = make_config(redis_server.url, capacity=100)
    replay, client = serve(config)
    client.open()
    client.append_rows(3)
    lagging = what_redis_knows(redis_client)
    client.append_rows(5, first=3)
    ahead = what_redis_knows(redis_client)
    with structlog.testing.capture_logs() as events:
        have_redis_know(redis_client, lagging)
        wait_until(lambda: redis_client.xlen(BLOCKS) == 8, "the record is written again")
        wait_until(lambda: any(event["event"] == "record_written_again" for event in events), "it says so")
    have_redis_know(redis_client, ahead)
    client.append_rows(7, first=8)  # for which five leave, of those that were written twice two
    assert values_in_redis(redis_client) == list(range(50, 150))
    replay.stop()
    _, client = serve(config, resume=True)
    assert set(client.sample_values(3000).tolist()) == set(range(50, 150))


def test_a_block_that_was_acknowledged_is_written_again_where_another_turns_up(redis_server, redis_client, serve):
    config = make_config(redis_server.url)
    replay, client = serve(config)
    client.open()
    client.append_rows(3)
    before = what_redis_knows(redis_client)
    client.append_rows(1, first=3)
    # An earlier step, of another collector, that nobody was told of, and that Redis carries out only now.
    other = rows_pb2.BlockHeader()
    other.CopyFrom(request(1, block(900, 10), collector=5).header)
    other.first_row = 30
    entry = ("XADD", BLOCKS, "1-40", "first_row", 30, "header", other.SerializeToString())
    have_redis_know(redis_client, before, ("SET", f"{PREFIX}:block:30", block(900, 10).data.tobytes()), entry)
    (answer,) = client.append(request(1, block(900, 10), collector=5))
    assert not answer.duplicate
    assert values_in_redis(redis_client) == [*range(40), *range(900, 910)]
    replay.stop()
    _, client = serve(config, resume=True)
    assert set(client.sample_values(3000).tolist()) == {*range(40), *range(900, 910)}
    assert {each.collector_index: each.sequence for each in client.describe().collectors} == {0: 4, 5: 1}


def test_a_block_that_had_left_and_turns_up_again_leaves_again(redis_server, redis_client, serve):
    replay, client = serve(make_config(redis_server.url, capacity=100))
    client.open()
    client.append_rows(10)
    oldest, payload = redis_client.xrange(BLOCKS, count=1), redis_client.get(f"{PREFIX}:block:0")
    client.append_rows(1, first=10)
    entries = redis_client.xrange(BLOCKS)
    with redis_client.pipeline() as pipeline:
        pipeline.delete(BLOCKS)
        for identifier, fields in [*oldest, *entries]:
            pipeline.xadd(BLOCKS, fields, id=identifier)
        pipeline.set(f"{PREFIX}:block:0", payload).hset(f"{PREFIX}:state", "epoch", 7)
        pipeline.execute()
    wait_until(lambda: not redis_client.exists(f"{PREFIX}:block:0"), "its payload is gone")
    wait_until(lambda: values_in_redis(redis_client) == list(range(10, 110)), "the record is as it was")
    replay.stop()


def test_a_block_that_the_record_lacks_in_its_midst_is_written_again(redis_server, redis_client, serve):
    config = make_config(redis_server.url)
    replay, client = serve(config)
    client.open()
    client.append_rows(6)
    redis_client.xdel(BLOCKS, *[identifier for identifier, _ in redis_client.xrange(BLOCKS)][2:4])
    redis_client.hset(f"{PREFIX}:state", "epoch", 7)  # whoever did that is noticed at the next step
    client.append_rows(1, first=6)
    assert values_in_redis(redis_client) == list(range(70))
    replay.stop()


def test_a_redis_that_lost_everything_gets_it_again_without_an_append(redis_server, redis_client, serve):
    config = make_config(redis_server.url, capacity=100)
    replay, client = serve(config)
    client.open()
    client.append_rows(12)
    redis_client.flushall()
    wait_until(lambda: redis_client.xlen(BLOCKS) == 10, "the record is written again")
    replay.stop()
    assert values_in_redis(redis_client) == list(range(20, 120))
    _, client = serve(config, resume=True)
    assert client.append(request(12, block(110, 10)))[0].duplicate
    assert set(client.sample_values(3000).tolist()) == set(range(20, 120))
    assert client.describe().inserted_row_count == 120


def test_a_record_that_is_written_again_in_two_tries_has_every_block_once(redis_server, redis_client, faulty, serve):
    replay, client = serve(make_config(faulty.url))
    client.open()
    client.append_rows(8)
    faulty.lose_replies_to = b":block:20"  # the third block that is written again: the try ends there
    redis_client.flushall()
    wait_until(lambda: redis_client.xlen(BLOCKS) == 8, "the record is written again")
    assert faulty.lose_replies_to is None
    client.append_rows(1, first=8)
    assert values_in_redis(redis_client) == list(range(90))
    assert client.describe().log_bytes == 90 * SPEC.row_bytes
    replay.stop()


def test_a_block_whose_reply_was_lost_is_in_both_tiers_once(redis_server, redis_client, faulty, serve):
    _, client = serve(make_config(faulty.url))
    client.open()
    client.append_rows(3)
    faulty.lose_replies_to = b"EXEC"
    message = request(4, block(30, 10))
    with pytest.raises(UnavailableError):
        client.append(message)
    assert faulty.lose_replies_to is None
    assert redis_client.xlen(BLOCKS) == 4
    (answer,) = retry(lambda: client.append(message), (UnavailableError,))
    assert (answer.duplicate, answer.stored_row_count) == (True, 10)
    client.append(request(5, block(40, 10)))
    assert values_in_redis(redis_client) == list(range(50))
    described = client.describe()
    assert (described.row_count, described.inserted_row_count) == (50, 50)
    assert set(client.sample_values(2000).tolist()) == set(range(50))


@pytest.mark.parametrize(
    ("lost", "stored"), [(b"EXEC", True), (b":block:40", False)], ids=["all was done", "nothing was done"]
)
def test_blocks_of_a_message_whose_reply_was_lost_are_in_both_tiers_once(
    redis_server, redis_client, faulty, serve, lost, stored
):
    _, client = serve(make_config(faulty.url))
    client.open()
    client.append_rows(3)
    faulty.lose_replies_to = lost
    message = together(*(request(number + 1, block(10 * number, 10)) for number in (3, 4, 5)))
    with pytest.raises(UnavailableError):
        client.append(message)
    assert faulty.lose_replies_to is None
    assert redis_client.xlen(BLOCKS) == (6 if stored else 3)
    answers = one_by_one(retry(lambda: client.append(message), (UnavailableError,)))
    assert [(each.sequence, each.stored_row_count) for each in answers] == [(4, 10), (5, 10), (6, 10)]
    assert [each.duplicate for each in answers] == [stored] * 3
    assert values_in_redis(redis_client) == list(range(60))
    assert set(client.sample_values(3000).tolist()) == set(range(60))


def test_blocks_of_a_message_are_whole_though_the_reply_to_the_block_of_another_was_lost(
    redis_server, redis_client, faulty, serve
):
    _, client = serve(make_config(faulty.url))
    client.open()
    client.append_rows(3)
    faulty.lose_replies_to = b"EXEC"
    other = request(1, block(30, 10), collector=1)
    with pytest.raises(UnavailableError):
        client.append(other)
    # Memory is a block behind the record: the second block comes where the record expects one, the first does not.
    message = together(request(4, block(40, 10)), request(5, block(50, 10)))
    answers = one_by_one(retry(lambda: client.append(message), (UnavailableError,)))
    assert [(each.duplicate, each.stored_row_count) for each in answers] == [(False, 10), (False, 10)]
    assert client.append(other)[0].duplicate
    assert values_in_redis(redis_client) == list(range(60))
    assert set(client.sample_values(3000).tolist()) == set(range(60))


def test_of_a_message_that_fills_redis_up_what_was_stored_is_acknowledged_and_the_rest_refused(
    redis_server, redis_client, serve
):
    spec = RowSpec((Column("x", "uint8", (1 << 20,)),))
    _, client = serve(make_config(redis_server.url, capacity=100))
    client.open(spec)
    requests = [request(number, Block.empty(spec, 1)) for number in range(1, 31)]
    redis_client.config_set("maxmemory", int(redis_client.info("memory")["used_memory"]) + (16 << 20))
    try:
        stream = client.stub.Append(iter([together(*requests)]), timeout=SECONDS)
        answers = []
        with pytest.raises(StoreFullError), raising("replay"):
            answers.extend(stream)
    finally:
        redis_client.config_set("maxmemory", 0)
    acknowledged = one_by_one(answers)
    assert 1 < len(acknowledged) < 30
    assert redis_client.xlen(BLOCKS) == client.describe().row_count == len(acknowledged)
    again = one_by_one(client.append(together(*requests)))
    assert [each.duplicate for each in again] == [number < len(acknowledged) for number in range(30)]
    assert redis_client.xlen(BLOCKS) == client.describe().row_count == 30


@pytest.mark.parametrize(
    ("reply", "error_type", "ready"),
    [
        ("LOADING Redis is loading the dataset in memory", UnavailableError, False),
        ("READONLY You can't write against a read only replica.", UnavailableError, False),
        ("MISCONF Errors writing to the AOF file", StoreReadOnlyError, True),
        ("OOM command not allowed when used memory > 'maxmemory'.", StoreFullError, True),
    ],
    ids=["loading", "read-only", "disk-full", "memory-full"],
)
def test_a_passing_state_of_redis_neither_ends_replay_nor_is_hammered(faulty, serve, reply, error_type, ready):
    _, client = serve(make_config(faulty.url))
    client.open()
    client.append_rows(3)
    faulty.fault = reply
    message = request(4, block(30, 10))
    with pytest.raises(error_type):
        client.append(message)
    wait_until(lambda: faulty.attempts >= 3, "the keeper of the record asks")
    if ready:
        assert client.health() == "SERVING"
    else:
        wait_until(lambda: client.health() == "NOT_SERVING", "readiness goes off")
    assert len(client.sample_values(100)) == 100
    faulty.fault = None
    (answer,) = retry(lambda: client.append(message), (UnavailableError, error_type))
    assert not answer.duplicate
    client.wait_until_serving()


def test_replay_waits_not_serving_while_redis_loads_at_the_start(faulty, serve):
    faulty.fault = "LOADING Redis is loading the dataset in memory"
    _, client = serve(make_config(faulty.url), ready=False)
    wait_until(lambda: client.health() == "NOT_SERVING", "the server answers")
    for call in (
        client.open,
        client.describe,
        lambda: client.sample(4),
        lambda: client.append(request(1, block(0, 1))),
    ):
        with pytest.raises(UnavailableError, match="still restoring"):
            call()
    before = faulty.connections
    wait_until(lambda: faulty.connections >= before + 2, "replay asks again")
    faulty.fault = None
    client.wait_until_serving()
    client.open()


@pytest.mark.parametrize(
    "reply", ["LOADING Redis is loading the dataset in memory", "MISCONF Errors writing to the AOF file"]
)
@pytest.mark.parametrize(("refused", "spared"), [(b"HGET", 0), (b"EVALSHA", 1)], ids=["learner", "tables"])
def test_replay_waits_while_redis_refuses_what_comes_after_the_take_over(faulty, serve, reply, refused, spared):
    config = make_config(faulty.url)
    replay, client = serve(config)
    client.open()
    client.append_rows(5)
    replay.stop()
    faulty.spared, faulty.only = spared, refused
    faulty.fault = reply
    with structlog.testing.capture_logs() as events:
        replay, client = serve(config, resume=True, ready=False)
        wait_until(lambda: [event for event in events if event["event"] == "waiting_for_redis"], "it waits")
        wait_until(lambda: faulty.attempts >= 2, "it asks again")
        assert client.health() == "NOT_SERVING"
        with pytest.raises(UnavailableError, match="still restoring"):
            client.describe()
        faulty.fault = None
        client.wait_until_serving()
    names = [event["event"] for event in events]
    assert names.count("redis_checked") == names.count("waiting_for_redis") == names.count("redis_answers") == 1
    assert len(client.sample_values(100)) == 100


def test_a_full_redis_refuses_blocks_whole_and_sampling_goes_on(redis_server, redis_client, serve):
    used = redis_client.info("memory")["used_memory"]
    redis_client.config_set("maxmemory", used + (8 << 20))
    try:
        _, client = serve(make_config(redis_server.url, capacity=1_000_000))
        client.open()
        stored, rows = 0, 2048  # 64 KiB a block

        def fill() -> None:
            nonlocal stored
            while stored < 1000:
                client.append(request(stored + 1, block(stored * rows, rows)))
                stored += 1

        with pytest.raises(StoreFullError, match=r"is full.*raise its maxmemory"):
            fill()
        assert stored > 50
        for seed in range(100):
            assert len(client.sample_values(100, seed=seed)) == 100
        assert client.describe().block_count == redis_client.xlen(BLOCKS) == stored
        assert redis_client.hget(f"{PREFIX}:state", "inserted") == b"%d" % (stored * rows)
        assert len(values_in_redis(redis_client)) == stored * rows
        assert client.health() == "SERVING"

        for number in range(stored // 4):  # someone else's, or so
            redis_client.delete(f"{PREFIX}:block:{number * rows}")
        (answer,) = client.append(request(stored + 1, block(stored * rows, rows)))
        assert not answer.duplicate
        assert redis_client.xlen(BLOCKS) == stored + 1
    finally:
        redis_client.config_set("maxmemory", 0)


def test_replay_starts_on_a_full_redis_and_with_a_lower_capacity_makes_room_in_it(redis_server, redis_client):
    rows = 2048  # 64 KiB a block
    config = make_config(redis_server.url, capacity=1_000_000)
    replay, client = ReplayProcess(config), Client(config)
    try:
        client.wait_until_serving()
        client.open()
        redis_client.config_set("maxmemory", redis_client.info("memory")["used_memory"] + (4 << 20))
        messages = (request(number + 1, block(number * rows, rows)) for number in range(1000))
        with pytest.raises(StoreFullError):
            client.append(*messages)
        stored = redis_client.xlen(BLOCKS)
        assert stored > 20
        replay.kill()
        redis_client.config_set("maxmemory", redis_client.info("memory")["used_memory"] - 1000)  # over, not just at it

        replay = ReplayProcess(config, resume=True)
        client.wait_until_serving()
        wait_until_whole(replay)
        assert set(client.sample_values(20 * stored * rows).tolist()) == set(range(stored * rows))
        with pytest.raises(StoreFullError):
            client.append(request(stored + 1, block(stored * rows, rows)))
        replay.kill()
        client.close()

        kept = stored // 2
        config = make_config(redis_server.url, capacity=kept * rows)
        replay, client = ReplayProcess(config, resume=True), Client(config)
        client.wait_until_serving()
        wait_until(lambda: redis_client.xlen(BLOCKS) == kept, "the oldest blocks leave")
        (answer,) = client.append(request(stored + 1, block(stored * rows, rows)))
        assert not answer.duplicate
        assert values_in_redis(redis_client) == list(range((stored + 1 - kept) * rows, (stored + 1) * rows))
    finally:
        redis_client.config_set("maxmemory", 0)
        client.close()
        replay.kill()


def test_tables_beyond_what_redis_may_hold_are_warned_of_once_each(redis_server, redis_client, serve):
    maxmemory = redis_client.info("memory")["used_memory"] + (8 << 20)
    rows = 2 * maxmemory // 3 // SPEC.row_bytes
    tables = {"tables": {TABLE: {"capacity_rows": rows}, "others": {"capacity_rows": rows}}}
    config = make_config(redis_server.url, replay=tables)
    redis_client.config_set("maxmemory", maxmemory)
    try:
        with structlog.testing.capture_logs() as events:
            replay, client = serve(config)
            for _ in range(2):
                client.open()
            assert not [event for event in events if event["event"] == "table_exceeds_redis"]
            for _ in range(2):
                client.open(table="others")
            replay.stop()
        warned = {
            "event": "table_exceeds_redis",
            "log_level": "warning",
            "table": "others",
            "tables": ["others", TABLE],
            "needed_bytes": 2 * rows * SPEC.row_bytes,
            "maxmemory_bytes": maxmemory,
        }
        with structlog.testing.capture_logs() as resumed:
            replay, _ = serve(config, resume=True)
            replay.stop()
        for each in (events, resumed):
            (event,) = (event for event in each if event["event"] == "table_exceeds_redis")
            assert "inserts are refused and sampling goes on; raise maxmemory of Redis, or lower" in event["meaning"]
            assert warned.items() <= event.items()

        # As many rows as the run ever collects is as many as must fit.
        shorter = make_config(
            redis_server.url, run={"environment_steps": 100}, learner={"table": "others"}, replay=tables
        )
        with structlog.testing.capture_logs() as events:
            replay, _ = serve(shorter, resume=True)
            replay.stop()
        assert not [event for event in events if event["event"] == "table_exceeds_redis"]
    finally:
        redis_client.config_set("maxmemory", 0)


def test_an_evicting_redis_is_refused_at_the_start(redis_server, redis_client):
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        refused = ReplayThread(make_config(redis_server.url))
        refused.join()
    finally:
        redis_client.config_set("maxmemory-policy", "noeviction")
    assert isinstance(refused.error, ConfigError)
    assert "maxmemory-policy allkeys-lru" in str(refused.error)


def test_a_redis_that_is_not_there_is_waited_for_as_long_as_was_said():
    away = make_config(f"redis://127.0.0.1:{free_port()}/0", replay={"redis_start_seconds": 1.5})
    with structlog.testing.capture_logs() as events:
        refused = ReplayThread(away)
        refused.join()
    assert isinstance(refused.error, UnavailableError)
    assert "is it running?" in str(refused.error)
    assert "waited for 1.5 s, as replay.redis_start_seconds says" in str(refused.error)
    waits = [event for event in events if event["event"] == "waiting_for_redis"]
    assert len(waits) == 1  # the reason is told once, not with every try
    assert "cannot be reached" in waits[0]["reason"]


@pytest.mark.parametrize(
    ("reply", "only", "error_type", "advice"),
    [
        ("MISCONF Errors writing to the AOF file", b"EVAL", StoreReadOnlyError, "free its disk"),
        ("MISCONF Errors writing to the AOF file", b"HGET", StoreReadOnlyError, "free its disk"),
        ("OOM command not allowed when used memory > 'maxmemory'.", b"EVAL", StoreFullError, "only more memory helps"),
        ("READONLY You can't write against a read only replica.", b"EVAL", UnavailableError, "expected the primary"),
    ],
    ids=["disk-full", "disk-full-after-the-claim", "memory-full", "read-only"],
)
def test_a_wait_that_ends_says_what_helps_against_what_it_waited_for(faulty, reply, only, error_type, advice):
    faulty.fault, faulty.only = reply, only
    with structlog.testing.capture_logs() as events:
        refused = ReplayThread(make_config(faulty.url, replay={"redis_start_seconds": 1.5}))
        refused.join()
    assert type(refused.error) is error_type
    assert advice in str(refused.error)
    assert "waited for 1.5 s, as replay.redis_start_seconds says" in str(refused.error)
    assert "start Redis" not in str(refused.error)
    names = [event["event"] for event in events]
    assert names.count("redis_checked") == names.count("waiting_for_redis") == 1


def test_a_stop_ends_the_wait_for_redis_in_peace():
    config = make_config(f"redis://127.0.0.1:{free_port()}/0")
    waiting, client = ReplayThread(config), Client(config)
    wait_until(lambda: client.health() == "NOT_SERVING", "the server answers")
    waiting.stop()
    client.close()
    assert waiting.error is None


@pytest.mark.parametrize(
    ("url", "reason"),
    [("unix://:wrong@{path}", "does not admit us"), ("unix://:secret@{path}?db=9999", "has no database 9999")],
    ids=["password", "database"],
)
def test_what_no_wait_would_mend_ends_replay_at_once(own_redis, url, reason):
    with redis.Redis.from_url(own_redis.url) as store:
        store.config_set("requirepass", "secret")
    refused = ReplayThread(make_config(url.format(path=own_redis.url.removeprefix("unix://"))))
    refused.join()
    assert isinstance(refused.error, PacelineError)
    assert reason in str(refused.error)
    assert "secret" not in str(refused.error)


def test_replay_and_redis_killed_at_once_need_no_hand_in_whichever_order_they_come_back(own_redis):
    config = make_config(own_redis.url)
    replay, client = ReplayProcess(config), Client(config)
    client.wait_until_serving()
    client.open()
    client.append_rows(7)
    own_redis.process.kill()
    replay.kill()
    own_redis.process.wait()

    replay = ReplayProcess(config, resume=True)
    try:
        wait_until(lambda: client.health() == "NOT_SERVING", "replay answers, and waits for Redis")
        assert replay.metrics()["paceline_replay_redis_available"] == 0
        with pytest.raises(UnavailableError, match="still restoring"):
            client.append(request(8, block(70, 10)))
        own_redis.restart()
        client.wait_until_serving()
        assert replay.metrics()["paceline_replay_redis_available"] == 1
        assert client.append(request(7, block(60, 10)))[0].duplicate
        client.append_rows(1, first=7)
        assert set(client.sample_values(3000).tolist()) == set(range(80))
        replay.stop()
    finally:
        client.close()
        replay.kill()


def test_a_second_replay_on_the_same_port_is_refused_and_leaves_the_first_alone(redis_server, serve):
    config = make_config(redis_server.url)
    _, client = serve(config)
    client.open()
    second = ReplayThread(config, resume=True)
    second.join()
    assert isinstance(second.error, PortTakenError)
    assert config.replay.listen in str(second.error)
    client.append_rows(1)  # it did not take the run over either
