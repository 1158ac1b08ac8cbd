"""A learner that follows: samples from its own ring, and whether it keeps up with inserts at full rate."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources.opening import open_followed
from paceline.rpc.client import open_channel
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import replay_pb2_grpc
from replay_bench.clients import ProductWriter
from replay_bench.processes import Remote, ServerProcess, free_address
from replay_bench.product import serve_product
from replay_bench.rounds import Extent, Figures, Moved, repeat_by_turns, take_turns
from replay_bench.runs import RUN, make_config
from replay_bench.stores import Store
from replay_bench.workloads import Workload

BATCH_ROWS = 8192
SHORT_SHARE = 0.25
"""Of a turn's seconds, for each of what happens within one process."""
WAIT_SECONDS = 60.0
WATCH_SECONDS = 0.05
"""Between two looks at how far the follower is."""


@dataclass(frozen=True)
class Progress:
    """Rows that the table ever got, and how many of them the follower has got."""

    inserted: int
    followed: int


class FollowingLearner:
    """A learner's copy of a table."""

    def __init__(self, address: str, workload: Workload) -> None:
        torch.set_num_threads(1)
        config = make_config("unix:///none", address, workload.ring_rows, read="follow", batch_rows=BATCH_ROWS)
        self._registry = CollectorRegistry()
        channel = open_channel(address, config.rpc)
        self._stub = replay_pb2_grpc.ReplayServiceStub(channel)
        self._source = open_followed(
            config,
            [channel],
            workload.spec,
            seed=0,
            metrics=LearnerMetrics(self._registry),
            device=torch.device("cpu"),
        )
        # The very same memory, without the source around it. A plain matrix in pages of its own may be a fifth quicker
        # or slower, as the machine happens to back them.
        self._rows = self._source._memory._ring._rows._rows
        self._out = np.empty((BATCH_ROWS, workload.spec.row_bytes), np.uint8)
        self._random, self._ring_rows = np.random.default_rng(0), workload.ring_rows

    def compare(self, seconds: float) -> list[Moved]:
        """Rows of batches as the training loop takes them, and rows that numpy gathers, from places drawn alike."""

        def take() -> None:
            index = self._random.integers(0, self._ring_rows, BATCH_ROWS)
            np.take(self._rows, index, axis=0, out=self._out, mode="clip")

        return repeat_by_turns(seconds, BATCH_ROWS, [partial(self._source.next_batch, WAIT_SECONDS), take])

    def watch(self, seconds: float) -> list[Progress]:
        """Where table and copy are, looked at again and again."""
        seen, until = [self._progress()], time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(WATCH_SECONDS)
            seen.append(self._progress())
        return seen

    def _progress(self) -> Progress:
        batch = self._source.next_batch(WAIT_SECONDS)
        behind = self._registry.get_sample_value("paceline_learner_follow_behind_rows", {"shard": "0"})
        answer = self._stub.DescribeTables(pb.DescribeTablesRequest(run_id=RUN), timeout=WAIT_SECONDS)
        return Progress(answer.tables[0].inserted_row_count, batch.inserted_row_count - int(behind or 0))


class FollowingSuite:
    """A service, a writer, and a learner that follows what it writes."""

    def __init__(self, stack: ExitStack, workload: Workload, folder: Path, redis_binary: Path | None) -> None:
        self._workload = workload
        self._store = Store(stack, folder / f"{workload.name}-followed", redis_binary)
        address = free_address()
        ServerProcess(stack, serve_product, self._store.url, address, workload.ring_rows)
        self._writer = Remote(stack, ProductWriter, address, workload).ready()
        self._writer.call("fill", workload.ring_rows)
        self._learner = Remote(stack, FollowingLearner, address, workload).ready()

    def settle(self) -> None:
        """Wait until Redis does nothing of its own."""
        self._store.settle()

    def compare(self, seconds: float) -> dict[str, float]:
        """A turn of the learner's own samples and of numpy's gather."""
        sampled, taken = self._learner.call("compare", seconds * SHORT_SHARE)
        return self._figures(follow_sample_rows_per_s=sampled.per_second, follow_take_rows_per_s=taken.per_second)

    def keep_up(self, seconds: float) -> dict[str, float]:
        """A turn of inserts as fast as they go: how many of them the learner got in the same time."""
        self._writer.start("insert", seconds)
        seen: list[Progress] = self._learner.call("watch", seconds)
        self._writer.result()
        first, last = seen[0], seen[-1]
        return self._figures(
            inserted_beside_follower_rows_per_s=(last.inserted - first.inserted) / seconds,
            followed_rows_per_s=(last.followed - first.followed) / seconds,
            follower_behind_rows=statistics.median(each.inserted - each.followed for each in seen),
        )

    def _figures(self, **values: float) -> dict[str, float]:
        return {f"{self._workload.name}.{name}": value for name, value in values.items()}


def measure_following(workload: Workload, extent: Extent, folder: Path, redis_binary: Path | None) -> Figures:
    """Figures of one workload."""
    with ExitStack() as stack:
        suite = FollowingSuite(stack, workload, folder, redis_binary)
        turns = [suite.compare, suite.keep_up]
        return take_turns(f"{workload.name} following", turns, extent, suite.settle)
