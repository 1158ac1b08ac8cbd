"""What real services say of themselves when something that they need is gone, and when they hang."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from gated_environment import GATE
from integration.replay_harness import ReplayProcess, free_port, make_config, wait_until
from integration.test_collector import Collecting
from paceline.health import ask
from redis_servers import start_redis


@pytest.fixture
def collector() -> Iterator[Callable[[], tuple[Collecting, str]]]:
    """A collector whose environment waits for the gate; it is stuck after a second. With the port of its /metrics."""
    GATE.reset()
    made = []

    def start() -> tuple[Collecting, str]:
        port = str(free_port())
        run = Collecting(env={"id": "gated_environment:Gated-v0"}, environments=1, metrics_listen=f"127.0.0.1:{port}")
        stuck = run.config.run.model_copy(update={"stuck_seconds": 1.0})
        run.config = run.config.model_copy(update={"run": stuck})
        made.append(run)
        return run, port

    yield start
    GATE.open()
    for run in made:
        run.close()


def says(port: str, *words: str, ready: bool = False, good: bool = False) -> bool:
    found, reason = ask(port, ready=ready)
    return found is good and all(word in reason for word in words)


def seconds_of_append_wait(port: str) -> float:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            found = re.search(rb'activity_seconds_total{activity="append_wait"} (\S+)', page.read())
    except OSError:
        return 0.0  # it does not listen yet
    return float(found[1]) if found else 0.0


def test_a_collector_is_ready_with_its_first_snapshot_and_not_alive_while_a_step_hangs(collector):
    run, port = collector()
    run.start(version=0)
    wait_until(lambda: says(port, good=True), "an answer")
    wait_until(lambda: says(port, "no snapshot is applied yet", ready=True), "no readiness before a snapshot")
    run.learner.publish(1)
    GATE.wait_for_choice()
    assert says(port, ready=True, good=True)
    wait_until(lambda: says(port, "'environment'", "stuck_seconds"), "the hanging step to be told")
    assert says(port, "'environment'", ready=True)
    GATE.open()
    wait_until(lambda: says(port, ready=True, good=True), "readiness after the step")


def test_a_collector_that_replay_holds_back_waits_and_is_alive(collector):
    run, port = collector()
    GATE.open()
    run.replay.open.clear()
    run.start()
    # For longer than a loop may do one thing.
    wait_until(lambda: seconds_of_append_wait(port) > 2.0, "two seconds of waiting for replay")
    assert says(port, ready=True, good=True)


def test_replay_is_not_ready_and_alive_while_its_store_is_away(tmp_path):
    store = start_redis("embedded", tmp_path)
    config = make_config(store.url)
    port = config.replay.metrics_listen.rpartition(":")[2]
    replay = ReplayProcess(config)
    try:
        wait_until(lambda: says(port, ready=True, good=True), "readiness")
        store.process.kill()
        wait_until(lambda: says(port, "its store is away", ready=True), "the loss of the store to be told")
        assert says(port, good=True)
        store.restart()
        wait_until(lambda: says(port, ready=True, good=True), "readiness after the store came back")
    finally:
        replay.kill()
        store.stop()
    assert says(port, "does not answer")
