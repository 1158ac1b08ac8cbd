"""Receives each row of a table once, in order, by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import grpc
import numpy as np
import numpy.typing as npt

from paceline.config import RpcConfig
from paceline.errors import BlockError, DeadlineError, PacelineError, UnavailableError
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.replay_clock import ReplayClock
from paceline.learner.replay_stream import ReplayStream
from paceline.rows import ByteMatrix, RowSpec
from paceline.rpc.bulk import FOLLOW_RESPONSE, Bulk
from paceline.rpc.shared_memory import OfferedMemory, part_of
from paceline.rpc.status import raising
from paceline.rpc.wire import row_spec_to_wire
from paceline.telemetry import get_logger
from paceline.v1 import replay_pb2

LAST_REPORT_SECONDS = 2.0
"""A source that closes waits so long for replay to have noted its progress."""
LOOK_SECONDS = 0.02
"""How often replay is asked whether it has noted what was done."""


class Reader(Protocol):
    """Whom a follower gives the rows. Called by its thread."""

    def begin(self, table: replay_pb2.TableDescription) -> replay_pb2.FollowRequest:
        """A stream is about to open to a table of this description: which rows to ask for, and what was done so far."""

    def forget(self) -> None:
        """Rows that came are gone from replay's record, and others have their keys: all of them are to come anew."""

    def progress(self) -> replay_pb2.FollowRequest:
        """What was done so far, asked for after each `Follower.report`. Called by a thread of gRPC's."""

    def take(self, news: replay_pb2.FollowResponse, rows: ByteMatrix, stored_at: npt.NDArray[np.float64]) -> None:
        """Rows came, or news without any. The arrays stay as they are, and the rows are read-only.

        Where `news` says that they are `rows_in_memory`, they stay until a `progress` that has their keys before its
        `released_before`, and at most until the next `begin`.
        `stored_at` is by the learner's clock; 0 where it is not known.
        """

    def wake(self) -> None:
        """Something changed that a wait should look at: the stream was cut, or failed for good."""


class Follower:
    """The thread. It opens the stream again whenever it is cut; the reader says from where."""

    def __init__(
        self,
        channel: grpc.Channel,
        reader: Reader,
        *,
        run_id: str,
        table: str,
        spec: RowSpec,
        rpc: RpcConfig,
        metrics: LearnerMetrics,
        shard: int,
        watches_clock: bool,
        memory_rows: int,
        learner_id: str = "",
        learner_incarnation: int = 0,
    ) -> None:
        """Prepare; `start` begins.

        Args:
            memory_rows: those that may lie in the memory which replay puts them in, if it can; 1 or more.
            watches_clock: have the times at which rows were stored by the learner's clock to the best.
            learner_id, learner_incarnation: of the learner that follows; empty and 0: it says none.
        """
        peer = f"replay shard {shard}"
        self._reader, self._spec, self._metrics, self._peer = reader, spec, metrics, peer
        self._run_id, self._table, self._incarnation = run_id, table, learner_incarnation
        self._stream = ReplayStream(
            channel,
            replay_pb2.OpenTableRequest(
                run_id=run_id,
                table=table,
                row_spec=row_spec_to_wire(spec),
                learner_id=learner_id,
                learner_incarnation=learner_incarnation,
            ),
            rpc,
            peer=peer,
            on_cut=self._note_cut,
        )
        self._clock = ReplayClock(
            self._stream.stub,
            run_id=run_id,
            deadline_seconds=rpc.deadline_seconds,
            on_estimate=lambda offset: metrics.set_replay_clock(str(shard), offset),
        )
        self._watches_clock = watches_clock
        self._memory_bytes = memory_rows * spec.row_bytes if rpc.shared_memory else 0
        self._memory: OfferedMemory | None = None
        """Of the stream that is open: what an earlier one may still write is where nobody looks any more."""
        self._changed = threading.Condition()
        self._stream_number = 0
        self._has_news = False
        self._last_stored_at: float | None = None
        """Of the last row that came, by replay's clock."""
        self._received_end: int | None = None
        """Key after that row; of a follower that got none yet, that of the first one it looked for."""
        self.failure: PacelineError | None = None
        """Why no row will come any more."""
        self._thread = threading.Thread(target=self._follow_until_closed, name="follower", daemon=True)

    @property
    def reason(self) -> str:
        """Why nothing comes."""
        return self._stream.reason

    @property
    def is_away(self) -> bool:
        """Whether replay was asked and cannot be reached or serves nobody."""
        return self._stream.is_away

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()
        if self._watches_clock:
            self._clock.start()

    def report(self) -> None:
        """Have the reader's progress sent, soon. Never waits."""
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def wait_until_noted(
        self, count_of: Callable[[replay_pb2.TableDescription], int], expected: int
    ) -> tuple[int, str | None]:
        """Wait until replay's description of the table has such a count; the one that it had last, and why it has not.

        A report that is on its way is lost with the stream: whoever closes waits for it.
        """
        until = time.monotonic() + LAST_REPORT_SECONDS
        noted, reason = 0, "it has not said so yet"
        while self.failure is None and (left := until - time.monotonic()) > 0:
            try:
                with raising(self._peer):
                    noted = count_of(self._table_of(self._clock.describe(left)))
                if noted >= expected:
                    return noted, None
            except DeadlineError:
                pass  # the wait's own; what was said before is why
            except PacelineError as error:
                reason = str(error)
            with self._changed:
                self._changed.wait(min(left, LOOK_SECONDS))
        return noted, str(self.failure or reason)

    def close(self) -> None:
        """End the thread."""
        self._stream.close()
        self._next_stream()
        self._clock.close()
        self._thread.join(5)

    def _follow_until_closed(self) -> None:
        try:
            self._stream.run(self._follow)
        except PacelineError as error:
            self.failure = error
        except Exception as error:
            # The one boundary of this thread: its end must end the process, not starve it unnoticed.
            get_logger().error("follower_failed", exc_info=error)
            self.failure = PacelineError(f"following {self._peer} failed: {type(error).__name__}: {error}")
        self._reader.wake()

    def _follow(self) -> None:
        """Open one stream and give its rows to the reader until it ends."""
        table = self._table_of(self._clock.describe())
        # In this order: a report that comes from now on is for the new stream, whose beginning may say it already.
        number = self._next_stream()
        first = self._reader.begin(table)
        expected = first.from_row
        if expected and self._received_end is not None:
            first.received_end_row = self._received_end
        if expected and self._last_stored_at is not None:
            first.last_stored_at = self._last_stored_at
        self._memory = OfferedMemory.create(self._memory_bytes) if self._memory_bytes else None
        if self._memory is not None:
            first.memory.CopyFrom(self._memory.offer)
        response: Bulk[replay_pb2.FollowResponse] | None = None
        try:
            for response in self._stream.open(
                "Follow",
                self._requests(number, first),
                replay_pb2.FollowRequest.SerializeToString,
                FOLLOW_RESPONSE.deserialize,
            ):
                self._stream.note_answer()
                expected = self._take(response, expected)
        finally:
            response = None  # the error that ended the stream keeps this frame, and the memory is to be gone with it
            self._close_memory()

    def _take(self, response: Bulk[replay_pb2.FollowResponse], expected: int) -> int:
        """Give the reader a message, whose rows have keys from `expected` on; the key after them."""
        rows = self._rows_of(response)
        if response.head.rows_lost or response.head.first_row < expected:
            self._last_stored_at = self._received_end = None
            self._reader.forget()
            raise UnavailableError(
                f"{self._peer} lost rows that came before row {expected}, with the end of its record; asking what "
                "it has now"
            )
        end = response.head.first_row + len(rows)
        if len(rows):
            self._last_stored_at = float(response.arrays["stored_at"][-1])
        if len(rows) or self._received_end is None:
            self._received_end = end
        # Once, as they come: what replay's clock is set to later says nothing of these.
        self._reader.take(response.head, rows, self._clock.to_own(response.arrays["stored_at"]))
        return end

    def _close_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _table_of(self, described: replay_pb2.DescribeTablesResponse) -> replay_pb2.TableDescription:
        """Raises UnavailableError while replay does not serve it: it may have come back without."""
        for table in described.tables:
            if table.name == self._table:
                return table
        raise UnavailableError(f"{self._peer} has no table {self._table!r} yet")

    def _next_stream(self) -> int:
        """End the requests of the stream before; gives the number of the next one."""
        with self._changed:
            self._stream_number += 1
            self._changed.notify_all()
            return self._stream_number

    def _requests(self, number: int, first: replay_pb2.FollowRequest) -> Iterator[replay_pb2.FollowRequest]:
        request = first
        while True:
            request.run_id, request.table = self._run_id, self._table
            request.learner_incarnation = self._incarnation
            yield request
            with self._changed:
                self._changed.wait_for(lambda: self._has_news or self._stream_number != number)
                if self._stream_number != number:
                    return
                self._has_news = False
            request = self._reader.progress()

    def _rows_of(self, response: Bulk[replay_pb2.FollowResponse]) -> ByteMatrix:
        head, row_bytes = response.head, self._spec.row_bytes
        self._spec.require_digest(head.row_spec_digest)
        count = head.row_count
        if not head.reads_memory:
            self._close_memory()
        if head.HasField("rows_in_memory"):
            response.payload = part_of(None if self._memory is None else self._memory.bytes, head.rows_in_memory)
        if count < 0 or len(response.payload) != count * row_bytes or len(response.arrays["stored_at"]) != count:
            raise BlockError(
                f"replay sent {count} rows in {len(response.payload)} bytes with {len(response.arrays['stored_at'])} "
                f"times: expected {row_bytes} bytes and one time a row"
            )
        rows: ByteMatrix = np.frombuffer(response.payload, np.uint8).reshape(count, row_bytes)
        rows.flags.writeable = False
        return rows

    def _note_cut(self, error: PacelineError, is_away: bool) -> None:
        self._metrics.sample_failures.labels(type(error).__name__).inc()
        self._reader.wake()
