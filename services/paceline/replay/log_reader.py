"""Reads the record of one table in Redis, believing nothing before it is checked. `log` says how it is laid out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import starmap
from typing import NamedTuple

from google.protobuf.message import DecodeError

from paceline.errors import ConflictError, RowSpecError
from paceline.replay.index import IndexEntry, header_of, oldest_row, parse_index, without_replaced
from paceline.replay.logged import LoggedBlock, LogState, Position
from paceline.replay.scripts import READ
from paceline.replay.store import RedisStore
from paceline.rows import RowSpec
from paceline.rpc.wire import row_spec_from_wire
from paceline.v1 import rows_pb2

READ_BYTES = 8 << 20
"""Bytes of payloads that one step of a restore aims at; two steps are in memory at once."""
INDEX_STEP = 1000
"""Entries of the index, and payloads that leave, in one command at most."""
PAGE_STEP = 256
"""Pages of priorities in one command at most: half a megabyte."""

_EPOCH_FIELD = b"epoch"
"""Of the positions: the one that is no collector's."""

_COUNTS = ("inserted", "sampled", "consumed", "dropped", "payload_bytes")


class _Found(NamedTuple):
    """What Redis has of a table at one moment."""

    owner: bytes | None
    spec: bytes | None
    fields: Mapping[bytes, bytes]
    positions: Sequence[tuple[bytes, bytes]]
    further: Sequence[IndexEntry]
    """Past what the fields say."""

    @property
    def is_whole(self) -> bool:
        return self.spec is not None and bool(self.fields)


class LogReader:
    """The record of one table, to be read by anybody: nothing is changed."""

    def __init__(self, store: RedisStore, table: str) -> None:
        self._store, self._table = store, table
        self._holds_all = False  # whether this process has every row in memory
        self._owner, self._meta = store.key("owner"), store.key("meta")
        self._spec, self._state, self._positions, self._blocks, self._pages = (
            store.key("table", table, part) for part in ("spec", "state", "positions", "blocks", "pages")
        )
        self._payload = store.key("table", table, "block") + b":%d"

    def read_state(self) -> LogState | None:
        """What the record says at one moment, or None where there is none of this table, or no owner of the run.

        Raises:
            ConflictError: the record is there and says not all that it should, or what cannot be. (None, where part of
                it is gone and this process has stored blocks: it has all rows in memory, and makes the record anew.)
        """
        return self._read_whole()[1]

    def read_blocks(self, first_row: int = 0) -> Iterator[LoggedBlock]:
        """Every block with a row from `first_row` on, in order, read in steps of bounded size, one step ahead.

        A block whose payload is missing has an empty one.
        """
        steps = self._read_steps(first_row)
        with ThreadPoolExecutor(1, "record") as reader:
            ahead = reader.submit(next, steps, None)
            while (blocks := ahead.result()) is not None:
                ahead = reader.submit(next, steps, None)
                yield from blocks

    def read_pages(self) -> Iterator[tuple[int, bytes]]:
        """Every page that was saved, in no order; the same one may come twice."""
        cursor = b"0"
        while True:
            cursor, entries = self._store.command("HSCAN", self._pages, cursor, "COUNT", PAGE_STEP)
            for page, data in zip(entries[::2], entries[1::2], strict=True):
                yield int(page), data
            if cursor == b"0":
                return

    def block_count(self) -> int:
        """Entries of the index: its blocks, and what they took the place of."""
        return int(self._store.command("XLEN", self._blocks))

    def payload_bytes(self) -> int:
        """Bytes of the payloads in the record."""
        return int(self._store.command("HGET", self._state, "payload_bytes") or 0)

    def page_count(self) -> int:
        """Pages in the record."""
        return int(self._store.command("HLEN", self._pages))

    def seconds_since_save(self) -> float | None:
        """Seconds, by the clock of Redis, since a process called `begin` or `save`; None where none ever did."""
        saved, now = self._store.command("HGET", self._state, "saved_at"), self._store.command("TIME")
        return None if saved is None else max(0.0, int(now[0]) - int(saved))

    def read_index(self, first_row: int = 0) -> list[IndexEntry]:
        """Every block with a row from `first_row` on, in order, without its payload."""
        return [entry for entry in without_replaced(self._read_entries()) if entry.end_row > first_row]

    def read_oldest_row(self) -> int | None:
        """Key of the record's first row, by one look at the index; None where it has no block."""
        return oldest_row(self._store.command("XRANGE", self._blocks, "-", "+", "COUNT", 1))

    def _read_entries(self) -> list[IndexEntry]:
        """The index as it is."""
        entries: list[IndexEntry] = []
        start = b"-"
        while True:
            found = self._store.command("XRANGE", self._blocks, start, "+", "COUNT", INDEX_STEP)
            entries += parse_index(found, entries[-1].end_row if entries else 0)
            if len(found) < INDEX_STEP:
                return entries
            start = b"(" + found[-1][0]

    def _read_whole(self) -> tuple[_Found, LogState | None, int]:
        """What Redis has, what `read_state` makes of it, and the bytes of payloads that the fields do not count yet."""
        found = self._read_state()
        if found.owner is not None and not found.is_whole and self._has_traces(found):
            # Another process may have begun the table just now.
            found = self._read_state()
            if not self._holds_all and not found.is_whole:
                missing = self._spec if found.spec is None else self._state
                raise self._damaged(missing, "is missing while other keys of the table are there")
        if found.owner is None or found.spec is None or not found.fields:
            return found, None, 0
        fields = found.fields
        if not fields.get(b"epoch", b"0").isdigit():
            raise self._damaged(self._state, f"has {_shown(fields[b'epoch'])} as its field 'epoch'", "a number")
        limiter, numbers = fields.get(b"limiter"), {name: self._parse_count(fields, name) for name in _COUNTS}
        if limiter is None:
            raise self._damaged(self._state, "has no field 'limiter'", "the limiter's settings as JSON")
        positions = dict(starmap(self._parse_position, found.positions))
        inserted, uncounted_bytes = numbers["inserted"], 0
        for entry in found.further:
            header, size = header_of(entry), int(self._store.command("STRLEN", self._payload % entry.first_row))
            if header is None or size == 0 or entry.first_row < inserted:
                break
            uncounted_bytes += size
            # A step that was cut: the collector may have been told nothing of its block, which is there all the same.
            inserted = entry.end_row
            positions[header.collector_index] = Position(
                header.collector_incarnation, header.sequence, header.row_count
            )
        state = LogState(
            row_spec=self._parse_spec(found.spec),
            limiter_json=limiter.decode(errors="replace"),
            inserted=inserted,
            sampled=numbers["sampled"],
            consumed=numbers["consumed"],
            dropped=numbers["dropped"],
            positions=positions,
        )
        return found, state, uncounted_bytes

    def _read_state(self) -> _Found:
        keys = [self._owner, self._spec, self._state, self._positions, self._blocks]
        owner, spec, state, positions, further = self._store.read_by_script(READ, keys)
        fields = dict(zip(state[::2], state[1::2], strict=True))
        pairs = [pair for pair in zip(positions[::2], positions[1::2], strict=True) if pair[0] != _EPOCH_FIELD]
        return _Found(owner, spec, fields, pairs, parse_index(further))

    def _has_traces(self, found: _Found) -> bool:
        """Whether anything says that the table was begun."""
        if found.spec is not None or found.fields:
            return True
        begun = self._store.command("HGET", self._meta, f"table:{self._table}")
        return begun is not None or self.block_count() > 0 or self.page_count() > 0

    def _parse_spec(self, data: bytes) -> RowSpec:
        try:
            return row_spec_from_wire(rows_pb2.RowSpec.FromString(data))
        except (DecodeError, RowSpecError) as error:
            raise self._damaged(self._spec, f"is unreadable ({error})", "a RowSpec") from error

    def _parse_count(self, fields: Mapping[bytes, bytes], name: str) -> int:
        text = fields.get(name.encode())
        if text is None or not text.isdigit():
            problem = f"has no field {name!r}" if text is None else f"has {_shown(text)} as its field {name!r}"
            raise self._damaged(self._state, problem, "a count of rows or bytes")
        return int(text)

    def _parse_position(self, collector: bytes, text: bytes) -> tuple[int, Position]:
        numbers = text.split()
        if not collector.isdigit() or len(numbers) != 3 or not all(number.isdigit() for number in numbers):
            problem = f"has {_shown(text)} as its field {_shown(collector)}"
            expected = "by the collector's index: incarnation, sequence and rows of its last block"
            raise self._damaged(self._positions, problem, expected)
        return int(collector), Position(*map(int, numbers))

    def _damaged(self, key: bytes, problem: str, expected: str = "a whole record") -> ConflictError:
        return ConflictError(
            f"the record of table {self._table!r} is damaged: {key.decode()} {problem}; expected {expected}. Nothing "
            "was changed: put that back, or save the other tables by `paceline replay export RUN FILE`, then begin "
            "anew with `paceline replay delete RUN`"
        )

    def _read_steps(self, first_row: int) -> Iterator[list[LoggedBlock]]:
        rows_in_step = 1  # one block, to learn how large rows are here
        entries = iter(self.read_index(first_row))
        entry = next(entries, None)
        while entry is not None:
            step = [entry]
            while (entry := next(entries, None)) is not None and entry.end_row <= step[0].first_row + rows_in_step:
                step.append(entry)
            payloads = self._store.read_values([self._payload % entry.first_row for entry in step])
            blocks = [
                LoggedBlock(entry.first_row, entry.end_row - entry.first_row, entry.header, payload or b"", entry.epoch)
                for entry, payload in zip(step, payloads, strict=True)
            ]
            size, rows = sum(len(block.payload) for block in blocks), sum(block.row_count for block in blocks)
            rows_in_step = max(1, READ_BYTES * rows // max(size, 1))
            yield blocks


def _shown(data: bytes) -> str:
    return repr(data[:80].decode(errors="replace"))
