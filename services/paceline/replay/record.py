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
from paceline.replay.log import LoggedBlock, LogState, RedisLog
from paceline.replay.store import RedisStore
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
            NotFoundError: there is no record of the run.
            ConflictError: it has another format. ConfigError, UnavailableError: as RedisStore.
        """
        self.run_id = run_id
        if shards is None:
            if SHARD in url:
                raise ConfigError(f"the Redis URL has {SHARD} in it: say how many shards there are, as --shards 2")
            shards = _count_shards(url, run_id)
        self.stores = open_stores(url, run_id, shards)
        try:
            formats = [_read_format(store) for store in self.stores]
            if not any(formats):
                raise NotFoundError(
                    f"no record of run {run_id!r} in Redis at {self.stores[0].shown}: expected one; "
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

    def tables(self) -> list[tuple[int | None, str, RedisLog]]:
        """Shard, name and log of every table."""
        return [
            (shard if len(self.stores) > 1 else None, name, RedisLog(store, name))
            for shard, store in enumerate(self.stores)
            for name in _table_names(store)
        ]

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
            state = log.read_state()
            if state is None:
                continue
            index = list(log.read_index())
            damage: list[Damage] = []
            if check:
                for logged in log.read_blocks():
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
            for log in [RedisLog(store, name)]
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


def drop_those_that_left(log: RedisLog, damage: Sequence[Damage]) -> list[Damage]:
    """The damage that is none of a replay process at work: blocks that it has removed since they were read."""
    oldest = next(log.read_index(), None)
    return [block for block in damage if oldest is not None and block.first_row >= oldest.first_row]


def _read_format(store: RedisStore) -> str:
    return bytes(store.command("HGET", store.key("meta"), "format") or b"").decode(errors="replace")


def _table_names(store: RedisStore) -> list[str]:
    fields = store.command("HGETALL", store.key("meta"))[::2]
    return sorted(field.decode().removeprefix("table:") for field in fields if field.startswith(b"table:"))


def _count_shards(url: str, run_id: str) -> int:
    """1, or as many as there are from shard 0 on."""

    def is_there(shard: int | None) -> bool:
        store = RedisStore(url, run_id, deadline_seconds=DEADLINE_SECONDS, shard=shard)
        try:
            return bool(_read_format(store))
        finally:
            store.close()

    if is_there(None):
        return 1
    return max(1, next((shard for shard in range(MAX_SHARDS) if not is_there(shard)), MAX_SHARDS))


def require_empty(stores: Sequence[RedisStore], run_id: str) -> None:
    """Raise ConflictError if Redis has any key of the run."""
    for store in stores:
        for keys in scan(store):
            if keys:
                raise ConflictError(
                    f"run id {run_id!r} has a record in Redis at {store.shown} already: expected none; "
                    f"choose another id, as --as NEW_RUN, or remove it by `paceline replay delete {run_id}`"
                )
