"""Domain values to and from their messages."""

from __future__ import annotations

import time

from google.protobuf.timestamp_pb2 import Timestamp

from paceline.errors import InvalidInputError, RowSpecError
from paceline.identity import PolicyIdentity
from paceline.rows import MAX_COLUMN_COUNT, Column, RowSpec
from paceline.v1 import parameters_pb2, rows_pb2

_DATA_TYPES: dict[str, rows_pb2.DataType] = {
    name.removeprefix("DATA_TYPE_").lower(): value  # type: ignore[misc]
    for name, value in rows_pb2.DataType.items()
    if value != rows_pb2.DATA_TYPE_UNSPECIFIED
}
_DTYPES = {value: name for name, value in _DATA_TYPES.items()}


def data_type_to_wire(dtype: str) -> rows_pb2.DataType:
    """The enum value of a dtype's name."""
    return _DATA_TYPES[dtype]


def data_type_from_wire(value: int) -> str:
    """The dtype's name. Raises InvalidInputError for a value that this version does not know."""
    if value not in _DTYPES:
        raise InvalidInputError(f"data type {value}: expected one of {', '.join(_DATA_TYPES)}")
    return _DTYPES[value]  # type: ignore[index]


def row_spec_to_wire(spec: RowSpec) -> rows_pb2.RowSpec:
    """The message of a row spec."""
    return rows_pb2.RowSpec(
        columns=[
            rows_pb2.Column(name=column.name, data_type=_DATA_TYPES[column.dtype], shape=column.shape)
            for column in spec.columns
        ]
    )


def row_spec_from_wire(message: rows_pb2.RowSpec) -> RowSpec:
    """The row spec of a message. Raises RowSpecError when it is malformed."""
    if len(message.columns) > MAX_COLUMN_COUNT:
        raise RowSpecError(f"a row spec has {len(message.columns)} columns: expected 1 to {MAX_COLUMN_COUNT}")
    return RowSpec(
        tuple(
            Column(column.name, _DTYPES.get(column.data_type, str(column.data_type)), tuple(column.shape))
            for column in message.columns
        )
    )


def identity_to_wire(identity: PolicyIdentity) -> parameters_pb2.PolicyIdentity:
    """The message of a policy identity."""
    return parameters_pb2.PolicyIdentity(incarnation=identity.incarnation, version=identity.version)


def identity_from_wire(message: parameters_pb2.PolicyIdentity) -> PolicyIdentity:
    """The policy identity of a message. Raises InvalidInputError when it is none."""
    try:
        return PolicyIdentity(message.incarnation, message.version)
    except ValueError as error:
        raise InvalidInputError(str(error)) from error


def timestamp(seconds: float | None = None) -> Timestamp:
    """The message of a time in seconds since 1970; now when none is given."""
    nanos = time.time_ns() if seconds is None else round(seconds * 1e9)
    return Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9)


def seconds_of(stamp: Timestamp) -> float:
    """Seconds since 1970."""
    return stamp.seconds + stamp.nanos * 1e-9
