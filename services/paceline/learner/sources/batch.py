"""What the training loop knows of where its rows come from: only this."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import DeadlineError

SHARD_BITS = 48
"""With several shards, the shard's number stands above this many bits of a row's key."""


class RowsEndedError(DeadlineError):
    """Every row that the run asked for was in a batch: of a queue, whose rows come once, there is none any more."""


@dataclass(frozen=True)
class Batch:
    """Rows to train on, valid until the next batch is taken."""

    rows: Tensor
    """`[batch_size, row_bytes]` uint8 on the learner's device."""
    table_row_count: int
    """Rows in the table, over all its shards."""
    inserted_row_count: int
    """Rows ever inserted, over all shards, as of when the batch was drawn."""
    keys: npt.NDArray[np.int64] | None = None
    """`[batch_size]` names of the rows for `update_priorities`; None where nobody asks."""
    probabilities: npt.NDArray[np.float32] | None = None
    """`[batch_size]` the probability with which one draw gave each row; None where nobody asks."""
    stored_at: npt.NDArray[np.float64] | None = None
    """`[batch_size]` when replay stored each row, in seconds since 1970 by the learner's clock; 0 where that is not
    known. None where nobody asks."""
    drawable_row_count: int | None = None
    """Rows of the table that the bound on the lag lets be drawn, each as likely as the others; None: no such bound."""

    @property
    def skipped_row_count(self) -> float:
        """Rows beyond the bound that would have come with these if the bound did not keep them from being drawn."""
        if not self.drawable_row_count:
            return 0.0
        beyond = max(self.table_row_count - self.drawable_row_count, 0)
        return len(self.rows) * beyond / self.drawable_row_count

    def select(self, places: npt.NDArray[np.int64]) -> Batch:
        """The batch of the rows at these places."""
        keys, probabilities, stored_at = self.keys, self.probabilities, self.stored_at
        return replace(
            self,
            rows=self.rows[torch.from_numpy(places).to(self.rows.device)],
            keys=None if keys is None else keys[places],
            probabilities=None if probabilities is None else probabilities[places],
            stored_at=None if stored_at is None else stored_at[places],
        )


class BatchSource(Protocol):
    """Gives batches to the learner, however they get here. Used by one thread."""

    def next_batch(self, seconds: float) -> Batch:
        """The next batch; the one before counts as learned from.

        Raises:
            DeadlineError: there is none within `seconds`; says why. StarvedError where the bound on the lag is why,
                RowsEndedError where there will be none any more since all were given.
            PacelineError: there will be none any more.
        """

    def update_priorities(self, keys: npt.NDArray[np.int64], priorities: npt.NDArray[np.float32]) -> None:
        """Have new priorities of rows sent, some time soon. Never waits; what cannot be sent is dropped and counted."""

    def set_policy_version(self, version: int) -> None:
        """Note the newest policy version, for samplers that weigh rows by theirs."""

    def close(self) -> None:
        """Stop fetching."""


@dataclass(frozen=True)
class RowCounts:
    """Rows of one shard; each field is as that of `Batch`."""

    table_row_count: int = 0
    inserted_row_count: int = 0
    drawable_row_count: int | None = None


class ShardSource(BatchSource, Protocol):
    """The source of one shard."""

    @property
    def counts(self) -> RowCounts | None:
        """Rows of the shard by newer news than the last batch; None: there are none, or it lacks rows for a first one.

        Never waits or asks.
        """

    def give_back(self, row_count: int) -> None:
        """So many rows of the batch before the last one were not learned from: have them count as not drawn."""

    @property
    def is_away(self) -> bool:
        """Whether replay was asked and cannot be reached or serves nobody, so that waiting for it may take any time."""
