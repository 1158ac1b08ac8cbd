"""A queue: oldest first, each row delivered once, bounded; nobody's death loses a row or repeats one."""

from __future__ import annotations

import threading

import pytest

from integration.replay_harness import (
    SECONDS,
    TABLE,
    Following,
    block,
    make_config,
    request,
    retry,
    values_in_redis,
    values_of,
    wait_until,
)
from paceline.errors import InvalidInputError, LimiterTimeoutError, ReplacedError, UnavailableError


def queue_config(redis_server, **settings):
    table = {"queue": True, **{name: settings.pop(name) for name in ("overflow",) if name in settings}}
    settings.setdefault("collector", {"block_rows": 1})
    settings.setdefault("learner", {"batch_size": 1})
    return make_config(redis_server.url, table=table, **settings)


def series(replay, name: str) -> float:
    return replay.metrics().get(f'paceline_replay_{name}{{table="{TABLE}"}}', 0.0)


def test_a_full_queue_that_drops_gives_the_newest_rows_oldest_first_and_counts_the_others(redis_server, serve):
    replay, client = serve(queue_config(redis_server, capacity=3, overflow="drop_oldest"))
    client.open()
    with Following(client, wanted_before=0) as paused:  # a learner that takes nothing yet
        paused.next()
        for value in (1, 2, 3, 4, 5):
            client.append(request(value, block(value, 1)))
        assert series(replay, "dropped_rows_total") == client.describe().dropped_row_count == 2
        paused.report(wanted_before=100)
        answer = paused.next()
        assert (answer.first_row, values_of(answer)) == (2, [3, 4, 5])
        paused.report(consumed_row=5)
        wait_until(lambda: client.describe().row_count == 0, "they are consumed")
    described = client.describe()
    assert (described.consumed_row, described.dropped_row_count, described.inserted_row_count) == (5, 2, 5)
    assert series(replay, "dropped_rows_total") == 2


def test_rows_that_a_follower_had_got_do_not_count_as_dropped(redis_server, serve):
    _, client = serve(queue_config(redis_server, capacity=3, overflow="drop_oldest"))
    client.open()
    for value in (1, 2, 3):
        client.append(request(value, block(value, 1)))
    with Following(client, wanted_before=2) as following:
        assert following.values(2) == [1, 2]
        for value in (4, 5, 6):
            client.append(request(value, block(value, 1)))
        assert client.describe().dropped_row_count == 1
        following.report(wanted_before=6)
        assert following.values(3) == [4, 5, 6]


def test_rows_that_left_with_the_follower_that_had_got_them_count_as_dropped(redis_server, serve):
    config = queue_config(redis_server, capacity=30, overflow="drop_oldest")
    replay, client = serve(config)
    client.open()
    client.append_rows(3)
    with Following(client) as following:
        assert following.values(30) == list(range(30))
        following.report(consumed_row=10)
        wait_until(lambda: client.describe().consumed_row == 10, "the first block is consumed")
    client.append_rows(3, first=3)
    assert client.describe().dropped_row_count == 0  # it may come back, with the rows that it has
    with Following(client, from_row=30) as following:
        assert following.values(30) == list(range(30, 60))
    assert client.describe().dropped_row_count == 0
    client.append_rows(2, first=6)
    with Following(client) as following:
        assert following.values(30) == list(range(50, 80))
    # 10 to 49 were given to followers that are gone, and left; nobody learned from them.
    assert client.describe().dropped_row_count == 40
    wait_until(lambda: replay.metrics()[f'paceline_replay_dropped_rows_total{{table="{TABLE}"}}'] == 40, "it is told")


def test_a_row_that_left_counts_as_dropped_once_however_many_followers_come_and_go(redis_server, serve):
    config = queue_config(redis_server, capacity=30, overflow="drop_oldest")
    replay, client = serve(config)

    def dropped_with_a_new_follower(first: int, *appended: int) -> int:
        """Rows dropped, with a follower that gets 30 and, one by one, the blocks that come then; it consumes none."""
        with Following(client, wanted_before=first + 30 + 10 * len(appended)) as following:
            assert following.values(30) == list(range(first, first + 30))
            for number in appended:
                client.append_rows(1, first=number)
                assert following.values(10) == list(range(10 * number, 10 * number + 10))
            return client.describe().dropped_row_count

    client.open()
    client.append_rows(8)
    assert dropped_with_a_new_follower(50) == 50
    assert dropped_with_a_new_follower(50) == 50
    assert dropped_with_a_new_follower(50, 8) == 50  # 50 to 59 left with it
    client.append_rows(4, first=9)  # 60 to 89 leave with it, and 90 to 99 with nobody
    assert client.describe().dropped_row_count == 60
    assert dropped_with_a_new_follower(100) == 100
    assert dropped_with_a_new_follower(100) == 100
    replay.stop()
    _, client = serve(config, resume=True)
    assert dropped_with_a_new_follower(100, 13) == 100
    assert dropped_with_a_new_follower(110) == 110


def test_no_more_rows_count_as_dropped_than_came_whatever_the_record_says(redis_server, redis_client, serve):
    config = queue_config(redis_server, capacity=30, overflow="drop_oldest")
    replay, client = serve(config)
    client.open()
    client.append_rows(8)
    replay.stop()
    redis_client.hset(f"paceline:{{first-run}}:table:{TABLE}:state", "dropped", 170)
    _, client = serve(config, resume=True)
    assert client.describe().dropped_row_count == 80


def test_a_full_queue_that_blocks_refuses_a_block_at_its_deadline_and_takes_it_when_there_is_room(redis_server, serve):
    replay, client = serve(queue_config(redis_server, capacity=3, limiter={"deadline_seconds": 0.1}))
    client.open()
    for value in (1, 2, 3):
        client.append(request(value, block(value, 1)))
    with pytest.raises(LimiterTimeoutError, match=r"held back for 0.1 s: a block of 1 rows, and there is room for 0"):
        client.append(request(4, block(4, 1)))
    assert replay.metrics()[f'paceline_replay_limiter_timeouts_total{{side="insert",table="{TABLE}"}}'] == 1
    with Following(client) as following:
        assert following.values(3) == [1, 2, 3]
        with pytest.raises(LimiterTimeoutError):  # delivered is not consumed
            client.append(request(4, block(4, 1)))
        following.report(consumed_row=1)
        wait_until(lambda: client.describe().consumed_row == 1, "there is room")
        client.append(request(4, block(4, 1)))
        assert following.values(1) == [4]


def test_a_block_that_waits_for_room_comes_in_as_rows_are_consumed(redis_server, serve):
    _, client = serve(queue_config(redis_server, capacity=10))
    client.open()
    client.append(request(1, block(0, 10)))
    waiting = client.stub.Append(iter([request(2, block(10, 4)), request(3, block(14, 4))]), timeout=SECONDS)
    with Following(client) as following:
        assert following.values(10) == list(range(10))
        following.report(consumed_row=4)
        assert next(waiting).stored_row_count == 4
        following.report(consumed_row=8)
        assert next(waiting).stored_row_count == 4
        assert following.values(8) == list(range(10, 18))
        assert client.describe().row_count == 10


def test_what_is_consumed_leaves_memory_and_record_and_stays_gone(redis_server, redis_client, serve):
    config = queue_config(redis_server, capacity=100)
    replay, client = serve(config)
    client.open()
    client.append_rows(10)
    with Following(client) as following:
        following.values(100)
        following.report(consumed_row=45)
        wait_until(lambda: client.describe().consumed_row == 45, "rows are consumed")
        assert values_in_redis(redis_client) == list(range(40, 100))  # whole blocks leave the record
        assert client.describe().first_row == 45
        following.report(consumed_row=30)  # never goes back
        following.report(consumed_row=46)
        wait_until(lambda: client.describe().consumed_row == 46, "more is consumed")
    replay.stop()
    replay, client = serve(config, resume=True)
    described = client.describe()
    assert (described.consumed_row, described.row_count, described.first_row) == (46, 54, 46)
    with Following(client) as following:
        assert following.values(54) == list(range(46, 100))
    with Following(client, from_row=10) as following:  # those are gone
        assert following.values(54) == list(range(46, 100))


def test_a_new_follower_goes_on_after_what_was_consumed_and_ends_the_older_one(redis_server, serve):
    replay, client = serve(queue_config(redis_server, capacity=100))
    client.open()
    client.append_rows(3)
    with Following(client) as dead:
        assert dead.values(30) == list(range(30))
        dead.report(consumed_row=10)
        wait_until(lambda: client.describe().consumed_row == 10, "rows are consumed")
        with Following(client) as heir:
            assert heir.values(20) == list(range(10, 30))
            with pytest.raises(ReplacedError):
                dead.next()
            with Following(client, from_row=25) as resumed:  # it knows what it has got
                assert resumed.values(5) == list(range(25, 30))
    assert series(replay, "replaced_followers_total") == 2


def test_a_replaced_follower_can_consume_no_more(redis_server, serve):
    _, client = serve(queue_config(redis_server, capacity=100))
    client.open()
    client.append_rows(3)
    with Following(client) as older:
        assert older.values(30)
        with Following(client) as newer:
            assert newer.values(30)
            older.report(consumed_row=30)
            with pytest.raises(ReplacedError):
                older.next()
        assert client.describe().consumed_row == 0


@pytest.mark.parametrize(("progress", "text"), [({"consumed_row": 31}, "at most 30"), ({"consumed_row": -1}, "-1")])
def test_rows_that_never_came_cannot_be_consumed(redis_server, serve, progress, text):
    _, client = serve(queue_config(redis_server, capacity=100))
    client.open()
    client.append_rows(3)
    with Following(client) as following:
        following.values(30)
        following.report(**progress)
        with pytest.raises(InvalidInputError, match=text):
            following.next()
    assert client.describe().row_count == 30


def test_a_queue_is_never_sampled(redis_server, serve):
    _, client = serve(queue_config(redis_server, capacity=100))
    client.open()
    client.append_rows(1)
    with pytest.raises(InvalidInputError, match="is a queue: expected Follow"):
        client.sample(1)


def test_rows_that_wait_are_not_dropped_for_a_capacity_that_is_lower_now(redis_server, serve):
    replay, client = serve(queue_config(redis_server, capacity=100))
    client.open()
    client.append_rows(10)
    replay.stop()
    _, client = serve(queue_config(redis_server, capacity=20, limiter={"deadline_seconds": 0.05}), resume=True)
    assert client.describe().capacity_row_count == 20
    with Following(client) as following:
        assert following.values(100) == list(range(100))
        with pytest.raises(LimiterTimeoutError, match="room for -80"):
            client.append(request(11, block(100, 5)))
        following.report(consumed_row=85)
        wait_until(lambda: client.describe().consumed_row == 85, "there is room again")
        client.append(request(11, block(100, 5)))


@pytest.mark.parametrize("becomes_a_queue", [False, True])
def test_a_queue_that_drops_keeps_its_bound_over_a_restart(redis_server, serve, becomes_a_queue):
    settings = {"capacity": 20, "learner": {"batch_size": 10}, "collector": {"block_rows": 10}}
    config = queue_config(redis_server, overflow="drop_oldest", **settings)
    replay, client = serve(make_config(redis_server.url, **settings) if becomes_a_queue else config)
    client.open()
    client.append_rows(50)
    memory_bytes = client.describe().memory_bytes
    replay.stop()
    replay, client = serve(config, resume=True)
    assert client.describe().memory_bytes == memory_bytes
    client.append_rows(30, first=50)
    described = client.describe()
    assert (described.row_count, described.inserted_row_count) == (20, 800)
    assert described.dropped_row_count == (300 if becomes_a_queue else 780)
    with Following(client) as following:
        assert following.values(20) == list(range(780, 800))


def test_rows_that_wait_behind_dropped_ones_are_not_dropped_for_a_capacity_that_is_lower_now(redis_server, serve):
    replay, client = serve(queue_config(redis_server, capacity=40, overflow="drop_oldest"))
    client.open()
    client.append_rows(10)
    replay.stop()
    _, client = serve(queue_config(redis_server, capacity=20, overflow="drop_oldest"), resume=True)
    with Following(client) as following:
        assert following.values(40) == list(range(60, 100))


def test_the_rest_of_a_block_that_is_larger_than_the_capacity_now_is_given(redis_server, serve):
    replay, client = serve(queue_config(redis_server, capacity=100))
    client.open()
    client.append(request(1, block(0, 100)))
    with Following(client) as following:
        following.values(100)
        following.report(consumed_row=70)
        wait_until(lambda: client.describe().consumed_row == 70, "rows are consumed")
    replay.stop()
    _, client = serve(queue_config(redis_server, capacity=20), resume=True)
    with Following(client) as following:
        assert following.values(30) == list(range(70, 100))


def test_a_queue_in_a_redis_that_lost_everything_gets_its_unconsumed_rows_again(redis_server, redis_client, serve):
    config = queue_config(redis_server, capacity=100)
    replay, client = serve(config)
    client.open()
    client.append_rows(8)
    with Following(client) as following:
        following.values(80)
        following.report(consumed_row=33)
        wait_until(lambda: client.describe().consumed_row == 33, "rows are consumed")
        redis_client.flushall()
        wait_until(lambda: redis_client.exists(f"paceline:{{first-run}}:table:{TABLE}:state"), "the record is back")
        client.append_rows(1, first=8)
    replay.stop()
    assert values_in_redis(redis_client) == list(range(33, 90))
    _, client = serve(config, resume=True)
    with Following(client) as following:
        assert following.values(57) == list(range(33, 90))


class Learner:
    """Consumes a queue in batches, as a learner that keeps where it is in its checkpoint."""

    def __init__(self, client) -> None:
        self.client = client
        self.trained: list[float] = []

    def train(self, rows: int) -> None:
        """Follow until so many more rows are trained on; a batch counts as consumed when the next is taken."""
        goal = len(self.trained) + rows
        position = len(self.trained)
        with Following(self.client, from_row=position, consumed_row=position) as following:
            while len(self.trained) < goal:
                answer = following.next()
                if answer.row_count:
                    assert answer.first_row == len(self.trained)
                    following.report(consumed_row=answer.first_row)
                    self.trained += values_of(answer)


def test_kills_of_replay_and_of_the_learner_neither_lose_nor_repeat_a_row_of_a_queue(redis_server, spawn):
    config = queue_config(redis_server, capacity=200, limiter={"deadline_seconds": 1})
    replay, client = spawn(config)
    client.open()
    ended, passing = threading.Event(), (UnavailableError, LimiterTimeoutError)

    def write() -> None:
        count = 0
        while not ended.is_set():
            try:
                client.append(request(count + 1, block(7 * count, 7)))
                count += 1
            except passing:
                ended.wait(0.02)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    learner = Learner(client)
    for step in range(6):
        # A call that fails leaves the learner with what it had trained on, as a checkpoint does.
        retry(lambda: learner.train(300), passing)
        if step % 2 == 0:
            replay.kill()
            replay, _ = spawn(config, resume=True)
    ended.set()
    writer.join(SECONDS)
    assert learner.trained == list(range(len(learner.trained)))
    assert len(learner.trained) >= 1800
