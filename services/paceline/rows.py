"""Rows and blocks: one fixed-width layout for wire, store, ring and batch.

A row is `row_bytes` bytes. Its columns lie at fixed offsets, so a block of N rows is one `[N, row_bytes]` matrix of
bytes, and a column of it is a strided view that copies nothing. Torch is touched only by `torch_columns`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.errors import BlockError, RowSpecError

if TYPE_CHECKING:
    import torch

ByteMatrix = npt.NDArray[np.uint8]

MAX_ROW_BYTES = 64 << 20
"""A row above this is a mistake, or an attack: refused before anything is allocated."""
MAX_COLUMN_COUNT = 256
MAX_BLOCK_BYTES = 256 << 20
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
            end = _round_up(end, max(4, NUMPY_TYPES[column.dtype].itemsize))
            offsets[column.name] = end
            end += column.nbytes
        return offsets

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row, padding included."""
        last = self.columns[-1]
        return _round_up(self.offsets[last.name] + last.nbytes, 8)

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

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise RowSpecError(f"no column {name!r}: the row spec has {', '.join(self.offsets)}")

    def __contains__(self, name: object) -> bool:
        return name in self.offsets

    def require(self, columns: Sequence[Column]) -> None:
        """Raise RowSpecError unless each of these columns is here, with the same dtype and shape."""
        for wanted in columns:
            if self[wanted.name] != wanted:
                raise RowSpecError(f"the row spec has {self[wanted.name]}: expected {wanted}")

    def require_digest(self, digest: bytes) -> None:
        """Raise RowSpecError if `digest` is not this spec's."""
        if digest != self.digest:
            raise RowSpecError(
                f"row spec digest {digest.hex() or '(none)'}: expected {self.digest.hex()}, for columns "
                f"{', '.join(f'{c.name} {c.dtype}{list(c.shape)}' for c in self.columns)}; "
                "both sides must be built from the same environment and algorithm"
            )


def transition_spec(observation: Column, action: Column, *, reward_dtype: str = "float32") -> RowSpec:
    """The row of one environment step, as Paceline's collectors fill it (DESIGN: row and stamps).

    `observation` and `action` give dtype and shape; `next_observation` is laid out like `observation`.
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
            Column("collected_at", "float64"),  # seconds since 1970, by the collector's clock
            # Learner updates behind the policy that acted, so that lag compares across publish intervals.
            Column("policy_learner_step", "int64"),
            # (collector_index, collector_incarnation, episode) names a trajectory, across restarts too.
            Column("episode", "int64"),
            Column("collector_incarnation", "int32"),
            Column("terminated", "bool"),
            Column("truncated", "bool"),
        )
    )


@dataclass(frozen=True)
class Block:
    """N rows in one contiguous `[N, row_bytes]` byte matrix."""

    spec: RowSpec
    data: ByteMatrix

    @classmethod
    def empty(cls, spec: RowSpec, row_count: int) -> Block:
        """A block of zeroed rows to be filled through `columns`."""
        if row_count < 1 or row_count * spec.row_bytes > MAX_BLOCK_BYTES:
            raise BlockError(
                f"a block of {row_count} rows of {spec.row_bytes} bytes: expected 1 row or more "
                f"and at most {MAX_BLOCK_BYTES} bytes"
            )
        return cls(spec, np.zeros((row_count, spec.row_bytes), np.uint8))

    @classmethod
    def from_bytes(
        cls,
        spec: RowSpec,
        payload: bytes | memoryview,
        *,
        row_count: int,
        digest: bytes,
        checksum: int | None = None,
    ) -> Block:
        """View `payload` as a block, without a copy, after checking that it is one.

        Raises:
            RowSpecError: the digest is another spec's.
            BlockError: the length is not `row_count` rows, or the checksum differs.
        """
        spec.require_digest(digest)
        size = len(payload)
        if row_count < 1 or size != row_count * spec.row_bytes or size > MAX_BLOCK_BYTES:
            raise BlockError(
                f"a block says {row_count} rows and holds {size} bytes: expected "
                f"{max(row_count, 1) * spec.row_bytes} bytes, {spec.row_bytes} a row, at most {MAX_BLOCK_BYTES}"
            )
        if checksum is not None and zlib.crc32(payload) != checksum:
            raise BlockError(
                f"a block of {row_count} rows has checksum {zlib.crc32(payload):#010x}: "
                f"expected {checksum:#010x}; its bytes were damaged on the way or in the store"
            )
        return cls(spec, np.frombuffer(payload, np.uint8).reshape(row_count, spec.row_bytes))

    @property
    def row_count(self) -> int:
        """Rows in the block."""
        return len(self.data)

    @property
    def columns(self) -> npt.NDArray[Any]:
        """All columns as one structured view: `block.columns["reward"]` is `[N]`, and writes go to the block."""
        return numpy_columns(self.spec, self.data)

    def checksum(self) -> int:
        """CRC-32 of the bytes."""
        return zlib.crc32(self.data.data)

    def first(self, row_count: int) -> Block:
        """The first `row_count` rows, sharing memory."""
        return Block(self.spec, self.data[:row_count])


def numpy_columns(spec: RowSpec, data: ByteMatrix) -> npt.NDArray[Any]:
    """View `[N, row_bytes]` bytes as `[N]` records; fields are strided views that copy nothing."""
    return data.view(spec.dtype).reshape(len(data))


def torch_columns(spec: RowSpec, data: torch.Tensor, names: Sequence[str] | None = None) -> Mapping[str, torch.Tensor]:
    """View an `[N, row_bytes]` uint8 tensor as columns `[N, *shape]`, on any device, copying nothing.

    One host-to-device copy of `data` therefore moves all columns.
    """
    import torch

    columns: dict[str, torch.Tensor] = {}
    for column in spec.columns if names is None else [spec[name] for name in names]:
        offset = spec.offsets[column.name]
        window = data[:, offset : offset + column.nbytes].view(getattr(torch, column.dtype))
        columns[column.name] = window.unflatten(1, column.shape) if column.shape else window[:, 0]
    return columns


def find_non_finite(block: Block) -> str | None:
    """The name of the first floating column of the block that holds a NaN or an infinity, or None."""
    for column in block.spec.columns:
        if column.dtype not in FLOATING_TYPES:
            continue
        values = block.columns[column.name]
        if column.dtype == "bfloat16":  # widened by hand: exponent bits all set means not finite
            if bool(((values & 0x7F80) == 0x7F80).any()):
                return column.name
        elif not bool(np.isfinite(values).all()):
            return column.name
    return None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
