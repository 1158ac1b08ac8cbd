"""What its own data path costs a learner: updates/s beside 250 MB/s of batches, against none.

The training thread takes batches as the real loop does, one before an update where the pace asks for one; an update
reads the first rows of it. A collector inserts all the while, an eighth of the bytes that are sampled, with and without
a data path.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from paceline.actors import build_actor, squashed_gaussian_semantics
from paceline.learner.algorithms import TransitionBatch, build_algorithm
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import BatchSource
from paceline.learner.sources.opening import open_followed, open_samples
from paceline.rpc.client import open_channel
from replay_bench.clients import ProductWriter
from replay_bench.processes import Remote, ServerProcess, free_address
from replay_bench.product import serve_product
from replay_bench.rounds import Extent, Figures, Moved, Turn, take_turns
from replay_bench.runs import make_config
from replay_bench.stores import Store
from replay_bench.workloads import ACTION_DIM, OBSERVATION_DIM, Columns, Workload

BYTES_PER_SECOND = 250e6
SAMPLES_PER_INSERT = 8
UPDATE_ROWS = 256
BATCH_ROWS = 1024
"""Large enough that one batch before each update gives the pace."""
TURN_SHARE = 2.2
"""Of a turn's seconds: differences of a few per cent show in longer ones only."""
WAIT_SECONDS = 60.0


class TrainingLearner:
    """SAC, and whichever source of batches is asked for."""

    def __init__(self, address: str, workload: Workload) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._address, self._workload = address, workload
        semantics = squashed_gaussian_semantics(
            OBSERVATION_DIM, hidden=(256, 256), action_low=[-1.0] * ACTION_DIM, action_high=[1.0] * ACTION_DIM
        )
        self._algorithm = build_algorithm({"name": "sac"}, build_actor(semantics), seed=0)
        self._fixed = torch.from_numpy(Columns(workload.spec, BATCH_ROWS).pack().data)

    def train(self, read: str, seconds: float) -> tuple[Moved, Moved]:
        """Updates, and bytes of batches that were taken meanwhile."""
        with ExitStack() as stack:
            source = self._open(stack, read)
            if source is not None:
                source.next_batch(WAIT_SECONDS)  # all the rows have come that have to come first
            return self._train(source, seconds)

    def _train(self, source: BatchSource | None, seconds: float) -> tuple[Moved, Moved]:
        spec, rows = self._workload.spec, self._fixed
        updates, taken_bytes, began = 0, 0, time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            while source is not None and taken_bytes < passed * BYTES_PER_SECOND:
                rows = source.next_batch(WAIT_SECONDS).rows
                taken_bytes += rows.nbytes
            self._algorithm.update(TransitionBatch.from_rows(spec, rows[:UPDATE_ROWS]))
            updates += 1
        self._algorithm.check_finite()
        return Moved(updates, passed), Moved(taken_bytes, passed)

    def _open(self, stack: ExitStack, read: str) -> BatchSource | None:
        if read == "none":
            return None
        shares, read = read.startswith("shared_"), read.removeprefix("shared_")
        config = make_config(
            "unix:///none", self._address, self._workload.ring_rows, read=read, batch_rows=BATCH_ROWS, shares=shares
        )
        spec, device = self._workload.spec, torch.device("cpu")
        metrics = LearnerMetrics(CollectorRegistry())
        if read == "sample":
            source = open_samples(config, spec, seed=0, metrics=metrics, device=device)
        else:
            channel = stack.enter_context(open_channel(self._address, config.rpc))
            source = open_followed(config, [channel], spec, seed=0, metrics=metrics, device=device)
        stack.callback(source.close)
        return source


def measure_training(workload: Workload, extent: Extent, folder: Path, redis_binary: Path | None) -> Figures:
    """Figures of a learner of `workload`, whose rows are transitions as collectors fill them."""
    with ExitStack() as stack:
        store = Store(stack, folder / "training", redis_binary)
        address = free_address()
        ServerProcess(stack, serve_product, store.url, address, workload.ring_rows)
        writer = Remote(stack, ProductWriter, address, workload).ready()
        writer.call("fill", workload.ring_rows)
        learner = Remote(stack, TrainingLearner, address, workload).ready()
        rows_per_second = BYTES_PER_SECOND / SAMPLES_PER_INSERT / workload.spec.row_bytes

        def turn(read: str) -> Turn:
            def train(seconds: float) -> dict[str, float]:
                writer.start("insert", seconds * TURN_SHARE, "plain", rows_per_second)
                updates, taken = learner.call("train", read, seconds * TURN_SHARE)
                writer.result()
                return {
                    f"training.{read}_updates_per_s": updates.per_second,
                    f"training.{read}_bytes_per_s": taken.per_second,
                }

            return train

        reads = ("none", "shared_sample", "sample", "shared_follow", "follow")
        return take_turns("training", [turn(read) for read in reads], extent, store.settle)
