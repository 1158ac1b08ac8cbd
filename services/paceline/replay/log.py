"""The record of one table in Redis: its blocks in order, who sent them, and its counters.

A block is one entry of a stream, with the id `<number>-0` and two fields: its BlockHeader, serialised, and its rows.
Numbers begin at 1 and grow. A block, its collector's position and the counters change in one script, or not at
all. What a process that owns the run knows and what the record says must agree on the last number; where they do not
(a lost reply, a restart of Redis that lost its last second), OutOfStepError says so and the table mends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from paceline.errors import PacelineError, ReplacedError, RowSpecError, UnavailableError
from paceline.replay.scripts import APPEND, BEGIN, SAVE, TRIM
from paceline.replay.store import FORMAT, RedisStore
from paceline.rows import RowSpec
from paceline.rpc.wire import row_spec_from_wire, row_spec_to_wire
from paceline.v1 import rows_pb2

READ_BYTES = 8 << 20
"""Bytes of blocks that one step of a restore aims at."""


class OutOfStepError(UnavailableError):
    """The record's last block is another than this process believes."""


@dataclass(frozen=True)
class Position:
    """The last block of one collector."""

    incarnation: int
    sequence: int
    stored_row_count: int


@dataclass(frozen=True)
class LogState:
    """Everything that the record says beside the blocks."""

    row_spec: RowSpec
    limiter_json: str
    last_block: int = 0
    inserted: int = 0
    sampled: int = 0
    positions: Mapping[int, Position] = field(default_factory=dict)


@dataclass(frozen=True)
class LoggedBlock:
    """A block as the record holds it; nothing in it has been checked when it was read."""

    number: int
    header: bytes
    rows: bytes | memoryview


class RedisLog:
    """The record of one table. One process at a time owns it, and appends one block at a time."""

    def __init__(self, store: RedisStore, table: str) -> None:
        self._store = store
        self._owner, self._meta = store.key("owner"), store.key("meta")
        self._spec, self._state, self._positions, self._blocks = (
            store.key("table", table, part) for part in ("spec", "state", "positions", "blocks")
        )

    @property
    def replaced(self) -> bool:
        """Whether another process has taken the run over."""
        return self._store.fenced.is_set()

    def read_state(self) -> LogState | None:
        """What the record says, or None where there is none of this table, or Redis no longer knows who owns it."""
        spec = self._store.command("GET", self._spec)
        state = self._store.command("HGETALL", self._state)
        if spec is None or not state or self._store.command("GET", self._owner) is None:
            return None
        return LogState(
            row_spec=_parse_spec(spec),
            limiter_json=state.get(b"limiter", b"").decode(),
            last_block=int(state[b"last_block"]),
            inserted=int(state[b"inserted"]),
            sampled=int(state[b"sampled"]),
            positions={
                int(collector): Position(*map(int, value.split()))
                for collector, value in self._store.command("HGETALL", self._positions).items()
            },
        )

    def begin(self, state: LogState) -> None:
        """Make the record anew: it says `state` and has no block; takes the run if nobody owns it.

        Raises:
            ReplacedError: another process owns the run.
        """
        arguments = [
            self._store.token,
            FORMAT.encode(),
            row_spec_to_wire(state.row_spec).SerializeToString(),
            state.limiter_json.encode(),
            *(b"%d" % value for value in (state.last_block, state.inserted, state.sampled)),
        ]
        for collector, position in state.positions.items():
            arguments += [b"%d" % collector, _format_position(position)]
        keys = [self._owner, self._meta, self._spec, self._state, self._positions, self._blocks]
        self._store.run_script(BEGIN, keys, arguments)

    def append(
        self,
        block: LoggedBlock,
        header: rows_pb2.BlockHeader,
        *,
        previous: int,
        oldest: int,
        inserted: int,
        sampled: int,
    ) -> bool:
        """Store a block, remove those before number `oldest`, set the counters; False: it was there already.

        Args:
            block: its number is above `previous`.
            header: what `block.header` says.
            previous: number of the record's last block.
            oldest: number of the oldest block that stays.
            inserted, sampled: the counters with this block.

        Raises:
            OutOfStepError: `previous` is not the record's last block.
            ReplacedError: a newer incarnation of its collector sent blocks, or another process owns the run.
            StoreFullError, StoreReadOnlyError: nothing was stored.
            UnavailableError: whether it was stored is not known; `read_state` tells.
        """
        numbers = (
            block.number,
            oldest,
            header.collector_index,
            header.collector_incarnation,
            header.sequence,
            header.row_count,
            inserted,
            sampled,
            previous,
        )
        arguments = [self._store.token, *(b"%d" % value for value in numbers), block.header, block.rows]
        word = self._store.run_script(APPEND, [self._owner, self._state, self._positions, self._blocks], arguments)
        if word == "replaced":
            raise ReplacedError(
                f"collector {header.collector_index}: a newer incarnation than {header.collector_incarnation} took over"
            )
        _require_in_step(word)
        return word == "stored"

    def save(self, *, last_block: int, sampled: int) -> None:
        """Set the counter of sampled rows, if the record's last block is `last_block`. Raises as `append` does."""
        arguments = [self._store.token, b"%d" % last_block, b"%d" % sampled]
        _require_in_step(self._store.run_script(SAVE, [self._owner, self._state], arguments))

    def trim(self, oldest: int) -> None:
        """Remove the blocks before number `oldest`. Raises as `append` does."""
        _require_in_step(self._store.run_script(TRIM, [self._owner, self._blocks], [self._store.token, b"%d" % oldest]))

    def read_blocks(self, after: int = 0) -> Iterator[LoggedBlock]:
        """Every block after number `after`, in order, read in steps of bounded size."""
        count = 1
        while True:
            entries = self._store.command("XRANGE", self._blocks, f"({after}", "+", "COUNT", count)
            if not entries:
                return
            size = 0
            for identifier, fields in entries:
                after = int(identifier.partition(b"-")[0])
                rows = fields.get(b"rows", b"")
                size += len(rows)
                yield LoggedBlock(after, fields.get(b"header", b""), rows)
            count = max(1, min(1024, READ_BYTES * len(entries) // max(size, 1)))

    def block_count(self) -> int:
        """Blocks in the record."""
        return int(self._store.command("XLEN", self._blocks))


def _require_in_step(word: str) -> None:
    if word in ("lost", "out_of_step"):
        raise OutOfStepError("the record in Redis and replay's memory differ; they are being brought together, retry")


def _format_position(position: Position) -> bytes:
    return b"%d %d %d" % (position.incarnation, position.sequence, position.stored_row_count)


def _parse_spec(data: bytes) -> RowSpec:
    try:
        return row_spec_from_wire(rows_pb2.RowSpec.FromString(data))
    except (DecodeError, RowSpecError) as error:
        raise PacelineError(f"the row spec in Redis is damaged: {error}; start the run anew") from error
