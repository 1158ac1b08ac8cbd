"""Redis loses the end of its file again and again, mostly within a transaction, and replay has it whole each time.

A table as replay has it, over a real server, against what was acknowledged. `test_replay_cut_log` looks at one cut;
here one follows the other, with a stranger who writes in between, replies that are lost, and processes that take over.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from prometheus_client import CollectorRegistry

from contract.faulty_redis import FaultyRedis
from integration.waiting import wait_until
from paceline.config import build
from paceline.errors import UnavailableError
from paceline.replay import scripts
from paceline.replay.log import RedisLog
from paceline.replay.metrics import APPEND_ACTIVITIES, ReplayMetrics, TableMetrics
from paceline.replay.settings import limiter_settings, memory_settings
from paceline.replay.store import RedisStore
from paceline.replay.table import Table
from paceline.rows import Block, Column, RowSpec
from paceline.rpc.wire import SentBlock
from paceline.telemetry import ActivityClock
from paceline.v1 import rows_pb2
from redis_record import keys_of_payloads, read_record
from redis_servers import SERVERS, start_redis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUN, TABLE, SPEC = "rolled-back", "transitions", RowSpec((Column("value", "int64"),))
ROWS, CAPACITY, COLLECTORS, STEPS = 10, 100, 3, 120
CONFIG = build(
    {
        "learner": {"updates": "learner_bound", "batch_size": 1},
        "collector": {"block_rows": ROWS},
        "replay": {"tables": {TABLE: {"capacity_rows": CAPACITY, "limiter": {"min_rows": 1}}}},
    }
)
SCRIPTS = (scripts.RESTATE, scripts.SAVE, scripts.COMMIT)


class Process:
    """A replay process, less its services."""

    def __init__(self, url: str) -> None:
        self.store = RedisStore(url, RUN, deadline_seconds=5)
        self.store.claim(resume=True)
        self.metrics = ReplayMetrics(CollectorRegistry())
        log = RedisLog(self.store, TABLE)
        self.table = Table(
            TABLE,
            SPEC,
            CONFIG.replay.tables[TABLE],
            log,
            TableMetrics(self.metrics, TABLE),
            capacity_rows=CAPACITY,
            memory=memory_settings(CONFIG, TABLE, SPEC),
            limiter=limiter_settings(CONFIG, TABLE),
            row_limit=None,
            settings_json="{}",
        )
        state = log.read_state()
        if state is None:
            self.table.begin()
        else:
            self.table.load(state)
            for _ in self.table.restore():
                pass

    def append(self, blocks: list[tuple[int, int]]) -> None:
        """Blocks of collectors, by their sequences, in one message."""
        clock = ActivityClock(self.metrics.activity_seconds, APPEND_ACTIVITIES, "receive")
        for _ in self.table.append(map(sent_block, blocks), lambda: None, clock):
            pass

    def values(self) -> list[int]:
        """Of the first row of each block in memory."""
        memory = self.table.memory
        _, rows, _ = memory.read(memory.first_row, CAPACITY)
        return [int(value) for value in rows.view(SPEC.dtype)["value"].reshape(-1)[::ROWS]]

    def close(self) -> None:
        self.store.close()


def value_of(collector: int, sequence: int) -> int:
    return 1000 * collector + sequence


def sent_block(block: tuple[int, int]) -> SentBlock:
    collector, sequence = block
    rows = Block.empty(SPEC, ROWS)
    rows.columns["value"] = np.full(ROWS, value_of(collector, sequence))
    header = rows_pb2.BlockHeader(
        collector_index=collector,
        collector_incarnation=1,
        sequence=sequence,
        row_count=ROWS,
        row_spec_digest=SPEC.digest,
        checksum=rows.checksum(),
    )
    return SentBlock(header, rows.data.data.cast("B"))


class World:
    """One run on one server, and what befalls it."""

    def __init__(self, kind: str, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.server = start_redis(kind, folder, appendfsync="always")
        self.proxy = FaultyRedis(self.server.url.removeprefix("unix://"))
        (self.file,) = folder.rglob("appendonly.aof*incr.aof")
        self.sequences = dict.fromkeys(range(COLLECTORS), 0)
        self.acknowledged: list[int] = []
        self.process = Process(self.proxy.url)
        self.least = self.file.stat().st_size
        """What the file keeps: the beginning of the process that has the run."""
        self.after_stranger: int | None = None

    def close(self) -> None:
        self.process.close()
        self.proxy.close()
        self.server.stop()

    def append(self) -> None:
        """Have one or two collectors send blocks, by turns, until all are acknowledged."""
        waiting: dict[int, list[tuple[int, int]]] = {}
        for collector in self.random.sample(range(COLLECTORS), self.random.randint(1, 2)):
            first = self.sequences[collector] + 1
            self.sequences[collector] += self.random.randint(1, 4)
            waiting[collector] = [(collector, sequence) for sequence in range(first, self.sequences[collector] + 1)]

        def send() -> bool:
            collector = self.random.choice(list(waiting))
            if self.attempt(lambda: self.process.append(waiting[collector]))():
                self.acknowledged += [value_of(*block) for block in waiting.pop(collector)]
            return not waiting

        wait_until(send)

    def lose_a_reply(self) -> None:
        self.proxy.lose_replies_to = self.random.choice([b"\r\nEXEC\r\n", *(script.sha for script in SCRIPTS)])
        self.append()

    def roll_back(self) -> None:
        """Redis dies, and its file ends up to a few transactions earlier, anywhere, or after a stranger's."""
        self.server.process.kill()
        self.server.process.wait()
        size = self.file.stat().st_size
        end = max(self.least, size - self.random.randint(0, 3000))
        if self.after_stranger is not None and self.least < self.after_stranger < size and self.random.random() < 0.5:
            end = self.after_stranger
        with self.file.open("r+b") as file:
            file.truncate(end)
        self.server.restart()
        self.after_stranger = None
        if self.random.random() < 0.7:
            with redis.Redis.from_url(self.server.url) as client, client.pipeline(transaction=True) as pipeline:
                pipeline.set("other", "1").set("another", "2").execute()
            self.after_stranger = self.file.stat().st_size

    def take_over(self) -> None:
        self.proxy.lose_replies_to = None
        self.process.close()
        self.process = Process(self.proxy.url)
        self.least, self.after_stranger = self.file.stat().st_size, None

    def attempt(self, act: Callable[[], Any]) -> Callable[[], bool]:
        def attempt() -> bool:
            self.process.store._link._paused_until = 0.0  # the pause after a failure is proved elsewhere
            try:
                act()
            except UnavailableError:
                return False
            return True

        return attempt

    def check(self) -> None:
        """The newest rows that were acknowledged are in memory and in the record, once each, and nothing else is."""
        wait_until(self.attempt(self.process.table.keep_record))
        values = self.process.values()
        assert len(values) == min(len(self.acknowledged), CAPACITY // ROWS)
        # What two collectors sent at the same time was perhaps stored in another order than it was acknowledged in.
        assert set(values) <= set(self.acknowledged[-len(values) - 8 :] if values else [])
        assert len(set(values)) == len(values)
        stored, first_rows = [], set()
        with redis.Redis.from_url(self.server.url) as client:
            for header, payload in read_record(client, RUN):
                first_rows.add(header.first_row)
                found = np.frombuffer(payload, SPEC.dtype)["value"]
                assert found.tolist() == [value_of(header.collector_index, header.sequence)] * ROWS
                stored.append(int(found[0]))
            assert stored[-len(values) :] == values
            assert first_rows <= keys_of_payloads(client, RUN)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", SERVERS)
def test_whatever_redis_loses_or_brings_back_no_acknowledged_row_is_lost_or_doubled(
    kind: str, seed: int, tmp_path: Path
):
    world = World(kind, tmp_path / "redis", seed)
    acts = [world.append] * 4 + [world.lose_a_reply] * 2 + [world.roll_back] * 4 + [world.take_over]
    try:
        for step in range(STEPS):
            act = world.random.choice(acts)
            try:
                act()
                world.check()
            except BaseException as error:
                error.add_note(f"step {step}, {act.__name__}")
                raise
    finally:
        world.close()
