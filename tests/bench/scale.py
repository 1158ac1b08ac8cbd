"""How long a snapshot takes to 1 ... 1,000 collectors and what that costs the learner, with and without relays.

First real processes are measured on this machine: an endpoint, relays, and up to 64 collectors that follow for real,
servers on one core and collectors on another. Then a simulation of the same is set beside them, with the costs that
were measured and the same two cores. Then it plays what no machine here has room for: each process with a core, each
machine with a network card.

    .venv/bin/python tests/bench/scale.py --quick

`--only` plays a part: `costs` (kept in the output folder, where the others find them), `real`, `simulated`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

# Before numpy reads it.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

from scale_bench.model import Cost, Costs, Setting, simulate
from scale_bench.real import Stage, measure_costs, measure_poll
from scale_bench.report import Figures, describe, describe_costs, describe_machine, draw, write_json

PARTS = ("costs", "real", "simulated")
CHUNK_BYTES = 1 << 20
FAN_OUT = 32
REAL = ((1, 0), (10, 0), (64, 0), (64, 1), (64, 2))
"""Collectors and layers of relays that are played for real."""
COUNTS = (1, 10, 100, 1_000)
LIMITS = (
    "simulated: a core for each process, and between machines {gigabits:g} Gbit/s and {latency_ms:g} ms one way; the "
    "collectors' own steps, lost packets and TLS are left out"
)


def main() -> None:
    """Measure, simulate, print; write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few snapshots each: a look, not a figure")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--bytes", type=int, default=1 << 20, help="of a snapshot")
    parser.add_argument("--publish-seconds", type=float, default=0.25, help="between two snapshots")
    parser.add_argument("--gigabits", type=float, default=10.0, help="of a simulated network card")
    parser.add_argument("--latency-ms", type=float, default=0.25, help="one way between simulated machines")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed: one for servers, one for collectors")
    began, out = time.monotonic(), arguments.out
    out.mkdir(parents=True, exist_ok=True)
    kept, machine = out / "scale-costs.json", describe_machine()
    for name, value in machine.items():
        print(f"{name}: {value}")
    if arguments.only in (None, "costs"):
        poll_seconds = measure_poll(300 if arguments.quick else 3_000)
        costs = measure_costs(CHUNK_BYTES, 8 if arguments.quick else 40)
        write_json(kept, {"poll_seconds": poll_seconds, "costs": asdict(costs)})
    else:
        if not kept.exists():
            parser.error(f"{kept} is not there: play `--only costs` first")
        content = json.loads(kept.read_text())
        poll_seconds = content["poll_seconds"]
        costs = Costs(**{k: Cost(**v) if isinstance(v, dict) else v for k, v in content["costs"].items()})
    print("\n" + "\n".join(describe_costs(poll_seconds, costs)))

    base = Setting(
        collectors=1,
        depth=0,
        fan_out=FAN_OUT,
        snapshot_bytes=arguments.bytes,
        chunk_bytes=CHUNK_BYTES,
        publish_seconds=arguments.publish_seconds,
        snapshots=12 if arguments.quick else 60,
    )
    print(
        f"\nsnapshots of {base.snapshot_bytes:,} bytes each {base.publish_seconds:g} s; relays have {FAN_OUT} readers"
    )
    cluster = replace(
        base,
        snapshots=6 if arguments.quick else 40,
        bandwidth_bytes=arguments.gigabits * 1e9 / 8,
        latency_seconds=arguments.latency_ms * 1e-3,
    )
    beside: list[tuple[str, Figures]] = []
    if arguments.only in (None, "real"):
        for collectors, depth in REAL[:-1] if arguments.quick else REAL:
            setting = replace(base, collectors=collectors, depth=depth)
            with Stage(setting) as stage:
                beside.append(("real", Figures.of(setting, stage.play().outcome)))
            two_cores = replace(setting, servers_share_a_core=True, collectors_share_a_core=True)
            beside.append(("simulated", Figures.of(setting, simulate(two_cores, costs))))
        print("\non the two cores of this machine, real and simulated")
        print("\n".join(describe(beside)))
    rows: list[Figures] = []
    if arguments.only in (None, "simulated"):
        for depth in (0, 1, 2):
            for collectors in COUNTS:
                setting = replace(cluster, collectors=collectors, depth=depth)
                rows.append(Figures.of(setting, simulate(setting, costs)))
        print("\n" + LIMITS.format(gigabits=arguments.gigabits, latency_ms=arguments.latency_ms))
        print("\n".join(describe([("simulated", row) for row in rows])))
        picture = out / "scale.png"
        draw(picture, f"{base.snapshot_bytes:,} bytes each {base.publish_seconds:g} s; {machine['cpu']}", rows)
        print(f"\npicture: {picture}")
    report = out / "scale.json"
    before = json.loads(report.read_text()) if arguments.only and report.exists() else {}
    write_json(
        report,
        {
            **before,
            "machine": machine,
            "setting": asdict(cluster),
            "poll_seconds": poll_seconds,
            "costs": asdict(costs),
            **({"beside": beside} if beside else {}),
            **({"simulated": rows} if rows else {}),
        },
    )
    print(f"figures: {report}\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
