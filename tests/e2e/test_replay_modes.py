"""Each way in which a learner may get its rows, in a whole run: followed, sampled, by priority, queued, from shards."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest
import redis

from e2e.harness import Training
from paceline.local.embedded import EmbeddedRedis
from redis_record import read_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 500
"""So many that a table of 400 rows is full and a bound of 50 versions skips rows."""
TABLE = "replay.tables.transitions"


@pytest.mark.parametrize(
    "settings",
    [
        ("replay.read=follow",),
        (f"{TABLE}.sampler=prioritised", f"{TABLE}.remover=lowest_priority", f"{TABLE}.capacity_rows=400"),
        (f"{TABLE}.sampler=recent", f"{TABLE}.recent.max_lag_versions=50"),
        ("learner.algorithm.n_step=3",),
        ("collector.block_form=compact", "collector.block_rows=32", "collector.environments=4"),
    ],
    ids=["follow", "prioritised", "recent", "n-step", "compact"],
)
def test_a_run_ends_with_all_its_steps_and_updates(train: Callable[..., Training], settings: tuple[str, ...]):
    training = train(f"run.environment_steps={STEPS}", "evaluator.enabled=false", *settings)
    assert training.wait(200) == 0, training.text()
    finish = training.records("finish")[-1]
    assert finish["environment_steps"] == STEPS
    owed = STEPS - 100
    # Half of the limiter's window, which admits a batch and a block of 32 rows, is how far the learner may be ahead.
    assert owed <= finish["learner_step"] <= owed + 33
    lags = training.records("training")[-1]["training_lag_counts"]
    assert sum(lags.values()) % 64 == 0
    assert lags


def test_a_queue_is_learned_from_once(train: Callable[..., Training]):
    queue = (f"{TABLE}={{queue: true, capacity_rows: 512, limiter: {{min_rows: 64}}}}", "learner.updates=learner_bound")
    # Slower than the collector: when the last row is stored, the queue is full of rows that are not learned yet.
    slow = "learner.algorithm.hidden=[512,512]"
    training = train(f"run.environment_steps={STEPS}", "evaluator.enabled=false", slow, *queue)
    assert training.wait(200) == 0, training.text()
    finish = training.records("finish")[-1]
    assert finish["environment_steps"] == STEPS
    # The last batch has the rows that are left.
    assert finish["learner_step"] == -(-STEPS // 64)


def test_a_run_on_two_shards_goes_on_without_one_and_gets_it_back(train: Callable[..., Training], tmp_path):
    store = EmbeddedRedis.start(tmp_path / "store")
    try:
        training = train(
            "run.environment_steps=2400",
            "evaluator.enabled=false",
            "rpc.deadline_seconds=2",
            "collector.count=2",
            "learner.updates_per_step=0.5",
            "replay.shards=2",
            f"replay.redis_url={store.url}",
            run_id="sharded",
        )
        training.wait_for_steps(400)
        training.kill("replay", "--shard", "1")
        training.wait_for_steps(training.environment_steps() + 300)
        # It hangs, so it is away and nobody starts another; a learner that starts meanwhile begins without it.
        away = training.child("replay", "--shard", "1")
        os.kill(away, signal.SIGSTOP)
        training.kill("learner")
        training.wait_for_steps(training.environment_steps() + 300)
        (left_out,) = training.events("learner", "shard_left_out")
        assert left_out["shard"] == 1
        os.kill(away, signal.SIGCONT)
        assert training.wait(240) == 0, training.text()
        assert training.records("finish")[-1]["environment_steps"] == 2400
        owed = (2400 - 100) // 2
        assert owed <= training.records("finish")[-1]["learner_step"] <= owed + 66
        with redis.Redis.from_url(store.url) as client:
            stored = [_rows(client, f"sharded:{shard}") for shard in range(2)]
        assert stored == [1200, 1200]
        assert {"replay-0", "replay-1"} <= set(json.loads((training.folder / "process_time.json").read_text()))
    finally:
        store.stop()


def _rows(client: redis.Redis, space: str) -> int:
    sequences: dict[tuple[int, int], list[int]] = {}
    rows = 0
    for header, _ in read_record(client, space):
        sequences.setdefault((header.collector_index, header.collector_incarnation), []).append(header.sequence)
        rows += header.row_count
    for numbers in sequences.values():
        assert numbers == list(range(1, len(numbers) + 1))
    return rows
