"""A run's record from the file that an export wrote. Everything is verified before anything is written."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from paceline.errors import ConflictError, InvalidInputError, NotFoundError, PacelineError
from paceline.replay.archive_format import ArchiveReader, BlockEntry, Manifest, PageEntry, TableEntry
from paceline.replay.log import RedisLog
from paceline.replay.log_reader import PAGE_STEP
from paceline.replay.logged import BlockWrite, LoggedBlock, LogState
from paceline.replay.record import Progress, check_block, open_stores, remove_keys, require_empty, write_note
from paceline.replay.store import FORMAT, RedisStore
from paceline.rows import MAX_BLOCK_BYTES
from paceline.tables.pages import PAGE, PAGE_ROWS
from paceline.v1 import rows_pb2

IMPORTING = "being imported"
"""The format of a record until it is whole, so that no replay process takes it for one."""


def read_manifest(path: Path) -> Manifest:
    """What an archive says of itself; its blocks are not read. Raises NotFoundError, InvalidInputError."""
    with _open(path) as file:
        return ArchiveReader(path, file).read_manifest()


def import_run(path: Path, url: str, *, run_id: str | None = None, progress: Progress) -> Manifest:
    """Bring an archive into a Redis that has nothing of the run, after every byte of it was verified.

    Args:
        path: the archive.
        url: of the Redis; `{shard}` in it stands for the shard's number.
        run_id: the run that it becomes; None: the one that it was.
        progress: half of the way is the verification.

    Raises:
        NotFoundError: there is no such file. InvalidInputError: it is no whole archive, or claims what cannot be.
        ConflictError: Redis has something of the run.
        PacelineError: Redis failed or is full; what had been written is removed again where it still can be.
    """
    with _open(path) as file:
        archive = ArchiveReader(path, file)
        manifest = archive.read_manifest()
        total, done = 2 * sum(table.payload_bytes for table in manifest.tables), 0
        for size in _verify(archive, manifest):
            done += size
            progress(min(done, total), total)
        target = run_id or manifest.run_id
        stores = open_stores(url, target, manifest.shards)
        try:
            require_empty(stores, target)
            for size in _write_record(archive, manifest, stores):
                done += size
                progress(min(done, total), total)
        finally:
            for store in stores:
                store.close()
    return manifest


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise NotFoundError(
            f"{path} cannot be read: {error}; expected a file that `paceline replay export` wrote"
        ) from error


def _verify(archive: ArchiveReader, manifest: Manifest) -> Iterator[int]:
    """Check all of an archive; yields the bytes of each block that is whole."""
    places = [(table.shard, table.name) for table in manifest.tables]
    if len(set(places)) != len(places) or any(shard >= manifest.shards for shard, _ in places):
        raise archive.error("its manifest names a table twice, or a shard that there is not")
    for number, table in enumerate(manifest.tables):
        spec, shown = table.row_spec(), f"table {table.name!r}"
        # Of `dropped` nothing is asked: it was once counted again at each start of a learner.
        if spec.row_bytes != table.row_bytes or table.consumed > table.inserted:
            raise archive.error(
                f"{shown} contradicts itself: its row has {spec.row_bytes} bytes, or its counters differ"
            )
        known: dict[int, tuple[int, int]] = {}
        end = blocks = rows = size = pages = 0
        for logged in _read_blocks(archive, number, table):
            try:
                header, _ = check_block(spec, logged)
            except InvalidInputError as error:
                raise archive.error(f"the block of row {logged.first_row} of {shown}: {error}") from error
            place = (header.collector_incarnation, header.sequence)
            if logged.first_row < end or logged.end_row > table.inserted:
                raise archive.error(f"the block of row {logged.first_row} of {shown} is not where it could be")
            if place <= known.get(header.collector_index, (0, 0)):
                raise archive.error(f"the block of row {logged.first_row} of {shown} repeats one before it")
            known[header.collector_index], end = place, logged.end_row
            blocks, rows, size = blocks + 1, rows + logged.row_count, size + len(logged.payload)
            yield len(logged.payload)
        for page, data in _read_pages(archive, number, table):
            if page * PAGE_ROWS >= table.inserted or len(data) != PAGE.itemsize:
                raise archive.error(f"page {page} of {shown} is of rows that it never had, or of another size")
            pages += 1
        said = (table.block_count, table.row_count, table.payload_bytes, table.page_count)
        if (blocks, rows, size, pages) != said:
            raise archive.error(
                f"{shown} has {(blocks, rows, size, pages)} blocks, rows, bytes and pages: expected {said}"
            )
    archive.require_nothing_else()


def _read_blocks(archive: ArchiveReader, number: int, table: TableEntry) -> Iterator[LoggedBlock]:
    for entry in archive.read_entries(f"tables/{number}/index.jsonl", BlockEntry, table.index_sha256):
        payload = archive.read(f"tables/{number}/blocks/{entry.first_row}", MAX_BLOCK_BYTES)
        if len(payload) != entry.payload_bytes or hashlib.sha256(payload).hexdigest() != entry.payload_sha256:
            raise archive.error(f"the block of row {entry.first_row} has another checksum than the index says")
        yield LoggedBlock(entry.first_row, entry.row_count, _decode(archive, entry.header), payload)


def _read_pages(archive: ArchiveReader, number: int, table: TableEntry) -> Iterator[tuple[int, bytes]]:
    for entry in archive.read_entries(f"tables/{number}/pages.jsonl", PageEntry, table.pages_sha256):
        yield entry.page, _decode(archive, entry.data)


def _decode(archive: ArchiveReader, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise archive.error(f"a line is no base64: {error}") from error


def _write_record(archive: ArchiveReader, manifest: Manifest, stores: Sequence[RedisStore]) -> Iterator[int]:
    """Write what was verified; yields the bytes of each block."""
    begun: list[RedisStore] = []
    try:
        for store in stores:
            if not store.command("HSETNX", store.key("meta"), "format", IMPORTING):
                raise ConflictError("another process has begun the same run in Redis meanwhile; choose another id")
            begun.append(store)
            write_note(store, manifest.shards)
            store.command("SET", store.key("owner"), store.token)
        for number, table in enumerate(manifest.tables):
            yield from _write_table_record(archive, number, table, RedisLog(stores[table.shard], table.name))
        for store in stores:
            store.command("HSET", store.key("meta"), "format", FORMAT)
    except BaseException:
        for store in begun:
            with suppress(PacelineError):
                remove_keys(store)
        raise


def _write_table_record(archive: ArchiveReader, number: int, table: TableEntry, log: RedisLog) -> Iterator[int]:
    state, end = table.state(), None
    for block in _read_blocks(archive, number, table):
        if end is None:
            end = block.first_row
            log.begin(LogState(state.row_spec, state.limiter_json, inserted=end))
        header = rows_pb2.BlockHeader.FromString(block.header)
        if not log.append([BlockWrite(block, header, after=end)]):
            raise archive.error(f"the block of row {block.first_row} repeats one before it")
        end = block.end_row
        yield len(block.payload)
    if end is None:
        log.begin(state)
        end = state.inserted
    log.restate(state, end)
    pages: dict[int, bytes] = {}
    first_page = None
    for page, data in _read_pages(archive, number, table):
        first_page = page if first_page is None else first_page
        pages[page] = data
        if len(pages) == PAGE_STEP:
            _save_pages(log, state, pages, first_page)
            pages = {}
    if pages and first_page is not None:
        _save_pages(log, state, pages, first_page)


def _save_pages(log: RedisLog, state: LogState, pages: dict[int, bytes], first_page: int) -> None:
    log.save(
        inserted=state.inserted,
        sampled=state.sampled,
        consumed=state.consumed,
        dropped=state.dropped,
        pages=pages,
        first_page=first_page,
    )
