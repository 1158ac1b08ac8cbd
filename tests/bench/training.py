"""Updates per CPU-second of the learner inside the whole platform, against the same update alone, in turns.

Inside: `paceline train` on Pendulum-v1 with every service, one environment and one update for each environment step;
the training process's CPU time and updates are read from its /metrics, over a window after the start. Alone: the same
algorithm on packed rows in this process, nothing else running.

    .venv/bin/python tests/bench/training.py --quick
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Before numpy and torch read it.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import numpy as np
import torch
from sac_updates import BUFFER_ROWS, DIMENSIONS, machine, ours

from paceline.local.scrape import read_page
from paceline.process import tune_allocator

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0


def alone(seconds: float) -> float:
    """Updates per CPU-second of this process."""
    observation_dim, action_dim = DIMENSIONS["pendulum"]
    generator = np.random.default_rng(1)
    train = ours(
        (observation_dim, action_dim),
        256,
        {
            "observation": generator.standard_normal((BUFFER_ROWS, observation_dim), np.float32),
            "next_observation": generator.standard_normal((BUFFER_ROWS, observation_dim), np.float32),
            "action": generator.uniform(-1, 1, (BUFFER_ROWS, action_dim)).astype(np.float32),
            "reward": generator.standard_normal(BUFFER_ROWS, np.float32),
            "terminated": generator.random(BUFFER_ROWS) < 0.01,
        },
    )
    train(50)
    began, cpu, count = time.monotonic(), time.process_time(), 0
    while time.monotonic() - began < seconds:
        train(25)
        count += 25
    return count / (time.process_time() - cpu)


def inside(seconds: float) -> tuple[float, float]:
    """Updates per CPU-second, and per second, of a learner's training process amid its platform."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "run.id": "bench",
            "run.directory": folder,
            "run.environment_steps": 1_000_000,
            "learner.metrics_listen": f"127.0.0.1:{port}",
        }
        overrides = [f"{key}={value}" for key, value in settings.items()]
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "train", "configs/pendulum-sac.yaml", "--plain", *overrides],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while (read_page(port).value("paceline_learner_updates_total") or 0) < 200:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the training did not begin")
                time.sleep(0.2)
            began, before = time.monotonic(), read_page(port)
            time.sleep(seconds)
            passed, after = time.monotonic() - began, read_page(port)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)

    def grown(name: str) -> float:
        return after.total(name) - before.total(name)

    updates = grown("paceline_learner_updates_total")
    return updates / grown("process_cpu_seconds_total"), updates / passed


def main() -> None:
    """Measure in turns, print, write bench-results/training.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 rounds of 8 s instead of 5 of 15 s")
    parser.add_argument("--output", type=Path, default=Path("bench-results/training.json"))
    arguments = parser.parse_args()
    tune_allocator()
    torch.set_num_threads(1)
    rounds, seconds = (2, 8.0) if arguments.quick else (5, 15.0)
    about = machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'round':>5} {'alone /cpu-s':>13} {'inside /cpu-s':>14} {'inside /s':>10} {'ratio':>6}")
    figures = []
    for number in range(rounds):
        pure = alone(seconds)
        per_cpu_second, per_second = inside(seconds)
        figures.append(
            {"alone": pure, "inside": per_cpu_second, "per_second": per_second, "ratio": per_cpu_second / pure}
        )
        print(
            f"{number:5} {pure:13.1f} {per_cpu_second:14.1f} {per_second:10.1f} {per_cpu_second / pure:6.2f}",
            flush=True,
        )
    ratios = [figure["ratio"] for figure in figures]
    print(f"ratio: median {statistics.median(ratios):.2f}, {min(ratios):.2f}-{max(ratios):.2f}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"machine": about, "rounds": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
