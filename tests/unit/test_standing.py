"""How far what acts is behind what is known, in versions, updates and since when; never negative."""

import dataclasses
import hashlib

from hypothesis import given
from hypothesis import strategies as st

from paceline.identity import PolicyIdentity
from paceline.replica import Standings, standing
from paceline.snapshot import SnapshotHeader, TensorDescription

HEADER = SnapshotHeader(
    run_id="trial",
    identity=PolicyIdentity(1, 1),
    learner_step=10,
    environment_step_count=0,
    published_at=0.0,
    payload_bytes=100,
    payload_sha256=hashlib.sha256(b"").digest(),
    tensors=(TensorDescription("weight", "float32", (4,)),),
    actor_semantics_json="{}",
)


def header(version, incarnation=1):
    return dataclasses.replace(HEADER, identity=PolicyIdentity(incarnation, version), learner_step=10 * version)


def know(standings, version, at, *, incarnation=1, steps=True):
    return standings.note_known(PolicyIdentity(incarnation, version), 10 * version if steps else None, at)


def test_there_is_no_lag_before_something_acts():
    standings = Standings()
    know(standings, 3, 100.0)
    assert standings.now is None


def test_the_seconds_count_from_the_first_newer_version_and_begin_anew_with_each_application():
    standings = Standings()
    know(standings, 1, 100.0)
    standings.note_applied(header(1))
    assert (standings.now.lag_versions, standings.now.lag_updates, standings.now.lag_seconds(500.0)) == (0, 0, 0.0)
    for version, at in ((2, 110.0), (4, 120.0), (7, 150.0)):
        assert know(standings, version, at)
    assert not know(standings, 7, 160.0)
    assert not know(standings, 5, 160.0)
    assert (standings.now.lag_versions, standings.now.lag_updates) == (6, 60)
    assert standings.now.lag_seconds(155.0) == 45
    standings.note_applied(header(4))  # an older one than is known
    assert (standings.now.lag_versions, standings.now.lag_updates, standings.now.lag_seconds(155.0)) == (3, 30, 5.0)
    standings.note_applied(header(7))
    assert (standings.now.lag_versions, standings.now.lag_seconds(200.0)) == (0, 0.0)


def test_seconds_are_not_negative_when_ones_own_clock_was_set_back():
    standings = Standings()
    standings.note_applied(header(1))
    know(standings, 2, 100.0)
    assert standings.now.lag_seconds(50.0) == 0


def test_updates_are_unknown_where_the_learner_told_of_a_version_only():
    standings = Standings()
    standings.note_applied(header(1))
    know(standings, 2, 100.0, steps=False)
    assert (standings.now.lag_versions, standings.now.lag_updates) == (1, None)


def test_a_newer_incarnation_is_newer_and_a_lag_is_never_negative():
    standings = Standings()
    standings.note_applied(header(9))
    know(standings, 5, 100.0, incarnation=2)
    assert standings.known == PolicyIdentity(2, 5)
    assert (standings.now.lag_versions, standings.now.lag_updates) == (0, 0)
    assert standings.now.lag_seconds(103.0) == 3


def test_what_is_remembered_is_bounded_and_since_when_there_are_news_stays(monkeypatch):
    monkeypatch.setattr(standing, "_MAX_NEWS", 5)
    standings = Standings()
    standings.note_applied(header(1))
    for version in range(2, 50):
        know(standings, version, 100.0 + version)
    assert len(standings._news) == 5
    assert standings.now.newer_since == 102
    assert standings.now.known_version == 49


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=60))
def test_any_order_of_news_and_applications_gives_what_a_slow_reading_gives(events):
    standings, known, applied = Standings(), {}, None
    for moment, (is_news, version) in enumerate(events):
        if is_news:
            if know(standings, version, float(moment)):
                known[version] = float(moment)
        elif version in known and version > (applied or 0):
            applied = version
            standings.note_applied(header(version))
        if applied is None:
            assert standings.now is None
            continue
        assert standings.now.lag_versions == max(known) - applied
        newer = [at for version, at in known.items() if version > applied]
        assert standings.now.newer_since == min(newer, default=None)
