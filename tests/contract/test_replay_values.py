"""The reply to MGET as it comes over a socket, in whichever pieces."""

import itertools
import socket
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from paceline.replay.values import AHEAD_BYTES, read_values

values = st.lists(
    st.one_of(
        st.none(),
        st.sampled_from([b"", b"\r\n", b"$3\r\nabc\r\n", b"x" * (AHEAD_BYTES - 5), b"y" * 300_000]),
        st.binary(max_size=60),
        st.integers(1, 3 * AHEAD_BYTES).map(bytes),
    ),
    min_size=1,
    max_size=6,
)


def reply(found):
    parts = [b"*%d\r\n" % len(found)]
    for value in found:
        parts.append(b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value))
    return b"".join(parts)


def receive(data, count, *, cuts=(), closed=True, seconds=10.0):
    """What is read of `data`, which is sent in pieces that end at the cuts; `closed`: and then the server is gone."""
    ours, theirs = socket.socketpair()

    def send():
        edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
        for begin, end in itertools.pairwise(edges):
            theirs.sendall(data[begin:end])
        if closed:
            theirs.shutdown(socket.SHUT_WR)

    ours.settimeout(seconds)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        return read_values(SimpleNamespace(_sock=ours), count)
    finally:
        ours.close()
        try:
            sender.join(10)
        finally:
            theirs.close()


@given(values, st.lists(st.integers(0, 20_000), max_size=5))
def test_values_come_whole_however_the_reply_is_cut(found, cuts):
    got = receive(reply(found), len(found), cuts=cuts)
    assert [None if value is None else bytes(value) for value in got] == found


def test_each_value_has_memory_of_its_own():
    first, second = receive(reply([b"a" * 10, b"b" * 10]), 2)
    first[:] = b"c" * 10
    assert bytes(second) == b"b" * 10


def test_an_error_of_the_server_is_a_reply():
    error = receive(b"-LOADING Redis is loading the dataset in memory\r\n", 3)
    assert isinstance(error, ResponseError)
    assert str(error) == "LOADING Redis is loading the dataset in memory"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"*2\r\n$1\r\na\r\n$-1\r\n", "MGET of 1 keys"),
        (b"+OK\r\n", "MGET of 1 keys"),
        (b"*1\r\n:5\r\n", "announces a value"),
        (b"*1\r\n$-2\r\n", "announces a value"),
        (b"*1\r\n$999999999999\r\n", "announces a value"),
        (b"*1\r\n$1\r\nab\r\n", "more than the 1 bytes"),
        (b"*" + b"1" * 2 * AHEAD_BYTES, "a line of more than"),
        (b"*1\r\n$5\r\nab", "closed"),
        (b"", "closed"),
    ],
)
def test_what_is_no_such_reply_breaks_the_connection(data, message):
    with pytest.raises(RedisConnectionError, match=message):
        receive(data, 1)


def test_a_server_that_falls_silent_is_given_up_at_the_deadline():
    with pytest.raises(RedisTimeoutError):
        receive(b"*1\r\n$5\r\nab", 1, closed=False, seconds=0.05)
