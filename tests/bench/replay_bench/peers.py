"""Other replay buffers on the same rows, where their packages are installed.

All but Reverb live in the learner's own process: no network, nothing durable. Each is filled with whole blocks and
sampled in batches, in the way that its documentation shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_bench.rounds import Moved, repeat_for
from replay_bench.workloads import BLOCK_ROWS, Columns, Workload

Values = Mapping[str, npt.NDArray[Any]]
Draw = Callable[[], object]
"""Samples one batch."""

REVERB_ROWS = 20_000
"""Reverb inserts a row at a time; its price is per row, whatever its table holds."""


def fill_torchrl(workload: Workload, values: Values, batch_rows: int) -> Draw:
    """TorchRL's LazyTensorStorage, with its uniform sampler."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    buffer = ReplayBuffer(storage=LazyTensorStorage(workload.ring_rows), batch_size=batch_rows)
    tensors = {name: torch.from_numpy(column) for name, column in values.items() if column.dtype != np.uint32}
    # Torch writes no uint32 through an index.
    tensors["policy_version"] = torch.from_numpy(values["policy_version"].view(np.int32))
    block = TensorDict(tensors, [BLOCK_ROWS])
    for _ in range(workload.ring_rows // BLOCK_ROWS):
        buffer.extend(block)
    return buffer.sample


def fill_cpprb(workload: Workload, values: Values, batch_rows: int) -> Draw:
    """The ReplayBuffer of cpprb."""
    import cpprb

    columns = {name: {"shape": column.shape[1:] or 1, "dtype": column.dtype} for name, column in values.items()}
    buffer = cpprb.ReplayBuffer(workload.ring_rows, columns)
    for _ in range(workload.ring_rows // BLOCK_ROWS):
        buffer.add(**values)
    return lambda: buffer.sample(batch_rows)


def fill_stable_baselines3(workload: Workload, values: Values, batch_rows: int) -> Draw:
    """The ReplayBuffer of Stable-Baselines3, whose observation is one vector, with 64 environments a step."""
    import gymnasium
    from stable_baselines3.common.buffers import ReplayBuffer

    environments = 64
    joined, following = (
        np.concatenate([values[name] for name in values if name.endswith("observation") and name.startswith(start)], 1)
        for start in (("observation", "critic"), "next_")
    )
    action = values["action"]
    buffer = ReplayBuffer(
        workload.ring_rows,
        gymnasium.spaces.Box(-np.inf, np.inf, joined.shape[1:], np.float32),
        gymnasium.spaces.Box(-1.0, 1.0, action.shape[1:], np.float32),
        device="cpu",
        n_envs=environments,
    )
    nothing: list[dict[str, Any]] = [{} for _ in range(environments)]
    for step in range(workload.ring_rows // environments):
        begin = step * environments % BLOCK_ROWS
        part = slice(begin, begin + environments)
        ended = values["ended"][part, 0]
        buffer.add(joined[part], following[part], action[part], values["reward"][part], ended, nothing)
    return lambda: buffer.sample(batch_rows)


def fill_reverb(workload: Workload, values: Values, batch_rows: int) -> Draw:
    """Reverb's server in this process, a row as one column of bytes: the fastest way that was found."""
    import reverb
    import tensorflow

    table = reverb.Table(
        "rows",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=REVERB_ROWS,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature={"row": tensorflow.TensorSpec([1, workload.spec.row_bytes], tensorflow.uint8)},
    )
    server = reverb.Server([table])
    address = f"localhost:{server.port}"
    with reverb.Client(address).trajectory_writer(num_keep_alive_refs=1) as writer:
        for number in range(REVERB_ROWS):
            row = np.frombuffer(b"".join(column[number % BLOCK_ROWS].tobytes() for column in values.values()), np.uint8)
            writer.append({"row": np.resize(row, workload.spec.row_bytes)})
            writer.create_item("rows", 1.0, {"row": writer.history["row"][-1:]})
            if number % 32 == 0:
                writer.flush()
    dataset = reverb.TrajectoryDataset.from_table_signature(
        address, "rows", max_in_flight_samples_per_worker=512, num_workers_per_iterator=2
    )
    batches = iter(dataset.batch(batch_rows).prefetch(2))
    return lambda: (server, next(batches))  # the server lives as long as its reader


PEERS: dict[str, tuple[str, Callable[[Workload, Values, int], Draw]]] = {
    "TorchRL": ("torchrl", fill_torchrl),
    "cpprb": ("cpprb", fill_cpprb),
    "Stable-Baselines3": ("stable-baselines3", fill_stable_baselines3),
    "Reverb": ("dm-reverb", fill_reverb),
}
"""Package and adapter of each."""


def peer_versions() -> dict[str, str | None]:
    """The version of each peer, by its name; None where it is not installed."""
    found: dict[str, str | None] = {}
    for name, (package, _) in PEERS.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = None
    return found


class Peers:
    """A filled buffer of each peer that is installed."""

    def __init__(self, workload: Workload, batch_rows: int) -> None:
        self._batch_rows, values = batch_rows, Columns(workload.spec).values
        self._draws = {
            name: PEERS[name][1](workload, values, batch_rows) for name, there in peer_versions().items() if there
        }

    def sample(self, name: str, seconds: float) -> Moved:
        """Rows of whole batches."""
        return repeat_for(seconds, self._batch_rows, self._draws[name])
