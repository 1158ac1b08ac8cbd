"""The whole record of a run in Redis, all tables of all shards: what is in it, whether it is whole, and its removal.

Works beside a replay process that serves the run, too: nothing here takes the run over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from paceline.config.models import SHARD
from paceline.errors import BlockError, ConfigError, ConflictError, NotFoundError, PacelineError, StoreFullError
from paceline.replay.log_reader import LogReader
from paceline.replay.logged import LoggedBlock, LogState
from paceline.replay.store import RedisStore, key_of
from paceline.rows import Block, RowSpec, block_from_wire
from paceline.v1 import rows_pb2

Progress = Callable[[int, int], None]
"""Told how much is done, and of how much."""

DEADLINE_SECONDS = 60.0
"""Of one command. Nobody waits for an acknowledgement here, and a busy server may take its time."""
ALIVE_SECONDS = 10.0
"""A replay process saves its counters every second; one that has not for so long is taken for dead."""
WATCH_SECONDS = 3.0
"""Where the last save is younger than that, the next one is waited for so long."""
REMOVE_STEP = 64
"""Keys that one command removes: of large blocks, a tenth of a second's work for Redis."""
MAX_SHARDS = 256
SHARDS_FIELD = "shards"
"""Of ...:meta: how many shards the run has."""


@dataclass(frozen=True)
class FoundShards:
    """What one Redis has of a run, in either form: under keys of its one shard, and under those of several."""

    single: bool = False
    """Whether there is a record of one shard."""
    present: frozenset[int] = frozenset()
    """Numbers of the shards of a record of several."""
    noted: int | None = None
    """How many of them there are, as it says itself."""

    @property
    def several(self) -> int | None:
        """How many shards the record of several has, at least where it does not say so; None: there is none."""
        return max(2, self.noted or 0, max(self.present) + 1) if self.present else None

    @property
    def counts(self) -> list[int]:
        """The number of shards of each record of the run: mostly one."""
        return [*([1] if self.single else []), *([self.several] if self.several else [])]


@dataclass(frozen=True)
class Damage:
    """A block that replay would name and skip."""

    first_row: int
    row_count: int
    problem: str


@dataclass(frozen=True)
class TableSurvey:
    """What the record of one table holds."""

    table: str
    shard: int | None
    state: LogState
    first_row: int
    row_count: int
    block_count: int
    payload_bytes: int
    page_count: int
    seconds_since_save: float | None
    checked: bool
    damage: tuple[Damage, ...]


class RunRecord:
    """The record of one run. Close it after use."""

    def __init__(self, url: str, run_id: str, *, shards: int | None = None) -> None:
        """Open a record that is there.

        Args:
            url: of the Redis; `{shard}` in it stands for the shard's number.
            run_id: the run.
            shards: how many there are; None: find out, where all lie in one Redis.

        Raises:
            NotFoundError: there is no record of the run, or none of so many shards.
            ConflictError: there are two, and `shards` does not say which. ConfigError, UnavailableError: as RedisStore.
        """
        self.run_id = run_id
        self.problems: list[str] = []
        """What keeps tables from being read, as far as `survey` or an export came across it."""
        if shards is None and SHARD in url:
            raise ConfigError(f"the Redis URL has {SHARD} in it: say how many shards there are, as --shards 2")
        found = _find_all_shards(url, run_id, shards or 1)
        if shards is None:
            if len(found.counts) > 1:
                raise ConflictError(
                    f"Redis has two records of run {run_id!r}, one of 1 shard and one of {found.several}: "
                    f"expected a word on which, as --shards 1 or --shards {found.several}"
                )
            shards = found.counts[0] if found.counts else 1
        self.stores = open_stores(url, run_id, shards)
        self.other_counts = [count for count in found.counts if count > shards or count == 1 < shards]
        """The number of shards of a record that the run has beside this one, or that has more than were asked for."""
        try:
            formats = [_read_format(store) for store in self.stores]
            if not any(formats):
                where = f"in Redis at {self.stores[0].shown}"
                if self.other_counts:
                    raise NotFoundError(
                        f"no record of run {run_id!r} with {shards} shard(s) {where}, but one with "
                        f"{self.other_counts[0]}: expected --shards {self.other_counts[0]}"
                    )
                raise NotFoundError(
                    f"no record of run {run_id!r} {where}: expected one; "
                    "see whether the id, the URL, its database number and the number of shards are right"
                )
        except BaseException:
            self.close()
            raise

    @property
    def shown(self) -> str:
        """The URL of its Redis, passwords hidden; of the first shard where each has its own."""
        return self.stores[0].shown

    def require_whole(self) -> None:
        """Raise ConflictError unless every shard has a whole record of this version's format."""
        for store in self.stores:
            store.require_format()

    def tables(self) -> list[tuple[int | None, str, LogReader]]:
        """Shard, name and log of every table."""
        return [
            (shard if len(self.stores) > 1 else None, name, LogReader(store, name))
            for shard, store in enumerate(self.stores)
            for name in _table_names(store)
        ]

    def others(self) -> list[str]:
        """A sentence on each of `other_counts`."""
        return [
            f"run {self.run_id!r} has another record in Redis, of {count} shard(s), which is not part of this one: see "
            f"it by --shards {count}"
            for count in self.other_counts
        ]

    def read_state(self, log: LogReader) -> LogState | None:
        """As `log` has it; None, too, where it is damaged, which `problems` then tells."""
        try:
            return log.read_state()
        except ConflictError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return None

    def owners(self) -> list[str | None]:
        """The token of the process that owns each shard: the one that took it over last, at work or not."""
        owners = [store.command("GET", store.key("owner")) for store in self.stores]
        return [None if owner is None else bytes(owner).decode(errors="replace") for owner in owners]

    def survey(self, *, check: bool, progress: Progress) -> list[TableSurvey]:
        """What each table holds; with `check` every block is read and verified."""
        logs = self.tables()
        total = sum(log.payload_bytes() for _, _, log in logs)
        surveys, done = [], 0
        for shard, name, log in logs:
            state = self.read_state(log)
            if state is None:
                continue
            index = [entry for entry in log.read_index() if entry.end_row <= state.inserted]
            damage: list[Damage] = []
            if check:
                for logged in log.read_blocks():
                    if logged.end_row > state.inserted:
                        break  # it came later
                    problem = find_damage(state.row_spec, logged)
                    if problem is not None:
                        damage.append(Damage(logged.first_row, logged.row_count, problem))
                    done += len(logged.payload)
                    progress(min(done, total), total)
                damage = drop_those_that_left(log, damage)
            surveys.append(
                TableSurvey(
                    table=name,
                    shard=shard,
                    state=state,
                    first_row=index[0].first_row if index else state.inserted,
                    row_count=sum(entry.end_row - entry.first_row for entry in index),
                    block_count=len(index),
                    payload_bytes=log.payload_bytes(),
                    page_count=log.page_count(),
                    seconds_since_save=log.seconds_since_save(),
                    checked=check,
                    damage=tuple(damage),
                )
            )
        return surveys

    def is_served(self) -> bool:
        """Whether a replay process seems to be at work on the run; may take WATCH_SECONDS.

        Judged by its saves, one a second, so a process that cannot save (a full Redis) or has not begun to (it is still
        restoring) is not seen. Removing its record costs it nothing: it writes again what it has in memory.
        """
        before = self._saves()
        if all(seconds is None or seconds > ALIVE_SECONDS for _, seconds in before):
            return False
        pause = threading.Event()
        for _ in range(round(WATCH_SECONDS / 0.25)):
            pause.wait(0.25)
            if any(saved != then for (saved, _), (then, _) in zip(self._saves(), before, strict=False)):
                return True
        return False

    def delete(self, *, progress: Progress) -> int:
        """Remove every key of the run, in steps that Redis hardly notices; how many there were.

        May be called again after it was cut short: until the end, the record says that it is being deleted.
        """
        removed, total = 0, sum(log.block_count() + 6 for _, _, log in self.tables())

        def count(keys: int) -> None:
            nonlocal removed
            removed += keys
            progress(min(removed, total), total)

        for store in self.stores:
            with suppress(StoreFullError):  # a full Redis takes no mark, and is emptied all the same
                store.command("HSET", store.key("meta"), "format", "being deleted")
            remove_keys(store, count)
        progress(total, total)
        return removed

    def close(self) -> None:
        """Close every connection."""
        for store in self.stores:
            store.close()

    def _saves(self) -> list[tuple[bytes | None, float | None]]:
        return [
            (store.command("HGET", store.key("table", name, "state"), "saved_at"), log.seconds_since_save())
            for store in self.stores
            for name in _table_names(store)
            for log in [LogReader(store, name)]
        ]


def open_stores(url: str, run_id: str, shards: int) -> list[RedisStore]:
    """A store for each shard of a run."""
    return [
        RedisStore(
            url.replace(SHARD, str(shard)),
            run_id,
            deadline_seconds=DEADLINE_SECONDS,
            shard=shard if shards > 1 else None,
        )
        for shard in range(shards)
    ]


def scan(store: RedisStore) -> Iterator[list[bytes]]:
    """Every key of a store's run and shard, in steps; some may come twice."""
    cursor = b"0"
    while True:
        cursor, keys = store.command("SCAN", cursor, "MATCH", store.key("*"), "COUNT", 1000)
        yield keys
        if cursor == b"0":
            return


def remove_keys(store: RedisStore, count: Callable[[int], None] = lambda keys: None) -> None:
    """Remove every key of a store's run and shard, that which says what they are last of all."""
    last = store.key("meta")
    for found in scan(store):
        keys = [key for key in found if key != last]
        for step in range(0, len(keys), REMOVE_STEP):
            count(int(store.command("UNLINK", *keys[step : step + REMOVE_STEP])))
    count(int(store.command("UNLINK", last)))


def find_damage(spec: RowSpec, logged: LoggedBlock) -> str | None:
    """What is wrong with a block of the record, or None."""
    try:
        check_block(spec, logged)
    except PacelineError as error:
        return str(error)
    return None


def check_block(spec: RowSpec, logged: LoggedBlock) -> tuple[rows_pb2.BlockHeader, Block]:
    """Header and rows of a block of the record. Raises BlockError or RowSpecError."""
    try:
        header = rows_pb2.BlockHeader.FromString(logged.header)
    except DecodeError as error:
        raise BlockError(f"its header is damaged: {error}") from error
    if not len(logged.payload):
        raise BlockError("its payload is missing")
    if (header.first_row, header.row_count) != (logged.first_row, logged.row_count):
        raise BlockError(
            f"its header says {header.row_count} rows from row {header.first_row}: "
            f"expected {logged.row_count} from row {logged.first_row}"
        )
    return header, block_from_wire(spec, header, logged.payload)


def drop_those_that_left(log: LogReader, damage: Sequence[Damage]) -> list[Damage]:
    """The damage that is none of a replay process at work: blocks that it has removed since they were read."""
    oldest = next(iter(log.read_index()), None)
    return [block for block in damage if oldest is not None and block.first_row >= oldest.first_row]


def _read_format(store: RedisStore) -> str:
    return bytes(store.command("HGET", store.key("meta"), "format") or b"").decode(errors="replace")


def _table_names(store: RedisStore) -> list[str]:
    fields = store.command("HGETALL", store.key("meta"))[::2]
    return sorted(field.decode().removeprefix("table:") for field in fields if field.startswith(b"table:"))


def find_shards(store: RedisStore, run_id: str) -> FoundShards:
    """Which records of a run the Redis of `store` has, whatever shard the store itself is of."""
    forms = (None, *range(MAX_SHARDS))
    single, *several = map(_read_note, store.read_each([("HGETALL", key_of(run_id, form, "meta")) for form in forms]))
    present = {shard: noted for shard, noted in enumerate(several) if noted is not None}
    return FoundShards(single is not None, frozenset(present), max(present.values(), default=0) or None)


def require_shards(store: RedisStore, run_id: str, shards: int, *, shard: int | None = None) -> FoundShards:
    """What the Redis of `store` has of a run: nothing, or a record of so many shards.

    Without the word of a record, a shard that is away counts for nothing: its Redis may be another, or have lost it.
    A missing `shard` (None: any) beside others of a record that does not say how many it has is taken for a new one.

    Raises:
        ConflictError: it is of another number of shards; the rows would stay behind.
    """
    found = find_shards(store, run_id)
    if found.single or found.present:
        several, begun = found.several or 0, 1
        if shards == 1:
            fits, begun = found.single, several
        elif found.present:
            new = found.noted is None and shard is not None and shard not in found.present
            fits, begun = several <= shards and not new and found.noted in (None, shards), several
        else:
            fits = False
        if not fits:
            raise ConflictError(
                f"the record of run {run_id!r} in Redis at {store.shown} has {begun} shard(s) and replay.shards is "
                f"{shards}: expected replay.shards={begun}, as when it began; or choose another run.id, or remove the "
                f"record by `paceline replay delete {run_id} --shards {begun}`"
            )
    return found


def note_shards(store: RedisStore, run_id: str, shards: int, shard: int) -> None:
    """To be called before a shard's record is claimed: a new one gets to say how many shards the run has.

    Raises:
        ConflictError: as `require_shards`. UnavailableError and other errors of Redis: as RedisStore.command.
    """
    found = require_shards(store, run_id, shards, shard=shard)
    if not (found.single if shards == 1 else shard in found.present):
        with suppress(StoreFullError):  # the keys alone tell it then
            write_note(store, shards)


def write_note(store: RedisStore, shards: int) -> None:
    """Have a record that is about to begin say how many shards its run has."""
    store.command("HSET", store.key("meta"), SHARDS_FIELD, shards)


def _find_all_shards(url: str, run_id: str, shards: int) -> FoundShards:
    """Which records of a run there are, in the Redis of each shard where each has its own."""
    found: list[FoundShards] = []
    for shard in range(shards if SHARD in url else 1):
        store = RedisStore(url.replace(SHARD, str(shard)), run_id, deadline_seconds=DEADLINE_SECONDS)
        try:
            found.append(find_shards(store, run_id))
        finally:
            store.close()
    return FoundShards(
        any(each.single for each in found),
        frozenset().union(*(each.present for each in found)),
        max((each.noted or 0 for each in found), default=0) or None,
    )


def _read_note(entries: Sequence[bytes] | None) -> int | None:
    """How many shards the record of these fields says that its run has, 0: it does not say; None: there is no record.

    None is what a user of Redis gets who may see the run's own keys alone.
    """
    fields = dict(zip(entries[::2], entries[1::2], strict=True)) if entries else {}
    if b"format" not in fields:
        return None
    count = fields.get(SHARDS_FIELD.encode(), b"")
    return int(count) if count.isdigit() else 0


def require_empty(stores: Sequence[RedisStore], run_id: str) -> None:
    """Raise ConflictError if Redis has any key of the run, or a record of it with another number of shards."""
    for store in stores:
        is_there = bool(find_shards(store, run_id).counts)
        for keys in scan(store):
            if keys or is_there:
                raise ConflictError(
                    f"run id {run_id!r} has a record in Redis at {store.shown} already: expected none; "
                    f"choose another id, as --as NEW_RUN, or remove it by `paceline replay delete {run_id}`"
                )
