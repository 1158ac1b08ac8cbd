"""A pause over the lag bound is seen: in metrics, and in the log with its numbers, again and again while it lasts."""

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from paceline.collector import admission
from paceline.collector.admission import AdmissionControl
from paceline.collector.metrics import CollectorMetrics
from paceline.lag.bound import LagBound
from paceline.replica import Standing


def standing(applied, known):
    return Standing(applied, known, None, None if applied == known else 0.0)


def control_of(max_lag_versions):
    registry = CollectorRegistry()
    return AdmissionControl(LagBound(max_lag_versions), CollectorMetrics(registry)), registry


@pytest.mark.parametrize(("bound", "lag", "admitted"), [(None, 1000, True), (3, 3, True), (3, 4, False), (1, 0, True)])
def test_steps_are_admitted_up_to_the_bound(bound, lag, admitted):
    control, _ = control_of(bound)
    where = standing(10, 10 + lag)
    assert control.admits(where) == admitted
    assert control.admits(where) == admitted, "and again, for the same standing"


def test_a_pause_tells_again_what_it_waits_for(monkeypatch):
    monkeypatch.setattr(admission, "TELL_AGAIN_SECONDS", 0.0)
    control, registry = control_of(2)
    now = standing(4, 9)
    with capture_logs() as logs, control.pause(lambda: now) as tell_again:
        assert registry.get_sample_value("paceline_collector_paused") == 1
        assert registry.get_sample_value("paceline_collector_pauses_total") == 1
        tell_again()
        now = standing(4, 11)
        tell_again()
        now = standing(10, 11)
    assert registry.get_sample_value("paceline_collector_paused") == 0
    assert [line["event"] for line in logs] == ["lag_paused", "lag_still_paused", "lag_still_paused", "lag_resumed"]
    assert [line.get("waits_for") for line in logs] == [7, 7, 9, None]
    assert "7 behind 11" in logs[2]["reason"]
    assert "lag.max_lag_versions" in logs[0]["reason"]
    assert (logs[3]["applied"], logs[3]["known"]) == (10, 11)


def test_within_the_time_between_two_lines_nothing_is_told():
    control, _ = control_of(2)
    with capture_logs() as logs, control.pause(lambda: standing(4, 9)) as tell_again:
        for _ in range(100):
            tell_again()
    assert [line["event"] for line in logs] == ["lag_paused", "lag_pause_ended"], "the run ended in the pause"
