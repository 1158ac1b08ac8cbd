import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from paceline.v1 import rows_pb2 as _rows_pb2
from paceline.v1 import times_pb2 as _times_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenTableRequest(_message.Message):
    __slots__ = ("run_id", "table", "row_spec", "learner_id", "learner_incarnation")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_SPEC_FIELD_NUMBER: _ClassVar[int]
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    LEARNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    table: str
    row_spec: _rows_pb2.RowSpec
    learner_id: str
    learner_incarnation: int
    def __init__(self, run_id: _Optional[str] = ..., table: _Optional[str] = ..., row_spec: _Optional[_Union[_rows_pb2.RowSpec, _Mapping]] = ..., learner_id: _Optional[str] = ..., learner_incarnation: _Optional[int] = ...) -> None: ...

class OpenTableResponse(_message.Message):
    __slots__ = ("row_bytes", "capacity_row_count", "max_blocks_per_append")
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_PER_APPEND_FIELD_NUMBER: _ClassVar[int]
    row_bytes: int
    capacity_row_count: int
    max_blocks_per_append: int
    def __init__(self, row_bytes: _Optional[int] = ..., capacity_row_count: _Optional[int] = ..., max_blocks_per_append: _Optional[int] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("run_id", "table", "header", "further_headers", "memory", "rows_in_memory", "rows")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FURTHER_HEADERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    ROWS_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    table: str
    header: _rows_pb2.BlockHeader
    further_headers: _containers.RepeatedCompositeFieldContainer[_rows_pb2.BlockHeader]
    memory: _rows_pb2.SharedMemory
    rows_in_memory: _rows_pb2.MemoryRange
    rows: bytes
    def __init__(self, run_id: _Optional[str] = ..., table: _Optional[str] = ..., header: _Optional[_Union[_rows_pb2.BlockHeader, _Mapping]] = ..., further_headers: _Optional[_Iterable[_Union[_rows_pb2.BlockHeader, _Mapping]]] = ..., memory: _Optional[_Union[_rows_pb2.SharedMemory, _Mapping]] = ..., rows_in_memory: _Optional[_Union[_rows_pb2.MemoryRange, _Mapping]] = ..., rows: _Optional[bytes] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("sequence", "stored_row_count", "duplicate", "complete", "further", "reads_memory")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    READS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stored_row_count: int
    duplicate: bool
    complete: bool
    further: _containers.RepeatedCompositeFieldContainer[AppendResponse]
    reads_memory: bool
    def __init__(self, sequence: _Optional[int] = ..., stored_row_count: _Optional[int] = ..., duplicate: _Optional[bool] = ..., complete: _Optional[bool] = ..., further: _Optional[_Iterable[_Union[AppendResponse, _Mapping]]] = ..., reads_memory: _Optional[bool] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("run_id", "table", "batch_size", "batch_count", "seed", "row_details", "policy_version", "base_version", "learner_incarnation", "memory")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ROW_DETAILS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEARNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    table: str
    batch_size: int
    batch_count: int
    seed: int
    row_details: bool
    policy_version: int
    base_version: int
    learner_incarnation: int
    memory: _rows_pb2.SharedMemory
    def __init__(self, run_id: _Optional[str] = ..., table: _Optional[str] = ..., batch_size: _Optional[int] = ..., batch_count: _Optional[int] = ..., seed: _Optional[int] = ..., row_details: _Optional[bool] = ..., policy_version: _Optional[int] = ..., base_version: _Optional[int] = ..., learner_incarnation: _Optional[int] = ..., memory: _Optional[_Union[_rows_pb2.SharedMemory, _Mapping]] = ...) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = ("row_count", "table_row_count", "inserted_row_count", "row_spec_digest", "keys", "probabilities", "times_sampled", "stored_at", "rows_in_memory", "rows")
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    TABLE_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    INSERTED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    TIMES_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    STORED_AT_FIELD_NUMBER: _ClassVar[int]
    ROWS_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    row_count: int
    table_row_count: int
    inserted_row_count: int
    row_spec_digest: bytes
    keys: _containers.RepeatedScalarFieldContainer[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    times_sampled: _containers.RepeatedScalarFieldContainer[int]
    stored_at: _containers.RepeatedScalarFieldContainer[float]
    rows_in_memory: _rows_pb2.MemoryRange
    rows: bytes
    def __init__(self, row_count: _Optional[int] = ..., table_row_count: _Optional[int] = ..., inserted_row_count: _Optional[int] = ..., row_spec_digest: _Optional[bytes] = ..., keys: _Optional[_Iterable[int]] = ..., probabilities: _Optional[_Iterable[float]] = ..., times_sampled: _Optional[_Iterable[int]] = ..., stored_at: _Optional[_Iterable[float]] = ..., rows_in_memory: _Optional[_Union[_rows_pb2.MemoryRange, _Mapping]] = ..., rows: _Optional[bytes] = ...) -> None: ...

class UpdatePrioritiesRequest(_message.Message):
    __slots__ = ("run_id", "table", "keys", "priorities")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    table: str
    keys: _containers.RepeatedScalarFieldContainer[int]
    priorities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, run_id: _Optional[str] = ..., table: _Optional[str] = ..., keys: _Optional[_Iterable[int]] = ..., priorities: _Optional[_Iterable[float]] = ...) -> None: ...

class UpdatePrioritiesResponse(_message.Message):
    __slots__ = ("updated_row_count", "unknown_row_count")
    UPDATED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    updated_row_count: int
    unknown_row_count: int
    def __init__(self, updated_row_count: _Optional[int] = ..., unknown_row_count: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("run_id", "table", "from_row", "sampled_row_count", "consumed_row", "wanted_before", "learner_incarnation", "last_stored_at", "limiter_wait_seconds", "received_end_row", "waived_before", "released_before", "memory")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    FROM_ROW_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_ROW_FIELD_NUMBER: _ClassVar[int]
    WANTED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    LEARNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAST_STORED_AT_FIELD_NUMBER: _ClassVar[int]
    LIMITER_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_END_ROW_FIELD_NUMBER: _ClassVar[int]
    WAIVED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    RELEASED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    table: str
    from_row: int
    sampled_row_count: int
    consumed_row: int
    wanted_before: int
    learner_incarnation: int
    last_stored_at: float
    limiter_wait_seconds: float
    received_end_row: int
    waived_before: int
    released_before: int
    memory: _rows_pb2.SharedMemory
    def __init__(self, run_id: _Optional[str] = ..., table: _Optional[str] = ..., from_row: _Optional[int] = ..., sampled_row_count: _Optional[int] = ..., consumed_row: _Optional[int] = ..., wanted_before: _Optional[int] = ..., learner_incarnation: _Optional[int] = ..., last_stored_at: _Optional[float] = ..., limiter_wait_seconds: _Optional[float] = ..., received_end_row: _Optional[int] = ..., waived_before: _Optional[int] = ..., released_before: _Optional[int] = ..., memory: _Optional[_Union[_rows_pb2.SharedMemory, _Mapping]] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("first_row", "row_count", "table_first_row", "inserted_row_count", "sampled_row_count", "complete", "row_spec_digest", "stored_at", "rows_lost", "rows_in_memory", "reads_memory", "rows")
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    INSERTED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ROW_SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STORED_AT_FIELD_NUMBER: _ClassVar[int]
    ROWS_LOST_FIELD_NUMBER: _ClassVar[int]
    ROWS_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    READS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    first_row: int
    row_count: int
    table_first_row: int
    inserted_row_count: int
    sampled_row_count: int
    complete: bool
    row_spec_digest: bytes
    stored_at: _containers.RepeatedScalarFieldContainer[float]
    rows_lost: bool
    rows_in_memory: _rows_pb2.MemoryRange
    reads_memory: bool
    rows: bytes
    def __init__(self, first_row: _Optional[int] = ..., row_count: _Optional[int] = ..., table_first_row: _Optional[int] = ..., inserted_row_count: _Optional[int] = ..., sampled_row_count: _Optional[int] = ..., complete: _Optional[bool] = ..., row_spec_digest: _Optional[bytes] = ..., stored_at: _Optional[_Iterable[float]] = ..., rows_lost: _Optional[bool] = ..., rows_in_memory: _Optional[_Union[_rows_pb2.MemoryRange, _Mapping]] = ..., reads_memory: _Optional[bool] = ..., rows: _Optional[bytes] = ...) -> None: ...

class DescribeTablesRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class DescribeTablesResponse(_message.Message):
    __slots__ = ("tables", "times")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableDescription]
    times: _times_pb2.AnswerTimes
    def __init__(self, tables: _Optional[_Iterable[_Union[TableDescription, _Mapping]]] = ..., times: _Optional[_Union[_times_pb2.AnswerTimes, _Mapping]] = ...) -> None: ...

class TableDescription(_message.Message):
    __slots__ = ("name", "row_spec", "capacity_row_count", "row_count", "block_count", "inserted_row_count", "sampled_row_count", "memory_bytes", "limiter", "collectors", "kind", "sampler", "remover", "max_times_sampled", "first_row", "consumed_row", "dropped_row_count", "log_bytes", "whole")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROW_SPEC_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    INSERTED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMITER_FIELD_NUMBER: _ClassVar[int]
    COLLECTORS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    REMOVER_FIELD_NUMBER: _ClassVar[int]
    MAX_TIMES_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_ROW_FIELD_NUMBER: _ClassVar[int]
    DROPPED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    row_spec: _rows_pb2.RowSpec
    capacity_row_count: int
    row_count: int
    block_count: int
    inserted_row_count: int
    sampled_row_count: int
    memory_bytes: int
    limiter: LimiterDescription
    collectors: _containers.RepeatedCompositeFieldContainer[CollectorPosition]
    kind: str
    sampler: str
    remover: str
    max_times_sampled: int
    first_row: int
    consumed_row: int
    dropped_row_count: int
    log_bytes: int
    whole: bool
    def __init__(self, name: _Optional[str] = ..., row_spec: _Optional[_Union[_rows_pb2.RowSpec, _Mapping]] = ..., capacity_row_count: _Optional[int] = ..., row_count: _Optional[int] = ..., block_count: _Optional[int] = ..., inserted_row_count: _Optional[int] = ..., sampled_row_count: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., limiter: _Optional[_Union[LimiterDescription, _Mapping]] = ..., collectors: _Optional[_Iterable[_Union[CollectorPosition, _Mapping]]] = ..., kind: _Optional[str] = ..., sampler: _Optional[str] = ..., remover: _Optional[str] = ..., max_times_sampled: _Optional[int] = ..., first_row: _Optional[int] = ..., consumed_row: _Optional[int] = ..., dropped_row_count: _Optional[int] = ..., log_bytes: _Optional[int] = ..., whole: _Optional[bool] = ...) -> None: ...

class LimiterDescription(_message.Message):
    __slots__ = ("min_row_count", "samples_per_insert", "window_row_count", "deadline")
    MIN_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_INSERT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    min_row_count: int
    samples_per_insert: float
    window_row_count: float
    deadline: _duration_pb2.Duration
    def __init__(self, min_row_count: _Optional[int] = ..., samples_per_insert: _Optional[float] = ..., window_row_count: _Optional[float] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CollectorPosition(_message.Message):
    __slots__ = ("collector_index", "collector_incarnation", "sequence")
    COLLECTOR_INDEX_FIELD_NUMBER: _ClassVar[int]
    COLLECTOR_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    collector_index: int
    collector_incarnation: int
    sequence: int
    def __init__(self, collector_index: _Optional[int] = ..., collector_incarnation: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...
