"""What lies ready for the acting thread: the newest snapshot, or the one that an injected lag asks for."""

from __future__ import annotations

import pytest
import torch

from paceline.actors import build_actor, squashed_gaussian_semantics
from paceline.errors import SnapshotError
from paceline.identity import PolicyIdentity
from paceline.lag.bound import LagBound
from paceline.lag.injection import FixedLag, Injector, TracedLag
from paceline.lag.trace import Application
from paceline.replica import InjectedStaging, NewestStaging, Standings
from paceline.snapshot import StagedActor, make_header, pack_state

SEMANTICS = squashed_gaussian_semantics(2, hidden=(4,), action_low=(-1.0,), action_high=(1.0,))


class Replica:
    """A live actor and what is laid ready for it."""

    def __init__(self, lags=None, *, max_lag_versions=None):
        self.actor, self.standings = build_actor(SEMANTICS), Standings()
        staged = StagedActor(self.actor)
        if lags is None:
            self.staging = NewestStaging(staged)
        else:
            bound = LagBound(max_lag_versions)
            self.staging = InjectedStaging(staged, Injector(lags), bound, self.standings)

    def publish(self, *versions):
        for version in versions:
            header, payload = snapshot(version)
            self.standings.note_known(header.identity, header.learner_step, 0.0)
            self.staging.lay(header, payload)

    def apply(self, environment_steps=0):
        """The version that is applied, if one is."""
        if not self.staging.is_ready(environment_steps):
            return None
        header = self.staging.apply()
        self.standings.note_applied(header)
        assert pack_state(self.actor) == snapshot(header.identity.version)[1]
        return header.identity.version


def snapshot(version):
    torch.manual_seed(version)
    actor = build_actor(SEMANTICS)
    payload = pack_state(actor)
    header = make_header(
        actor,
        payload,
        run_id="trial",
        identity=PolicyIdentity(1, version),
        learner_step=10 * version,
        environment_step_count=0,
        published_at=0.0,
    )
    return header, payload


@pytest.mark.parametrize("lags", [None, FixedLag(0)])
def test_without_a_lag_the_newest_is_applied_once(lags):
    replica = Replica(lags)
    assert replica.apply() is None
    replica.publish(1)
    assert replica.apply() == 1
    assert replica.apply() is None
    replica.publish(2, 3, 4)
    assert replica.apply() == 4
    assert replica.apply() is None


def test_a_fixed_lag_applies_the_version_so_far_behind_and_keeps_no_more_than_it_needs():
    replica = Replica(FixedLag(3))
    replica.publish(1)
    assert replica.apply() == 1, "at the start there is no other"
    for version in range(2, 40):
        replica.publish(version)
        assert len(replica.staging.held_versions) <= 3 + 2
        assert replica.apply() == (version - 3 if version > 4 else None)


def test_a_damaged_snapshot_is_refused_when_it_comes_and_changes_nothing():
    replica = Replica(FixedLag(1))
    replica.publish(1)
    header, payload = snapshot(2)
    with pytest.raises(SnapshotError, match="SHA-256"):
        replica.staging.lay(header, payload[:-1] + b"\xff")
    assert replica.staging.held_versions == (1,)


def test_the_version_that_was_chosen_is_applied_even_when_newer_ones_push_it_out():
    replica = Replica(FixedLag(1))
    replica.publish(1)
    assert replica.apply() == 1
    replica.publish(2, 3)
    assert replica.staging.is_ready(0)
    replica.publish(4, 5, 6)
    assert 2 not in replica.staging.held_versions
    assert replica.apply() == 2


def test_over_the_bound_a_trace_gives_way_to_the_oldest_version_within_it():
    trace = TracedLag([Application(0, 0, 1, 1), Application(0, 100, 3, 1)])
    replica = Replica(trace, max_lag_versions=2)
    replica.publish(1)
    assert replica.apply(0) == 1
    replica.publish(2, 3)
    assert replica.apply(50) is None, "the trace has nothing before step 100"
    replica.publish(4)
    assert replica.apply(50) == 2, "at step 50 it would pause for ever"
    assert replica.apply(50) is None
    replica.publish(5)
    assert replica.apply(50) == 3


def test_without_a_bound_a_trace_is_followed_however_far_behind_that_is():
    trace = TracedLag([Application(0, 0, 1, 1), Application(0, 100, 3, 1)])
    replica = Replica(trace)
    replica.publish(1)
    assert replica.apply(0) == 1
    replica.publish(*range(2, 10))
    assert replica.apply(99) is None
    assert replica.apply(100) == 7
