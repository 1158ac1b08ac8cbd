"""Messages with a large payload or long arrays, (de)serialised without copying them more often than needed.

The bytes are ordinary protobuf: a plain client of the same proto reads and writes them. Only the way to make and to
take them apart differs: the payload field is neither copied into a message object nor parsed again (a protobuf
message with a `bytes` field costs 15-40 % of the throughput), and a packed field of fixed width is on the wire just
what a little-endian numpy array is in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from paceline.errors import InvalidInputError
from paceline.rows import ByteMatrix
from paceline.v1 import replay_pb2

MessageT = TypeVar("MessageT", bound=Message)
Arrays = Mapping[str, npt.NDArray[Any]]
Buffer = bytes | memoryview | ByteMatrix

_LENGTH_DELIMITED = 2
_GROUP_TYPES = (3, 4)
_FIXED_SIZES = {1: 8, 5: 4}
_DTYPES: dict[int, np.dtype[Any]] = {
    FieldDescriptor.TYPE_FIXED64: np.dtype("<u8"),
    FieldDescriptor.TYPE_FIXED32: np.dtype("<u4"),
    FieldDescriptor.TYPE_DOUBLE: np.dtype("<f8"),
    FieldDescriptor.TYPE_FLOAT: np.dtype("<f4"),
}
_MAX_PIECES = 80
"""A message of more fields is left to protobuf's own parser: in Python, millions of tiny ones would take seconds. An
AppendRequest of as many blocks as it may have is below it."""

MESSAGE_BYTES = 1 << 20
"""What small blocks that share a message may have together."""

NO_ARRAYS: Arrays = {}


class Bulk(Generic[MessageT]):
    """A message whose payload and arrays stay outside: `head` has every other field.

    `arrays` has the packed fields by name. What was read has every one of them, empty where the message had none, as
    read-only views; what is to be written may leave them out, and may have `further` payloads, which come after the
    first as if they were one.
    """

    __slots__ = ("arrays", "further", "head", "payload")

    def __init__(
        self, head: MessageT, payload: Buffer = b"", arrays: Arrays = NO_ARRAYS, *, further: Sequence[Buffer] = ()
    ) -> None:
        self.head, self.payload, self.arrays, self.further = head, payload, arrays, further


class BulkFormat(Generic[MessageT]):
    """(De)serialiser of one message type with a payload field, packed fields of fixed width, or both."""

    def __init__(
        self, message_type: type[MessageT], payload_field: str | None = None, packed_fields: Sequence[str] = ()
    ) -> None:
        self._type = message_type
        fields = message_type.DESCRIPTOR.fields_by_name
        self._payload_field = payload_field
        self._payload_number = fields[payload_field].number if payload_field else None
        self._payload_tag = _tag(self._payload_number or 0)
        self._packed = {fields[name].number: (name, _DTYPES[fields[name].type]) for name in packed_fields}
        self._tags = {name: (_tag(number), dtype) for number, (name, dtype) in self._packed.items()}

    def serialize(self, bulk: Bulk[MessageT]) -> bytes:
        """The wire bytes: the head's fields, then the arrays, then the payload."""
        parts: list[bytes | memoryview] = [bulk.head.SerializeToString()]
        for name, values in bulk.arrays.items():
            tag, dtype = self._tags[name]
            if len(values):
                data = np.ascontiguousarray(values, dtype).data.cast("B")
                parts += (tag, _varint(len(data)), data)
        payloads = [payload for payload in (bulk.payload, *bulk.further) if len(payload)]
        if payloads:
            views = [memoryview(payload).cast("B") for payload in payloads]  # type: ignore[arg-type]
            parts += (self._payload_tag, _varint(sum(map(len, views))), *views)
        return b"".join(parts)

    def draft(self, payload_bytes: int, rest_bytes: int) -> Draft:
        """A message to be written in place.

        Args:
            rest_bytes: of all that is not payload, as it will be; a guess that proves wrong costs a copy.
        """
        return Draft(self._payload_tag + _varint(payload_bytes), payload_bytes, rest_bytes)

    def deserialize(self, data: bytes) -> Bulk[MessageT]:
        """Take wire bytes apart; payload and arrays are views of `data`. Fields may come in any order.

        Raises:
            InvalidInputError: the bytes are not a message of this type.
        """
        view, position, rest, payload = memoryview(data), 0, [], memoryview(b"")
        found: dict[str, list[npt.NDArray[Any]]] = {}
        try:
            for _ in range(_MAX_PIECES):
                if position == len(data):
                    break
                start = position
                tag, position = _read_varint(data, position)
                field, wire_type = tag >> 3, tag & 7
                if wire_type == _LENGTH_DELIMITED:
                    size, position = _read_varint(data, position)
                    end = position + size
                elif wire_type == 0:
                    _, end = _read_varint(data, position)
                elif wire_type in _GROUP_TYPES:
                    return self._parse_whole(data)  # a field that is unknown here: its end is not said beforehand
                else:
                    end = position + _FIXED_SIZES[wire_type]
                if end > len(data):
                    raise IndexError
                if wire_type == _LENGTH_DELIMITED and field == self._payload_number:
                    payload = view[position:end]
                elif wire_type == _LENGTH_DELIMITED and field in self._packed:
                    name, dtype = self._packed[field]
                    found.setdefault(name, []).append(np.frombuffer(view[position:end], dtype))
                elif field in self._packed:
                    return self._parse_whole(data)  # one by one instead of packed, as a peer may send it
                else:
                    rest.append(view[start:end])
                position = end
            if position < len(data):
                return self._parse_whole(data)
            return Bulk(self._type.FromString(b"".join(rest)), payload, self._join(found))
        except (IndexError, KeyError, ValueError, DecodeError) as error:
            raise InvalidInputError(
                f"{len(data)} bytes are not a {self._type.DESCRIPTOR.full_name}: "
                "the peer must send the messages of protos/paceline/v1"
            ) from error

    def _parse_whole(self, data: bytes) -> Bulk[MessageT]:
        head = self._type.FromString(data)
        arrays = {name: np.asarray(getattr(head, name), dtype) for name, dtype in self._packed.values()}
        for name in arrays:
            head.ClearField(name)
        payload = b""
        if self._payload_field:
            payload = getattr(head, self._payload_field)
            head.ClearField(self._payload_field)
        return Bulk(head, memoryview(payload), arrays)

    def _join(self, found: Mapping[str, list[npt.NDArray[Any]]]) -> Arrays:
        # A packed field may come in several pieces, which belong together.
        joined: dict[str, npt.NDArray[Any]] = {}
        for name, dtype in self._packed.values():
            pieces = found.get(name, [])
            joined[name] = pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, dtype), *pieces])
        return joined


class Draft:
    """A message whose payload is written where it will be sent from: that spares a copy of all of it."""

    def __init__(self, start: bytes, payload_bytes: int, rest_bytes: int) -> None:
        """`BulkFormat.draft` makes one; `start` announces the payload."""
        unfilled = _Unfilled(len(start) + payload_bytes + rest_bytes)
        self._message, memory = unfilled.message, np.asarray(unfilled)
        memory[: len(start)] = np.frombuffer(start, np.uint8)
        self._payload_end = len(start) + payload_bytes
        self.payload = memory[len(start) : self._payload_end]
        """`[payload_bytes]` of no defined value, to be filled before `finish` and left alone after it."""
        self._rest = memory[self._payload_end :]

    def finish(self, rest: bytes) -> bytes:
        """The message, with what `BulkFormat.serialize` gives for all that is not payload."""
        if len(rest) != len(self._rest):
            return b"".join((memoryview(self._message)[: self._payload_end], rest))
        self._rest[:] = np.frombuffer(rest, np.uint8)
        return self._message


class _Unfilled:
    """A new bytes object of 2 bytes or more, which numpy may fill before anybody else sees it.

    Python's C interface has this for makers of bytes: https://docs.python.org/3/c-api/bytes.html.
    """

    def __init__(self, size: int) -> None:
        self.message: bytes = _NEW_BYTES(None, size)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # An array of it keeps it alive.
        return {
            "version": 3,
            "shape": (len(self.message),),
            "typestr": "|u1",
            "data": (_ADDRESS_OF(self.message), False),
        }


_NEW_BYTES = ctypes.pythonapi.PyBytes_FromStringAndSize
_NEW_BYTES.restype, _NEW_BYTES.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
_ADDRESS_OF = ctypes.pythonapi.PyBytes_AsString
_ADDRESS_OF.restype, _ADDRESS_OF.argtypes = ctypes.c_void_p, (ctypes.py_object,)


def _tag(field_number: int) -> bytes:
    return _varint(field_number << 3 | _LENGTH_DELIMITED)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError


APPEND_REQUEST = BulkFormat(replay_pb2.AppendRequest, "rows")
SAMPLE_RESPONSE = BulkFormat(replay_pb2.SampleResponse, "rows", ("keys", "probabilities", "times_sampled", "stored_at"))
UPDATE_PRIORITIES_REQUEST = BulkFormat(replay_pb2.UpdatePrioritiesRequest, None, ("keys", "priorities"))
FOLLOW_RESPONSE = BulkFormat(replay_pb2.FollowResponse, "rows", ("stored_at",))
