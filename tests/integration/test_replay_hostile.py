"""No peer is trusted: malformed messages by the thousand are answered, harm nobody, and cost bounded memory."""

from __future__ import annotations

import random
from collections.abc import Iterator

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.replay_harness import (
    RUN,
    SECONDS,
    SPEC,
    TABLE,
    Client,
    block,
    make_config,
    request,
    together,
    values_of,
    wait_until,
)
from integration.test_replay_wire import memory_bytes
from paceline.rows import Column, transition_spec
from paceline.rpc.wire import row_spec_to_wire
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import rows_pb2

STREAMS = ("Append", "Sample", "Follow")
RPCS = (*STREAMS, "OpenTable", "UpdatePriorities", "DescribeTables")
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}
"""UNKNOWN and INTERNAL are missing: no input may raise what the service does not name."""

GROWTH_BYTES = 100 << 20
MUTATIONS = [500, pytest.param(2_000, marks=pytest.mark.slow)]
"""Of each RPC's valid messages."""
EXAMPLES = [75, pytest.param(300, marks=pytest.mark.slow)]
"""Of each RPC's well-formed messages."""


@pytest.fixture
def client(bundled_redis, serve) -> Client:
    config = make_config(
        bundled_redis.url,
        capacity=5_000,
        table={"sampler": "prioritised"},
        limiter={"min_rows": 1, "deadline_seconds": 0.01},
    )
    _, client = serve(config)
    client.open()
    client.append_rows(3)
    return client


def call(client: Client, rpc: str, messages: list[bytes]) -> grpc.StatusCode:
    """The status of a call with these very bytes; of what it answers a few messages are read."""
    path = f"/paceline.v1.ReplayService/{rpc}"
    # A follower that makes sense is served for as long as it likes: what went wrong shows at once, or never.
    seconds, reads = (0.1, 1 if len(messages) == 1 else 3) if rpc == "Follow" else (SECONDS, 4)
    try:
        if rpc not in STREAMS:
            client.channel.unary_unary(path)(messages[0], timeout=SECONDS)
            return grpc.StatusCode.OK
        stream = client.channel.stream_stream(path)(iter(messages), timeout=seconds)
        for _, _ in zip(range(reads), stream, strict=False):
            pass
        stream.cancel()
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()


def valid_messages() -> dict[str, list[bytes]]:
    spec = transition_spec(Column("o", "float32", (8,)), Column("a", "float32", (1,)))
    compact = request(5, block(30, 10))
    compact.header.compact_stride = 1
    messages = {
        "Append": [
            request(5, block(30, 10)),
            compact,
            request(6, block(0, 1), collector=255, incarnation=9),
            together(request(5, block(30, 10)), request(6, block(40, 2)), request(7, block(42, 3), collector=254)),
        ],
        "Sample": [
            pb.SampleRequest(run_id=RUN, table=TABLE, batch_size=8, batch_count=2, seed=3, row_details=True),
            pb.SampleRequest(run_id=RUN, table=TABLE, batch_size=200, batch_count=1, policy_version=9),
        ],
        "Follow": [
            pb.FollowRequest(run_id=RUN, table=TABLE, from_row=3, wanted_before=20, last_stored_at=1.7e9),
            pb.FollowRequest(run_id=RUN, table=TABLE, sampled_row_count=7, consumed_row=0, limiter_wait_seconds=0.5),
        ],
        "OpenTable": [pb.OpenTableRequest(run_id=RUN, table=TABLE, row_spec=row_spec_to_wire(s)) for s in (SPEC, spec)],
        "UpdatePriorities": [
            pb.UpdatePrioritiesRequest(run_id=RUN, table=TABLE, keys=range(20), priorities=[0.5] * 20),
            pb.UpdatePrioritiesRequest(run_id=RUN, table=TABLE, keys=[2**63, 1], priorities=[3.0, 0.0]),
        ],
        "DescribeTables": [pb.DescribeTablesRequest(run_id=RUN)],
    }
    return {rpc: [message.SerializeToString() for message in those] for rpc, those in messages.items()}


def mutated(chance: random.Random, whole: bytes) -> bytes:
    """A valid message with bits flipped, bytes put in, taken out or repeated, or its end cut off."""
    data = bytearray(whole)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0 if data:
                data[at - 1] ^= 1 << chance.randrange(8)
            case 1:
                data[at:at] = chance.randbytes(chance.randint(1, 9))
            case 2:
                del data[at : at + chance.randint(1, 9)]
            case 3:
                data[at:at] = data[at : at + 30]
            case _:
                del data[at:]
    return bytes(data)


def require_unharmed(client: Client) -> None:
    """The service serves, and what it serves is what was stored."""
    described = client.describe()
    values = {value for answer in client.follow(described.row_count) for value in values_of(answer)}
    assert set(range(30)) <= values
    assert len(client.sample(16)) == 1
    (answer,) = client.append(request(2**53 - 1, block(0, 1), collector=7, incarnation=2**31 - 1))
    assert (answer.stored_row_count, answer.duplicate) == (1, False)


@pytest.mark.parametrize("count", MUTATIONS)
@pytest.mark.parametrize("rpc", RPCS)
def test_valid_messages_that_were_mutated_are_answered_and_harm_nobody(client, rpc, count):
    chance, messages = random.Random(RPCS.index(rpc)), valid_messages()[rpc]
    before = memory_bytes()
    seen = set()
    for _ in range(count):
        kinds = [mutated(chance, chance.choice(messages))]
        if rpc in STREAMS and chance.random() < 0.1:  # what comes later in a stream is no safer
            kinds.insert(0, chance.choice(messages))
        seen.add(call(client, rpc, kinds))
    assert seen <= EXPECTED, seen - EXPECTED
    assert grpc.StatusCode.INVALID_ARGUMENT in seen
    assert memory_bytes() - before < GROWTH_BYTES
    require_unharmed(client)


@pytest.mark.parametrize("rpc", RPCS)
def test_random_bytes_are_answered_and_harm_nobody(client, rpc):
    chance = random.Random(1)
    before = memory_bytes()
    for _ in range(500):
        data = chance.randbytes(chance.choice((0, 1, 2, 10, 100, 5_000)))
        assert call(client, rpc, [data]) in EXPECTED, data
    assert memory_bytes() - before < GROWTH_BYTES
    require_unharmed(client)


integers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 40))
small = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-3, 40))
names = st.sampled_from([RUN, TABLE, "", "x" * 1000, "\x00", "transitions:spec"])


def message_of(kind: type, **fields: st.SearchStrategy) -> st.SearchStrategy[bytes]:
    run_ids, tables = st.sampled_from([RUN] * 9 + ["other"]), st.sampled_from([TABLE] * 9 + ["", "x" * 1000])
    made = st.builds(kind, run_id=run_ids, table=tables, **fields)
    return made.map(lambda message: message.SerializeToString())


headers = st.builds(
    rows_pb2.BlockHeader,
    collector_index=small,
    collector_incarnation=small,
    sequence=integers,
    row_count=small,
    row_spec_digest=st.sampled_from([SPEC.digest, b"", b"\xff" * 16]),
    checksum=st.integers(0, 2**32 - 1),
    compact_stride=small,
    first_row=integers,
    payload_byte_count=small,
)
columns = st.builds(
    rows_pb2.Column,
    name=st.sampled_from(["x", "next_x", "policy_version", "X", "", "a" * 65]),
    data_type=st.integers(0, 12),
    shape=st.lists(integers, max_size=10),
)
MESSAGES = {
    "Append": message_of(
        pb.AppendRequest,
        header=headers,
        further_headers=st.lists(headers, max_size=3),
        rows=st.binary(max_size=400),
    ),
    "Sample": message_of(
        pb.SampleRequest, batch_size=small, batch_count=small, row_details=st.booleans(), policy_version=integers
    ),
    "Follow": message_of(
        pb.FollowRequest,
        **{name: st.none() | integers for name in ("from_row", "sampled_row_count", "consumed_row", "wanted_before")},
        received_end_row=st.none() | integers,
        **{name: st.none() | st.floats() for name in ("last_stored_at", "limiter_wait_seconds")},
    ),
    "OpenTable": message_of(
        pb.OpenTableRequest, row_spec=st.builds(rows_pb2.RowSpec, columns=st.lists(columns, max_size=4))
    ),
    "UpdatePriorities": message_of(
        pb.UpdatePrioritiesRequest,
        keys=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 40), max_size=20),
        priorities=st.lists(st.floats(width=32), max_size=20),
    ),
    "DescribeTables": st.builds(pb.DescribeTablesRequest, run_id=names).map(lambda m: m.SerializeToString()),
}


@pytest.mark.parametrize("count", EXAMPLES)
@pytest.mark.parametrize("rpc", RPCS)
def test_well_formed_messages_with_senseless_values_are_answered_and_harm_nobody(client, rpc, count):
    before = memory_bytes()

    @settings(max_examples=count, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(MESSAGES[rpc], min_size=1, max_size=3))
    def check(messages: list[bytes]) -> None:
        assert call(client, rpc, messages) in EXPECTED

    check()
    assert memory_bytes() - before < GROWTH_BYTES
    require_unharmed(client)


def test_endless_streams_of_requests_cost_bounded_memory(client):
    """A peer that never stops asking, and never reads, fills no queue of ours."""
    count = [0]

    def endless(message: bytes) -> Iterator[bytes]:
        while True:
            count[0] += 1
            yield message

    messages = valid_messages()
    before = memory_bytes()
    streams = []
    for rpc in ("Sample", "Follow", "Append"):
        path = f"/paceline.v1.ReplayService/{rpc}"
        streams.append(client.channel.stream_stream(path)(endless(messages[rpc][0]), timeout=SECONDS))
    wait_until(lambda: count[0] > 3_000, "many requests were sent")
    assert memory_bytes() - before < GROWTH_BYTES
    for stream in streams:
        stream.cancel()
    require_unharmed(client)
