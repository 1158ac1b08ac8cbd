import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import BlockError, RowSpecError
from paceline.rows import (
    FLOATING_TYPES,
    MAX_BLOCK_BYTES,
    MAX_COLUMN_COUNT,
    NUMPY_TYPES,
    Block,
    Column,
    RowSpec,
    checksum_of,
    find_non_finite,
    numpy_columns,
    torch_columns,
    transition_spec,
    unroll_spec,
)

DTYPES = sorted(NUMPY_TYPES)
SPEC = RowSpec((Column("image", "uint8", (3, 3)), Column("reward", "float32"), Column("version", "int64")))
MEMORY_GROWTH_BYTES = 50 << 20


def columns() -> st.SearchStrategy[tuple[Column, ...]]:
    shape = st.lists(st.integers(1, 4), max_size=3).map(tuple)
    name = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
    return st.lists(
        st.builds(Column, name, st.sampled_from(DTYPES), shape), min_size=1, max_size=6, unique_by=lambda c: c.name
    ).map(tuple)


def values_of(column: Column, row_count: int, seed: int) -> np.ndarray:
    """Bit patterns of all kinds; a bool is 0 or 1, as torch and numpy both demand."""
    dtype, shape = NUMPY_TYPES[column.dtype], (row_count, *column.shape)
    random = np.random.default_rng(seed)
    if column.dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    return np.frombuffer(random.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


@given(columns(), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_columns_written_to_a_block_are_read_back_bit_equal_after_bytes(columns, row_count, seed):
    spec = RowSpec(columns)
    block = Block.empty(spec, row_count)
    written = {column.name: values_of(column, row_count, seed) for column in columns}
    for name, values in written.items():
        block.columns[name] = values

    payload = bytes(block.data)
    read = Block.from_bytes(spec, payload, row_count=row_count, digest=spec.digest, checksum=block.checksum())

    for name, values in written.items():
        assert read.columns[name].tobytes() == values.tobytes()
    assert bytes(read.data) == payload


@given(columns(), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_numpy_and_torch_see_the_same_bits(columns, row_count, seed):
    spec = RowSpec(columns)
    block = Block.empty(spec, row_count)
    for column in columns:
        block.columns[column.name] = values_of(column, row_count, seed)
    views = torch_columns(spec, torch.from_numpy(block.data))
    for column in columns:
        view = views[column.name]
        assert view.dtype == getattr(torch, column.dtype)
        assert tuple(view.shape) == (row_count, *column.shape)
        packed = torch.empty(view.shape, dtype=view.dtype).copy_(view).flatten()
        assert packed.view(torch.uint8).numpy().tobytes() == block.columns[column.name].tobytes()


def test_bfloat16_numbers_survive_from_torch_through_a_block_to_torch():
    spec = RowSpec((Column("flag", "bool"), Column("weight", "bfloat16", (4,))))
    numbers = torch.tensor([[1.5, -2.0, 3.0e38, float("inf")], [0.0, -0.0, 1e-40, 7.0]], dtype=torch.bfloat16)
    block = Block.empty(spec, 2)
    block.columns["weight"] = numbers.view(torch.uint16).numpy()
    read = Block.from_bytes(spec, bytes(block.data), row_count=2, digest=spec.digest)
    back = torch_columns(spec, torch.from_numpy(read.data.copy()))["weight"]
    assert back.dtype == torch.bfloat16
    assert torch.equal(back.contiguous().view(torch.uint16), numbers.view(torch.uint16))


def test_column_views_copy_nothing():
    block = Block.empty(SPEC, 3)
    assert np.shares_memory(block.columns["reward"], block.data)
    data = torch.from_numpy(block.data)
    torch_columns(SPEC, data, ["reward"])["reward"][1] = 7.0
    assert block.columns["reward"].tolist() == [0.0, 7.0, 0.0]
    assert torch_columns(SPEC, data, ["reward"]).keys() == {"reward"}
    payload = bytearray(block.data)
    assert np.shares_memory(
        Block.from_bytes(SPEC, memoryview(payload), row_count=3, digest=SPEC.digest).data, np.frombuffer(payload, "u1")
    )


def test_offsets_are_multiples_of_four_and_of_the_element_and_rows_of_eight():
    spec = RowSpec(
        (
            Column("flag", "bool"),
            Column("half", "float16", (3,)),
            Column("time", "float64"),
            Column("pixel", "uint8", (5,)),
            Column("step", "int64"),
            Column("end", "bool"),
        )
    )
    assert spec.offsets == {"flag": 0, "half": 4, "time": 16, "pixel": 24, "step": 32, "end": 40}
    assert spec.row_bytes == 48


@given(columns())
def test_columns_never_overlap_and_lie_within_the_row(columns):
    spec = RowSpec(columns)
    end = 0
    for column in columns:
        offset = spec.offsets[column.name]
        assert offset >= end
        assert offset % max(4, NUMPY_TYPES[column.dtype].itemsize) == 0
        end = offset + column.nbytes
    assert end <= spec.row_bytes
    assert spec.row_bytes % 8 == 0
    assert spec.dtype.itemsize == spec.row_bytes


def test_the_digest_changes_with_each_part_of_the_layout():
    base = (Column("a", "float32", (2,)), Column("b", "int32"))
    others = [
        (Column("c", "float32", (2,)), base[1]),
        (Column("a", "int32", (2,)), base[1]),
        (Column("a", "float32", (3,)), base[1]),
        (Column("a", "float32", (2, 1)), base[1]),
        (Column("a", "float32", (2,)), Column("b", "int32", (1,))),
        (base[1], base[0]),
        base[:1],
    ]
    digests = {RowSpec(columns).digest for columns in (base, *others)}
    assert len(digests) == 1 + len(others)
    assert RowSpec(base).digest == RowSpec(tuple(base)).digest
    assert len(RowSpec(base).digest) == 16


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Column("Reward", "float32"), "'Reward'"),
        (lambda: Column("", "float32"), "''"),
        (lambda: Column("a" * 65, "float32"), "64 characters"),
        (lambda: Column("a", "complex64"), "complex64"),
        (lambda: Column("a", "object"), "object"),
        (lambda: Column("a", "float32", (0,)), "(0,)"),
        (lambda: Column("a", "float32", (-3,)), "(-3,)"),
        (lambda: Column("a", "float32", (1,) * 9), "at most 8 sizes"),
        (lambda: Column("a", "float32", (10**12,)), "4000000000000 bytes"),
        (lambda: Column("a", "uint8", (10**6, 10**6)), "1000000000000 bytes"),
        (lambda: RowSpec(()), "0 columns"),
        (lambda: RowSpec(tuple(Column(f"c{i}", "bool") for i in range(MAX_COLUMN_COUNT + 1))), "257 columns"),
        (lambda: RowSpec((Column("a", "bool"), Column("a", "int32"))), "twice: a"),
        (lambda: RowSpec(tuple(Column(f"c{i}", "uint8", (60 << 20,)) for i in range(2))), "expected at most"),
    ],
)
def test_a_malformed_layout_is_refused_by_name(make, named):
    with pytest.raises(RowSpecError) as caught:
        make()
    assert named in str(caught.value)


def test_a_claim_of_a_million_million_elements_is_refused_before_anything_is_allocated():
    payload = bytes(SPEC.row_bytes)
    tracemalloc.start()
    try:
        with pytest.raises(RowSpecError):
            Column("a", "float32", (10**12,))
        with pytest.raises(BlockError):
            Block.empty(SPEC, 10**12)
        with pytest.raises(BlockError):
            Block.from_bytes(SPEC, payload, row_count=10**12, digest=SPEC.digest)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_GROWTH_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, SPEC.row_bytes - 1, SPEC.row_bytes + 1, 3 * SPEC.row_bytes])
def test_a_block_of_the_wrong_length_is_refused(size):
    with pytest.raises(BlockError, match=f"holds {size} bytes"):
        Block.from_bytes(SPEC, bytes(size), row_count=2, digest=SPEC.digest)


@pytest.mark.parametrize("row_count", [0, -1])
def test_a_block_without_rows_is_refused(row_count):
    with pytest.raises(BlockError, match=f"says {row_count} rows"):
        Block.from_bytes(SPEC, b"", row_count=row_count, digest=SPEC.digest)
    with pytest.raises(BlockError, match=f"{row_count} rows"):
        Block.empty(SPEC, row_count)


def test_a_block_above_the_limit_is_refused():
    with pytest.raises(BlockError, match=f"at most {MAX_BLOCK_BYTES} bytes"):
        Block.empty(SPEC, MAX_BLOCK_BYTES // SPEC.row_bytes + 1)


def test_a_block_with_another_digest_is_refused_and_the_columns_are_named():
    with pytest.raises(RowSpecError, match=r"\(none\).*image uint8\[3, 3\]"):
        Block.from_bytes(SPEC, bytes(SPEC.row_bytes), row_count=1, digest=b"")


@given(st.integers(0, 8 * 2 * SPEC.row_bytes - 1))
def test_a_single_flipped_bit_is_noticed(bit):
    payload = bytearray(2 * SPEC.row_bytes)
    checksum = checksum_of(payload)
    payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BlockError, match="damaged"):
        Block.from_bytes(SPEC, bytes(payload), row_count=2, digest=SPEC.digest, checksum=checksum)


@pytest.mark.parametrize("dtype", sorted(FLOATING_TYPES))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_found_by_column(dtype, value):
    spec = RowSpec((Column("fine", dtype, (2,)), Column("bad", dtype, (2,)), Column("step", "int64")))
    block = Block.empty(spec, 3)
    largest = torch.finfo(getattr(torch, dtype)).max
    for view in torch_columns(spec, torch.from_numpy(block.data), ["fine", "bad"]).values():
        view.fill_(largest)
    assert find_non_finite(block) is None
    torch_columns(spec, torch.from_numpy(block.data))["bad"][2, 1] = value
    assert find_non_finite(block) == "bad"


@pytest.mark.parametrize("bad", ["a", "b", "c", "d", "e"])
def test_neighbours_of_several_types_are_told_apart_at_any_address(bad):
    spec = RowSpec(
        (
            Column("a", "float32", (2,)),
            Column("b", "float64", (3,)),
            Column("count", "int64"),
            Column("c", "float64"),
            Column("d", "float16", (2,)),
            Column("e", "float32"),
        )
    )
    block = Block.empty(spec, 5)
    block.columns["count"] = -1
    assert find_non_finite(block) is None
    block.columns[bad].reshape(5, -1)[3, -1] = math.nan
    assert find_non_finite(block) == bad
    odd = memoryview(b"x" + block.data.tobytes())[1:]
    assert find_non_finite(Block.from_bytes(spec, odd, row_count=5, digest=spec.digest)) == bad


def test_the_bits_of_integers_are_never_taken_for_a_nan():
    block = Block.empty(RowSpec((Column("step", "int64"), Column("pixel", "uint8", (8,)))), 1)
    block.data[:] = 0xFF
    assert find_non_finite(block) is None


def test_a_spec_names_what_it_has_when_asked_for_what_it_has_not():
    assert "reward" in SPEC
    with pytest.raises(RowSpecError, match=r"'rewards'.*image, reward, version"):
        SPEC["rewards"]


def test_the_first_rows_of_a_block_share_its_memory():
    block = Block.empty(SPEC, 4)
    block.columns["version"] = [1, 2, 3, 4]
    first = block.first(2)
    assert first.row_count == 2
    assert numpy_columns(SPEC, first.data)["version"].tolist() == [1, 2]
    assert np.shares_memory(first.data, block.data)


def test_a_transition_keeps_what_explains_its_lag():
    spec = transition_spec(Column("observation", "float32", (3,)), Column("action", "float32", (1,)))
    assert spec["next_observation"].shape == (3,)
    for stamp in ("policy_incarnation", "policy_version", "behaviour_log_prob", "collected_at", "step_count"):
        assert stamp in spec
    assert {"terminated", "truncated"} <= spec.offsets.keys()


def test_an_unroll_has_one_observation_more_than_steps():
    spec = unroll_spec(Column("observation", "uint8", (4, 4)), Column("action", "float32", (2,)), 20)
    assert spec["observation"] == Column("observation", "uint8", (21, 4, 4))
    assert spec["action"].shape == (20, 2)
    of_steps = ("reward", "terminated", "truncated", "valid", "behaviour_log_prob", "policy_version", "episode")
    assert {spec[name].shape for name in of_steps} == {(20,)}
