"""A real Prometheus scrapes real runs: panels have data, and each alert fires on the fault made for it alone.

The rules are hurried, seconds for minutes, and so are the settings that they count on: after how long a collector that
is silent is gone, and after how long a wait for the limiter ends.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from e2e.harness import Training
from integration.waiting import wait_until
from observability import DASHBOARDS, RULES, Prometheus, alert_rules, hurried, panel_queries, panels

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(400)]

FIRES_SECONDS = 90.0
"""A machine that is busy with something else takes a while until windows of seconds are full."""
SEEN_SECONDS = 25
"""The longest window of a hurried rule, 15 s, with the wait that follows it."""

MODULE = """
import fcntl
import sys
import time
from pathlib import Path

import gymnasium
from gymnasium.envs.classic_control import PendulumEnv


class Watched(PendulumEnv):
    '''A pendulum that takes its time, and whose collector hangs or breaks as long as a test wants it to.'''

    step_seconds = 0.006  # of a collector, so that several runs find room on two cores
    faults = 0

    def __init__(self, folder):
        super().__init__()
        self._breaks, self._explodes, self._steps = Path(folder, "breaks"), Path(folder, "explodes"), 0
        acts = "collector" in sys.argv
        self._gate = Path(folder, "collector-" + sys.argv[sys.argv.index("--index") + 1]) if acts else None

    def step(self, action):
        self._steps += 1
        ends = False
        if self._gate is not None:
            time.sleep(self.step_seconds)
            with self._gate.open("a") as gate:
                fcntl.flock(gate, fcntl.LOCK_SH)  # not to be had while a test holds the lock
            if self._breaks.exists() and self._steps % 20 == 0:
                Watched.faults += 1
                ends = Watched.faults % 6 == 0  # a collector gives an environment up whose episodes never end
                if not ends:
                    raise RuntimeError("the joint came off")
        observation, reward, terminated, truncated, infos = super().step(action)
        if self._explodes.exists():
            reward = -3e30  # which is finite, and its square is not
        return observation, reward, terminated, truncated or ends, infos


gymnasium.register("Watched-v0", Watched, max_episode_steps=200)
"""

RUN = (
    "env.id=watched:Watched-v0",
    "run.environment_steps=1000000",
    "learner.publish_every_updates=20",
    "evaluator.every_versions=5",
    "evaluator.episodes=1",
    "learner.silence_seconds=3",
    "collector.poll_seconds=1",
    "collector.block_rows=16",
    "collector.block_seconds=5",
    "collector.max_blocks_in_flight=4",
)
TABLE = "replay.tables.transitions"

EMPTY = {
    "Alerts that fire now": "nothing fires on a healthy run",
    "Batches without a shard per second": "with one shard none can be left out",
    **dict.fromkeys(
        (
            "Delay from publication to a relay",
            "Versions that a relay is behind",
            "Silence of what a relay polls",
            "Polls of relays per second",
            "Bytes sent by relays per second",
            "Collectors below relays",
        ),
        "no relay runs on one machine",
    ),
}
"""Panels that a healthy run leaves empty, and why. Their descriptions say so."""

STANDS_STILL = {"PacelineLearnerStuck", "PacelineTargetDown learner"}

FAULTS = {
    # On one run, one after the other.
    "environment hangs": {"PacelineCollectorNotApplying 0", "PacelineLagGrowing publish"},
    "environment breaks": {"PacelineRowsDropped environment"},
    "learner stands still": STANDS_STILL,
    "store is full": {"PacelineReplayFull store", "PacelineReplayStarved no_rows", "PacelineLearnerStuck"},
    "collectors are gone": {
        "PacelineNoCollectors none_alive",
        "PacelineNoCollectors none_scraped",
        "PacelineReplayStarved no_rows",
        "PacelineTargetDown collector",
    },
    "rewards explode": {"PacelineNonFinite"},
    # Each on a run of its own.
    "queue drops": {"PacelineRowsDropped queue", *STANDS_STILL},
    "queue blocks": {"PacelineReplayFull table", *STANDS_STILL},
    "versions outrun rows": {
        "PacelineWeightSyncShare learner",
        "PacelineLagBoundExceeded",
        "PacelineRowsDropped bound",
    },
    "bound starves": {"PacelineReplayStarved bound"},
}
"""What fires on each fault, as `alerts` writes it: all of it, and nothing else but what may fire besides."""

SYNC = {"PacelineWeightSyncShare learner", "PacelineWeightSyncShare collectors"}
BESIDES = {
    # Without new rows, those that are trained on grow older.
    "environment breaks": {"PacelineLagGrowing training"},
    # The run ends, its processes not all at once.
    "rewards explode": {f"PacelineTargetDown {job}" for job in ("learner", "endpoint", "collector", "evaluator")},
    # Each update is published, which costs both sides what it costs on this machine.
    "versions outrun rows": SYNC,
    "bound starves": SYNC,
}
"""What else a fault may cause, and need not."""


@pytest.fixture
def start(train: Callable[..., Training], tmp_path: Path) -> Callable[..., Training]:
    """Start a run in an environment with switches, which lie in the folder of the run's name and `-switches`."""
    (tmp_path / "watched.py").write_text(textwrap.dedent(MODULE))

    def start_run(name: str, *settings: str) -> Training:
        switches(tmp_path, name).mkdir()
        return train(*RUN, f"env.kwargs={{folder: {switches(tmp_path, name)}}}", *settings, run_id=name)

    return start_run


def switches(folder: Path, name: str) -> Path:
    return folder / f"{name}-switches"


TOLD_APART_BY = {
    "PacelineCollectorNotApplying": "collector",
    "PacelineLagGrowing": "kind",
    "PacelineNoCollectors": "cause",
    "PacelineReplayFull": "cause",
    "PacelineReplayStarved": "cause",
    "PacelineRowsDropped": "where",
    "PacelineTargetDown": "job",
    "PacelineWeightSyncShare": "side",
}

Fires = dict[str, set[str]]
"""What fires, by release: the name of each alert, and the label that tells its instances apart."""


def alerts(prometheus: Prometheus) -> Fires:
    """What fires now."""
    found: Fires = {}
    for name, instances in prometheus.firing().items():
        for labels in instances:
            instance = labels.get(TOLD_APART_BY.get(name, ""), "")
            found.setdefault(labels.get("release", ""), set()).add(f"{name} {instance}".strip())
    return found


def require(fires: Fires, faults: Mapping[str, str]) -> None:
    """Nothing fires but what the fault of each release causes."""
    for release, names in fires.items():
        fault = faults.get(release, "")
        unasked = names - FAULTS.get(fault, set()) - BESIDES.get(fault, set())
        assert not unasked, (
            f"fires without a fault in {release or 'the run'}: {sorted(unasked)}; faults: {dict(faults)}"
        )


def expect(prometheus: Prometheus, faults: Mapping[str, str]) -> None:
    """Wait until everything that the fault of each release causes fires at once; anything else is an error."""
    waiting, fires = dict(faults), Fires()

    def all_fire() -> bool:
        fires.clear()
        fires.update(alerts(prometheus))
        require(fires, faults)
        for release in [each for each, fault in waiting.items() if fires.get(each, set()) >= FAULTS[fault]]:
            del waiting[release]
        return not waiting

    try:
        wait_until(all_fire, FIRES_SECONDS)
    except AssertionError as error:
        expected = {release: sorted(FAULTS[fault]) for release, fault in waiting.items()}
        raise AssertionError(f"{error}; fires: {fires}, expected: {expected}") from error


def expect_end(prometheus: Prometheus, fault: str) -> None:
    """Wait until nothing fires any more."""

    def nothing_fires() -> bool:
        fires = alerts(prometheus)
        require(fires, {"": fault})
        return not fires

    wait_until(nothing_fires, FIRES_SECONDS)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing meanwhile, as if its machine stood still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def hanging(folder: Path, index: int) -> Iterator[None]:
    """A collector whose environment does not come back from a step; the rest of the collector goes on."""
    with (folder / f"collector-{index}").open("a") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield


@contextmanager
def switched(path: Path) -> Iterator[None]:
    """A file that is there meanwhile: environments look for it in each step."""
    path.touch()
    try:
        yield
    finally:
        path.unlink()


@contextmanager
def full_store(training: Training) -> Iterator[None]:
    """A Redis server that has no room for anything."""
    environment = Path(f"/proc/{training.child('replay')}/environ").read_bytes().decode().split("\0")
    url = next(each.partition("=")[2] for each in environment if each.startswith("PACELINE_REPLAY__REDIS_URL="))
    with redis.Redis.from_url(url) as client:
        client.config_set("maxmemory", 1)
        try:
            yield
        finally:
            client.config_set("maxmemory", 0)


@contextmanager
def without_collectors(training: Training) -> Iterator[None]:
    """Collectors that were killed, and nobody who starts them again."""
    with stopped(training.process.pid):
        for index in (0, 1):
            os.kill(training.child("--index", str(index)), signal.SIGKILL)
        yield


def watch_a_healthy_run(prometheus: Prometheus) -> None:
    """Nothing fires until every rule had all the time that it takes to fire."""

    def has_seen_enough() -> bool:
        require(alerts(prometheus), {})
        return bool(prometheus.query(f"paceline:lag_versions:mean_5m offset {SEEN_SECONDS}s"))

    wait_until(has_seen_enough, FIRES_SECONDS)


def check_panels(prometheus: Prometheus) -> None:
    """Every query of every panel has data, as Grafana would ask when everything is chosen."""
    for query in panel_queries():
        samples = prometheus.query(query.expression)
        if query.panel in EMPTY:
            assert not samples, f"{query.board}: {query.panel} has data, though {EMPTY[query.panel]}"
            continue
        assert samples, f"{query.board}: {query.panel}: no data for {query.expression}"
        values = [sample.value for sample in samples]
        assert all(map(math.isfinite, values)), f"{query.board}: {query.panel}: {values} of {query.expression}"


def check_alerts_are_shown(prometheus: Prometheus) -> None:
    """What fires is on the overview."""
    shown = [
        sample.labels["alertname"]
        for query in panel_queries()
        if query.panel == "Alerts that fire now"
        for sample in prometheus.query(query.expression)
    ]
    assert shown
    assert set(shown) <= set(prometheus.firing())


def test_every_panel_of_a_healthy_run_has_data_and_each_fault_fires_its_alerts_alone(
    start: Callable[..., Training], tmp_path: Path
) -> None:
    training = start(
        "run",
        "collector.count=2",
        "collector.on_environment_error=reset",
        "learner.updates_per_step=0.5",
        # One that never acts, so that the panels of the bound have data too.
        "lag.max_lag_versions=100000",
    )
    training.wait_for_steps(500)
    training.wait_for(lambda: bool(training.records("evaluation")), "an evaluation")
    targets = training.metrics_addresses()
    assert {name: len(addresses) for name, addresses in targets.items()} == {
        "replay": 1,
        "learner": 1,
        "endpoint": 1,
        "collector": 2,
        "evaluator": 1,
    }
    rules = hurried(RULES.read_text(encoding="utf-8"))
    with Prometheus(tmp_path / "prometheus", targets, rules=rules) as prometheus:
        watch_a_healthy_run(prometheus)
        check_panels(prometheus)
        faults: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "environment hangs": lambda: hanging(switches(tmp_path, "run"), 0),
            "environment breaks": lambda: switched(switches(tmp_path, "run") / "breaks"),
            "learner stands still": lambda: stopped(training.child("learner")),
            "store is full": lambda: full_store(training),
            "collectors are gone": lambda: without_collectors(training),
        }
        for name, make in faults.items():
            with make():
                expect(prometheus, {"": name})
                check_alerts_are_shown(prometheus)
            expect_end(prometheus, name)
        with switched(switches(tmp_path, "run") / "explodes"):
            expect(prometheus, {"": "rewards explode"})
    assert training.wait(60) == 2, training.text()
    assert "holds a NaN or an infinity" in training.text()


def test_runs_that_go_wrong_each_in_its_way_fire_their_own_alerts(
    start: Callable[..., Training], tmp_path: Path
) -> None:
    """All at once under one Prometheus, as a cluster's would have them: a rule tells runs apart by their labels."""
    small = ("evaluator.enabled=false", "learner.updates=learner_bound", "learner.publish_every_updates=1")
    rows = "queue: true, capacity_rows: 256, limiter: {min_rows: 64, deadline_seconds: 1}"
    queue = (*small, "rpc.backoff_max_seconds=0.1")
    runs = {
        "queue drops": start("drops", *queue, f"{TABLE}={{{rows}, overflow: drop_oldest}}"),
        "queue blocks": start("blocks", *queue, f"{TABLE}={{{rows}, overflow: block}}"),
        "versions outrun rows": start("outruns", *small, "replay.read=sample", "lag.max_lag_versions=50"),
        "bound starves": start("starves", *small, "replay.read=follow", "lag.max_lag_versions=2"),
    }
    for run in runs.values():
        run.wait_for_steps(300, seconds=180)
    releases = {fault: run.metrics_addresses() for fault, run in runs.items()}
    rules = hurried(RULES.read_text(encoding="utf-8"))
    with ExitStack() as stack:
        prometheus = stack.enter_context(Prometheus(tmp_path / "prometheus", {}, releases=releases, rules=rules))
        prometheus.wait_for_scrapes(3)
        for fault in ("queue drops", "queue blocks"):
            stack.enter_context(stopped(runs[fault].child("learner")))
        expect(prometheus, {fault: fault for fault in runs})


def test_every_alert_has_a_fault_that_fires_it_and_a_panel_that_stays_empty_says_so() -> None:
    assert {name.split()[0] for fires in FAULTS.values() for name in fires} == alert_rules().keys()
    described = {
        panel["title"]: panel["description"]
        for path in DASHBOARDS.glob("*.json")
        for panel in panels(json.loads(path.read_text(encoding="utf-8")))
    }
    assert [title for title in EMPTY if "Empty w" not in described[title]] == []
