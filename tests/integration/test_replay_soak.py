"""Replay under everything at once for a long time: its memory and Redis' stay flat. `make soak` runs ten minutes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from integration.replay_harness import RUN, SPEC, Client, ReplayProcess, block, make_config, request, wait_until
from paceline.config import Config, build
from paceline.local.embedded import EmbeddedRedis
from paceline.rows import Column, RowSpec
from paceline.v1 import replay_pb2 as pb
from redis_servers import start_redis

SECONDS = float(os.environ.get("PACELINE_SOAK_SECONDS", "30"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 240)]

TABLES = {
    "uniform": {},
    "prioritised": {"sampler": "prioritised"},
    "pruned": {"sampler": "prioritised", "remover": "lowest_priority"},
    "recent": {"sampler": "recent", "recent": {"max_lag_versions": 10}},
    "queue": {"queue": True, "overflow": "drop_oldest"},
}
VERSIONED = RowSpec((*SPEC.columns, Column("policy_version", "int64")))
SPECS = dict.fromkeys(TABLES, SPEC) | {"recent": VERSIONED}
CAPACITY_ROWS = 20_000
BLOCK_ROWS = 100
SETTLED = 0.4
"""Share of the time after which rings are full, caches are warm and the allocator has what it needs."""
GROWTH_BYTES = 24 << 20
"""A leak of one small object for each block would be more: a thousand blocks a second for minutes."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = start_redis("embedded", tmp_path / "redis", **{"auto-aof-rewrite-min-size": "64mb"})
    yield server
    server.stop()


def soak_config(store: EmbeddedRedis) -> Config:
    limiter = {"min_rows": 1, "deadline_seconds": 30}
    tables = {name: {"capacity_rows": CAPACITY_ROWS, "limiter": limiter, **table} for name, table in TABLES.items()}
    config = make_config(store.url)
    tree = config.model_dump(mode="json")
    tree["replay"]["tables"] = {**tables, "transitions": tree["replay"]["tables"]["transitions"]}
    tree["replay"]["redis_url"] = store.url
    return build(tree)


def test_memory_stays_flat_under_writers_samplers_followers_and_priorities(store: EmbeddedRedis):
    config = soak_config(store)
    replay = ReplayProcess(config)
    client = Client(config)
    client.wait_until_serving()
    for table in TABLES:
        client.open(SPECS[table], table=table)
    ended = threading.Event()
    failures: list[BaseException] = []
    counts = dict.fromkeys(TABLES, 0)

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                if not ended.is_set():
                    failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    threads = [guarded(lambda table=table: _write(config, table, counts, ended)) for table in TABLES]
    threads += [guarded(lambda table=table: _sample(config, table, ended)) for table in TABLES if table != "queue"]
    threads += [guarded(lambda table=table: _follow(config, table, ended)) for table in ("uniform", "queue")]

    _let_run(SETTLED * SECONDS, failures)
    full = 3 * CAPACITY_ROWS // BLOCK_ROWS
    wait_until(lambda: failures or min(counts.values()) >= full, "every ring was filled three times", 180)
    assert not failures, failures
    before = _memory(replay, store)
    _let_run((1 - SETTLED) * SECONDS, failures)
    assert not failures, failures
    after = _memory(replay, store)
    ended.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    client.close()
    replay.stop()
    for name in before:
        assert after[name] - before[name] < GROWTH_BYTES, (name, before, after)


def _let_run(seconds: float, failures: list[BaseException]) -> None:
    """The load itself is the subject, for so long or until a thread failed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not failures:
        threading.Event().wait(0.2)


def _write(config: Config, table: str, counts: dict[str, int], ended: threading.Event) -> None:
    client, window = Client(config), threading.Semaphore(4)

    def requests() -> Iterator[pb.AppendRequest]:
        sequence = 0
        while window.acquire() and not ended.is_set():
            sequence += 1
            yield request(sequence, block(sequence * BLOCK_ROWS, BLOCK_ROWS, SPECS[table]), table=table)

    for _ in client.stub.Append(requests(), timeout=SECONDS + 120):
        counts[table] += 1
        window.release()
    client.close()


def _sample(config: Config, table: str, ended: threading.Event) -> None:
    client, random = Client(config), np.random.default_rng(0)
    wait_until(lambda: _rows(client, table) > 0 or ended.is_set(), "rows")
    while not ended.is_set():
        order = pb.SampleRequest(
            run_id=RUN, table=table, batch_size=256, batch_count=20, row_details=True, policy_version=5
        )
        keys: list[int] = []
        for answer in client.stub.Sample(iter([order]), timeout=60):
            keys += answer.keys
        if TABLES[table].get("sampler") == "prioritised":
            chosen = keys[:512]
            update = pb.UpdatePrioritiesRequest(
                run_id=RUN, table=table, keys=chosen, priorities=random.random(len(chosen)).tolist()
            )
            client.stub.UpdatePriorities(update, timeout=30)
    client.close()


def _follow(config: Config, table: str, ended: threading.Event) -> None:
    client, position, changed = Client(config), [0], threading.Event()

    def requests() -> Iterator[pb.FollowRequest]:
        yield pb.FollowRequest(run_id=RUN, table=table)
        while not ended.is_set():
            changed.wait(1)
            changed.clear()
            if table == "queue":
                yield pb.FollowRequest(run_id=RUN, table=table, consumed_row=position[0])
            else:
                yield pb.FollowRequest(run_id=RUN, table=table, sampled_row_count=position[0])

    stream = client.stub.Follow(requests(), timeout=SECONDS + 120)
    for answer in stream:
        assert answer.first_row >= position[0]
        values = np.frombuffer(answer.rows, SPEC.dtype)["value"]
        assert len(values) == answer.row_count
        position[0] = answer.first_row + answer.row_count
        changed.set()
        if ended.is_set():
            stream.cancel()
            return


def _rows(client: Client, table: str) -> int:
    answer = client.stub.DescribeTables(pb.DescribeTablesRequest(run_id=RUN), timeout=30)
    return next(described.row_count for described in answer.tables if described.name == table)


def _memory(replay: ReplayProcess, store: EmbeddedRedis) -> dict[str, int]:
    status = Path(f"/proc/{replay.process.pid}/status").read_text().splitlines()
    resident = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))
    with redis.Redis.from_url(store.url) as client:
        return {"replay": resident, "redis": int(client.info("memory")["used_memory"])}
