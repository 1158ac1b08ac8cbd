"""The lag that is measured, held, bounded and recorded is the lag that there is, over sockets and between clocks."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from structlog.testing import capture_logs

from gated_environment import GATE
from integration.lag_harness import UPDATES_PER_VERSION, LagRun, ScriptedClock
from integration.waiting import wait_until
from paceline.errors import ConfigError
from paceline.lag.clock import DRIFT
from paceline.telemetry import LAG_BUCKETS


@pytest.fixture
def lag_run(tmp_path):
    """Makes runs, each in a folder of its own, and ends them."""
    made = []

    def make(**settings):
        made.append(LagRun(tmp_path / str(len(made)), **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def bucket_of(value, bounds):
    return next(float(bound) for bound in bounds if value <= bound)


def test_acting_lag_is_the_true_one_in_versions_updates_and_seconds(lag_run):
    clock = ScriptedClock()
    run = lag_run(clock=clock)
    run.start()
    truth = []  # versions and seconds behind, of each step whose action is chosen

    def take(steps, versions, seconds_behind=lambda: 0.0):
        """Take steps; the action of the one after them is chosen with this lag."""
        for _ in range(steps):
            GATE.take()
            truth.append((versions, seconds_behind()))

    truth.append((0, 0.0))  # the first step's, which is chosen already
    take(3, 0)
    run.endpoint.hold(True)
    clock.now += 1
    run.publish(2)
    known_at = clock.now
    take(2, 1, lambda: clock.now - known_at)
    clock.now += 3
    take(4, 1, lambda: clock.now - known_at)
    run.release()
    take(2, 0)
    run.endpoint.hold(True)
    clock.now += 1
    run.publish(3, 4, 5)  # two of them the collector never hears of
    jumped_at = clock.now
    clock.now += 16
    take(5, 3, lambda: clock.now - jumped_at)
    run.release()
    take(1, 0)

    truth.pop()  # its action is chosen, and it is not taken yet
    assert run.value("environment_steps_total") == len(truth)
    counts, total = run.histogram("acting_lag_versions")
    assert counts == dict(Counter(float(versions) for versions, _ in truth))
    assert total == sum(versions for versions, _ in truth)
    counts, total = run.histogram("acting_lag_updates")
    assert counts == dict(Counter(UPDATES_PER_VERSION * bucket_of(versions, LAG_BUCKETS) for versions, _ in truth))
    assert total == UPDATES_PER_VERSION * sum(versions for versions, _ in truth)
    counts, total = run.histogram("acting_lag_seconds")
    assert counts == dict(Counter(bucket_of(seconds, (0, 1, 5, 30)) for _, seconds in truth))
    assert total == sum(seconds for _, seconds in truth) > 0


def test_publish_lag_is_the_true_one_until_the_collector_applies(lag_run):
    clock = ScriptedClock()
    run = lag_run(clock=clock)
    endpoint = run.endpoint
    assert endpoint.value("collectors") == 0
    run.start()
    wait_until(lambda: endpoint.value("applied_version", collector="0") == 1)
    assert endpoint.value("publish_lag_versions", collector="0") == 0
    assert endpoint.value("publish_lag_seconds", collector="0") == 0
    endpoint.hold(True)
    for version, pause in ((2, 5.0), (3, 7.0), (6, 11.0)):
        clock.now += pause
        run.publish_unseen(version)
    clock.now += 2
    assert endpoint.value("publish_lag_versions", collector="0") == 5
    assert endpoint.value("publish_lag_updates", collector="0") == 5 * UPDATES_PER_VERSION
    assert endpoint.value("publish_lag_seconds", collector="0") == 7 + 11 + 2
    assert endpoint.value("snapshot_age_seconds") == 2
    assert endpoint.value("collectors") == 1
    run.release(snapshots=2)  # version 2, whose transfer was held, and the newest
    GATE.take()
    wait_until(lambda: endpoint.value("applied_version", collector="0") == 6)
    assert endpoint.value("publish_lag_versions", collector="0") == 0
    assert endpoint.value("publish_lag_seconds", collector="0") == 0


@pytest.mark.parametrize("skew", [-5_000.0, 0.0, 86_400.0])
@pytest.mark.parametrize("n_step", [1, 3])
def test_rows_are_stamped_by_the_learners_clock_to_the_microsecond_where_ways_take_no_time(lag_run, n_step, skew):
    clock = ScriptedClock()
    learner = clock.ahead(skew)
    run = lag_run(clock=clock, learner_clock=learner, n_step=n_step, block_rows=4)
    run.start()
    applied, collected = {1: learner()}, []
    for number in range(16):
        clock.now += 1
        if number == 5:
            run.publish_through(2)
            applied[2] = learner()
        GATE.take()
        collected.append(learner())
    rows = run.rows(8)
    assert run.value("clock_offset_seconds") == pytest.approx(skew, abs=1e-6)
    assert run.value("clock_uncertainty_seconds") < 1e-2  # of clocks that may drift by 1e-4
    assert rows["collected_at"] == pytest.approx(collected[: len(rows)], abs=2e-6)
    expected = [applied[version] for version in rows["policy_version"].tolist()]
    assert rows["policy_applied_at"] == pytest.approx(expected, abs=2e-6)
    assert set(rows["policy_version"].tolist()) == {1, 2}
    # A block of four rows is sealed with the last step of its last row.
    sealed = rows["sealed_at"].reshape(-1, 4)
    assert (sealed == sealed[:, :1]).all()
    last_step = rows["collected_at"].reshape(-1, 4)[:, -1] + rows["step_count"].reshape(-1, 4)[:, -1] - 1
    assert sealed[:, 0] == pytest.approx(last_step, abs=2e-6)


@pytest.mark.parametrize("skew", [-5_000.0, 86_400.0])
def test_the_true_offset_of_real_clocks_is_within_what_is_said_of_it(lag_run, skew):
    run = lag_run(learner_clock=lambda: time.time() + skew)
    run.start()
    for version in (2, 3, 4):
        run.publish_through(version)
        # A better estimate may come at any time: that of before is the worst that a stamp is made with.
        began, page = time.time(), run.page()
        uncertainty = page["paceline_collector_clock_uncertainty_seconds"]
        assert abs(page["paceline_collector_clock_offset_seconds"] - skew) <= uncertainty + 1e-6
        GATE.take()
        done = time.time()
        row = run.rows(version - 1)[-1]
        uncertainty += DRIFT * (done - began) + 1e-6
        for stamp in ("collected_at", "sealed_at"):
            assert began - uncertainty <= row[stamp] - skew <= done + uncertainty


def test_a_clock_that_is_set_amid_the_run_changes_neither_an_age_nor_a_stamp(lag_run, monkeypatch):
    run = lag_run()
    with capture_logs() as logs:
        run.start()
        GATE.take()
        seconds, nanoseconds = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: seconds() + 3600)
        monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + 3600 * 10**9)
        assert 0 < run.endpoint.value("snapshot_age_seconds") < 60
        run.publish_through(2)
        GATE.take(3)
        rows = run.rows(4)
    for stamp in ("policy_applied_at", "collected_at", "sealed_at"):
        assert 0 < np.ptp(rows[stamp]) < 60
    assert rows["policy_version"].tolist() == [1, 1, 2, 2]
    assert abs(run.value("clock_offset_seconds")) < 1
    assert "clock_was_set" not in {line["event"] for line in logs}


def test_over_the_bound_no_step_is_taken_until_a_newer_snapshot_acts(lag_run):
    run = lag_run(lag={"max_lag_versions": 2})
    with capture_logs() as logs:
        run.start()
        assert run.value("paused") == 0
        run.endpoint.hold(True)
        run.publish(2, 3)
        GATE.take(3)  # two behind: within the bound
        assert run.value("pauses_total") == 0
        run.release()
        GATE.take()
        run.endpoint.hold(True)
        run.publish(4, 5, 6)
        GATE.allow()
        wait_until(lambda: run.value("paused") == 1)
        assert not GATE.is_waiting
        assert run.value("pauses_total") == 1
        run.release()
        GATE.wait_for_choice()
        wait_until(lambda: run.value("paused") == 0)
        GATE.take(2)
    [paused] = [line for line in logs if line["event"] == "lag_paused"]
    assert (paused["applied"], paused["known"], paused["max_lag_versions"], paused["waits_for"]) == (3, 6, 2, 4)
    assert "3 behind 6" in paused["reason"]
    [resumed] = [line for line in logs if line["event"] == "lag_resumed"]
    assert (resumed["applied"], resumed["known"]) == (6, 6)
    counts, _ = run.histogram("acting_lag_versions")
    assert max(counts) == 2
    assert run.value('activity_seconds_total{activity="lag_pause"}') > 0


def test_a_collector_that_pauses_says_so_with_its_next_poll(lag_run):
    run = lag_run(lag={"max_lag_versions": 1})
    run.start()
    assert run.endpoint.value("paused_collectors") == 0
    run.endpoint.break_off(True)
    run.publish(4)
    GATE.allow()
    wait_until(lambda: run.endpoint.value("paused_collectors") == 1)
    run.endpoint.break_off(False)
    GATE.wait_for_choice()
    wait_until(lambda: run.endpoint.value("paused_collectors") == 0)


@pytest.mark.parametrize("ends", ["the stop", "the run's end"])
def test_a_pause_ends_with(lag_run, ends):
    run = lag_run(lag={"max_lag_versions": 1}, block_rows=100)
    run.start()
    GATE.take(3)
    run.endpoint.hold(True)
    run.publish(4)
    GATE.allow()
    wait_until(lambda: run.value("paused") == 1)
    if ends == "the stop":
        run.stop.set()
        run.join()
        assert len(run.rows(4)) == 4, "what was collected before the pause is appended"
    else:
        run.endpoint.finish()
        run.join()


def test_a_block_that_is_old_enough_is_sealed_in_a_pause(lag_run):
    run = lag_run(lag={"max_lag_versions": 1}, block_rows=100)
    run.config = run.config.model_copy(
        update={"collector": run.config.collector.model_copy(update={"block_seconds": 0.3})}
    )
    run.start()
    run.endpoint.hold(True)
    run.publish(4)
    GATE.allow()
    wait_until(lambda: run.value("paused") == 1)
    assert len(run.rows(1)) == 1
    assert run.value("paused") == 1


def test_a_fixed_lag_is_held_exactly(lag_run):
    run = lag_run(lag={"inject": {"mode": "fixed", "versions": 3}, "record": True})
    run.start()
    for version in range(2, 13):
        run.publish_through(version)
        GATE.take()
    # Version 1 acts until there is one that is 3 behind: version 2, when 5 is known.
    expected = Counter([0, 1, 2, *[3] * 8])
    counts, _ = run.histogram("acting_lag_versions")
    assert counts == {float(lag): count for lag, count in expected.items()}
    assert run.trace() == [(0, 0), *[(steps, 3) for steps in range(4, 12)]]
    assert (run.rows(11)["policy_version"] == [1, 1, 1, 1, *range(2, 9)]).all()


def test_two_runs_with_one_trace_see_the_same_lag_however_fast_they_publish(lag_run):
    weights = {0: 1.0, 2: 1.0, 4: 1.0}
    recorded = lag_run(lag={"inject": {"mode": "distribution", "weights": weights}, "record": True})
    recorded.start()
    for version in range(2, 26):
        recorded.publish_through(version)
        GATE.take()
    trace = recorded.trace()
    assert {lag for _, lag in trace} == {0, 2, 4}
    recorded.close()
    folder = recorded.config.run_folder / "lag-trace"
    for versions_a_step in (1, 2):
        repeated = lag_run(lag={"inject": {"mode": "trace", "trace": str(folder)}, "record": True})
        repeated.start()
        for _ in range(24):
            repeated.publish_through(*(repeated.newest + 1 + number for number in range(versions_a_step)))
            GATE.take()
        assert repeated.trace()[: len(trace)] == trace
        repeated.close()


def test_an_injected_lag_over_the_bound_is_refused_at_the_start(lag_run):
    run = lag_run(lag={"max_lag_versions": 2, "inject": {"mode": "fixed", "versions": 3}})
    run.publish_unseen(1)
    run._thread.start()
    with pytest.raises(ConfigError, match="expected at least 3"):
        run.join()
