"""An algorithm's state restored strictly: all of it or nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.errors import CheckpointError

GENERATOR = "generator"
"""Name of the random generator's state among the tensors."""


@torch.no_grad()
def load(mine: Mapping[str, Tensor], generator: torch.Generator, saved: Mapping[str, Tensor]) -> None:
    """Copy `saved` into the tensors of `mine`, in place, and its generator's state into `generator`.

    Raises:
        CheckpointError: a name is missing or unknown, or a tensor has another dtype or shape. Nothing was changed then.
    """
    wanted = {**mine, GENERATOR: generator.get_state()}
    missing, unknown = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if missing or unknown:
        raise CheckpointError(
            f"the checkpoint lacks {missing} and has unknown {unknown}: expected the tensors of this algorithm and "
            "actor exactly; resume with the settings that it was saved with"
        )
    for name, tensor in wanted.items():
        if saved[name].dtype != tensor.dtype or saved[name].shape != tensor.shape:
            raise CheckpointError(
                f"the checkpoint's {name!r} is {saved[name].dtype}{list(saved[name].shape)}: expected "
                f"{tensor.dtype}{list(tensor.shape)}; resume with the settings that it was saved with"
            )
    for name, tensor in mine.items():
        tensor.copy_(saved[name])
    generator.set_state(saved[GENERATOR].cpu())
