"""Writers and samplers, each to be run in a process of its own.

Writers pack columns into rows inside the measured time, as a collector does, and samplers copy rows into a batch, as a
learner does.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import numpy as np

from paceline.collector.outbox import Outbox
from paceline.config import RpcConfig
from paceline.rows import CompactForm, RowSpec, checksum_of
from paceline.rpc.bulk import APPEND_REQUEST, SAMPLE_RESPONSE, Buffer, Bulk
from paceline.rpc.client import open_channel
from paceline.rpc.shared_memory import OfferedMemory, part_of
from paceline.rpc.wire import SentBlock, blocks_to_wire, row_spec_to_wire
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import replay_pb2_grpc, rows_pb2
from replay_bench.rounds import Moved
from replay_bench.runs import MESSAGE_BYTES, PRIORITISED, RUN, TABLE
from replay_bench.workloads import BLOCK_ROWS, ENVIRONMENTS, Columns, Workload

IN_FLIGHT_BLOCKS = 4
IN_FLIGHT_BYTES = 8 * MESSAGE_BYTES
"""Of batches ordered ahead: at least four, and of small ones as many as fill so many bytes, four answers."""
START_SECONDS = 60.0
STREAM_SECONDS = 600.0
PRIORITY_ROWS = 16_384
"""Rows whose priorities one call sets."""

Request = Any
"""Of whichever serialiser the stream has."""


class ProductWriter:
    """Appends blocks to the real service."""

    def __init__(self, address: str, workload: Workload, table: str = TABLE) -> None:
        channel = open_channel(address, RpcConfig())
        self._append = channel.stream_stream(
            "/paceline.v1.ReplayService/Append", APPEND_REQUEST.serialize, pb.AppendResponse.FromString
        )
        self._stub = replay_pb2_grpc.ReplayServiceStub(channel)
        self._spec, self._table = workload.spec, table
        self._columns = Columns(workload.spec)
        self._compact = CompactForm(workload.spec)
        self._sequence = 0
        self._message_blocks = open_table(self._stub, table, workload.spec).max_blocks_per_append

    def insert(
        self, seconds: float, form: str = "plain", rows_per_second: float | None = None, shares: bool = False
    ) -> Moved:
        """Rows acknowledged.

        Args:
            rows_per_second: holds it back.
            shares: rows go through memory, as on one machine; otherwise through the connection.
        """
        return self._insert(_for_seconds(seconds), form, rows_per_second, shares)

    def fill(self, row_count: int) -> None:
        """Append so many rows, and a block more."""
        blocks = row_count // BLOCK_ROWS + 1
        self._insert(lambda done: done >= blocks, "plain", None, shares=True)

    def inserted_rows(self) -> int:
        """Rows that the table ever got."""
        answer = self._stub.DescribeTables(pb.DescribeTablesRequest(run_id=RUN), timeout=STREAM_SECONDS)
        return next(table.inserted_row_count for table in answer.tables if table.name == self._table)

    def spread_priorities(self, ring_rows: int) -> None:
        """Give every row of the table a priority of its own."""
        random, end = np.random.default_rng(0), self.inserted_rows()
        for first in range(max(0, end - ring_rows), end, PRIORITY_ROWS):
            keys = range(first, min(end, first + PRIORITY_ROWS))
            priorities = random.exponential(size=len(keys)) + 1e-3
            request = pb.UpdatePrioritiesRequest(run_id=RUN, table=self._table, keys=keys, priorities=priorities)
            self._stub.UpdatePriorities(request, timeout=STREAM_SECONDS)

    def _insert(self, enough: Callable[[int], bool], form: str, rows_per_second: float | None, shares: bool) -> Moved:
        outbox = Outbox.create((IN_FLIGHT_BLOCKS + 1) * BLOCK_ROWS * self._spec.row_bytes) if shares else None

        def append(requests: Iterator[Request]) -> Iterator[int]:
            for answer in self._append(requests, timeout=STREAM_SECONDS):
                if outbox is not None:
                    outbox.note(answer)
                yield 1 + len(answer.further)

        make = self._plain_block if form == "plain" else self._compact_block

        def request(may_send_another: Callable[[], bool]) -> Bulk[pb.AppendRequest]:
            blocks = [make()]
            # As many as may be sent. A collector's writer shares less: gRPC takes each block from it at once. What the
            # next block has in its form, the last one tells well enough.
            bytes_in_message = 2 * blocks[0].payload_bytes
            while len(blocks) < self._message_blocks and bytes_in_message <= MESSAGE_BYTES and may_send_another():
                blocks.append(make())
                bytes_in_message += blocks[-1].payload_bytes
            request = blocks_to_wire(RUN, self._table, blocks)
            if outbox is not None:
                outbox.pass_on(request)
            return request

        moved = _insert_blocks(append, request, enough, rows_per_second)
        if outbox is not None:
            outbox.close()
        return moved

    def _plain_block(self) -> SentBlock:
        return self._block(self._columns.pack().data.reshape(-1).data, stride=0)

    def _compact_block(self) -> SentBlock:
        payload = self._compact.encode(self._columns.pack(), ENVIRONMENTS)
        if payload is None:
            raise RuntimeError(f"rows of {self._spec.row_bytes} bytes have no compact form that is worth it")
        return self._block(memoryview(payload).cast("B"), stride=ENVIRONMENTS)

    def _block(self, payload: memoryview, *, stride: int) -> SentBlock:
        self._sequence += 1
        header = rows_pb2.BlockHeader(
            collector_index=0,
            collector_incarnation=1,
            sequence=self._sequence,
            row_count=BLOCK_ROWS,
            row_spec_digest=self._spec.digest,
            checksum=checksum_of(payload),
            compact_stride=stride,
        )
        return SentBlock(header, payload)


class PrototypeWriter:
    """Appends blocks to the prototype."""

    def __init__(self, address: str, workload: Workload) -> None:
        self._append = open_channel(address, RpcConfig()).stream_stream("/Prototype/Append")
        self._columns = Columns(workload.spec)

    def insert(self, seconds: float) -> Moved:
        """Rows acknowledged."""
        return self._insert(_for_seconds(seconds))

    def fill(self, row_count: int) -> None:
        """Append so many rows, and a block more."""
        self._insert(lambda done: done > row_count // BLOCK_ROWS)

    def _insert(self, enough: Callable[[int], bool]) -> Moved:
        def append(requests: Iterator[Request]) -> Iterator[int]:
            return (1 for _ in self._append(requests, timeout=STREAM_SECONDS, wait_for_ready=True))

        return _insert_blocks(append, lambda _: self._columns.pack().data.tobytes(), enough)


class ProductSampler:
    """Samples batches from the real service; with keys and probabilities where a learner needs them."""

    def __init__(self, address: str, workload: Workload, table: str = TABLE) -> None:
        channel = open_channel(address, RpcConfig())
        self._sample = channel.stream_stream(
            "/paceline.v1.ReplayService/Sample", pb.SampleRequest.SerializeToString, SAMPLE_RESPONSE.deserialize
        )
        self._row_bytes = workload.spec.row_bytes
        self._table = table
        open_table(replay_pb2_grpc.ReplayServiceStub(channel), table, workload.spec)

    def sample(self, batch_rows: int, seconds: float, shares: bool = False) -> Moved:
        """Rows in whole batches in this process; `shares`: through memory, otherwise through the connection."""
        in_flight = max(4, IN_FLIGHT_BYTES // (batch_rows * self._row_bytes))
        memory = OfferedMemory.create(in_flight * batch_rows * self._row_bytes) if shares else None
        orders = _Orders(batch_rows, in_flight, self._table, memory)
        stream = self._sample(orders, timeout=STREAM_SECONDS)
        payloads = (_rows_of(bulk, memory) for bulk in stream)
        moved = _fill_batches(payloads, batch_rows, self._row_bytes, _for_seconds(seconds), orders.note_taken)
        orders.end()
        stream.cancel()
        if memory is not None:
            memory.close()
        return moved


class PrototypeSampler:
    """Samples batches from the prototype."""

    def __init__(self, address: str, workload: Workload) -> None:
        self._sample = open_channel(address, RpcConfig()).unary_stream("/Prototype/Sample")
        self._row_bytes = workload.spec.row_bytes

    def sample(self, batch_rows: int, seconds: float) -> Moved:
        """Rows in whole batches in this process."""
        stream = self._sample(b"", timeout=STREAM_SECONDS, wait_for_ready=True)
        moved = _fill_batches(stream, batch_rows, self._row_bytes, _for_seconds(seconds), lambda: None)
        stream.cancel()
        return moved


class _Orders(Iterator[pb.SampleRequest]):
    """What a sampler asks for: `in_flight` batches, and again as many as it took, half of them at a time."""

    def __init__(self, batch_rows: int, in_flight: int, table: str, memory: OfferedMemory | None) -> None:
        self._order = pb.SampleRequest(
            run_id=RUN,
            table=table,
            batch_size=batch_rows,
            seed=1,
            row_details=table == PRIORITISED,
            memory=None if memory is None else memory.offer,
        )
        self._at_a_time, self._due = max(1, in_flight // 2), threading.Semaphore(0)
        self._next, self._taken, self._ended = in_flight, 0, False

    def __next__(self) -> pb.SampleRequest:
        if self._next == 0:
            self._due.acquire()
            self._next = self._at_a_time
        if self._ended:
            raise StopIteration
        order = pb.SampleRequest(batch_count=self._next)
        order.MergeFrom(self._order)
        self._next = 0
        return order

    def note_taken(self) -> None:
        self._taken += 1
        if self._taken % self._at_a_time == 0:
            self._due.release()

    def end(self) -> None:
        self._ended = True
        self._due.release()


class BareReader:
    """Reads and writes bytes over transports that do nothing else."""

    def __init__(self, tcp_address: str, grpc_address: str) -> None:
        self._host, _, self._port = tcp_address.rpartition(":")
        channel = open_channel(grpc_address, RpcConfig())
        self._down, self._up = channel.unary_stream("/Bare/Down"), channel.stream_unary("/Bare/Up")

    def read_tcp(self, seconds: float) -> Moved:
        """Bytes of raw TCP into a buffer of one message."""
        buffer, messages, done = bytearray(MESSAGE_BYTES), 0, _for_seconds(seconds)
        with _connect(self._host, int(self._port)) as connection:
            view, began = memoryview(buffer), time.perf_counter()
            while not done(messages):
                got = 0
                while got < MESSAGE_BYTES:
                    got += connection.recv_into(view[got:])
                messages += 1
            return Moved(messages * MESSAGE_BYTES, time.perf_counter() - began)

    def read_grpc(self, seconds: float) -> Moved:
        """Bytes of a server's stream."""
        done, began = _for_seconds(seconds), time.perf_counter()
        stream = self._down(b"", timeout=STREAM_SECONDS, wait_for_ready=True)
        for messages, _ in enumerate(stream, start=1):
            if done(messages):
                stream.cancel()
                break
        return Moved(messages * MESSAGE_BYTES, time.perf_counter() - began)

    def write_grpc(self, seconds: float) -> Moved:
        """Bytes of a client's stream."""
        payload, done, sent, began = bytes(MESSAGE_BYTES), _for_seconds(seconds), 0, time.perf_counter()

        def requests() -> Iterator[bytes]:
            nonlocal sent
            while not done(sent):
                yield payload
                sent += 1

        self._up(requests(), timeout=STREAM_SECONDS, wait_for_ready=True)
        return Moved(sent * MESSAGE_BYTES, time.perf_counter() - began)


def open_table(stub: replay_pb2_grpc.ReplayServiceStub, table: str, spec: RowSpec) -> pb.OpenTableResponse:
    """Open the table, as soon as the service is there and ready; what it says."""
    request = pb.OpenTableRequest(run_id=RUN, table=table, row_spec=row_spec_to_wire(spec))
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            answer: pb.OpenTableResponse = stub.OpenTable(request, timeout=START_SECONDS)
            return answer
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                raise
            time.sleep(0.1)


def _insert_blocks(
    append: Callable[[Iterator[Request]], Iterator[int]],
    make: Callable[[Callable[[], bool]], Request],
    enough: Callable[[int], bool],
    rows_per_second: float | None = None,
) -> Moved:
    """Rows acknowledged, with `IN_FLIGHT_BLOCKS` blocks unacknowledged at most.

    Args:
        append: how many blocks each answer to these requests acknowledges.
        make: a request of one block, and of one more each time that what it is given says that another may be sent now.
        enough: whether so many blocks are.
    """
    window, done = threading.Semaphore(IN_FLIGHT_BLOCKS), threading.Event()
    began, seconds, counted, acknowledged = time.perf_counter(), 0.0, 0, 0
    numbers = itertools.count()

    def wait_for_turn() -> None:
        if rows_per_second is not None:
            done.wait(max(0.0, began + next(numbers) * BLOCK_ROWS / rows_per_second - time.perf_counter()))

    def may_send_another() -> bool:
        # Held back, each block has a time of its own.
        return rows_per_second is None and window.acquire(blocking=False)

    def requests() -> Iterator[Request]:
        while True:
            window.acquire()
            wait_for_turn()
            if done.is_set():
                return
            yield make(may_send_another)

    for blocks in append(requests()):
        acknowledged += blocks
        if not done.is_set() and enough(acknowledged):
            seconds, counted = time.perf_counter() - began, acknowledged
            done.set()
        window.release(blocks)
    return Moved(counted * BLOCK_ROWS, seconds)


def _rows_of(bulk: Bulk[pb.SampleResponse], memory: OfferedMemory | None) -> Buffer:
    if memory is not None and bulk.head.HasField("rows_in_memory"):
        return part_of(memory.bytes, bulk.head.rows_in_memory)
    return bulk.payload


def _fill_batches(
    payloads: Iterable[Buffer],
    batch_rows: int,
    row_bytes: int,
    enough: Callable[[int], bool],
    on_batch: Callable[[], None],
) -> Moved:
    """Rows copied into one batch after the other, until `enough` of so many; `on_batch` is told of each."""
    batch, batches, filled = np.empty((batch_rows, row_bytes), np.uint8), 0, 0
    began = time.perf_counter()
    for payload in payloads:
        rows = np.frombuffer(payload, np.uint8).reshape(-1, row_bytes)
        while len(rows):
            part = rows[: batch_rows - filled]
            batch[filled : filled + len(part)] = part
            filled, rows = filled + len(part), rows[len(part) :]
            if filled == batch_rows:
                filled, batches = 0, batches + 1
                on_batch()
        if batches and enough(batches):
            break
    return Moved(batches * batch_rows, time.perf_counter() - began)


def _for_seconds(seconds: float) -> Callable[[int], bool]:
    until = time.perf_counter() + seconds
    return lambda _: time.perf_counter() > until


def _connect(host: str, port: int) -> socket.socket:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
