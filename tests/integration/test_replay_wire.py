"""What crosses the wire: malformed input is refused and harms nobody, messages are cut and shared, streams end."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest

from integration.replay_harness import (
    RUN,
    SECONDS,
    SPEC,
    TABLE,
    Client,
    block,
    make_config,
    one_by_one,
    request,
    together,
    values_in_redis,
    wait_until,
)
from paceline.config import Config
from paceline.errors import (
    BlockError,
    InvalidInputError,
    LimiterTimeoutError,
    ReplacedError,
    RowSpecError,
    RunMismatchError,
    TooManyStreamsError,
)
from paceline.replay.sampling import MESSAGE_BYTES
from paceline.replay.service import MAX_BLOCKS_PER_APPEND
from paceline.rows import Block, Column, RowSpec
from paceline.rpc.bulk import APPEND_REQUEST, SAMPLE_RESPONSE, Bulk
from paceline.rpc.status import raising
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import rows_pb2
from redis_record import keys_of_payloads, read_record


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def memory_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def raw(client: Client, rpc: str, data: bytes) -> grpc.RpcError:
    """The error of a call whose request is these very bytes."""
    path = f"/paceline.v1.ReplayService/{rpc}"
    if rpc in ("Append", "Sample"):
        stream = client.channel.stream_stream(path)(iter([data]), timeout=SECONDS)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
    else:
        with pytest.raises(grpc.RpcError) as caught:
            client.channel.unary_unary(path)(data, timeout=SECONDS)
    return caught.value


def changed(message: pb.AppendRequest, **header: object) -> pb.AppendRequest:
    copy = pb.AppendRequest()
    copy.CopyFrom(message)
    for name, value in header.items():
        setattr(copy.header, name, value)
    return copy


@pytest.fixture
def opened(redis_server, serve):
    replay, client = serve(make_config(redis_server.url))
    client.open()
    client.append_rows(3)
    return replay, client


@pytest.mark.parametrize("rpc", ["OpenTable", "Append", "Sample", "DescribeTables"])
def test_bytes_that_are_no_message_are_refused_and_never_run(opened, tmp_path, rpc):
    _, client = opened
    marker = tmp_path / "marker"
    for data in (
        pickle.dumps(Bomb(marker)),
        b"\xff" * 64,
        b"\x0a\xff\xff\xff\xff\x0f",
        np.random.default_rng(0).bytes(99),
    ):
        assert raw(client, rpc, data).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not marker.exists()
    assert client.describe().row_count == 30


def test_rows_that_are_a_pickle_are_refused_and_never_run(opened, tmp_path):
    _, client = opened
    marker = tmp_path / "marker"
    data = pickle.dumps(Bomb(marker))
    message = changed(request(4, block(0, 4)))
    message.rows = data
    with pytest.raises(BlockError, match="4 rows and holds"):
        client.append(message)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("change", "error_type", "text"),
    [
        ({"row_count": 5}, BlockError, "says 5 rows and holds 320 bytes: expected 160 bytes"),
        ({"row_count": 0}, BlockError, "says 0 rows"),
        ({"row_count": -3}, BlockError, "says -3 rows"),
        ({"row_count": 2**31 - 1}, BlockError, "a block of 2147483647 rows: expected at most capacity_rows"),
        ({"row_spec_digest": b"\x00" * 16}, RowSpecError, "row spec digest"),
        ({"row_spec_digest": b""}, RowSpecError, "row spec digest"),
        ({"checksum": 1}, BlockError, "checksum"),
        ({"collector_index": -1}, BlockError, "expected 0 to 255"),
        ({"collector_index": 256}, BlockError, "expected 0 to 255"),
        ({"collector_incarnation": 0}, BlockError, "expected 1 or more"),
        ({"sequence": 0}, BlockError, "expected 1 or more"),
        ({"sequence": 2**53}, BlockError, "a sequence below"),
    ],
)
def test_a_block_that_is_not_what_its_header_says_is_refused(opened, change, error_type, text):
    _, client = opened
    with pytest.raises(error_type, match=text):
        client.append(changed(request(4, block(30, 10)), **change))
    assert client.describe().inserted_row_count == 30
    client.append(request(4, block(30, 10)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_refused_unless_the_table_allows_it(redis_server, serve, value):
    replay, client = serve(make_config(redis_server.url))
    client.open()
    rows = block(0, 10)
    rows.columns["observation"][7, 2] = value
    with pytest.raises(BlockError, match="column 'observation' of block 1 of collector 0 holds a NaN"):
        client.append(request(1, rows))
    assert replay.metrics()['paceline_replay_refused_blocks_total{reason="malformed"}'] == 1
    replay.stop()
    _, client = serve(make_config(redis_server.url, table={"allow_non_finite": True}), resume=True)
    client.open()
    assert client.append(request(1, rows))[0].stored_row_count == 10


def test_a_block_larger_than_the_table_is_refused(redis_server, serve):
    _, client = serve(make_config(redis_server.url, capacity=20))
    client.open()
    with pytest.raises(BlockError, match="at most capacity_rows, 20"):
        client.append(request(1, block(0, 21)))


@pytest.mark.parametrize(
    "columns",
    [
        [rows_pb2.Column(name="x", data_type=rows_pb2.DATA_TYPE_FLOAT32, shape=[10**12])],
        [rows_pb2.Column(name="x", data_type=rows_pb2.DATA_TYPE_FLOAT32, shape=[10**6, 10**6])],
        [rows_pb2.Column(name="x", data_type=rows_pb2.DATA_TYPE_FLOAT32, shape=[2**62, 2**62])],
        [rows_pb2.Column(name="x", data_type=rows_pb2.DATA_TYPE_FLOAT32, shape=[-4])],
        [rows_pb2.Column(name="x", data_type=rows_pb2.DATA_TYPE_FLOAT32, shape=[16 << 20])],  # a table: 640 GB
        [rows_pb2.Column(name="x", data_type=99)],
        [rows_pb2.Column(name="x")],
        [rows_pb2.Column(name="../x", data_type=rows_pb2.DATA_TYPE_FLOAT32)],
        [rows_pb2.Column(name="x", data_type=rows_pb2.DATA_TYPE_BOOL)] * 2,
        [rows_pb2.Column(name=f"x{n}", data_type=rows_pb2.DATA_TYPE_BOOL) for n in range(10_000)],
        [],
    ],
    ids=["10^12", "10^6x10^6", "2^124", "negative", "memory", "dtype", "no-dtype", "name", "twice", "many", "none"],
)
def test_a_row_spec_that_is_none_is_refused_before_anything_is_allocated(redis_server, serve, columns):
    _, client = serve(make_config(redis_server.url))
    before = memory_bytes()
    message = pb.OpenTableRequest(run_id=RUN, table=TABLE, row_spec=rows_pb2.RowSpec(columns=columns))
    error = raw(client, "OpenTable", message.SerializeToString())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
    assert dict(error.trailing_metadata())["paceline-error"] == "RowSpecError"
    assert memory_bytes() - before < 50 << 20
    client.open()


def test_every_call_of_another_run_is_refused_and_nothing_is_stored(opened, redis_client):
    _, client = opened
    stranger = Client.__new__(Client)
    stranger.__dict__.update(client.__dict__, run_id="other-run")
    calls = (
        lambda: stranger.open(),
        lambda: stranger.append(request(4, block(30, 10), run_id="other-run")),
        lambda: stranger.sample(4),
        lambda: stranger.describe(),
    )
    for call in calls:
        with pytest.raises(RunMismatchError, match="belongs to run 'first-run', the caller to run 'other-run'"):
            call()
    assert client.describe().inserted_row_count == 30
    assert not list(redis_client.scan_iter("*other-run*"))


@pytest.mark.parametrize(
    ("later", "text"),
    [
        ({"batch_size": 5}, "expected 4 from 'transitions'"),
        ({"table": "others"}, "expected 4 from 'transitions'"),
        ({"batch_count": 0}, "expected 1 or more of each"),
        ({"batch_size": -4}, "expected 1 or more of each"),
        ({"policy_version": -1}, "expected 0 or more of each"),
        ({"base_version": -1}, "expected 0 or more of each"),
        ({"learner_incarnation": -1}, "expected 0 or more of each"),
    ],
)
def test_a_later_sample_request_that_differs_is_refused(opened, later, text):
    _, client = opened
    second = client.sample_request(4)
    for name, value in later.items():
        setattr(second, name, value)
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stub.Sample(iter([client.sample_request(4), second]), timeout=SECONDS))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text in caught.value.details()


def test_large_batches_are_cut_and_small_ones_share_a_message(redis_server, serve):
    spec = RowSpec((Column("x", "uint8", (1000,)),))  # 1000 bytes a row, 2097 rows a message
    _, client = serve(make_config(redis_server.url))
    client.open(spec)
    rows = Block.empty(spec, 500)
    client.append(request(1, rows))
    large = client.sample(3000, 2)
    assert [message.row_count for message in large] == [2097, 2097, 1806]
    small = client.sample(100, 60)
    assert sum(message.row_count for message in small) == 6000
    assert len(small) <= 4
    for message in large + small:
        assert len(message.rows) == message.row_count * spec.row_bytes <= MESSAGE_BYTES
        assert (message.table_row_count, message.inserted_row_count) == (500, 500)
        assert message.row_spec_digest == spec.digest


@pytest.mark.parametrize("columns", [1, 40])
def test_no_answer_is_larger_than_a_peer_accepts(redis_server, serve, columns):
    limit = 1 << 16
    spec = RowSpec((Column("x", "float32", (columns,)),))
    _, client = serve(
        make_config(redis_server.url, rpc={"max_message_bytes": limit}, learner={"chunk_bytes": limit // 2})
    )
    client.open(spec)
    for number in range(1, 11):
        client.append(request(number, Block.empty(spec, 100)))
    asked = client.sample_request(5000, 2)
    asked.row_details = True
    with raising("replay"):
        details = list(client.stub.Sample(iter([asked]), timeout=SECONDS))
    for messages, rows in ((client.sample(5000, 2), 10_000), (details, 10_000), (client.follow(1000), 1000)):
        assert sum(message.row_count for message in messages) == rows
        assert max(message.ByteSize() for message in messages) <= limit


def test_bulk_peers_and_plain_protobuf_peers_understand_each_other(opened):
    _, client = opened
    message = request(4, block(30, 10))
    head = pb.AppendRequest()
    head.CopyFrom(message)
    head.ClearField("rows")
    append = client.channel.stream_stream(
        "/paceline.v1.ReplayService/Append", APPEND_REQUEST.serialize, pb.AppendResponse.FromString
    )
    (answer,) = append(iter([Bulk(head, memoryview(message.rows))]), timeout=SECONDS)
    assert answer.stored_row_count == 10
    sample = client.channel.stream_stream(
        "/paceline.v1.ReplayService/Sample", pb.SampleRequest.SerializeToString, SAMPLE_RESPONSE.deserialize
    )
    (bulk,) = sample(iter([client.sample_request(100)]), timeout=SECONDS)
    (plain,) = client.sample(100)
    assert bytes(bulk.payload) == plain.rows
    assert bulk.head.row_count == plain.row_count == 100


def test_blocks_that_share_a_message_are_acknowledged_together_and_lie_in_redis_as_if_they_had_come_alone(
    opened, redis_client
):
    _, client = opened
    assert client.open().max_blocks_per_append == MAX_BLOCKS_PER_APPEND
    requests = [request(number + 1, block(10 * number, 10)) for number in range(3, 6)]
    (answer,) = client.append(together(*requests))
    assert [(each.sequence, each.stored_row_count, each.duplicate) for each in (answer, *answer.further)] == [
        (4, 10, False),
        (5, 10, False),
        (6, 10, False),
    ]
    assert values_in_redis(redis_client) == list(range(60))
    assert [header.payload_byte_count for header, _ in read_record(redis_client, RUN)] == [0] * 6
    again = one_by_one(client.append(together(*requests)))
    assert [(each.sequence, each.stored_row_count, each.duplicate) for each in again] == [
        (4, 10, True),
        (5, 10, True),
        (6, 10, True),
    ]
    assert values_in_redis(redis_client) == list(range(60))


def with_sizes(message: pb.AppendRequest, *sizes: int) -> pb.AppendRequest:
    for header, size in zip((message.header, *message.further_headers), sizes, strict=True):
        header.payload_byte_count = size
    return message


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((320, 280), "is 320, 280: expected 1 or more of each, and 640 together, the bytes of its rows"),
        ((320, 360), "expected 1 or more of each, and 640 together"),
        ((680, -40), "is 680, -40: expected 1 or more of each"),
        ((640, 0), "is 640, 0: expected 1 or more of each"),
        ((0, 0), "is 0, 0: expected 1 or more of each"),
        ((2**63 - 1, 2**63 - 1), "and 640 together"),
    ],
)
def test_of_a_message_whose_blocks_do_not_share_its_rows_out_nothing_is_stored(opened, sizes, text):
    _, client = opened
    message = with_sizes(together(request(4, block(30, 10)), request(5, block(40, 10))), *sizes)
    with pytest.raises(InvalidInputError, match=text):
        client.append(message)
    assert client.describe().inserted_row_count == 30
    assert raw(client, "Append", message.SerializeToString()).code() is grpc.StatusCode.INVALID_ARGUMENT


def test_of_a_message_of_more_blocks_than_it_may_have_nothing_is_stored(opened):
    _, client = opened
    requests = [request(4 + number, block(30 + number, 1)) for number in range(MAX_BLOCKS_PER_APPEND + 1)]
    with pytest.raises(InvalidInputError, match="a request has 65 blocks: expected at most 64"):
        client.append(together(*requests))
    assert client.describe().inserted_row_count == 30
    assert len(one_by_one(client.append(together(*requests[:-1])))) == MAX_BLOCKS_PER_APPEND
    assert client.describe().inserted_row_count == 94


@pytest.mark.parametrize(
    ("change", "error_type"),
    [
        ({"row_count": 5}, BlockError),
        ({"checksum": 1}, BlockError),
        ({"collector_index": 256}, BlockError),
        ({"row_spec_digest": b""}, RowSpecError),
        ({"collector_index": 1, "collector_incarnation": 1}, ReplacedError),
    ],
    ids=["rows", "checksum", "collector", "spec", "replaced"],
)
def test_blocks_before_one_that_is_refused_are_stored_and_acknowledged_and_those_after_it_are_neither(
    opened, redis_client, change, error_type
):
    replay, client = opened
    client.append(request(1, block(30, 1), collector=1, incarnation=2))
    requests = [request(4 + number, block(31 + number, 1)) for number in range(4)]
    requests[2] = changed(requests[2], **change)
    stream = client.stub.Append(iter([together(*requests)]), timeout=SECONDS)
    acknowledged = one_by_one([next(stream)])
    with pytest.raises(error_type), raising("replay"):
        next(stream)
    assert [(each.sequence, each.stored_row_count) for each in acknowledged] == [(4, 1), (5, 1)]
    assert values_in_redis(redis_client) == list(range(33))
    refused = {name: count for name, count in replay.metrics().items() if "refused_blocks_total" in name}
    assert sum(refused.values()) == 1


def test_blocks_that_are_known_are_acknowledged_though_one_after_them_is_refused(opened):
    _, client = opened
    client.append(request(1, block(30, 1), collector=1, incarnation=2))
    message = together(request(2, block(10, 10)), request(3, block(20, 10)), request(2, block(0, 1), collector=1))
    stream = client.stub.Append(iter([message]), timeout=SECONDS)
    assert [(each.sequence, each.duplicate) for each in one_by_one([next(stream)])] == [(2, True), (3, True)]
    with pytest.raises(ReplacedError), raising("replay"):
        next(stream)


def held_back_after_eleven_rows(redis_url: str, *, capacity: int = 10_000, **limiter: float) -> Config:
    """Of blocks of 1, 10 and 10 rows the third waits until rows were sampled."""
    return make_config(
        redis_url,
        capacity=capacity,
        collector={"block_rows": min(10, capacity)},
        limiter={"min_rows": 1, "window_rows": 200, **limiter},
        learner={"updates": "strict", "batch_size": 10},
    )


ONE_TEN_TEN = (request(1, block(0, 1)), request(2, block(1, 10)), request(3, block(11, 10)))


def test_blocks_are_not_acknowledged_later_because_one_after_them_waits_for_the_limiter(redis_server, serve):
    replay, client = serve(held_back_after_eleven_rows(redis_server.url))
    client.open()
    stream = client.stub.Append(iter([together(*ONE_TEN_TEN)]), timeout=SECONDS)
    assert [each.sequence for each in one_by_one([next(stream)])] == [1, 2]
    assert client.describe().inserted_row_count == 11
    client.sample(10, 10)
    assert [each.sequence for each in one_by_one(stream)] == [3]
    assert client.describe().inserted_row_count == 21
    assert replay.metrics()[f'paceline_replay_limiter_wait_seconds_total{{side="insert",table="{TABLE}"}}'] > 0


def test_blocks_before_one_that_waits_are_acknowledged_though_the_service_stops(redis_server, redis_client, serve):
    replay, client = serve(held_back_after_eleven_rows(redis_server.url))
    client.open()
    stream = client.stub.Append(iter([together(*ONE_TEN_TEN)]), timeout=SECONDS)
    acknowledged = one_by_one([next(stream)])
    replay.stop_signal.set()
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert [each.sequence for each in acknowledged] == [1, 2]
    replay.join()
    assert values_in_redis(redis_client) == list(range(11))


def test_a_block_that_the_limiter_holds_back_too_long_is_refused_and_no_rows_stay_set_aside(redis_server, serve):
    # The first two blocks fill the table, so that the third, which passes with them, is stored after them.
    config = held_back_after_eleven_rows(redis_server.url, capacity=8, deadline_seconds=0.05)
    _, client = serve(config)
    client.open()
    message = together(request(1, block(0, 1)), *(request(number, block(5 * number - 9, 5)) for number in range(2, 5)))
    stream = client.stub.Append(iter([message]), timeout=SECONDS)
    assert [each.sequence for each in one_by_one([next(stream), next(stream)])] == [1, 2, 3]
    with pytest.raises(LimiterTimeoutError, match="11 rows are inserted and 0 sampled"), raising("replay"):
        next(stream)
    client.sample(5, 20)
    assert [each.duplicate for each in one_by_one(client.append(message))] == [True, True, True, False]
    client.append(request(5, block(16, 5)))  # up to the very edge
    assert client.describe().inserted_row_count == 21


def shared_out(random: np.random.Generator, requests: list[pb.AppendRequest]) -> list[pb.AppendRequest]:
    """The same blocks in the same order, in messages of one to six."""
    messages = []
    while requests:
        count = int(random.integers(1, 7))
        messages.append(together(*requests[:count]))
        requests = requests[count:]
    return messages


@pytest.mark.parametrize(
    "table", [{}, {"sampler": "prioritised", "remover": "lowest_priority"}], ids=["plain", "state"]
)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_blocks_share_a_message_the_same_rows_are_stored_as_one_by_one(
    redis_server, redis_client, serve, seed, table
):
    random = np.random.default_rng(seed)
    requests, sequences, first = [], [0, 0, 0], 0
    for _ in range(60):
        collector, count = int(random.integers(0, 3)), int(random.integers(1, 13))
        if requests and random.random() < 0.2:
            requests.append(requests[int(random.integers(len(requests)))])  # a block that comes again
            continue
        sequences[collector] += 1
        requests.append(request(sequences[collector], block(first, count), collector=collector))
        first += count
    found = []
    for name, messages in (("alone", requests), ("grouped", shared_out(random, requests))):
        # Small enough for one message to have more rows than the table; and the run's limit cuts a block.
        config = make_config(
            redis_server.url,
            run_id=name,
            capacity=30,
            table=table,
            run={"id": name, "environment_steps": first - 20},
        )
        _, client = serve(config, run_id=name)
        client.open()
        for message in messages:
            message.run_id = name
        answers = one_by_one(client.append(*messages))
        record = [
            (header.first_row, header.row_count, header.sequence, header.checksum, payload)
            for header, payload in read_record(redis_client, name)
        ]
        assert keys_of_payloads(redis_client, name) == {row for row, *_ in record}
        described = client.describe()
        found.append(
            (
                [(each.sequence, each.stored_row_count, each.duplicate) for each in answers],
                record,
                (described.row_count, described.inserted_row_count, described.first_row, described.log_bytes),
            )
        )
    assert found[0] == found[1]
    assert client.describe().inserted_row_count == first - 20


def test_requests_sent_ahead_are_answered_ahead(opened):
    _, client = opened
    ask = threading.Semaphore(0)

    def requests():
        yield client.sample_request(10, 3)
        ask.acquire(timeout=SECONDS)
        yield client.sample_request(10, 2)
        ask.acquire(timeout=SECONDS)

    stream = client.stub.Sample(requests(), timeout=SECONDS)
    for batches in (3, 2):
        received = 0
        while received < 10 * batches:
            received += next(stream).row_count
        assert received == 10 * batches
        ask.release()
    assert list(stream) == []


def test_batches_that_the_limiter_granted_are_not_held_back_for_those_it_did_not(redis_server, serve):
    config = make_config(
        redis_server.url,
        limiter={"window_rows": 80},
        learner={"updates": "strict", "batch_size": 20, "updates_per_step": 0.1},
    )
    _, client = serve(config)
    client.open()
    client.append(request(1, block(0, 1)))
    stream = client.stub.Sample(iter([client.sample_request(20, 4)]), timeout=SECONDS)
    assert next(stream).row_count == 40  # two batches down to the lower edge; the other two wait
    client.append(request(2, block(1, 10)))
    client.append(request(3, block(11, 10)))
    assert sum(message.row_count for message in stream) == 40


def test_the_rest_of_a_batch_is_not_held_back_for_the_next_one(redis_server, serve):
    config = make_config(
        redis_server.url,
        limiter={"window_rows": 6000},
        learner={"updates": "strict", "batch_size": 3000, "updates_per_step": 0.001},
    )
    spec = RowSpec((Column("x", "uint8", (1000,)),))  # 2097 rows a message
    _, client = serve(config)
    client.open(spec)
    client.append(request(1, Block.empty(spec, 1)))
    stream = client.stub.Sample(iter([client.sample_request(3000, 2)]), timeout=SECONDS)
    assert [next(stream).row_count, next(stream).row_count] == [2097, 903]


def stream_count(replay, rpc: str) -> float:
    return replay.metrics().get(f'paceline_replay_open_streams{{rpc="{rpc}"}}', 0.0)


def test_a_wait_for_the_limiter_ends_as_the_caller_goes_away(redis_server, serve):
    replay, client = serve(make_config(redis_server.url, limiter={"min_rows": 100}))
    client.open()
    stream = client.stub.Sample(iter([client.sample_request(10)]), timeout=SECONDS)
    wait_until(lambda: stream_count(replay, "Sample") == 1, "the stream is open")
    stream.cancel()
    wait_until(lambda: stream_count(replay, "Sample") == 0, "its thread is free again", seconds=5)


def test_a_limiter_timeout_says_what_it_waits_for_and_is_counted(redis_server, serve):
    replay, client = serve(make_config(redis_server.url, limiter={"min_rows": 100, "deadline_seconds": 0.05}))
    client.open()
    client.append_rows(3)
    with pytest.raises(LimiterTimeoutError, match="30 of the 100 rows needed before the first sample"):
        client.sample(10)
    series = f'{{side="sample",table="{TABLE}"}}'
    metrics = replay.metrics()
    assert metrics[f"paceline_replay_limiter_timeouts_total{series}"] == 1
    assert metrics[f"paceline_replay_limiter_wait_seconds_total{series}"] >= 0.05


def test_streams_beyond_the_limit_are_refused_and_short_calls_still_answered(redis_server, serve):
    config = make_config(redis_server.url)
    config = config.model_copy(update={"replay": config.replay.model_copy(update={"max_streams": 2})})
    replay, client = serve(config)
    client.open()
    open_ends = threading.Event()

    def silence():
        open_ends.wait(SECONDS)
        yield from ()

    streams = [client.stub.Append(silence(), timeout=SECONDS) for _ in range(2)]
    wait_until(lambda: stream_count(replay, "Append") == 2, "both streams are open")
    with pytest.raises(TooManyStreamsError, match="2 streams are open"):
        client.sample(1)
    client.describe()
    open_ends.set()
    for stream in streams:
        assert list(stream) == []


def test_a_stop_ends_idle_and_waiting_streams_at_once(redis_server, serve):
    config = make_config(
        redis_server.url,
        limiter={"min_rows": 1, "window_rows": 200},
        learner={"updates": "strict", "batch_size": 10},
        rpc={"drain_seconds": 300},
    )
    replay, client = serve(config)
    client.open()
    hold = threading.Event()

    def appends():
        for sequence in (1, 2, 3, 4):  # the third is held back: 11 rows fill half the window
            yield request(sequence, block(10 * sequence, 10 if sequence > 1 else 1))
        hold.wait(SECONDS)

    def idle():
        hold.wait(SECONDS)
        yield from ()

    blocked, acknowledged = client.stub.Append(appends(), timeout=SECONDS), []
    acknowledged += [next(blocked), next(blocked)]
    others = [client.stub.Append(idle(), timeout=SECONDS), client.stub.Sample(idle(), timeout=SECONDS)]
    wait_until(lambda: stream_count(replay, "Append") == 2, "the append streams are open")
    wait_until(lambda: stream_count(replay, "Sample") == 1, "the sample stream is open")
    replay.stop_signal.set()
    for stream in (blocked, *others):
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    hold.set()
    replay._thread.join(10)  # far below drain_seconds
    assert not replay._thread.is_alive()
    assert replay.error is None
    assert [answer.sequence for answer in acknowledged] == [1, 2]


def test_a_client_that_never_reads_cannot_delay_the_stop_beyond_the_drain_time(redis_server, serve):
    replay, client = serve(make_config(redis_server.url, rpc={"drain_seconds": 1}))
    spec = RowSpec((Column("x", "uint8", (1000,)),))
    client.open(spec)
    client.append(request(1, Block.empty(spec, 500)))
    stream = client.stub.Sample(iter([client.sample_request(1000, 1000)]), timeout=SECONDS)
    wait_until(lambda: stream_count(replay, "Sample") == 1, "the stream is open")
    next(stream)
    replay.stop_signal.set()
    replay._thread.join(10)
    assert not replay._thread.is_alive()
    with pytest.raises(grpc.RpcError):
        list(stream)


def test_a_stream_that_is_quiet_for_many_pings_is_not_cut(bundled_redis, serve):
    quiet = 6.0
    _, client = serve(
        make_config(
            bundled_redis.url, limiter={"min_rows": 20, "deadline_seconds": quiet}, rpc={"keepalive_seconds": 1.0}
        )
    )
    client.open()
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stub.Sample(iter([client.sample_request(10)]), timeout=quiet + SECONDS))
    # Not UNAVAILABLE, which a connection that was cut for its pings would give: the limiter's own answer came.
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "0 of the 20 rows" in caught.value.details()


def test_every_metric_has_a_help_text_and_bounded_labels(opened):
    replay, client = opened
    client.sample(16)
    names = {name.partition("{")[0] for name in replay.metrics()}
    for part in (
        "appended_rows_total",
        "appended_blocks_total",
        "appended_bytes_total",
        "sampled_rows_total",
        "table_rows",
        "table_capacity_rows",
        "removed_rows_total",
        "limiter_wait_seconds_total",
        "redis_append_seconds_count",
        "open_streams",
        "restore_seconds",
        "activity_seconds_total",
    ):
        assert f"paceline_replay_{part}" in names
    assert replay.metrics()[f'paceline_replay_table_rows{{table="{TABLE}"}}'] == 30
    assert SPEC.row_bytes * 30 == replay.metrics()[f'paceline_replay_appended_bytes_total{{table="{TABLE}"}}']


def test_garbage_in_the_middle_of_a_stream_leaves_what_came_before_acknowledged(opened):
    _, client = opened
    good = request(4, block(30, 10)).SerializeToString()
    stream = client.channel.stream_stream("/paceline.v1.ReplayService/Append")(iter([good, b"\xff"]), timeout=SECONDS)
    assert pb.AppendResponse.FromString(next(stream)).sequence == 4
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert client.describe().inserted_row_count == 40
