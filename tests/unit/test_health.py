"""What a process says of itself on /healthz and /readyz, and the question from outside."""

from __future__ import annotations

import subprocess
import sys
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from paceline import health as module
from paceline.health import Health, ask, main
from paceline.telemetry import ActivityClock, serve_metrics


class Clock:
    """Time that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def serve():
    """Serves a health on /metrics' port, and gives the port."""
    servers = []

    def start(health):
        servers.append(serve_metrics(CollectorRegistry(), "127.0.0.1:0", "replay", health))
        return servers[-1].port

    yield start
    for server in servers:
        server.close()


def test_a_process_that_starts_is_alive_and_not_ready_and_says_why():
    health = Health(60, unready="no snapshot is applied yet")
    assert health.why_not_alive() is None
    assert health.why_not_ready() == "no snapshot is applied yet"
    health.set_ready()
    assert health.why_not_ready() is None
    health.set_unready("its store is away")
    assert (health.why_not_alive(), health.why_not_ready()) == (None, "its store is away")


def test_a_loop_that_does_not_turn_is_stuck_and_neither_alive_nor_ready(clock):
    health = Health(60)
    health.set_ready()
    health.turn()
    clock.now += 60
    assert health.why_not_ready() is None
    clock.now += 1
    assert health.why_not_alive() == "its loop has not turned for 61 s: expected less than 60 s (run.stuck_seconds)"
    assert health.why_not_ready() == health.why_not_alive()
    health.turn()
    assert health.why_not_ready() is None


def test_an_activity_that_takes_too_long_is_named_unless_it_may():
    doing = ("environment", 61.0)
    health = Health(60)
    health.watch(lambda: doing, exempt=("starting",))
    assert "'environment' for 61 s" in str(health.why_not_alive())
    doing = ("environment", 59.0)
    assert health.why_not_alive() is None
    doing = ("starting", 3600.0)
    assert health.why_not_alive() is None


def test_a_wait_that_turns_begins_anew_and_loses_no_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("paceline.telemetry.time.perf_counter", lambda: now[0])
    seconds = Counter("seconds", "Of each.", ["activity"], registry=CollectorRegistry())
    clock = ActivityClock(seconds, ("waiting", "updating"), "waiting")
    now[0] = 50.0
    assert clock.doing() == ("waiting", 50.0)
    clock.turn()
    now[0] = 55.0
    assert clock.doing() == ("waiting", 5.0)
    clock.switch("updating")
    assert clock.doing() == ("updating", 0.0)
    assert seconds.labels("waiting")._value.get() == 55.0


def test_both_paths_answer_beside_metrics(serve):
    health = Health(60, unready="its rows\nare not restored yet")
    port = serve(health)
    assert ask(str(port)) == (True, "ok")
    assert ask(f"http://127.0.0.1:{port}/metrics", ready=True) == (False, "its rows are not restored yet")
    health.set_ready()
    assert ask(f"127.0.0.1:{port}", ready=True) == (True, "ok")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        assert b"paceline_build_info" in page.read()


def test_a_process_that_keeps_no_health_never_passes_for_a_healthy_one(serve):
    good, reason = ask(str(serve(None)))
    assert not good
    assert "answers 404" in reason


def test_nobody_there_is_not_healthy_and_the_address_is_named(serve):
    port = serve(Health(60))
    good, reason = ask("127.0.0.1:1")
    assert not good
    assert "http://127.0.0.1:1/healthz does not answer" in reason
    assert main([str(port)]) == 0
    assert main([str(port), "1"]) == 1
    assert main([str(port), "--ready"]) == 1
    assert main([]) == main(["--fast"]) == 2


def test_the_command_asks_and_loads_nothing_but_the_standard_library(serve):
    health = Health(60)
    command = [sys.executable, "-X", "importtime", "-m", "paceline", "health", str(serve(health)), "--ready"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stdout) == (1, "it is starting\n")
    health.set_ready()
    accepted = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (accepted.returncode, accepted.stdout) == (0, "ok\n")
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in accepted.stderr.splitlines()}
    assert "urllib" in loaded
    assert loaded & {"typer", "click", "pydantic", "numpy", "grpc", "prometheus_client", "yaml", "rich"} == set()
