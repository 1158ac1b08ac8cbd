"""Draws by priority or by age under the bound on the lag: rows beyond it are skipped, others drawn in their place.

Such samplers know no versions. What they give is looked at, and what is left has the sampler's own distribution among
the rows within the bound. Where draws are counted, a row that is skipped was drawn: as no policy grows younger, the row
would only be skipped again.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import numpy.typing as npt

from paceline.errors import UnavailableError
from paceline.lag.bound import LagBound, LearnerVersion, Starvation
from paceline.rows import ByteMatrix, RowSpec, numpy_columns
from paceline.tables.memory import Drawn, TableMemory

FRUITLESS_DRAWS = 4096
"""After so many draws without one row within the bound there is next to no weight within it: wait for other rows."""

Versions = npt.NDArray[np.int64]


def oldest_versions(spec: RowSpec, rows: ByteMatrix) -> Versions:
    """`[n]` the policy version of each row; of an unroll that of its oldest step."""
    columns = numpy_columns(spec, rows)
    versions: Versions = columns["policy_version"].astype(np.int64).reshape(len(rows), -1)
    if "valid" in spec and versions.shape[1] > 1:
        versions = np.where(columns["valid"], versions, np.iinfo(np.int64).max)
    oldest: Versions = versions.min(axis=1)
    return oldest


class BoundedBatch:
    """One batch, filled with rows within the bound in as many attempts as it takes."""

    def __init__(
        self,
        memory: TableMemory,
        spec: RowSpec,
        random: np.random.Generator,
        out: ByteMatrix,
        *,
        policy_version: LearnerVersion,
        details: bool,
    ) -> None:
        """`out`, `[n, row_bytes]`, is to be filled. The bound is that of the memory's settings."""
        self.skipped_rows = 0
        """Draws that gave a row beyond the bound."""
        self._memory, self._spec, self._random, self._out = memory, spec, random, out
        self._policy_version, self._details = policy_version, details
        self._bound = LagBound(
            memory.settings.max_lag_versions, policy_version.base_version, memory.settings.bound_setting
        )
        self._newest = int(policy_version)
        self._filled, self._parts = 0, list[Drawn]()
        self._least_lag: int | None = None
        """Of the rows that were skipped."""

    def fill(self) -> Drawn | None:
        """Draw until the batch is full; what is known of its rows, if asked for.

        Raises:
            UnavailableError: not so many rows can be drawn now, and why. What was drawn stays for the next attempt.
        """
        fruitless = 0
        while self._filled < len(self._out):
            rows = self._out[self._filled :]
            drawn = self._memory.sample(self._random, rows, policy_version=self._policy_version, details=self._details)
            within = self._find_within(rows)
            if len(within) < len(rows):
                rows[: len(within)] = rows[within]
                drawn = None if drawn is None else _select(drawn, within)
            if drawn is not None:
                self._parts.append(drawn)
            self._filled += len(within)
            fruitless = 0 if len(within) else fruitless + len(rows)
            # Rows whose draws are counted leave as they are skipped: then this comes to an end by itself.
            if fruitless >= FRUITLESS_DRAWS and self._memory.drawable() is None:
                raise UnavailableError(str(self.find_starvation()))
        return _join(self._parts) if self._details else None

    def find_starvation(self) -> Starvation | None:
        """What to report when the bound keeps this batch from being filled; None where nothing was skipped."""
        most = self._memory.settings.max_lag_versions
        if most is None or self._least_lag is None:
            return None
        return Starvation(most, self._newest, self._filled, len(self._out), self._least_lag, self._bound.setting)

    def _find_within(self, rows: ByteMatrix) -> npt.NDArray[np.int64]:
        versions = oldest_versions(self._spec, rows)
        if not self._policy_version:
            self._newest = max(self._newest, int(versions.max()))  # nobody said: the rows' own newest holds
        beyond = self._bound.is_exceeded(versions, self._newest)
        if beyond.any():
            self.skipped_rows += int(np.count_nonzero(beyond))
            least = int(self._bound.effective_lag(versions[beyond], self._newest).min())
            self._least_lag = least if self._least_lag is None else min(self._least_lag, least)
        return np.flatnonzero(~beyond)


def _select(drawn: Drawn, places: npt.NDArray[np.int64]) -> Drawn:
    return Drawn(**{field.name: getattr(drawn, field.name)[places] for field in fields(Drawn)})


def _join(parts: list[Drawn]) -> Drawn:
    if len(parts) == 1:
        return parts[0]
    return Drawn(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Drawn)}
    )
