"""The compact form: every block comes back to the byte, and no payload reaches outside of what it holds."""

import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import BlockError, RowSpecError
from paceline.rows import (
    MAX_BLOCK_BYTES,
    NUMPY_TYPES,
    Block,
    Column,
    CompactForm,
    RowSpec,
    block_from_wire,
    checksum_of,
    transition_spec,
    unroll_spec,
)

MEMORY_GROWTH_BYTES = 50 << 20
OBSERVATION, ACTION = Column("observation", "float32", (48,)), Column("action", "float32", (12,))
SPEC = transition_spec(OBSERVATION, ACTION)
FORM = CompactForm(SPEC)


@dataclass(frozen=True)
class Claims:
    row_count: int
    checksum: int
    compact_stride: int
    row_spec_digest: bytes = SPEC.digest


def claims_of(payload, row_count, stride, **more):
    return Claims(row_count, checksum_of(payload), stride, **more)


@st.composite
def specs(draw):
    """Columns, some of them with a next_ one like it or unlike it, in any order."""
    columns = []
    for number in range(draw(st.integers(1, 4))):
        dtype, shape = draw(st.sampled_from(sorted(NUMPY_TYPES))), tuple(draw(st.lists(st.integers(1, 9), max_size=2)))
        columns.append(Column(f"c{number}", dtype, shape))
        kind = draw(st.sampled_from(["pair", "pair", "pair", "none", "other dtype", "other shape", "chain"]))
        if kind in ("pair", "chain"):
            columns.append(Column(f"next_c{number}", dtype, shape))
        if kind == "chain":
            columns.append(Column(f"next_next_c{number}", dtype, shape))
        if kind == "other dtype":
            columns.append(Column(f"next_c{number}", "int64" if dtype != "int64" else "bool", shape))
        if kind == "other shape":
            columns.append(Column(f"next_c{number}", dtype, (*shape, 2)))
    return RowSpec(tuple(draw(st.permutations(columns))))


@st.composite
def blocks(draw):
    """A block of `stride` interleaved chains, some of whose rows end; bytes of all kinds, and a stride to encode by."""
    spec, row_count, stride = draw(specs()), draw(st.integers(1, 40)), draw(st.integers(1, 45))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    block = Block.empty(spec, row_count)
    few = draw(st.booleans())  # few bit patterns: rows are alike by chance
    for column in spec.columns:
        size = (row_count, column.nbytes)
        values = random.integers(0, 2, size, np.uint8) if few else random.integers(0, 256, size, np.uint8)
        if column.dtype == "bool":
            values &= 1
        block.data[:, spec.offsets[column.name] : spec.offsets[column.name] + column.nbytes] = values
    ends = random.random(row_count) < draw(st.sampled_from([0.0, 0.1, 0.5]))
    for column in spec.columns:
        following = f"next_{column.name}"
        if stride < row_count and following in spec and spec[following].nbytes == column.nbytes:
            chained = ~ends[:-stride]
            view = block.data[:, spec.offsets[following] : spec.offsets[following] + column.nbytes]
            later = block.data[stride:, spec.offsets[column.name] : spec.offsets[column.name] + column.nbytes]
            view[:-stride][chained] = later[chained]
    return block, draw(st.sampled_from([stride, stride, stride, draw(st.integers(1, 45))]))


@settings(max_examples=400, deadline=None)
@given(blocks())
def test_every_block_comes_back_to_the_byte(drawn):
    block, stride = drawn
    form = CompactForm(block.spec)
    payload = form.encode(block, stride)
    if payload is None:
        return
    back = form.decode(bytes(payload), block.row_count, stride)
    assert back.data.tobytes() == block.data.tobytes()
    assert payload.nbytes < block.data.nbytes


def chained(row_count=64, stride=4, spec=SPEC, ended=()):
    """Interleaved chains of transitions; the rows in `ended` end theirs."""
    random = np.random.default_rng(1)
    block = Block.empty(spec, row_count)
    columns = block.columns
    columns["observation"] = random.standard_normal(columns["observation"].shape)
    columns["next_observation"] = random.standard_normal(columns["observation"].shape)
    going = np.setdiff1d(np.arange(row_count - stride), ended)
    columns["next_observation"][going] = columns["observation"][going + stride]
    columns["episode"] = np.arange(row_count)
    return block


def test_a_row_that_goes_on_is_sent_without_its_next_columns():
    block = chained(row_count=64, stride=4, ended=(7,))
    payload = FORM.encode(block, 4)
    rest, following = SPEC.row_bytes - 192, 192
    assert payload.nbytes == 64 * rest + 8 + (4 + 1) * following
    bits = np.unpackbits(payload[64 * rest : 64 * rest + 8], bitorder="little")
    assert np.flatnonzero(bits).tolist() == [7, 60, 61, 62, 63]


def test_a_nan_and_the_sign_of_a_zero_come_back_as_they_were():
    block = chained()
    observation, following = block.columns["observation"], block.columns["next_observation"]
    odd = np.array([0x7FC0DEAD, 0xFFC00001, 0x80000000, 0x7F800000], np.uint32).view(np.float32)
    observation[8, :4] = following[4, :4] = odd  # row 4 goes on in row 8
    observation[9, :2], following[5, :2] = 0.0, (0.0, -0.0)  # equal as numbers of 4 and of 8 bytes, not as bytes
    back = FORM.decode(FORM.encode(block, 4), 64, 4)
    assert back.data.tobytes() == block.data.tobytes()


def test_a_later_row_that_is_alike_by_chance_stands_in_too():
    block = chained(ended=(7,))
    block.columns["next_observation"][7] = block.columns["observation"][11]
    assert FORM.encode(block, 4).nbytes == FORM.encode(chained(), 4).nbytes


def test_several_next_columns_of_a_row_are_kept_together():
    spec = RowSpec(
        (
            Column("pixels", "uint8", (5, 3)),
            Column("state", "float64", (9,)),
            Column("next_state", "float64", (9,)),
            Column("flag", "bool"),
            Column("next_pixels", "uint8", (5, 3)),
        )
    )
    block = Block.empty(spec, 16)
    random = np.random.default_rng(2)
    for name in ("pixels", "state"):
        block.columns[name] = random.integers(0, 200, block.columns[name].shape)
        block.columns[f"next_{name}"][:-1] = block.columns[name][1:]
    form = CompactForm(spec)
    small = form.encode(block, 1)
    block.columns["next_pixels"][5, 4, 2] += 1
    assert form.encode(block, 1).nbytes == small.nbytes + 88  # 72 of a state and 15 of pixels, padded
    back = form.decode(form.encode(block, 1), 16, 1)
    assert back.data.tobytes() == block.data.tobytes()


@pytest.mark.parametrize(
    "columns",
    [
        (Column("a", "float32", (8,)), Column("next_b", "float32", (8,))),
        (Column("a", "float32", (8,)), Column("next_a", "float64", (8,))),
        (Column("a", "float32", (8,)), Column("next_a", "float32", (2, 4))),
        (Column("next_a", "float32", (8,)),),
    ],
)
def test_rows_without_a_pair_have_the_plain_form_only(columns):
    form = CompactForm(RowSpec(columns))
    assert form.pair_bytes == 0
    assert form.encode(Block.empty(RowSpec(columns), 8), 1) is None
    with pytest.raises(BlockError, match="a column X and a column next_X"):
        form.decode(bytes(1000), 8, 1)
    assert CompactForm(unroll_spec(OBSERVATION, ACTION, 5)).pair_bytes == 0


@pytest.mark.parametrize(("row_count", "stride"), [(64, 64), (64, 200), (64, 60), (1, 1)])
def test_a_block_that_would_hardly_be_smaller_is_not_encoded(row_count, stride):
    assert FORM.encode(chained(row_count, min(stride, row_count)), stride) is None


def test_a_block_is_read_in_the_form_that_its_header_names():
    block = chained()
    compact, plain = bytes(FORM.encode(block, 4)), block.data.tobytes()
    for payload, stride in ((compact, 4), (plain, 0)):
        read = block_from_wire(SPEC, claims_of(payload, 64, stride), memoryview(payload))
        assert read.data.tobytes() == plain
    view = bytearray(plain)
    assert np.shares_memory(block_from_wire(SPEC, claims_of(plain, 64, 0), view).data, np.frombuffer(view, np.uint8))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_single_flipped_bit_is_noticed_in_either_form(data):
    block = chained()
    stride = data.draw(st.sampled_from([0, 4]))
    payload = bytearray(FORM.encode(block, 4) if stride else block.data.tobytes())
    claims = claims_of(payload, 64, stride)
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BlockError, match="damaged"):
        block_from_wire(SPEC, claims, bytes(payload))


def test_a_block_of_other_rows_is_refused_in_either_form():
    payload = bytes(FORM.encode(chained(), 4))
    for stride in (0, 4):
        with pytest.raises(RowSpecError, match="row spec digest"):
            block_from_wire(SPEC, claims_of(payload, 64, stride, row_spec_digest=b"x" * 16), payload)


@pytest.mark.parametrize(
    ("row_count", "stride", "named"),
    [
        (0, 4, "says 0 rows"),
        (-1, 4, "says -1 rows"),
        (64, -1, "stride -1"),
        (10**12, 4, "1000000000000 rows"),
        (MAX_BLOCK_BYTES // SPEC.row_bytes + 1, 4, "at most"),
        (65, 4, "65 rows"),
        (63, 4, "63 rows"),
        (64, 5, "not all"),
        (64, 2**31 - 1, "not all"),
        (4096, 4, "at least"),
    ],
)
def test_claims_that_do_not_fit_the_payload_are_refused_before_anything_is_allocated(row_count, stride, named):
    payload = bytes(FORM.encode(chained(), 4))
    tracemalloc.start()
    try:
        with pytest.raises(BlockError, match=named):
            block_from_wire(SPEC, claims_of(payload, row_count, stride), payload)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("row", [20, 63])
def test_a_mark_on_a_row_that_does_not_exist_is_refused_though_its_columns_are_there(row):
    payload = bytearray(FORM.encode(chained(row_count=20, stride=2), 2)) + bytes(192)
    payload[20 * (SPEC.row_bytes - 192) + row // 8] |= 1 << row % 8
    with pytest.raises(BlockError, match="rows that do not exist"):
        block_from_wire(SPEC, claims_of(payload, 20, 2), payload)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_payload_reads_outside_of_itself_or_gives_other_than_its_own_bytes(data):
    """Truncated, grown, overwritten or invented payloads are refused, or are blocks made of their bytes alone."""
    block = chained(row_count=20, stride=2, ended=(3, 4))
    payload = bytearray(FORM.encode(block, 2))
    kind = data.draw(st.sampled_from(["cut", "grow", "bits", "bytes", "invented"]))
    if kind == "cut":
        payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
    if kind == "grow":
        payload += data.draw(st.binary(min_size=1, max_size=400))
    if kind == "bits":
        at = 20 * (SPEC.row_bytes - 192) + data.draw(st.integers(0, 7))
        payload[at] = data.draw(st.integers(0, 255))
    if kind == "bytes":
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    if kind == "invented":
        payload = bytearray(data.draw(st.binary(max_size=3000)))
    row_count, stride = data.draw(st.sampled_from([1, 7, 20, 21, 64])), data.draw(st.sampled_from([1, 2, 3, 20, 99]))
    guarded = bytes([255]) * 4096 + bytes(payload) + bytes([255]) * 4096
    window = memoryview(guarded)[4096 : 4096 + len(payload)]
    try:
        read = block_from_wire(SPEC, claims_of(payload, row_count, stride), window)
    except BlockError:
        return
    assert read.data.shape == (row_count, SPEC.row_bytes)
    # Whatever it is, it is what a slow reader of the format makes of it.
    expected = slowly_decoded(bytes(payload), row_count, stride)
    assert all(read.columns[name].tobytes() == expected[name].tobytes() for name in SPEC.offsets)


def slowly_decoded(payload, row_count, stride):
    """The format as rows.proto describes it, one row at a time."""
    rest_spec = RowSpec(tuple(column for column in SPEC.columns if column.name != "next_observation"))
    bits_at = row_count * rest_spec.row_bytes
    following_at = bits_at + -(-row_count // 64) * 8
    rest = np.frombuffer(payload[:bits_at], rest_spec.dtype)
    rows = np.zeros(row_count, SPEC.dtype)
    for name in rest_spec.offsets:
        rows[name] = rest[name]
    for row in range(row_count):
        if payload[bits_at + row // 8] >> row % 8 & 1:
            rows[row]["next_observation"] = np.frombuffer(payload[following_at : following_at + 192], np.float32)
            following_at += 192
        else:
            rows[row]["next_observation"] = rest[row + stride]["observation"]
    assert following_at == len(payload)
    return rows
