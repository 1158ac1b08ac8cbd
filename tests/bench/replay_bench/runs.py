"""The run that replay serves in the benchmark: nothing holds its inserts or samples back."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import Config, build
from replay_bench.workloads import BLOCK_ROWS

RUN = "bench"
TABLE = "transitions"
PRIORITISED = "prioritised"
MESSAGE_BYTES = 1 << 20
"""Of bulk data, in the product and in what it is measured against."""


def make_config(
    redis_url: str,
    address: str,
    ring_rows: int,
    *,
    tables: Sequence[str] = (TABLE,),
    read: str = "sample",
    batch_rows: int = 256,
    shares: bool = True,
) -> Config:
    """A run with these tables; `read` and `batch_rows` are of its learner, whose rows may go through memory if it
    `shares` any."""
    return build(
        {
            "run": {"id": RUN, "environment_steps": 1 << 40},
            "rpc": {"shared_memory": shares},
            "learner": {"updates": "learner_bound", "batch_size": batch_rows},
            "collector": {"block_rows": BLOCK_ROWS},
            "replay": {
                "redis_url": redis_url,
                "address": address,
                "listen": address,
                "metrics_listen": "127.0.0.1:0",
                "read": read,
                "tables": {
                    table: {
                        "capacity_rows": ring_rows,
                        "sampler": "prioritised" if table == PRIORITISED else "uniform",
                    }
                    for table in tables
                },
            },
        }
    )
