"""The part of a stream of appends that does not go through its connection: rows in memory that replay sees, too."""

from __future__ import annotations

import collections
import threading

import numpy as np

from paceline.rpc.bulk import Bulk
from paceline.rpc.shared_memory import OfferedMemory
from paceline.v1 import replay_pb2

SHARED_FROM_BYTES = 1 << 16
"""A request of fewer bytes is about as fast through the connection."""


class Outbox:
    """Memory that one stream offers, in which the rows of a request lie until all of its blocks are acknowledged.

    Requests pass on one thread, answers may be noted on another. What finds no room goes through the connection.
    """

    def __init__(self, memory: OfferedMemory) -> None:
        self._memory: OfferedMemory | None = memory
        self._lock = threading.Lock()
        self._is_offered = self._is_seen = False
        self._held: collections.deque[tuple[int, int, int]] = collections.deque()
        """Begin and end of the rows that lie there, oldest first, and the sequence whose acknowledgement frees them."""

    @classmethod
    def create(cls, byte_count: int) -> Outbox | None:
        """One with room for so many bytes; None where that is too little to be of use, or the system has none."""
        memory = OfferedMemory.create(byte_count) if byte_count >= SHARED_FROM_BYTES else None
        return None if memory is None else cls(memory)

    def pass_on(self, request: Bulk[replay_pb2.AppendRequest]) -> None:
        """Prepare a request: the first one offers the memory, and has the rows of those after it lie there."""
        memory = self._memory
        if memory is None:
            return
        if not self._is_offered:
            self._is_offered = True
            request.head.memory.CopyFrom(memory.offer)
            return
        payloads = [np.frombuffer(payload, np.uint8) for payload in (request.payload, *request.further)]
        size = sum(map(len, payloads))
        if not self._is_seen or size < SHARED_FROM_BYTES:
            return
        last = request.head.further_headers[-1] if request.further else request.head.header
        with self._lock:
            begin = self._find_room(size, len(memory.bytes))
            if begin is None:
                return
            self._held.append((begin, begin + size, last.sequence))
        position = begin
        for payload in payloads:
            memory.bytes[position : position + len(payload)] = payload
            position += len(payload)
        request.head.rows_in_memory.position, request.head.rows_in_memory.byte_count = begin, size
        request.payload, request.further = b"", ()

    def note(self, answer: replay_pb2.AppendResponse) -> None:
        """Take note of an answer of the stream; the first one says whether replay sees the memory."""
        self._is_seen = self._is_seen or answer.reads_memory
        if not self._is_seen:
            self.close()
        sequence = (answer.further[-1] if answer.further else answer).sequence
        with self._lock:
            while self._held and self._held[0][2] <= sequence:
                self._held.popleft()

    def close(self) -> None:
        """No request will lie there any more. May be called again."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _find_room(self, size: int, room: int) -> int | None:
        first, end = (self._held[0][0], self._held[-1][1]) if self._held else (0, 0)
        if self._held and end <= first:  # what is held goes on at the start
            return end if size <= first - end else None
        if size <= room - end:
            return end
        return 0 if size <= first else None
