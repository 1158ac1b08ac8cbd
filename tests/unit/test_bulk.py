import random

import numpy as np
import pytest
from google.protobuf.internal import encoder, wire_format
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline.errors import InvalidInputError
from paceline.replay.service import MAX_BLOCKS_PER_APPEND
from paceline.rpc.bulk import (
    FOLLOW_RESPONSE,
    SAMPLE_RESPONSE,
    UPDATE_PRIORITIES_REQUEST,
    Bulk,
    BulkFormat,
    _read_varint,
)
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import rows_pb2

APPEND = BulkFormat(pb.AppendRequest, "rows")
SAMPLE = SAMPLE_RESPONSE

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


@given(heads, st.lists(st.binary(max_size=100), max_size=5))
def test_several_payloads_are_one_on_the_wire(head, pieces):
    first, *further = pieces or [b""]
    data = APPEND.serialize(Bulk(head, first, further=[memoryview(piece) for piece in further]))
    assert data == APPEND.serialize(Bulk(head, b"".join(pieces)))


def test_the_rows_of_as_many_blocks_as_a_message_may_have_are_not_copied_on_arrival():
    header = rows_pb2.BlockHeader(sequence=1, row_count=2)
    head = pb.AppendRequest(
        run_id="run", table="t", header=header, further_headers=[header] * (MAX_BLOCKS_PER_APPEND - 1)
    )
    data = APPEND.serialize(Bulk(head, b"rows"))
    bulk = APPEND.deserialize(data)
    assert (bulk.head, bytes(bulk.payload)) == (head, b"rows")
    assert bulk.payload.obj is data


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


details = st.integers(0, 40).flatmap(
    lambda n: st.fixed_dictionaries(
        {
            "keys": arrays(np.int64, n, elements=st.integers(0, 2**63 - 1)),
            "probabilities": arrays(np.float32, n, elements=st.floats(0, 1, width=32)),
            "times_sampled": arrays(np.uint32, n),
            "stored_at": arrays(np.float64, n, elements=st.floats(0, 4e9)),
        }
    )
)


@given(details, st.binary(max_size=100))
def test_a_plain_client_reads_the_arrays_that_bulk_wrote(columns, rows):
    message = pb.SampleResponse.FromString(SAMPLE.serialize(Bulk(pb.SampleResponse(row_count=7), rows, columns)))
    assert (message.row_count, message.rows) == (7, rows)
    for name, values in columns.items():
        assert list(getattr(message, name)) == values.tolist()


@given(details, st.binary(max_size=100))
def test_bulk_reads_the_arrays_that_a_plain_client_wrote_as_views(columns, rows):
    message = pb.SampleResponse(row_count=7, rows=rows, **{name: values.tolist() for name, values in columns.items()})
    data = message.SerializeToString()
    bulk = SAMPLE.deserialize(data)
    assert bulk.head == pb.SampleResponse(row_count=7)
    assert bytes(bulk.payload) == rows
    for name, values in columns.items():
        assert bulk.arrays[name].tolist() == values.tolist()
        assert not len(values) or np.shares_memory(bulk.arrays[name], np.frombuffer(data, np.uint8))


def test_a_format_may_have_arrays_and_no_payload():
    keys, priorities = np.arange(5), np.linspace(0, 1, 5, dtype=np.float32)
    data = UPDATE_PRIORITIES_REQUEST.serialize(
        Bulk(pb.UpdatePrioritiesRequest(table="t"), arrays={"keys": keys, "priorities": priorities})
    )
    message = pb.UpdatePrioritiesRequest.FromString(data)
    assert (message.table, list(message.keys), list(message.priorities)) == ("t", keys.tolist(), priorities.tolist())
    bulk = UPDATE_PRIORITIES_REQUEST.deserialize(data)
    assert bulk.arrays["keys"].tolist() == keys.tolist()
    assert bulk.arrays["priorities"].tolist() == priorities.tolist()


def test_arrays_that_a_message_lacks_are_empty_and_of_their_type():
    bulk = FOLLOW_RESPONSE.deserialize(pb.FollowResponse(first_row=3).SerializeToString())
    assert (bulk.arrays["stored_at"].tolist(), bulk.arrays["stored_at"].dtype) == ([], np.float64)
    assert (bulk.head.first_row, bytes(bulk.payload)) == (3, b"")


def test_arrays_whose_items_come_one_by_one_or_in_pieces_are_read_as_protobuf_reads_them():
    one_by_one = b"".join(b"\x19" + bytes([n]) + bytes(7) for n in range(3))
    pieces = b"\x1a\x10" + bytes([7]) + bytes(7) + bytes([8]) + bytes(7) + b"\x1a\x08" + bytes([9]) + bytes(7)
    for data in (one_by_one, pieces, one_by_one + pieces, pieces + one_by_one):
        expected = list(pb.UpdatePrioritiesRequest.FromString(data).keys)
        assert UPDATE_PRIORITIES_REQUEST.deserialize(data).arrays["keys"].tolist() == expected
        assert expected


def test_a_message_of_very_many_pieces_is_read_by_protobuf_itself(monkeypatch):
    pieces = b"\x1a\x08" + bytes(8)
    data = plain(pb.AppendRequest(table="t"), b"rows").SerializeToString() + 5000 * b"\x98\x38\x01"
    bulk = APPEND.deserialize(data)
    assert (bulk.head.table, bytes(bulk.payload)) == ("t", b"rows")
    read = []
    monkeypatch.setattr(
        "paceline.rpc.bulk._read_varint", lambda data, at, real=_read_varint: read.append(at) or real(data, at)
    )
    assert len(UPDATE_PRIORITIES_REQUEST.deserialize(5000 * pieces).arrays["keys"]) == 5000
    assert len(read) < 200


@pytest.mark.parametrize("size", [1, 7, 9, 12])
def test_an_array_that_ends_within_an_item_is_refused(size):
    with pytest.raises(InvalidInputError, match=r"are not a paceline\.v1\.UpdatePrioritiesRequest"):
        UPDATE_PRIORITIES_REQUEST.deserialize(b"\x1a" + bytes([size]) + bytes(size))


def test_thousands_of_damaged_messages_with_arrays_are_read_as_protobuf_reads_them_or_refused():
    whole = pb.SampleResponse(
        row_count=4, keys=range(4), probabilities=[0.5] * 4, times_sampled=[1] * 4, stored_at=[2.0] * 4, rows=b"r" * 32
    ).SerializeToString()
    chance, refused = random.Random(6), 0
    for _ in range(5_000):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        data = bytes(damaged[: chance.randint(0, len(damaged))])
        try:
            bulk = SAMPLE.deserialize(data)
        except InvalidInputError:
            refused += 1
            continue
        message = pb.SampleResponse.FromString(data)
        assert bytes(bulk.payload) == message.rows
        for name, values in bulk.arrays.items():
            assert values.tobytes() == np.asarray(getattr(message, name), values.dtype).tobytes()
    assert refused > 1_000


@pytest.mark.parametrize("guess", [lambda rest: rest, lambda rest: 0, lambda rest: rest + 3, lambda rest: rest - 1])
@pytest.mark.parametrize("size", [0, 1, 300, 1 << 20])
def test_a_message_that_is_written_in_place_is_as_one_that_is_serialised(size, guess):
    payload = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    head, keys = pb.SampleResponse(row_count=7, inserted_row_count=1 << 40), np.arange(5, dtype=np.uint64)
    rest = SAMPLE.serialize(Bulk(head, arrays={"keys": keys}))
    draft = SAMPLE.draft(size, guess(len(rest)))
    draft.payload[:] = payload
    data = draft.finish(rest)
    expected = pb.SampleResponse(row_count=7, inserted_row_count=1 << 40, keys=keys.tolist(), rows=payload.tobytes())
    assert pb.SampleResponse.FromString(data) == expected
    bulk = SAMPLE.deserialize(data)
    assert (bulk.head, bytes(bulk.payload), bulk.arrays["keys"].tolist()) == (head, payload.tobytes(), keys.tolist())


def test_what_a_draft_was_written_through_outlives_it():
    payload = SAMPLE.draft(1 << 20, 0).payload
    others = [bytes(1 << 20) for _ in range(4)]  # they would take its memory
    payload[:] = 1
    assert not any(map(any, others))
