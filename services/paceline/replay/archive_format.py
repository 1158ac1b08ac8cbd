"""The file of an exported run: its parts, and a reader that believes none of its claims before it has checked them.

    tables/0/blocks/<first row>   the payload of a block, as its collector sent it
    tables/0/index.jsonl          a line for each block: its rows, its BlockHeader, size and SHA-256 of its payload
    tables/0/pages.jsonl          a line for each page of priorities and times sampled
    manifest.json                 format, run, its settings, and of each table: columns, counters, positions, SHA-256 of
                                  both lists
    manifest.json.sha256          of the manifest

It is a plain, uncompressed tar, and any program for those lists it and unpacks it.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import InvalidInputError
from paceline.replay.logged import LogState, Position
from paceline.rows import MAX_BLOCK_BYTES, Column, RowSpec

FORMAT = "paceline-replay-archive 1"

MAX_MEMBERS = 4_000_000
MAX_LINE_BYTES = 256 << 10
MAX_MANIFEST_BYTES = 64 << 20
_MEMBER = re.compile(r"tables/\d{1,5}/(?P<part>blocks/\d{1,16}|index\.jsonl|pages\.jsonl)|manifest\.json(\.sha256)?")
_RECORD = tarfile.BLOCKSIZE

Count = Annotated[int, Field(ge=0, le=2**53)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Base64 = Annotated[str, Field(max_length=MAX_LINE_BYTES)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ColumnEntry(_Model):
    """A column of a row."""

    name: str
    dtype: str
    shape: list[int]


class PositionEntry(_Model):
    """The last block of a collector."""

    collector_index: Count
    incarnation: Count
    sequence: Count
    stored_row_count: Count


class BlockEntry(_Model):
    """A line of a table's index."""

    first_row: Count
    row_count: Annotated[int, Field(ge=1, le=2**31)]
    header: Base64
    payload_bytes: Count
    payload_sha256: Digest


class PageEntry(_Model):
    """A line of a table's pages."""

    page: Count
    data: Base64


class TableEntry(_Model):
    """A table."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    shard: Annotated[int, Field(ge=0, lt=256)]
    columns: Annotated[list[ColumnEntry], Field(max_length=256)]
    row_bytes: Count
    limiter_json: Annotated[str, Field(max_length=1 << 16)]
    inserted: Count
    sampled: Count
    consumed: Count
    dropped: Count
    positions: Annotated[list[PositionEntry], Field(max_length=1 << 20)]
    block_count: Count
    row_count: Count
    payload_bytes: Count
    page_count: Count
    index_sha256: Digest
    pages_sha256: Digest
    damaged_blocks: Count
    """Blocks of the record that were damaged and are left out."""

    def row_spec(self) -> RowSpec:
        """The layout of its rows. Raises RowSpecError."""
        return RowSpec(tuple(Column(column.name, column.dtype, tuple(column.shape)) for column in self.columns))

    def state(self) -> LogState:
        """What its record says."""
        positions = {
            entry.collector_index: Position(entry.incarnation, entry.sequence, entry.stored_row_count)
            for entry in self.positions
        }
        return LogState(
            row_spec=self.row_spec(),
            limiter_json=self.limiter_json,
            inserted=self.inserted,
            sampled=self.sampled,
            consumed=self.consumed,
            dropped=self.dropped,
            positions=positions,
        )


class Manifest(_Model):
    """What an archive says of itself."""

    format: str
    paceline: str
    run_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}$")]
    exported_at: float
    """Seconds since 1970."""
    shards: Annotated[int, Field(ge=1, le=256)]
    tables: Annotated[list[TableEntry], Field(max_length=1 << 14)]
    settings: dict[str, Any] | None = None
    """Of the run, where the export knew its folder: the tree of its config.yaml, without where its Redis was."""

    @property
    def payload_bytes(self) -> int:
        """Of all blocks."""
        return sum(table.payload_bytes for table in self.tables)


Entry = TypeVar("Entry", BlockEntry, PageEntry)


class ArchiveReader:
    """An archive that is being read. Raises InvalidInputError wherever it is not one, or is not whole.

    Only headers of plain files are understood, one at a time: no link, no path out of the archive, no sparse file that
    claims terabytes and no extended header that wants memory can be in it.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._members: dict[str, tuple[int, int]] = {}
        self._unread: set[str] = set()
        self._find_members()

    def read_manifest(self) -> Manifest:
        """The manifest, whose checksum fits."""
        data = self.read("manifest.json", MAX_MANIFEST_BYTES)
        digest = hashlib.sha256(data).hexdigest()
        if self.read("manifest.json.sha256", 128).decode("ascii", "replace").strip() != digest:
            raise self.error("its manifest has another checksum than it says: expected an archive that nobody changed")
        try:
            manifest = Manifest.model_validate_json(data)
        except ValidationError as error:
            raise self.error(f"its manifest is none: {_first_problem(error)}") from error
        if manifest.format != FORMAT:
            raise self.error(f"its format is {manifest.format[:80]!r}: expected {FORMAT!r}")
        return manifest

    def read(self, name: str, limit: int) -> bytes:
        """A member of at most `limit` bytes."""
        offset, size = self._locate(name)
        if size > limit:
            raise self.error(f"{name} has {size} bytes: expected at most {limit}")
        self._file.seek(offset)
        data = self._file.read(size)
        if len(data) != size:
            raise self.error(f"{name} ends after {len(data)} of {size} bytes")
        return data

    def read_entries(self, name: str, kind: type[Entry], digest: str) -> Iterator[Entry]:
        """The lines of a list, whose SHA-256 is known only at the end: what comes before is not to be trusted yet."""
        offset, left = self._locate(name)
        sha, number = hashlib.sha256(), 0
        while left:
            self._file.seek(offset)
            line = self._file.readline(min(left, MAX_LINE_BYTES))
            number += 1
            if not line.endswith(b"\n"):
                raise self.error(f"line {number} of {name} does not end: expected at most {MAX_LINE_BYTES} bytes")
            sha.update(line)
            offset, left = offset + len(line), left - len(line)
            try:
                yield kind.model_validate_json(line)
            except ValidationError as error:
                raise self.error(f"line {number} of {name} is none: {_first_problem(error)}") from error
        if sha.hexdigest() != digest:
            raise self.error(f"{name} has another checksum than the manifest says")

    def require_nothing_else(self) -> None:
        """Raise InvalidInputError if a member was never read."""
        if self._unread:
            raise self.error(f"it holds {min(self._unread)}, which nothing refers to")

    def error(self, problem: str) -> InvalidInputError:
        """What is wrong with the archive."""
        return InvalidInputError(f"{self._path} is not a whole archive of a run: {problem}")

    def _locate(self, name: str) -> tuple[int, int]:
        if name not in self._members:
            raise self.error(f"{name} is missing")
        self._unread.discard(name)
        return self._members[name]

    def _find_members(self) -> None:
        size, offset = os.fstat(self._file.fileno()).st_size, 0
        while True:
            self._file.seek(offset)
            header = self._file.read(_RECORD)
            if header == bytes(_RECORD):
                break
            name, length = self._parse_header(header, offset)
            begin = offset + _RECORD
            offset = begin + -(-length // _RECORD) * _RECORD
            if offset > size:
                raise self.error(f"{name} claims {length} bytes and {size - begin} are left: the file is cut short")
            if name in self._members or len(self._members) >= MAX_MEMBERS:
                raise self.error(f"{name} comes twice, or after {MAX_MEMBERS} others")
            self._members[name] = (begin, length)
        self._unread = set(self._members)

    def _parse_header(self, header: bytes, offset: int) -> tuple[str, int]:
        try:
            info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError, ValueError) as error:
            raise self.error(f"byte {offset} begins no member: {error}") from error
        match = _MEMBER.fullmatch(info.name)
        if info.type != tarfile.REGTYPE or match is None or info.size < 0:
            raise self.error(
                f"its member {info.name[:100]!r} of type {info.type!r} has no place there: expected plain files "
                "with the names of a run's parts"
            )
        if (match["part"] or "").startswith("blocks/") and info.size > MAX_BLOCK_BYTES:
            raise self.error(f"{info.name} claims {info.size} bytes: expected at most {MAX_BLOCK_BYTES}")
        return info.name, info.size


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'the text'}: {problem['msg']}"
