"""Updates per CPU-second of Paceline's SAC and of Stable-Baselines3's, in one process and in interleaved rounds.

Both sample their batches from a filled buffer inside the measured time: Stable-Baselines3 from its ReplayBuffer,
Paceline from a matrix of packed rows. Both have twin critics and an actor of 256x256 and learn the temperature.
CPU time, not wall time, because the machine may be shared; one compute thread.

    .venv/bin/python tests/bench/sac_updates.py --quick
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

# Before numpy and torch read it.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import gymnasium
import numpy as np
import stable_baselines3
import torch
from stable_baselines3.common.logger import Logger

from paceline.actors import build_actor, squashed_gaussian_semantics
from paceline.learner.algorithms import TransitionBatch, build_algorithm
from paceline.process import tune_allocator
from paceline.rows import Block, Column, transition_spec

BUFFER_ROWS = 100_000
DIMENSIONS = {"halfcheetah": (17, 6), "pendulum": (3, 1)}


@dataclass(frozen=True)
class Figures:
    """Updates per CPU-second of one workload: medians over rounds, and the quartiles of our ratio."""

    workload: str
    batch_size: int
    rounds: int
    stable_baselines3: float
    paceline: float
    ratio: float
    ratio_quartiles: tuple[float, float]


class Spaces(gymnasium.Env[np.ndarray, np.ndarray]):
    """Nothing but the spaces that Stable-Baselines3 builds its networks and buffer from."""

    def __init__(self, observation_dim: int, action_dim: int) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (observation_dim,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (action_dim,), np.float32)

    def reset(self, **_: object) -> tuple[np.ndarray, dict[str, object]]:
        return np.zeros(self.observation_space.shape or (), np.float32), {}


def peer(dims: tuple[int, int], batch_size: int, columns: dict[str, np.ndarray]) -> Callable[[int], None]:
    """Stable-Baselines3's own `train`, with its defaults, over a buffer that holds `columns`."""
    model = stable_baselines3.SAC(
        "MlpPolicy",
        Spaces(*dims),
        batch_size=batch_size,
        buffer_size=BUFFER_ROWS,
        device="cpu",
        seed=0,
    )
    model.set_logger(Logger(folder=None, output_formats=[]))
    buffer = model.replay_buffer
    assert buffer is not None
    buffer.observations[:, 0] = columns["observation"]
    buffer.next_observations[:, 0] = columns["next_observation"]
    buffer.actions[:, 0] = columns["action"]
    buffer.rewards[:, 0] = columns["reward"]
    buffer.dones[:, 0] = columns["terminated"]
    buffer.full = True
    return lambda updates: model.train(gradient_steps=updates, batch_size=batch_size)


def ours(dims: tuple[int, int], batch_size: int, columns: dict[str, np.ndarray]) -> Callable[[int], None]:
    """Paceline's SAC over packed rows, each batch gathered as replay gathers it."""
    observation_dim, action_dim = dims
    spec = transition_spec(
        Column("observation", "float32", (observation_dim,)), Column("action", "float32", (action_dim,))
    )
    block = Block.empty(spec, BUFFER_ROWS)
    for name, values in columns.items():
        block.columns[name] = values
    block.columns["step_count"] = 1
    torch.manual_seed(0)
    semantics = squashed_gaussian_semantics(
        observation_dim, hidden=(256, 256), action_low=[-1.0] * action_dim, action_high=[1.0] * action_dim
    )
    algorithm = build_algorithm({"name": "sac"}, build_actor(semantics), seed=0)
    generator = np.random.default_rng(0)
    rows = np.empty((batch_size, spec.row_bytes), np.uint8)

    def train(updates: int) -> None:
        for _ in range(updates):
            index = generator.integers(0, BUFFER_ROWS, batch_size)
            np.take(block.data, index, axis=0, out=rows, mode="clip")
            algorithm.update(TransitionBatch.from_rows(spec, torch.from_numpy(rows)))
        algorithm.check_finite()

    return train


def measure(workload: str, batch_size: int, rounds: int, updates: int) -> Figures:
    """Alternate the two, so that both see the same moods of the machine."""
    observation_dim, action_dim = DIMENSIONS[workload]
    generator = np.random.default_rng(1)
    columns = {
        "observation": generator.standard_normal((BUFFER_ROWS, observation_dim), np.float32),
        "next_observation": generator.standard_normal((BUFFER_ROWS, observation_dim), np.float32),
        "action": generator.uniform(-1, 1, (BUFFER_ROWS, action_dim)).astype(np.float32),
        "reward": generator.standard_normal(BUFFER_ROWS, np.float32),
        "terminated": generator.random(BUFFER_ROWS) < 0.01,
    }
    sides = [build(DIMENSIONS[workload], batch_size, columns) for build in (peer, ours)]
    rates: list[list[float]] = [[], []]
    for round_index in range(-1, rounds):  # the first is warm-up
        for train, side in zip(sides, rates, strict=True):
            count = updates if round_index >= 0 else max(1, updates // 4)
            begin = time.process_time()
            train(count)
            if round_index >= 0:
                side.append(count / (time.process_time() - begin))
    ratios = sorted(mine / theirs for theirs, mine in zip(*rates, strict=True))
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Figures(
        workload,
        batch_size,
        rounds,
        statistics.median(rates[0]),
        statistics.median(rates[1]),
        statistics.median(ratios),
        (quartiles[0], quartiles[2]),
    )


def machine() -> dict[str, str]:
    """What the figures belong to."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "stable_baselines3": stable_baselines3.__version__,
        "commit": commit.stdout.strip() or "none",
    }


def main() -> None:
    """Measure, print a table, write bench-results/sac_updates.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds of 50 updates instead of 9 of 150")
    parser.add_argument("--large", action="store_true", help="also batches of 8192")
    parser.add_argument("--output", type=Path, default=Path("bench-results/sac_updates.json"))
    arguments = parser.parse_args()
    tune_allocator()
    torch.set_num_threads(1)
    rounds, updates = (3, 50) if arguments.quick else (9, 150)

    about = machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'workload':12} {'batch':>6} {'SB3 upd/cpu-s':>14} {'ours':>8} {'ratio':>7}  quartiles")
    results = []
    for batch_size in (256, 8192) if arguments.large else (256,):
        for workload in DIMENSIONS:
            figures = measure(workload, batch_size, rounds, max(3, updates * 256 // batch_size))
            low, high = figures.ratio_quartiles
            print(
                f"{workload:12} {batch_size:6} {figures.stable_baselines3:14.1f} {figures.paceline:8.1f} "
                f"{figures.ratio:7.2f}  {low:.2f}-{high:.2f}",
                flush=True,
            )
            results.append(asdict(figures))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"machine": about, "figures": results}, indent=1) + "\n")


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


if __name__ == "__main__":
    main()
