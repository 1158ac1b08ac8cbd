"""Seeds that no two environments of a run share."""

from __future__ import annotations

import numpy as np


def environment_seeds(
    run_seed: int, collector_index: int, incarnation: int, count: int, *, rebuild: int = 0
) -> tuple[int, ...]:
    """Reproducible seeds of a collector's environments, unlike those of any other collector, restart or rebuild.

    31 bits each: what every environment accepts as a seed.
    """
    return tuple(
        int(
            np.random.SeedSequence(
                run_seed, spawn_key=(0, collector_index, incarnation, rebuild, number)
            ).generate_state(1)[0]
        )
        >> 1
        for number in range(count)
    )


def acting_seed(run_seed: int, collector_index: int, incarnation: int) -> int:
    """The seed of a collector's exploration noise; independent of its environments' seeds."""
    return int(np.random.SeedSequence(run_seed, spawn_key=(1, collector_index, incarnation)).generate_state(1)[0])
