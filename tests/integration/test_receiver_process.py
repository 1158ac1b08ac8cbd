"""The receiving process: what it puts into the learner's memory, and how it and its parent end."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from integration.scripted_replay import RPC, RUN, SECONDS, SPEC, TABLE, ScriptedReplay
from integration.waiting import wait_until
from paceline.errors import DeadlineError, RunMismatchError, UnavailableError
from paceline.lag.bound import LearnerVersion
from paceline.learner import priority_updates
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import Batch, SampleSource
from paceline.rows import numpy_columns
from paceline.rpc.client import open_channel
from paceline.tables.memory import MemorySettings


@pytest.fixture
def replay() -> Iterator[ScriptedReplay]:
    service = ScriptedReplay(MemorySettings(10_000))
    service.start()
    service.append(500)
    yield service
    service.priorities_open.set()
    service.stop()


@pytest.fixture
def sample(replay: ScriptedReplay) -> Iterator[Callable[..., SampleSource]]:
    """Opens sources, and closes them."""
    opened = []

    def start(**options: Any) -> SampleSource:
        settings: dict[str, Any] = {
            "run_id": RUN,
            "table": TABLE,
            "spec": SPEC,
            "batch_size": 16,
            "prefetch": 4,
            "seed": 1,
            "rpc": RPC,
            "metrics": LearnerMetrics(options.pop("registry", CollectorRegistry())),
        }
        source = SampleSource(replay.address, **{**settings, **options})
        opened.append(source)
        return source

    yield start
    for source in opened:
        source.close()


def values(batch: Batch) -> np.ndarray:
    return numpy_columns(SPEC, batch.rows.numpy())["value"].astype(int)


def oracle(streams: int = 1) -> list[np.random.Generator]:
    """The samplers of a source's first streams, of seed 1."""
    seeds = np.random.SeedSequence(1).spawn(streams)
    return [np.random.default_rng(int(seed.generate_state(1, np.uint64)[0])) for seed in seeds]


def state_of(pid: int) -> str:
    """The letter that Linux has for a process: T is stopped, Z waits for its parent, and none is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_batches_are_those_that_numpy_draws_with_the_same_seed(sample):
    source, random = sample(batch_size=32), oracle()[0]
    for _ in range(12):
        np.testing.assert_array_equal(values(source.next_batch(SECONDS)), random.integers(0, 500, 32))


def test_details_belong_to_their_rows(sample):
    source = sample(batch_size=31, has_priorities=True, times=True)
    for _ in range(10):
        batch = source.next_batch(SECONDS)
        np.testing.assert_array_equal(batch.keys, values(batch))
        np.testing.assert_allclose(batch.probabilities, 1 / 500)
        np.testing.assert_array_equal(batch.stored_at, np.zeros(31))  # one block, stored at its first key


def test_a_batch_that_was_cut_in_half_is_drawn_anew_and_never_mixed(replay, sample):
    replay.cut_after = 5  # 55 rows: amid the fourth batch
    source = sample(batch_size=16, has_priorities=True)
    first, second = oracle(streams=2)
    batches = [values(source.next_batch(SECONDS)) for _ in range(6)]
    np.testing.assert_array_equal(batches[:3], [first.integers(0, 500, 16) for _ in range(3)])
    np.testing.assert_array_equal(batches[3:], [second.integers(0, 500, 16) for _ in range(3)])


def test_no_more_is_ordered_than_the_prefetch_over_cuts_too(replay, sample):
    replay.cut_after = 9
    source = sample(prefetch=4)
    for taken in range(1, 20):
        source.next_batch(SECONDS)
        cut = 4 if replay.cut_after is None else 0
        assert sum(request.batch_count for request in replay.samples) <= taken + 4 + cut


def test_the_newest_policy_version_goes_with_the_orders(replay, sample):
    source = sample(prefetch=2, learner=LearnerVersion(5, incarnation=3, base_version=4))
    source.next_batch(SECONDS)
    assert replay.samples[0].policy_version == 5
    source.set_policy_version(7)
    source.next_batch(SECONDS)
    source.next_batch(SECONDS)
    replay.wait_for(lambda: replay.samples[-1].policy_version == 7, "an order says the version")
    assert {(each.learner_incarnation, each.base_version) for each in replay.samples} == {(3, 4)}


def test_priorities_reach_replay_and_are_counted(replay, sample):
    registry = CollectorRegistry()
    source = sample(has_priorities=True, registry=registry)
    batch = source.next_batch(SECONDS)
    keys = batch.keys.copy()
    priorities = np.arange(16, dtype=np.float32)
    source.update_priorities(batch.keys, priorities)
    replay.wait_for(lambda: len(replay.priorities) == 16, "the priorities come")
    assert replay.priorities == list(zip(keys.tolist(), priorities.tolist(), strict=True))

    def counted() -> bool:
        source.next_batch(SECONDS)
        return registry.get_sample_value("paceline_learner_priority_updates_total") == 16

    wait_until(counted)


def test_priorities_that_replay_does_not_take_in_time_are_dropped_oldest_first_and_never_waited_for(
    replay, monkeypatch
):
    monkeypatch.setattr(priority_updates, "MAX_WAITING_ROWS", 30)
    done: list[tuple[int, int]] = []
    replay.priorities_open.clear()
    with open_channel(replay.address, RPC) as channel:
        updates = priority_updates.PriorityUpdates(
            channel, run_id=RUN, table=TABLE, rpc=RPC, peer="replay", on_done=lambda *each: done.append(each)
        )
        one = np.ones(10, np.float32)
        updates.put(np.arange(10), one)
        replay.wait_for(lambda: replay.priority_calls == 1, "the first are on the way")
        for start in range(100, 200, 10):  # the table has room for three while replay takes the first
            updates.put(np.arange(start, start + 10), one)
        replay.priorities_open.set()
        wait_until(lambda: len(done) == 2)
        updates.close()
    assert done == [(10, 0), (30, 70)]
    assert [key for key, _ in replay.priorities] == [*range(10), *range(170, 200)]


def test_the_learner_is_told_when_the_receiving_process_dies(sample):
    source = sample()
    source.next_batch(SECONDS)
    source.process.kill()
    with pytest.raises(UnavailableError, match="ended with exit code -9"):
        collections.deque(iter(lambda: source.next_batch(SECONDS), None), maxlen=0)


def test_a_refusal_travels_with_its_class_and_reason(sample):
    with pytest.raises(RunMismatchError, match="other"):
        sample(run_id="other").next_batch(SECONDS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_is_not_for_the_receiver(sample, number):
    source = sample()
    source.next_batch(SECONDS)
    source.process.send_signal(number)
    for _ in range(50):
        source.next_batch(SECONDS)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling policies are Linux's")
def test_the_receiver_interrupts_no_training_and_the_training_process_is_scheduled_as_ever(sample):
    source = sample()
    source.next_batch(SECONDS)
    # Each thread has a policy of its own, which it has from the one that started it.
    threads = [int(task.name) for task in Path(f"/proc/{source.process.pid}/task").iterdir()]
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_frozen_receiver_is_ended_with_its_source(sample, monkeypatch):
    monkeypatch.setattr("paceline.learner.sources.sampled._EXIT_SECONDS", 0.2)
    source = sample()
    source.next_batch(SECONDS)
    os.kill(source.process.pid, signal.SIGSTOP)
    wait_until(lambda: state_of(source.process.pid) == "T")
    source.close()
    assert source.process.returncode == -signal.SIGKILL


_PARENT = """
import sys, json
from prometheus_client import CollectorRegistry
from integration.scripted_replay import RPC, RUN, SPEC, TABLE
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import SampleSource
source = SampleSource(
    sys.argv[1], run_id=RUN, table=TABLE, spec=SPEC, batch_size=16, prefetch=4, seed=1, rpc=RPC,
    metrics=LearnerMetrics(CollectorRegistry()),
)
source.next_batch(30)
print(source.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["replay there", "replay away", "stopped"])
def test_the_receiver_ends_when_its_parent_is_killed(replay, case):
    tests = Path(__file__).parents[1]
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, replay.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tests,
        text=True,
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if case == "replay away":
            replay.stop()
        elif case == "stopped":
            os.kill(child, signal.SIGSTOP)
        parent.kill()
        wait_until(lambda: state_of(child) in ("", "Z"))
    finally:
        parent.kill()
        parent.communicate()


def test_it_runs_dry_with_the_reason_while_replay_is_away(replay, sample):
    source = sample()
    source.next_batch(SECONDS)
    replay.stop()

    def reason() -> str:
        try:
            source.next_batch(0.1)
        except DeadlineError as error:
            return str(error)
        return ""

    wait_until(lambda: "UNAVAILABLE" in reason())
    assert source.is_away
    replay.start()
    source.next_batch(SECONDS)
    assert not source.is_away


def test_the_receiver_loads_no_torch():
    code = "import sys, paceline.learner.receiver_process; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory that can be offered")
def test_each_stream_offers_memory_of_its_own_since_replay_may_still_write_to_what_an_earlier_one_had(replay, sample):
    source = sample()
    source.next_batch(SECONDS)
    replay.stop()
    replay.start()
    for _ in range(6):
        source.next_batch(SECONDS)
    offers = [asked.memory.key for asked in replay.samples if asked.HasField("memory")]
    assert len(set(offers)) == len(offers) == 2
    # This replay sees none of it, as one on another machine; then none is kept.
    maps = Path(f"/proc/{source.process.pid}/maps")
    wait_until(lambda: "memfd:paceline-rows" not in maps.read_text())
