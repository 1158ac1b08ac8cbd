import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidInputError, RowSpecError
from paceline.identity import PolicyIdentity
from paceline.rows import MAX_COLUMN_COUNT, NUMPY_TYPES, Column, RowSpec
from paceline.rpc.bulk import APPEND_REQUEST, Bulk
from paceline.rpc.wire import (
    SentBlock,
    blocks_from_wire,
    blocks_to_wire,
    identity_from_wire,
    identity_to_wire,
    row_spec_from_wire,
    row_spec_to_wire,
    seconds_of,
    timestamp,
)
from paceline.v1 import parameters_pb2, replay_pb2, rows_pb2


def test_the_proto_names_exactly_the_dtypes_that_rows_have():
    named = {name.removeprefix("DATA_TYPE_").lower() for name, _ in rows_pb2.DataType.items()} - {"unspecified"}
    assert named == set(NUMPY_TYPES)


def test_a_row_spec_survives_the_wire_with_its_digest():
    spec = RowSpec(tuple(Column(f"column_{dtype}", dtype, (2, 3)[: i % 3]) for i, dtype in enumerate(NUMPY_TYPES)))
    message = rows_pb2.RowSpec.FromString(row_spec_to_wire(spec).SerializeToString())
    assert row_spec_from_wire(message) == spec
    assert row_spec_from_wire(message).digest == spec.digest


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ([], "0 columns"),
        ([rows_pb2.Column(name="a", data_type=99)], "'99'"),
        ([rows_pb2.Column(name="a")], "'0'"),
        ([rows_pb2.Column(name="A", data_type=1)], "'A'"),
        ([rows_pb2.Column(name="a", data_type=1, shape=[10**12])], "bytes a row"),
        ([rows_pb2.Column(name="a", data_type=1, shape=[2**62, 2**62])], "bytes a row"),
        ([rows_pb2.Column(name="a", data_type=1, shape=[-1])], "(-1,)"),
        ([rows_pb2.Column(name=f"c{i}", data_type=1) for i in range(MAX_COLUMN_COUNT + 1)], "257 columns"),
    ],
)
def test_a_malformed_row_spec_from_a_peer_is_refused(columns, named):
    with pytest.raises(RowSpecError) as caught:
        row_spec_from_wire(rows_pb2.RowSpec(columns=columns))
    assert named in str(caught.value)


@given(st.integers(1, 2**31 - 1), st.integers(1, 2**63 - 1))
def test_an_identity_survives_the_wire(incarnation, version):
    identity = PolicyIdentity(incarnation, version)
    assert identity_from_wire(identity_to_wire(identity)) == identity


def test_an_identity_that_was_not_set_is_refused():
    with pytest.raises(InvalidInputError, match=">= 1"):
        identity_from_wire(parameters_pb2.PolicyIdentity())


@given(st.floats(0, 4e9))
def test_a_time_survives_the_wire_to_the_microsecond(seconds):
    stamp = timestamp(seconds)
    assert 0 <= stamp.nanos < 10**9
    assert seconds_of(stamp) == pytest.approx(seconds, abs=1e-6)


blocks = st.builds(
    SentBlock,
    st.builds(rows_pb2.BlockHeader, sequence=st.integers(1, 2**53), row_count=st.integers(1, 9)),
    st.binary(min_size=1, max_size=40),
)


@given(st.lists(blocks, min_size=1, max_size=8))
def test_blocks_survive_a_message_that_they_share(sent):
    data = APPEND_REQUEST.serialize(blocks_to_wire("run", "t", sent))
    plain = replay_pb2.AppendRequest.FromString(data)
    assert (plain.run_id, plain.table, plain.rows) == ("run", "t", b"".join(block.payload for block in sent))
    found = blocks_from_wire(APPEND_REQUEST.deserialize(data), len(sent))
    assert [SentBlock(block.header, bytes(block.payload)) for block in found] == sent


@given(blocks)
def test_a_block_that_is_alone_has_the_message_of_a_service_that_takes_no_more(block):
    message = replay_pb2.AppendRequest(run_id="run", table="t", header=block.header, rows=block.payload)
    assert APPEND_REQUEST.serialize(blocks_to_wire("run", "t", [block])) == message.SerializeToString()


@pytest.mark.parametrize(
    ("sizes", "rows", "text"),
    [
        ([4, 4], 9, "4, 4: expected 1 or more of each, and 9 together"),
        ([4, 4], 7, "and 7 together"),
        ([9], 8, "9: expected 1 or more of each, and 8 together"),
        ([9, -1], 8, "9, -1: expected 1 or more"),
        ([0, 8], 8, "0, 8: expected 1 or more"),
        ([8, 0], 8, "8, 0: expected 1 or more"),
        ([0, 0], 0, "0, 0: expected 1 or more"),
        ([2**62, -(2**62), 8], 8, "expected 1 or more"),
        ([1] * 4, 4, "a request has 4 blocks: expected at most 3"),
    ],
)
def test_headers_that_do_not_share_the_rows_out_are_refused(sizes, rows, text):
    first, *further = (rows_pb2.BlockHeader(payload_byte_count=size) for size in sizes)
    head = replay_pb2.AppendRequest(header=first, further_headers=further)
    with pytest.raises(InvalidInputError, match=text):
        blocks_from_wire(Bulk(head, bytes(rows)), 3)


@pytest.mark.parametrize("size", [0, 8])
def test_a_block_that_is_alone_need_not_say_how_many_bytes_it_has(size):
    head = replay_pb2.AppendRequest(header=rows_pb2.BlockHeader(sequence=3, payload_byte_count=size))
    (block,) = blocks_from_wire(Bulk(head, b"12345678"), 1)
    assert (block.header, bytes(block.payload)) == (rows_pb2.BlockHeader(sequence=3), b"12345678")
