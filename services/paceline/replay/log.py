"""The record of one table in Redis: its blocks in order, who sent them, and its counters.

A block is an entry of a stream, the index, with the id `<epoch>-<key of the row after it>`, the key of its first row
and its BlockHeader; and a string, its payload exactly as the collector sent it. Entry, payload, its collector's
position and the counters change together, or not at all; where a fault of Redis makes it less (see `scripts`), the
blocks that came about are taken for stored.

An epoch begins when a process takes the table over, and when Redis has restarted. What was written to an earlier run of
the server may still turn up at a later one, so of two blocks for the same rows that of the later epoch is the record's.

What a process that owns the run knows and what the record says must agree on the key of the next row, on the epoch, and
on the run of the server; where they do not (a lost reply, a restart of Redis that may have lost its last second),
OutOfStepError says so, and the table compares both block by block and mends what differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import starmap
from typing import NamedTuple

from google.protobuf.message import DecodeError

from paceline.errors import ConflictError, ReplacedError, RowSpecError, UnavailableError
from paceline.replay.blocks import HeldBlock
from paceline.replay.index import IndexEntry, header_of, id_after, parse_index, without_replaced
from paceline.replay.link import Argument, ServerChangedError
from paceline.replay.scripts import BEGIN, CLEAR, COMMIT, READ, RESTATE, SAVE, Script
from paceline.replay.store import FORMAT, RedisStore
from paceline.rows import RowSpec
from paceline.rpc.wire import row_spec_from_wire, row_spec_to_wire
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


class OutOfStepError(UnavailableError):
    """The record's next row is another than this process believes, or Redis has restarted since it knew."""


@dataclass(frozen=True)
class Position:
    """The last block of one collector."""

    incarnation: int
    sequence: int
    stored_row_count: int


@dataclass(frozen=True)
class LogState:
    """Everything that the record says beside blocks and pages."""

    row_spec: RowSpec
    limiter_json: str
    inserted: int = 0
    """Rows ever inserted: the key of the next row."""
    sampled: int = 0
    consumed: int = 0
    """Of a queue: key of the first row that was not consumed."""
    dropped: int = 0
    """Of a queue: rows that left before any follower got them."""
    positions: Mapping[int, Position] = field(default_factory=dict)
    """By the collector's index."""


@dataclass(frozen=True)
class LoggedBlock:
    """A block as the record holds it; nothing in it has been checked when it was read."""

    first_row: int
    row_count: int
    header: bytes
    payload: bytes | memoryview
    epoch: int = field(default=0, compare=False)
    """In which it was written, where it was read."""

    @property
    def end_row(self) -> int:
        """Key of the row after the last one."""
        return self.first_row + self.row_count


@dataclass(frozen=True)
class BlockWrite:
    """A block to store, and what changes with it."""

    block: LoggedBlock
    """The record's next row becomes its `end_row`."""
    header: rows_pb2.BlockHeader
    """What `block.header` says."""
    removed: Sequence[HeldBlock] = ()
    """The blocks that leave, in order: the oldest ones of the record, without a gap, those that were read and found
    damaged among them."""
    sampled: int = 0
    consumed: int = 0
    dropped: int = 0
    """The counters with this block."""
    again: bool = False
    """Whether it was stored before, as its collector's position may say; it is stored all the same."""
    after: int | None = None
    """Key of the row that the record believes comes next, where a hole lies between it and the block; None: it is the
    block's first row."""


@dataclass(frozen=True)
class RecordView:
    """What the record says and which blocks it has, as one process read it of one run of the server."""

    server: str
    epoch: bytes
    """Its latest; empty where it has none."""
    next_row: bytes
    """What it gave for `state.inserted`, which takes in blocks that came about in part of a step."""
    state: LogState
    index: Sequence[IndexEntry]
    """In order, up to `state.inserted`."""
    uncounted_bytes: int
    """Of payloads that it has not counted yet."""
    orphans: Sequence[int]
    """First rows of payloads that no block has."""


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


class RedisLog:
    """The record of one table. One process at a time owns it, and appends from one thread at a time."""

    def __init__(self, store: RedisStore, table: str) -> None:
        self._store, self._table = store, table
        self._holds_all = False
        self._epoch = 0
        self._server: str | None = None  # which run of Redis the epoch is of
        self._owner, self._meta = store.key("owner"), store.key("meta")
        self._spec, self._state, self._positions, self._blocks, self._pages = (
            store.key("table", table, part) for part in ("spec", "state", "positions", "blocks", "pages")
        )
        self._payload, self._staged = (store.key("table", table, part) + b":%d" for part in ("block", "staged"))

    @property
    def epoch(self) -> int:
        """What this process writes in; 0: it has not begun one."""
        return self._epoch

    @property
    def replaced(self) -> bool:
        """Whether another process has taken the run over."""
        return self._store.fenced.is_set()

    def read_state(self) -> LogState | None:
        """What the record says at one moment, or None where there is none of this table, or no owner of the run.

        Raises:
            ConflictError: the record is there and says not all that it should, or what cannot be. (None, where part of
                it is gone and this process has stored blocks: it has all rows in memory, and makes the record anew.)
        """
        return self._read_whole()[1]

    def begin(self, state: LogState, view: RecordView | None = None) -> None:
        """Make the record anew: it says `state` and has no block and no page; takes the run if nobody owns it.

        Args:
            view: what is there, if anything is that another process may have written.

        Raises:
            ReplacedError: another process owns the run.
            OutOfStepError: an epoch has begun that neither this process nor `view` knows of.
        """
        server = self._store.read_server()
        known = max(self._epoch, int(view.epoch or 0) if view else 0)
        while entries := self._store.command("XRANGE", self._blocks, "-", "+", "COUNT", INDEX_STEP):
            index = parse_index(entries)
            payloads = [self._payload % entry.first_row for entry in index]
            floor = id_after(index[-1].epoch, index[-1].end_row)
            keys = [self._owner, self._state, self._blocks, *payloads]
            _require_in_step(self._run(server, CLEAR, keys, [self._store.token, known, floor]))
        arguments: list[Argument] = [
            self._store.token,
            known,
            FORMAT,
            self._table,
            row_spec_to_wire(state.row_spec).SerializeToString(),
            state.limiter_json,
            *_state_arguments(state),
            *_position_arguments(state),
        ]
        keys = [self._owner, self._meta, self._spec, self._state, self._positions, self._blocks, self._pages]
        self._begin_epoch(server, BEGIN, keys, arguments)
        self._holds_all = True

    def view(self) -> RecordView | None:
        """What `settle` wants to know; None and errors as `read_state`."""
        server = self._store.read_server()
        found, state, uncounted_bytes = self._read_whole()
        if state is None:
            return None
        entries = self._read_entries()
        index = without_replaced(entries)
        blocks = {entry.first_row for entry in index}
        return RecordView(
            server=server,
            epoch=found.fields.get(b"epoch", b""),
            next_row=found.fields[b"inserted"],
            state=state,
            index=[entry for entry in index if entry.end_row <= state.inserted],
            uncounted_bytes=uncounted_bytes,
            orphans=[entry.first_row for entry in entries if entry.first_row not in blocks],
        )

    def settle(self, view: RecordView, state: LogState) -> None:
        """Begin an epoch, in which the record says `state`; before this process' first block, and after restarts.

        Which row spec and limiter it has stays. Payloads that steps left behind which were cut leave.

        Raises:
            OutOfStepError: the record, or the server, is no longer what `view` gave.
        """
        self._restate(view.server, state, view.epoch, view.next_row, view.uncounted_bytes, view.orphans)

    def append(self, writes: Sequence[BlockWrite]) -> int:
        """Store blocks in order, each with what leaves for it and the counters, in one step; how many were stored.

        One that cannot be stored ends it: why it could not, its own call tells. 0: the first one's collector sent
        nothing new, its block was there already.

        Raises:
            OutOfStepError: the record's next row is another than the first write says, or this process has begun no
                epoch on this run of the server; nothing was stored.
            ReplacedError: a newer incarnation of its collector sent blocks, or another process owns the run.
            StoreFullError, StoreReadOnlyError: nothing was stored.
            UnavailableError: how many were stored is not known; `read_state` tells.
        """
        # Lua would copy a large argument twice, so payloads go beside the script, into keys that no block has: what a
        # refused block brought must never take the place of one that is there.
        staged = [("SET", self._staged % number, write.block.payload) for number, write in enumerate(writes)]
        keys = [self._owner, self._state, self._positions, self._blocks]
        arguments: list[Argument] = [self._store.token, self._epoch]
        for number, write in enumerate(writes):
            block, header, removed = write.block, write.header, write.removed
            after = block.first_row if write.after is None else write.after
            keys += (self._staged % number, self._payload % block.first_row)
            keys += [self._payload % held.first_row for held in removed]
            numbers = (
                *(after, block.first_row, block.end_row),
                *(header.collector_index, header.collector_incarnation, header.sequence, header.row_count),
                *(write.sampled, write.consumed, write.dropped, len(block.payload)),
                *(len(removed), _floor(removed), int(write.again)),
            )
            arguments += (block.header, " ".join(map(str, numbers)))
        word, _, count = self._write(COMMIT, keys, arguments, before=staged).partition(" ")
        if word == "replaced":
            header = writes[0].header
            raise ReplacedError(
                f"collector {header.collector_index}: a newer incarnation than {header.collector_incarnation} took over"
            )
        _require_in_step(word)
        self._holds_all = True
        return int(count or 0)

    def save(
        self,
        *,
        inserted: int,
        sampled: int,
        consumed: int = 0,
        dropped: int = 0,
        removed: Sequence[HeldBlock] = (),
        payload_bytes: int | None = None,
        pages: Mapping[int, bytes] | None = None,
        first_page: int = 0,
    ) -> None:
        """Set the counters and pages, and remove blocks as `append` does, if the record's next row is `inserted`.

        Safe to repeat. A large call is carried out in parts, each of which leaves the record whole.

        Args:
            inserted: what the record is expected to say; it is not changed.
            removed: as in `BlockWrite`.
            payload_bytes: of the blocks that stay, where the caller knows all of them.
            pages: what `read_pages` is to give for each page.
            first_page: pages before it leave.

        Raises: as `append` does.
        """
        numbers = list((pages or {}).items())
        steps = max(1, -(-len(removed) // INDEX_STEP), -(-len(numbers) // PAGE_STEP))
        for step in range(steps):
            leaving = removed[step * INDEX_STEP : (step + 1) * INDEX_STEP]
            arguments: list[Argument] = [
                self._store.token,
                *(self._epoch, inserted, sampled, consumed, dropped),
                *("" if payload_bytes is None else payload_bytes, _floor(leaving), first_page),
            ]
            for page, data in numbers[step * PAGE_STEP : (step + 1) * PAGE_STEP]:
                arguments += [page, data]
            keys = [self._owner, self._state, self._blocks, self._pages]
            keys += [self._payload % held.first_row for held in leaving]
            _require_in_step(self._write(SAVE, keys, arguments))

    def restate(self, state: LogState, inserted: int) -> None:
        """Have the record that this process wrote, up to `inserted`, say what that one said whose blocks it has got."""
        if self._server is None:
            raise OutOfStepError("this process has yet to begin an epoch of the record, retry")
        self._restate(self._server, state, b"%d" % self._epoch, b"%d" % inserted)

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

    def _write(
        self, script: Script, keys: list[bytes], arguments: list[Argument], before: Sequence[Sequence[Argument]] = ()
    ) -> str:
        """Run a script of the epoch. Raises OutOfStepError where none has begun on this run of the server."""
        if self._server is None:
            raise OutOfStepError("this process has yet to begin an epoch of the record, retry")
        return self._run(self._server, script, keys, arguments, before)

    def _run(
        self,
        server: str,
        script: Script,
        keys: list[bytes],
        arguments: list[Argument],
        before: Sequence[Sequence[Argument]] = (),
    ) -> str:
        try:
            return self._store.run_script(script, keys, arguments, before, server=server)
        except ServerChangedError as error:
            raise OutOfStepError(str(error)) from error

    def _restate(
        self,
        server: str,
        state: LogState,
        epoch: bytes,
        next_row: bytes,
        uncounted_bytes: int = 0,
        orphans: Sequence[int] = (),
    ) -> None:
        keys = [self._owner, self._state, self._positions, self._positions + b":next"]
        # The entries of those that left before stay for a while, older ones first.
        keys += [self._payload % first_row for first_row in orphans[-INDEX_STEP:]]
        arguments: list[Argument] = [self._store.token, self._epoch, epoch, next_row]
        arguments += [*_state_arguments(state), uncounted_bytes, *_position_arguments(state)]
        self._begin_epoch(server, RESTATE, keys, arguments)

    def _begin_epoch(self, server: str, script: Script, keys: list[bytes], arguments: list[Argument]) -> None:
        self._server = None
        word, _, epoch = self._run(server, script, keys, arguments).partition(" ")
        _require_in_step(word)
        self._server, self._epoch = server, int(epoch)

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


def _floor(leaving: Sequence[HeldBlock]) -> str:
    """The id below which entries leave with these blocks."""
    return id_after(leaving[-1].epoch, leaving[-1].end_row) if leaving else "-"


def _require_in_step(word: str) -> None:
    if word in ("lost", "out_of_step"):
        raise OutOfStepError("the record in Redis and replay's memory differ; they are being brought together, retry")


def _state_arguments(state: LogState) -> list[Argument]:
    return [state.inserted, state.sampled, state.consumed, state.dropped]


def _position_arguments(state: LogState) -> list[Argument]:
    arguments: list[Argument] = []
    for collector, position in state.positions.items():
        text = f"{position.incarnation} {position.sequence} {position.stored_row_count}"
        arguments += (collector, text)
    return arguments


def _shown(data: bytes) -> str:
    return repr(data[:80].decode(errors="replace"))
