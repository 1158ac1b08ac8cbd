"""A run's record as one file that any Redis can take in again: export. `archive_format` says how it is laid out.

The counters of a table are those of one moment, and its blocks all that the record had then, less those that left
while the file was written: what a replay process would have found that died at that moment.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from paceline import __version__
from paceline.errors import ConflictError, PacelineError
from paceline.replay.archive_format import (
    FORMAT,
    BlockEntry,
    ColumnEntry,
    Manifest,
    PageEntry,
    PositionEntry,
    TableEntry,
)
from paceline.replay.log_reader import LogReader
from paceline.replay.logged import LogState
from paceline.replay.record import Damage, Progress, RunRecord, drop_those_that_left, find_damage
from paceline.tables.pages import PAGE_ROWS

SPOOL_BYTES = 16 << 20
"""Of each list, before it goes to a temporary file."""


def export_run(
    record: RunRecord, path: Path, *, progress: Progress, settings: dict[str, Any] | None = None
) -> Manifest:
    """Write the record of a run to `path`, which appears when it is whole; a replay process may be at work meanwhile.

    Args:
        settings: of the run, which travel with it.
        progress: bytes of payloads. A table that cannot be read is left out, and `record.problems` says why.

    Raises:
        ConflictError: there is such a file, or the record is of another format.
        PacelineError: the file cannot be written.
    """
    record.require_whole()
    if path.exists():
        raise ConflictError(f"{path} is there already: expected a new file; choose another name, or remove it")
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                manifest = _write_archive(record, tar, progress, settings)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _flush_folder(path.parent)
    except OSError as error:
        raise PacelineError(f"{path} cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return manifest


def _write_archive(
    record: RunRecord, tar: tarfile.TarFile, progress: Progress, settings: dict[str, Any] | None
) -> Manifest:
    tables: list[TableEntry] = []
    done, logs = 0, record.tables()
    total = sum(log.payload_bytes() for _, _, log in logs)

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, total), total)

    for shard, name, log in logs:
        # Pages first: none of them then speaks of a row that the counters do not know of.
        pages = dict(log.read_pages())
        state = record.read_state(log)
        if state is not None:
            tables.append(_write_table(tar, f"tables/{len(tables)}", name, shard or 0, log, state, pages, count))
    progress(total, total)
    manifest = Manifest(
        format=FORMAT,
        paceline=__version__,
        run_id=record.run_id,
        exported_at=time.time(),
        shards=len(record.stores),
        tables=tables,
        settings=settings,
    )
    data = manifest.model_dump_json(indent=1).encode()
    _add(tar, "manifest.json", data)
    _add(tar, "manifest.json.sha256", hashlib.sha256(data).hexdigest().encode() + b"\n")
    return manifest


def _write_table(
    tar: tarfile.TarFile,
    folder: str,
    name: str,
    shard: int,
    log: LogReader,
    state: LogState,
    pages: dict[int, bytes],
    count: Callable[[int], None],
) -> TableEntry:
    damage: list[Damage] = []
    blocks = rows = size = 0
    with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as index, tempfile.SpooledTemporaryFile(SPOOL_BYTES) as lines:
        for logged in log.read_blocks():
            if logged.first_row >= state.inserted:
                break  # it came later
            problem = find_damage(state.row_spec, logged)
            if problem is not None:
                damage.append(Damage(logged.first_row, logged.row_count, problem))
                continue
            _add(tar, f"{folder}/blocks/{logged.first_row}", logged.payload)
            entry = BlockEntry(
                first_row=logged.first_row,
                row_count=logged.row_count,
                header=base64.b64encode(logged.header).decode(),
                payload_bytes=len(logged.payload),
                payload_sha256=hashlib.sha256(logged.payload).hexdigest(),
            )
            index.write(entry.model_dump_json().encode() + b"\n")
            blocks, rows, size = blocks + 1, rows + logged.row_count, size + len(logged.payload)
            count(len(logged.payload))
        kept = sorted(page for page in pages if page * PAGE_ROWS < state.inserted)
        for page in kept:
            line = PageEntry(page=page, data=base64.b64encode(pages[page]).decode())
            lines.write(line.model_dump_json().encode() + b"\n")
        return TableEntry(
            name=name,
            shard=shard,
            columns=[
                ColumnEntry(name=column.name, dtype=column.dtype, shape=list(column.shape))
                for column in state.row_spec.columns
            ],
            row_bytes=state.row_spec.row_bytes,
            limiter_json=state.limiter_json,
            inserted=state.inserted,
            sampled=state.sampled,
            consumed=state.consumed,
            dropped=state.dropped,
            positions=[
                PositionEntry(
                    collector_index=collector,
                    incarnation=position.incarnation,
                    sequence=position.sequence,
                    stored_row_count=position.stored_row_count,
                )
                for collector, position in sorted(state.positions.items())
            ],
            block_count=blocks,
            row_count=rows,
            payload_bytes=size,
            page_count=len(kept),
            index_sha256=_add_file(tar, f"{folder}/index.jsonl", index),
            pages_sha256=_add_file(tar, f"{folder}/pages.jsonl", lines),
            damaged_blocks=len(drop_those_that_left(log, damage)),
        )


def _add(tar: tarfile.TarFile, name: str, data: bytes | memoryview) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(data), int(time.time()), 0o644
    tar.addfile(member, io.BytesIO(data))
    tar.members.clear()  # type: ignore[attr-defined]  # tarfile would remember a million of them


def _add_file(tar: tarfile.TarFile, name: str, file: IO[bytes]) -> str:
    """Add all of a file; its SHA-256."""
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = file.tell(), int(time.time()), 0o644
    file.seek(0)
    tar.addfile(member, file)
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
