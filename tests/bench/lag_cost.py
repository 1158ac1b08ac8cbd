"""What measuring and bounding the lag costs a learner that follows its table, as shares of an update of 256 rows.

CPU time, not wall time, in interleaved rounds of one process, because the machine may be shared: a draw from a ring of
200,000 rows and the count of its lag, with nothing else; with its parts; with its parts under a bound.

    .venv/bin/python tests/bench/lag_cost.py
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable

# Before numpy and torch read it.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from paceline.actors import build_actor, squashed_gaussian_semantics
from paceline.lag.bound import LagBound
from paceline.lag.publications import Publication, Publications
from paceline.learner.algorithms import TransitionBatch, build_algorithm
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import Batch
from paceline.learner.training_lag import TrainingLag
from paceline.rows import Block, Column, RowSpec, transition_spec
from paceline.tables.memory import MemorySettings, TableMemory

ROWS, BATCH, VERSIONS, BOUND = 200_000, 256, 2000, 500
DIMENSIONS = {"halfcheetah": (17, 6), "pendulum": (3, 1)}
ROUNDS, DRAWS, UPDATES = 15, 240, 24


def make_rows(spec: RowSpec, began: float) -> Block:
    """Rows of the second half of the versions, one of which is published each second."""
    random, block = np.random.default_rng(0), Block.empty(spec, ROWS)
    versions = np.sort(random.integers(VERSIONS // 2, VERSIONS + 1, ROWS))
    published_at = began + versions
    columns = {"policy_version": versions, "policy_learner_step": 10 * versions, "step_count": 1}
    columns |= {"policy_applied_at": published_at + 0.3, "collected_at": published_at + 0.7}
    columns |= {"sealed_at": published_at + 1.0, "action": random.uniform(-1, 1, block.columns["action"].shape)}
    for name in ("observation", "next_observation"):
        columns[name] = random.standard_normal(block.columns[name].shape)
    for name, values in columns.items():
        block.columns[name] = values
    return block


def fill(settings: MemorySettings, block: Block) -> TableMemory:
    """A ring that holds the rows."""
    memory = TableMemory(settings, block.spec.row_bytes)
    for start in range(0, ROWS, 256):
        part = slice(start, min(ROWS, start + 256))
        memory.append(
            start,
            block.data[part],
            stored_at=block.columns["sealed_at"][part] + 0.5,
            versions=np.ascontiguousarray(block.columns["policy_version"][part]),
        )
    return memory


def make_side(block: Block, publications: Publications | None, bound: int | None) -> Callable[[], None]:
    """What is done for each update beside it: the draw, as `FollowSource` makes it, and the lag."""
    memory = fill(MemorySettings(ROWS).bounded(bound), block)
    metrics = LearnerMetrics(CollectorRegistry())
    lag = TrainingLag(block.spec, bound=LagBound(bound), publications=publications, metrics=metrics)
    rows, random = torch.empty((BATCH, block.spec.row_bytes), dtype=torch.uint8), np.random.default_rng(1)
    out, stored_at = rows.numpy(), None if publications is None else np.empty(BATCH)

    def draw_and_count() -> None:
        memory.find_starvation(BATCH, VERSIONS)
        memory.sample(random, out, policy_version=VERSIONS, stored_at=stored_at)
        within = memory.within_bound(VERSIONS)
        batch = Batch(rows, ROWS, ROWS, stored_at=stored_at, drawable_row_count=within)
        lag.take(batch, policy_version=VERSIONS, learner_step=10 * VERSIONS)

    return draw_and_count


def make_update(block: Block, observation_dim: int, action_dim: int) -> Callable[[], None]:
    """The update itself."""
    semantics = squashed_gaussian_semantics(
        observation_dim, hidden=(256, 256), action_low=(-1.0,) * action_dim, action_high=(1.0,) * action_dim
    )
    algorithm = build_algorithm({"name": "sac"}, build_actor(semantics, "cpu"), seed=0)
    rows = torch.from_numpy(block.data[:BATCH].copy())
    return lambda: algorithm.update(TransitionBatch.from_rows(block.spec, rows)) and None


def measure(workload: str) -> None:
    """Print the microseconds of each, and the shares."""
    observation_dim, action_dim = DIMENSIONS[workload]
    spec = transition_spec(
        Column("observation", "float32", (observation_dim,)), Column("action", "float32", (action_dim,))
    )
    began, publications = time.time() - VERSIONS, Publications()
    for version in range(1, VERSIONS + 1):
        publications.add(Publication(version, began + version, 10 * version))
    block = make_rows(spec, began)
    sides = {
        "off": (make_side(block, None, None), DRAWS),
        "parts": (make_side(block, publications, None), DRAWS),
        "parts and bound": (make_side(block, publications, BOUND), DRAWS),
        "update": (make_update(block, observation_dim, action_dim), UPDATES),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_index in range(-1, ROUNDS):  # the first is warm-up
        for name, (do, count) in sides.items():
            begin = time.process_time()
            for _ in range(count):
                do()
            if round_index >= 0:
                seconds[name].append((time.process_time() - begin) / count)
    median = {name: statistics.median(each) for name, each in seconds.items()}
    print(f"{workload}: " + ", ".join(f"{name} {1e6 * value:.0f} us" for name, value in median.items()))
    for name in ("parts", "parts and bound"):
        print(f"  {name}: {100 * (median[name] - median['off']) / median['update']:.2f} % of an update more than off")


def main() -> None:
    """Measure both workloads and print."""
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    for workload in DIMENSIONS:
        measure(workload)


if __name__ == "__main__":
    main()
