"""Domain values to and from their messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from paceline.errors import InvalidInputError, RowSpecError, SnapshotError
from paceline.identity import PolicyIdentity
from paceline.process import own_time_ns
from paceline.rows import MAX_COLUMN_COUNT, Column, RowSpec
from paceline.rpc.bulk import Buffer, Bulk
from paceline.snapshot import MAX_TENSOR_COUNT, SnapshotHeader, TensorDescription
from paceline.v1 import parameters_pb2, replay_pb2, rows_pb2

_DATA_TYPES: dict[str, rows_pb2.DataType] = {
    name.removeprefix("DATA_TYPE_").lower(): value  # type: ignore[misc]
    for name, value in rows_pb2.DataType.items()
    if value != rows_pb2.DATA_TYPE_UNSPECIFIED
}
_DTYPES = {value: name for name, value in _DATA_TYPES.items()}


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


@dataclass(frozen=True)
class SentBlock:
    """A block on its way to replay: what it says of itself, and its rows in the form that it names."""

    header: rows_pb2.BlockHeader
    payload: Buffer

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload."""
        return memoryview(self.payload).nbytes  # type: ignore[arg-type]


def blocks_to_wire(run_id: str, table: str, blocks: Sequence[SentBlock]) -> Bulk[replay_pb2.AppendRequest]:
    """The message that appends these blocks, one or more; their payloads are not copied."""
    first, *further = blocks
    request = replay_pb2.AppendRequest(
        run_id=run_id, table=table, header=first.header, further_headers=[block.header for block in further]
    )
    if further:
        for header, block in zip((request.header, *request.further_headers), blocks, strict=True):
            header.payload_byte_count = block.payload_bytes
    return Bulk(request, first.payload, further=[block.payload for block in further])


def blocks_from_wire(request: Bulk[replay_pb2.AppendRequest], max_count: int) -> list[SentBlock]:
    """The blocks of a message, whose payloads are views of the message's own. What else headers say is not checked.

    Raises:
        InvalidInputError: there are more than `max_count`, or they do not share the message's rows out.
    """
    headers = [request.head.header, *request.head.further_headers]
    if len(headers) > max_count:
        raise InvalidInputError(f"a request has {len(headers)} blocks: expected at most {max_count}")
    rows = memoryview(request.payload)  # type: ignore[arg-type]
    sizes = [header.payload_byte_count for header in headers]
    if sizes == [0]:
        sizes = [len(rows)]
    if min(sizes) < 0 or sum(sizes) != len(rows) or (len(sizes) > 1 and 0 in sizes):
        raise InvalidInputError(
            f"payload_byte_count of the {len(sizes)} blocks of a request is {', '.join(map(str, sizes))}: expected "
            f"1 or more of each, and {len(rows)} together, the bytes of its rows"
        )
    blocks, start = [], 0
    for header, size in zip(headers, sizes, strict=True):
        header.payload_byte_count = 0  # it says where the rows are in the message, and nothing of the block
        blocks.append(SentBlock(header, rows[start : start + size]))
        start += size
    return blocks


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
    nanos = own_time_ns() if seconds is None else round(seconds * 1e9)
    return Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9)


def seconds_of(stamp: Timestamp | Duration) -> float:
    """Seconds since 1970, or of a duration."""
    return stamp.seconds + stamp.nanos * 1e-9


def snapshot_header_to_wire(
    header: SnapshotHeader, chunk_count: int, run_state: parameters_pb2.RunState
) -> parameters_pb2.SnapshotHeader:
    """The message of a snapshot's header; `chunk_count` chunks follow it."""
    return parameters_pb2.SnapshotHeader(
        run_id=header.run_id,
        identity=identity_to_wire(header.identity),
        learner_step=header.learner_step,
        environment_step_count=header.environment_step_count,
        published_at=timestamp(header.published_at),
        payload_bytes=header.payload_bytes,
        chunk_count=chunk_count,
        payload_sha256=header.payload_sha256,
        tensors=[
            parameters_pb2.TensorDescription(name=tensor.name, data_type=_DATA_TYPES[tensor.dtype], shape=tensor.shape)
            for tensor in header.tensors
        ],
        actor_semantics_json=header.actor_semantics_json,
        run_state=run_state,
    )


def snapshot_header_from_wire(message: parameters_pb2.SnapshotHeader) -> SnapshotHeader:
    """The header of a message; every count and size is checked, so that nothing is allocated on a false claim.

    Raises:
        SnapshotError: says which field is out of range. InvalidInputError: the identity is none.
    """
    if len(message.tensors) > MAX_TENSOR_COUNT:
        raise SnapshotError(f"a snapshot has {len(message.tensors)} tensors: expected 1 to {MAX_TENSOR_COUNT}")
    if not 1 <= message.chunk_count <= message.payload_bytes:
        raise SnapshotError(
            f"a snapshot of {message.payload_bytes} bytes comes in {message.chunk_count} chunks: expected 1 or more, "
            "none empty"
        )
    return SnapshotHeader(
        run_id=message.run_id,
        identity=identity_from_wire(message.identity),
        learner_step=message.learner_step,
        environment_step_count=message.environment_step_count,
        published_at=seconds_of(message.published_at),
        payload_bytes=message.payload_bytes,
        payload_sha256=message.payload_sha256,
        tensors=tuple(
            TensorDescription(tensor.name, _DTYPES.get(tensor.data_type, str(tensor.data_type)), tuple(tensor.shape))
            for tensor in message.tensors
        ),
        actor_semantics_json=message.actor_semantics_json,
    )
