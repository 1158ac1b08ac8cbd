"""Rows between replay and its clients on one machine go through memory, and are the same as through a connection."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from integration.replay_harness import (
    RUN,
    SECONDS,
    SPEC,
    TABLE,
    Following,
    ReplayProcess,
    block,
    make_config,
    read_metrics,
    request,
    values_in_redis,
    values_of,
    wait_until,
)
from paceline.collector.append_metrics import AppendMetrics
from paceline.collector.outbox import SHARED_FROM_BYTES
from paceline.collector.writer import BlockWriter
from paceline.errors import InvalidInputError
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import FollowSource, QueueSource, SampleSource, followed
from paceline.local.embedded import EmbeddedRedis
from paceline.process import StopSignal
from paceline.rows import numpy_columns
from paceline.rpc.client import open_channel
from paceline.rpc.shared_memory import OfferedMemory, part_of
from paceline.rpc.status import raising
from paceline.tables.limiter import LimiterSettings
from paceline.tables.memory import MemorySettings
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import rows_pb2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory that can be offered")

LARGE_ROWS = SHARED_FROM_BYTES // SPEC.row_bytes + 1
WINDOW = 4
NEVER = StopSignal()
TABLES = {"ring": {}, "queue": {"queue": True}}


@pytest.fixture
def redis_server(bundled_redis: EmbeddedRedis) -> EmbeddedRedis:
    """The kind of server is all one to the way of the rows."""
    return bundled_redis


class Writing:
    """A collector's writer to a replay service."""

    def __init__(self, config, **rpc):
        settings = config.rpc.model_copy(update={"backoff_initial_seconds": 0.01, "backoff_max_seconds": 0.1} | rpc)
        self.channel = open_channel(config.replay.address, settings)
        self.writer = BlockWriter(
            self.channel,
            run_id=RUN,
            table=TABLE,
            spec=SPEC,
            collector_index=0,
            collector_incarnation=1,
            max_blocks_in_flight=WINDOW,
            block_rows=LARGE_ROWS,
            rpc=settings,
            limiter_seconds=SECONDS,
            metrics=AppendMetrics(CollectorRegistry()),
        )
        self.writer.start()
        self.submitted = 0

    def submit(self, row_count=LARGE_ROWS):
        assert self.writer.submit(block(self.submitted, row_count), NEVER.is_set)
        self.submitted += row_count

    def settle(self):
        wait_until(lambda: self.writer.in_flight == 0, "every block is acknowledged")

    def close(self):
        self.writer.close([], 0)
        self.channel.close()


@pytest.fixture
def writing():
    """Starts writers, and closes them."""
    started = []

    def start(config, **rpc):
        started.append(Writing(config, **rpc))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def source():
    """Opens sources of samples, and closes them."""
    opened = []

    def start(config, batch_size, prefetch=4, **rpc):
        opened.append(
            SampleSource(
                config.replay.address,
                run_id=RUN,
                table=TABLE,
                spec=SPEC,
                batch_size=batch_size,
                prefetch=prefetch,
                seed=1,
                rpc=config.rpc.model_copy(update={"backoff_initial_seconds": 0.01, "backoff_max_seconds": 0.1} | rpc),
                metrics=LearnerMetrics(CollectorRegistry()),
                has_priorities=True,
            )
        )
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.fixture
def following():
    """Opens sources that follow a ring or a queue, and closes them."""
    opened = []

    def start(config, batch_size, **rpc):
        settings = config.rpc.model_copy(update={"backoff_initial_seconds": 0.01, "backoff_max_seconds": 0.1} | rpc)
        channel = open_channel(config.replay.address, settings)
        which = {
            "run_id": RUN,
            "table": TABLE,
            "spec": SPEC,
            "batch_size": batch_size,
            "rpc": settings,
            "metrics": LearnerMetrics(CollectorRegistry()),
        }
        if config.replay.tables[TABLE].queue:
            source = QueueSource(channel, prefetch=2, **which)
        else:
            memory, limiter = MemorySettings(100_000), LimiterSettings(1, None, None, SECONDS)
            source = FollowSource(channel, memory=memory, limiter=limiter, seed=1, **which)
        opened.append((source, channel))
        return source

    yield start
    for source, channel in opened:
        source.close()
        channel.close()


@pytest.fixture
def offered():
    """Offers memory of so many bytes."""
    made = []

    def offer(byte_count):
        made.append(OfferedMemory.create(byte_count))
        return made[-1]

    yield offer
    for memory in made:
        memory.close()


def shared_streams(config, rpc):
    return read_metrics(config).get(f'paceline_replay_shared_memory_streams{{rpc="{rpc}"}}', 0.0)


@pytest.mark.parametrize("off", [None, "replay", "client"])
def test_large_blocks_go_through_memory_unless_either_side_does_not_want_it(
    redis_server, redis_client, serve, writing, off
):
    config = make_config(redis_server.url, rpc={"shared_memory": off != "replay"}, capacity=100_000)
    serve(config)
    collector = writing(config, shared_memory=off != "client")
    for _ in range(3 * WINDOW):
        collector.submit()
        collector.submit(10)
    collector.settle()
    assert values_in_redis(redis_client) == list(range(collector.submitted))
    assert shared_streams(config, "Append") == (off is None)
    collector.close()
    wait_until(lambda: shared_streams(config, "Append") == 0, "the stream has ended")


def test_what_is_in_memory_is_what_is_stored(redis_server, redis_client, serve, offered):
    _, client = serve(make_config(redis_server.url))
    client.open()
    memory = offered(1 << 16)
    first, second = request(1, block(0, 10)), request(2, block(10, 10))
    first.memory.CopyFrom(memory.offer)
    position = 1000
    memory.bytes[position : position + len(second.rows)] = list(second.rows)
    second.rows_in_memory.CopyFrom(rows_pb2.MemoryRange(position=position, byte_count=len(second.rows)))
    second.ClearField("rows")
    assert [answer.reads_memory for answer in client.append(first, second)] == [True, True]
    assert values_in_redis(redis_client) == list(range(20))


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("not offered", "within the 0 that both sides see"),
        ("beyond its end", "within the 65536 that both sides see"),
        ("rows as well", "expected none where any are in memory"),
        ("too many", "at most rpc.max_message_bytes"),
        ("other bytes", "checksum"),
    ],
)
def test_rows_that_are_not_where_a_request_says_are_refused_and_nothing_is_stored(
    redis_server, redis_client, serve, offered, problem, message
):
    config = make_config(redis_server.url, rpc={"max_message_bytes": 1 << 16}, learner={"chunk_bytes": 1 << 15})
    _, client = serve(config)
    client.open()
    memory = offered(1 << 16 if problem != "too many" else 1 << 20)
    bad = request(1, block(0, 10))
    where = rows_pb2.MemoryRange(byte_count=len(bad.rows))
    if problem != "not offered":
        bad.memory.CopyFrom(memory.offer)
    if problem == "beyond its end":
        where.position = (1 << 16) - 1
    if problem == "too many":
        where.byte_count = (1 << 16) + 1
    if problem != "rows as well":
        bad.ClearField("rows")
    bad.rows_in_memory.CopyFrom(where)
    with pytest.raises(InvalidInputError, match=message):
        client.append(bad)
    assert values_in_redis(redis_client) == []
    client.append(request(1, block(0, 10)))
    assert values_in_redis(redis_client) == list(range(10))


def test_memory_is_offered_by_the_first_request_of_a_stream_and_no_other(redis_server, redis_client, serve, offered):
    _, client = serve(make_config(redis_server.url))
    client.open()
    first, late = request(1, block(0, 10)), request(2, block(10, 10))
    late.memory.CopyFrom(offered(1 << 16).offer)
    late.rows_in_memory.byte_count = len(late.rows)
    late.ClearField("rows")
    with pytest.raises(InvalidInputError, match="within the 0 that both sides see"):
        client.append(first, late)
    assert values_in_redis(redis_client) == list(range(10))


@pytest.mark.parametrize("room", [1, 3])
def test_rows_follow_each_other_in_memory_and_begin_anew_at_its_end(redis_server, serve, offered, room):
    # Messages of 1,365 rows: they end within batches, and batches within them.
    config = make_config(redis_server.url, rpc={"max_message_bytes": 1 << 16}, learner={"chunk_bytes": 1 << 15})
    _, client = serve(config)
    client.open()
    client.append_rows(10)
    batch_rows, batches = 1000, 12
    memory = offered(room * batch_rows * SPEC.row_bytes)
    may_ask = threading.Semaphore(room)

    def requests():
        asked = pb.SampleRequest(row_details=True, memory=memory.offer)
        asked.MergeFrom(client.sample_request(batch_rows))
        for _ in range(batches):
            assert may_ask.acquire(timeout=SECONDS)
            yield asked
            asked.ClearField("memory")

    end, rows = 0, 0
    for answer in client.stub.Sample(requests(), timeout=SECONDS):
        assert not answer.rows
        assert answer.rows_in_memory.position == end % len(memory.bytes)
        assert answer.rows_in_memory.byte_count == answer.row_count * SPEC.row_bytes
        end = answer.rows_in_memory.position + answer.rows_in_memory.byte_count
        found = part_of(memory.bytes, answer.rows_in_memory).view(SPEC.dtype)["value"]
        assert found.tolist() == list(answer.keys)
        part_of(memory.bytes, answer.rows_in_memory)[:] = 0  # replay reads none of it
        for _ in range((rows + answer.row_count) // batch_rows - rows // batch_rows):
            may_ask.release()
        rows += answer.row_count
    assert rows == batches * batch_rows
    wait_until(lambda: shared_streams(config, "Sample") == 0, "the stream has ended")


def test_memory_without_room_for_a_batch_is_refused(redis_server, serve, offered):
    _, client = serve(make_config(redis_server.url))
    client.open()
    client.append_rows(1)
    asked = client.sample_request(8)
    asked.memory.CopyFrom(offered(8 * SPEC.row_bytes - 1).offer)
    with pytest.raises(InvalidInputError, match="expected room for a batch or more, of 8 rows"), raising("replay"):
        list(client.stub.Sample(iter([asked]), timeout=SECONDS))


def test_memory_that_replay_cannot_see_changes_nothing(redis_server, serve, offered):
    _, client = serve(make_config(redis_server.url))
    client.open()
    client.append_rows(1)
    asked = client.sample_request(8)
    asked.memory.CopyFrom(offered(8 * SPEC.row_bytes).offer)
    asked.memory.key = bytes(32)
    answers = list(client.stub.Sample(iter([asked]), timeout=SECONDS))
    assert sum(len(answer.rows) for answer in answers) == 8 * SPEC.row_bytes
    assert not any(answer.HasField("rows_in_memory") for answer in answers)


@pytest.mark.parametrize("prefetch", [1, 4])
def test_a_learner_and_a_collector_of_one_machine_lose_nothing_when_replay_is_killed(
    redis_server, redis_client, writing, source, prefetch
):
    """Every row that comes is whole and of its key, before and after each kill, and the record is what was sent."""
    config = make_config(redis_server.url, capacity=100_000)
    replay = ReplayProcess(config)
    try:
        collector, batches, batch_size = writing(config), source(config, 3 * LARGE_ROWS, prefetch), 3 * LARGE_ROWS
        for kill in range(4):
            for _ in range(3 * WINDOW):
                collector.submit()
                batch = batches.next_batch(SECONDS)
                values = numpy_columns(SPEC, batch.rows.numpy())["value"]
                assert values.tolist() == np.asarray(batch.keys).tolist()
                assert len(set(values.tolist())) > min(batch_size, LARGE_ROWS) // 4
            wait_until(
                lambda: shared_streams(config, "Append") == shared_streams(config, "Sample") == 1, "both share memory"
            )
            if kill < 3:
                replay.kill()  # with blocks under way, and batches
                replay = ReplayProcess(config, resume=True)
        collector.settle()
        assert values_in_redis(redis_client) == list(range(collector.submitted))
    finally:
        replay.kill()


def mappings():
    """How often memory that was offered is mapped in this process, of which replay and its clients are threads."""
    return sum("memfd:paceline-rows" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("end", ["peace", "cancel", "deadline", "within a draw", "bad request"])
def test_a_stream_that_ends_leaves_no_memory_with_replay(redis_server, serve, offered, end):
    """At once: what only a full collection of garbage would free, replay might hold for hours."""
    config = make_config(redis_server.url, table={"sampler": "prioritised"})
    _, client = serve(config)
    client.open()
    client.append_rows(1)
    if end == "within a draw":  # for a row that may be drawn
        client.stub.UpdatePriorities(
            pb.UpdatePrioritiesRequest(run_id=RUN, table=TABLE, keys=range(10), priorities=[0.0] * 10), timeout=SECONDS
        )
    gc.collect()
    gc.disable()
    try:
        before = mappings()
        for number in range(3):
            memory, sampled = offered(2 * SPEC.row_bytes), client.describe().sampled_row_count
            asked = client.sample_request(2, batch_count=1 if end in ("peace", "bad request") else 10**6)
            asked.memory.CopyFrom(memory.offer)
            more = [client.sample_request(3)] if end == "bad request" else []
            stream = client.stub.Sample(iter([asked, *more]), timeout=0.5 if end == "deadline" else SECONDS)
            if end != "bad request":  # which may come before the first draw
                wait_until(lambda: client.describe().sampled_row_count > sampled, "replay draws")  # noqa: B023
            if end in ("cancel", "within a draw"):
                stream.cancel()
            with contextlib.suppress(grpc.RpcError):
                list(stream)
            wait_until(lambda: shared_streams(config, "Sample") == 0, "the stream has ended")
            wait_until(lambda: mappings() == before + number + 1, "only the client has the memory")  # noqa: B023
    finally:
        gc.enable()


def in_memory(memory, answer):
    """The values of rows that an answer says are there."""
    assert not answer.rows
    return part_of(memory.bytes, answer.rows_in_memory).view(SPEC.dtype)["value"].tolist()


def test_rows_wait_until_a_follower_releases_others_and_then_take_their_place(redis_server, serve, offered):
    _, client = serve(make_config(redis_server.url))
    client.open()
    client.append_rows(2)
    memory = offered(8 * SPEC.row_bytes + 5)  # whole rows only
    with Following(client, memory=memory.offer) as stream:
        stream.next()
        first = stream.next()
        assert (first.rows_in_memory.position, in_memory(memory, first)) == (0, list(range(8)))
        for released in (0, 3):
            stream.report(released_before=released, sampled_row_count=1 + released)
            wait_until(lambda: client.describe().sampled_row_count == 1 + released, "replay has read it")  # noqa: B023
            if released == 0:
                memory.bytes[:] = 0xFF  # whatever replay wrote again would be seen
        second = stream.next()
        assert (second.rows_in_memory.position, in_memory(memory, second)) == (0, [8, 9, 10])
        rest = part_of(memory.bytes, rows_pb2.MemoryRange(position=3 * SPEC.row_bytes, byte_count=5 * SPEC.row_bytes))
        assert set(rest.tolist()) == {0xFF}
        stream.report(released_before=10)
        third, fourth = stream.next(), stream.next()  # up to the end of the memory, and from its start
        assert (in_memory(memory, third), third.rows_in_memory.position) == (list(range(11, 16)), 3 * SPEC.row_bytes)
        assert (in_memory(memory, fourth), fourth.rows_in_memory.position) == ([16, 17], 0)


def test_a_follower_that_asks_no_more_gets_the_rows_without_room_in_messages(redis_server, serve, offered):
    _, client = serve(make_config(redis_server.url))
    client.open()
    client.append_rows(3)
    memory = offered(8 * SPEC.row_bytes)
    first = pb.FollowRequest(run_id=RUN, table=TABLE, wanted_before=30, memory=memory.offer)
    answers = list(client.stub.Follow(iter([first]), timeout=SECONDS))
    lying = [answer for answer in answers if answer.HasField("rows_in_memory")]
    assert [value for answer in lying for value in in_memory(memory, answer)] == list(range(8))
    assert [value for answer in answers for value in values_of(answer)] == list(range(8, 30))


def test_memory_without_room_for_a_row_is_refused(redis_server, serve, offered):
    _, client = serve(make_config(redis_server.url))
    client.open()
    asked = pb.FollowRequest(run_id=RUN, table=TABLE, memory=offered(SPEC.row_bytes - 1).offer)
    with pytest.raises(InvalidInputError, match="expected room for a row or more, of"), raising("replay"):
        list(client.stub.Follow(iter([asked]), timeout=SECONDS))


@pytest.mark.parametrize("off", [None, "replay", "client"])
@pytest.mark.parametrize("kind", TABLES)
def test_what_follows_is_the_same_with_memory_and_without(redis_server, serve, following, monkeypatch, off, kind):
    monkeypatch.setattr(followed, "MEMORY_BYTES", 100 * SPEC.row_bytes)
    config = make_config(redis_server.url, rpc={"shared_memory": off != "replay"}, table=TABLES[kind])
    _, client = serve(config)
    client.open()
    client.append_rows(50)
    gc.collect()  # of other tests
    before = mappings(), descriptors()
    source = following(config, 40, shared_memory=off != "client")
    taken = values(source.next_batch(SECONDS))
    assert shared_streams(config, "Follow") == (off is None)
    for number in range(50, 100):
        client.append_rows(1, first=number)
    if kind == "queue":
        while len(taken) < 1000:
            taken += values(source.next_batch(SECONDS))
        assert taken == list(range(1000))
    else:
        wait_until(lambda: source._end == 1000, "every row has come")
        assert ring_of(source) == list(range(1000))
    source.close()
    wait_until(lambda: shared_streams(config, "Follow") == 0, "the stream has ended")
    wait_until(lambda: (mappings(), descriptors()) == before, "the memory is gone")


def descriptors():
    """How many descriptors of memory that is offered this process has."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += "memfd:paceline-rows" in str(path.readlink())
    return found


def values(batch):
    return numpy_columns(SPEC, batch.rows.numpy())["value"].astype(int).tolist()


def ring_of(source):
    _, rows, _ = source._memory.read(0, 1 << 40)
    return numpy_columns(SPEC, rows)["value"].astype(int).tolist()


@pytest.mark.parametrize("kind", TABLES)
def test_a_follower_of_one_machine_loses_and_repeats_nothing_when_replay_is_killed(
    redis_server, writing, following, monkeypatch, kind
):
    """Rows that wait in the memory of a stream that was cut stay as they are."""
    monkeypatch.setattr(followed, "MEMORY_BYTES", 2 * LARGE_ROWS * SPEC.row_bytes)
    config = make_config(redis_server.url, capacity=100_000, table=TABLES[kind])
    replay = ReplayProcess(config)
    try:
        collector, source, taken = writing(config), following(config, 1000), []
        for kill in range(4):
            for _ in range(3 * WINDOW):
                collector.submit()
                if kind == "queue":
                    taken += values(source.next_batch(SECONDS))
            wait_until(lambda: shared_streams(config, "Follow") == 1, "both share memory")
            if kill < 3:
                replay.kill()  # with blocks under way, and rows that wait
                replay = ReplayProcess(config, resume=True)
        collector.settle()
        if kind == "queue":
            while len(taken) + 1000 <= collector.submitted:
                taken += values(source.next_batch(SECONDS))
            assert taken == list(range(len(taken)))
        else:
            wait_until(lambda: source._end == collector.submitted, "every row has come")
            assert ring_of(source) == list(range(collector.submitted))
    finally:
        replay.kill()


@pytest.mark.parametrize("end", ["peace", "cancel", "within a wait", "replaced", "bad request", "rows lost"])
def test_a_follower_that_ends_leaves_no_memory_with_replay(redis_server, serve, offered, end):
    config = make_config(redis_server.url)
    _, client = serve(config)
    client.open()
    client.append_rows(2)
    gc.collect()
    gc.disable()
    try:
        before = mappings()
        for number in range(3):
            memory = offered(8 * SPEC.row_bytes)
            first = {
                "memory": memory.offer,
                "sampled_row_count": 1,
                "wanted_before": 30 if end == "within a wait" else 8,
            }
            if end == "rows lost":
                first["from_row"] = 1000
            with Following(client, **first) as stream:
                if end != "rows lost":
                    stream.next()
                    assert in_memory(memory, stream.next()) == list(range(8))
                if end == "peace":
                    stream.end()
                elif end == "bad request":
                    stream.report(released_before=-1)
                elif end == "replaced":
                    client.follow(8, sampled_row_count=1)
                elif end != "rows lost":
                    stream.stream.cancel()
                with contextlib.suppress(grpc.RpcError):
                    list(stream.stream)
            wait_until(lambda: shared_streams(config, "Follow") == 0, "the stream has ended")
            wait_until(lambda: mappings() == before + number + 1, "only the client has the memory")  # noqa: B023
    finally:
        gc.enable()


def test_rows_that_wait_keep_no_memory_of_streams_that_were_cut(redis_server, spawn, following):
    gc.collect()  # of other tests
    before = mappings(), descriptors()
    config = make_config(redis_server.url, table=TABLES["queue"])
    replay, client = spawn(config)
    client.open()
    source = following(config, 100)
    for number in range(4):
        client.append_rows(1, first=number)
        wait_until(lambda: source._waiting_rows == 10 * number + 10, "the rows wait here")  # noqa: B023
        wait_until(lambda: (mappings(), descriptors()) == (before[0] + 1, before[1] + 2), "one stream's memory is here")
        replay.kill()
        replay, client = spawn(config, resume=True)
        client.open()
    client.append_rows(6, first=4)
    assert values(source.next_batch(SECONDS)) == list(range(100))
    client.append_rows(1, first=10)
    wait_until(lambda: source._waiting_rows == 10, "rows wait here")
    source.close()
    wait_until(lambda: (mappings(), descriptors()) == before, "the memory is gone")
