"""What is compared with what, the least that must hold, and what is aimed at.

Rows go through a gRPC connection, as between machines, where a measure does not say "through memory", as between
processes of one machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from replay_bench.rounds import Figures, Spread
from replay_bench.workloads import LARGE


@dataclass(frozen=True)
class Measure:
    """One figure against another of the same round: the median of the rounds' ratios counts."""

    name: str
    figure: str
    against: str
    floor: float
    goal: float
    lower_is_better: bool = False
    beside: str | None = None
    """A figure that is printed with it."""
    prototype: str | None = None
    """What the prototype, which does nothing but gather and send, reaches of `against` is printed with it: on a machine
    where that is below the floor, no service could hold it."""

    def result(self, figures: Figures) -> Result | None:
        """How it came out; None where a figure is missing, or nothing went through in a turn that was too short."""
        if self.figure not in figures or self.against not in figures or not all(figures[self.against]):
            return None
        pairs = zip(figures[self.figure], figures[self.against], strict=True)
        return Result(self, Spread.of([one / other for one, other in pairs]))


@dataclass(frozen=True)
class Result:
    """The ratio of a measure."""

    measure: Measure
    ratio: Spread

    @property
    def verdict(self) -> str:
        """`goal`, `pass` (the floor holds) or `below`."""
        for word, bound in (("goal", self.measure.goal), ("pass", self.measure.floor)):
            reached = self.ratio.median <= bound if self.measure.lower_is_better else self.ratio.median >= bound
            if reached:
                return word
        return "below"


def _measures() -> Iterator[Measure]:
    def per_workload(
        name: str, bounds: dict[str, tuple[float, float]], figure: str, against: str, prototype: str | None = None
    ) -> Iterator[Measure]:
        for workload, (floor, goal) in bounds.items():
            yield Measure(
                f"{name}, {workload.upper()}",
                f"{workload}.{figure}",
                f"{workload}.{against}",
                floor,
                goal,
                prototype=prototype and f"{workload}.{prototype}",
            )

    def alike(floor: float, goal: float, *workloads: str) -> dict[str, tuple[float, float]]:
        return dict.fromkeys(workloads or ("w1", *LARGE), (floor, goal))

    yield from per_workload(
        "ring gather 8,192 / np.take", alike(0.85, 0.95), "gather_rows_per_s", "numpy_take_rows_per_s"
    )
    tcp = {"w2": (0.28, 0.36), "w3": (0.35, 0.45)}
    yield from per_workload(
        "sample 8,192 through memory, MB/s / raw TCP", tcp, "shared_sample_8192_bytes_per_s", "tcp_bytes_per_s"
    )
    yield from per_workload(
        "sample 8,192, MB/s / raw TCP",
        tcp,
        "sample_8192_bytes_per_s",
        "tcp_bytes_per_s",
        "prototype_sample_bytes_per_s",
    )
    # What gRPC reaches of TCP is the machine's: the shares above go with a bare stream at 0.54 of it, these with any.
    yield from per_workload(
        "sample 8,192, MB/s / bare gRPC stream",
        {"w2": (0.52, 0.67), "w3": (0.65, 0.83)},
        "sample_8192_bytes_per_s",
        "grpc_down_bytes_per_s",
        "prototype_sample_bytes_per_s",
    )
    yield from per_workload(
        "sample 8,192 / prototype", alike(0.75, 0.9), "sample_8192_rows_per_s", "prototype_sample_rows_per_s"
    )
    yield from per_workload(
        "sample 256 / sample 8,192", alike(0.6, 0.75), "sample_256_rows_per_s", "sample_8192_rows_per_s"
    )
    yield from per_workload(
        "sample 8,192 / TorchRL in process",
        {"w2": (1.0, 2.0), "w3": (0.8, 1.2)},
        "sample_8192_rows_per_s",
        "TorchRL_rows_per_s",
    )
    for way, figure in ((" through memory", "shared_insert"), ("", "insert")):
        yield from per_workload(
            f"durable insert{way} / prototype",
            alike(0.7, 0.9),
            f"{figure}_rows_per_s",
            "prototype_insert_rows_per_s",
        )
    yield from per_workload(
        "durable insert, compact / plain", alike(1.4, 1.8, "w3"), "compact_insert_rows_per_s", "insert_rows_per_s"
    )
    yield from per_workload(
        "insert beside a sampler / alone",
        {**alike(0.35, 0.5, "w1", "w2"), "w3": (0.6, 0.8)},
        "insert_beside_rows_per_s",
        "insert_rows_per_s",
    )
    yield from per_workload(
        "sample beside a writer / alone",
        {"w1": (0.3, 0.45), "w2": (0.3, 0.4), "w3": (0.2, 0.27)},
        "sample_beside_rows_per_s",
        "sample_8192_rows_per_s",
    )
    yield from per_workload(
        "follow: local sample 8,192 / np.take",
        alike(0.85, 0.95, *LARGE),
        "follow_sample_rows_per_s",
        "follow_take_rows_per_s",
    )
    for workload in LARGE:
        yield Measure(
            f"follower keeps up with inserts, {workload.upper()}",
            f"{workload}.followed_rows_per_s",
            f"{workload}.inserted_beside_follower_rows_per_s",
            0.98,
            0.98,
            beside=f"{workload}.follower_behind_rows",
        )
    for read, name in (
        ("shared_sample", "`sample` through memory"),
        ("sample", "`sample`"),
        ("shared_follow", "`follow` through memory"),
        ("follow", "`follow`"),
    ):
        yield Measure(
            f"training beside {name} at 250 MB/s / none",
            f"training.{read}_updates_per_s",
            "training.none_updates_per_s",
            0.9,
            0.97,
            beside=f"training.{read}_bytes_per_s",
        )
    yield from per_workload(
        "recovery into the ring / MGET", alike(0.6, 0.85, *LARGE), "restore_bytes_per_s", "mget_bytes_per_s"
    )
    for what, figure, against, floor, goal in (
        ("sampled through memory", "shared_sample", "grpc_down", 2.0, 1.5),
        ("sampled", "sample", "grpc_down", 2.0, 1.5),
        ("inserted through memory without Redis", "shared_unrecorded_insert", "grpc_up", 2.7, 2.0),
        ("inserted without Redis", "unrecorded_insert", "grpc_up", 2.7, 2.0),
    ):
        for workload in LARGE:
            yield Measure(
                f"CPU a byte {what} / bare stream, {workload.upper()}",
                f"{workload}.{figure}_cpu_s_per_gb",
                f"{workload}.{against}_cpu_s_per_gb",
                floor,
                goal,
                lower_is_better=True,
            )
    for batch_rows, floor, goal in ((256, 0.3, 0.6), (8192, 0.5, 0.8)):
        yield from per_workload(
            f"prioritised / uniform sample {batch_rows:,}",
            alike(floor, goal, "w2"),
            f"prioritised_{batch_rows}_rows_per_s",
            f"sample_{batch_rows}_rows_per_s",
        )


MEASURES = tuple(_measures())
