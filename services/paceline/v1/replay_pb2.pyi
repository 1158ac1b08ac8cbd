import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from paceline.v1 import rows_pb2 as _rows_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenTableRequest(_message.Message):
    __slots__ = ("run_id", "table", "row_spec")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_SPEC_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    table: str
    row_spec: _rows_pb2.RowSpec
    def __init__(self, run_id: _Optional[str] = ..., table: _Optional[str] = ..., row_spec: _Optional[_Union[_rows_pb2.RowSpec, _Mapping]] = ...) -> None: ...

class OpenTableResponse(_message.Message):
    __slots__ = ("row_bytes", "capacity_row_count")
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    row_bytes: int
    capacity_row_count: int
    def __init__(self, row_bytes: _Optional[int] = ..., capacity_row_count: _Optional[int] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("run_id", "table", "header", "rows")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    table: str
    header: _rows_pb2.BlockHeader
    rows: bytes
    def __init__(self, run_id: _Optional[str] = ..., table: _Optional[str] = ..., header: _Optional[_Union[_rows_pb2.BlockHeader, _Mapping]] = ..., rows: _Optional[bytes] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("sequence", "stored_row_count", "duplicate", "complete")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stored_row_count: int
    duplicate: bool
    complete: bool
    def __init__(self, sequence: _Optional[int] = ..., stored_row_count: _Optional[int] = ..., duplicate: _Optional[bool] = ..., complete: _Optional[bool] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("run_id", "table", "batch_size", "batch_count", "seed")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    table: str
    batch_size: int
    batch_count: int
    seed: int
    def __init__(self, run_id: _Optional[str] = ..., table: _Optional[str] = ..., batch_size: _Optional[int] = ..., batch_count: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = ("row_count", "table_row_count", "inserted_row_count", "row_spec_digest", "rows")
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    TABLE_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    INSERTED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    row_count: int
    table_row_count: int
    inserted_row_count: int
    row_spec_digest: bytes
    rows: bytes
    def __init__(self, row_count: _Optional[int] = ..., table_row_count: _Optional[int] = ..., inserted_row_count: _Optional[int] = ..., row_spec_digest: _Optional[bytes] = ..., rows: _Optional[bytes] = ...) -> None: ...

class DescribeTablesRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class DescribeTablesResponse(_message.Message):
    __slots__ = ("tables",)
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableDescription]
    def __init__(self, tables: _Optional[_Iterable[_Union[TableDescription, _Mapping]]] = ...) -> None: ...

class TableDescription(_message.Message):
    __slots__ = ("name", "row_spec", "capacity_row_count", "row_count", "block_count", "inserted_row_count", "sampled_row_count", "memory_bytes", "limiter", "collectors")
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
    def __init__(self, name: _Optional[str] = ..., row_spec: _Optional[_Union[_rows_pb2.RowSpec, _Mapping]] = ..., capacity_row_count: _Optional[int] = ..., row_count: _Optional[int] = ..., block_count: _Optional[int] = ..., inserted_row_count: _Optional[int] = ..., sampled_row_count: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., limiter: _Optional[_Union[LimiterDescription, _Mapping]] = ..., collectors: _Optional[_Iterable[_Union[CollectorPosition, _Mapping]]] = ...) -> None: ...

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
