"""What measuring and bounding the lag costs, all of it together, as shares of the steps of learner and collector.

The real training loop and the real collecting loop, each twice in one process: with everything on (attribution,
histograms, the bound at admission, sampling and training, recorded traces, stamps of times), and with all of it off (no
observer, no bound, plain uniform draws, no stamp that takes a clock). They take turns in short rounds, first one and
then the other, and what is compared is CPU time, because the machine may be shared. What is around them is here and not
on sockets: rows come from a ring of 200,000, which grows by one row an update and from which batches are drawn as a
learner that follows its table draws them; snapshots are staged as the poller stages them; blocks go nowhere.

    .venv/bin/python tests/bench/lag_cost.py [--only learner|collector] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before numpy and torch read it.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import grpc
import numpy as np
import torch
from prometheus_client import CollectorRegistry

from paceline.actors import ActorSemantics, build_actor, squashed_gaussian_semantics
from paceline.collector import metrics as collector_metrics
from paceline.collector.assignment import Assignment
from paceline.collector.loop import CollectingLoop
from paceline.config import Config, build
from paceline.envs import describe_environment
from paceline.identity import PolicyIdentity
from paceline.lag.bound import LagBound
from paceline.lag.trace import TraceWriter
from paceline.learner.algorithms import build_algorithm
from paceline.learner.loop import Loop, Progress
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.published import PublishedVersions
from paceline.learner.recorder import Recorder
from paceline.learner.sources import Batch
from paceline.learner.training_lag import TrainingLag
from paceline.process import StopSignal, tune_allocator
from paceline.replica import LearnerClock, SnapshotPoller, Standings
from paceline.rows import Block, Column, RowSpec, transition_spec
from paceline.snapshot import StagedActor, make_header, pack_state
from paceline.tables.memory import MemorySettings, TableMemory
from paceline.telemetry import ActivityClock, configure_logging
from paceline.v1 import run_pb2

ROWS, BATCH, VERSIONS, BOUND = 200_000, 256, 2000, 500
UPDATES_PER_VERSION = 10
"""The default of learner.publish_every_updates."""
DIMENSIONS = {"halfcheetah": (17, 6), "pendulum": (3, 1)}
ENVIRONMENTS = (1, 8)
STEPS_PER_VERSION, STEPS_BEHIND = 16, 4
"""A collector hears of a version every so many steps, and can apply it so many steps later."""


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a step, of each round."""

    off: list[float]
    on: list[float]

    def tell(self, name: str) -> None:
        """Print medians, and the share with its quartiles over rounds: of each round the two that ran side by side."""
        shares = [100 * (on / off - 1) for off, on in zip(self.off, self.on, strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4)
        off, on = statistics.median(self.off), statistics.median(self.on)
        # Of the quickest tenth the machine's other work spoils least.
        quick_off, quick_on = (statistics.quantiles(each, n=10)[0] for each in (self.off, self.on))
        print(
            f"{name}: off {1e6 * off:.1f} us, on {1e6 * on:.1f} us of CPU a step (medians); on costs {middle:+.2f} % "
            f"in the median round (quartiles {low:+.2f} to {high:+.2f}, {len(shares)} rounds), and "
            f"{100 * (quick_on / quick_off - 1):+.2f} % in the quickest tenth ({1e6 * quick_off:.1f} us)",
            flush=True,
        )


def compare(off: Callable[[int], None], on: Callable[[int], None], *, steps: int, rounds: int, turn: int) -> Cost:
    """Have each take so many steps in every round, `turn` of them at a time and by turns the first; the first round is
    warm-up. Turns are short, so that both sides meet the same moods of the machine."""
    cost, sides = Cost([], []), (off, on)
    for number in range(rounds + 1):
        spent = dict.fromkeys(sides, 0.0)
        for place in range(steps // turn):
            for take in sides if place % 2 else reversed(sides):
                began = time.process_time()
                take(turn)
                spent[take] += time.process_time() - began
        if number:
            cost.off.append(spent[off] / steps)
            cost.on.append(spent[on] / steps)
    return cost


class EnoughError(Exception):
    """As many updates as were asked for are made."""


class NoLag:
    """Takes the place of what counts the lag."""

    def take(self, batch: Batch, *, policy_version: int, learner_step: int) -> Batch:
        """Every row counts."""
        return batch

    def begin(self, standing: object) -> None:
        """Nothing."""

    def count(self, steps: int = 0) -> None:
        """Nothing."""

    def hand_on(self) -> None:
        """Nothing."""


class NoClock(LearnerClock):
    """Knows no time, and asks nobody."""

    def now(self) -> float:
        """Not known."""
        return 0.0

    def stamp(self) -> float:
        """Not known."""
        return 0.0


def make_rows(spec: RowSpec, began: float) -> Block:
    """Rows of the second half of the versions, one of which is published each second."""
    random, block = np.random.default_rng(0), Block.empty(spec, ROWS)
    versions = np.sort(random.integers(VERSIONS // 2, VERSIONS + 1, ROWS))
    published_at = began + versions
    columns: dict[str, Any] = {"policy_version": versions, "policy_learner_step": 10 * versions, "step_count": 1}
    columns |= {"policy_applied_at": published_at + 0.3, "collected_at": published_at + 0.7}
    columns |= {"sealed_at": published_at + 1.0, "action": random.uniform(-1, 1, block.columns["action"].shape)}
    for name in ("observation", "next_observation"):
        columns[name] = random.standard_normal(block.columns[name].shape)
    for name, values in columns.items():
        block.columns[name] = values
    return block


class RingSource:
    """Batches as `FollowSource` draws them, from a ring that gets a block of ten rows each ten batches."""

    def __init__(self, block: Block, bound: int | None, *, times: bool) -> None:
        self._memory = TableMemory(MemorySettings(ROWS).bounded(bound), block.spec.row_bytes)
        self._block, self._bound = block, bound
        for start in range(0, ROWS, 256):
            self._append(slice(start, min(ROWS, start + 256)))
        self._rows = torch.empty((BATCH, block.spec.row_bytes), dtype=torch.uint8)
        self._out, self._random = self._rows.numpy(), np.random.default_rng(1)
        self._stored_at = np.empty(BATCH) if times else None
        self._version, self._taken = VERSIONS, 0
        self.left = 0

    def next_batch(self, seconds: float) -> Batch:
        """The next batch. Raises EnoughError after so many: a loop that is asked to stop would end its record."""
        if not self.left:
            raise EnoughError
        self.left -= 1
        self._taken += 1
        if self._taken % 10 == 0:
            start = self._taken % (ROWS - 10)
            self._stamp(slice(start, start + 10))
            self._append(slice(start, start + 10))
        memory = self._memory
        memory.find_starvation(BATCH, self._version)
        memory.sample(self._random, self._out, policy_version=self._version, stored_at=self._stored_at)
        return Batch(
            self._rows,
            ROWS,
            self._memory.end_row,
            stored_at=self._stored_at,
            drawable_row_count=memory.within_bound(self._version),
        )

    def update_priorities(self, keys: object, priorities: object) -> None:
        """There are none."""

    def set_policy_version(self, version: int) -> None:
        """The bound counts from it."""
        self._version = version

    def close(self) -> None:
        """Nothing is open."""

    def _stamp(self, part: slice) -> None:
        """Have rows be of the newest version."""
        columns, now = self._block.columns, time.time()
        columns["policy_version"][part], columns["policy_learner_step"][part] = self._version, 10 * self._version
        for name, seconds in (("policy_applied_at", 2.0), ("collected_at", 1.5), ("sealed_at", 1.0)):
            columns[name][part] = now - seconds

    def _append(self, part: slice) -> None:
        block = self._block
        versions = block.columns["policy_version"][part]
        self._memory.append(
            self._memory.end_row,
            block.data[part],
            stored_at=block.columns["sealed_at"][part] + 0.5,
            versions=None if self._bound is None else np.ascontiguousarray(versions),
        )


def make_learner(
    spec: RowSpec, semantics: ActorSemantics, block: Block, folder: Path, *, is_on: bool
) -> Callable[[int], None]:
    """A training loop that is asked for so many updates."""
    config = build({"learner": {"updates": "learner_bound"}, "run": {"environment_steps": 10**12}})
    algorithm = build_algorithm({"name": "sac"}, build_actor(semantics, "cpu"), seed=0)
    metrics, source = LearnerMetrics(CollectorRegistry()), RingSource(block, BOUND if is_on else None, times=is_on)
    published = PublishedVersions(folder / "publications.jsonl") if is_on else None
    began = time.time() - VERSIONS
    if published is not None:
        for version in range(1, VERSIONS + 1):
            published.note(version, began + version, 10 * version)
    recorder = Recorder(folder / ("on" if is_on else "off"))

    def publish(progress: Progress) -> None:
        payload, now = pack_state(algorithm.actor), time.time()
        make_header(
            algorithm.actor,
            payload,
            run_id="bench",
            identity=PolicyIdentity(1, progress.policy_version),
            learner_step=progress.learner_step,
            environment_step_count=progress.environment_steps,
            published_at=now,
        )
        if published is not None:
            published.note(progress.policy_version, now, progress.learner_step)

    lag: Any = NoLag()
    if published is not None:
        lag = TrainingLag(spec, bound=LagBound(BOUND), publications=published.publications, metrics=metrics)
    loop = Loop(
        config,
        algorithm=algorithm,
        source=source,
        spec=spec,
        start=Progress(learner_step=10 * VERSIONS, policy_version=VERSIONS),
        incarnation=1,
        metrics=metrics,
        lag=lag,
        publish=publish,
        checkpoint=lambda _: None,
        record=lambda fields: recorder.write("training", fields),
        check_endpoint=lambda: None,
    )

    def train(updates: int) -> None:
        source.left = updates
        with contextlib.suppress(EnoughError):
            loop.run(StopSignal())

    return train


class LocalPoller(SnapshotPoller):
    """A poller that hears of versions by the steps of its collector, and not from a learner."""

    def __init__(self, staged: StagedActor, config: Config, metrics: Any, clock: LearnerClock) -> None:
        self._heard = Standings()
        super().__init__(
            grpc.insecure_channel("127.0.0.1:1"),  # never used: the thread that polls is not started
            staged,
            run_id="bench",
            rpc=config.rpc,
            poll_seconds=1,
            metrics=metrics,
            clock=clock,
            standings=self._heard,
        )
        self._own, self._payload = staged, pack_state(staged.actor)
        self._version, self._looks = 0, 0
        self.stop_after, self.stop = 0, StopSignal()
        self._hear()
        self._fetch()
        self.apply_if_ready()

    def is_ready(self, environment_steps: int = 0) -> bool:
        """Looked at once before each step: what is to happen by then happens."""
        self._looks += 1
        if self._looks % STEPS_PER_VERSION == 0:
            self._hear()
        elif self._looks % STEPS_PER_VERSION == STEPS_BEHIND:
            self._fetch()
        self.stop_after -= 1
        if self.stop_after == 0:
            self.stop.set()
        return super().is_ready(environment_steps)

    def _hear(self) -> None:
        self._version += 1
        self._heard.note_known(PolicyIdentity(1, self._version), 10 * self._version, time.time())

    def _fetch(self) -> None:
        header = make_header(
            self._own.actor,
            self._payload,
            run_id="bench",
            identity=PolicyIdentity(1, self._version),
            learner_step=10 * self._version,
            environment_step_count=0,
            published_at=0.0,
        )
        self._own.stage(header, self._payload)


class NoWriter:
    """Takes every block, and every episode."""

    complete = finished = False
    environment_steps = 0

    def submit(self, block: Block, ended: Callable[[], bool]) -> bool:
        """It is gone."""
        return True

    def add(self, episodes: object) -> None:
        """They are gone."""


def make_collector(environments: int, folder: Path, *, is_on: bool) -> Callable[[int], None]:
    """A collecting loop of Pendulum that is asked for so many steps of all its environments."""
    config = build({"env": {"id": "Pendulum-v1"}, "collector": {"environments": environments, "block_seconds": 1000}})
    description = describe_environment(config.env)
    spec = transition_spec(description.observation, description.action)
    semantics = squashed_gaussian_semantics(
        description.observation_dim,
        hidden=(256, 256),
        action_low=description.action_low,
        action_high=description.action_high,
    )
    clock = LearnerClock() if is_on else NoClock()
    registry = CollectorRegistry()
    metrics = collector_metrics.CollectorMetrics(registry, clock)
    staged = StagedActor(build_actor(semantics))
    poller = LocalPoller(staged, config, metrics.replica, clock)
    place = run_pb2.JoinResponse(index=0, incarnation=1, run_seed=1)
    assignment = Assignment(config, place, description, spec)
    writer: Any = NoWriter()
    loop = CollectingLoop(
        config.collector,
        description=description,
        build_environments=assignment.build_environments,
        staged=staged,
        poller=poller,
        filler=assignment.make_filler(clock),
        writer=writer,
        reporter=writer,
        metrics=metrics,
        clock=ActivityClock(metrics.activity_seconds, collector_metrics.ACTIVITIES, "starting"),
        warmup_steps=0,
        seed=1,
        bound=LagBound(8 if is_on else None),
        trace=TraceWriter.open(folder / f"trace-{environments}", 0) if is_on else None,
    )
    if not is_on:
        nothing: Any = NoLag()
        loop._lag = nothing

    def collect(steps: int) -> None:
        poller.stop_after, poller.stop = steps, StopSignal()
        loop.run(poller.stop)

    return collect


def measure_learner(workload: str, folder: Path, rounds: int) -> None:
    """Print what an update costs with all of it, and without."""
    observation_dim, action_dim = DIMENSIONS[workload]
    spec = transition_spec(
        Column("observation", "float32", (observation_dim,)), Column("action", "float32", (action_dim,))
    )
    semantics = squashed_gaussian_semantics(
        observation_dim, hidden=(256, 256), action_low=(-1.0,) * action_dim, action_high=(1.0,) * action_dim
    )
    block = make_rows(spec, time.time() - VERSIONS)
    off, on = (make_learner(spec, semantics, block, folder / workload, is_on=is_on) for is_on in (False, True))
    # Rounds in which everything that happens now and then does so equally often.
    compare(off, on, steps=4 * UPDATES_PER_VERSION, rounds=rounds, turn=1).tell(f"learner, {workload}")


def measure_collector(environments: int, folder: Path, rounds: int) -> None:
    """Print what a step of all environments costs with all of it, and without."""
    off, on = (make_collector(environments, folder, is_on=is_on) for is_on in (False, True))
    # As many steps as a block has rows.
    compare(off, on, steps=4 * STEPS_PER_VERSION, rounds=rounds, turn=STEPS_PER_VERSION).tell(
        f"collector, {environments} x Pendulum-v1"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it runs")
    parser.add_argument("--only", choices=["collector", "learner"], help="one of both")
    options = parser.parse_args()
    quick = options.quick
    tune_allocator()
    torch.set_num_threads(1)
    configure_logging("bench")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "learner":
            for environments in ENVIRONMENTS:
                measure_collector(environments, Path(folder), 5 if quick else 300)
        if options.only != "collector":
            for workload in DIMENSIONS:
                measure_learner(workload, Path(folder), 3 if quick else 60)


if __name__ == "__main__":
    main()
