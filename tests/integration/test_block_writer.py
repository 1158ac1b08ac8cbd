"""Blocks reach replay once each and in order, whatever happens to the stream; no more than the window is under way."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from integration.peers import PENDULUM, RUN_ID, TABLE, Replay, serve
from integration.waiting import wait_until
from paceline.collector.append_metrics import APPEND_FAILURES, AppendMetrics
from paceline.collector.writer import BlockWriter
from paceline.config import RpcConfig
from paceline.errors import (
    InvalidInputError,
    LimiterTimeoutError,
    PacelineError,
    ReplacedError,
    RowSpecError,
    StoreFullError,
    StoreReadOnlyError,
    TooManyStreamsError,
)
from paceline.process import StopSignal
from paceline.rows import Block, CompactForm, checksum_of
from paceline.rpc import status
from paceline.rpc.bulk import MESSAGE_BYTES
from paceline.rpc.client import Backoff, open_channel
from paceline.rpc.wire import blocks_to_wire
from paceline.v1 import replay_pb2

NEVER = StopSignal()
WINDOW = 4
BLOCK_ROWS = 1000
"""At most; blocks have a few."""


def block_of(*numbers):
    block = Block.empty(PENDULUM, len(numbers))
    block.columns["episode"] = numbers
    return block


class Writing:
    """A writer to a replay service."""

    def __init__(self, port, *, limiter_seconds=10.0, compact_stride=0, **rpc):
        settings = RpcConfig(backoff_initial_seconds=0.005, backoff_max_seconds=0.02, **rpc)
        self.registry = CollectorRegistry()
        self.channel = open_channel(f"127.0.0.1:{port}", settings)
        self.writer = BlockWriter(
            self.channel,
            run_id=RUN_ID,
            table=TABLE,
            spec=PENDULUM,
            collector_index=1,
            collector_incarnation=2,
            max_blocks_in_flight=WINDOW,
            block_rows=BLOCK_ROWS,
            rpc=settings,
            limiter_seconds=limiter_seconds,
            metrics=AppendMetrics(self.registry),
            compact_form=CompactForm(PENDULUM) if compact_stride else None,
            compact_stride=compact_stride,
        )
        self.writer.start()

    def submit(self, *numbers):
        assert self.writer.submit(block_of(*numbers), NEVER.is_set)

    def value(self, thing, **labels):
        return self.registry.get_sample_value(f"paceline_collector_{thing}", labels)


@pytest.fixture
def start():
    """Starts replay services and writers, and ends them."""
    opened = []

    class Start:
        def replay(self, replay=None, port=0, **settings):
            replay = replay or Replay(**settings)
            server, port = serve(replay, port=port)
            opened.append(lambda: server.stop(0).wait())
            opened.append(replay.open.set)
            return replay, server, port

        def writing(self, port, **settings):
            writing = Writing(port, **settings)
            opened.append(lambda: (writing.writer.close([], 0), writing.channel.close()))
            return writing

    yield Start()
    for close in reversed(opened):
        close()


def numbers_in(replay):
    return replay.columns()["episode"].tolist()


def test_blocks_whose_answer_is_lost_are_stored_once_and_in_order(start):
    replay, _, port = start.replay(abort_every=3)
    writing = start.writing(port)
    for number in range(300):
        writing.submit(number)
    assert writing.writer.close([], 20) == 0
    assert numbers_in(replay) == list(range(300))
    assert writing.value("rows_appended_total") == 300 - replay.duplicates
    assert writing.value("blocks_appended_total") == 300
    assert writing.value("duplicate_blocks_total") == replay.duplicates == 100


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory that can be offered")
def test_each_stream_offers_memory_of_its_own_since_replay_may_still_read_what_an_earlier_one_had(start):
    replay, _, port = start.replay(abort_every=2)
    writing = start.writing(port)
    for number in range(20):
        writing.submit(number)
    assert writing.writer.close([], 20) == 0
    assert len(set(replay.offers)) == len(replay.offers) == replay.streams == 11


def test_a_replay_service_that_comes_back_gets_what_it_lacks_and_no_more(start):
    replay, server, port = start.replay()
    writing = start.writing(port)
    writing.submit(0)
    wait_until(lambda: writing.writer.in_flight == 0)
    server.stop(0).wait()
    for number in range(1, 1 + WINDOW):
        writing.submit(number)
    wait_until(lambda: writing.value("append_failures_total", reason="away"))
    start.replay(replay, port=port)
    for number in range(1 + WINDOW, 20):
        writing.submit(number)
    assert writing.writer.close([], 20) == 0
    assert numbers_in(replay) == list(range(20))


@pytest.mark.parametrize(
    ("max_blocks", "messages"),
    [(64, [[1, 2, 3, 4]]), (3, [[1, 2, 3], [4]]), (1, [[1], [2], [3], [4]]), (0, [[1], [2], [3], [4]])],
    ids=["many", "three", "one", "an older service"],
)
def test_blocks_that_wait_share_as_few_messages_as_the_service_takes(start, max_blocks, messages):
    replay, server, port = start.replay(max_blocks=max_blocks)
    server.stop(0).wait()
    writing = start.writing(port)
    for number in range(WINDOW):
        writing.submit(number)
    start.replay(replay, port=port)
    assert writing.writer.close([], 20) == 0
    assert replay.messages == messages
    assert numbers_in(replay) == list(range(WINDOW))
    assert writing.value("blocks_appended_total") == WINDOW
    assert writing.value("bytes_appended_total") == WINDOW * PENDULUM.row_bytes


def test_a_block_that_is_alone_goes_alone_and_waits_for_no_other(start):
    replay, _, port = start.replay()
    writing = start.writing(port)
    for number in range(3):
        writing.submit(number)
        replay.wait_for(lambda replay, number=number: replay.row_count == number + 1)
    assert replay.messages == [[1], [2], [3]]


@pytest.mark.parametrize(
    ("payload_bytes", "rpc", "messages"),
    [
        ((400_000, 400_000, 400_000, 400_000), {}, [[1, 2], [3, 4]]),
        ((600_000, 600_000, 300_000, 100_000), {}, [[1], [2, 3, 4]]),
        ((100_000, 2_000_000, 100_000, 100_000), {}, [[1], [2], [3, 4]]),
        ((30_000, 30_000, 30_000, 5_000), {"max_message_bytes": 1 << 17}, [[1, 2], [3, 4]]),
    ],
    ids=["equal", "unequal", "one larger than a message", "small messages"],
)
def test_what_shares_a_message_has_a_mebibyte_at_most(start, payload_bytes, rpc, messages):
    replay, server, port = start.replay()
    server.stop(0).wait()
    writing = start.writing(port, **rpc)
    for size in payload_bytes:
        writing.submit(*range(size // PENDULUM.row_bytes))
    start.replay(replay, port=port)
    assert writing.writer.close([], 20) == 0
    assert replay.messages == messages


@pytest.fixture
def sent(monkeypatch):
    """The sequences of the blocks of each message that a writer has made."""
    messages = []

    def note(run_id, table, blocks):
        messages.append([block.header.sequence for block in blocks])
        return blocks_to_wire(run_id, table, blocks)

    monkeypatch.setattr("paceline.collector.writer.blocks_to_wire", note)
    return messages


def test_while_two_messages_are_unacknowledged_blocks_wait_and_share_the_next(start, sent):
    replay, _, port = start.replay()
    replay.open.clear()
    writing = start.writing(port)
    looks, choose = [], writing.writer._next_blocks

    def look(*arguments, **settings):
        looks.append(writing.writer.in_flight)
        return choose(*arguments, **settings)

    writing.writer._next_blocks = look
    for number in range(2):
        writing.submit(number)
        wait_until(lambda number=number: len(sent) == number + 1)
    for number in range(2, WINDOW):
        writing.submit(number)
        wait_until(lambda number=number: number + 1 in looks)  # whether it is to be sent
        assert sent == [[1], [2]]
    replay.open.set()
    assert writing.writer.close([], 20) == 0
    assert sent == replay.messages == [[1], [2], [3, 4]]


def test_a_message_that_has_no_room_for_another_block_waits_for_no_acknowledgement(start, sent):
    replay, _, port = start.replay()
    replay.open.clear()
    writing = start.writing(port)
    for _ in range(WINDOW):
        writing.submit(*range(-(-MESSAGE_BYTES // PENDULUM.row_bytes)))
    wait_until(lambda: len(sent) == WINDOW)
    assert writing.writer.in_flight == WINDOW
    replay.open.set()
    assert writing.writer.close([], 20) == 0
    assert sent == [[1], [2], [3], [4]]


@pytest.mark.parametrize(
    ("shares", "messages"),
    [((0.6, 0.6), [[1], [2], [3], [4]]), ((0.3, 0.8), [[1], [2], [3], [4]]), ((0.3, 0.3), [[1], [2], [3, 4]])],
    ids=["too large for two", "too large for the next", "small"],
)
def test_a_block_waits_for_no_other_that_would_not_fit_beside_it(start, sent, shares, messages):
    replay, _, port = start.replay()
    replay.open.clear()
    writing = start.writing(port)
    for number in range(2):
        writing.submit(number)
        wait_until(lambda number=number: len(sent) == number + 1)
    for share in shares:
        writing.submit(*range(int(share * MESSAGE_BYTES / PENDULUM.row_bytes)))
    wait_until(lambda: len(sent) == len(messages) or len(messages) < WINDOW)
    replay.open.set()
    assert writing.writer.close([], 20) == 0
    assert sent == messages


def test_blocks_wait_for_two_messages_no_longer_than_until_one_is_acknowledged(start, sent):
    replay, _, port = start.replay()
    passing = threading.Semaphore(0)
    replay.open.wait = lambda seconds: passing.acquire(timeout=seconds)
    writing = start.writing(port)
    for number in range(2):
        writing.submit(number)
        wait_until(lambda number=number: len(sent) == number + 1)
    writing.submit(2)
    passing.release()
    wait_until(lambda: sent == [[1], [2], [3]])
    assert numbers_in(replay) == [0]
    passing.release(2)
    assert writing.writer.close([], 20) == 0


def test_after_a_cut_all_that_was_not_acknowledged_comes_again_and_shares_a_message(start):
    replay, server, port = start.replay()
    replay.open.clear()
    writing = start.writing(port)
    for number in range(WINDOW):
        writing.submit(number)
    wait_until(lambda: replay.received == 1)
    server.stop(0).wait()
    replay.open.set()
    seen = len(replay.messages)
    start.replay(replay, port=port)
    assert writing.writer.close([], 20) == 0
    assert replay.messages[seen:] == [[1, 2, 3, 4]]
    assert numbers_in(replay) == list(range(WINDOW))


@pytest.mark.parametrize("further", [[3], [2, 4], [1]], ids=["not the next", "more than were sent", "twice"])
def test_an_answer_that_acknowledges_what_is_not_the_oldest_ends_the_writer(start, further):
    replay, server, port = start.replay()
    server.stop(0).wait()
    replay.Append = lambda requests, context: (  # an unruly service
        replay_pb2.AppendResponse(
            sequence=1, further=[replay_pb2.AppendResponse(sequence=sequence) for sequence in further]
        )
        for _ in requests
    )
    writing = start.writing(port)
    for number in range(WINDOW - 1):
        writing.submit(number)
    start.replay(replay, port=port)
    wait_until(lambda: writing.writer.failed)
    with pytest.raises(InvalidInputError, match="acknowledged block"):
        writing.submit(WINDOW)


def test_no_more_than_the_window_is_under_way_and_submit_waits_for_room(start):
    replay, _, port = start.replay()
    replay.open.clear()
    writing = start.writing(port)
    for number in range(WINDOW):
        writing.submit(number)
    waiting = threading.Thread(target=writing.submit, args=(WINDOW,))
    waiting.start()
    wait_until(lambda: replay.received == 1)  # the handler holds it, and reads no further
    assert waiting.is_alive()
    assert writing.writer.in_flight == WINDOW == writing.value("blocks_in_flight")
    replay.open.set()
    waiting.join(20)
    assert not waiting.is_alive()
    replay.wait_for(lambda replay: replay.row_count == WINDOW + 1)
    wait_until(lambda: writing.value("blocks_in_flight") == 0)


def test_a_stop_ends_the_wait_for_room(start):
    replay, _, port = start.replay()
    replay.open.clear()
    writing = start.writing(port)
    for number in range(WINDOW):
        writing.submit(number)
    stop = StopSignal()
    stop.set()
    assert not writing.writer.submit(block_of(WINDOW), stop.is_set)


def test_closing_appends_what_is_sealed_and_the_rest_after_it(start):
    replay, _, port = start.replay()
    writing = start.writing(port)
    writing.submit(0, 1)
    assert writing.writer.close([block_of(2), block_of(3, 4)], 20) == 0
    assert numbers_in(replay) == [0, 1, 2, 3, 4]


def test_closing_gives_up_at_its_deadline_and_says_how_many_rows_are_lost(start):
    replay, _, port = start.replay()
    replay.open.clear()
    writing = start.writing(port)
    writing.submit(0, 1)
    assert writing.writer.close([block_of(2)], 0.2) == 3


def test_a_silent_stream_is_cut_and_its_blocks_are_sent_again(start):
    replay, _, port = start.replay()
    replay.open.clear()
    writing = start.writing(port, limiter_seconds=0.1, deadline_seconds=0.4)
    writing.submit(0)
    wait_until(lambda: writing.value("append_failures_total", reason="away"))
    replay.open.set()
    writing.submit(1)
    assert writing.writer.close([], 20) == 0
    assert numbers_in(replay) == [0, 1]


def test_an_old_stream_is_replaced_without_a_failure(start):
    replay, _, port = start.replay()
    writing = start.writing(port, stream_seconds=0.3)
    for number in range(40):
        writing.submit(number)
        replay.wait_for(lambda replay, number=number: replay.row_count == number + 1)
        if number % 10 == 0:
            opened = replay.streams
            wait_until(lambda opened=opened: replay.streams > opened)
    assert writing.writer.close([], 20) == 0
    assert numbers_in(replay) == list(range(40))
    assert writing.value("append_failures_total", reason="away") == 0


@pytest.mark.parametrize(
    ("refusal", "reason", "delayed"),
    [
        (LimiterTimeoutError("inserts wait for samples"), "limiter", False),
        (StoreFullError("maxmemory is reached"), "full", True),
        (StoreReadOnlyError("MISCONF: the disk is full"), "read_only", True),
        (TooManyStreamsError("all are open"), "away", True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_a_refusal_that_may_pass_is_counted_by_its_reason_and_tried_again_after_its_delay(
    start, monkeypatch, refusal, reason, delayed
):
    waits = []

    class Recorded(Backoff):
        def next_seconds(self, error: PacelineError | None = None) -> float:
            waits.append(super().next_seconds(error))
            return waits[-1]

    monkeypatch.setattr("paceline.collector.writer.Backoff", Recorded)
    monkeypatch.setattr(status, "RETRY_DELAY_MS", 150)  # in place of a second, ten times the longest wait otherwise
    replay, _, port = start.replay()
    replay.refusal = refusal
    writing = start.writing(port)
    writing.submit(0)
    wait_until(lambda: len(waits) >= 2)
    replay.refusal = None
    assert writing.writer.close([], 20) == 0
    assert numbers_in(replay) == [0]
    assert all((0.15 <= seconds <= 0.3) if delayed else (seconds <= 0.02) for seconds in waits)
    failures = {each: writing.value("append_failures_total", reason=each) for each in APPEND_FAILURES}
    assert failures == {each: len(waits) if each == reason else 0 for each in APPEND_FAILURES}


@pytest.mark.parametrize("refusal", [ReplacedError("a newer incarnation took over"), RowSpecError("another spec")])
def test_a_refusal_for_good_reaches_the_collecting_loop(start, refusal):
    replay, _, port = start.replay()
    replay.refusal = refusal
    writing = start.writing(port)
    writing.submit(0)
    for number in range(1, WINDOW):
        wait_until(lambda: writing.writer.failed)
        with pytest.raises(type(refusal), match=str(refusal)):
            writing.submit(number)


def test_the_writer_learns_that_replay_has_all_rows_and_takes_no_more(start):
    replay, _, port = start.replay(complete_after_rows=6)
    writing = start.writing(port)
    for number in range(0, 6, 2):
        writing.submit(number, number + 1)
    wait_until(lambda: writing.writer.complete)
    writing.submit(6)
    assert writing.writer.close([block_of(7)], 20) == 0
    assert numbers_in(replay) == list(range(6))


def test_every_block_says_whose_it_is_and_when_it_was_sealed(start):
    replay, _, port = start.replay()
    writing = start.writing(port)
    writing.submit(5, 6)
    writing.submit(7)
    assert writing.writer.close([], 20) == 0
    first, second = (block.header for block in replay.blocks)
    assert (first.collector_index, first.collector_incarnation, first.sequence, first.row_count) == (1, 2, 1, 2)
    assert (second.sequence, second.row_count) == (2, 1)
    assert 0 <= second.sealed_at.ToNanoseconds() - first.sealed_at.ToNanoseconds() < 20e9
    assert first.checksum == block_of(5, 6).checksum()
    assert np.array_equal(replay.columns()["episode"], [5, 6, 7])
    assert [block.header.compact_stride for block in replay.blocks] == [0, 0]


def chained_block(row_count=64, stride=2):
    block = Block.empty(PENDULUM, row_count)
    columns = block.columns
    columns["observation"] = np.random.default_rng(0).standard_normal((row_count, 3))
    columns["next_observation"][:-stride] = columns["observation"][stride:]
    return block


def test_a_block_goes_in_the_compact_form_where_it_is_smaller_and_in_the_plain_one_otherwise(start):
    replay, _, port = start.replay()
    writing = start.writing(port, compact_stride=2)
    block = chained_block()
    assert writing.writer.submit(block, NEVER.is_set)
    writing.submit(*range(64))  # observations of zeros: each row goes on in any other
    assert writing.writer.submit(block.first(2), NEVER.is_set)  # no row goes on in so few
    assert writing.writer.close([chained_block(stride=3)], 20) == 0
    assert [stored.header.compact_stride for stored in replay.blocks] == [2, 2, 0, 0]
    assert [stored.header.checksum for stored in replay.blocks] == [
        checksum_of(stored.rows) for stored in replay.blocks
    ]
    assert replay.blocks[0].rows == bytes(CompactForm(PENDULUM).encode(block, 2))
    assert np.array_equal(replay.columns()[:64], block.columns)
    assert np.array_equal(replay.columns()[64:128], block_of(*range(64)).columns)
    wait_until(lambda: writing.value("bytes_appended_total") == sum(len(stored.rows) for stored in replay.blocks))
