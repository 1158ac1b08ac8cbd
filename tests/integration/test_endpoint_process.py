"""The endpoint as a process beside the training process: large snapshots, slow readers, and deaths of either."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import endpoints
from endpoints import Client, client_of, make_config, make_snapshot, metrics_page, start, until
from paceline.config import Config
from paceline.errors import ConflictError, InvalidInputError, PortTakenError, SnapshotError, UnavailableError
from paceline.learner import endpoint as endpoint_module
from paceline.learner.endpoint import START_SECONDS, Endpoint
from paceline.learner.ledger import Ledger
from paceline.process import StopSignal
from paceline.v1 import parameters_pb2

MEBIBYTE = 1 << 20


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path)


@pytest.fixture
def endpoint(config: Config) -> Iterator[Endpoint]:
    with start(config) as endpoint:
        yield endpoint


@pytest.mark.parametrize(
    ("size", "chunk_bytes"),
    [
        (12 * MEBIBYTE, MEBIBYTE),
        (12 * MEBIBYTE + 1, 64 << 10),
        (100, MEBIBYTE),
        pytest.param(300 * MEBIBYTE, MEBIBYTE, marks=pytest.mark.slow),
        pytest.param(300 * MEBIBYTE, 64 << 10, marks=pytest.mark.slow),
    ],
)
def test_a_snapshot_of_any_size_arrives_bit_equal_in_chunks(tmp_path: Path, size: int, chunk_bytes: int) -> None:
    with start(make_config(tmp_path, f"learner.chunk_bytes={chunk_bytes}")) as endpoint, client_of(endpoint) as client:
        header, payload = make_snapshot(1, size=size)
        endpoint.publish(header, payload)
        fetched = client.fetch_version(1)
        assert fetched.payload == payload
        assert fetched.header is not None
        assert fetched.header.payload_sha256 == header.payload_sha256
        assert fetched.header.chunk_count == -(-len(payload) // chunk_bytes)


def test_snapshots_may_grow_and_shrink(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        for version, size in enumerate((100, 3 * MEBIBYTE, 50, 7 * MEBIBYTE, MEBIBYTE), 1):
            header, payload = make_snapshot(version, size=size)
            endpoint.publish(header, payload)
            assert client.fetch_version(version).payload == payload


def test_a_reader_that_stalls_half_way_keeps_its_copy_while_ten_newer_are_published(endpoint: Endpoint) -> None:
    header, payload = make_snapshot(1, size=24 * MEBIBYTE)
    endpoint.publish(header, payload)
    with client_of(endpoint) as client, client_of(endpoint) as other:
        other.fetch_version(1)
        responses = client.parameters.GetSnapshot(client.request(), timeout=60)
        received = [next(responses) for _ in range(5)]
        for version in range(2, 12):
            endpoint.publish(*make_snapshot(version, size=24 * MEBIBYTE))
            assert other.fetch_version(version).version == version
        received += list(responses)
        assert received[0].header.identity.version == 1
        assert b"".join(response.chunk for response in received[1:]) == payload


def test_64_waiting_polls_leave_short_calls_answered(endpoint: Endpoint) -> None:
    endpoint.publish(*make_snapshot(1))
    with client_of(endpoint) as client, ThreadPoolExecutor(64) as pool:
        client.fetch_version(1)
        request = client.request(have=(1, 1), wait=50.0)
        clients = [Client(endpoint.port) for _ in range(64)]
        waiting = [pool.submit(one.fetch, request, seconds=60.0) for one in clients]
        until(lambda: metrics_page(endpoint)["paceline_endpoint_waiting_polls"] == 64)
        # A short deadline: a call that stands behind the polls would miss it.
        assert client.join(seconds=5.0).index == 0
        health = health_pb2_grpc.HealthStub(client.channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == health_pb2.HealthCheckResponse.SERVING
        header, payload = make_snapshot(2)
        endpoint.publish(header, payload)
        assert all(future.result(20).payload == payload for future in waiting)
        for one in clients:
            one.close()


@pytest.mark.parametrize("key", ["learner.listen", "learner.endpoint_metrics_listen"])
def test_a_second_learner_on_one_port_fails_soon_and_names_the_port(tmp_path: Path, key: str) -> None:
    with start(make_config(tmp_path / "first")) as endpoint:
        endpoint.publish(*make_snapshot(1))
        port = endpoint.port if key == "learner.listen" else endpoint.metrics_port
        began = time.monotonic()
        with pytest.raises(PortTakenError, match=f"127.0.0.1:{port}"):
            start(make_config(tmp_path / "second", f"{key}=127.0.0.1:{port}"))
        assert time.monotonic() - began < START_SECONDS / 2  # it did not wait for the port until the last
        endpoint.check()
        for _ in range(30):
            with client_of(endpoint) as fresh:
                assert fresh.fetch_version(1).version == 1


def test_a_second_learner_of_one_run_is_refused(config: Config) -> None:
    with Ledger.open(config.run_folder, resume=False) as ledger, start(config, incarnation=ledger.incarnation):
        with pytest.raises(ConflictError, match="another learner trains it now"):
            Ledger.open(config.run_folder, resume=True)
        with pytest.raises(ConflictError, match="another endpoint serves it now"):
            start(config, incarnation=2)


def test_a_run_that_published_is_used(config: Config) -> None:
    with start(config) as endpoint, client_of(endpoint) as client:
        endpoint.publish(*make_snapshot(5))
        client.fetch_version(5)
    with pytest.raises(ConflictError, match="--resume"):
        Ledger.open(config.run_folder, resume=False)
    with Ledger.open(config.run_folder, resume=True) as ledger:
        assert ledger.last_version == 5
        with start(config, incarnation=ledger.incarnation) as endpoint:
            with pytest.raises(ConflictError, match="version 5 is published after version 5"):
                endpoint.publish(*make_snapshot(5, incarnation=ledger.incarnation))
            endpoint.publish(*make_snapshot(6, incarnation=ledger.incarnation))


def test_damage_in_the_endpoints_ledger_is_raised_in_the_training_process(config: Config) -> None:
    start(config).close()
    (config.run_folder / "learner" / "version").write_text("nonsense")
    with pytest.raises(InvalidInputError, match="version is damaged"):
        start(config)


def test_a_snapshot_that_is_not_what_its_header_says_is_refused_at_publish(endpoint: Endpoint) -> None:
    header, payload = make_snapshot(1)
    with pytest.raises(SnapshotError, match="bytes"):
        endpoint.publish(header, payload[:-1])
    with pytest.raises(ConflictError, match="incarnation"):
        endpoint.publish(*make_snapshot(1, incarnation=2))
    with pytest.raises(InvalidInputError, match="a training record cannot be written"):
        endpoint.record("training", {"loss": object()})
    endpoint.publish(header, payload)


def test_the_endpoint_holds_neither_torch_nor_a_name_in_shared_memory(endpoint: Endpoint) -> None:
    endpoint.publish(*make_snapshot(1))
    maps = Path(f"/proc/{endpoint.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "/dev/shm" not in maps


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_stop_a_learner_leave_its_endpoint_serving_until_told(
    endpoint: Endpoint, config: Config, number: signal.Signals
) -> None:
    os.kill(endpoint.pid, number)
    endpoint.publish(*make_snapshot(1))
    with client_of(endpoint) as client:
        assert client.fetch_version(1).version == 1
    endpoint.record("finish", {"learner_step": 3})
    endpoint.close()
    assert not is_alive(endpoint.pid)
    assert [json.loads(line)["kind"] for line in (config.run_folder / "metrics.jsonl").read_text().splitlines()] == [
        "finish"
    ]


def test_closing_ends_waiting_polls_at_once(endpoint: Endpoint) -> None:
    endpoint.publish(*make_snapshot(1))
    with client_of(endpoint) as client, ThreadPoolExecutor(1) as pool:
        client.fetch_version(1)
        waiting = pool.submit(client.fetch, client.request(have=(1, 1), wait=50.0), seconds=60.0)
        until(lambda: metrics_page(endpoint)["paceline_endpoint_waiting_polls"] == 1)
        endpoint.close()
        error = waiting.exception(5)
        assert isinstance(error, grpc.RpcError)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "the learner is stopping" in error.details()
    with pytest.raises(UnavailableError, match="closed"):
        endpoint.check()


def test_an_exception_in_the_training_loop_is_told_before_the_endpoint_ends(config: Config) -> None:
    def train(pool: ThreadPoolExecutor) -> None:
        with start(config) as endpoint:
            endpoint.publish(*make_snapshot(1))
            client = Client(endpoint.port)
            client.fetch_version(1)
            futures.append(pool.submit(client.fetch, client.request(have=(1, 1), wait=50.0), seconds=60.0))
            until(lambda: metrics_page(endpoint)["paceline_endpoint_waiting_polls"] == 1)
            raise ArithmeticError("the loss is not finite")

    futures: list[object] = []
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ArithmeticError):
            train(pool)
        error = futures[0].exception(10)  # type: ignore[attr-defined]
    assert "ArithmeticError: the loss is not finite" in error.details()


def test_the_death_of_the_endpoint_is_raised_in_the_training_process(endpoint: Endpoint) -> None:
    endpoint.publish(*make_snapshot(1))
    os.kill(endpoint.pid, signal.SIGKILL)

    def is_raised() -> bool:
        # A process shows as dead while its last threads end; only then can its parent know.
        try:
            endpoint.check()
        except UnavailableError as error:
            return "ended with exit code -9" in str(error)
        return False

    until(is_raised)
    with pytest.raises(UnavailableError):
        endpoint.publish(*make_snapshot(2))
    with pytest.raises(UnavailableError):
        endpoint.record("training", {})
    with pytest.raises(UnavailableError):
        endpoint.wait_for_evaluation(make_snapshot(1)[0].identity, 20.0, StopSignal())


def test_an_endpoint_that_hangs_is_an_error_after_a_deadline(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "SEND_SECONDS", 0.2)
    os.kill(endpoint.pid, signal.SIGSTOP)
    try:
        # Both slots are free at first.
        endpoint.publish(*make_snapshot(1))
        endpoint.publish(*make_snapshot(2))
        with pytest.raises(UnavailableError, match="takes no snapshot within"):
            endpoint.publish(*make_snapshot(3))
    finally:
        os.kill(endpoint.pid, signal.SIGCONT)


def test_a_stop_ends_the_wait_for_an_evaluation(endpoint: Endpoint) -> None:
    stop = StopSignal()
    stop.set()
    assert not endpoint.wait_for_evaluation(make_snapshot(1)[0].identity, 60.0, stop)


def test_a_collector_goes_on_without_joining_after_the_learner_resumed(config: Config) -> None:
    with Ledger.open(config.run_folder, resume=False) as ledger, start(config, incarnation=ledger.incarnation) as first:
        first.publish(*make_snapshot(1))
        with client_of(first) as client:
            place = client.join(process_id="host:77")
            client.fetch_version(1)
            client.report(1, -1.0, steps=200)
            client.evaluate(1, -9.0)
    with Ledger.open(config.run_folder, resume=True) as ledger:
        second = start(config, incarnation=ledger.incarnation, environment_steps=200)
        with second, client_of(second) as client:
            second.publish(*make_snapshot(2, incarnation=2))
            # The answers were lost with the learner, so both come again.
            client.report(1, -1.0, steps=200)
            client.evaluate(1, -9.0)
            client.report(2, -2.0, steps=300)
            replica = parameters_pb2.ReplicaReport(collector_index=place.index, collector_incarnation=place.incarnation)
            replica.applied.incarnation, replica.applied.version = 1, 1
            client.fetch_version(2)
            client.fetch(client.request(have=(1, 1), replica=replica))
            page = metrics_page(second)
            assert page['paceline_endpoint_publish_lag_versions{collector="0"}'] == 1
            assert page["paceline_endpoint_environment_steps"] == 300
            fresh = client.join(process_id="host:78")
            assert (fresh.index, fresh.warmup_step_count) == (1, 0)
            with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                client.join(10**6)
    records = [json.loads(line) for line in (config.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line.get("sequence")) for line in records] == [
        ("episode", 1),
        ("evaluation", None),
        ("episode", 2),
    ]


class Learner:
    """A training process of its own, with its endpoint, that publishes as fast as it can."""

    def __init__(self, folder: Path, *overrides: str, size: int = 4096) -> None:
        self._address = folder / "address"
        self._address.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, endpoints.__file__, str(folder), str(self._address), str(size), *overrides]
        )
        self.port = self.endpoint_pid = 0

    def wait_until_it_listens(self) -> None:
        until(lambda: self._address.exists() or self.process.poll() is not None, 60)
        self.port, self.endpoint_pid = map(int, self._address.read_text().split())

    def kill(self, *who: str) -> None:
        if "learner" in who:
            self.process.kill()
        if "endpoint" in who:
            os.kill(self.endpoint_pid, signal.SIGKILL)
        # Either takes the other with it.
        self.process.wait(20)


@pytest.fixture
def start_learner(tmp_path: Path) -> Iterator[Callable[..., Learner]]:
    """Starts training processes in the test's folder, and ends them whatever becomes of the test."""
    started: list[Learner] = []

    def start_one(*overrides: str, size: int = 4096) -> Learner:
        learner = Learner(tmp_path, *overrides, size=size)
        started.append(learner)
        learner.wait_until_it_listens()
        return learner

    yield start_one
    for learner in started:
        learner.process.kill()
        learner.process.wait(20)


def test_the_endpoint_ends_with_the_training_process_and_waits_for_nobody(
    start_learner: Callable[..., Learner],
) -> None:
    learner = start_learner(size=24 * MEBIBYTE)
    client = Client(learner.port)
    with ThreadPoolExecutor(1) as pool:
        client.fetch_version(1)
        # A call that waits and a reader that stalls are no reason to stay.
        waiting = pool.submit(client.fetch, client.request(wait=50.0, at_least=10**9), seconds=60.0)
        responses = client.parameters.GetSnapshot(client.request(), timeout=60)
        next(responses)
        learner.process.kill()
        began = time.monotonic()
        learner.process.wait(5)
        until(lambda: not is_alive(learner.endpoint_pid))
        assert time.monotonic() - began < 20  # and not the 50 or 60 of those who wait
        assert isinstance(waiting.exception(5), grpc.RpcError)
    client.close()


def test_a_stopped_endpoint_ends_with_the_training_process_and_is_in_nobodys_way(
    start_learner: Callable[..., Learner],
) -> None:
    learner = start_learner()
    os.kill(learner.endpoint_pid, signal.SIGSTOP)
    try:
        learner.process.kill()
        learner.process.wait(5)
        until(lambda: not is_alive(learner.endpoint_pid))
    finally:
        if is_alive(learner.endpoint_pid):
            os.kill(learner.endpoint_pid, signal.SIGCONT)
    start_learner()


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_no_version_comes_twice_and_no_restart_needs_a_hand_whoever_is_killed_when(
    tmp_path: Path, start_learner: Callable[..., Learner], rounds: int
) -> None:
    draw = random.Random(rounds)
    incarnation_of: dict[int, int] = {}
    newest, address = (0, 0), "learner.listen=127.0.0.1:0"
    for number in range(rounds):
        # At once and on the same port: it has to wait for the endpoint of the one before.
        learner = start_learner(address)
        address = f"learner.listen=127.0.0.1:{learner.port}"
        client = Client(learner.port)
        end = time.monotonic() + draw.uniform(0.0, 0.3)
        seen = 0
        while seen == 0 or time.monotonic() < end:
            try:
                fetched = client.fetch(client.request(wait=1.0, have=newest if newest[0] else None), seconds=10)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                continue
            if fetched.header is not None:
                identity = (fetched.header.identity.incarnation, fetched.header.identity.version)
                assert identity > newest
                assert identity[1] > newest[1]
                assert incarnation_of.setdefault(identity[1], identity[0]) == identity[0]
                assert fetched.payload == make_snapshot(identity[1])[1]
                newest, seen = identity, seen + 1
        learner.kill(*(["learner"], ["endpoint"], ["learner", "endpoint"])[number % 3])
        client.close()
        assert newest[0] == number + 1
    with Ledger.open(tmp_path / endpoints.RUN_ID, resume=True) as ledger:
        assert ledger.last_version >= newest[1]
