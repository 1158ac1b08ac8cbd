"""A small replay service over a real socket, on the real table, that fails in the ways a test asks for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from paceline.config import RpcConfig
from paceline.errors import PacelineError, RunMismatchError
from paceline.rows import Block, Column, RowSpec
from paceline.rpc.server import server_options
from paceline.rpc.status import code_of, metadata_of
from paceline.rpc.wire import row_spec_from_wire, row_spec_to_wire, timestamp
from paceline.tables.memory import MemorySettings, TableMemory
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import replay_pb2_grpc, rows_pb2, times_pb2

RUN, TABLE, SECONDS = "trial", "transitions", 20.0
SPEC = RowSpec((Column("value", "float64"), Column("observation", "float32", (3,)), Column("policy_version", "int64")))
SAMPLE_ROWS = 11
"""In one message of Sample, whatever the batch: messages are cut within batches, and batches within messages."""
RPC = RpcConfig(backoff_initial_seconds=0.01, backoff_max_seconds=0.05, deadline_seconds=5)


def rows_of(first: int, count: int) -> np.ndarray:
    """Packed rows whose value is first, first + 1, ..."""
    block = Block.empty(SPEC, count)
    block.columns["value"] = np.arange(first, first + count)
    return block.data


class ScriptedReplay(replay_pb2_grpc.ReplayServiceServicer):
    """Row `key` has the value `key`, plus what `lose` adds. Follow messages have at most `message_rows` rows."""

    def __init__(
        self,
        settings: MemorySettings,
        *,
        message_rows: int = 64,
        is_queue: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.changed = threading.Condition()
        self._clock = clock
        self.settings, self.message_rows, self.is_queue = settings, message_rows, is_queue
        self.memory = TableMemory(settings, SPEC.row_bytes)
        self.sampled = self.consumed = self.generation = 0
        self.complete = False
        self.lies_in: rows_pb2.MemoryRange | None = None
        """Where Follow says that rows are, whatever it sends."""
        self.reads_memory = False
        self.has_table = True
        """Whether DescribeTables names it: a replay that came back empty does not until somebody opens it."""
        self.cut_after: int | None = None
        """The stream that sends so many messages more is cut."""
        self.follows: list[pb.FollowRequest] = []
        self.samples: list[pb.SampleRequest] = []
        self.rows_sent: list[tuple[int, int]] = []
        self.priorities: list[tuple[int, float]] = []
        self.priorities_open = threading.Event()
        self.priorities_open.set()
        self.priority_calls = 0
        self._server: grpc.Server | None = None
        self.port = 0

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(16), options=server_options(RPC))
        replay_pb2_grpc.add_ReplayServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        """Go away at once, as if killed; what is in the table stays."""
        if self._server is not None:
            self._server.stop(0).wait()
            with self.changed:
                self.changed.notify_all()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def append(self, count: int, *, skip: int = 0) -> None:
        """`count` more rows in one block; `skip`: so many keys before it are a hole."""
        with self.changed:
            first = self.memory.end_row + skip
            self.memory.append(first, rows_of(first + self.generation, count), stored_at=float(first))
            self.changed.notify_all()

    def finish(self) -> None:
        with self.changed:
            self.complete = True
            self.changed.notify_all()

    def lose(self) -> None:
        """The record is lost: the table begins anew, with other rows."""
        with self.changed:
            self.memory = TableMemory(self.settings, SPEC.row_bytes)
            self.sampled = self.consumed = 0
            self.generation += 1_000_000

    def wait_for(self, condition: Any, what: str) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, SECONDS), f"not within {SECONDS:g} s: {what}"

    def OpenTable(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._admit(request, context)
        assert row_spec_from_wire(request.row_spec) == SPEC
        return pb.OpenTableResponse(row_bytes=SPEC.row_bytes, capacity_row_count=self.settings.capacity_rows)

    def DescribeTables(self, request: Any, context: grpc.ServicerContext) -> Any:
        now = timestamp(self._clock())
        self._admit(request, context)
        with self.changed:
            table = pb.TableDescription(
                name=TABLE,
                row_spec=row_spec_to_wire(SPEC),
                inserted_row_count=self.memory.end_row,
                sampled_row_count=self.sampled,
                row_count=self.memory.row_count,
                first_row=self.memory.first_row,
                consumed_row=self.consumed if self.is_queue else None,
            )
        return pb.DescribeTablesResponse(
            tables=[table] if self.has_table else [],
            times=times_pb2.AnswerTimes(received_at=now, answered_at=timestamp(self._clock())),
        )

    def Follow(self, requests: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        first = next(requests)
        self._admit(first, context)
        wanted_before = [first.wanted_before if first.HasField("wanted_before") else 1 << 60]

        def take(request: pb.FollowRequest) -> None:
            with self.changed:
                self.follows.append(request)
                self.sampled = max(self.sampled, request.sampled_row_count)
                self.consumed = max(self.consumed, request.consumed_row)
                wanted_before[0] = max(wanted_before[0], request.wanted_before)
                self.changed.notify_all()

        def read_ahead() -> None:
            try:
                for request in requests:
                    take(request)
            except grpc.RpcError:
                pass

        if self._has_lost_rows(first):
            yield pb.FollowResponse(row_spec_digest=SPEC.digest, rows_lost=True)
            return
        take(first)
        threading.Thread(target=read_ahead, daemon=True).start()
        memory = self.memory
        cursor = first.from_row if first.HasField("from_row") else self.consumed
        told = self.complete
        yield self._news(max(cursor, memory.first_row), 0)
        while context.is_active() and memory is self.memory:
            with self.changed:
                if cursor >= min(memory.end_row, wanted_before[0]) and told == self.complete:
                    self.changed.wait(0.2)
                    continue
                told = self.complete
                count = max(0, min(self.message_rows, wanted_before[0] - cursor))
                first_row, rows, stored_at = memory.read(cursor, count)
                rows = rows[: max(0, wanted_before[0] - first_row)]
                if self.cut_after is not None and self.cut_after <= 0:
                    self.cut_after = None
                    context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                if self.cut_after is not None:
                    self.cut_after -= 1
                cursor = first_row + len(rows)
                self.rows_sent.append((first_row, len(rows)))
                answer = self._news(first_row, len(rows))
                answer.stored_at.extend(stored_at[: len(rows)])
                answer.rows = rows.tobytes()
                if self.lies_in is not None:
                    answer.rows_in_memory.CopyFrom(self.lies_in)
            yield answer

    def Sample(self, requests: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        random: np.random.Generator | None = None
        for request in requests:
            self._admit(request, context)
            with self.changed:
                self.samples.append(request)
                self.changed.notify_all()
            random = random or np.random.default_rng(request.seed)
            with self.changed:
                out = np.empty((request.batch_size * request.batch_count, SPEC.row_bytes), np.uint8)
                drawn = self.memory.sample(random, out, details=request.row_details)
            for start in range(0, len(out), SAMPLE_ROWS):
                if self.cut_after == 0:
                    self.cut_after = None
                    context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                if self.cut_after is not None:
                    self.cut_after -= 1
                part = slice(start, start + SAMPLE_ROWS)
                answer = pb.SampleResponse(
                    row_count=len(out[part]),
                    table_row_count=self.memory.row_count,
                    inserted_row_count=self.memory.end_row,
                    row_spec_digest=SPEC.digest,
                )
                if drawn is not None:
                    answer.keys.extend(drawn.keys[part])
                    answer.probabilities.extend(drawn.probabilities[part])
                    answer.times_sampled.extend(drawn.times_sampled[part])
                    answer.stored_at.extend(drawn.stored_at[part])
                answer.rows = out[part].tobytes()
                yield answer

    def UpdatePriorities(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._admit(request, context)
        with self.changed:
            self.priority_calls += 1
            self.changed.notify_all()
        self.priorities_open.wait(SECONDS)
        with self.changed:
            self.priorities += zip(request.keys, request.priorities, strict=True)
            self.changed.notify_all()
        return pb.UpdatePrioritiesResponse(updated_row_count=len(request.keys))

    def _has_lost_rows(self, first: pb.FollowRequest) -> bool:
        if first.from_row > self.memory.end_row:
            return True
        found, _, stored_at = self.memory.read(first.from_row - 1, 1)
        is_there = first.HasField("last_stored_at") and found == first.from_row - 1 and len(stored_at)
        return bool(is_there and stored_at[0] != first.last_stored_at)

    def _news(self, first_row: int, row_count: int) -> pb.FollowResponse:
        return pb.FollowResponse(
            first_row=first_row,
            row_count=row_count,
            table_first_row=self.memory.first_row,
            inserted_row_count=self.memory.end_row,
            sampled_row_count=self.sampled,
            complete=self.complete,
            row_spec_digest=SPEC.digest,
            reads_memory=self.reads_memory,
        )

    def _admit(self, request: Any, context: grpc.ServicerContext) -> None:
        if request.run_id != RUN:
            error: PacelineError = RunMismatchError(f"this is run {RUN!r}, not {request.run_id!r}")
            context.set_trailing_metadata(metadata_of(error))
            context.abort(code_of(error), str(error))
