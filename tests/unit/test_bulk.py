import random

import numpy as np
import pytest
from google.protobuf.internal import encoder, wire_format
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidInputError
from paceline.rpc.bulk import Bulk, BulkFormat
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import rows_pb2

APPEND = BulkFormat(pb.AppendRequest, "rows")
SAMPLE = BulkFormat(pb.SampleResponse, "rows")

headers = st.builds(
    rows_pb2.BlockHeader,
    collector_index=st.integers(-(2**31), 2**31 - 1),
    collector_incarnation=st.integers(0, 2**31 - 1),
    sequence=st.integers(-(2**63), 2**63 - 1),
    row_count=st.integers(0, 2**31 - 1),
    row_spec_digest=st.binary(max_size=20),
    checksum=st.integers(0, 2**32 - 1),
)
heads = st.builds(pb.AppendRequest, run_id=st.text(max_size=20), table=st.text(max_size=20), header=headers)


def plain(head: pb.AppendRequest, rows: bytes) -> pb.AppendRequest:
    message = pb.AppendRequest()
    message.CopyFrom(head)
    message.rows = rows
    return message


def fields_of(message: pb.AppendRequest) -> list[bytes]:
    """The message's fields as separate wire bytes."""
    parts = []
    for descriptor, value in message.ListFields():
        one = pb.AppendRequest()
        if descriptor.message_type:
            getattr(one, descriptor.name).CopyFrom(value)
        else:
            setattr(one, descriptor.name, value)
        parts.append(one.SerializeToString())
    return parts


@given(heads, st.binary(max_size=300))
def test_a_plain_client_reads_what_bulk_wrote(head, rows):
    assert pb.AppendRequest.FromString(APPEND.serialize(Bulk(head, rows))) == plain(head, rows)


@given(heads, st.binary(max_size=300))
def test_bulk_reads_what_a_plain_client_wrote(head, rows):
    bulk = APPEND.deserialize(plain(head, rows).SerializeToString())
    assert bulk.head == head
    assert bytes(bulk.payload) == rows


@given(heads, st.binary(min_size=1, max_size=50), st.randoms(use_true_random=False))
def test_the_order_of_fields_does_not_matter(head, rows, shuffler):
    parts = fields_of(plain(head, rows))
    shuffler.shuffle(parts)
    bulk = APPEND.deserialize(b"".join(parts))
    assert bulk.head == head
    assert bytes(bulk.payload) == rows


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 1 << 21])
def test_payloads_of_every_length_of_varint_survive(size):
    payload = random.Random(size).randbytes(size)
    bulk = SAMPLE.deserialize(SAMPLE.serialize(Bulk(pb.SampleResponse(row_count=3), payload)))
    assert bulk.head.row_count == 3
    assert bytes(bulk.payload) == payload


def test_a_matrix_of_rows_travels_as_its_bytes_and_is_not_copied_on_arrival():
    matrix = np.arange(64, dtype=np.uint8).reshape(4, 16)
    data = APPEND.serialize(Bulk(pb.AppendRequest(table="transitions"), matrix))
    payload = APPEND.deserialize(data).payload
    assert bytes(payload) == matrix.tobytes()
    assert payload.obj is data


def test_fields_of_a_later_version_are_passed_over():
    tag = encoder.TagBytes(900, wire_format.WIRETYPE_LENGTH_DELIMITED)
    fixed = encoder.TagBytes(901, wire_format.WIRETYPE_FIXED64) + bytes(range(8)) + encoder.TagBytes(902, 5) + bytes(4)
    data = tag + b"\x03new" + fixed + plain(pb.AppendRequest(table="t"), b"rows").SerializeToString()
    bulk = APPEND.deserialize(data)
    assert bulk.head.table == "t"
    assert bytes(bulk.payload) == b"rows"


def test_of_a_payload_that_comes_twice_the_last_counts_as_in_protobuf():
    data = APPEND.serialize(Bulk(pb.AppendRequest(), b"first")) + APPEND.serialize(Bulk(pb.AppendRequest(), b"last"))
    assert bytes(APPEND.deserialize(data).payload) == pb.AppendRequest.FromString(data).rows == b"last"


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_an_error_of_the_callers(data):
    try:
        bulk = APPEND.deserialize(data)
    except InvalidInputError:
        return
    assert len(bulk.payload) <= len(data)


def test_thousands_of_damaged_messages_are_read_as_protobuf_reads_them_or_refused():
    whole = plain(
        pb.AppendRequest(run_id="run", table="t", header=rows_pb2.BlockHeader(sequence=300, row_count=2)), b"r" * 40
    ).SerializeToString()
    chance = random.Random(5)
    refused = 0
    for _ in range(5_000):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        data = bytes(damaged[: chance.randint(0, len(damaged))])
        try:
            bulk = APPEND.deserialize(data)
        except InvalidInputError:
            refused += 1
            continue
        # What it accepts is what it says: re-made, a plain client reads the very same.
        again = pb.AppendRequest.FromString(APPEND.serialize(bulk))
        assert again == plain(bulk.head, bytes(bulk.payload))
    assert refused > 1_000


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 11,
        b"\x7a\x81" + b"\x80" * 10 + b"\x00a",
        b"\x7a\xff\xff\xff\xff\x0f",
        b"\x7a\x05abc",
        b"\x0b",
        b"\x09\x01",
        b"\x80",
        b"\x7a",
    ],
    ids=["endless", "overlong", "4 GiB claimed", "cut payload", "group", "cut fixed64", "cut tag", "no length"],
)
def test_a_message_that_is_cut_or_claims_too_much_is_refused(data):
    with pytest.raises(InvalidInputError, match=f"{len(data)} bytes are not a paceline.v1.AppendRequest"):
        APPEND.deserialize(data)
