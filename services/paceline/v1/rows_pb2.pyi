import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT64: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_UINT8: _ClassVar[DataType]
    DATA_TYPE_BOOL: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_UINT32: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT64: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_UINT8: DataType
DATA_TYPE_BOOL: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_UINT32: DataType
DATA_TYPE_INT64: DataType

class Column(_message.Message):
    __slots__ = ("name", "data_type", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    data_type: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., data_type: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class RowSpec(_message.Message):
    __slots__ = ("columns",)
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    def __init__(self, columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ...) -> None: ...

class BlockHeader(_message.Message):
    __slots__ = ("collector_index", "collector_incarnation", "sequence", "row_count", "row_spec_digest", "sealed_at", "stored_at", "checksum", "compact_stride", "first_row", "payload_byte_count")
    COLLECTOR_INDEX_FIELD_NUMBER: _ClassVar[int]
    COLLECTOR_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEALED_AT_FIELD_NUMBER: _ClassVar[int]
    STORED_AT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    COMPACT_STRIDE_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    collector_index: int
    collector_incarnation: int
    sequence: int
    row_count: int
    row_spec_digest: bytes
    sealed_at: _timestamp_pb2.Timestamp
    stored_at: _timestamp_pb2.Timestamp
    checksum: int
    compact_stride: int
    first_row: int
    payload_byte_count: int
    def __init__(self, collector_index: _Optional[int] = ..., collector_incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., row_count: _Optional[int] = ..., row_spec_digest: _Optional[bytes] = ..., sealed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., stored_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., checksum: _Optional[int] = ..., compact_stride: _Optional[int] = ..., first_row: _Optional[int] = ..., payload_byte_count: _Optional[int] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("path", "byte_count", "key")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    path: str
    byte_count: int
    key: bytes
    def __init__(self, path: _Optional[str] = ..., byte_count: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class MemoryRange(_message.Message):
    __slots__ = ("position", "byte_count")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    position: int
    byte_count: int
    def __init__(self, position: _Optional[int] = ..., byte_count: _Optional[int] = ...) -> None: ...
