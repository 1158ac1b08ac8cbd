"""The layout of a row: columns at fixed offsets."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from paceline.errors import RowSpecError

MAX_ROW_BYTES = 64 << 20
"""A row above this is a mistake, or an attack: refused before anything is allocated."""
MAX_COLUMN_COUNT = 256
DIGEST_BYTES = 16
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")

# numpy has no bfloat16: its bits travel as uint16, and torch reads them as bfloat16.
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
    "int32": np.dtype("<i4"),
    "uint32": np.dtype("<u4"),
    "int64": np.dtype("<i8"),
}
FLOATING_TYPES = frozenset({"float32", "float64", "float16", "bfloat16"})


@dataclass(frozen=True)
class Column:
    """One column of a row: a name, an element type and the shape that one row holds (empty: a scalar)."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RowSpecError(f"column name {self.name!r}: expected a lower-case identifier of at most 64 characters")
        if self.dtype not in NUMPY_TYPES:
            raise RowSpecError(
                f"column {self.name!r} has dtype {self.dtype!r}: expected one of {', '.join(NUMPY_TYPES)}"
            )
        if len(self.shape) > 8 or any(size < 1 for size in self.shape):
            raise RowSpecError(f"column {self.name!r} has shape {self.shape}: expected at most 8 sizes, each 1 or more")
        # Python integers: a shape that claims 10^12 elements is counted, never allocated.
        if self.nbytes > MAX_ROW_BYTES:
            raise RowSpecError(
                f"column {self.name!r} has shape {self.shape}, {self.nbytes} bytes a row: "
                f"expected at most {MAX_ROW_BYTES}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of this column in one row."""
        return math.prod(self.shape) * NUMPY_TYPES[self.dtype].itemsize


@dataclass(frozen=True)
class RowSpec:
    """The layout of a row: columns in order, each at a multiple of max(4, its element size), padded to 8 bytes."""

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.columns) <= MAX_COLUMN_COUNT:
            raise RowSpecError(f"a row spec has {len(self.columns)} columns: expected 1 to {MAX_COLUMN_COUNT}")
        names = [column.name for column in self.columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise RowSpecError(f"column names appear twice: {', '.join(twice)}")
        if self.row_bytes > MAX_ROW_BYTES:
            raise RowSpecError(f"a row has {self.row_bytes} bytes: expected at most {MAX_ROW_BYTES}")

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each column within a row."""
        offsets, end = {}, 0
        for column in self.columns:
            end = round_up(end, max(4, NUMPY_TYPES[column.dtype].itemsize))
            offsets[column.name] = end
            end += column.nbytes
        return offsets

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row, padding included."""
        last = self.columns[-1]
        return round_up(self.offsets[last.name] + last.nbytes, 8)

    @cached_property
    def digest(self) -> bytes:
        """First 16 bytes of the SHA-256 of names, dtypes and shapes in order; equal layouts have equal digests."""
        layout = [[column.name, column.dtype, list(column.shape)] for column in self.columns]
        return hashlib.sha256(json.dumps(layout).encode()).digest()[:DIGEST_BYTES]

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The numpy structured dtype of one row."""
        return np.dtype(
            {
                "names": [column.name for column in self.columns],
                "formats": [(NUMPY_TYPES[column.dtype], column.shape) for column in self.columns],
                "offsets": [self.offsets[column.name] for column in self.columns],
                "itemsize": self.row_bytes,
            }
        )

    @cached_property
    def floating_runs(self) -> tuple[tuple[int, int, str, tuple[str, ...]], ...]:
        """Begin and end of neighbouring columns of one floating type without a gap, that type, and their names.

        Looked at together they cost a fraction of what they do one by one.
        """
        runs: list[tuple[int, int, str, tuple[str, ...]]] = []
        for column in self.columns:
            if column.dtype in FLOATING_TYPES:
                begin = self.offsets[column.name]
                names: tuple[str, ...] = (column.name,)
                if runs and runs[-1][1:3] == (begin, column.dtype):
                    last = runs.pop()
                    begin, names = last[0], last[3] + names
                runs.append((begin, self.offsets[column.name] + column.nbytes, column.dtype, names))
        return tuple(runs)

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise RowSpecError(f"no column {name!r}: the row spec has {', '.join(self.offsets)}")

    def __contains__(self, name: object) -> bool:
        return name in self.offsets

    def require_digest(self, digest: bytes) -> None:
        """Raise RowSpecError if `digest` is not this spec's."""
        if digest != self.digest:
            raise RowSpecError(
                f"row spec digest {digest.hex() or '(none)'}: expected {self.digest.hex()}, for columns "
                f"{', '.join(f'{c.name} {c.dtype}{list(c.shape)}' for c in self.columns)}; "
                "both sides must be built from the same environment and algorithm"
            )


def transition_spec(observation: Column, action: Column, *, reward_dtype: str = "float32") -> RowSpec:
    """The row of one environment step, or of n of them, as Paceline's collectors fill it.

    `observation` and `action` give dtype and shape; `next_observation` is laid out like `observation`. Of n steps
    `reward` is their discounted sum, `next_observation`, `terminated` and `truncated` are of the last one, the stamps
    of the first; what follows is discounted by gamma to the power of `step_count`.
    """
    return RowSpec(
        (
            Column("observation", observation.dtype, observation.shape),
            Column("action", action.dtype, action.shape),
            Column("reward", reward_dtype),
            Column("next_observation", observation.dtype, observation.shape),
            Column("behaviour_log_prob", "float32"),
            Column("policy_version", "int64"),
            Column("policy_incarnation", "int32"),
            Column("collector_index", "int32"),
            # Seconds since 1970 by the learner's clock, as the collector estimates it: when the step was taken, its
            # policy applied, its block sealed. 0: not known.
            Column("collected_at", "float64"),
            Column("policy_applied_at", "float64"),
            Column("sealed_at", "float64"),
            # Learner updates behind the policy that acted, so that lag compares across publish intervals.
            Column("policy_learner_step", "int64"),
            # (collector_index, collector_incarnation, episode) names a trajectory, across restarts too.
            Column("episode", "int64"),
            Column("collector_incarnation", "int32"),
            # Environment steps that the row spans: fewer than the algorithm's n where an episode ended.
            Column("step_count", "int32"),
            Column("terminated", "bool"),
            Column("truncated", "bool"),
        )
    )


def unroll_spec(observation: Column, action: Column, length: int, *, reward_dtype: str = "float32") -> RowSpec:
    """The row of `length` consecutive steps of one environment and the observation after them.

    `observation` has one entry more than the others: step t goes from observation t to observation t + 1, and
    observation 0 of an unroll is the last one of the unroll before it. An unroll may cross episodes: behind the last
    step of an episode, terminated or truncated, follows one step that is not `valid`, from the episode's real last
    observation to the first of the next. So a truncated step t bootstraps from observation t + 1 like any other. In a
    step that is not valid nothing was done: its action, reward and log-density are 0, it must not enter a loss, and no
    trace and no discount reach across it.
    """
    steps = (length,)
    return RowSpec(
        (
            Column("observation", observation.dtype, (length + 1, *observation.shape)),
            Column("action", action.dtype, (length, *action.shape)),
            Column("reward", reward_dtype, steps),
            Column("behaviour_log_prob", "float32", steps),
            Column("policy_version", "int64", steps),
            Column("policy_learner_step", "int64", steps),
            Column("collected_at", "float64", steps),
            Column("policy_applied_at", "float64", steps),
            Column("episode", "int64", steps),
            Column("policy_incarnation", "int32", steps),
            Column("collector_index", "int32"),
            Column("collector_incarnation", "int32"),
            Column("sealed_at", "float64"),
            Column("valid", "bool", steps),
            Column("terminated", "bool", steps),
            Column("truncated", "bool", steps),
        )
    )


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
