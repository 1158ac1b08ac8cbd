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

from collections.abc import Mapping, Sequence

from paceline.errors import ReplacedError, UnavailableError
from paceline.replay.blocks import HeldBlock
from paceline.replay.index import id_after, parse_index, without_replaced
from paceline.replay.link import Argument, ServerChangedError
from paceline.replay.log_reader import INDEX_STEP, PAGE_STEP, LogReader
from paceline.replay.logged import BlockWrite, LogState, RecordView
from paceline.replay.scripts import BEGIN, CLEAR, COMMIT, RESTATE, SAVE, Script
from paceline.replay.store import FORMAT, RedisStore
from paceline.rpc.wire import row_spec_to_wire


class OutOfStepError(UnavailableError):
    """The record's next row is another than this process believes, or Redis has restarted since it knew."""


class RedisLog(LogReader):
    """The record of one table. One process at a time owns it, and appends from one thread at a time."""

    def __init__(self, store: RedisStore, table: str) -> None:
        super().__init__(store, table)
        self._epoch = 0
        self._server: str | None = None  # which run of Redis the epoch is of
        self._staged = store.key("table", table, "staged") + b":%d"

    @property
    def epoch(self) -> int:
        """What this process writes in; 0: it has not begun one."""
        return self._epoch

    @property
    def replaced(self) -> bool:
        """Whether another process has taken the run over."""
        return self._store.fenced.is_set()

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
