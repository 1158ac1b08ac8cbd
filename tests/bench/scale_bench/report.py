"""What was measured and simulated, as text, as JSON and as a picture."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

from scale_bench.model import Cost, Costs, Outcome, Setting
from scale_bench.real import quantile_ms

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass(frozen=True)
class Figures:
    """One line of the tables."""

    collectors: int
    depth: int
    relays: int
    p50_ms: float
    p99_ms: float
    skipped_share: float
    endpoint_cpu_share: float
    endpoint_megabytes_per_second: float
    relay_cpu_share: float

    @classmethod
    def of(cls, setting: Setting, outcome: Outcome) -> Figures:
        return cls(
            collectors=setting.collectors,
            depth=setting.depth,
            relays=outcome.relays,
            p50_ms=round(quantile_ms(outcome.delays, 0.5), 1),
            p99_ms=round(quantile_ms(outcome.delays, 0.99), 1),
            skipped_share=round(outcome.skipped_share, 3),
            endpoint_cpu_share=round(outcome.endpoint_cpu_share, 4),
            endpoint_megabytes_per_second=round(outcome.endpoint_bytes_per_second / 1e6, 2),
            relay_cpu_share=round(outcome.relay_cpu_share, 4),
        )


def describe_machine() -> dict[str, str]:
    """What the figures belong to."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "cpu": next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()),
        "cores": str(os.cpu_count()),
        "load before": f"{os.getloadavg()[0]:.1f}",
        "commit": commit or "none",
        "python": platform.python_version(),
    }


def describe_costs(poll_seconds: float, costs: Costs) -> Iterator[str]:
    """A line for each step."""
    yield f"{'processor time of one':34} {'fixed, us':>10} {'a MB, us':>10}"
    yield f"{'poll that brings nothing, endpoint':34} {poll_seconds * 1e6:10.0f} {0:10.0f}"
    for name, value in vars(costs).items():
        if isinstance(value, Cost):
            yield f"{name.replace('_', ' '):34} {value.fixed * 1e6:10.0f} {value.per_byte * 1e12:10.0f}"
    yield f"{'publish wait (no processor time)':34} {costs.publish_wait_seconds * 1e6:10.0f}"


def describe(rows: Sequence[tuple[str, Figures]]) -> Iterator[str]:
    """A line for each setting."""
    yield (
        f"{'':10} {'collectors':>10} {'depth':>6} {'relays':>6} {'p50, ms':>9} {'p99, ms':>9} {'skipped':>8} "
        f"{'endpoint':>9} {'MB/s':>8} {'relay':>7}"
    )
    for kind, row in rows:
        yield (
            f"{kind:10} {row.collectors:10} {row.depth:6} {row.relays:6} {row.p50_ms:9.1f} {row.p99_ms:9.1f} "
            f"{row.skipped_share:8.1%} {row.endpoint_cpu_share:9.1%} {row.endpoint_megabytes_per_second:8.1f} "
            f"{row.relay_cpu_share:7.1%}"
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Everything, for another program."""
    path.write_text(json.dumps(content, indent=1, default=asdict) + "\n")


def draw(path: Path, title: str, rows: Sequence[Figures]) -> None:
    """Write a PNG: delay and the endpoint's load by the number of collectors, a line for each depth."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    quantities = (
        ("p99_ms", "publish to applied, p99, ms"),
        ("endpoint_cpu_share", "share of a core, endpoint"),
        ("endpoint_megabytes_per_second", "MB/s sent by the endpoint"),
    )
    for axis, (name, label) in zip(axes, quantities, strict=True):
        for depth in sorted({row.depth for row in rows}):
            chosen = [row for row in rows if row.depth == depth]
            legend = "no relay" if depth == 0 else f"{depth} layer{'s' if depth > 1 else ''} of relays"
            axis.plot([row.collectors for row in chosen], [getattr(row, name) for row in chosen], "o-", label=legend)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("collectors")
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
