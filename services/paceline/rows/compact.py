"""The compact form of a block: a next observation that is a later row's observation travels once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import BlockError
from paceline.rows.block import MAX_BLOCK_BYTES, Block, ByteMatrix, require_checksum
from paceline.rows.spec import RowSpec, round_up

ByteVector = npt.NDArray[np.uint8]

NEXT = "next_"
_WORTH_SHARE = 0.9
"""A payload above this share of the plain one is not worth its decoding."""
_WORD_BYTES = 8


class BlockClaims(Protocol):
    """What a block's header says of its payload: fields of BlockHeader in rows.proto."""

    @property
    def row_count(self) -> int:
        """Rows in the block."""

    @property
    def row_spec_digest(self) -> bytes:
        """Digest of their row spec."""

    @property
    def checksum(self) -> int:
        """`checksum_of` the payload as it was sent."""

    @property
    def compact_stride(self) -> int:
        """0: the plain form; otherwise rows from one to that which goes on where it ends."""


def block_from_wire(spec: RowSpec, header: BlockClaims, payload: bytes | memoryview) -> Block:
    """The block of a payload as it was sent, in whichever form: a view of a plain one, new memory for a compact one.

    Nothing that the header claims is believed before it is checked.

    Raises:
        RowSpecError: the digest is another spec's.
        BlockError: the length is not that of so many rows in this form, the checksum differs, or the form is not one.
    """
    if header.compact_stride == 0:
        return Block.from_bytes(
            spec, payload, row_count=header.row_count, digest=header.row_spec_digest, checksum=header.checksum
        )
    spec.require_digest(header.row_spec_digest)
    require_checksum(payload, header.row_count, header.checksum)
    return CompactForm.of(spec).decode(payload, header.row_count, header.compact_stride)


@dataclass(frozen=True)
class _Copy:
    """So many bytes at one offset of a source row belong at another of a target row."""

    source: int
    target: int
    nbytes: int


class CompactForm:
    """Blocks of one row spec to and from the compact form; its layout is in rows.proto, at `compact_stride`.

    A pair is a column X and a column next_X of the same dtype and shape. Equal means equal bytes, so a NaN and the
    sign of a zero come back as they were.
    """

    def __init__(self, spec: RowSpec) -> None:
        self._spec, self._pairs = spec, _pairs_of(spec)
        if not self._pairs:
            return
        left_out = set(self._pairs.values())
        rest = RowSpec(tuple(column for column in spec.columns if column.name not in left_out))
        following = RowSpec(tuple(column for column in spec.columns if column.name in left_out))
        self._rest_bytes, self._next_bytes = rest.row_bytes, following.row_bytes
        self._next_in_row = _copies(spec, spec, self._pairs.items())
        self._rest_from_row = _copies(spec, rest, ((name, name) for name in rest.offsets))
        self._row_from_rest = _copies(rest, spec, ((name, name) for name in rest.offsets))
        self._next_from_row = _copies(spec, following, ((name, name) for name in following.offsets))
        self._row_from_next = _copies(following, spec, ((name, name) for name in following.offsets))
        self._row_from_later_rest = _copies(rest, spec, self._pairs.items())
        self._gaps = _gaps(spec)

    @staticmethod
    @lru_cache(maxsize=64)
    def of(spec: RowSpec) -> CompactForm:
        """The form of a spec, made once."""
        return CompactForm(spec)

    @property
    def pair_bytes(self) -> int:
        """Bytes of a row that may be left out; 0 when the spec has no pair."""
        return sum(self._spec[name].nbytes for name in self._pairs)

    def encode(self, block: Block, stride: int) -> ByteVector | None:
        """The payload of a block whose row i mostly goes on in row i + `stride`; None when it would hardly be smaller.

        The block is as Block.from_bytes takes it: its padding, which nobody reads, may come back different.
        """
        if not self._pairs:
            return None
        data, count = block.data, block.row_count
        is_kept = self._differing(data, stride)
        kept = np.flatnonzero(is_kept)
        rest_end, bits_end = self._ends(count)
        size = bits_end + len(kept) * self._next_bytes
        if size > _WORTH_SHARE * data.nbytes:
            return None
        payload = np.zeros(size, np.uint8)
        rest, following = self._views(payload, count)
        for copy in self._rest_from_row:
            rest[:, copy.target : copy.target + copy.nbytes] = data[:, copy.source : copy.source + copy.nbytes]
        bits = np.packbits(is_kept, bitorder="little")
        payload[rest_end : rest_end + len(bits)] = bits
        for copy in self._next_from_row:
            following[:, copy.target : copy.target + copy.nbytes] = data[kept, copy.source : copy.source + copy.nbytes]
        return payload

    def decode(self, payload: bytes | memoryview, row_count: int, stride: int) -> Block:
        """The block of a payload, in new memory; raises BlockError unless it is one."""
        kept = self._check(payload, row_count, stride)
        rest, following = self._views(np.frombuffer(payload, np.uint8), row_count)
        rows = np.empty((row_count, self._spec.row_bytes), np.uint8)
        for begin, end in self._gaps:
            rows[:, begin:end] = 0
        for copy in self._row_from_rest:
            rows[:, copy.target : copy.target + copy.nbytes] = rest[:, copy.source : copy.source + copy.nbytes]
        if stride < row_count:
            for copy in self._row_from_later_rest:
                rows[:-stride, copy.target : copy.target + copy.nbytes] = rest[
                    stride:, copy.source : copy.source + copy.nbytes
                ]
        for copy in self._row_from_next:
            rows[kept, copy.target : copy.target + copy.nbytes] = following[:, copy.source : copy.source + copy.nbytes]
        return Block(self._spec, rows)

    def _check(self, payload: bytes | memoryview, row_count: int, stride: int) -> npt.NDArray[np.int64]:
        """The rows whose next columns the payload holds. Raises BlockError unless it has its form, to the last byte."""
        row_bytes, size = self._spec.row_bytes, len(payload)
        if not self._pairs:
            raise BlockError(
                f"a block in compact form, of rows with columns {', '.join(self._spec.offsets)}: expected a column X "
                "and a column next_X like it, or the plain form"
            )
        if row_count < 1 or stride < 1 or row_count * row_bytes > MAX_BLOCK_BYTES:
            raise BlockError(
                f"a block in compact form says {row_count} rows of {row_bytes} bytes, stride {stride}: expected 1 or "
                f"more of both and at most {MAX_BLOCK_BYTES} bytes"
            )
        rest_end, bits_end = self._ends(row_count)
        if size < bits_end:
            raise BlockError(
                f"a block in compact form says {row_count} rows and holds {size} bytes: expected at least {bits_end}"
            )
        bits = np.unpackbits(np.frombuffer(payload, np.uint8)[rest_end:bits_end], bitorder="little")
        kept = np.flatnonzero(bits)
        if size != bits_end + len(kept) * self._next_bytes:
            raise BlockError(
                f"a block in compact form says {row_count} rows, marks {len(kept)} and holds {size} bytes: expected "
                f"{bits_end + len(kept) * self._next_bytes}"
            )
        first_last = max(row_count - stride, 0)
        if not bits[first_last:row_count].all() or bits[row_count:].any():
            raise BlockError(
                f"a block in compact form of {row_count} rows and stride {stride} marks rows that do not exist, or not "
                f"all from {first_last} on: expected those to have their next columns, for no row comes after them"
            )
        return kept

    def _differing(self, data: ByteMatrix, stride: int) -> npt.NDArray[np.bool_]:
        """[N] whether a row's next columns are not what the row `stride` after it begins with, or there is none."""
        differing = np.ones(len(data), np.bool_)
        if stride < len(data):
            differing[:-stride] = False
            for copy in self._next_in_row:
                begins = data[stride:, copy.source : copy.source + copy.nbytes]
                ends = data[:-stride, copy.target : copy.target + copy.nbytes]
                if copy.nbytes % _WORD_BYTES == 0:
                    begins, ends = begins.view(np.uint64), ends.view(np.uint64)
                differing[:-stride] |= (begins != ends).any(axis=1)
        return differing

    def _ends(self, row_count: int) -> tuple[int, int]:
        """Where the rows without their next columns end, and the bits behind them."""
        rest_end = row_count * self._rest_bytes
        return rest_end, rest_end + round_up(-(-row_count // 8), _WORD_BYTES)

    def _views(self, payload: ByteVector, row_count: int) -> tuple[ByteMatrix, ByteMatrix]:
        """The rows without their next columns, and the next columns behind the bits."""
        rest_end, bits_end = self._ends(row_count)
        return (
            payload[:rest_end].reshape(row_count, self._rest_bytes),
            payload[bits_end:].reshape(-1, self._next_bytes),
        )


def _pairs_of(spec: RowSpec) -> dict[str, str]:
    """Each column's next_ column, in the order of the latter; one that is left out itself stands in for no other."""
    pairs: dict[str, str] = {}
    for column in sorted(spec.columns, key=lambda column: len(column.name)):
        name = column.name.removeprefix(NEXT)
        if name == column.name or name not in spec or name in pairs.values():
            continue
        if (spec[name].dtype, spec[name].shape) == (column.dtype, column.shape):
            pairs[name] = column.name
    return {name: pairs[name] for name in sorted(pairs, key=lambda name: spec.offsets[pairs[name]])}


def _copies(source: RowSpec, target: RowSpec, names: Iterable[tuple[str, str]]) -> tuple[_Copy, ...]:
    """How columns of a source row come into a target row; neighbours in both at the same distance go together."""
    source_order, target_order = list(source.offsets), list(target.offsets)
    copies: list[_Copy] = []
    before = (-1, -1)
    for name, target_name in names:
        place = source_order.index(name), target_order.index(target_name)
        copy = _Copy(source.offsets[name], target.offsets[target_name], source[name].nbytes)
        last = copies[-1] if copies else copy
        joins = copies and place == (before[0] + 1, before[1] + 1)
        if joins and copy.source - last.source == copy.target - last.target:
            copies[-1] = _Copy(last.source, last.target, copy.source + copy.nbytes - last.source)
        else:
            copies.append(copy)
        before = place
    return tuple(copies)


def _gaps(spec: RowSpec) -> tuple[tuple[int, int], ...]:
    """Padding within and behind a row, as (begin, end)."""
    begins = [*spec.offsets.values(), spec.row_bytes]
    ends = [spec.offsets[column.name] + column.nbytes for column in spec.columns]
    return tuple((end, begin) for end, begin in zip(ends, begins[1:], strict=True) if end < begin)
