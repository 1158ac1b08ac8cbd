"""Snapshots over a way so slow that they take longer than any deadline, or that stands still."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from endpoints import RUN_ID, Client, make_config, make_snapshot, metrics_page, start
from integration.relays import RelayThread
from integration.slow_way import SlowWay
from integration.waiting import wait_until
from paceline.actors import ActorSemantics, build_actor, squashed_gaussian_semantics
from paceline.config import RpcConfig
from paceline.identity import PolicyIdentity
from paceline.learner.endpoint import Endpoint
from paceline.replica import ReplicaMetrics, ReplicaOwner, SnapshotPoller
from paceline.rpc.client import open_channel
from paceline.snapshot import SnapshotHeader, StagedActor, make_header, pack_state
from paceline.v1 import parameters_pb2 as pb

POLL_SECONDS = 0.5
RPC = RpcConfig(deadline_seconds=1.0, backoff_initial_seconds=0.02, backoff_max_seconds=0.1)
LONGEST_WAIT_SECONDS = POLL_SECONDS + RPC.deadline_seconds
NOTICE_SECONDS = LONGEST_WAIT_SECONDS + 2
CHUNK_BYTES = 4096
SEMANTICS = squashed_gaussian_semantics(3, hidden=(256, 256), action_low=(-2.0,), action_high=(2.0,))
LARGE = squashed_gaussian_semantics(3, hidden=(1024, 1024), action_low=(-2.0,), action_high=(2.0,))
"""4.2 MB, more than what is under way on a connection that has carried little."""
SLOWLY = 1 << 16
"""Bytes a second: an actor's 269 KB take some four seconds."""
SETTINGS = (
    f"learner.chunk_bytes={CHUNK_BYTES}",
    f"rpc.deadline_seconds={RPC.deadline_seconds}",
    f"collector.poll_seconds={POLL_SECONDS}",
    f"relay.poll_seconds={POLL_SECONDS}",
)


def make_actor_snapshot(version: int, semantics: ActorSemantics = SEMANTICS) -> tuple[SnapshotHeader, bytes]:
    actor = build_actor(semantics)
    payload = pack_state(actor)
    header = make_header(
        actor,
        payload,
        run_id=RUN_ID,
        identity=PolicyIdentity(1, version),
        learner_step=version,
        environment_step_count=version,
        published_at=time.time(),
    )
    return header, payload


class Replica:
    """A poller and what it fills."""

    def __init__(self, port: int, semantics: ActorSemantics) -> None:
        self.registry = CollectorRegistry()
        self.staged = StagedActor(build_actor(semantics))
        self.channel = open_channel(f"127.0.0.1:{port}", RPC)
        self.poller = SnapshotPoller(
            self.channel,
            self.staged,
            run_id=RUN_ID,
            rpc=RPC,
            poll_seconds=POLL_SECONDS,
            metrics=ReplicaMetrics(self.registry, "collector"),
            owner=ReplicaOwner(0, 1),
        )
        self.poller.start()

    def acts_with(self, payload: bytes) -> bool:
        return self.poller.apply_if_ready() and pack_state(self.staged.actor) == payload

    def value(self, thing: str) -> float:
        value = self.registry.get_sample_value(f"paceline_collector_{thing}")
        assert value is not None
        return value

    def close(self) -> None:
        self.poller.close()
        self.channel.close()


class Peers:
    """What one test starts; it ends with the test."""

    def __init__(self, folder: Path, cleanup: ExitStack) -> None:
        self._folder, self._cleanup = folder, cleanup

    def endpoint(self) -> Endpoint:
        endpoint = start(make_config(self._folder, *SETTINGS))
        self._cleanup.callback(endpoint.close)
        return endpoint

    def relay(self, upstream: int) -> RelayThread:
        relay = RelayThread(upstream, *SETTINGS)
        self._cleanup.callback(relay.close)
        return relay

    def way(self, port: int, bytes_per_second: float = math.inf) -> SlowWay:
        way = SlowWay(port, bytes_per_second=bytes_per_second)
        self._cleanup.callback(way.close)
        return way

    def replica(self, port: int, semantics: ActorSemantics = SEMANTICS) -> Replica:
        replica = Replica(port, semantics)
        self._cleanup.callback(replica.close)
        return replica

    def client(self, port: int) -> Client:
        client = Client(port)
        self._cleanup.callback(client.close)
        return client


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    with ExitStack() as cleanup:
        yield Peers(tmp_path, cleanup)


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def served_and_failed(relay: RelayThread) -> tuple[float | None, float]:
    """Which version a relay serves, and how many of its polls failed."""
    page = relay.page()
    return page.get("paceline_relay_served_version"), page['paceline_relay_upstream_polls_total{result="failed"}']


@pytest.mark.slow
@pytest.mark.parametrize("server", ["learner", "relay"])
def test_a_snapshot_arrives_however_long_its_transfer_takes(peers: Peers, server: str) -> None:
    endpoint = peers.endpoint()
    header, payload = make_actor_snapshot(1)
    endpoint.publish(header, payload)
    port = endpoint.port if server == "learner" else peers.relay(endpoint.port).port
    if server == "relay":
        peers.client(port).fetch_version(1)
    replica = peers.replica(peers.way(port, SLOWLY).port)
    wait_until(lambda: replica.acts_with(payload))
    assert replica.value("snapshot_fetch_seconds_sum") > LONGEST_WAIT_SECONDS
    assert replica.value("snapshot_poll_failures_total") == 0


@pytest.mark.slow
def test_a_relay_fetches_a_snapshot_however_long_its_transfer_takes(peers: Peers) -> None:
    endpoint = peers.endpoint()
    header, payload = make_snapshot(1, size=SLOWLY * 4)
    endpoint.publish(header, payload)
    relay = peers.relay(peers.way(endpoint.port, SLOWLY).port)
    assert peers.client(relay.port).fetch_version(1).payload == payload
    assert relay.page()["paceline_relay_fetch_seconds_sum"] > LONGEST_WAIT_SECONDS
    assert served_and_failed(relay) == (1, 0)


@pytest.mark.slow
def test_a_transfer_that_stands_still_is_given_up_with_the_reason_and_made_again(peers: Peers) -> None:
    endpoint = peers.endpoint()
    header, payload = make_actor_snapshot(1)
    way = peers.way(endpoint.port)
    endpoint.publish(header, payload)
    way.stand_still_after(len(payload) // 4)
    with capture_logs() as logs:
        replica = peers.replica(way.port)
        wait_until(lambda: way.carried >= len(payload) // 4)
        wait_until(lambda: replica.value("snapshot_poll_failures_total") >= 1, NOTICE_SECONDS)
        assert replica.value("snapshot_apply_failures_total") == 1
        assert not replica.poller.apply_if_ready()
        way.go_on()
        wait_until(lambda: replica.acts_with(payload))
    [told] = [line for line in logs if line["event"] == "snapshot_polls_failing"]
    assert "the learner's parameter service sent nothing for 1 s, after " in told["reason"]
    assert "expected the next one within rpc.deadline_seconds" in told["reason"]


@pytest.mark.slow
def test_a_learner_that_freezes_amid_a_transfer_is_noticed_within_the_deadline(peers: Peers) -> None:
    endpoint = peers.endpoint()
    header, payload = make_actor_snapshot(1, LARGE)
    way = peers.way(endpoint.port)
    endpoint.publish(header, payload)
    way.stand_still_after(2 * CHUNK_BYTES)
    replica = peers.replica(way.port, LARGE)
    wait_until(lambda: way.carried >= 2 * CHUNK_BYTES)
    os.kill(endpoint.pid, signal.SIGSTOP)
    try:
        way.go_on()  # what was under way comes
        wait_until(lambda: replica.value("snapshot_poll_failures_total") >= 1, NOTICE_SECONDS)
        assert way.carried < len(payload)
        assert replica.value("snapshot_apply_failures_total") == 1, "it broke off amid a transfer"
        assert not replica.poller.apply_if_ready()
    finally:
        os.kill(endpoint.pid, signal.SIGCONT)
    wait_until(lambda: replica.acts_with(payload))


@pytest.mark.slow
def test_a_relay_notices_an_upstream_that_stands_still_amid_a_transfer_and_in_a_poll(peers: Peers) -> None:
    endpoint = peers.endpoint()
    way = peers.way(endpoint.port)
    first, second = (make_snapshot(version, size=SLOWLY) for version in (1, 2))
    way.stand_still_after(SLOWLY // 2)
    endpoint.publish(*first)
    relay = peers.relay(way.port)
    wait_until(lambda: way.carried >= SLOWLY // 2)
    wait_until(lambda: served_and_failed(relay)[1] >= 1, NOTICE_SECONDS)
    assert served_and_failed(relay)[0] is None
    way.go_on()
    client = peers.client(relay.port)
    assert client.fetch_version(1).payload == first[1]
    failed = served_and_failed(relay)[1]
    os.kill(endpoint.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: served_and_failed(relay)[1] > failed, NOTICE_SECONDS)
    finally:
        os.kill(endpoint.pid, signal.SIGCONT)
    endpoint.publish(*second)
    assert client.fetch_version(2).payload == second[1]


def test_closing_amid_a_transfer_ends_it_and_leaves_no_thread(peers: Peers) -> None:
    endpoint = peers.endpoint()
    header, payload = make_actor_snapshot(1)
    way = peers.way(endpoint.port)
    way.stand_still_after(len(payload) // 8)
    endpoint.publish(header, payload)
    replica = peers.replica(way.port)
    wait_until(lambda: way.carried >= len(payload) // 8)
    replica.poller.close()
    wait_until(lambda: {"snapshot-poller", "snapshot-polls-watch"}.isdisjoint(thread_names()))
    assert replica.value("snapshot_apply_failures_total") == 0, "a close is no failure"


def test_a_collector_that_takes_chunks_is_no_silent_one(tmp_path: Path, peers: Peers) -> None:
    # Many times what lies in buffers on the way: that is sent already, as far as the endpoint can tell.
    settings = ("learner.chunk_bytes=65536", "learner.silence_seconds=1")
    with ExitStack() as cleanup:
        endpoint = start(make_config(tmp_path / "silent", *settings))
        cleanup.callback(endpoint.close)
        endpoint.publish(*make_snapshot(1, size=40 << 20))
        near = peers.client(endpoint.port)
        near.fetch_version(1)
        place = near.join(0, process_id="host:1")
        client = peers.client(peers.way(endpoint.port, 8 << 20).port)
        report = pb.ReplicaReport(collector_index=place.index, collector_incarnation=place.incarnation)
        chunks = client.parameters.GetSnapshot(client.request(replica=report), timeout=60)
        next(chunks)
        for _ in range(400):  # three seconds of its five
            next(chunks)
        assert metrics_page(endpoint)["paceline_endpoint_collectors"] == 1
        chunks.cancel()
