"""Rows and blocks: one fixed-width layout for wire, store, ring and batch.

A row is `row_bytes` bytes. Its columns lie at fixed offsets, so a block of N rows is one `[N, row_bytes]` matrix of
bytes, and a column of it is a strided view that copies nothing. Torch is touched only by `torch_columns`.
"""

from paceline.rows.block import (
    MAX_BLOCK_BYTES,
    Block,
    ByteMatrix,
    checksum_of,
    find_non_finite,
    numpy_columns,
    torch_columns,
)
from paceline.rows.compact import BlockClaims, CompactForm, block_from_wire
from paceline.rows.spec import (
    DIGEST_BYTES,
    FLOATING_TYPES,
    MAX_COLUMN_COUNT,
    MAX_ROW_BYTES,
    NUMPY_TYPES,
    Column,
    RowSpec,
    transition_spec,
    unroll_spec,
)

__all__ = [
    "DIGEST_BYTES",
    "FLOATING_TYPES",
    "MAX_BLOCK_BYTES",
    "MAX_COLUMN_COUNT",
    "MAX_ROW_BYTES",
    "NUMPY_TYPES",
    "Block",
    "BlockClaims",
    "ByteMatrix",
    "Column",
    "CompactForm",
    "RowSpec",
    "block_from_wire",
    "checksum_of",
    "find_non_finite",
    "numpy_columns",
    "torch_columns",
    "transition_spec",
    "unroll_spec",
]
