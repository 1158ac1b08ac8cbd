"""Real endpoint processes with small snapshots, and plain protobuf clients of them."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.config import Config, load
from paceline.identity import PROTOCOL_VERSION, PolicyIdentity
from paceline.learner.endpoint import Endpoint
from paceline.learner.ledger import Ledger
from paceline.rows import Column, transition_spec
from paceline.snapshot import SnapshotHeader, TensorDescription
from paceline.v1 import parameters_pb2, parameters_pb2_grpc, run_pb2, run_pb2_grpc

RUN_ID = "trial"
SPEC = transition_spec(Column("observation", "float32", (3,)), Column("action", "float32", (1,)))
SEMANTICS = '{"kind":"squashed_gaussian"}'
DEADLINE_SECONDS = 30.0
_ENVELOPE = b"x" * 64


def make_config(folder: Path, *overrides: str) -> Config:
    settings = [
        f"run.id={RUN_ID}",
        f"run.directory={folder}",
        "learner.listen=127.0.0.1:0",
        "learner.endpoint_metrics_listen=127.0.0.1:0",
    ]
    return load(None, [*settings, *overrides])


def make_snapshot(version: int, *, incarnation: int = 1, size: int = 4096) -> tuple[SnapshotHeader, bytes]:
    """A snapshot whose bytes belong to its version alone."""
    payload = random.Random(version).randbytes(1 << 16)
    payload = (payload * (size // len(payload) + 1))[:size] + _ENVELOPE
    header = SnapshotHeader(
        run_id=RUN_ID,
        identity=PolicyIdentity(incarnation, version),
        learner_step=version * 10,
        environment_step_count=version * 10,
        published_at=time.time(),
        payload_bytes=len(payload),
        payload_sha256=hashlib.sha256(payload).digest(),
        tensors=(TensorDescription("weight", "uint8", (size,)),),
        actor_semantics_json=SEMANTICS,
    )
    return header, payload


def start(config: Config, *, incarnation: int = 1, environment_steps: int = 0) -> Endpoint:
    return Endpoint.start(
        config,
        incarnation=incarnation,
        row_spec=SPEC,
        actor_semantics_json=SEMANTICS,
        resumed_environment_steps=environment_steps,
    )


@dataclass(frozen=True)
class Fetched:
    """One answer to GetSnapshot."""

    header: parameters_pb2.SnapshotHeader | None
    payload: bytes
    not_modified: parameters_pb2.NotModified | None

    @property
    def version(self) -> int | None:
        return self.header.identity.version if self.header is not None else None


class Client:
    """A plain protobuf client with a connection of its own."""

    def __init__(self, port: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)
        self.parameters = parameters_pb2_grpc.ParameterServiceStub(self.channel)
        self.run = run_pb2_grpc.RunServiceStub(self.channel)

    def request(
        self,
        *,
        have: tuple[int, int] | None = None,
        wait: float = 0.0,
        run_id: str = RUN_ID,
        protocol: int = PROTOCOL_VERSION,
        at_least: int = 0,
        replica: parameters_pb2.ReplicaReport | None = None,
    ) -> parameters_pb2.GetSnapshotRequest:
        request = parameters_pb2.GetSnapshotRequest(
            run_id=run_id, protocol_version=protocol, at_least_version=at_least, replica=replica
        )
        if have is not None:
            request.have.incarnation, request.have.version = have
        if wait:
            request.wait.FromMilliseconds(round(wait * 1000))
        return request

    def fetch(
        self, request: parameters_pb2.GetSnapshotRequest | None = None, *, seconds: float = DEADLINE_SECONDS
    ) -> Fetched:
        return collect(self.parameters.GetSnapshot(request or self.request(), timeout=seconds))

    def fetch_version(self, version: int) -> Fetched:
        """The snapshot of this version or a later one, as soon as it is served."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            try:
                fetched = self.fetch(self.request(wait=10.0, at_least=version))
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                continue
            if fetched.header is not None:
                return fetched
        raise AssertionError(f"version {version} is not served")

    def join(
        self,
        index: int | None = None,
        *,
        role: run_pb2.Role = run_pb2.ROLE_COLLECTOR,
        run_id: str = RUN_ID,
        protocol: int = PROTOCOL_VERSION,
        process_id: str = "host:1",
        seconds: float = DEADLINE_SECONDS,
    ) -> run_pb2.JoinResponse:
        request = run_pb2.JoinRequest(
            run_id=run_id, protocol_version=protocol, role=role, index=index, process_id=process_id
        )
        return self.run.Join(request, timeout=seconds)

    def report(
        self,
        sequence: int,
        *returns: float,
        index: int = 0,
        incarnation: int = 1,
        run_id: str = RUN_ID,
        steps: int = 0,
        length: int = 200,
    ) -> run_pb2.ReportEpisodesResponse:
        request = run_pb2.ReportEpisodesRequest(
            run_id=run_id,
            collector_index=index,
            collector_incarnation=incarnation,
            sequence=sequence,
            environment_step_count=steps,
            episodes=[run_pb2.Episode(episode_return=value, length=length) for value in returns],
        )
        return self.run.ReportEpisodes(request, timeout=DEADLINE_SECONDS)

    def evaluate(
        self, version: int, *returns: float, incarnation: int = 1, run_id: str = RUN_ID
    ) -> run_pb2.ReportEvaluationResponse:
        request = run_pb2.ReportEvaluationRequest(
            run_id=run_id,
            policy=parameters_pb2.PolicyIdentity(incarnation=incarnation, version=version),
            learner_step=version * 10,
            environment_step_count=version * 10,
            episodes=[run_pb2.Episode(episode_return=value, length=200) for value in returns],
        )
        return self.run.ReportEvaluation(request, timeout=DEADLINE_SECONDS)

    def close(self) -> None:
        self.channel.close()


def collect(responses: Iterator[parameters_pb2.GetSnapshotResponse]) -> Fetched:
    first = next(responses)
    if first.WhichOneof("part") == "not_modified":
        assert list(responses) == []
        return Fetched(None, b"", first.not_modified)
    return Fetched(first.header, b"".join(response.chunk for response in responses), None)


@contextmanager
def client_of(endpoint: Endpoint) -> Iterator[Client]:
    client = Client(endpoint.port)
    try:
        yield client
    finally:
        client.close()


def metrics_page(endpoint: Endpoint) -> dict[str, float]:
    """Every sample of /metrics, by its name and labels as written there."""
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.metrics_port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def until(is_true: Callable[[], bool], seconds: float = DEADLINE_SECONDS) -> None:
    """Wait for a condition that only another process can tell, so that it has to be asked for again and again."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "the condition did not come true"
        threading.Event().wait(0.01)


def live_one_learner(folder: Path, port_file: Path, size: int, overrides: list[str]) -> None:
    """A training process that publishes as fast as it can until it is killed. For a process of its own."""
    config = make_config(folder, *overrides)
    with Ledger.open(config.run_folder, resume=True) as ledger:
        endpoint = start(config, incarnation=ledger.incarnation)
        port_file.with_suffix(".new").write_text(f"{endpoint.port} {endpoint.pid}")
        port_file.with_suffix(".new").replace(port_file)
        version = ledger.last_version
        while True:
            version += 1
            endpoint.publish(*make_snapshot(version, incarnation=ledger.incarnation, size=size))


if __name__ == "__main__":
    live_one_learner(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
