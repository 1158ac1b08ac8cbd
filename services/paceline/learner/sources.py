"""Where batches come from: `SampleSource` draws them through the replay service."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import grpc
import numpy as np

from paceline.config import RpcConfig
from paceline.errors import BlockError, DeadlineError, PacelineError
from paceline.learner.metrics import LearnerMetrics
from paceline.process import StopSignal
from paceline.rows import ByteMatrix, RowSpec
from paceline.rpc.bulk import SAMPLE_RESPONSE, Bulk
from paceline.rpc.client import Backoff
from paceline.rpc.status import RETRYABLE, raising
from paceline.rpc.wire import row_spec_to_wire
from paceline.telemetry import get_logger
from paceline.v1 import replay_pb2, replay_pb2_grpc

_FLOWING = "replay has sent nothing since the last batch"


@dataclass(frozen=True)
class Batch:
    """Rows to train on, `[batch_size, row_bytes]`, valid until the next batch is taken."""

    rows: ByteMatrix
    table_row_count: int
    inserted_row_count: int
    """Rows ever inserted, as of when the batch was drawn."""


class BatchSource(Protocol):
    """Gives batches to the learner, however they get here."""

    def next_batch(self, seconds: float) -> Batch:
        """The next batch. Raises DeadlineError, with the reason, when there is none within `seconds`."""

    def close(self) -> None:
        """Stop fetching."""


class SampleSource:
    """Batches that the replay service draws, fetched ahead by a thread.

    At most `prefetch` batches are ordered or waiting, so a batch is at most so many updates old when it is used.
    When the stream is cut, what was ordered but not received is ordered again; a draw that got lost harms nothing.
    The table is declared before each stream: replay may have come back without it.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        run_id: str,
        table: str,
        spec: RowSpec,
        batch_size: int,
        prefetch: int,
        seed: int,
        rpc: RpcConfig,
        metrics: LearnerMetrics,
    ) -> None:
        self._method = channel.stream_stream(
            "/paceline.v1.ReplayService/Sample",
            request_serializer=replay_pb2.SampleRequest.SerializeToString,
            response_deserializer=SAMPLE_RESPONSE.deserialize,
        )
        self._stub = replay_pb2_grpc.ReplayServiceStub(channel)
        self._declaration = replay_pb2.OpenTableRequest(run_id=run_id, table=table, row_spec=row_spec_to_wire(spec))
        self._order = replay_pb2.SampleRequest(run_id=run_id, table=table, batch_size=batch_size)
        self._spec, self._batch_size, self._prefetch = spec, batch_size, prefetch
        self._seeds = np.random.SeedSequence(seed)
        self._rpc, self._metrics, self._log = rpc, metrics, get_logger()
        self._closed = StopSignal()
        self._ready: queue.SimpleQueue[Batch | PacelineError] = queue.SimpleQueue()
        # Beyond what may be ordered: the one that the learner reads, the one that is being filled, and one that a
        # batch taken during a reconnect may have ordered twice.
        self._free: queue.SimpleQueue[ByteMatrix] = queue.SimpleQueue()
        for _ in range(prefetch + 3):
            self._free.put(np.empty((batch_size, spec.row_bytes), np.uint8))
        self._in_use: ByteMatrix | None = None
        self._orders: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unordered = prefetch
        self._reason = "replay has not answered yet"
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._fetch_until_closed, name="sample-source", daemon=True)
        self._thread.start()

    def next_batch(self, seconds: float) -> Batch:
        """The next batch. Raises DeadlineError, with the reason, when there is none within `seconds`.

        Raises:
            PacelineError: replay refused for good; fetching has ended.
        """
        try:
            batch = self._ready.get(timeout=seconds)
        except queue.Empty:
            raise DeadlineError(f"no batch within {seconds:g} s: {self._reason}") from None
        if isinstance(batch, PacelineError):
            raise batch
        if self._in_use is not None:
            self._free.put(self._in_use)
        self._in_use = batch.rows
        with self._lock:
            self._unordered += 1
            # Half of the prefetch at a time: replay then sends several batches in one message.
            if self._unordered * 2 >= self._prefetch:
                self._orders.put(self._unordered)
                self._unordered = 0
        return batch

    def close(self) -> None:
        """Stop fetching."""
        self._closed.set()
        with self._lock:
            call = self._call
        if call is not None:
            call.cancel()
        self._thread.join(5)

    def _fetch_until_closed(self) -> None:
        backoff = Backoff(self._rpc)
        while not self._closed.is_set():
            try:
                with raising("replay"):
                    self._stub.OpenTable(self._declaration, timeout=self._rpc.deadline_seconds)
                    self._fetch(backoff)
            except RETRYABLE as error:
                if self._closed.is_set():
                    return
                if isinstance(error, DeadlineError) and self._reason == _FLOWING:
                    continue  # the stream lived for `stream_seconds`; the next one goes on
                if str(error) != self._reason:
                    self._log.warning("sampling_interrupted", reason=str(error))
                self._reason = str(error)
                self._metrics.sample_failures.labels(type(error).__name__).inc()
                self._closed.wait(backoff.next_seconds())
            except PacelineError as error:
                self._ready.put(error)
                return
            except Exception as error:
                if self._closed.is_set():
                    return  # the channel was closed under a call
                # The one boundary of this thread: its end must end the process, not starve it unnoticed.
                self._log.error("sample_source_failed", exc_info=error)
                self._ready.put(PacelineError(f"the source of samples failed: {type(error).__name__}: {error}"))
                return

    def _fetch(self, backoff: Backoff) -> None:
        """Open one stream and take batches from it until it ends."""
        orders: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        with self._lock:
            # Everything that is not waiting in `_ready` or in use is ordered anew.
            missing = self._prefetch - self._ready.qsize()
            if missing > 0:
                orders.put(missing)
            self._unordered = 0
            self._orders = orders
            if self._closed.is_set():
                return
            self._call = self._method(self._requests(orders), timeout=self._rpc.stream_seconds)
        buffer, filled = self._free.get(), 0
        try:
            for response in self._call:
                backoff.reset()
                self._reason = _FLOWING
                rows = self._rows_of(response)
                while len(rows):
                    taken = rows[: self._batch_size - filled]
                    buffer[filled : filled + len(taken)] = taken
                    rows, filled = rows[len(taken) :], filled + len(taken)
                    if filled == self._batch_size:
                        head = response.head
                        self._ready.put(Batch(buffer, head.table_row_count, head.inserted_row_count))
                        buffer, filled = self._free.get(), 0
        finally:
            orders.put(None)
            self._free.put(buffer)

    def _requests(self, orders: queue.SimpleQueue[int | None]) -> Iterator[replay_pb2.SampleRequest]:
        seed = int(self._seeds.spawn(1)[0].generate_state(1, np.uint64)[0])
        while (batch_count := orders.get()) is not None:
            request = replay_pb2.SampleRequest(batch_count=batch_count, seed=seed)
            request.MergeFrom(self._order)
            yield request

    def _rows_of(self, response: Bulk[replay_pb2.SampleResponse]) -> ByteMatrix:
        head, row_bytes = response.head, self._spec.row_bytes
        self._spec.require_digest(head.row_spec_digest)
        if head.row_count < 1 or len(response.payload) != head.row_count * row_bytes:
            raise BlockError(
                f"replay sent {head.row_count} rows in {len(response.payload)} bytes: expected {row_bytes} bytes a row"
            )
        return np.frombuffer(response.payload, np.uint8).reshape(-1, row_bytes)
