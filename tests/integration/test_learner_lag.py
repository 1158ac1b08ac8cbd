"""Lag, from rows in a real replay process whose clock is wrong, to the metrics of the learner that trains on them."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from gated_environment import GATE
from integration.lag_harness import LagRun
from integration.peers import RUN_ID
from integration.replay_harness import Client, free_port, make_config, request, wait_until
from integration.replay_program import start_replay
from paceline.config import Config
from paceline.errors import DeadlineError, StarvedError, StarvedForGoodError
from paceline.lag.attribution import PARTS
from paceline.lag.bound import LagBound, LearnerVersion
from paceline.lag.publications import Publication, Publications
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import Batch, BatchSource, open_followed, open_samples
from paceline.learner.training_lag import TrainingLag
from paceline.local.embedded import EmbeddedRedis
from paceline.rows import Block, Column, RowSpec, numpy_columns, transition_spec
from paceline.rpc.client import open_channel

SECONDS = 30.0
CPU = torch.device("cpu")
NEW = LearnerVersion(0)
"""A learner that has published nothing yet."""
SPEC = transition_spec(Column("observation", "float32", (3,)), Column("action", "float32", (1,)))
READS = {
    "follow": {"read": "follow"},
    "sample": {"read": "sample"},
    "queue": {"queue": True},
    "prioritised": {"sampler": "prioritised"},
    "recent": {"sampler": "recent"},
}
SKIPPING = {
    "prioritised": {"sampler": "prioritised"},
    "fifo": {"sampler": "fifo", "max_times_sampled": 4},
    "lifo": {"sampler": "lifo", "max_times_sampled": 4},
}
"""What replay draws without looking at versions."""

FAST = (("follow", 5000.0), ("sample", -5000.0), ("queue", 5000.0))
"""Ways to read and clocks that are tried in the fast suite; the slow one tries the others."""


def config_of(redis_url: str, read: str, *, batch_size: int = 4, **sections: Any) -> Config:
    table = dict({**READS, **SKIPPING}[read])
    return make_config(
        redis_url,
        port=free_port(),
        limiter={"deadline_seconds": 60.0},
        replay={"read": table.pop("read", "auto")},
        table=table,
        rpc={"backoff_max_seconds": 0.2},
        learner={"batch_size": batch_size, "prefetch_batches": 1},
        **sections,
    )


@pytest.fixture
def redis_server(bundled_redis: EmbeddedRedis) -> EmbeddedRedis:
    return bundled_redis


@pytest.fixture
def spawn_ahead(redis_server) -> Iterator[Callable[..., Client]]:
    """Starts a replay process whose clock is so many seconds ahead of this one's."""
    started = []

    def start(config: Config, ahead: float = 0.0, spec: RowSpec | None = SPEC) -> Client:
        tree = config.model_dump(mode="json")
        tree["replay"]["redis_url"] = redis_server.url
        process = start_replay(tree, ahead=ahead)
        client = Client(config, config.run_id)
        started.append((process, client))
        client.wait_until_serving()
        if spec is not None:
            client.open(spec)
        return client

    yield start
    for process, client in started:
        client.close()
        process.kill()
        process.join(SECONDS)


@pytest.fixture
def learn() -> Iterator[Callable[..., BatchSource]]:
    """Opens the source that a configuration asks for, and closes it."""
    opened = []

    def start(
        config: Config, metrics: LearnerMetrics, learner: LearnerVersion = NEW, spec: RowSpec = SPEC
    ) -> BatchSource:
        options: dict[str, Any] = {"seed": 1, "metrics": metrics, "device": CPU}
        channels = [open_channel(address, config.rpc) for address in config.replay.shard_addresses()]
        if config.follows:
            source = open_followed(config, channels, spec, base_version=learner.base_version, **options)
        else:
            source = open_samples(config, spec, learner_version=learner, **options)
        if learner:
            source.set_policy_version(int(learner))
        opened.append((source, channels))
        return source

    yield start
    for source, channels in opened:
        source.close()
        for channel in channels:
            channel.close()


def rows_of(versions: list[int], **stamps: float) -> Block:
    block = Block.empty(SPEC, len(versions))
    block.columns["policy_version"] = versions
    for name, value in stamps.items():
        block.columns[name] = value
    return block


def versions_of(batch: Batch) -> list[int]:
    versions: list[int] = numpy_columns(SPEC, batch.rows.numpy())["policy_version"].tolist()
    return versions


@pytest.mark.parametrize(
    ("read", "ahead"),
    [
        *FAST,
        *(
            pytest.param(read, ahead, marks=pytest.mark.slow)
            for read in READS
            for ahead in (0.0, 5000.0, -5000.0)
            if (read, ahead) not in FAST
        ),
    ],
)
def test_lag_is_split_exactly_where_a_block_was_held_back_and_replays_clock_is_wrong(
    redis_server, spawn_ahead, learn, read, ahead
):
    config = config_of(redis_server.url, read)
    client = spawn_ahead(config, ahead)
    # A block that was sealed a hundred seconds ago, and is stored only now.
    now = time.time()
    stamps = {"policy_applied_at": now - 120, "sealed_at": now - 100, "collected_at": now - 110}
    client.append(request(1, rows_of([2, 2, 2, 2], **stamps)))
    publications = Publications()
    published = [now - 300, now - 150, now - 130, now - 119, now - 110, now - 80, now - 50, now - 20, now + 60]
    for version, seconds in enumerate(published, 1):
        publications.add(Publication(version, seconds, version))

    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    source = learn(config, metrics)
    # Trained on ninety seconds from now: what a wrong clock or a few milliseconds would spoil lies far off.
    lag = TrainingLag(SPEC, bound=LagBound(None), publications=publications, metrics=metrics, clock=lambda: now + 90)

    def train() -> bool:
        batch = source.next_batch(SECONDS)
        assert batch.stored_at is not None
        if not batch.stored_at.all():
            return False  # drawn ahead, before the first round trip
        lag.take(batch, policy_version=9, learner_step=9)
        lag.count()
        return True

    if read == "queue":
        assert train()  # each row comes once
    else:
        wait_until(train, "replay's clock is known")

    def value(thing: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"paceline_learner_{thing}", labels)

    parts = {part: value("training_lag_part_versions_total", part=part) for part in PARTS}
    assert parts == {"transfer": 4 * 1, "rollout": 4 * 2, "queue": 4 * 3, "residence": 4 * 1, "unattributed": 0}
    assert sum(parts.values()) == value("training_lag_versions_sum") == 4 * 7
    seconds = {part: value("row_part_seconds_total", part=part) for part in PARTS}
    expected = {"transfer": 30, "rollout": 20, "queue": 100, "residence": 90, "unattributed": 0}
    assert seconds == pytest.approx({part: 4 * each for part, each in expected.items()}, abs=4 * SECONDS)
    assert sum(seconds.values()) == pytest.approx(4 * 240)
    if read in ("follow", "queue"):
        wait_until(lambda: value("replay_clock_offset_seconds", shard="0"), "the offset is shown")
    offset, uncertainty = (value(f"replay_clock_{thing}_seconds", shard="0") for thing in ("offset", "uncertainty"))
    assert offset is not None
    assert uncertainty is not None
    assert abs(offset - ahead) <= uncertainty < SECONDS


@pytest.mark.parametrize("read", ["follow", "sample", "recent"])
def test_rows_beyond_the_bound_are_not_drawn_and_a_bound_that_starves_is_told(redis_server, spawn_ahead, learn, read):
    config = config_of(redis_server.url, read, batch_size=20, lag={"max_lag_versions": 3, "attribution": False})
    client = spawn_ahead(config)
    assert client.describe().sampler == "recent"
    client.append(request(1, rows_of([1] * 30 + [6] * 5 + [9] * 5)))
    registry = CollectorRegistry()
    source = learn(config, LearnerMetrics(registry))
    source.set_policy_version(9)

    def skipped(source: BatchSource = source) -> float:
        return source.next_batch(SECONDS).skipped_row_count

    wait_until(lambda: skipped() == 20 * 30 / 10, "the first order that says the version")
    batch = source.next_batch(SECONDS)
    assert set(versions_of(batch)) == {6, 9}
    assert batch.stored_at is None
    assert (batch.table_row_count, batch.drawable_row_count) == (40, 10)

    source.set_policy_version(20)
    reasons: list[str] = []

    def is_starved() -> bool:
        try:
            source.next_batch(0.2)
        except DeadlineError as error:  # of a draw by replay the reason comes after some seconds
            reasons.extend([str(error)] if isinstance(error, StarvedError) else [])
        return bool(reasons)

    wait_until(is_starved, "the bound starves the learner")
    assert "at most 3 versions (lag.max_lag_versions) behind 20" in reasons[0]
    assert "with lag.max_lag_versions=11 they would do" in reasons[0]
    assert not source.is_away  # type: ignore[attr-defined]
    assert registry.get_sample_value("paceline_learner_starved_seconds_total") > 0
    client.append(request(2, rows_of([17])))
    assert versions_of(source.next_batch(SECONDS)) == [17] * 20


@pytest.mark.parametrize("read", ["sample", "recent"])
def test_rows_beyond_the_bound_hold_no_inserts_back_where_replay_draws(redis_server, spawn_ahead, learn, read):
    config = make_config(
        redis_server.url,
        port=free_port(),
        limiter={"min_rows": 64, "deadline_seconds": 60.0},
        replay={"read": "sample"},
        table={} if read == "sample" else {"sampler": "recent", "recent": {"max_lag_versions": 3}},
        learner={"updates": "strict", "updates_per_step": 1.0, "batch_size": 16, "prefetch_batches": 1},
        collector={"block_rows": 64, "max_blocks_in_flight": 4},
        lag={"max_lag_versions": 3},
    )
    client, source = spawn_ahead(config), learn(config, LearnerMetrics(CollectorRegistry()))
    client.append(request(1, rows_of([1] * 64)))
    source.next_batch(SECONDS)
    source.set_policy_version(10)

    def append() -> None:
        for sequence in range(2, 10):
            client.append(request(sequence, rows_of([10 if sequence == 9 else 1] * 64)))

    thread = threading.Thread(target=append, daemon=True)
    thread.start()

    def is_new() -> bool:
        with suppress(DeadlineError):
            return set(versions_of(source.next_batch(0.2))) == {10}
        return False

    wait_until(is_new, "the rows of the newest policy come")
    thread.join(SECONDS)
    assert not thread.is_alive()


@pytest.mark.parametrize("read", ["follow", "sample", "recent"])
def test_a_bound_that_starves_a_run_which_has_all_its_rows_is_told_to_be_for_good(
    redis_server, spawn_ahead, learn, read
):
    config = config_of(redis_server.url, read, lag={"max_lag_versions": 3}, run={"environment_steps": 40})
    spawn_ahead(config).append(request(1, rows_of([1] * 40)))
    source = learn(config, LearnerMetrics(CollectorRegistry()))
    source.set_policy_version(20)

    def is_starved_for_good() -> bool:
        try:
            source.next_batch(0.2)
        except DeadlineError as error:
            return isinstance(error, StarvedForGoodError)
        return False

    wait_until(is_starved_for_good, "no row will come that the bound lets through")


def test_a_learner_that_resumed_draws_the_rows_of_before_until_it_has_moved_on(redis_server, spawn_ahead, learn):
    config = config_of(redis_server.url, "follow", lag={"max_lag_versions": 3})
    spawn_ahead(config).append(request(1, rows_of([1] * 10)))
    restored = LearnerVersion(41, incarnation=2, base_version=40)
    source = learn(config, LearnerMetrics(CollectorRegistry()), restored)
    source.set_policy_version(43)
    assert versions_of(source.next_batch(SECONDS)) == [1] * 4
    source.set_policy_version(44)
    with pytest.raises(StarvedError, match=r"with lag\.max_lag_versions=4 they would do"):
        source.next_batch(0.1)


@pytest.mark.parametrize("read", SKIPPING)
def test_draws_by_priority_or_age_skip_rows_beyond_the_bound_and_replay_counts_them(
    redis_server, spawn_ahead, learn, read
):
    config = config_of(redis_server.url, read, batch_size=10, lag={"max_lag_versions": 3})
    client = spawn_ahead(config)
    client.append(request(1, rows_of([1] * 30 + [6] * 5 + [9] * 5)))
    source = learn(config, LearnerMetrics(CollectorRegistry()), LearnerVersion(9, incarnation=1))
    batches = [versions_of(source.next_batch(SECONDS)) for _ in range(4 if read != "prioritised" else 12)]
    drawn = [version for batch in batches for version in batch]
    assert set(drawn) == {6, 9}
    # The rows that are drawn at most four times: in the order of their age, or the other way round.
    if read != "prioritised":
        assert drawn == {"fifo": [6] * 20 + [9] * 20, "lifo": [9] * 20 + [6] * 20}[read]

    def skipped() -> float:
        return metric(config, "paceline_replay_skipped_rows_total")

    if read == "fifo":
        assert skipped() == 30 * 4, "the oldest first: every draw of every row beyond the bound"
    if read == "lifo":
        assert skipped() == 0
    if read == "prioritised":
        # Three draws in four: five standard deviations of the draws that it took are below a third of them.
        assert 2 < skipped() / metric(config, "paceline_replay_sampled_rows_total") < 4

    # Nothing is left within the bound: said with the bound that would do, and over when a newer row comes.
    source.set_policy_version(20)
    if read == "prioritised":
        reason = wait_until(lambda: _why_starved(source), "the bound starves the learner")
        assert "at most 3 versions (lag.max_lag_versions) behind 20" in reason
        assert "with lag.max_lag_versions=11 they would do" in reason
    client.append(request(2, rows_of([18] * 5)))
    wait_until(lambda: _next_versions(source) == {18}, "rows within the bound")


def _next_versions(source: BatchSource) -> set[int]:
    try:
        return set(versions_of(source.next_batch(0.2)))
    except DeadlineError:
        return set()


def _why_starved(source: BatchSource) -> str:
    try:
        source.next_batch(0.2)
    except StarvedError as error:
        return str(error)
    except DeadlineError:
        pass
    return ""


def metric(config: Config, name: str) -> float:
    """A sample of the replay service, of the learner's table."""
    with urllib.request.urlopen(f"http://{config.replay.metrics_listen}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f'{name}{{table="transitions"}}'))


@pytest.mark.parametrize("read", ["follow", "sample", "recent", "prioritised"])
def test_after_a_restore_the_bound_counts_from_the_learner_and_counts_are_exact(
    redis_server, spawn_ahead, learn, tmp_path, read
):
    """Rows of a real collector, whose versions the script publishes, and a learner that comes back as of version 12."""
    config = config_of(redis_server.url, read, batch_size=20, run_id=RUN_ID, lag={"max_lag_versions": 3})
    client = spawn_ahead(config, spec=None)
    run = LagRun(tmp_path, replay_address=config.replay.address)

    def collect(*versions: int) -> None:
        """Five rows of each, one version after the other; the fifth when the next one is published."""
        for version in versions:
            if version == 1:
                run.start()
            else:
                run.publish_through(version)
                GATE.take()  # its action was chosen by the version before
            GATE.take(4)

    def train(source: BatchSource, base: int, version: int, versions: set[int]) -> None:
        """Train on batches drawn with a version, and compare with what is counted of them."""
        registry = CollectorRegistry()
        bound = LagBound(3, base)
        lag = TrainingLag(run.spec, bound=bound, publications=None, metrics=LearnerMetrics(registry))
        source.set_policy_version(version)
        drawn = Counter[int]()
        skipped, masked = 0.0, 0
        beyond, batches = [0], 0
        # What was ordered before the version was said comes first, and what is beyond the bound of it is masked.
        while beyond or set(drawn) != versions:
            batches += 1
            assert batches < 100, f"rows of {versions} are within the bound, and those drawn are {drawn}"
            batch = source.next_batch(SECONDS)
            stamps = numpy_columns(run.spec, batch.rows.numpy())["policy_version"].tolist()
            beyond = [each for each in stamps if version - max(each, base) > 3]
            drawn.update(each for each in stamps if each not in beyond)
            skipped, masked = skipped + batch.skipped_row_count, masked + len(beyond)
            lag.take(batch, policy_version=version, learner_step=version)
        lag.count()
        counted = registry.get_sample_value("paceline_learner_training_lag_versions_sum")
        assert counted == sum(max(version - each, 0) * count for each, count in drawn.items())
        assert registry.get_sample_value("paceline_learner_trained_rows_total") == drawn.total()
        assert registry.get_sample_value("paceline_learner_masked_rows_total") == masked
        assert registry.get_sample_value("paceline_learner_skipped_rows_total") == pytest.approx(skipped)
        batch = source.next_batch(SECONDS)
        if read != "prioritised":
            within = sum(rows[each] for each in versions)
            assert batch.skipped_row_count == pytest.approx(20 * (sum(rows.values()) - within) / within)

    try:
        collect(1, 10, 18, 20)
        rows = {1: 5, 10: 5, 18: 5, 20: 4}
        wait_until(lambda: client.describe().row_count == 19, "rows are stored")
        source = learn(config, LearnerMetrics(CollectorRegistry()), LearnerVersion(20, incarnation=1), run.spec)
        train(source, 0, 20, {18, 20})
        source.close()
        # It comes back from a checkpoint of version 12: rows of 18 and 20 are of policies that it does not know.
        run.endpoint.incarnation = 2
        collect(13)
        rows |= {20: 5, 13: 4}
        wait_until(lambda: client.describe().row_count == 24, "rows are stored")
        restored = LearnerVersion(13, incarnation=2, base_version=12)
        source = learn(config, LearnerMetrics(CollectorRegistry()), restored, run.spec)
        train(source, 12, 13, {1, 10, 13, 18, 20})
        train(source, 12, 15, {1, 10, 13, 18, 20})
        train(source, 12, 16, {13, 18, 20})
        train(source, 12, 17, {18, 20})
    finally:
        run.close()
