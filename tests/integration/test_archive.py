"""The record of a run is inspected, exported, imported and deleted; nothing else is touched, nothing is believed."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import redis
import yaml

from integration.waiting import wait_until
from paceline.errors import ConflictError, InvalidInputError, NotFoundError, PacelineError, StoreFullError
from paceline.local.embedded import EmbeddedRedis
from paceline.replay import record as record_module
from paceline.replay.archive import export_run
from paceline.replay.archive_format import MAX_MANIFEST_BYTES
from paceline.replay.archive_import import import_run
from paceline.replay.log import RedisLog
from paceline.replay.logged import BlockWrite, LoggedBlock, LogState, Position
from paceline.replay.record import RunRecord, note_shards, write_note
from paceline.replay.store import RedisStore
from paceline.rows import Block, Column, RowSpec
from paceline.tables.pages import PAGE
from paceline.v1 import rows_pb2
from redis_record import held
from redis_servers import SERVERS, start_redis

SPEC = RowSpec((Column("value", "float64"), Column("observation", "float32", (4,)), Column("flag", "bool")))
ROWS = 10
LIMITER = '{"min_rows": 1}'


@pytest.fixture(scope="module", params=SERVERS)
def server(request, tmp_path_factory) -> Iterator[EmbeddedRedis]:
    server = start_redis(request.param, tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def client(server) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


def nothing(done: int, total: int) -> None:
    assert 0 <= done <= total


class Writer:
    """A process that owns a table's record."""

    def __init__(self, url: str, run_id: str = "run", table: str = "transitions", shard: int | None = None) -> None:
        self.store = RedisStore(url, run_id, deadline_seconds=10, shard=shard)
        self.store.claim(resume=True)
        self.log = RedisLog(self.store, table)
        self.log.begin(LogState(SPEC, LIMITER))
        self.next, self.sequence = 0, 0

    def append(self, *, collector: int = 0, removed: tuple[int, ...] = ()) -> None:
        block = Block.empty(SPEC, ROWS)
        block.columns["value"] = np.arange(self.next, self.next + ROWS)
        self.sequence += 1
        header = rows_pb2.BlockHeader(
            collector_index=collector,
            collector_incarnation=1,
            sequence=self.sequence,
            row_count=ROWS,
            row_spec_digest=SPEC.digest,
            checksum=block.checksum(),
            first_row=self.next,
        )
        logged = LoggedBlock(self.next, ROWS, header.SerializeToString(), block.data.tobytes())
        assert self.log.append(
            [BlockWrite(logged, header, removed=held(self.log, *removed, rows=ROWS), sampled=self.sequence)]
        )
        self.next += ROWS

    def save(self) -> None:
        self.log.save(inserted=self.next, sampled=7, consumed=3, dropped=2, pages={0: bytes(PAGE.itemsize)})


@pytest.fixture
def write(server, client) -> Iterator[Callable[..., Writer]]:
    """Makes a record of some blocks."""
    writers: list[Writer] = []

    def write(blocks: int = 5, **place: object) -> Writer:
        writers.append(Writer(server.url, **place))
        for number in range(blocks):
            writers[-1].append(collector=number % 2)
        writers[-1].save()
        return writers[-1]

    yield write
    for writer in writers:
        writer.store.close()


@pytest.fixture
def open_record(server) -> Iterator[Callable[..., RunRecord]]:
    records: list[RunRecord] = []

    def open_record(run_id: str = "run", **options: int) -> RunRecord:
        records.append(RunRecord(server.url, run_id, **options))
        return records[-1]

    yield open_record
    for record in records:
        record.close()


@pytest.fixture
def archive(write, open_record, tmp_path) -> Path:
    """Of a run of five blocks."""
    write()
    path = tmp_path / "run.tar"
    export_run(open_record(), path, progress=nothing)
    return path


def contents(store: RedisStore, table: str = "transitions") -> tuple[object, ...]:
    log = RedisLog(store, table)
    return log.read_state(), list(log.read_blocks()), dict(log.read_pages()), log.payload_bytes()


def keys(client: redis.Redis, run_id: str) -> set[str]:
    return {key.decode() for key in client.scan_iter(f"paceline:{{{run_id}*")}


def test_what_was_exported_is_imported_as_it_was(server, archive, write, open_record):
    manifest = import_run(archive, server.url, run_id="copy", progress=nothing)
    (store,), (copy,) = open_record().stores, open_record("copy").stores
    assert contents(copy) == contents(store)
    state, blocks, pages, _ = contents(copy)
    assert (state.inserted, state.sampled, state.consumed, state.dropped) == (50, 7, 3, 2)
    assert state.positions == {0: Position(1, 5, 10), 1: Position(1, 4, 10)}
    assert (len(blocks), list(pages), state.limiter_json) == (5, [0], LIMITER)
    assert (manifest.run_id, manifest.tables[0].row_count) == ("run", 50)
    assert copy.claim(resume=True)


def test_a_record_that_counted_dropped_rows_more_than_once_is_imported(server, write, open_record, tmp_path):
    writer = write()
    writer.log.save(inserted=50, sampled=7, consumed=3, dropped=170)
    export_run(open_record(), tmp_path / "run.tar", progress=nothing)
    import_run(tmp_path / "run.tar", server.url, run_id="copy", progress=nothing)
    (copy,) = open_record("copy").stores
    assert len(list(RedisLog(copy, "transitions").read_blocks())) == 5


def test_an_archive_is_a_tar_that_anybody_can_read(archive):
    with tarfile.open(archive) as tar:
        names = tar.getnames()
        manifest = json.load(tar.extractfile("manifest.json"))
        payload = tar.extractfile("tables/0/blocks/10").read()
    assert names[-2:] == ["manifest.json", "manifest.json.sha256"]
    assert manifest["tables"][0]["columns"][1] == {"name": "observation", "dtype": "float32", "shape": [4]}
    assert np.frombuffer(payload, SPEC.dtype)["value"].tolist() == list(range(10, 20))


def test_several_tables_of_several_shards_travel_together(server, client, write, open_record, tmp_path):
    for shard in (0, 1):
        write(2 + shard, run_id="sharded", shard=shard)
        write(1, run_id="sharded", table="others", shard=shard)
    record = open_record("sharded")
    assert [(shard, table) for shard, table, _ in record.tables()] == [
        (shard, table) for shard in (0, 1) for table in ("others", "transitions")
    ]
    export_run(record, tmp_path / "run.tar", progress=nothing)
    import_run(tmp_path / "run.tar", server.url, run_id="copy", progress=nothing)
    copy = open_record("copy")
    assert len(copy.stores) == 2
    for one, other in zip(record.stores, copy.stores, strict=True):
        for table in ("others", "transitions"):
            assert contents(one, table) == contents(other, table)


def test_an_export_beside_a_process_that_appends_and_removes_is_of_one_moment(server, write, open_record, tmp_path):
    writer, stop, begun = write(200), threading.Event(), threading.Event()
    oldest = 0

    def work() -> None:
        nonlocal oldest
        while not stop.is_set():
            writer.append(removed=(oldest,))
            oldest += ROWS
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        begun.wait(10)
        manifest = export_run(open_record(), tmp_path / "run.tar", progress=nothing)
    finally:
        stop.set()
        thread.join()
    (table,) = manifest.tables
    assert table.damaged_blocks == 0
    import_run(tmp_path / "run.tar", server.url, run_id="copy", progress=nothing)
    state, blocks, _, _ = contents(open_record("copy").stores[0])
    assert blocks[-1].end_row == state.inserted == table.inserted
    missing = set(range(blocks[0].first_row, state.inserted, ROWS)) - {block.first_row for block in blocks}
    assert all(first_row < oldest for first_row in missing)  # they left before they were read
    assert state.positions[0].sequence == state.inserted // ROWS


def test_damaged_blocks_are_named_and_left_out_of_an_export(server, client, write, open_record, tmp_path):
    write()
    key = "paceline:{run}:table:transitions:block:"
    client.setrange(f"{key}10", 3, b"\x55")
    client.delete(f"{key}40")
    record = open_record()
    (unchecked,) = record.survey(check=False, progress=nothing)
    (checked,) = record.survey(check=True, progress=nothing)
    assert (unchecked.checked, unchecked.damage, unchecked.block_count, unchecked.row_count) == (False, (), 5, 50)
    assert [(block.first_row, block.row_count) for block in checked.damage] == [(10, 10), (40, 10)]
    assert "checksum" in checked.damage[0].problem
    assert "missing" in checked.damage[1].problem
    manifest = export_run(record, tmp_path / "run.tar", progress=nothing)
    assert (manifest.tables[0].damaged_blocks, manifest.tables[0].block_count) == (2, 3)
    import_run(tmp_path / "run.tar", server.url, run_id="copy", progress=nothing)
    state, blocks, _, _ = contents(open_record("copy").stores[0])
    assert ([block.first_row for block in blocks], state.inserted) == ([0, 20, 30], 50)


def test_a_table_without_a_whole_block_keeps_its_counters(server, client, write, open_record, tmp_path):
    write()
    for first_row in range(0, 50, 10):
        client.delete(f"paceline:{{run}}:table:transitions:block:{first_row}")
    export_run(open_record(), tmp_path / "run.tar", progress=nothing)
    import_run(tmp_path / "run.tar", server.url, run_id="copy", progress=nothing)
    state, blocks, _, _ = contents(open_record("copy").stores[0])
    assert (blocks, state.inserted, state.positions[0]) == ([], 50, Position(1, 5, 10))


def test_a_file_that_is_there_is_not_overwritten_and_a_failed_export_leaves_none(
    open_record, write, tmp_path, monkeypatch
):
    write()
    path = tmp_path / "run.tar"
    path.write_text("mine")
    with pytest.raises(ConflictError, match="is there already"):
        export_run(open_record(), path, progress=nothing)
    assert path.read_text() == "mine"
    path.unlink()

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_run(open_record(), path, progress=fail)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PacelineError, match="cannot be written"):
        export_run(open_record(), tmp_path / "no" / "folder.tar", progress=nothing)


def test_an_import_never_mixes_with_what_is_there(server, client, archive):
    before = {key: client.dump(key) for key in keys(client, "run")}
    with pytest.raises(ConflictError, match=r"'run' has a record .* choose another id, as --as NEW_RUN"):
        import_run(archive, server.url, progress=nothing)
    assert {key: client.dump(key) for key in keys(client, "run")} == before
    client.set("paceline:{copy}:table:old:block:0", "left over")
    with pytest.raises(ConflictError):
        import_run(archive, server.url, run_id="copy", progress=nothing)


def test_an_import_that_fails_halfway_leaves_nothing(server, client, archive):
    def fill(done: int, total: int) -> None:
        if done > 0.7 * total:
            assert keys(client, "copy")
            client.config_set("maxmemory", "1")

    try:
        with pytest.raises(StoreFullError):
            import_run(archive, server.url, run_id="copy", progress=fill)
    finally:
        client.config_set("maxmemory", "0")
    assert keys(client, "copy") == set()
    import_run(archive, server.url, run_id="copy", progress=nothing)


def test_a_record_whose_import_was_killed_is_no_record_and_can_be_removed(server, client, archive, open_record):
    import_run(archive, server.url, run_id="copy", progress=nothing)
    client.hset("paceline:{copy}:meta", "format", "being imported")
    record = open_record("copy")
    with pytest.raises(ConflictError, match="has format being imported: expected 2"):
        record.stores[0].claim(resume=True)
    with pytest.raises(ConflictError):
        record.require_whole()
    record.delete(progress=nothing)
    assert keys(client, "copy") == set()


def test_a_delete_removes_the_run_and_nothing_else(client, write, open_record, monkeypatch):
    monkeypatch.setattr(record_module, "REMOVE_STEP", 3)
    write(run_id="run")
    write(run_id="run-2")
    client.set("mine", "1")
    client.set("paceline:{run}:table:transitions:block:999", "an orphan")
    others = keys(client, "run-2")

    def say_what_is_left(done: int, total: int) -> None:
        assert done == total or client.exists("paceline:{run}:meta")

    assert open_record("run").delete(progress=say_what_is_left) == 5 + 1 + 7
    assert keys(client, "run") == others == keys(client, "run-2")
    assert client.get("mine") == b"1"
    with pytest.raises(NotFoundError, match="no record of run 'run'"):
        open_record("run")


def test_a_delete_that_was_cut_short_is_seen_and_finished(client, write, open_record, monkeypatch):
    monkeypatch.setattr(record_module, "REMOVE_STEP", 2)
    write()

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_record().delete(progress=fail)
    record = open_record()
    with pytest.raises(ConflictError, match="has format being deleted"):
        record.stores[0].claim(resume=True)
    record.delete(progress=nothing)
    assert keys(client, "run") == set()


def test_a_full_redis_can_be_emptied(client, write, open_record):
    write()
    client.config_set("maxmemory", "1")
    try:
        open_record().delete(progress=nothing)
    finally:
        client.config_set("maxmemory", "0")
    assert keys(client, "run") == set()


def test_a_process_that_saves_is_noticed_and_one_that_ended_is_not(write, open_record, monkeypatch):
    monkeypatch.setattr(record_module, "WATCH_SECONDS", 3.0)
    writer, record = write(), open_record()
    assert not record.is_served()  # it saved just now, and then no more
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.3):
            writer.save()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert record.is_served()
    finally:
        stop.set()
        thread.join()


# Archives that somebody made to do harm, or that were damaged.


def begin_shards(url: str, present: tuple[int | None, ...], noted: int | None) -> None:
    """Records of a run: of its one shard (None), or of some of several."""
    for shard in present:
        store = RedisStore(url, "run", deadline_seconds=10, shard=shard)
        if noted:
            write_note(store, noted)
        store.claim(resume=False)
        store.close()


@pytest.mark.parametrize(
    ("present", "noted", "shards", "shard", "begun"),
    [
        ((), None, 2, 0, None),
        ((None,), 1, 1, 0, None),
        ((None,), None, 1, 0, None),
        ((None,), 1, 2, 0, 1),
        ((None,), None, 2, 1, 1),
        ((0, 1), 2, 1, 0, 2),
        ((0, 1), None, 1, 0, 2),
        ((0, 1), 2, 2, 1, None),
        ((0, 1), None, 2, 1, None),
        ((0,), 2, 2, 1, None),  # its Redis lost it, or it begins
        ((0, 1), 2, 3, 0, 2),
        ((0, 1), None, 3, 2, 2),
        ((0, 1, 2), 3, 2, 0, 3),
        ((0, 1, 2), None, 2, 0, 3),
        ((2,), None, 3, 2, None),  # each in a Redis of its own
        ((2,), 3, 4, 2, 3),
        ((None, 0, 1), 2, 1, 0, None),  # what an earlier mistake left
        ((None, 0, 1), 2, 2, 0, None),
    ],
)
def test_a_shard_begins_or_goes_on_only_where_the_run_has_as_many(server, client, present, noted, shards, shard, begun):
    begin_shards(server.url, present, noted)
    store = RedisStore(server.url, "run", deadline_seconds=10, shard=shard if shards > 1 else None)
    before = keys(client, "run")
    if begun is None:
        note_shards(store, "run", shards, shard)
        is_new = (None if shards == 1 else shard) not in present
        assert store.command("HGET", store.key("meta"), "shards") == (
            str(shards).encode() if is_new else str(noted).encode() if noted else None
        )
        assert store.claim(resume=True) != is_new
    else:
        with pytest.raises(
            ConflictError, match=rf"has {begun} shard\(s\) and .*expected replay.shards={begun}, as when"
        ):
            note_shards(store, "run", shards, shard)
        assert keys(client, "run") == before
    store.close()


def test_a_record_of_which_one_shard_is_left_is_found(write, open_record):
    write(shard=0)
    assert [shard for shard, _, _ in open_record().tables()] == [0]
    assert open_record().other_counts == []
    with pytest.raises(NotFoundError, match=r"with 1 shard\(s\) in Redis .* but one with 2: expected --shards 2"):
        open_record(shards=1)


def test_whoever_asks_for_fewer_shards_than_there_are_is_told(server, client, open_record):
    begin_shards(server.url, (0, 1, 2), 3)
    assert "of 3 shard(s)" in open_record(shards=2).others()[0]
    assert open_record().others() == []


def test_of_two_records_of_a_run_one_is_named(write, open_record, client):
    write()
    write(shard=0), write(shard=1)
    with pytest.raises(ConflictError, match=r"two records of run 'run', one of 1 shard and one of 2: .* --shards 2"):
        open_record()
    one = open_record(shards=1)
    assert len(one.tables()) == 1
    assert "another record in Redis, of 2 shard(s)" in one.others()[0]
    open_record(shards=2).delete(progress=nothing)
    assert open_record().others() == []
    assert {key.split("}")[0] for key in keys(client, "run")} == {"paceline:{run"}


def test_an_import_does_not_begin_a_second_record_of_a_run(server, client, archive):
    client.flushall()
    begin_shards(server.url, (0, 1), 2)
    with pytest.raises(ConflictError, match="has a record in Redis"):
        import_run(archive, server.url, progress=nothing)


def test_a_table_that_cannot_be_read_is_named_and_left_out(client, write, open_record, tmp_path):
    write(table="broken"), write(table="whole")
    client.hdel("paceline:{run}:table:broken:state", "consumed")
    record = open_record()
    assert [table.table for table in record.survey(check=True, progress=nothing)] == ["whole"]
    (problem,) = record.problems
    assert "table 'broken' is damaged: paceline:{run}:table:broken:state has no field 'consumed'" in problem
    record = open_record()
    manifest = export_run(record, tmp_path / "rest.tar", progress=nothing)
    assert [table.name for table in manifest.tables] == ["whole"]
    assert record.problems == [problem]


def rewrite(path: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> None:
    """Write an archive again with its members changed."""
    with tarfile.open(path) as tar:
        members = [(info, tar.extractfile(info).read()) for info in tar.getmembers()]
    change(members)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for info, data in members:
            if info.isreg():
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def place(members: list[tuple[tarfile.TarInfo, bytes]], name: str) -> int:
    return next(number for number, (info, _) in enumerate(members) if info.name == name)


def sign(members: list[tuple[tarfile.TarInfo, bytes]], **changes: object) -> None:
    """Change the manifest, and its checksum with it: as somebody would who means harm."""
    at = place(members, "manifest.json")
    manifest = json.loads(members[at][1])
    for path, value in changes.items():
        target, parts = manifest, path.split("__")
        for part in parts[:-1]:
            target = target[int(part) if part.isdigit() else part]
        target[parts[-1]] = value(target[parts[-1]]) if callable(value) else value
    data = json.dumps(manifest).encode()
    members[at] = (members[at][0], data)
    checksum = place(members, "manifest.json.sha256")
    members[checksum] = (members[checksum][0], hashlib.sha256(data).hexdigest().encode())


def replace_in(members: list[tuple[tarfile.TarInfo, bytes]], name: str, old: bytes, new: bytes) -> None:
    at = place(members, name)
    assert old in members[at][1]
    members[at] = (members[at][0], members[at][1].replace(old, new))


def set_index(members: list[tuple[tarfile.TarInfo, bytes]], data: bytes) -> None:
    at = place(members, "tables/0/index.jsonl")
    members[at] = (members[at][0], data)
    sign(members, tables__0__index_sha256=hashlib.sha256(data).hexdigest())


def change_index(members: list[tuple[tarfile.TarInfo, bytes]], line: int, **changes: object) -> None:
    lines = members[place(members, "tables/0/index.jsonl")][1].splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **changes}).encode()
    set_index(members, b"".join(line + b"\n" for line in lines))


def add(members: list[tuple[tarfile.TarInfo, bytes]], name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"x"):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
    members.insert(0, (info, data if kind == tarfile.REGTYPE else b""))


NO_REDIS = "redis://127.0.0.1:1/0"
"""Nobody listens there."""

HARM: dict[str, Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]] = {
    "a path out of the archive": lambda m: add(m, "../../tmp/x"),
    "an absolute path": lambda m: add(m, "/tmp/x"),
    "a symbolic link": lambda m: add(m, "tables/0/blocks/90", tarfile.SYMTYPE),
    "a hard link": lambda m: add(m, "tables/0/blocks/90", tarfile.LNKTYPE),
    "a block that is a link": lambda m: setattr(m[0][0], "type", tarfile.SYMTYPE),
    "a device": lambda m: add(m, "tables/0/blocks/90", tarfile.CHRTYPE),
    "an extended header": lambda m: add(m, "tables/0/blocks/90", tarfile.XHDTYPE),
    "a sparse file": lambda m: add(m, "tables/0/blocks/90", tarfile.GNUTYPE_SPARSE),
    "a member that nothing refers to": lambda m: add(m, "tables/0/blocks/90"),
    "a member twice": lambda m: m.append(m[0]),
    "no manifest": lambda m: m.pop(place(m, "manifest.json")),
    "no checksum": lambda m: m.pop(place(m, "manifest.json.sha256")),
    "no index": lambda m: m.pop(place(m, "tables/0/index.jsonl")),
    "a block less": lambda m: m.pop(place(m, "tables/0/blocks/20")),
    "another manifest": lambda m: m.__setitem__(place(m, "manifest.json"), (m[place(m, "manifest.json")][0], b"{}")),
    "no JSON": lambda m: m.__setitem__(place(m, "manifest.json"), (m[place(m, "manifest.json")][0], b"\x80\x04N.")),
    "a counter changed": lambda m: replace_in(m, "manifest.json", b'"sampled": 7', b'"sampled": 8'),
    "another format": lambda m: sign(m, format="paceline-replay-archive 99"),
    "a run id that is none": lambda m: sign(m, run_id="a}:*"),
    "a wrong type": lambda m: sign(m, tables__0__inserted="50"),
    "a negative count": lambda m: sign(m, tables__0__sampled=-1),
    "a number beyond all": lambda m: sign(m, tables__0__inserted=10**400),
    "a shard that there is not": lambda m: sign(m, tables__0__shard=5),
    "a table twice": lambda m: sign(m, tables=lambda tables: tables * 2),
    "another row": lambda m: sign(m, tables__0__row_bytes=8),
    "a row of terabytes": lambda m: sign(m, tables__0__columns=[{"name": "a", "dtype": "float64", "shape": [10**12]}]),
    "more rows than were inserted": lambda m: sign(m, tables__0__inserted=30),
    "more consumed than inserted": lambda m: sign(m, tables__0__consumed=51),
    "another block count": lambda m: sign(m, tables__0__block_count=4),
    "a line that never ends": lambda m: set_index(m, b"x" * 300_000),
    "a line that is none": lambda m: set_index(m, b"[]\n"),
    "another checksum of a block": lambda m: change_index(m, 1, payload_sha256="0" * 64),
    "another size of a block": lambda m: change_index(m, 1, payload_bytes=10**12),
    "another place of a block": lambda m: change_index(m, 1, first_row=0),
    "another row count of a block": lambda m: change_index(m, 1, row_count=2**31),
    "a header that is none": lambda m: change_index(m, 1, header="/////w=="),
    "a header that is no base64": lambda m: change_index(m, 1, header="***"),
}


@pytest.mark.parametrize("harm", HARM)
def test_an_archive_that_does_not_hold_what_it_should_is_refused_before_redis_is_asked(archive, harm):
    rewrite(archive, HARM[harm])
    with pytest.raises(InvalidInputError):
        import_run(archive, NO_REDIS, progress=nothing)


def test_a_block_that_repeats_another_is_refused(archive):
    def repeat(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        lines = [json.loads(line) for line in members[place(members, "tables/0/index.jsonl")][1].splitlines()]
        header = rows_pb2.BlockHeader.FromString(base64.b64decode(lines[2]["header"]))
        header.sequence = 1
        change_index(members, 2, header=base64.b64encode(header.SerializeToString()).decode())

    rewrite(archive, repeat)
    with pytest.raises(InvalidInputError, match="repeats one before it"):
        import_run(archive, NO_REDIS, progress=nothing)


@pytest.mark.parametrize("size", [10**12, MAX_MANIFEST_BYTES + 1])
def test_a_member_that_claims_more_than_there_is_allocates_nothing(server, tmp_path, size):
    info = tarfile.TarInfo("tables/0/blocks/0")
    info.size = size
    (tmp_path / "bad.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + b"x" * 512)
    with pytest.raises(InvalidInputError, match=r"claims \d+ bytes"):
        import_run(tmp_path / "bad.tar", server.url, progress=nothing)


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\x80\x04cos\nsystem\n", bytes(511), b"\x1f\x8b" + bytes(1000)])
def test_a_file_that_is_no_archive_is_refused(server, tmp_path, data):
    (tmp_path / "bad.tar").write_bytes(data)
    with pytest.raises(InvalidInputError, match="is not a whole archive of a run"):
        import_run(tmp_path / "bad.tar", server.url, progress=nothing)
    with pytest.raises(NotFoundError):
        import_run(tmp_path / "none.tar", server.url, progress=nothing)


def test_an_archive_cut_anywhere_or_with_a_byte_changed_is_refused_or_means_the_same(server, client, archive):
    whole, random = archive.read_bytes(), np.random.default_rng(11)
    end = len(whole.rstrip(b"\0"))
    for cut in random.integers(0, end, 60):
        archive.write_bytes(whole[:cut])
        with pytest.raises(InvalidInputError):
            import_run(archive, server.url, run_id="copy", progress=nothing)
    refused = 0
    store = RedisStore(server.url, "run", deadline_seconds=10)
    expected = contents(store)
    for at in random.integers(0, end, 150):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(random.integers(8))
        archive.write_bytes(damaged)
        try:
            import_run(archive, server.url, run_id="copy", progress=nothing)
        except InvalidInputError:
            refused += 1
            assert keys(client, "copy") == set()
            continue
        copy = RunRecord(server.url, "copy")
        assert contents(copy.stores[0]) == expected  # the byte was padding
        copy.delete(progress=nothing)
        copy.close()
    store.close()
    assert refused > 75


# The command itself. It takes a second or two to start.


def paceline(*arguments: str, cwd: Path, answer: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=cwd,
        input=answer,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SETTINGS = {"run": {"id": "first", "environment_steps": 777}, "replay": {"redis_url": None}}


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """Of a run that `paceline train` made, with a server of its own that is stopped."""
    folder = tmp_path / "runs" / "first"
    server = EmbeddedRedis.start(folder / "redis")
    try:
        writer = Writer(server.url, "first")
        for _ in range(5):
            writer.append()
        writer.save()
        writer.store.close()
    finally:
        server.stop()
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    return folder


@pytest.mark.slow
def test_the_commands_look_after_the_record_in_a_runs_folder(run_folder, tmp_path):
    said = paceline("replay", "inspect", "first", "--check", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    assert "50 in 5 blocks, keys 0 to 50" in said.stdout
    assert "damage     none" in said.stdout

    said = paceline("replay", "export", str(run_folder), "first.tar", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith("run first: 50 rows in 5 blocks, ")

    said = paceline("replay", "import", "first.tar", "--into", str(run_folder), cwd=tmp_path)
    assert said.returncode == 2
    assert "choose another id, as --as NEW_RUN" in said.stderr
    for into, name, problem in (
        (run_folder, "second", "is the folder of run 'first': expected that of run 'second' or a new one"),
        (tmp_path / "runs" / "third", "second", "expected a folder named second"),
    ):
        said = paceline("replay", "import", "first.tar", "--into", str(into), "--as", name, cwd=tmp_path)
        assert said.returncode == 2
        assert problem in said.stderr
    assert not (tmp_path / "runs" / "third").exists()
    said = paceline("replay", "import", "first.tar", "--into", "runs/second", "--as", "second", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.endswith("go on with it: paceline train runs/second --resume\n")
    for run in ("second", "runs/second"):
        said = paceline("replay", "inspect", run, "--check", cwd=tmp_path)
        assert (said.returncode, said.stderr) == (0, "")
        assert "run second in unix://" in said.stdout
        assert "50 in 5 blocks, keys 0 to 50" in said.stdout
    assert yaml.safe_load((tmp_path / "runs/second/config.yaml").read_text())["run"]["environment_steps"] == 777
    assert paceline("replay", "export", "second", "second.tar", cwd=tmp_path).returncode == 0
    assert paceline("replay", "delete", "second", "--yes", cwd=tmp_path).returncode == 0
    said = paceline("replay", "import", "second.tar", "--into", "runs/second", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")

    for answer, code in (("n\n", 1), ("y\n", 0)):
        said = paceline("replay", "delete", "first", cwd=tmp_path, answer=answer)
        assert said.returncode == code
        assert "Remove the record of run first (5 blocks) from unix://" in said.stderr
    said = paceline("replay", "inspect", "first", cwd=tmp_path)
    assert said.returncode == 2
    assert "no record of run 'first'" in said.stderr


@pytest.mark.slow
def test_a_run_that_is_resumed_with_another_number_of_shards_is_refused_and_stays_as_it_was(run_folder, tmp_path):
    before = (run_folder / "config.yaml").read_text()
    said = paceline("train", str(run_folder), "--resume", "replay.shards=2", "collector.count=2", cwd=tmp_path)
    assert said.returncode == 2
    assert "has 1 shard(s) and replay.shards is 2: expected replay.shards=1, as when it began" in said.stderr
    assert (run_folder / "config.yaml").read_text() == before
    said = paceline("replay", "inspect", "first", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    assert "50 in 5 blocks, keys 0 to 50" in said.stdout


SMALL = ("learner.batch_size=32", "learner.updates_per_step=0.25")
QUICK = ("collector.count=1", "evaluator.enabled=false", *SMALL, "run.id=first", "--plain")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_was_imported_is_trained_on(tmp_path):
    said = paceline("train", *QUICK, "run.environment_steps=1200", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    server = EmbeddedRedis.start(tmp_path / "runs" / "first" / "redis")
    try:
        assert paceline("replay", "export", "first", "settings.tar", cwd=tmp_path).returncode == 0
        with closing(RunRecord(server.url, "first")) as record:
            export_run(record, tmp_path / "none.tar", progress=nothing)
    finally:
        server.stop()

    def command_after_import(file: str, run_id: str) -> list[str]:
        said = paceline("replay", "import", file, "--as", run_id, "--into", f"runs/{run_id}", cwd=tmp_path)
        assert said.returncode == 0, said.stderr
        return said.stdout.rstrip().rpartition(": paceline ")[2].split()

    assert command_after_import("settings.tar", "other") == ["train", "runs/other", "--resume"]
    command = command_after_import("none.tar", "again")
    assert command == ["train", "CONFIG", "run.id=again", "run.directory=runs", "--resume"]
    command[1] = "runs/first"
    said = paceline(*command, "run.environment_steps=1500", "--plain", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    described = json.loads(paceline("replay", "inspect", "again", "--json", cwd=tmp_path).stdout)["tables"][0]
    assert described["inserted"] == 1500
    assert described["collectors"][0]["incarnation"] == 2
    assert "duplicate" not in (tmp_path / "runs/again/logs/replay.log").read_text()


@pytest.mark.slow
def test_a_server_that_already_works_on_the_folder_is_used(run_folder, tmp_path):
    server = EmbeddedRedis.start(run_folder / "redis")
    try:
        said = paceline("replay", "inspect", "first", "--json", cwd=tmp_path)
        assert said.returncode == 0, said.stderr
        described = json.loads(said.stdout)
        assert described["run_id"] == "first"
        assert described["tables"][0]["inserted"] == 50
        assert described["tables"][0]["collectors"][0]["sequence"] == 5
        with redis.Redis.from_url(server.url) as client:
            assert int(client.info("stats")["total_connections_received"]) > 2
            client.delete("paceline:{first}:table:transitions:block:20")
        said = paceline("replay", "inspect", "first", "--check", cwd=tmp_path)
        assert said.returncode == 1
        assert "rows 20 to 30: its payload is missing" in said.stdout
    finally:
        server.stop()


@pytest.mark.slow
def test_a_record_in_a_redis_of_its_own_is_named_by_url(server, client, write, tmp_path):
    writer = write(run_id="elsewhere")
    url = ("--redis-url", server.url)
    assert "nothing says where" in paceline("replay", "inspect", "elsewhere", cwd=tmp_path).stderr
    assert paceline("replay", "inspect", "elsewhere", *url, cwd=tmp_path).returncode == 0
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.3):
            writer.save()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        said = paceline("replay", "delete", "elsewhere", *url, "--yes", cwd=tmp_path)
        assert said.returncode == 2
        assert "stop it first" in said.stderr
    finally:
        stop.set()
        thread.join()
    said = paceline("replay", "delete", "elsewhere", *url, "--yes", "--force", cwd=tmp_path)
    assert (said.returncode, said.stdout) == (0, "run elsewhere: removed 12 keys\n")
    assert keys(client, "elsewhere") == set()


@pytest.mark.slow
def test_replay_with_a_configuration_still_serves(server, client, tmp_path):
    (tmp_path / "run.yaml").write_text("run: {id: served}\n")
    said = paceline("replay", "run.yaml", cwd=tmp_path)
    assert said.returncode == 2
    assert "replay.redis_url is not set" in said.stderr
    ports = [f"replay.{name}=127.0.0.1:0" for name in ("listen", "metrics_listen")]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "replay", "run.yaml", f"replay.redis_url={server.url}", *ports, "--shard=0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: keys(client, "served"))
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
