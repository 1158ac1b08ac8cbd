"""Messages between training process and endpoint: whole, in order, however the bytes arrive."""

from __future__ import annotations

import pytest

from paceline.learner.control import Message, take_messages

MESSAGES = [
    Message("start", {"config": {"run": {"id": "trial"}}, "steps": 3}, b"\x00\x01"),
    Message("finish"),
    Message("publish", {"slot": 1}, bytes(range(256)) * 40),
]


@pytest.mark.parametrize("piece", [1, 3, 7, 1000, 10**6])
def test_messages_survive_any_cut_of_the_stream(piece: int) -> None:
    data = b"".join(message.encode() for message in MESSAGES)
    buffer, received = bytearray(), []
    for start in range(0, len(data), piece):
        buffer += data[start : start + piece]
        received += take_messages(buffer)
    assert received == MESSAGES
    assert not buffer


def test_a_field_that_is_no_json_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(TypeError):
        Message("record", {"loss": object()}).encode()
