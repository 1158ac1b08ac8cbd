"""The index of a table's record: which blocks it has, as entries of a stream in Redis say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from paceline.v1 import rows_pb2


class IndexEntry(NamedTuple):
    """A block without its payload."""

    first_row: int
    end_row: int
    header: bytes
    epoch: int


def parse_index(entries: Sequence[tuple[bytes, list[bytes]]], first_row: int = 0) -> list[IndexEntry]:
    """The entries as they were read; what a damaged one lacks follows from the one before it."""
    index = []
    for identifier, pairs in entries:
        epoch, end = map(int, identifier.split(b"-"))
        end = end or epoch  # format 2 had ids `<key of the row after it>-0`, which come before all of an epoch
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
        text = fields.get(b"first_row", b"")
        first = int(text) if text.isdigit() and int(text) < end else min(first_row, end - 1)
        index.append(IndexEntry(first, end, fields.get(b"header", b""), epoch))
        first_row = end
    return index


def without_replaced(entries: Iterable[IndexEntry]) -> list[IndexEntry]:
    """The entries less those that a later one takes the place of: what one has ends those from there on before it.

    Blocks of one epoch never overlap, and a header says where its block is: an entry that claims rows of another
    against either is damaged. Of it only its id is believed, the end, and it takes no intact block before it along.
    """
    index: list[IndexEntry] = []
    for entry in entries:
        overlaps = bool(index) and entry.first_row < index[-1].end_row
        if overlaps and (index[-1].epoch == entry.epoch or header_of(entry) is None):
            while index and index[-1].end_row >= entry.end_row:
                index.pop()
            entry = entry._replace(first_row=max(entry.first_row, index[-1].end_row if index else 0))
        while index and index[-1].end_row > entry.first_row:
            index.pop()
        index.append(entry)
    return index


def oldest_row(entries: Sequence[tuple[bytes, list[bytes]]]) -> int | None:
    """Key of the first row that the first of these entries can give; None where there is no entry."""
    entry = next(iter(parse_index(entries)), None)
    if entry is None:
        return None
    return entry.end_row if header_of(entry) is None else entry.first_row


def header_of(entry: IndexEntry) -> rows_pb2.BlockHeader | None:
    """What an entry says of its block; None where it is damaged."""
    try:
        header = rows_pb2.BlockHeader.FromString(entry.header)
    except DecodeError:
        return None
    fits = (header.first_row, header.row_count) == (entry.first_row, entry.end_row - entry.first_row)
    return header if fits else None


def id_after(epoch: int, end_row: int) -> str:
    """The id below which an entry, and all before it, leave."""
    return f"{epoch}-{end_row + 1}"
