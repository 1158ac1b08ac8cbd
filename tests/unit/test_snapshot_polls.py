"""Each message of a poll has a deadline of its own, and who gave up is told from who went away."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from paceline.config import RpcConfig
from paceline.errors import DeadlineError, UnavailableError
from paceline.rpc.polls import SnapshotPolls
from paceline.v1 import parameters_pb2 as pb

RPC = RpcConfig(deadline_seconds=0.2)
PATIENT = RpcConfig(deadline_seconds=60)


class Ended(grpc.RpcError):
    """How a call ended."""

    def __init__(self, code):
        self._code = code

    def code(self):
        return self._code

    def details(self):
        return "told by the call"

    def trailing_metadata(self):
        return ()


class Call:
    """A call of a peer that says what `answers` hold, one after the other: "wait" is for a cancellation."""

    def __init__(self, *answers, when_cancelled=None):
        self._answers = iter(answers)
        self._when_cancelled = Ended(grpc.StatusCode.CANCELLED) if when_cancelled is None else when_cancelled
        self.waits, self.cancelled = threading.Event(), threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        answer = next(self._answers)
        if answer == "wait":
            self.waits.set()
            assert self.cancelled.wait(20)
            answer = self._when_cancelled
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self):
        self.cancelled.set()


class Channel:
    """One whose calls are these, in order."""

    def __init__(self, *calls):
        self._calls, self.timeouts = iter(calls), []

    def unary_stream(self, *arguments, **options):
        def make(request, timeout):
            self.timeouts.append(timeout)
            return next(self._calls)

        return make


HEADER, CHUNK = pb.GetSnapshotResponse(header=pb.SnapshotHeader()), pb.GetSnapshotResponse(chunk=b"x")


def polls_of(*calls, rpc=RPC, poll_seconds=0.1):
    return SnapshotPolls(Channel(*calls), rpc, peer="the peer", poll_seconds=poll_seconds)


def read(polls):
    with polls.ask(pb.GetSnapshotRequest()) as messages:
        return list(messages)


def test_an_answer_that_does_not_begin_is_given_up_with_the_reason():
    call = Call("wait")
    with polls_of(call) as polls, pytest.raises(DeadlineError) as raised:
        read(polls)
    assert "the peer gave no answer for 0.3 s" in str(raised.value)
    assert "the 0.1 s that it may hold a poll and rpc.deadline_seconds, 0.2 s" in str(raised.value)
    assert call.cancelled.is_set()


def test_a_poll_may_be_held_for_longer_than_the_deadline():
    call = Call("wait")
    with polls_of(call, poll_seconds=600) as polls, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, polls)
        assert not call.cancelled.wait(3 * RPC.deadline_seconds)
        polls.close()
        assert isinstance(reading.exception(20), UnavailableError)


def test_an_answer_that_does_not_go_on_is_given_up_with_the_reason():
    with (
        polls_of(Call(HEADER, CHUNK, CHUNK, "wait"), poll_seconds=600) as polls,
        pytest.raises(DeadlineError) as raised,
    ):
        read(polls)
    assert "the peer sent nothing for 0.2 s, after 2 chunks of a snapshot" in str(raised.value)


def test_polls_go_on_after_one_that_was_given_up():
    with polls_of(Call("wait"), Call(HEADER, "wait"), Call(HEADER, CHUNK)) as polls:
        for _ in range(2):
            with pytest.raises(DeadlineError):
                read(polls)
        assert read(polls) == [HEADER, CHUNK]


def test_what_the_reader_does_between_two_messages_is_no_wait():
    call = Call(HEADER, CHUNK)
    with polls_of(call, poll_seconds=0.001) as polls, polls.ask(pb.GetSnapshotRequest()) as messages:
        assert next(messages) == HEADER
        assert not call.cancelled.wait(3 * polls.longest_wait_seconds)
        assert list(messages) == [CHUNK]


def test_a_message_that_comes_as_the_poll_is_given_up_is_not_followed_by_the_cancellation():
    with (
        polls_of(Call(HEADER, "wait", Ended(grpc.StatusCode.CANCELLED), when_cancelled=CHUNK)) as polls,
        pytest.raises(DeadlineError, match="after 0 chunks"),
    ):
        read(polls)


def test_an_answer_that_is_whole_as_the_poll_is_given_up_is_taken():
    with polls_of(Call(HEADER, CHUNK, "wait", when_cancelled=StopIteration())) as polls:
        assert read(polls) == [HEADER, CHUNK]


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE])
def test_a_peer_that_ends_the_answer_is_told_apart_from_one_that_is_late(code):
    with polls_of(Call(HEADER, Ended(code))) as polls, pytest.raises(UnavailableError, match=code.name):
        read(polls)


def test_a_peer_that_went_away_as_the_poll_is_given_up_is_told_as_gone():
    gone = Ended(grpc.StatusCode.UNAVAILABLE)
    with (
        polls_of(Call("wait", when_cancelled=gone)) as polls,
        pytest.raises(UnavailableError, match="told by the call"),
    ):
        read(polls)


def test_closing_ends_the_poll_in_progress_and_the_next_one():
    first, second = Call("wait"), Call("wait")
    with polls_of(first, second, rpc=PATIENT) as polls, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, polls)
        assert first.waits.wait(20)
        polls.close()
        assert isinstance(reading.exception(20), UnavailableError)
        with pytest.raises(UnavailableError):
            read(polls)


def test_an_answer_that_is_left_is_cancelled():
    call = Call(HEADER, CHUNK)
    with polls_of(call) as polls:
        with polls.ask(pb.GetSnapshotRequest()) as messages:
            next(messages)
        assert call.cancelled.is_set()


def test_no_thread_is_left():
    with polls_of(Call(HEADER), Call("wait")) as polls:
        read(polls)
        with pytest.raises(DeadlineError):
            read(polls)
        assert polls._watch.is_alive()
    assert not polls._watch.is_alive()


def test_a_call_lasts_as_long_as_a_server_lets_it():
    channel = Channel(Call(HEADER))
    rpc = RpcConfig(connection_seconds=1_000, stream_seconds=100, deadline_seconds=1)
    with SnapshotPolls(channel, rpc, peer="the peer", poll_seconds=1) as polls:
        read(polls)
    assert channel.timeouts == [1_100]
