"""Rows that wait in shared memory stay as they are until all blocks of their request are acknowledged."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.collector.outbox import SHARED_FROM_BYTES, Outbox
from paceline.rpc.bulk import Bulk
from paceline.rpc.shared_memory import open_offered, part_of
from paceline.rpc.wire import SentBlock, blocks_to_wire
from paceline.v1 import replay_pb2, rows_pb2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory that can be offered")

ROOM = 4 * SHARED_FROM_BYTES
UNIT = SHARED_FROM_BYTES // 4


class Stream:
    """An outbox, and what replay finds in its memory."""

    def __init__(self, *, is_seen=True):
        self.outbox = Outbox.create(ROOM)
        self.sequence = 0
        self.offer = self.send(1).head.memory
        self.memory = open_offered(self.offer, "ipv4:127.0.0.1:1")
        if is_seen is not None:
            self.answer(1, reads_memory=is_seen)

    def send(self, *units):
        blocks = []
        for each in units:
            self.sequence += 1
            payload = np.full(each * UNIT, self.sequence % 251, np.uint8)
            blocks.append(SentBlock(rows_pb2.BlockHeader(sequence=self.sequence), payload))
        request = blocks_to_wire("run", "table", blocks)
        self.outbox.pass_on(request)
        return request

    def answer(self, *sequences, reads_memory=True):
        first, *further = (replay_pb2.AppendResponse(sequence=each) for each in sequences)
        first.further.extend(further)
        first.reads_memory = reads_memory
        self.outbox.note(first)

    def rows_of(self, request: Bulk):
        if request.head.HasField("rows_in_memory"):
            assert not len(request.payload)
            assert not len(request.further)
            return part_of(self.memory, request.head.rows_in_memory)
        return np.concatenate([request.payload, *request.further])


@pytest.fixture
def stream():
    made = Stream()
    yield made
    made.outbox.close()


def is_in_memory(request):
    return request.head.HasField("rows_in_memory")


def test_the_first_request_offers_memory_and_has_its_rows_with_it():
    outbox = Outbox.create(ROOM)
    request = blocks_to_wire("run", "table", [SentBlock(rows_pb2.BlockHeader(sequence=1), bytes(SHARED_FROM_BYTES))])
    outbox.pass_on(request)
    assert request.head.memory.byte_count == ROOM
    assert len(request.payload) == SHARED_FROM_BYTES
    assert not is_in_memory(request)
    outbox.close()


def test_rows_go_with_requests_until_replay_has_said_that_it_sees_the_memory():
    stream = Stream(is_seen=None)
    assert not is_in_memory(stream.send(8))
    stream.answer(1, reads_memory=True)
    assert is_in_memory(stream.send(8))
    stream.outbox.close()


def test_memory_that_replay_does_not_see_is_let_go_and_rows_go_with_the_requests():
    stream = Stream(is_seen=None)
    path = Path(stream.offer.path)
    assert path.exists()
    stream.answer(1, reads_memory=False)
    assert not path.exists()
    assert not is_in_memory(stream.send(8))
    stream.answer(2, reads_memory=False)
    stream.outbox.close()


def test_a_small_request_and_one_without_room_go_through_the_connection(stream):
    assert not is_in_memory(stream.send(3))
    assert [is_in_memory(stream.send(4)) for _ in range(5)] == [True] * 4 + [False]
    assert not is_in_memory(stream.send(17))


def test_room_is_free_when_every_block_of_a_request_is_acknowledged(stream):
    request = stream.send(4, 4, 8)
    assert is_in_memory(request)
    stream.answer(2)
    assert not is_in_memory(stream.send(4))
    stream.answer(3, 4)
    assert is_in_memory(stream.send(16))


def test_rows_that_go_on_at_the_start_end_before_those_that_are_still_held(stream):
    assert is_in_memory(stream.send(7))
    assert is_in_memory(stream.send(7))
    stream.answer(2)
    assert is_in_memory(stream.send(5))  # at the start: two units are left at the end
    assert not is_in_memory(stream.send(4))  # and two between it and the second
    stream.answer(3)
    assert is_in_memory(stream.send(11))


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(0, 2)), min_size=15, max_size=40
    )
)
def test_rows_are_there_until_they_are_acknowledged(steps):
    stream = Stream()
    waiting = []
    for units, acknowledged in steps:
        first = stream.sequence + 1
        waiting.append((first, units, stream.send(*units)))
        for begin, sizes, request in waiting:
            expected = np.repeat([(begin + at) % 251 for at in range(len(sizes))], [size * UNIT for size in sizes])
            assert (stream.rows_of(request) == expected).all()
        for _ in range(min(acknowledged, len(waiting))):
            begin, sizes, _ = waiting.pop(0)
            stream.answer(*range(begin, begin + len(sizes)))
    stream.outbox.close()
