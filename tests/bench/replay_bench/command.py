"""The command: what is measured, printed and written.

Prints machine, versions, every figure with its spread, and for each measure its ratio, the floor that must hold and the
goal. Writes bench-results/replay.json and bench-results/replay.png. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from replay_bench.figure import draw_figure
from replay_bench.following import measure_following
from replay_bench.gather import measure_gather
from replay_bench.report import describe_figures, describe_machine, describe_measures, describe_peers, write_json
from replay_bench.rounds import Extent, Figures
from replay_bench.service import measure_service
from replay_bench.training import measure_training
from replay_bench.workloads import LARGE, LEARNER, WORKLOADS, Workload

SUITES = ("gather", "service", "following", "training")
RESULTS = Path(__file__).resolve().parents[3] / "bench-results"
FULL, QUICK = Extent(rounds=5, seconds=1.1), Extent(rounds=1, seconds=0.15)
QUICK_DIVISOR = 16
"""A quick run has rings of a sixteenth of the size: they fit caches, so its ratios say only that everything runs."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round on small rings, to see that it runs")
    parser.add_argument("--only", action="append", choices=SUITES, help="only this suite; may be given again")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only these rows; may be given again")
    parser.add_argument("--rounds", type=int, help=f"instead of {FULL.rounds}")
    parser.add_argument("--seconds", type=float, help=f"of a turn in a round, instead of {FULL.seconds:g}")
    parser.add_argument("--redis-binary", type=Path, help="a redis-server to use instead of the bundled one")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for replay.json and replay.png")
    arguments = parser.parse_args()
    usual = QUICK if arguments.quick else FULL
    extent = Extent(arguments.rounds or usual.rounds, arguments.seconds or usual.seconds)
    workloads = WORKLOADS
    if arguments.quick:
        workloads = {name: workload.smaller(QUICK_DIVISOR) for name, workload in workloads.items()}
    chosen = [workloads[name] for name in arguments.workload or workloads]
    machine, began = describe_machine(arguments.redis_binary), time.monotonic()
    print("\n".join(f"{name:18} {value}" for name, value in machine.items()), flush=True)

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        figures = measure(chosen, extent, arguments.only or SUITES, Path(folder), arguments.redis_binary)
    seconds = time.monotonic() - began
    for lines in (describe_figures(figures), describe_measures(figures), describe_peers(figures)):
        print("\n" + "\n".join(lines))
    arguments.results.mkdir(parents=True, exist_ok=True)
    write_json(arguments.results / "replay.json", machine, extent, figures, seconds)
    draw_figure(arguments.results / "replay.png", machine, figures)
    print(f"\n{seconds:.0f} s; wrote replay.json and replay.png to {arguments.results}")


def measure(
    workloads: Sequence[Workload], extent: Extent, suites: Sequence[str], folder: Path, redis_binary: Path | None
) -> Figures:
    """The figures of these suites."""
    figures: Figures = {}
    for workload in workloads:
        if workload.name == LEARNER:
            if "training" in suites:
                figures |= measure_training(workload, extent, folder, redis_binary)
            continue
        if "gather" in suites:
            figures |= measure_gather(workload, extent)
        if "service" in suites:
            figures |= measure_service(workload, extent, folder, redis_binary)
        if "following" in suites and workload.name in LARGE:
            figures |= measure_following(workload, extent, folder, redis_binary)
    return figures
