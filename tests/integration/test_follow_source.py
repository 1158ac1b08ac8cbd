"""The learner's own ring, filled by a replay service that is cut, killed and emptied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import structlog
from prometheus_client import CollectorRegistry

from integration.scripted_replay import RPC, RUN, SECONDS, SPEC, TABLE, ScriptedReplay
from integration.waiting import wait_until
from paceline.errors import BlockError, DeadlineError, RunMismatchError
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import Batch, FollowSource, followed, follower
from paceline.rows import numpy_columns
from paceline.rpc.client import open_channel
from paceline.tables.limiter import LimiterSettings
from paceline.tables.memory import MemorySettings
from paceline.v1 import rows_pb2

FREE = LimiterSettings(1, None, None, SECONDS)


@pytest.fixture
def replay() -> Iterator[Callable[..., ScriptedReplay]]:
    """Starts scripted services."""
    started = []

    def start(capacity: int = 10_000, **options: Any) -> ScriptedReplay:
        service = ScriptedReplay(MemorySettings(capacity), **options)
        service.start()
        started.append(service)
        return service

    yield start
    for service in started:
        service.stop()


@pytest.fixture
def follow() -> Iterator[Callable[..., FollowSource]]:
    """Opens sources, and closes them."""
    opened = []

    def start(
        service: ScriptedReplay,
        *,
        capacity: int = 10_000,
        limiter: LimiterSettings = FREE,
        batch_size: int = 16,
        run_id: str = RUN,
        registry: CollectorRegistry | None = None,
    ) -> FollowSource:
        channel = open_channel(service.address, RPC)
        source = FollowSource(
            channel,
            run_id=run_id,
            table=TABLE,
            spec=SPEC,
            memory=MemorySettings(capacity),
            limiter=limiter,
            batch_size=batch_size,
            seed=1,
            rpc=RPC,
            metrics=LearnerMetrics(registry or CollectorRegistry()),
        )
        opened.append((source, channel))
        return source

    yield start
    for source, channel in opened:
        source.close()
        channel.close()


def values(batch: Batch) -> np.ndarray:
    return numpy_columns(SPEC, batch.rows.numpy())["value"].astype(int)


def wait_for_rows(source: FollowSource, end: int) -> None:
    wait_until(lambda: source._end == end)


def ring(source: FollowSource) -> list[int]:
    """The values of all rows that the source holds, oldest first."""
    _, rows, _ = source._memory.read(0, 1 << 40)
    return numpy_columns(SPEC, rows)["value"].astype(int).tolist()


def oracle(seed: int) -> np.random.Generator:
    """The generator that replay's own sampler would have for the first stream of a source with this seed."""
    return np.random.default_rng(int(np.random.SeedSequence(seed).spawn(1)[0].generate_state(1, np.uint64)[0]))


def test_batches_are_those_that_numpy_draws_with_the_same_seed(replay, follow):
    service = replay()
    service.append(500)
    source, random = follow(service, batch_size=32), oracle(1)
    for _ in range(5):
        np.testing.assert_array_equal(values(source.next_batch(SECONDS)), random.integers(0, 500, 32))
    service.append(300)
    wait_for_rows(source, 800)
    np.testing.assert_array_equal(values(source.next_batch(SECONDS)), random.integers(0, 800, 32))


def test_a_batch_stays_as_it_is_until_the_next_one_is_taken(replay, follow):
    service = replay(capacity=100)
    service.append(100)
    source = follow(service, capacity=100)
    batch = source.next_batch(SECONDS)
    before = values(batch)
    service.append(100)
    wait_for_rows(source, 200)  # none of the batch's rows is in the ring any more
    np.testing.assert_array_equal(values(batch), before)


def test_every_row_comes_once_and_in_order_over_cuts_in_the_midst(replay, follow):
    service = replay(message_rows=7)
    service.append(100)
    service.cut_after = 3
    registry = CollectorRegistry()
    source = follow(service, registry=registry)
    wait_for_rows(source, 100)
    service.cut_after = 2
    service.append(100)
    wait_for_rows(source, 200)
    assert ring(source) == list(range(200))
    assert [count for _, count in service.rows_sent] == [7, 7, 7, *[7] * 11, 2, 7, 7, *[7] * 12, 2]
    assert [request.from_row for request in service.follows if request.HasField("from_row")] == [21, 114]
    cuts = registry.get_sample_value("paceline_learner_sample_failures_total", {"reason": "UnavailableError"})
    assert cuts == 2


def test_a_follower_says_after_a_cut_where_its_last_row_was(replay, follow):
    service = replay()
    service.append(50)
    source = follow(service)
    wait_for_rows(source, 50)
    with service.changed:
        service.memory.set_end(60)  # a hole at the end, as a damaged block leaves it
        service.changed.notify_all()
    wait_for_rows(source, 60)
    service.stop()
    service.start()

    def again() -> list[tuple[int, int, float]]:
        said = [request for request in service.follows if request.HasField("from_row")]
        return [(request.from_row, request.received_end_row, request.last_stored_at) for request in said]

    service.wait_for(lambda: again() == [(60, 50, 0.0)], "it goes on where it was")
    service.append(10)
    wait_for_rows(source, 70)
    assert source._memory.row_count == 60


def test_a_killed_replay_is_learned_from_on_and_its_new_rows_come_when_it_is_back(replay, follow):
    service = replay()
    service.append(50)
    source = follow(service)
    source.next_batch(SECONDS)
    service.stop()
    wait_until(lambda: source.is_away)
    assert set(values(source.next_batch(SECONDS))) <= set(range(50))
    service.append(50)
    service.start()
    wait_for_rows(source, 100)
    assert not source.is_away
    assert ring(source) == list(range(100))


def test_a_table_that_was_lost_with_its_store_replaces_the_ring_and_its_counts(replay, follow):
    service = replay()
    service.append(500)
    limiter = LimiterSettings(100, 2.0, 400, SECONDS)
    source = follow(service, limiter=limiter, batch_size=50)
    for _ in range(18):
        source.next_batch(SECONDS)
    service.wait_for(lambda: service.sampled >= 850, "samples are reported")
    service.stop()
    service.lose()
    service.append(90)
    service.start()
    wait_for_rows(source, 90)
    assert service.follows[-1].limiter_wait_seconds == 0  # to wait for rows is no wait for the limiter
    assert ring(source) == list(range(1_000_000, 1_000_090))
    with pytest.raises(DeadlineError, match="90 of the 100 rows needed before the first sample"):
        source.next_batch(0.05)
    service.append(10)
    # Nothing is owed for the samples of the lost table.
    batch = source.next_batch(SECONDS)
    assert batch.inserted_row_count == 100
    assert service.sampled <= 50


def test_samples_stop_at_the_edge_of_the_band_and_are_reported_before_the_wait(replay, follow):
    service = replay()
    service.append(100)
    # Deviation 0 at 100 rows: 200 rows may be sampled below it.
    source = follow(service, limiter=LimiterSettings(100, 4.0, 400, SECONDS), batch_size=50)
    for _ in range(4):
        source.next_batch(SECONDS)
    assert {request.limiter_wait_seconds for request in service.follows} == {0.0}
    with pytest.raises(DeadlineError, match="200 sampled, and a batch of 50 would overstep the window"):
        source.next_batch(0.05)
    service.wait_for(lambda: service.sampled == 200, "what was sampled is reported")
    service.wait_for(lambda: service.follows[-1].limiter_wait_seconds >= 0.05, "so is for how long it waited")
    service.append(13)  # 52 rows more
    assert source.next_batch(SECONDS).inserted_row_count == 113
    with pytest.raises(DeadlineError):
        source.next_batch(0.05)


@pytest.mark.parametrize("before", ["a wait", "the close"])
def test_what_is_not_reported_yet_is(replay, follow, monkeypatch, before):
    monkeypatch.setattr(followed, "REPORT_SECONDS", 1e9)
    service = replay()
    service.append(100)
    # An eighth of the band is 500 rows, so every second batch is reported; the seventh is the last that may pass.
    source = follow(service, limiter=LimiterSettings(100, 4.0, 4000, SECONDS), batch_size=260)
    for _ in range(6):
        source.next_batch(SECONDS)
    service.wait_for(lambda: service.sampled == 6 * 260, "six batches are reported")
    source.next_batch(SECONDS)
    assert source._reported == 6 * 260
    if before == "a wait":
        with pytest.raises(DeadlineError):
            source.next_batch(0.05)
        service.wait_for(lambda: service.sampled == 7 * 260, "what was sampled is reported")
    else:
        source.close()
        assert service.sampled == 7 * 260


def test_a_source_that_cannot_report_what_it_sampled_closes_soon_and_says_why(replay, follow, monkeypatch):
    monkeypatch.setattr(follower, "LAST_REPORT_SECONDS", 0.2)
    service = replay()
    service.append(100)
    source = follow(service)
    source._follower.report = lambda: None
    source.next_batch(SECONDS)
    with structlog.testing.capture_logs() as events:
        source.close()
        source.close()
    (warning,) = [event for event in events if event["event"] == "samples_not_reported"]
    assert warning["sampled_row_count"] == 16
    assert warning["reason"] == "it has not said so yet"


def test_a_replay_that_forgot_reports_is_told_again(replay, follow):
    service = replay()
    service.append(100)
    source = follow(service, limiter=LimiterSettings(100, 4.0, 400, SECONDS), batch_size=50)
    for _ in range(4):
        source.next_batch(SECONDS)
    service.wait_for(lambda: service.sampled == 200, "what was sampled is reported")
    service.stop()
    wait_until(lambda: source.is_away)
    service.sampled = 50
    service.start()
    service.wait_for(lambda: service.sampled == 200, "it is reported again")


def test_a_resumed_learner_first_gets_all_rows_that_replay_has_and_counts_its_earlier_samples(replay, follow):
    service = replay(message_rows=10)
    service.append(100)
    service.sampled = 200
    service.cut_after = 4
    service.stop()
    source = follow(service, limiter=LimiterSettings(10, 2.0, 100, SECONDS), batch_size=10)
    service.start()
    drawn: set[int] = set()
    while not drawn:
        drawn = set(values(source.next_batch(SECONDS)))
    assert source._memory.row_count == 100
    # (100 - 10) * 2 - 200 + 50 = 30 rows are left.
    source.next_batch(SECONDS)
    source.next_batch(SECONDS)
    with pytest.raises(DeadlineError, match="230 sampled"):
        source.next_batch(0.05)


@pytest.mark.parametrize(("capacity", "kept"), [(1, 1), (20, 20), (100, 100), (3000, 350)])
def test_a_ring_smaller_or_larger_than_what_comes_holds_the_newest_rows(replay, follow, capacity, kept):
    service = replay(message_rows=200)
    service.append(150)
    source = follow(service, capacity=capacity)
    service.append(200)
    wait_for_rows(source, 350)
    held = ring(source)
    assert held == list(range(350 - len(held), 350))
    assert kept - max(1, capacity // 16) < len(held) <= kept
    assert set(values(source.next_batch(SECONDS))) <= set(held)


def test_the_ring_follows_what_leaves_replay(replay, follow):
    service = replay(capacity=100)
    source = follow(service, capacity=100)
    for end in range(40, 241, 40):
        service.append(40)
        wait_for_rows(source, end)
    # Whole blocks leave replay: with 240 rows, the one of 120 to 159 does not fit 100 any more.
    assert ring(source) == list(range(160, 240))


def test_a_complete_table_is_sampled_freely(replay, follow):
    service = replay()
    service.append(100)
    source = follow(service, limiter=LimiterSettings(100, 1.0, 100, SECONDS), batch_size=50)
    source.next_batch(SECONDS)
    with pytest.raises(DeadlineError):
        source.next_batch(0.05)
    service.finish()
    for _ in range(20):
        source.next_batch(SECONDS)


def test_a_hole_in_the_keys_is_neither_drawn_nor_waited_for(replay, follow):
    service = replay()
    service.append(40)
    service.append(40, skip=1000)
    source = follow(service)
    wait_for_rows(source, 1080)
    held = [*range(40), *range(1040, 1080)]
    for _ in range(5):
        batch = source.next_batch(SECONDS)
        assert set(values(batch)) <= set(held)
        assert (batch.table_row_count, batch.inserted_row_count) == (80, 1080)


def test_rows_that_were_damaged_at_the_end_of_the_record_are_not_waited_for(replay, follow):
    service = replay()
    service.append(100)
    service.memory.set_end(300)
    # 300 rows count, for replay's limiter as for this one: (300 - 10) * 1 + 300 may be sampled.
    source = follow(service, limiter=LimiterSettings(10, 1.0, 600, SECONDS), batch_size=295)
    source.next_batch(SECONDS)
    source.next_batch(SECONDS)
    with pytest.raises(DeadlineError, match="590 sampled"):
        source.next_batch(0.05)


@pytest.mark.parametrize(
    ("position", "row_count", "text"),
    [
        (None, 10, "within the 0 that both sides see"),
        (followed.MEMORY_BYTES - SPEC.row_bytes, 10, "within the 8388[0-9]* that both sides see"),
        (-8, 10, "within the 8388[0-9]* that both sides see"),
        (0, 9, "replay sent 10 rows in 288 bytes with 10 times"),
    ],
)
def test_rows_that_are_not_where_replay_says_end_it_with_the_reason(replay, follow, position, row_count, text):
    service = replay()
    service.reads_memory = position is not None
    service.lies_in = rows_pb2.MemoryRange(position=position, byte_count=row_count * SPEC.row_bytes)
    service.append(10)
    with pytest.raises(BlockError, match=text):
        follow(service).next_batch(SECONDS)


def test_another_run_ends_it_with_its_reason(replay, follow):
    service = replay()
    source = follow(service, run_id="other")
    with pytest.raises(RunMismatchError, match="other"):
        source.next_batch(SECONDS)


def test_the_reason_for_a_wait_is_told(replay, follow):
    service = replay()
    service.stop()
    source = follow(service)
    wait_until(lambda: source.is_away)
    with pytest.raises(DeadlineError, match=r"no batch within 0\.05 s: replay shard 0: UNAVAILABLE"):
        source.next_batch(0.05)


def test_how_far_the_ring_is_behind_is_measured(replay, follow):
    service, registry = replay(), CollectorRegistry()
    service.append(120)
    source = follow(service, registry=registry)
    wait_for_rows(source, 120)
    labels = {"shard": "0"}
    wait_until(lambda: registry.get_sample_value("paceline_learner_ring_rows", labels) == 120)
    assert registry.get_sample_value("paceline_learner_follow_behind_rows", labels) == 0
