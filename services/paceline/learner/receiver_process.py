"""The receiving process: takes batches from a replay service and puts them into shared memory. It imports no torch.

    python -m paceline.learner.receiver_process SOCKET_DESCRIPTOR MEMORY_DESCRIPTOR

Started by `paceline.learner.sources.sampled`. A thread of the training process that received 250 MB/s would cost it a
seventh of its updates; this process costs it next to nothing. It waits for its turn on a core instead of interrupting
the training there (measured: 75 interruptions a second instead of 150, 2 % more updates). It ignores SIGTERM and
SIGINT, since a Ctrl-C reaches every process of a terminal and the training process decides when it needs no more rows.
It ends when their socket closes, which it does however the training process ends.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np

from paceline.config import RpcConfig, SecurityConfig
from paceline.errors import BlockError, PacelineError
from paceline.learner.batch_memory import BatchMemory
from paceline.learner.control import Message, take_messages
from paceline.learner.priority_updates import PriorityUpdates
from paceline.learner.replay_clock import ReplayClock
from paceline.learner.replay_stream import ReplayStream
from paceline.process import adopt_epoch, die_with_parent, tune_allocator, yield_to_others
from paceline.rpc.bulk import SAMPLE_RESPONSE, Bulk
from paceline.rpc.client import open_channel
from paceline.rpc.shared_memory import OfferedMemory, part_of
from paceline.rpc.tokens import LEARNER
from paceline.telemetry import configure_logging, get_logger
from paceline.v1 import replay_pb2, rows_pb2

_TELL_ROWS_SECONDS = 1.0


class Orders:
    """Empty slots, each of which is a batch that the training process wants, in the order in which they are filled."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._slots: collections.deque[int] = collections.deque()
        self._unasked = 0
        self._stream = 0
        self._policy_version = 0

    def add(self, slots: Sequence[int], policy_version: int) -> None:
        """So many batches more are wanted."""
        with self._changed:
            self._slots.extend(slots)
            self._unasked += len(slots)
            self._policy_version = policy_version
            self._changed.notify_all()

    def begin_stream(self) -> int:
        """Ask anew for all that is wanted, and end the requests of the stream before; gives the stream's number."""
        with self._changed:
            self._stream += 1
            self._unasked = len(self._slots)
            self._changed.notify_all()
            return self._stream

    def next_request(self, stream: int) -> tuple[int, int] | None:
        """Wait for batches to ask for: how many, and the newest policy version. None: the stream is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._unasked or self._stream != stream)
            if self._stream != stream:
                return None
            count, self._unasked = self._unasked, 0
            return count, self._policy_version

    def first(self) -> int | None:
        """The slot that is filled now, or None when no batch is wanted."""
        with self._changed:
            return self._slots[0] if self._slots else None

    def take(self) -> None:
        """The first slot is full."""
        with self._changed:
            self._slots.popleft()


class Receiver:
    """Fills slots until it is killed or replay refuses for good."""

    def __init__(self, start: Message, connection: socket.socket, memory_descriptor: int) -> None:
        fields = start.fields
        declaration = replay_pb2.OpenTableRequest.FromString(start.body)
        self._batch_size, self._row_bytes = fields["batch_size"], fields["row_bytes"]
        self._row_spec_digest = bytes.fromhex(fields["row_spec_digest"])
        self._details: bool = fields["details"]
        self._times: bool = fields["times"]
        self._tells_rows: bool = fields["tells_rows"]
        self._seeds = np.random.SeedSequence(fields["seed"])
        self._memory = BatchMemory(
            memory_descriptor,
            slot_count=fields["slot_count"],
            batch_size=self._batch_size,
            row_bytes=self._row_bytes,
        )
        self._connection, self._sending = connection, threading.Lock()
        self._orders = Orders()
        # Of all slots but the one that the training process reads: more batches are never owed.
        self._owed_bytes = (fields["slot_count"] - 1) * self._batch_size * self._row_bytes
        self._shared: OfferedMemory | None = None
        """Of the stream that is open: what an earlier one may still write is where nobody looks any more."""
        self._order = replay_pb2.SampleRequest(
            run_id=declaration.run_id,
            table=declaration.table,
            batch_size=self._batch_size,
            row_details=self._details,
            base_version=fields["base_version"],
            learner_incarnation=fields["learner_incarnation"],
        )
        rpc = self._rpc = RpcConfig.model_validate(fields["rpc"])
        peer = f"replay at {fields['address']}"
        channel = open_channel(fields["address"], rpc, SecurityConfig.model_validate(fields["security"]), LEARNER)
        self._stream = ReplayStream(channel, declaration, rpc, peer=peer, on_cut=self._tell_cut)
        self._clock = ReplayClock(
            self._stream.stub,
            run_id=declaration.run_id,
            deadline_seconds=rpc.deadline_seconds,
            on_estimate=lambda offset: self._send("clock", **vars(offset)),
        )
        self._priorities = (
            PriorityUpdates(
                channel,
                run_id=declaration.run_id,
                table=declaration.table,
                rpc=rpc,
                peer=peer,
                on_done=lambda sent, dropped: self._send("priorities", sent=sent, dropped=dropped),
            )
            if fields["has_priorities"]
            else None
        )

    def run(self, received: bytearray) -> None:
        """Receive until replay refuses for good. `received`: what came by the socket after the start."""
        threading.Thread(target=self._listen, args=(received,), name="listen", daemon=True).start()
        if self._tells_rows:
            threading.Thread(target=self._tell_rows, name="tell-rows", daemon=True).start()
        if self._times:
            self._clock.start()
        try:
            self._stream.run(self._fetch)
        except PacelineError as error:
            self._send("failed", error=type(error).__name__, message=str(error))
        except Exception as error:
            # The one boundary of this process: its end must end the learner, not starve it unnoticed.
            get_logger().error("receiver_failed", exc_info=error)
            text = f"the receiving process failed: {type(error).__name__}: {error}; its log says more"
            self._send("failed", error=PacelineError.__name__, message=text)

    def _fetch(self) -> None:
        """Open one stream and fill slots from it until it ends. A slot that was filled in part is filled anew."""
        stream = self._orders.begin_stream()
        filled = 0
        self._shared = OfferedMemory.create(self._owed_bytes) if self._rpc.shared_memory else None
        response: Bulk[replay_pb2.SampleResponse] | None = None
        try:
            for response in self._stream.open(
                "Sample",
                self._requests(stream, None if self._shared is None else self._shared.offer),
                replay_pb2.SampleRequest.SerializeToString,
                SAMPLE_RESPONSE.deserialize,
            ):
                self._stream.note_answer()
                filled = self._take(response, filled)
        finally:
            response = None  # the error that ended the stream keeps this frame, and the memory is to be gone with it
            self._close_shared()

    def _close_shared(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _requests(self, stream: int, memory: rows_pb2.SharedMemory | None) -> Iterator[replay_pb2.SampleRequest]:
        seed = int(self._seeds.spawn(1)[0].generate_state(1, np.uint64)[0])
        while (wanted := self._orders.next_request(stream)) is not None:
            request = replay_pb2.SampleRequest(
                batch_count=wanted[0], policy_version=wanted[1], seed=seed, memory=memory
            )
            request.MergeFrom(self._order)
            memory = None
            yield request

    def _take(self, response: Bulk[replay_pb2.SampleResponse], filled: int) -> int:
        """Copy the rows of a message into slots, of which the first has `filled` rows; how many the last one has."""
        head, count = response.head, response.head.row_count
        if head.HasField("rows_in_memory"):
            response.payload = part_of(None if self._shared is None else self._shared.bytes, head.rows_in_memory)
        else:
            self._close_shared()  # replay does not see it
        self._check(response)
        rows = np.frombuffer(response.payload, np.uint8).reshape(count, self._row_bytes)
        stored_at = self._clock.to_own(response.arrays["stored_at"]) if self._details else None
        position = 0
        while position < count:
            number = self._orders.first()
            if number is None:
                raise BlockError(f"replay sent {count - position} rows more than it was asked for")
            slot = self._memory.slots[number]
            taken = slice(position, min(count, position + self._batch_size - filled))
            into = slice(filled, filled + taken.stop - taken.start)
            slot.rows[into] = rows[taken]
            if stored_at is not None:
                slot.keys[into] = response.arrays["keys"][taken].view(np.int64)
                slot.probabilities[into] = response.arrays["probabilities"][taken]
                slot.stored_at[into] = stored_at[taken]
            position, filled = taken.stop, into.stop
            if filled == self._batch_size:
                self._orders.take()
                self._send(
                    "batch",
                    slot=number,
                    table_row_count=head.table_row_count,
                    inserted_row_count=head.inserted_row_count,
                )
                filled = 0
        return filled

    def _check(self, response: Bulk[replay_pb2.SampleResponse]) -> None:
        """Raise BlockError or RowSpecError unless the message holds what it says."""
        head, arrays = response.head, response.arrays
        if head.row_spec_digest != self._row_spec_digest:
            raise BlockError(
                f"replay sent rows of spec {head.row_spec_digest.hex()}: expected {self._row_spec_digest.hex()}, the "
                "one that the table was opened with"
            )
        if head.row_count < 1 or len(response.payload) != head.row_count * self._row_bytes:
            raise BlockError(
                f"replay sent {head.row_count} rows in {len(response.payload)} bytes: expected {self._row_bytes} "
                "bytes a row"
            )
        if self._details:
            for name in ("keys", "probabilities", "stored_at"):
                if len(arrays[name]) != head.row_count:
                    raise BlockError(
                        f"replay sent {len(arrays[name])} {name} with {head.row_count} rows: expected one for each"
                    )

    def _listen(self, received: bytearray) -> None:
        """Do what the training process says, until it is gone."""
        while True:
            for message in take_messages(received):
                if message.kind == "order":
                    self._orders.add(message.fields["slots"], message.fields["policy_version"])
                elif message.kind == "priorities" and self._priorities is not None:
                    count = message.fields["count"]
                    self._priorities.put(
                        np.frombuffer(message.body, np.int64, count),
                        np.frombuffer(message.body, np.float32, count, 8 * count),
                    )
            data = _receive(self._connection)
            if not data:
                # Nobody wants anything of this process any more, and it has nothing to put in order.
                os._exit(0)
            received += data

    def _tell_rows(self) -> None:
        """Tell how many rows there are, now and then: for long no batch may come that says it, or none be wanted."""
        while True:
            tables: Iterable[replay_pb2.TableDescription] = ()
            with contextlib.suppress(grpc.RpcError):
                tables = self._clock.describe().tables
            for table in tables:
                if table.name == self._order.table and table.inserted_row_count >= table.limiter.min_row_count:
                    self._send("rows", table_row_count=table.row_count, inserted_row_count=table.inserted_row_count)
            time.sleep(_TELL_ROWS_SECONDS)

    def _tell_cut(self, error: PacelineError, is_away: bool) -> None:
        self._send("cut", error=type(error).__name__, message=str(error), is_away=is_away)

    def _send(self, kind: str, **fields: Any) -> None:
        data = Message(kind, fields).encode()
        with self._sending:
            try:
                self._connection.sendall(data)
            except OSError:
                os._exit(0)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 18)
    except OSError:
        return b""


def main(arguments: list[str]) -> int:
    """Receive; the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)  # one that is stopped cannot see the end of its socket
    tune_allocator()
    yield_to_others()
    descriptors = [int(argument) for argument in arguments]
    connection = socket.socket(fileno=descriptors[0])
    received = bytearray()
    while not (messages := take_messages(received, limit=1)):
        data = _receive(connection)
        if not data:
            return 0
        received += data
    configure_logging("receiver", run_id=messages[0].fields["run_id"])
    adopt_epoch(messages[0].fields["epoch_ns"])  # times at which rows were stored are told by the learner's clock
    Receiver(messages[0], connection, descriptors[1]).run(received)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
