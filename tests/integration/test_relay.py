"""Relays between a real endpoint and real clients: what they pass on, what they refuse, and what they outlive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from endpoints import Client, make_config, make_snapshot, metrics_page, start
from integration.peers import SEMANTICS, Learner, make_actor, serve
from integration.relays import RelayProcess, RelayThread, reasons, settings_of
from integration.waiting import wait_until
from paceline.actors import build_actor
from paceline.config import RpcConfig
from paceline.learner.endpoint import Endpoint
from paceline.learner.ledger import Ledger
from paceline.replica import LearnerClock, ReplicaMetrics, ReplicaOwner, SnapshotPoller
from paceline.rpc.client import open_channel
from paceline.rpc.wire import seconds_of
from paceline.serving.parameter_service import MAX_REPORTS
from paceline.snapshot import StagedActor, pack_state
from paceline.v1 import parameters_pb2 as pb

RPC = RpcConfig(deadline_seconds=1.0, backoff_initial_seconds=0.02, backoff_max_seconds=0.1)
MEBIBYTE = 1 << 20


class Tree:
    """Endpoints, relays and clients of one test; all of them end with it."""

    def __init__(self, folder: Path, cleanup: ExitStack) -> None:
        self.folder, self.cleanup = folder, cleanup
        self._relays = 0

    def endpoint(self, *overrides: str) -> Endpoint:
        endpoint = start(make_config(self.folder, *overrides))
        self.cleanup.callback(endpoint.close)
        return endpoint

    def learner(self, port: int = 0) -> tuple[Learner, grpc.Server, int]:
        """One of the tests' own, which fails when it is told to."""
        learner = Learner()
        server, port = serve(learner, port=port)
        self.cleanup.callback(lambda: server.stop(0).wait())
        return learner, server, port

    def relay(self, upstream: int, *overrides: str, ahead: float = 0.0) -> RelayThread:
        """A relay in this process: where nobody kills it, that is as good as one of its own and sooner there."""
        relay = RelayThread(upstream, *overrides, ahead=ahead)
        self.cleanup.callback(relay.close)
        return relay

    def relay_process(self, upstream: int, *overrides: str) -> RelayProcess:
        self._relays += 1
        relay = RelayProcess(self.folder / f"relay-{self._relays}", upstream, *overrides)
        self.cleanup.callback(relay.kill)
        return relay

    def client(self, port: int) -> Client:
        client = Client(port)
        self.cleanup.callback(client.close)
        return client


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    with ExitStack() as cleanup:
        yield Tree(tmp_path, cleanup)


def report(index: int, version: int, *, incarnation: int = 1) -> pb.ReplicaReport:
    applied = pb.PolicyIdentity(incarnation=1, version=version)
    return pb.ReplicaReport(collector_index=index, collector_incarnation=incarnation, applied=applied)


def fetch_until(client: Client, version: int) -> bytes:
    """The bytes of a version, as soon as it is served; polls may fail meanwhile."""
    fetched = client.fetch_version(version)
    assert fetched.header is not None
    assert fetched.header.identity.version == version
    return fetched.payload


def test_a_chain_of_relays_passes_snapshots_on_bit_by_bit(tree: Tree) -> None:
    endpoint = tree.endpoint("learner.chunk_bytes=65536")
    relays = [tree.relay_process(endpoint.port)]
    relays.append(tree.relay_process(relays[0].port))
    assert relays[1].health("/readyz") == 503
    assert relays[1].health("/healthz") == 200
    top, bottom = tree.client(endpoint.port), tree.client(relays[1].port)
    with pytest.raises(grpc.RpcError, match="the relay has no snapshot yet"):
        bottom.fetch()
    for version, size in ((1, 3 * MEBIBYTE), (2, 4096), (3, 65536 * 2)):
        header, payload = make_snapshot(version, size=size)
        endpoint.publish(header, payload)
        assert fetch_until(bottom, version) == payload
        # Everything that is said of it comes through, too.
        assert bottom.fetch().header == top.fetch().header
    not_modified = bottom.fetch(bottom.request(have=(1, 3))).not_modified
    assert not_modified == top.fetch(top.request(have=(1, 3))).not_modified
    assert relays[1].health("/readyz") == 200
    health = health_pb2_grpc.HealthStub(bottom.channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=10).status == health_pb2.HealthCheckResponse.SERVING
    page = relays[1].page()
    assert page["paceline_relay_served_version"] == 3
    assert page["paceline_relay_behind_versions"] == 0
    assert page["paceline_relay_publish_delay_seconds_count"] == 3
    assert page["paceline_relay_received_bytes_total"] == sum(
        make_snapshot(version, size=size)[0].payload_bytes
        for version, size in ((1, 3 * MEBIBYTE), (2, 4096), (3, 131072))
    )
    assert 0 <= page["paceline_relay_snapshot_age_seconds"] < 60


def test_a_poll_waits_at_a_relay_and_may_skip_versions(tree: Tree) -> None:
    endpoint = tree.endpoint()
    relay = tree.relay(endpoint.port)
    client = tree.client(relay.port)
    endpoint.publish(*make_snapshot(1))
    fetch_until(client, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.fetch, client.request(have=(1, 1), at_least=3, wait=30.0), seconds=40.0)
        relay.wait_for("waiting_polls", lambda count: count == 1)
        endpoint.publish(*make_snapshot(2))
        relay.wait_for("served_version", lambda version: version == 2)
        assert not waiting.done()
        endpoint.publish(*make_snapshot(3))
        assert waiting.result(30).version == 3


@pytest.mark.parametrize("fault", ["flip", "short", "cut"])
def test_a_snapshot_that_is_damaged_on_the_way_is_never_served(tree: Tree, fault: str) -> None:
    learner, _, port = tree.learner()
    learner.publish(1)
    relay = tree.relay(port)
    client = tree.client(relay.port)
    before = fetch_until(client, 1)
    learner.faults.extend([fault] * 3)
    learner.publish(2)
    while learner.faults:
        assert client.fetch().payload == before
    assert fetch_until(client, 2) == pack_state(make_actor(2))
    name = "failed" if fault == "cut" else "damaged"
    assert relay.page()[f'paceline_relay_upstream_polls_total{{result="{name}"}}'] == 3


def test_what_is_older_is_ignored_and_a_newer_incarnation_is_newer_whatever_its_version(tree: Tree) -> None:
    learner, _, port = tree.learner()
    learner.incarnation = 2
    learner.publish(7)
    relay = tree.relay(port, "relay.poll_seconds=0.05")
    client = tree.client(relay.port)
    assert fetch_until(client, 7) == pack_state(make_actor(7))
    # A learner that was thought dead comes back, with a higher version and a lower incarnation.
    learner.ignores_have, learner.incarnation = True, 1
    learner.publish(9)
    wait_until(lambda: relay.page()['paceline_relay_upstream_polls_total{result="older"}'] >= 3)
    assert client.fetch().version == 7
    learner.incarnation = 3
    learner.publish(8)
    assert fetch_until(client, 8) == pack_state(make_actor(8))


@pytest.mark.slow
def test_a_relay_serves_on_while_the_learner_is_away_and_takes_what_its_successor_publishes(tree: Tree) -> None:
    config = make_config(tree.folder)
    with Ledger.open(config.run_folder, resume=False) as ledger:
        first = start(config, incarnation=ledger.incarnation)
        tree.cleanup.callback(first.close)
        first.publish(*make_snapshot(1))
        relay = tree.relay(first.port)
        below = tree.relay(relay.port)
        client = tree.client(below.port)
        assert fetch_until(client, 1) == make_snapshot(1)[1]
        os.kill(first.pid, signal.SIGKILL)
        relay.wait_for('upstream_polls_total{result="failed"}', lambda count: count > 0)
        silence = relay.value("upstream_silence_seconds")
        relay.wait_for("upstream_silence_seconds", lambda seconds: seconds > silence)
        assert client.fetch().payload == make_snapshot(1)[1]
        assert client.fetch(client.request(have=(1, 1))).not_modified is not None
        assert relay.health("/readyz") == 200
        port = first.port
        first.close()
    with Ledger.open(config.run_folder, resume=True) as ledger:
        second = start(make_config(tree.folder, f"learner.listen=127.0.0.1:{port}"), incarnation=ledger.incarnation)
        tree.cleanup.callback(second.close)
        second.publish(*make_snapshot(2, incarnation=2))
        fetched = client.fetch_version(2)
    assert fetched.payload == make_snapshot(2)[1]
    assert fetched.header is not None
    assert fetched.header.identity.incarnation == 2


def test_the_end_of_a_run_is_passed_on_and_so_is_that_it_goes_on(tree: Tree) -> None:
    learner, _, port = tree.learner()
    learner.publish(1)
    relay = tree.relay(port)
    client = tree.client(relay.port)
    fetch_until(client, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.fetch, client.request(have=(1, 1), wait=30.0), seconds=40.0)
        relay.wait_for("waiting_polls", lambda count: count == 1)
        learner.finish()
        assert waiting.result(20).not_modified.run_state == pb.RUN_STATE_FINISHED
    # The run is resumed with more steps.
    learner.incarnation, learner.run_state = 2, pb.RUN_STATE_RUNNING
    learner.publish(2)
    fetched = client.fetch_version(2)
    assert fetched.header is not None
    assert fetched.header.run_state == pb.RUN_STATE_RUNNING
    assert len(learner.polls) < 50  # a finished run is no reason to ask again and again


class Lagging:
    """Three collectors that act with versions 1, 2 and 3 of 3, below two relays."""

    def __init__(self, tree: Tree, silence_seconds: int) -> None:
        silence = f"learner.silence_seconds={silence_seconds}"
        self.endpoint = tree.endpoint(silence)
        self.relay = tree.relay(self.endpoint.port, silence)
        self.below = tree.relay(self.relay.port, silence)
        top, self.client = tree.client(self.endpoint.port), tree.client(self.below.port)
        places = [top.join(process_id=str(number)) for number in range(3)]
        for version in (1, 2, 3):
            self.endpoint.publish(*make_snapshot(version))
        fetch_until(self.client, 3)
        self.reports = [report(place.index, version) for place, version in zip(places, (1, 2, 3), strict=True)]

    def lag(self, index: int) -> float | None:
        return metrics_page(self.endpoint).get(f'paceline_endpoint_publish_lag_versions{{collector="{index}"}}')

    def tell(self, *indices: int) -> None:
        for index in indices:
            answer = self.client.fetch(self.client.request(have=(1, 3), replica=self.reports[index]))
            assert answer.not_modified is not None


def test_publish_lag_of_collectors_below_two_relays_is_known_at_the_learner(tree: Tree) -> None:
    forest = Lagging(tree, silence_seconds=30)
    forest.tell(0, 1, 2)
    wait_until(lambda: [forest.lag(index) for index in range(3)] == [2, 1, 0])
    assert forest.relay.value("collectors") == forest.below.value("collectors") == 3
    assert metrics_page(forest.endpoint)["paceline_endpoint_poll_lag_versions_count"] >= 3


@pytest.mark.slow
def test_the_series_of_a_collector_that_died_below_relays_end_and_those_of_the_living_do_not(tree: Tree) -> None:
    forest = Lagging(tree, silence_seconds=6)
    forest.tell(0, 1, 2)
    wait_until(lambda: [forest.lag(index) for index in range(3)] == [2, 1, 0])
    # The first dies. The second has a poll that is held, and the third polls: both live.
    held = forest.client.parameters.GetSnapshot(
        forest.client.request(have=(1, 9), wait=50.0, replica=forest.reports[1]), timeout=60
    )

    def first_is_gone() -> bool:
        forest.tell(2)
        return forest.lag(0) is None

    wait_until(first_is_gone)
    assert not held.done()
    assert (forest.lag(1), forest.lag(2)) == (1, 0)
    assert forest.relay.value("collectors") == forest.below.value("collectors") == 2
    # Its connection breaks with it.
    held.cancel()

    def second_is_gone() -> bool:
        forest.tell(2)
        return forest.lag(1) is None

    wait_until(second_is_gone)
    assert metrics_page(forest.endpoint)["paceline_endpoint_collectors"] == 1


def test_a_relay_takes_no_more_reports_than_a_run_may_have_and_none_that_are_malformed(tree: Tree) -> None:
    endpoint = tree.endpoint("collector.max_count=4")
    endpoint.publish(*make_snapshot(1))
    relay = tree.relay(endpoint.port, "collector.max_count=4")
    client = tree.client(relay.port)
    fetch_until(client, 1)

    def poll(*reports: pb.ReplicaReport) -> None:
        request = client.request(have=(1, 1))
        request.below.extend(reports)
        client.fetch(request)

    with pytest.raises(grpc.RpcError, match=f"expected at most {MAX_REPORTS}"):
        poll(*[report(index, 1) for index in range(MAX_REPORTS + 1)])
    with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
        poll(report(0, 1), report(1, -5))
    assert relay.value("collectors") == 0
    poll(*[report(index, 1) for index in range(-10, 1000)])
    assert relay.value("collectors") == 4
    answered = relay.page()['paceline_relay_upstream_polls_total{result="not_modified"}']
    # The endpoint gave none of these places out; the relay's polls go on.
    wait_until(lambda: relay.page()['paceline_relay_upstream_polls_total{result="not_modified"}'] > answered + 1)
    assert metrics_page(endpoint)["paceline_endpoint_collectors"] == 0


@pytest.mark.parametrize("aheads", [(3600.0,), (-7200.0, 86400.0)])
def test_the_learners_time_comes_through_relays_whose_clocks_are_wrong(tree: Tree, aheads: tuple[float, ...]) -> None:
    endpoint = tree.endpoint()
    endpoint.publish(*make_snapshot(1))
    upstream = endpoint.port
    for ahead in aheads:
        upstream = tree.relay(upstream, ahead=ahead).port
    client = tree.client(upstream)
    fetch_until(client, 1)
    # The endpoint's clock is this machine's, so the true time is known here.
    mine = LearnerClock(lambda: time.time() + 500)
    for _ in range(5):
        sent, before = mine.own(), time.time()
        [answer] = client.parameters.GetSnapshot(client.request(have=(1, 1)), timeout=10)
        after, received = time.time(), mine.own()
        uncertainty = seconds_of(answer.times.uncertainty)
        assert 0 < uncertainty < 5
        assert before - uncertainty <= seconds_of(answer.times.received_at)
        assert seconds_of(answer.times.received_at) <= seconds_of(answer.times.answered_at) <= after + uncertainty
        mine.note_poll(sent, answer.times, received)
        offset = mine.offset()
        assert offset is not None
        # What is uncertain on the way adds up, and the truth is within it.
        assert offset.uncertainty_seconds >= uncertainty
        assert abs(offset.seconds + 500) <= offset.uncertainty_seconds


class Replica:
    """What a collector has of the policy."""

    def __init__(self, port: int) -> None:
        self.channel = open_channel(f"127.0.0.1:{port}", RPC)
        self.staged = StagedActor(build_actor(SEMANTICS))
        self.poller = SnapshotPoller(
            self.channel,
            self.staged,
            run_id="trial",
            rpc=RPC,
            poll_seconds=0.5,
            metrics=ReplicaMetrics(CollectorRegistry(), "collector"),
            owner=ReplicaOwner(0, 1),
        )
        self.poller.start()

    def acts_with(self, version: int) -> bool:
        self.poller.apply_if_ready()
        applied = self.poller.applied
        return applied is not None and applied.identity.version == version

    def close(self) -> None:
        self.poller.close()
        self.channel.close()


@pytest.mark.slow
def test_collectors_act_on_while_their_relay_is_dead_and_catch_up_with_the_next_one(tree: Tree) -> None:
    learner, _, port = tree.learner()
    learner.publish(1)
    relay = tree.relay_process(port)
    replicas = [Replica(relay.port) for _ in range(2)]
    for replica in replicas:
        tree.cleanup.callback(replica.close)
        wait_until(lambda replica=replica: replica.acts_with(1))
    relay.kill()
    learner.publish(2)
    for replica in replicas:
        before = replica.poller._metrics.poll_failures._value.get()
        wait_until(lambda: replica.poller._metrics.poll_failures._value.get() > before + 1)  # noqa: B023
        assert replica.acts_with(1)
        assert pack_state(replica.staged.actor) == pack_state(make_actor(1))
    relay.start()
    for replica in replicas:
        wait_until(lambda replica=replica: replica.acts_with(2))
        assert pack_state(replica.staged.actor) == pack_state(make_actor(2))


@pytest.mark.slow
def test_a_relay_that_is_told_to_stop_ends_well_and_at_once(tree: Tree) -> None:
    endpoint = tree.endpoint()
    endpoint.publish(*make_snapshot(1, size=24 * MEBIBYTE))
    relay = tree.relay_process(endpoint.port, "rpc.drain_seconds=1")
    client = tree.client(relay.port)
    fetch_until(client, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.fetch, client.request(have=(1, 1), wait=50.0), seconds=60.0)
        stalled = client.parameters.GetSnapshot(client.request(), timeout=60)
        next(stalled)
        relay.wait_for("waiting_polls", lambda count: count == 1)
        assert relay.terminate() == 0
        error = waiting.exception(10)
    assert isinstance(error, grpc.RpcError)
    assert "the relay is stopping" in error.details()
    assert relay.events("relay_ended") != []


@pytest.mark.slow
def test_a_relay_ends_with_a_reason_where_no_repeat_would_help(tree: Tree) -> None:
    learner, _, port = tree.learner()
    learner.publish(1)
    for overrides, reason in (
        (("run.id=other",), "this is run 'trial', not 'other'"),
        ((f"relay.listen=127.0.0.1:{port}",), "where the relay would also fetch snapshots"),
    ):
        result = subprocess.run(
            [sys.executable, "-m", "paceline", "relay", *settings_of(port, *overrides)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 2
        [told] = reasons(result.stderr)
        assert reason in told


@pytest.mark.slow
def test_memory_holds_the_newest_snapshot_and_what_slow_readers_keep(tree: Tree) -> None:
    size = 16 * MEBIBYTE
    endpoint = tree.endpoint()
    relay = tree.relay_process(endpoint.port)
    client = tree.client(relay.port)

    def publish(version: int) -> None:
        endpoint.publish(*make_snapshot(version, size=size))
        relay.wait_for("served_version", lambda served: served == version)

    def resident() -> float:
        return relay.page()["process_resident_memory_bytes"]

    for version in range(1, 7):
        publish(version)
    settled = resident()
    stalled = client.parameters.GetSnapshot(client.request(), timeout=120)
    header = next(stalled).header
    relay.wait_for("sending_polls", lambda count: count == 1)
    for version in range(7, 27):
        publish(version)
    assert resident() - settled < 5 * size
    # Who was slow gets the whole snapshot that it began with.
    assert header.identity.version == 6
    assert b"".join(part.chunk for part in stalled) == make_snapshot(6, size=size)[1]
    relay.wait_for("sending_polls", lambda count: count == 0)


def test_many_readers_cost_upstream_no_more_than_one(tree: Tree) -> None:
    endpoint = tree.endpoint()
    relay = tree.relay(endpoint.port)
    clients = [tree.client(relay.port) for _ in range(16)]
    for version in (1, 2, 3):
        payload = make_snapshot(version, size=MEBIBYTE)[1]
        endpoint.publish(*make_snapshot(version, size=MEBIBYTE))
        with ThreadPoolExecutor(16) as pool:
            fetch: Callable[[Client], bytes] = lambda client: fetch_until(client, version)  # noqa: B023, E731
            assert list(pool.map(fetch, clients)) == [payload] * 16
    sent = metrics_page(endpoint)["paceline_endpoint_snapshot_sent_bytes_total"]
    assert 3 * MEBIBYTE < sent < 3.1 * MEBIBYTE
    assert relay.page()["paceline_relay_snapshot_sent_bytes_total"] > 48 * MEBIBYTE
