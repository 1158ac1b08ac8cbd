"""Wire in, domain call, wire out. `rpc.status` turns errors into codes.

Requests are parsed here and not by gRPC, so that malformed bytes get INVALID_ARGUMENT, and the rows of a block are
never copied out of the message that brought them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message

from paceline.config import RpcConfig
from paceline.errors import (
    BlockError,
    InvalidInputError,
    LimiterTimeoutError,
    NotFoundError,
    PacelineError,
    ReplacedError,
    RowSpecError,
    RunMismatchError,
    StoreFullError,
    StoreReadOnlyError,
    UnavailableError,
)
from paceline.identity import require_same_run
from paceline.replay.description import describe
from paceline.replay.following import MAX_COUNT, LentMemory, check_progress, follow_messages
from paceline.replay.metrics import APPEND_ACTIVITIES, FOLLOW_ACTIVITIES, SAMPLE_ACTIVITIES, ReplayMetrics
from paceline.replay.sampling import Credit, RowsInMemory, RowsInMessages, message_rows_of, sample_messages
from paceline.replay.streams import Stream, Streams
from paceline.replay.table import Appended, Table
from paceline.replay.tables import Tables
from paceline.rpc.bulk import APPEND_REQUEST, FOLLOW_RESPONSE, UPDATE_PRIORITIES_REQUEST, Bulk
from paceline.rpc.shared_memory import part_of
from paceline.rpc.wire import SentBlock, blocks_from_wire, row_spec_from_wire, timestamp
from paceline.tables.limiter import Ended
from paceline.telemetry import ActivityClock
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import times_pb2

SERVICE = "paceline.v1.ReplayService"
MAX_BLOCKS_PER_APPEND = 64
"""Where blocks are so small that a message could have more, what a message costs no longer counts."""

_REASONS: dict[type[PacelineError], str] = {
    RunMismatchError: "run",
    RowSpecError: "row_spec",
    InvalidInputError: "malformed",
    NotFoundError: "table",
    ReplacedError: "replaced",
    StoreFullError: "store_full",
    StoreReadOnlyError: "store_read_only",
    LimiterTimeoutError: "limiter",
    UnavailableError: "unavailable",
}
"""The first that fits names why a block was refused."""

MessageT = TypeVar("MessageT", bound=Message)


class ReplayService:
    """The RPCs of ReplayService for one run."""

    def __init__(
        self, run_id: str, tables: Tables, metrics: ReplayMetrics, *, max_collectors: int, rpc: RpcConfig
    ) -> None:
        self._run_id, self._tables, self._metrics = run_id, tables, metrics
        self._max_collectors, self._rpc = max_collectors, rpc
        self._streams = Streams(
            on_change=tables.wake,
            opened=metrics.streams,
            shared=metrics.shared_memory_streams,
            shares_memory=rpc.shared_memory,
        )

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server needs to serve the RPCs."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "OpenTable": unary(self.open_table, None, pb.OpenTableResponse.SerializeToString),
                "Append": stream(self.append, None, pb.AppendResponse.SerializeToString),
                "Sample": stream(self.sample, None, None),
                "UpdatePriorities": unary(self.update_priorities, None, pb.UpdatePrioritiesResponse.SerializeToString),
                "Follow": stream(self.follow, None, FOLLOW_RESPONSE.serialize),
                "DescribeTables": unary(self.describe_tables, None, pb.DescribeTablesResponse.SerializeToString),
            },
        )

    def drain(self) -> None:
        """End every stream: what is in work is finished and acknowledged, what waits ends with UNAVAILABLE."""
        self._streams.drain()

    def open_table(self, data: bytes, context: grpc.ServicerContext) -> pb.OpenTableResponse:
        """Serve OpenTable."""
        request = _parse(pb.OpenTableRequest, data)
        self._admit(request.run_id)
        self._tables.learner.take(request.learner_id, request.learner_incarnation, has_rows=self._tables.has_rows())
        table = self._tables.open(request.table, row_spec_from_wire(request.row_spec))
        return pb.OpenTableResponse(
            row_bytes=table.spec.row_bytes,
            capacity_row_count=table.capacity_rows,
            max_blocks_per_append=MAX_BLOCKS_PER_APPEND,
        )

    def append(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[pb.AppendResponse]:
        """Serve Append."""
        clock = ActivityClock(self._metrics.activity_seconds, APPEND_ACTIVITIES, "receive")
        with self._streams.open("Append", context) as stream:
            for data in stream.receive(requests):
                clock.switch("check")
                with self._counting_refusals():
                    request = APPEND_REQUEST.deserialize(data)
                    self._admit(request.head.run_id)
                    stream.open_memory(request.head)
                    self._fetch_rows(request, stream)
                    for appended in self._append_blocks(request, stream.why_ended, clock):
                        clock.switch("receive")
                        yield _acknowledge(appended, reads_memory=stream.memory is not None)

    def sample(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serve Sample."""
        clock = ActivityClock(self._metrics.activity_seconds, SAMPLE_ACTIVITIES, "credit")
        with self._streams.open("Sample", context) as stream:
            data = next(stream.receive(requests), None)
            if data is None:
                return
            first = self._parse_sample(data)
            table = self._tables[first.table]
            if table.config.queue:
                raise InvalidInputError(f"table {table.name!r} is a queue: expected Follow; a queue is never sampled")
            table.require_readable()
            credit = Credit(stream, requests, lambda later: self._parse_later_sample(later, first), first)
            yield from sample_messages(table, first, credit, stream, clock, self._room(table, first, stream))

    def update_priorities(self, data: bytes, context: grpc.ServicerContext) -> pb.UpdatePrioritiesResponse:
        """Serve UpdatePriorities."""
        bulk = UPDATE_PRIORITIES_REQUEST.deserialize(data)
        self._admit(bulk.head.run_id)
        table = self._tables[bulk.head.table]
        keys = bulk.arrays["keys"].astype(np.int64)
        found = table.update_priorities(keys, bulk.arrays["priorities"].astype(np.float32))
        return pb.UpdatePrioritiesResponse(updated_row_count=found, unknown_row_count=len(keys) - found)

    def follow(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Bulk[pb.FollowResponse]]:
        """Serve Follow."""
        clock = ActivityClock(self._metrics.activity_seconds, FOLLOW_ACTIVITIES, "idle")
        with self._streams.open("Follow", context) as stream:
            data = next(stream.receive(requests), None)
            if data is None:
                return
            first = self._parse_follow(data)
            table = self._tables[first.table]
            stream.open_memory(first)
            yield from follow_messages(
                table,
                first,
                requests,
                lambda later: self._parse_later_follow(later, first),
                stream,
                clock,
                message_rows_of(table.spec.row_bytes, self._rpc.max_message_bytes),
                None if stream.memory is None else LentMemory(stream.memory, table.spec.row_bytes),
            )

    def describe_tables(self, data: bytes, context: grpc.ServicerContext) -> pb.DescribeTablesResponse:
        """Serve DescribeTables."""
        received_at = timestamp()
        self._admit(_parse(pb.DescribeTablesRequest, data).run_id)
        tables = [describe(table) for table in self._tables.open_tables]
        times = times_pb2.AnswerTimes(received_at=received_at, answered_at=timestamp())
        return pb.DescribeTablesResponse(tables=tables, times=times)

    def _admit(self, run_id: str) -> None:
        require_same_run(self._run_id, run_id)
        self._tables.require_ready()

    def _fetch_rows(self, request: Bulk[pb.AppendRequest], stream: Stream) -> None:
        """Give a request the rows that the client has in memory, if it says so."""
        if not request.head.HasField("rows_in_memory"):
            return
        where, most = request.head.rows_in_memory, self._rpc.max_message_bytes
        if len(request.payload) or where.byte_count > most:
            raise InvalidInputError(
                f"a request has {len(request.payload)} bytes of rows and {where.byte_count} in memory: expected none "
                f"where any are in memory, and there at most rpc.max_message_bytes, {most}"
            )
        # A copy, so that what is checked is what is stored, whatever the client does meanwhile.
        request.payload = part_of(stream.memory, where).copy()

    def _append_blocks(
        self, request: Bulk[pb.AppendRequest], ended: Ended, clock: ActivityClock
    ) -> Iterator[list[Appended]]:
        table = self._tables[request.head.table]
        blocks = blocks_from_wire(request, MAX_BLOCKS_PER_APPEND)
        return table.append(map(self._admit_block, blocks), ended, clock)

    def _admit_block(self, sent: SentBlock) -> SentBlock:
        header = sent.header
        if not 0 <= header.collector_index < self._max_collectors:
            raise BlockError(
                f"collector_index {header.collector_index}: expected 0 to {self._max_collectors - 1}, "
                "below collector.max_count"
            )
        if header.collector_incarnation < 1 or not 1 <= header.sequence < MAX_COUNT:
            raise BlockError(
                f"a block has collector_incarnation {header.collector_incarnation} and sequence {header.sequence}: "
                f"expected 1 or more, and a sequence below {MAX_COUNT}"
            )
        return sent

    def _room(self, table: Table, first: pb.SampleRequest, stream: Stream) -> RowsInMessages | RowsInMemory:
        row_bytes, limit = table.spec.row_bytes, self._rpc.max_message_bytes
        stream.open_memory(first)
        if stream.memory is None:
            return RowsInMessages(row_bytes, limit)
        return RowsInMemory(stream.memory, row_bytes, first.batch_size, limit)

    def _parse_sample(self, data: bytes) -> pb.SampleRequest:
        request = _parse(pb.SampleRequest, data)
        self._admit(request.run_id)
        if request.batch_size < 1 or request.batch_count < 1:
            raise InvalidInputError(
                f"batch_size {request.batch_size} and batch_count {request.batch_count}: expected 1 or more of each"
            )
        if min(request.policy_version, request.base_version, request.learner_incarnation) < 0:
            raise InvalidInputError(
                f"policy_version {request.policy_version}, base_version {request.base_version} and learner_incarnation "
                f"{request.learner_incarnation}: expected 0 or more of each"
            )
        self._tables.learner.require_newest(request.learner_incarnation)
        return request

    def _parse_later_sample(self, data: bytes, first: pb.SampleRequest) -> pb.SampleRequest:
        request = self._parse_sample(data)
        if (request.table, request.batch_size) != (first.table, first.batch_size):
            raise InvalidInputError(
                f"a later request asks for batches of {request.batch_size} from {request.table!r}: expected "
                f"{first.batch_size} from {first.table!r} as in the first; open another stream for others"
            )
        return request

    def _parse_follow(self, data: bytes) -> pb.FollowRequest:
        request = _parse(pb.FollowRequest, data)
        self._admit(request.run_id)
        check_progress(request)
        self._tables.learner.require_newest(request.learner_incarnation)
        return request

    def _parse_later_follow(self, data: bytes, first: pb.FollowRequest) -> pb.FollowRequest:
        request = self._parse_follow(data)
        if request.table != first.table:
            raise InvalidInputError(
                f"a later request is for table {request.table!r}: expected {first.table!r} as in the first; "
                "open another stream for others"
            )
        return request

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except PacelineError as error:
            reason = next((reason for cls, reason in _REASONS.items() if isinstance(error, cls)), "other")
            self._metrics.refused_blocks.labels(reason).inc()
            raise


def _acknowledge(appended: Sequence[Appended], *, reads_memory: bool) -> pb.AppendResponse:
    first, *further = (
        pb.AppendResponse(
            sequence=done.sequence,
            stored_row_count=done.stored_row_count,
            duplicate=done.duplicate,
            complete=done.complete,
        )
        for done in appended
    )
    if further:
        first.further.extend(further)
    first.reads_memory = reads_memory
    return first


def _parse(message_type: type[MessageT], data: bytes) -> MessageT:
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        raise InvalidInputError(
            f"{len(data)} bytes are not a {message_type.DESCRIPTOR.full_name}: "
            "the peer must send the messages of protos/paceline/v1"
        ) from error
