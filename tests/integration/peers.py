"""A small learner and a small replay service, over real sockets, that fail in the ways a test asks for.

Run as a script, it serves the learner from a process of its own, which a test may freeze: it prints its port.
"""

from __future__ import annotations

import collections
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import torch

from paceline.actors import Actor, ActorSemantics, build_actor, squashed_gaussian_semantics
from paceline.config import RpcConfig
from paceline.errors import ProtocolMismatchError, RunMismatchError
from paceline.identity import PROTOCOL_VERSION, PolicyIdentity
from paceline.rows import Column, RowSpec, block_from_wire, transition_spec
from paceline.rpc.bulk import Bulk
from paceline.rpc.server import server_options
from paceline.rpc.status import code_of, metadata_of
from paceline.rpc.wire import (
    SentBlock,
    blocks_from_wire,
    row_spec_from_wire,
    row_spec_to_wire,
    snapshot_header_to_wire,
)
from paceline.snapshot import SnapshotHeader, make_header, pack_state
from paceline.v1 import (
    parameters_pb2,
    parameters_pb2_grpc,
    replay_pb2,
    replay_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
)

RUN_ID = "trial"
TABLE = "transitions"
PENDULUM = transition_spec(Column("observation", "float32", (3,)), Column("action", "float32", (1,)))
SEMANTICS = squashed_gaussian_semantics(3, hidden=(16, 16), action_low=(-2.0,), action_high=(2.0,))


def make_actor(seed: int = 0, semantics: ActorSemantics = SEMANTICS) -> Actor:
    torch.manual_seed(seed)
    return build_actor(semantics)


def serve(*services: Any, port: int = 0) -> tuple[grpc.Server, int]:
    """A started server of these services, and its port."""
    server = grpc.server(ThreadPoolExecutor(32), options=server_options(RpcConfig()))
    for service in services:
        service.register(server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, port


def abort(context: grpc.ServicerContext, error: Exception) -> None:
    context.set_trailing_metadata(metadata_of(error))
    context.abort(code_of(error), str(error))


class Learner(parameters_pb2_grpc.ParameterServiceServicer, run_pb2_grpc.RunServiceServicer):
    """Serves what `publish` was given; `faults` holds what goes wrong with the next answers, in order."""

    def __init__(
        self,
        spec: RowSpec = PENDULUM,
        semantics: ActorSemantics = SEMANTICS,
        *,
        incarnation: int = 1,
        warmup_steps: int = 0,
    ) -> None:
        self.spec, self.semantics = spec, semantics
        self.incarnation, self.warmup_steps = incarnation, warmup_steps
        self.ignores_have = False
        self.changed = threading.Condition()
        self.snapshot: tuple[SnapshotHeader, bytes] | None = None
        self.run_state = parameters_pb2.RUN_STATE_RUNNING
        self.faults: collections.deque[str] = collections.deque()
        self.polls: list[parameters_pb2.GetSnapshotRequest] = []
        self.reports: list[run_pb2.ReportEpisodesRequest] = []
        self.evaluations: list[run_pb2.ReportEvaluationRequest] = []
        self.joins = self.evaluation_failures = 0
        self.chunk_bytes = 1 << 12

    def register(self, server: grpc.Server) -> None:
        parameters_pb2_grpc.add_ParameterServiceServicer_to_server(self, server)
        run_pb2_grpc.add_RunServiceServicer_to_server(self, server)

    def publish(
        self, version: int, actor: Actor | None = None, *, run_id: str = RUN_ID, learner_step: int | None = None
    ) -> SnapshotHeader:
        actor = actor or make_actor(version, self.semantics)
        payload = pack_state(actor)
        header = make_header(
            actor,
            payload,
            run_id=run_id,
            identity=PolicyIdentity(self.incarnation, version),
            learner_step=10 * version if learner_step is None else learner_step,
            environment_step_count=100 * version,
            published_at=time.time(),
        )
        with self.changed:
            self.snapshot = header, payload
            self.changed.notify_all()
        return header

    def finish(self) -> None:
        with self.changed:
            self.run_state = parameters_pb2.RUN_STATE_FINISHED
            self.changed.notify_all()

    def GetSnapshot(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.polls.append(request)
        if request.run_id != RUN_ID:
            abort(context, RunMismatchError(f"this is run {RUN_ID!r}, not {request.run_id!r}"))
        if request.protocol_version != PROTOCOL_VERSION:
            abort(context, ProtocolMismatchError(f"protocol {request.protocol_version}"))
        have = (request.have.incarnation, request.have.version)
        until = time.monotonic() + request.wait.ToTimedelta().total_seconds()

        def is_wanted() -> bool:
            if self.snapshot is None:
                return False
            identity = self.snapshot[0].identity
            return (
                self.ignores_have or (identity.incarnation, identity.version) > have
            ) and identity.version >= request.at_least_version

        def wake() -> None:
            with self.changed:
                self.changed.notify_all()

        context.add_callback(wake)  # a caller that goes away ends its wait
        with self.changed:
            state = self.run_state
            self.changed.wait_for(
                lambda: is_wanted() or self.run_state != state or not context.is_active(), until - time.monotonic()
            )
            if not is_wanted():
                answer = parameters_pb2.GetSnapshotResponse()
                answer.not_modified.run_state = self.run_state
                if self.snapshot is not None:
                    identity = self.snapshot[0].identity
                    answer.not_modified.newest.incarnation = identity.incarnation
                    answer.not_modified.newest.version = identity.version
                yield answer
                return
            assert self.snapshot is not None
            header, payload = self.snapshot
            fault = self.faults.popleft() if self.faults else ""
        if fault == "flip":
            middle = len(payload) // 2
            payload = payload[:middle] + bytes([payload[middle] ^ 1]) + payload[middle + 1 :]
        chunks = [payload[at : at + self.chunk_bytes] for at in range(0, len(payload), self.chunk_bytes)]
        yield parameters_pb2.GetSnapshotResponse(header=snapshot_header_to_wire(header, len(chunks), self.run_state))
        for number, chunk in enumerate(chunks):
            if fault == "cut" and number == len(chunks) // 2:
                context.abort(grpc.StatusCode.UNAVAILABLE, "cut half-way")
            if fault == "short" and number == len(chunks) // 2:
                return
            yield parameters_pb2.GetSnapshotResponse(chunk=chunk)

    def Join(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.run_id != RUN_ID:
            abort(context, RunMismatchError(f"this is run {RUN_ID!r}, not {request.run_id!r}"))
        self.joins += 1
        return run_pb2.JoinResponse(
            index=request.index if request.HasField("index") else 0,
            incarnation=self.joins,
            row_spec=row_spec_to_wire(self.spec),
            table=TABLE,
            actor_semantics_json=self.semantics.to_json(),
            warmup_step_count=self.warmup_steps,
            run_seed=7,
            run_state=self.run_state,
        )

    def ReportEpisodes(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.reports.append(request)
        return run_pb2.ReportEpisodesResponse(run_state=self.run_state)

    def ReportEvaluation(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.evaluation_failures:
            self.evaluation_failures -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        self.evaluations.append(request)
        return run_pb2.ReportEvaluationResponse(run_state=self.run_state)


class Replay(replay_pb2_grpc.ReplayServiceServicer):
    """Keeps blocks in memory. `abort_every`: of every so many new blocks the last is stored, and its answer lost.

    `max_blocks` is what it says that one request may have; more than that it refuses. 0: as an older service.
    """

    def __init__(self, *, abort_every: int = 0, complete_after_rows: int | None = None, max_blocks: int = 64) -> None:
        self.changed = threading.Condition()
        self.max_blocks = max_blocks
        self.messages: list[list[int]] = []
        """The sequences of the blocks of each request."""
        self.blocks: list[replay_pb2.AppendRequest] = []
        self.offers: list[bytes] = []
        """Keys of the memory that streams offered."""
        self.known: dict[tuple[int, int], int] = {}
        self.duplicates = 0
        self.received = self.streams = 0
        self.abort_every, self.complete_after_rows = abort_every, complete_after_rows
        self.refusal: Exception | None = None
        self.open = threading.Event()
        self.open.set()
        self.spec: RowSpec | None = None

    def register(self, server: grpc.Server) -> None:
        replay_pb2_grpc.add_ReplayServiceServicer_to_server(self, server)

    @property
    def row_count(self) -> int:
        return sum(block.header.row_count for block in self.blocks)

    def columns(self) -> Any:
        """All rows, as they were stored."""
        import numpy as np

        assert self.spec is not None
        blocks = [block_from_wire(self.spec, block.header, block.rows) for block in self.blocks]
        if not blocks:
            return np.empty(0, self.spec.dtype)
        return np.concatenate([block.columns for block in blocks])

    def wait_for(self, condition: Any, seconds: float = 20.0) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), seconds), f"{self.row_count} rows after {seconds} s"

    def OpenTable(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.spec = row_spec_from_wire(request.row_spec)
        return replay_pb2.OpenTableResponse(
            row_bytes=self.spec.row_bytes, capacity_row_count=10**6, max_blocks_per_append=self.max_blocks
        )

    def Append(self, requests: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with self.changed:
            self.streams += 1
        for request in requests:
            if request.HasField("memory"):
                self.offers.append(request.memory.key)
            if self.refusal is not None:
                abort(context, self.refusal)
            blocks = blocks_from_wire(Bulk(request, request.rows), max(1, self.max_blocks))
            with self.changed:
                self.received += 1
                self.messages.append([block.header.sequence for block in blocks])
                self.changed.notify_all()
            while not self.open.wait(0.05):
                if not context.is_active():
                    return
            answers: list[replay_pb2.AppendResponse] = []
            is_lost = False
            for block in blocks:
                answer = self._store(block)
                is_new = not answer.duplicate
                is_lost = bool(is_new and self.abort_every and block.header.sequence % self.abort_every == 0)
                if is_lost:
                    break
                answers.append(answer)
            if answers:
                answers[0].further.extend(answers[1:])
                yield answers[0]
            if is_lost:
                context.abort(grpc.StatusCode.UNAVAILABLE, "stored, and the answer is lost")

    def _store(self, block: SentBlock) -> replay_pb2.AppendResponse:
        header, rows = block.header, bytes(block.payload)
        with self.changed:
            assert self.spec is not None
            block_from_wire(self.spec, header, rows)
            sender = (header.collector_index, header.collector_incarnation)
            duplicate = header.sequence <= self.known.get(sender, 0)
            if duplicate:
                self.duplicates += 1
            else:
                assert header.sequence == self.known.get(sender, 0) + 1, "a block is missing"
                self.known[sender] = header.sequence
                self.blocks.append(replay_pb2.AppendRequest(header=header, rows=rows))
            self.changed.notify_all()
        return replay_pb2.AppendResponse(
            sequence=header.sequence,
            stored_row_count=0 if duplicate else header.row_count,
            duplicate=duplicate,
            complete=self.complete_after_rows is not None and self.row_count >= self.complete_after_rows,
        )


def main() -> None:
    learner = Learner()
    learner.publish(int(sys.argv[1]))
    server, port = serve(learner)
    print(port, flush=True)
    for line in sys.stdin:  # each line publishes that version
        learner.publish(int(line))
    server.stop(0)


if __name__ == "__main__":
    main()
