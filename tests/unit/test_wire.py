import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidInputError, RowSpecError
from paceline.identity import PolicyIdentity
from paceline.rows import MAX_COLUMN_COUNT, NUMPY_TYPES, Column, RowSpec
from paceline.rpc.wire import (
    identity_from_wire,
    identity_to_wire,
    row_spec_from_wire,
    row_spec_to_wire,
    seconds_of,
    timestamp,
)
from paceline.v1 import parameters_pb2, rows_pb2


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
