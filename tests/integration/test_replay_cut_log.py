"""Redis' append-only file ends within a transaction, as a kill leaves it, and the record is right after the next kill.

Redis 7.0 cuts such a file after the last whole command, within the transaction, and carries its beginning out at the
load after the next, together with the transaction that came next; other servers cut before it. Here the file is cut at
each command of a transaction, and in its midst.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import redis

from paceline.local.embedded import EmbeddedRedis
from paceline.replay.blocks import HeldBlock
from paceline.replay.log import OutOfStepError, RedisLog
from paceline.replay.logged import BlockWrite, LoggedBlock, LogState
from paceline.replay.store import RedisStore
from paceline.rows import Column, RowSpec
from paceline.v1 import rows_pb2
from redis_record import keys_of_payloads, settle
from redis_servers import SERVERS, start_redis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SPEC = RowSpec((Column("value", "float32"),))
RUN, TABLE = "cut", "transitions"


@dataclass(frozen=True)
class Sent:
    """A block of a collector."""

    collector: int
    sequence: int
    rows: int

    @property
    def payload(self) -> bytes:
        return f"block {self.sequence} of collector {self.collector}, ".encode() * self.rows


@dataclass
class Process:
    """A replay process, less its memory: it knows its blocks, and begins an epoch when it must."""

    url: str
    begun: bool = True
    held: list[HeldBlock] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = RedisStore(self.url, RUN, deadline_seconds=10)
        self.store.claim(resume=True)
        self.log = RedisLog(self.store, TABLE)
        if self.begun:
            assert settle(self.log) is not None
            for block in self.stored():
                self._hold(block, block.epoch)
        else:
            self.log.begin(LogState(SPEC, "{}"))

    def stored(self) -> list[LoggedBlock]:
        return list(self.log.read_blocks())

    def append(self, blocks: Sequence[Sent], *, leaving: int = 0) -> int:
        """Send blocks in one message, the first of which has the oldest ones leave; how many were stored."""
        try:
            return self._append(blocks, leaving)
        except OutOfStepError:
            settle(self.log)
            return self._append(blocks, leaving)

    def _append(self, blocks: Sequence[Sent], leaving: int) -> int:
        state = self.log.read_state()
        assert state is not None
        writes, row = [], state.inserted
        for number, sent in enumerate(blocks):
            stamp = rows_pb2.BlockHeader(
                collector_index=sent.collector,
                collector_incarnation=1,
                sequence=sent.sequence,
                row_count=sent.rows,
                first_row=row,
            )
            block = LoggedBlock(row, sent.rows, stamp.SerializeToString(), sent.payload)
            writes.append(BlockWrite(block, stamp, removed=[] if number else self.held[:leaving]))
            row += sent.rows
        stored = self.log.append(writes)
        if stored:
            del self.held[:leaving]
        for write in writes[:stored]:
            self._hold(write.block, self.log.epoch)
        return stored

    def _hold(self, block: LoggedBlock, epoch: int) -> None:
        self.held.append(HeldBlock(block.first_row, block.row_count, len(block.payload), block.header, epoch))

    def save(self, *, leaving: int) -> None:
        state = self.log.read_state()
        assert state is not None
        pages = {0: b"new"} if leaving else {0: b"old"}
        size = sum(held.payload_bytes for held in self.held[leaving:])
        self.log.save(inserted=state.inserted, sampled=7, removed=self.held[:leaving], payload_bytes=size, pages=pages)
        del self.held[:leaving]

    def leave(self, count: int) -> None:
        """Have the blocks leave that were the first `count` of all, if they are still there."""
        self.save(leaving=sum(held.first_row < FIRST[0].rows * count for held in self.held))

    def close(self) -> None:
        self.store.close()


FIRST = [Sent(0, sequence, 10) for sequence in range(1, 7)]
"""Stored and acknowledged before the step that is cut."""
CUT = [Sent(1, 1, 10), Sent(0, 7, 10), Sent(1, 2, 5)]
"""Those of a message that is cut: they were not acknowledged, and their collectors send them again."""
NEXT = [[Sent(2, 1, 15), Sent(0, 7, 10)], [Sent(2, 2, 7)]]
"""Stored and acknowledged after it."""

LEAVING = 2
"""So many of the oldest blocks leave with the step that is cut."""

STEPS: dict[str, Callable[[Process], object]] = {
    "a message": lambda process: process.append(CUT, leaving=LEAVING),
    "a save": lambda process: process.save(leaving=LEAVING),
    "an epoch": lambda process: settle(process.log),
}


class Cutter:
    """A server that was killed in the midst of a write: its file ends within the last transaction."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder, self._count = kind, folder, 0
        self.whole = folder / "whole"

    def write(self, step: str) -> None:
        """Have a file whose last transaction is the one of that step."""
        server = self.start(self.whole)
        process = Process(server.url, begun=False)
        assert process.append(FIRST[:3]) == 3
        assert process.append(FIRST[3:]) == 3
        process.save(leaving=0)
        STEPS[step](process)
        process.close()
        self.kill(server)
        server.stop()

    def ends(self) -> list[int]:
        """Where the file may end: within each command of its last transaction, and before the last one."""
        data = self._file(self.whole).read_bytes()
        starts = [data.rindex(b"*1\r\n$5\r\nMULTI\r\n")]
        while starts[-1] < len(data):
            starts.append(_command_end(data, starts[-1]))
        return [(start + after) // 2 for start, after in pairwise(starts[1:])] + starts[-2:-1]

    def cut(self, end: int) -> EmbeddedRedis:
        """A server that has loaded the file up to there."""
        self._count += 1
        folder = self._folder / str(self._count)
        shutil.copytree(self.whole, folder)
        with self._file(folder).open("r+b") as file:
            file.truncate(end)
        return self.start(folder)

    def start(self, folder: Path) -> EmbeddedRedis:
        return start_redis(self._kind, folder, appendfsync="always")

    def kill(self, server: EmbeddedRedis) -> None:
        server.process.kill()
        server.process.wait()

    def _file(self, folder: Path) -> Path:
        (found,) = folder.rglob("appendonly.aof*incr.aof")
        return found


def _command_end(data: bytes, start: int) -> int:
    line = data.index(b"\r\n", start)
    at = line + 2
    for _ in range(int(data[start + 1 : line])):
        line = data.index(b"\r\n", at)
        at = line + 2 + int(data[at + 1 : line]) + 2
    return at


@pytest.fixture
def cutter(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cutter]:
    return Cutter(request.param, tmp_path)


def write_as_another(server: EmbeddedRedis) -> None:
    """What somebody else does on the same server, in a transaction."""
    with redis.Redis.from_url(server.url) as client, client.pipeline(transaction=True) as pipeline:
        pipeline.set("other", "1").set("another", "2").execute()


# Servers that cut before a transaction have its beginning nowhere: of those one step is enough.
@pytest.mark.parametrize(
    ("cutter", "step", "then"),
    [
        (kind, step, then)
        for kind in SERVERS
        for step in (STEPS if kind == "redis" else ["a message"])
        for then in ("a process", "the same process", "somebody", "somebody, who is killed")
    ],
    indirect=["cutter"],
)
def test_a_step_that_was_cut_costs_no_block_and_brings_none_twice(cutter: Cutter, step: str, then: str):
    cutter.write(step)
    for end in cutter.ends():
        server = cutter.cut(end)
        try:
            check(cutter, server, then, leaving=0 if step == "an epoch" else LEAVING)
        except BaseException as error:
            error.add_note(f"the file was cut at {end}")
            raise
        finally:
            server.stop()


def check(cutter: Cutter, server: EmbeddedRedis, then: str, leaving: int) -> None:
    if then.startswith("somebody"):
        write_as_another(server)
    if then == "somebody, who is killed":
        cutter.kill(server)
        server.restart()
    process = Process(server.url)
    for blocks in NEXT:
        append_new(process, blocks)
    process.leave(leaving)
    cutter.kill(server)
    server.restart()
    if then != "the same process":
        process.close()
        process = Process(server.url)
    for block in [*CUT, Sent(3, 1, 4)]:
        append_new(process, [block])
    process.leave(0)
    stored = check_blocks(process, leaving)
    with redis.Redis.from_url(server.url) as client:
        orphans = keys_of_payloads(client, RUN) - {block.first_row for block in stored}
        said = int(client.hget(f"paceline:{{{RUN}}}:table:{TABLE}:state", "payload_bytes"))
    assert said == sum(len(block.payload) for block in stored)
    # Nobody can know any more of a payload that no entry named yet, or of one that an entry no longer named.
    assert len(orphans) <= 1 or (orphans <= {0, 10} and then == "somebody, who is killed")
    process.close()


def append_new(process: Process, blocks: Sequence[Sent]) -> None:
    """As the table does, which stores nothing that it knows already."""
    new = [block for block in blocks if not is_known(process, block)]
    assert not new or process.append(new) == len(new)


def is_known(process: Process, block: Sent) -> bool:
    state = process.log.read_state()
    assert state is not None
    last = state.positions.get(block.collector)
    return last is not None and block.sequence <= last.sequence


def check_blocks(process: Process, leaving: int) -> list[LoggedBlock]:
    """Every block that was sent is there once, and whole, and nothing else is."""
    blocks, found, next_row = process.stored(), [], None
    for block in blocks:
        header = rows_pb2.BlockHeader.FromString(block.header)
        assert (header.first_row, header.row_count) == (block.first_row, block.row_count)
        assert next_row in (None, block.first_row)
        next_row = block.end_row
        sent = Sent(header.collector_index, header.sequence, header.row_count)
        assert bytes(block.payload) == sent.payload
        found.append(sent)
    assert len(set(found)) == len(found)
    assert set(found) == {*FIRST[leaving:], *CUT, *NEXT[0], *NEXT[1], Sent(3, 1, 4)}
    state = process.log.read_state()
    assert state is not None
    assert state.inserted == next_row
    last = {sent.collector: sent.sequence for sent in sorted(found, key=lambda sent: sent.sequence)}
    assert {collector: position.sequence for collector, position in state.positions.items()} == last
    return blocks
