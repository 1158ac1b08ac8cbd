"""A replica follows the learner, whatever happens to the transfer, and never goes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from integration.peers import RUN_ID, SEMANTICS, Learner, make_actor, serve
from integration.waiting import wait_until
from paceline import identity
from paceline.actors import build_actor, squashed_gaussian_semantics
from paceline.config import RpcConfig
from paceline.errors import ActorSemanticsError, ProtocolMismatchError, RunMismatchError
from paceline.process import StopSignal
from paceline.replica import ReplicaMetrics, ReplicaOwner, SnapshotPoller
from paceline.replica import poller as poller_module
from paceline.rpc.client import open_channel
from paceline.snapshot import StagedActor, pack_state

RPC = RpcConfig(deadline_seconds=1.0, backoff_initial_seconds=0.02, backoff_max_seconds=0.1)


class Replica:
    """A poller and what it fills."""

    def __init__(self, port, *, run_id=RUN_ID, poll_seconds=0.5, every_versions=1, semantics=SEMANTICS):
        self.registry = CollectorRegistry()
        self.staged = StagedActor(build_actor(semantics))
        self.channel = open_channel(f"127.0.0.1:{port}", RPC)
        self.poller = SnapshotPoller(
            self.channel,
            self.staged,
            run_id=run_id,
            rpc=RPC,
            poll_seconds=poll_seconds,
            metrics=ReplicaMetrics(self.registry, "collector"),
            owner=ReplicaOwner(3, 2),
            every_versions=every_versions,
        )
        self.poller.start()

    def wait_for_version(self, version):
        def has_it():
            self.poller.apply_if_ready()
            applied = self.poller.applied
            return applied is not None and applied.identity.version == version

        wait_until(has_it)
        return self.poller.applied

    def value(self, thing):
        return self.registry.get_sample_value(f"paceline_collector_{thing}")

    def close(self):
        self.poller.close()
        self.channel.close()


@pytest.fixture
def peers():
    """Starts learners and replicas, and ends them."""
    opened = []

    class Peers:
        def learner(self, learner=None, port=0):
            learner = learner or Learner()
            server, port = serve(learner, port=port)
            opened.append(lambda: server.stop(0).wait())
            return learner, server, port

        def replica(self, port, **settings):
            replica = Replica(port, **settings)
            opened.append(replica.close)
            return replica

    yield Peers()
    for close in reversed(opened):
        close()


def test_weights_and_version_change_together(peers):
    learner, _, port = peers.learner()
    learner.publish(1)
    replica = peers.replica(port)
    for version in (1, 2, 5):
        learner.publish(version)
        applied = replica.wait_for_version(version)
        assert applied.learner_step == 10 * version
        assert pack_state(replica.staged.actor) == pack_state(make_actor(version))
    assert replica.value("applied_version") == replica.value("known_version") == 5


@pytest.mark.parametrize("fault", ["cut", "flip", "short"])
def test_a_broken_transfer_keeps_the_old_policy_is_counted_and_tried_again(peers, fault):
    learner, _, port = peers.learner()
    learner.publish(1)
    replica = peers.replica(port)
    replica.wait_for_version(1)
    before = pack_state(replica.staged.actor)
    learner.faults.extend([fault] * 3)
    learner.publish(2)
    wait_until(lambda: replica.value("snapshot_apply_failures_total") >= 1)
    if len(learner.faults) > 0:  # at least one more try is to fail
        assert not replica.poller.apply_if_ready()
        assert pack_state(replica.staged.actor) == before
        assert replica.poller.applied.identity.version == 1
    replica.wait_for_version(2)
    assert replica.value("snapshot_apply_failures_total") == 3
    assert pack_state(replica.staged.actor) == pack_state(make_actor(2))


def test_a_version_never_goes_back_and_a_newer_incarnation_is_newer_whatever_its_version(peers):
    learner, _, port = peers.learner()
    learner.publish(7)
    replica = peers.replica(port, poll_seconds=0.05)
    replica.wait_for_version(7)
    learner.ignores_have = True
    learner.publish(6)
    seen = len(learner.polls)
    wait_until(lambda: len(learner.polls) > seen + 2)
    assert not replica.poller.apply_if_ready()
    assert replica.poller.applied.identity.version == 7
    assert replica.poller.known.version == 7
    learner.incarnation = 2
    learner.publish(8)
    assert replica.wait_for_version(8).identity.incarnation == 2


def test_every_poll_says_which_snapshot_acts(peers):
    learner, _, port = peers.learner()
    learner.publish(4)
    replica = peers.replica(port, poll_seconds=0.05)
    assert not learner.polls or not learner.polls[0].HasField("have")
    replica.wait_for_version(4)
    poll = wait_until(lambda: next((poll for poll in learner.polls if poll.replica.HasField("applied")), None))
    assert (poll.replica.collector_index, poll.replica.collector_incarnation) == (3, 2)
    assert (poll.replica.applied.incarnation, poll.replica.applied.version) == (1, 4)


def test_nothing_is_said_of_versions_before_the_first_snapshot(peers):
    learner, _, port = peers.learner()
    replica = peers.replica(port, poll_seconds=0.05)
    wait_until(lambda: len(learner.polls) > 1)
    for thing in ("known_version", "applied_version", "snapshot_age_seconds"):
        assert replica.value(thing) is None
    learner.publish(1)
    replica.wait_for_version(1)
    assert replica.value("snapshot_age_seconds") >= 0


def test_a_frozen_learner_is_noticed_within_the_deadline_and_waited_for(peers):
    path = Path(__file__).with_name("peers.py")
    with subprocess.Popen(
        [sys.executable, str(path), "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            replica = peers.replica(int(process.stdout.readline()), poll_seconds=0.5)
            replica.wait_for_version(1)
            os.kill(process.pid, signal.SIGSTOP)
            wait_until(lambda: replica.value("snapshot_poll_failures_total") >= 1, 0.5 + RPC.deadline_seconds + 2)
            assert not replica.poller.apply_if_ready()
            assert replica.poller.applied.identity.version == 1
            os.kill(process.pid, signal.SIGCONT)
            process.stdin.write("2\n")
            process.stdin.flush()
            replica.wait_for_version(2)
        finally:
            process.kill()


def test_a_learner_that_comes_back_at_the_same_address_is_found_again(peers):
    learner, server, port = peers.learner()
    learner.publish(3)
    replica = peers.replica(port)
    replica.wait_for_version(3)
    server.stop(0).wait()
    wait_until(lambda: replica.value("snapshot_poll_failures_total") >= 2)
    assert replica.poller.apply_if_ready() is False, "what acts does not change while the learner is away"
    successor, _, _ = peers.learner(Learner(incarnation=2), port=port)
    successor.publish(4)
    assert replica.wait_for_version(4).identity.incarnation == 2


def test_a_learner_of_another_run_ends_the_replica(peers):
    learner, _, port = peers.learner()
    learner.publish(1)
    with pytest.raises(RunMismatchError, match="another"):
        peers.replica(port, run_id="another").poller.wait_and_apply(StopSignal())


def test_a_snapshot_of_another_run_ends_the_replica(peers):
    learner, _, port = peers.learner()
    learner.publish(1, run_id="another")
    with pytest.raises(RunMismatchError, match="another"):
        peers.replica(port).poller.wait_and_apply(StopSignal())


def test_another_protocol_version_ends_the_replica(peers, monkeypatch):
    learner, _, port = peers.learner()
    learner.publish(1)
    monkeypatch.setattr(poller_module, "PROTOCOL_VERSION", identity.PROTOCOL_VERSION + 1)
    with pytest.raises(ProtocolMismatchError):
        peers.replica(port).poller.wait_and_apply(StopSignal())


def test_a_snapshot_of_another_actor_ends_the_replica_and_changes_nothing(peers):
    learner, _, port = peers.learner()
    learner.publish(1)
    other = squashed_gaussian_semantics(3, hidden=(16, 16), action_low=(-1.0,), action_high=(2.0,))
    replica = peers.replica(port, semantics=other)
    before = pack_state(replica.staged.actor)
    with pytest.raises(ActorSemanticsError, match="kwargs"):
        replica.poller.wait_and_apply(StopSignal())
    assert pack_state(replica.staged.actor) == before


def test_each_nth_version_is_asked_for_and_the_last_one_of_a_finished_run(peers):
    learner, _, port = peers.learner()
    learner.publish(9)
    replica = peers.replica(port, every_versions=10)
    wait_until(lambda: replica.poller.known is not None)
    assert not replica.poller.apply_if_ready()
    learner.publish(12)
    replica.wait_for_version(12)
    learner.publish(19)
    assert learner.polls[-1].at_least_version in (10, 20)
    learner.finish()
    replica.wait_for_version(19)
    assert replica.poller.finished
    assert not replica.poller.wait_and_apply(StopSignal()), "the last snapshot comes once"


def test_snapshots_that_come_faster_than_they_are_applied_end_with_the_newest(peers):
    learner, _, port = peers.learner()
    replica = peers.replica(port)
    for version in range(1, 40):
        learner.publish(version)
        replica.poller.apply_if_ready()
    replica.wait_for_version(39)
    assert pack_state(replica.staged.actor) == pack_state(make_actor(39))


def test_closing_ends_a_poll_in_progress_at_once(peers):
    learner, _, port = peers.learner()
    replica = peers.replica(port, poll_seconds=60)
    wait_until(lambda: learner.polls)
    replica.poller.close()
    assert not replica.poller._thread.is_alive()
    assert isinstance(replica.channel, grpc.Channel)
