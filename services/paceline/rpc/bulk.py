"""Messages with a large payload, (de)serialised without copying it more often than needed.

The bytes are ordinary protobuf: a plain client of the same proto reads and writes them. Only the way to make and to
take them apart differs: the payload field is neither copied into a message object nor parsed again (a protobuf
message with a `bytes` field costs 15-40 % of the throughput).
"""

from __future__ import annotations

from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from paceline.errors import InvalidInputError
from paceline.rows import ByteMatrix
from paceline.v1 import replay_pb2

MessageT = TypeVar("MessageT", bound=Message)

_LENGTH_DELIMITED = 2
_FIXED_SIZES = {1: 8, 5: 4}


class Bulk(Generic[MessageT]):
    """A message whose payload field stays outside: `head` has every other field."""

    __slots__ = ("head", "payload")

    def __init__(self, head: MessageT, payload: bytes | memoryview | ByteMatrix) -> None:
        self.head, self.payload = head, payload


class BulkFormat(Generic[MessageT]):
    """(De)serialiser of one message type with one payload field."""

    def __init__(self, message_type: type[MessageT], payload_field: str) -> None:
        self._type = message_type
        self._field = message_type.DESCRIPTOR.fields_by_name[payload_field].number
        self._tag = _varint(self._field << 3 | _LENGTH_DELIMITED)

    def serialize(self, bulk: Bulk[MessageT]) -> bytes:
        """The wire bytes: the head's fields, then the payload."""
        payload = memoryview(bulk.payload).cast("B")  # type: ignore[arg-type]
        return b"".join((bulk.head.SerializeToString(), self._tag, _varint(len(payload)), payload))

    def deserialize(self, data: bytes) -> Bulk[MessageT]:
        """Take wire bytes apart; the payload is a view of `data`. Fields may come in any order.

        Raises:
            InvalidInputError: the bytes are not a message of this type.
        """
        view, position, rest, payload = memoryview(data), 0, [], memoryview(b"")
        try:
            while position < len(data):
                start = position
                tag, position = _read_varint(data, position)
                field, wire_type = tag >> 3, tag & 7
                if wire_type == _LENGTH_DELIMITED:
                    size, position = _read_varint(data, position)
                    end = position + size
                elif wire_type == 0:
                    _, end = _read_varint(data, position)
                else:
                    end = position + _FIXED_SIZES[wire_type]
                if end > len(data):
                    raise IndexError
                if field == self._field and wire_type == _LENGTH_DELIMITED:
                    payload = view[position:end]
                else:
                    rest.append(view[start:end])
                position = end
            return Bulk(self._type.FromString(b"".join(rest)), payload)
        except (IndexError, KeyError, DecodeError) as error:
            raise InvalidInputError(
                f"{len(data)} bytes are not a {self._type.DESCRIPTOR.full_name}: "
                "the peer must send the messages of protos/paceline/v1"
            ) from error


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
SAMPLE_RESPONSE = BulkFormat(replay_pb2.SampleResponse, "rows")
