"""Following a table: each row once, in the order of keys, live and from behind, over cuts and restarts."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from integration.replay_harness import (
    RUN,
    SECONDS,
    TABLE,
    Following,
    block,
    make_config,
    request,
    retry,
    values_of,
    wait_until,
)
from paceline.errors import (
    InvalidInputError,
    LimiterTimeoutError,
    NotFoundError,
    ReplacedError,
    RunMismatchError,
    UnavailableError,
)
from paceline.replay.sampling import MESSAGE_BYTES
from paceline.rows import Block, Column, RowSpec
from paceline.rpc.bulk import FOLLOW_RESPONSE
from paceline.rpc.status import raising
from paceline.v1 import replay_pb2 as pb


@pytest.fixture
def opened(redis_server, serve):
    replay, client = serve(make_config(redis_server.url))
    client.open()
    return replay, client


def followers(replay) -> float:
    return replay.metrics().get('paceline_replay_open_streams{rpc="Follow"}', 0.0)


def test_a_follower_gets_what_is_there_and_then_each_row_as_it_comes(opened):
    replay, client = opened
    client.append_rows(3)
    with Following(client) as following:
        news = following.next()
        assert (news.first_row, news.row_count, news.inserted_row_count, news.complete) == (0, 0, 30, False)
        assert following.values(30) == list(range(30))
        for number in range(3, 6):
            client.append_rows(1, first=number)
            answer = following.next()
            assert (answer.first_row, answer.row_count) == (10 * number, 10)
            assert values_of(answer) == list(range(10 * number, 10 * number + 10))
            assert answer.inserted_row_count == 10 * number + 10
    assert replay.metrics()[f'paceline_replay_followed_rows_total{{table="{TABLE}"}}'] == 60


def test_blocks_share_messages_and_large_ones_are_cut_to_about_two_megabytes(redis_server, serve):
    spec = RowSpec((Column("x", "uint8", (1000,)),))  # 2097 rows a message
    _, client = serve(make_config(redis_server.url))
    client.open(spec)
    for sequence in range(1, 31):
        client.append(request(sequence, Block.empty(spec, 100)))
    answers = [answer for answer in client.follow(3000) if answer.row_count]
    assert [answer.row_count for answer in answers] == [2097, 903]
    for answer in answers:
        assert len(answer.rows) == answer.row_count * spec.row_bytes <= MESSAGE_BYTES
        assert len(answer.stored_at) == answer.row_count
        assert answer.row_spec_digest == spec.digest


def test_rows_say_when_they_were_stored_and_bulk_peers_read_the_same(opened):
    _, client = opened
    client.append_rows(2)
    stream = client.channel.stream_stream(
        "/paceline.v1.ReplayService/Follow", pb.FollowRequest.SerializeToString, FOLLOW_RESPONSE.deserialize
    )(iter([pb.FollowRequest(run_id=RUN, table=TABLE)]), timeout=SECONDS)
    next(stream)
    bulk = next(stream)
    (plain,) = [answer for answer in client.follow(20) if answer.row_count]
    stream.cancel()
    assert bytes(bulk.payload) == plain.rows
    assert bulk.arrays["stored_at"].tolist() == list(plain.stored_at)
    first, second = plain.stored_at[0], plain.stored_at[10]
    assert list(plain.stored_at) == [first] * 10 + [second] * 10
    assert 1e9 < first <= second


def test_a_follower_that_was_cut_goes_on_from_the_key_that_it_wants_next(opened):
    _, client = opened
    client.append_rows(10)
    got: list[float] = []
    for end in (7, 8, 40, 100):
        wanted = end - len(got)
        with Following(client, from_row=len(got), wanted_before=end) as following:
            got += following.values(wanted)
    assert got == list(range(100))


def test_rows_that_left_before_they_were_sent_are_passed_over(redis_server, serve):
    _, client = serve(make_config(redis_server.url, capacity=50))
    client.open()
    client.append_rows(20)
    answers = client.follow(50, from_row=3)
    assert answers[0].first_row == answers[0].table_first_row == 150
    assert [value for answer in answers for value in values_of(answer)] == list(range(150, 200))


def test_rows_behind_a_hole_are_not_sent_before_they_are_wanted(redis_server, serve):
    _, client = serve(make_config(redis_server.url, capacity=50))
    client.open()
    client.append_rows(20)
    with Following(client, from_row=3, wanted_before=155) as following:
        assert following.values(5) == list(range(150, 155))
    with Following(client, from_row=3, wanted_before=100) as following:
        assert following.next().row_count == 0
        following.report(wanted_before=151)
        assert following.values(1) == [150]


def test_a_slow_follower_holds_nobody_back_and_gets_what_is_still_there(redis_server, serve):
    spec = RowSpec((Column("number", "int64"), Column("x", "uint8", (9992,))))
    _, client = serve(make_config(redis_server.url, capacity=2000, rpc={"drain_seconds": 1}))
    client.open(spec)
    rows = Block.empty(spec, 100)
    with Following(client) as following:
        following.next()
        for sequence in range(1, 101):  # 100 MB: more than any buffer between the two
            rows.columns["number"] = np.arange(100 * (sequence - 1), 100 * sequence)
            client.append(request(sequence, rows))
        got: list[int] = []
        while not got or got[-1] < 9_999:
            got += np.frombuffer(following.next().rows, spec.dtype)["number"].tolist()
    assert got == sorted(set(got))
    assert 2000 <= len(got) < 10_000


def test_only_wanted_rows_are_sent_and_more_when_more_are_wanted(opened):
    _, client = opened
    client.append_rows(5)
    with Following(client, wanted_before=15) as following:
        assert following.values(15) == list(range(15))
        following.report(wanted_before=18)
        assert following.values(3) == [15, 16, 17]
        following.report(wanted_before=10)  # never goes back
        following.report(wanted_before=50)
        assert following.values(32) == list(range(18, 50))


def test_what_a_follower_samples_from_its_copy_counts_for_the_limiter(redis_server, serve):
    config = make_config(
        redis_server.url,
        limiter={"min_rows": 1, "window_rows": 40, "deadline_seconds": 0.05},
        learner={"updates": "strict", "batch_size": 10},
        collector={"block_rows": 2},
    )
    _, client = serve(config)
    client.open()
    client.append(request(1, block(0, 3)))
    with Following(client, sampled_row_count=0) as following:
        assert following.values(3) == [0, 1, 2]
        with pytest.raises(LimiterTimeoutError, match="3 rows are inserted and 0 sampled"):
            client.append(request(2, block(3, 2)))
        following.report(sampled_row_count=30)
        wait_until(lambda: client.describe().sampled_row_count == 30, "the report counts")
        client.append(request(2, block(3, 2)))
        assert following.next().sampled_row_count == 30
        following.report(sampled_row_count=20)  # never goes back
        following.report(sampled_row_count=31)
        wait_until(lambda: client.describe().sampled_row_count == 31, "the next report counts")


def test_what_its_copy_of_the_limiter_held_a_follower_back_counts_as_the_wait_of_samples(opened):
    replay, client = opened
    client.append_rows(1)

    def waited() -> float:
        return replay.metrics()[f'paceline_replay_limiter_wait_seconds_total{{side="sample",table="{TABLE}"}}']

    for before, after in ((2.0, 2.5), (2.5, 4.0)):  # a follower that was cut says what it waited before
        with Following(client, sampled_row_count=0, limiter_wait_seconds=before) as following:
            following.values(10)
            following.report(sampled_row_count=0, limiter_wait_seconds=after)
            following.report(sampled_row_count=1)  # of one that does not say it
            wait_until(lambda expected=after - 2.0: waited() == expected, "what it grew by counts")


def test_of_two_followers_that_report_samples_the_newer_one_counts(opened):
    replay, client = opened
    client.append_rows(1)
    with Following(client, sampled_row_count=0) as older, Following(client) as silent:
        assert older.values(10) == silent.values(10)
        with Following(client, sampled_row_count=0) as newer:
            assert newer.values(10) == list(range(10))
            with pytest.raises(ReplacedError, match="newer follower of table 'transitions' took over"):
                older.next()
            client.append_rows(1, first=1)
            assert newer.values(10) == silent.values(10) == list(range(10, 20))
    assert replay.metrics()[f'paceline_replay_replaced_followers_total{{table="{TABLE}"}}'] == 1


def test_a_follower_is_told_when_no_further_row_will_come(redis_server, serve):
    _, client = serve(make_config(redis_server.url, run={"id": RUN, "environment_steps": 100}))
    client.open()
    client.append_rows(9)
    with Following(client) as following:
        assert following.values(90) == list(range(90))
        client.append_rows(1, first=9)
        answers = [following.next()]
        while not answers[-1].complete:
            answers.append(following.next())
        assert sum(answer.row_count for answer in answers) == 10
    one_shot = client.stub.Follow(iter([pb.FollowRequest(run_id=RUN, table=TABLE)]), timeout=SECONDS)
    assert sum(answer.row_count for answer in one_shot) == 100  # and it ends, since the caller asks no more


def test_a_follower_that_wants_no_rows_yet_is_told_all_the_same(redis_server, serve):
    _, client = serve(make_config(redis_server.url, run={"id": RUN, "environment_steps": 20}))
    client.open()
    client.append_rows(1)
    with Following(client, wanted_before=5) as following:
        assert following.values(5) == list(range(5))
        client.append_rows(1, first=1)
        news = following.next()
        assert (news.first_row, news.row_count, news.inserted_row_count, news.complete) == (5, 0, 20, True)


def test_a_follower_that_asks_no_more_is_served_as_far_as_it_asked(opened):
    _, client = opened
    client.append_rows(5)
    first = pb.FollowRequest(run_id=RUN, table=TABLE, from_row=20, wanted_before=35)
    answers = list(client.stub.Follow(iter([first]), timeout=SECONDS))
    assert [value for answer in answers for value in values_of(answer)] == list(range(20, 35))


@pytest.mark.parametrize(
    ("requests", "error_type", "text"),
    [
        ([{"run_id": "other"}], RunMismatchError, "belongs to run 'first-run'"),
        ([{"table": "others"}], NotFoundError, "no table 'others'"),
        ([{"from_row": -1}], InvalidInputError, "from_row -1: expected 0 to"),
        ([{"from_row": 2**53}], InvalidInputError, "from_row 9007199254740992: expected"),
        ([{"wanted_before": -1}], InvalidInputError, "wanted_before -1"),
        ([{}, {"waived_before": 2**53}], InvalidInputError, "waived_before 9007199254740992: expected"),
        ([{}, {"released_before": -1}], InvalidInputError, "released_before -1: expected 0 to"),
        ([{"from_row": 3, "received_end_row": 4}], InvalidInputError, "received_end_row 4: expected from_row, which"),
        ([{"sampled_row_count": 2**62}], InvalidInputError, "sampled_row_count 4611686018427387904"),
        ([{"consumed_row": 0}], InvalidInputError, "which is no queue"),
        ([{"limiter_wait_seconds": -1.0}], InvalidInputError, "limiter_wait_seconds -1.0: expected 0 or more"),
        ([{}, {"limiter_wait_seconds": float("nan")}], InvalidInputError, "limiter_wait_seconds nan"),
        ([{}, {"run_id": "other"}], RunMismatchError, "belongs to run 'first-run'"),
        ([{}, {"table": "others"}], InvalidInputError, "expected 'transitions' as in the first"),
        ([{}, {"sampled_row_count": -5}], InvalidInputError, "sampled_row_count -5"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(opened, requests, error_type, text):
    replay, client = opened
    client.append_rows(1)
    messages = [pb.FollowRequest(**{"run_id": RUN, "table": TABLE, **fields}) for fields in requests]
    with pytest.raises(error_type, match=text), raising("replay"):
        list(client.stub.Follow(iter(messages), timeout=SECONDS))
    wait_until(lambda: followers(replay) == 0, "its thread is free again")
    assert len(client.follow(10)) >= 1


def test_a_stop_ends_followers_at_once_and_a_caller_that_goes_away_frees_its_thread(redis_server, serve):
    replay, client = serve(make_config(redis_server.url, rpc={"drain_seconds": 300}))
    client.open()
    with Following(client) as gone:
        gone.next()
    wait_until(lambda: followers(replay) == 0, "its thread is free again", seconds=5)
    with Following(client) as following:
        following.next()
        replay.stop_signal.set()
        with pytest.raises(UnavailableError):
            following.next()
        replay._thread.join(10)  # far below drain_seconds
        assert not replay._thread.is_alive()
        assert replay.error is None


def test_a_follower_loses_and_repeats_no_row_over_kills_of_replay(redis_server, spawn):
    config = make_config(redis_server.url, capacity=100_000)
    replay, client = spawn(config)
    client.open()
    written, ended = [0], threading.Event()
    passing = (UnavailableError,)

    def write() -> None:
        while not ended.is_set():
            message = request(written[0] + 1, block(7 * written[0], 7))
            retry(lambda message=message: client.append(message), passing)
            written[0] += 1

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    got: list[float] = []
    for kill in range(4):

        def follow_some(goal: int = len(got) + 400) -> None:
            with Following(client, from_row=len(got)) as following:
                while len(got) < goal:
                    answer = following.next()
                    assert answer.first_row == len(got)
                    got.extend(values_of(answer))

        retry(follow_some, passing)
        if kill < 3:
            replay.kill()
            replay, _ = spawn(config, resume=True)
    ended.set()
    writer.join(SECONDS)
    assert got == list(range(len(got)))
    assert len(got) >= 1600


def test_a_follower_that_is_ahead_of_a_record_that_lost_rows_is_told_to_begin_anew(opened):
    _, client = opened
    client.append_rows(3)
    with Following(client, from_row=50) as following:
        answer = following.next()
        assert (answer.rows_lost, answer.row_count) == (True, 0)
        with pytest.raises(StopIteration):
            following.next()


def test_the_time_of_the_last_row_tells_whether_a_record_was_rolled_back(redis_server, serve):
    config = make_config(redis_server.url)
    replay, client = serve(config)
    client.open()
    client.append_rows(3)
    with Following(client) as following:
        times = [at for _ in range(2) for at in following.next().stored_at]
    replay.stop()
    _, client = serve(config, resume=True)
    for row in (10, 29, 30):
        with Following(client, from_row=row, last_stored_at=times[row - 1]) as following:
            assert not following.next().rows_lost  # the record keeps the very same times
        with Following(client, from_row=row, last_stored_at=times[row - 1] - 1, sampled_row_count=9) as following:
            assert following.next().rows_lost
    assert client.describe().sampled_row_count == 0  # nothing of such a request was carried out
    with Following(client, from_row=30) as following:  # a follower that does not say it is believed
        assert not following.next().rows_lost


def test_a_row_where_a_follower_found_a_damaged_one_tells_that_a_record_was_rolled_back(
    redis_server, redis_client, serve
):
    config, prefix = make_config(redis_server.url), f"paceline:{{{RUN}}}:table:{TABLE}"
    replay, client = serve(config)
    client.open()
    client.append_rows(2)
    replay.stop()
    before = {key: redis_client.dump(key) for key in redis_client.scan_iter(f"{prefix}:*")}
    replay, client = serve(config, resume=True)
    client.append_rows(1, first=2)
    replay.stop()
    redis_client.delete(f"{prefix}:block:20")  # so the follower passes over the rows 20 to 29
    replay, client = serve(config, resume=True)
    with Following(client) as following:
        while (answer := following.next()).first_row < 30:
            times = list(answer.stored_at)
    said = {"from_row": 30, "received_end_row": 20, "last_stored_at": times[-1]}
    with Following(client, **said) as following:
        assert not following.next().rows_lost
    replay.stop()

    redis_client.delete(*redis_client.scan_iter(f"{prefix}:*"))
    for key, value in before.items():
        redis_client.restore(key, 0, value)
    _, client = serve(config, resume=True)
    with Following(client, **said) as following:
        assert following.next().rows_lost  # the record ends before the key that the follower wants
    client.append(request(7, block(70, 10)))
    with Following(client, **said) as following:
        assert following.next().rows_lost
    with Following(client, **{**said, "from_row": 20}) as following:
        assert following.values(10) == list(range(70, 80))
