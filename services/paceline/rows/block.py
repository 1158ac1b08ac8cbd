"""Blocks: N rows in one contiguous matrix of bytes, and views of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from paceline.errors import BlockError
from paceline.rows.spec import NUMPY_TYPES, RowSpec

if TYPE_CHECKING:
    import torch

ByteMatrix = npt.NDArray[np.uint8]

MAX_BLOCK_BYTES = 256 << 20


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
        if checksum is not None:
            require_checksum(payload, row_count, checksum)
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
        """`checksum_of` the bytes."""
        return checksum_of(self.data.data)

    def first(self, row_count: int) -> Block:
        """The first `row_count` rows, sharing memory."""
        return Block(self.spec, self.data[:row_count])


def checksum_of(payload: bytes | memoryview) -> int:
    """XXH3, 64 bits: it notices damage, not malice. zlib's CRC-32 is ten times as slow, which inserts would feel."""
    return xxhash.xxh3_64_intdigest(payload)


def require_checksum(payload: bytes | memoryview, row_count: int, expected: int) -> None:
    """Raise BlockError if a block's payload has another checksum."""
    checksum = checksum_of(payload)
    if checksum != expected:
        raise BlockError(
            f"a block of {row_count} rows has checksum {checksum:#018x}: expected {expected:#018x}; "
            "its bytes were damaged on the way or in the store"
        )


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
    for begin, end, dtype, names in block.spec.floating_runs:
        if not _are_finite(block.data[:, begin:end].view(NUMPY_TYPES[dtype]), dtype):
            return next(name for name in names if not _are_finite(block.columns[name], dtype))
    return None


def _are_finite(values: npt.NDArray[Any], dtype: str) -> bool:
    if dtype == "bfloat16":  # as uint16: exponent bits all set means not finite
        return not bool(((values & 0x7F80) == 0x7F80).any())
    # A sum is finite only if every value is, and needs a third of the time; one of finite values may overflow.
    if values.ndim == 2 and dtype != "float16" and np.isfinite(np.einsum("ij->", values)):
        return True
    return bool(np.isfinite(values).all())
