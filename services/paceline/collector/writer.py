"""Carries sealed blocks to replay: in order, each stored once, at most so many unacknowledged."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc

from paceline.collector.append_metrics import AppendMetrics
from paceline.collector.outbox import Outbox
from paceline.config import RpcConfig
from paceline.errors import (
    DeadlineError,
    InvalidInputError,
    LimiterTimeoutError,
    NotFoundError,
    PacelineError,
    StoreFullError,
    StoreReadOnlyError,
)
from paceline.process import StopSignal
from paceline.rows import Block, CompactForm, RowSpec, checksum_of
from paceline.rpc.bulk import APPEND_REQUEST, MESSAGE_BYTES, Bulk
from paceline.rpc.client import Backoff
from paceline.rpc.status import RETRYABLE, raising
from paceline.rpc.wire import SentBlock, blocks_to_wire, row_spec_to_wire, timestamp
from paceline.telemetry import get_logger
from paceline.v1 import replay_pb2, replay_pb2_grpc, rows_pb2

_PEER = "the replay service"
_STOP_CHECK_SECONDS = 0.2
"""How late a wait may notice a stop signal or the end of the run, which wake nobody."""
_JOIN_SECONDS = 1.0
_STREAM_REUSE = 0.9
"""Share of a stream's deadline after which the writer ends it itself and opens the next."""
_PROMPT_MESSAGES = 2
"""While fewer are unacknowledged, a block waits for no other: replay stores one message while the next one arrives, and
a third would only wait there. What is sealed until then shares it: of two blocks of 40 KB in one message, each costs
replay two thirds of what it costs alone."""


_REASONS: dict[type[PacelineError], str] = {
    LimiterTimeoutError: "limiter",
    StoreFullError: "full",
    StoreReadOnlyError: "read_only",
    PacelineError: "away",
}
"""The first that fits names why the stream was cut."""


@dataclass(frozen=True)
class _Sealed:
    block: SentBlock
    sealed_at: float  # monotonic

    @property
    def sequence(self) -> int:
        return self.block.header.sequence

    @property
    def row_count(self) -> int:
        return self.block.header.row_count


class BlockWriter:
    """Appends blocks on a thread of its own, over one stream.

    Small ones share a message while two others are unacknowledged. A block stays here until replay acknowledges it;
    after a cut every block that is still here is sent again with its old sequence, and replay knows which it has.
    `submit` waits while `max_blocks_in_flight` blocks are here: that is the back-pressure.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        run_id: str,
        table: str,
        spec: RowSpec,
        collector_index: int,
        collector_incarnation: int,
        max_blocks_in_flight: int,
        block_rows: int,
        rpc: RpcConfig,
        limiter_seconds: float,
        metrics: AppendMetrics,
        compact_form: CompactForm | None = None,
        compact_stride: int = 1,
    ) -> None:
        """Prepare; nothing is sent before `start`.

        Args:
            block_rows: of a block at most; a longer one is sent all the same.
            compact_form: the form of blocks that are smaller in it; None: all go in the plain form.
            compact_stride: rows from one of an environment to that which goes on where it ends.
            limiter_seconds: how long replay may hold one block back before it says so.
        """
        self._append = channel.stream_stream(
            "/paceline.v1.ReplayService/Append",
            request_serializer=APPEND_REQUEST.serialize,
            response_deserializer=replay_pb2.AppendResponse.FromString,
        )
        self._stub = replay_pb2_grpc.ReplayServiceStub(channel)
        self._run_id, self._table, self._spec = run_id, table, spec
        self._index, self._incarnation = collector_index, collector_incarnation
        self._window, self._rpc, self._metrics = max_blocks_in_flight, rpc, metrics
        # Room for a window of full blocks, and for one more, since each lies in one piece.
        self._outbox_bytes = (max_blocks_in_flight + 1) * block_rows * spec.row_bytes
        self._message_bytes, self._message_blocks = min(MESSAGE_BYTES, rpc.max_message_bytes // 2), 1
        self._form, self._stride = compact_form, compact_stride
        # A block may wait behind the others of the window, each of which the limiter may hold back.
        self._answer_seconds = limiter_seconds + rpc.deadline_seconds
        self._backoff, self._log = Backoff(rpc), get_logger()
        self._changed = threading.Condition()
        self._unacknowledged: collections.deque[_Sealed] = collections.deque()
        self._next_sequence = 1
        self._failure: PacelineError | None = None
        self._outage = self._is_silent = False
        self._last_answer = time.monotonic()
        self._closing, self._abandoned = False, StopSignal()
        self._call: grpc.Call | None = None
        self._outbox: Outbox | None = None
        """Of the stream that is open: replay may still be reading what an earlier one had."""
        self._thread = threading.Thread(target=self._run, name="block-writer", daemon=True)
        self.complete = False
        """Replay has all the rows that the run asked for."""

    @property
    def in_flight(self) -> int:
        """Blocks sealed and not acknowledged."""
        return len(self._unacknowledged)

    @property
    def failed(self) -> bool:
        """Whether replay refused a block for good; `submit` raises why."""
        return self._failure is not None

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def submit(self, block: Block, ended: Callable[[], bool]) -> bool:
        """Take a sealed block, whose rows must not change any more; whether there was room before `ended` was true.

        Waits while the window is full, as long as replay is slow or away; its log line says why.

        Raises:
            PacelineError: replay refused a block for good; no later one can be stored in order.
        """
        sent = self._prepare(block)
        with self._changed:
            while self._failure is None and len(self._unacknowledged) >= self._window and not self.complete:
                if ended():
                    return False
                self._changed.wait(_STOP_CHECK_SECONDS)
            if self._failure is not None:
                raise self._failure
            if self.complete:
                return True  # no further row is wanted
            self._enqueue(sent)
            return True

    def close(self, rest: Sequence[Block], seconds: float) -> int:
        """Send what is sealed, and `rest` after it, for at most `seconds`; rows that were not acknowledged."""
        prepared = [self._prepare(block) for block in rest]
        with self._changed:
            if self._failure is None and not self.complete:
                for sent in prepared:
                    self._enqueue(sent)
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._unacknowledged or self._failure is not None, seconds)
            lost = sum(sealed.row_count for sealed in self._unacknowledged)
            self._abandoned.set()
            if self._call is not None:
                self._call.cancel()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)  # closing the channel ends a call that it may still be in
        if lost and not self.complete:
            self._log.warning(
                "rows_not_appended", rows=lost, waited_seconds=seconds, reason="replay did not acknowledge"
            )
        return lost

    def _prepare(self, block: Block) -> SentBlock:
        """What is sent of a block, in the form that is smaller, less its place in the order."""
        compact = None if self._form is None else self._form.encode(block, self._stride)
        payload = block.data.reshape(-1) if compact is None else compact
        header = rows_pb2.BlockHeader(
            collector_index=self._index,
            collector_incarnation=self._incarnation,
            row_count=block.row_count,
            row_spec_digest=self._spec.digest,
            checksum=checksum_of(payload.data),
            compact_stride=0 if compact is None else self._stride,
        )
        return SentBlock(header, payload)

    def _enqueue(self, sent: SentBlock) -> None:
        sent.header.sequence = self._next_sequence
        sent.header.sealed_at.CopyFrom(timestamp())
        self._next_sequence += 1
        if not self._unacknowledged:
            self._last_answer = time.monotonic()
        self._unacknowledged.append(_Sealed(sent, time.monotonic()))
        self._metrics.blocks_in_flight.set(len(self._unacknowledged))
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while not self._done():
                try:
                    self._open_table()
                    self._stream()
                except (*RETRYABLE, NotFoundError) as error:
                    # NotFoundError: replay came back without the table, which the next turn opens.
                    if not self._abandoned.is_set():
                        self._note_outage(error)
                        self._abandoned.wait(self._backoff.next_seconds(error))
        except PacelineError as error:
            self._fail(error)
        except Exception as error:
            if self._abandoned.is_set():
                return  # the channel was closed under a call
            # The one boundary of this thread: its end must end the process, not stop the rows unnoticed.
            self._log.error("block_writer_failed", exc_info=error)
            self._fail(PacelineError(f"the block writer failed: {type(error).__name__}: {error}"))

    def _done(self) -> bool:
        with self._changed:
            return self._abandoned.is_set() or (self._closing and not self._unacknowledged)

    def _open_table(self) -> None:
        request = replay_pb2.OpenTableRequest(
            run_id=self._run_id, table=self._table, row_spec=row_spec_to_wire(self._spec)
        )
        with raising(_PEER):
            answer = self._stub.OpenTable(request, timeout=self._rpc.deadline_seconds)
        if answer.row_bytes != self._spec.row_bytes:
            raise InvalidInputError(
                f"{_PEER} lays a row of this table out in {answer.row_bytes} bytes: expected {self._spec.row_bytes}; "
                "run the same version of Paceline on both sides"
            )
        self._message_blocks = max(1, answer.max_blocks_per_append)

    def _stream(self) -> None:
        """Send over one stream until it is cut, grows old, or everything is acknowledged at the end."""
        ended = threading.Event()
        with self._changed:
            self._last_answer, self._is_silent = time.monotonic(), False
        with raising(_PEER):
            call = self._append(self._requests(ended), timeout=self._rpc.stream_seconds)
            with self._changed:
                self._call = call
                if self._abandoned.is_set():
                    call.cancel()
            try:
                for answer in call:
                    if self._outbox is not None:
                        self._outbox.note(answer)
                    self._acknowledge(answer)
            except grpc.RpcError:
                if self._is_silent:
                    raise DeadlineError(
                        f"{_PEER} acknowledged nothing for {self._answer_seconds:g} s, longer than its limiter may "
                        "wait; the stream is cut and opened again"
                    ) from None
                raise
            finally:
                call.cancel()
                with self._changed:
                    ended.set()
                    self._changed.notify_all()
                    if self._outbox is not None:
                        self._outbox.close()
                    self._outbox = self._call = None

    def _requests(self, ended: threading.Event) -> Iterator[Bulk[replay_pb2.AppendRequest]]:
        """What one stream sends: every unacknowledged block from the oldest on, then each new one.

        Blocks that wait at the same time share a message. While `_PROMPT_MESSAGES` are unacknowledged only a full one
        goes, otherwise none waits.
        """
        ends: collections.deque[int] = collections.deque()  # last sequence of each message that is unacknowledged
        sent, old_at = 0, time.monotonic() + self._rpc.stream_seconds * _STREAM_REUSE
        outbox: Outbox | None = None
        while True:
            with self._changed:
                now = time.monotonic()
                if ended.is_set() or self._abandoned.is_set() or now > old_at:
                    return
                oldest = self._next_sequence - len(self._unacknowledged)
                while ends and ends[0] < oldest:
                    ends.popleft()
                blocks = self._next_blocks(sent, only_full=len(ends) >= _PROMPT_MESSAGES)
                if not blocks:
                    if self._closing and not self._unacknowledged:
                        return
                    late_at = self._last_answer + self._answer_seconds if self._unacknowledged else old_at
                    if now > late_at:
                        self._is_silent = True
                        if self._call is not None:
                            self._call.cancel()
                        return
                    self._changed.wait(min(late_at, old_at) - now + 0.001)
                    continue
                if sent == 0 and self._rpc.shared_memory:
                    outbox = self._outbox = Outbox.create(self._outbox_bytes)
            request = blocks_to_wire(self._run_id, self._table, blocks)
            if outbox is not None:
                outbox.pass_on(request)
            yield request
            sent = blocks[-1].header.sequence
            ends.append(sent)

    def _next_blocks(self, sent: int, *, only_full: bool) -> list[SentBlock]:
        """The oldest blocks after the one of sequence `sent`, as many as share a message. The lock is held.

        `only_full`: none if one more would have room beside them.
        """
        blocks: list[SentBlock] = []
        payload_bytes = 0
        for sealed in self._unacknowledged:
            if sealed.sequence <= sent:
                continue
            payload_bytes += sealed.block.payload_bytes
            if blocks and payload_bytes > self._message_bytes:
                return blocks
            blocks.append(sealed.block)
            if payload_bytes >= self._message_bytes or len(blocks) == self._message_blocks:
                return blocks
        # The next block is taken to be as large as the last.
        has_room = bool(blocks) and payload_bytes + blocks[-1].payload_bytes <= self._message_bytes
        return [] if only_full and has_room else blocks

    def _acknowledge(self, answer: replay_pb2.AppendResponse) -> None:
        answers = (answer, *answer.further)
        with self._changed:
            self._last_answer = time.monotonic()
            acknowledged = [self._take_acknowledged(each.sequence) for each in answers]
            self.complete = self.complete or any(each.complete for each in answers)
            self._metrics.blocks_in_flight.set(len(self._unacknowledged))
            self._changed.notify_all()
        for each, sealed in zip(answers, acknowledged, strict=True):
            self._metrics.append_seconds.observe(self._last_answer - sealed.sealed_at)
            self._metrics.blocks_appended.inc()
            self._metrics.rows_appended.inc(each.stored_row_count)
            if each.duplicate:
                self._metrics.duplicates.inc()
            else:
                self._metrics.bytes_appended.inc(sealed.block.payload_bytes)
        self._backoff.reset()
        if self._outage:
            self._outage = False
            self._log.info("appends_resumed", sequence=answer.sequence)

    def _take_acknowledged(self, sequence: int) -> _Sealed:
        if not self._unacknowledged or self._unacknowledged[0].sequence != sequence:
            expected = self._unacknowledged[0].sequence if self._unacknowledged else "none"
            raise InvalidInputError(
                f"{_PEER} acknowledged block {sequence}: expected {expected}, the oldest of this collector"
            )
        return self._unacknowledged.popleft()

    def _note_outage(self, error: PacelineError) -> None:
        reason = next(reason for cls, reason in _REASONS.items() if isinstance(error, cls))
        self._metrics.append_failures.labels(reason).inc()
        if not self._outage:
            self._outage = True
            self._log.warning("appends_waiting", reason=str(error), blocks=len(self._unacknowledged))

    def _fail(self, error: PacelineError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
