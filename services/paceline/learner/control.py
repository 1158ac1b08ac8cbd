"""Messages between the training process and a process that it started: a JSON object, and bytes beside it.

On the wire: two 4-byte big-endian lengths, the JSON, the bytes. Both ends are of one release and one machine, so there
is no version; nothing is pickled.
"""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import dataclass, field
from typing import Any

_LENGTHS = struct.Struct("!II")


@dataclass(frozen=True)
class Message:
    """One message: what it is, its fields, and bytes that are no JSON."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def encode(self) -> bytes:
        """The wire bytes. Raises TypeError or ValueError when a field is not JSON."""
        text = json.dumps({"kind": self.kind, "fields": self.fields}).encode()
        return b"".join((_LENGTHS.pack(len(text), len(self.body)), text, self.body))


def take_messages(buffer: bytearray, limit: int | None = None) -> list[Message]:
    """The complete messages at the front of `buffer`, at most `limit`; `buffer` keeps the rest."""
    messages: list[Message] = []
    while len(buffer) >= _LENGTHS.size and len(messages) != limit:
        text_bytes, body_bytes = _LENGTHS.unpack_from(buffer)
        end = _LENGTHS.size + text_bytes + body_bytes
        if len(buffer) < end:
            break
        start = _LENGTHS.size + text_bytes
        messages.append(_decode(bytes(buffer[_LENGTHS.size : start]), bytes(buffer[start:end])))
        del buffer[:end]
    return messages


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None when the other end is gone."""
    try:
        text_bytes, body_bytes = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        text = await reader.readexactly(text_bytes)
        return _decode(text, await reader.readexactly(body_bytes))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _decode(text: bytes, body: bytes) -> Message:
    content = json.loads(text)
    return Message(content["kind"], content["fields"], body)
