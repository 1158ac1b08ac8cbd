import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from paceline.v1 import rows_pb2 as _rows_pb2
from paceline.v1 import times_pb2 as _times_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_RUNNING: _ClassVar[RunState]
    RUN_STATE_FINISHED: _ClassVar[RunState]
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_RUNNING: RunState
RUN_STATE_FINISHED: RunState

class PolicyIdentity(_message.Message):
    __slots__ = ("incarnation", "version")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: int
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ("run_id", "protocol_version", "have", "wait", "replica", "at_least_version", "below")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_VERSION_FIELD_NUMBER: _ClassVar[int]
    BELOW_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    protocol_version: int
    have: PolicyIdentity
    wait: _duration_pb2.Duration
    replica: ReplicaReport
    at_least_version: int
    below: _containers.RepeatedCompositeFieldContainer[ReplicaReport]
    def __init__(self, run_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., have: _Optional[_Union[PolicyIdentity, _Mapping]] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., replica: _Optional[_Union[ReplicaReport, _Mapping]] = ..., at_least_version: _Optional[int] = ..., below: _Optional[_Iterable[_Union[ReplicaReport, _Mapping]]] = ...) -> None: ...

class ReplicaReport(_message.Message):
    __slots__ = ("collector_index", "collector_incarnation", "applied", "paused")
    COLLECTOR_INDEX_FIELD_NUMBER: _ClassVar[int]
    COLLECTOR_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    collector_index: int
    collector_incarnation: int
    applied: PolicyIdentity
    paused: bool
    def __init__(self, collector_index: _Optional[int] = ..., collector_incarnation: _Optional[int] = ..., applied: _Optional[_Union[PolicyIdentity, _Mapping]] = ..., paused: _Optional[bool] = ...) -> None: ...

class GetSnapshotResponse(_message.Message):
    __slots__ = ("not_modified", "header", "chunk", "times")
    NOT_MODIFIED_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    not_modified: NotModified
    header: SnapshotHeader
    chunk: bytes
    times: _times_pb2.AnswerTimes
    def __init__(self, not_modified: _Optional[_Union[NotModified, _Mapping]] = ..., header: _Optional[_Union[SnapshotHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ..., times: _Optional[_Union[_times_pb2.AnswerTimes, _Mapping]] = ...) -> None: ...

class NotModified(_message.Message):
    __slots__ = ("newest", "run_state")
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    RUN_STATE_FIELD_NUMBER: _ClassVar[int]
    newest: PolicyIdentity
    run_state: RunState
    def __init__(self, newest: _Optional[_Union[PolicyIdentity, _Mapping]] = ..., run_state: _Optional[_Union[RunState, str]] = ...) -> None: ...

class SnapshotHeader(_message.Message):
    __slots__ = ("run_id", "identity", "learner_step", "environment_step_count", "published_at", "payload_bytes", "chunk_count", "payload_sha256", "tensors", "actor_semantics_json", "run_state")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LEARNER_STEP_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SHA256_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    ACTOR_SEMANTICS_JSON_FIELD_NUMBER: _ClassVar[int]
    RUN_STATE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    identity: PolicyIdentity
    learner_step: int
    environment_step_count: int
    published_at: _timestamp_pb2.Timestamp
    payload_bytes: int
    chunk_count: int
    payload_sha256: bytes
    tensors: _containers.RepeatedCompositeFieldContainer[TensorDescription]
    actor_semantics_json: str
    run_state: RunState
    def __init__(self, run_id: _Optional[str] = ..., identity: _Optional[_Union[PolicyIdentity, _Mapping]] = ..., learner_step: _Optional[int] = ..., environment_step_count: _Optional[int] = ..., published_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., payload_bytes: _Optional[int] = ..., chunk_count: _Optional[int] = ..., payload_sha256: _Optional[bytes] = ..., tensors: _Optional[_Iterable[_Union[TensorDescription, _Mapping]]] = ..., actor_semantics_json: _Optional[str] = ..., run_state: _Optional[_Union[RunState, str]] = ...) -> None: ...

class TensorDescription(_message.Message):
    __slots__ = ("name", "data_type", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    data_type: _rows_pb2.DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., data_type: _Optional[_Union[_rows_pb2.DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...
