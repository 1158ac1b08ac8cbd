"""Writers and samplers, each to be run in a process of its own.

Writers pack columns into rows inside the measured time, as a collector does, and samplers copy rows into a batch, as a
learner does.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import grpc
import numpy as np
from prometheus_client import CollectorRegistry

from paceline.collector.append_metrics import AppendMetrics
from paceline.collector.writer import BlockWriter
from paceline.config import CollectorConfig, RpcConfig
from paceline.rows import CompactForm, RowSpec
from paceline.rpc.bulk import SAMPLE_RESPONSE, Buffer, Bulk
from paceline.rpc.client import open_channel
from paceline.rpc.shared_memory import OfferedMemory, part_of
from paceline.rpc.wire import row_spec_to_wire
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import replay_pb2_grpc
from replay_bench.product import log_problems
from replay_bench.rounds import Moved
from replay_bench.runs import MESSAGE_BYTES, PRIORITISED, RUN, TABLE
from replay_bench.workloads import BLOCK_ROWS, ENVIRONMENTS, Columns, Workload

IN_FLIGHT_BLOCKS = CollectorConfig().max_blocks_in_flight
"""Of every writer, the prototype's too."""
IN_FLIGHT_BYTES = 8 * MESSAGE_BYTES
"""Of batches ordered ahead: at least four, and of small ones as many as fill so many bytes, four answers."""
START_SECONDS = 60.0
STREAM_SECONDS = 600.0
PRIORITY_ROWS = 16_384
"""Rows whose priorities one call sets."""


class ProductWriter:
    """Appends blocks to the real service as a collector does: packed on one thread, carried by a BlockWriter."""

    def __init__(self, address: str, workload: Workload, table: str = TABLE) -> None:
        log_problems()
        self._address, self._spec, self._table = address, workload.spec, table
        self._stub = replay_pb2_grpc.ReplayServiceStub(open_channel(address, RpcConfig()))
        self._columns = Columns(workload.spec)
        self._writers: dict[tuple[str, bool], BlockWriter] = {}
        """By the form of blocks, and whether rows go through memory; each is a collector of its own."""
        open_table(self._stub, table, workload.spec)

    def insert(
        self, seconds: float, form: str = "plain", rows_per_second: float | None = None, shares: bool = False
    ) -> Moved:
        """Rows acknowledged; however short the turn, there are some.

        Args:
            rows_per_second: holds it back.
            shares: rows go through memory, as on one machine; otherwise through the connection.
        """
        writer, pause, submitted = self._writer(form, shares), threading.Event(), 0
        began = time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds or submitted == writer.in_flight:
            if rows_per_second is not None:
                pause.wait(max(0.0, submitted * BLOCK_ROWS / rows_per_second - passed))
            self._submit(writer)
            submitted += 1
        moved = Moved((submitted - writer.in_flight) * BLOCK_ROWS, passed)
        self._wait_for(writer)
        return moved

    def fill(self, row_count: int) -> None:
        """Append so many rows, and a block or two more."""
        writer = self._writer("plain", shares=True)
        for _ in range(row_count // BLOCK_ROWS + 1):
            self._submit(writer)
        self._wait_for(writer)

    def close(self) -> None:
        """End its streams, for good."""
        for writer in self._writers.values():
            writer.close([], START_SECONDS)

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

    def _writer(self, form: str, shares: bool) -> BlockWriter:
        writer = self._writers.get((form, shares))
        if writer is None:
            rpc = RpcConfig(shared_memory=shares)
            writer = self._writers[form, shares] = BlockWriter(
                open_channel(self._address, rpc),
                run_id=RUN,
                table=self._table,
                spec=self._spec,
                collector_index=len(self._writers),
                collector_incarnation=1,
                max_blocks_in_flight=IN_FLIGHT_BLOCKS,
                block_rows=BLOCK_ROWS,
                rpc=rpc,
                limiter_seconds=START_SECONDS,
                metrics=AppendMetrics(CollectorRegistry()),
                compact_form=CompactForm(self._spec) if form == "compact" else None,
                compact_stride=ENVIRONMENTS,
            )
            writer.start()
            self._submit(writer)  # the stream is open when the first turn begins
            self._wait_for(writer)
        return writer

    def _submit(self, writer: BlockWriter) -> None:
        writer.submit(self._columns.pack(), ended=lambda: False)

    def _wait_for(self, writer: BlockWriter) -> None:
        until = time.monotonic() + START_SECONDS
        while writer.in_flight:
            if writer.failed or time.monotonic() > until:
                raise RuntimeError(f"replay acknowledged all blocks but {writer.in_flight}")
            time.sleep(0.001)


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
        window, done = threading.Semaphore(IN_FLIGHT_BLOCKS), threading.Event()
        began, seconds, counted = time.perf_counter(), 0.0, 0

        def blocks() -> Iterator[bytes]:
            while True:
                window.acquire()
                if done.is_set():
                    return
                yield self._columns.pack().data.tobytes()

        answers = self._append(blocks(), timeout=STREAM_SECONDS, wait_for_ready=True)
        for acknowledged, _ in enumerate(answers, start=1):
            if not done.is_set() and enough(acknowledged):
                seconds, counted = time.perf_counter() - began, acknowledged
                done.set()
            window.release()
        return Moved(counted * BLOCK_ROWS, seconds)


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
