"""Rows are kept once, in order, in both tiers, and survive the death of the process."""

from __future__ import annotations

import subprocess
import sys
from concurrent import futures
from contextlib import closing

import grpc
import numpy as np
import pytest
import structlog

from free_ports import free_port
from integration.replay_harness import (
    RUN,
    SECONDS,
    SPEC,
    TABLE,
    Client,
    ReplayThread,
    block,
    make_config,
    request,
    retry,
    values_in_redis,
    values_of,
    wait_until,
)
from paceline.config import Config, dump
from paceline.errors import ConfigError, ConflictError, NotFoundError, ReplacedError, UnavailableError
from paceline.replay.archive import export_run
from paceline.replay.archive_import import import_run
from paceline.replay.record import RunRecord
from paceline.rows import Column, RowSpec
from paceline.v1 import replay_pb2 as pb
from redis_record import read_record

PREFIX = f"paceline:{{{RUN}}}:table:{TABLE}"
BLOCKS = f"{PREFIX}:blocks"


def test_a_ring_that_is_rebuilt_after_a_kill_is_the_one_that_was_lost(redis_server, redis_client, spawn):
    config = make_config(redis_server.url, capacity=500)
    replay, client = spawn(config)
    client.open()
    first = 0
    for sequence in range(1, 41):
        count = 1 + sequence * 7 % 40
        client.append(request(sequence, block(first, count), collector=sequence % 3))
        first += count
    before, rows = client.describe(), client.sample_values(2000, seed=5)
    stored = list(read_record(redis_client, RUN))
    replay.kill()

    _, client = spawn(config, resume=True)
    after, rows_after = client.describe(), client.sample_values(2000, seed=5)
    assert (rows_after == rows).all()
    assert list(read_record(redis_client, RUN)) == stored
    for name in ("row_spec", "row_count", "block_count", "inserted_row_count", "collectors", "capacity_row_count"):
        assert getattr(after, name) == getattr(before, name), name
    assert before.inserted_row_count == first > before.row_count


def test_the_oldest_blocks_leave_memory_and_redis_alike(redis_server, redis_client, serve):
    replay, client = serve(make_config(redis_server.url, capacity=100))
    client.open()
    client.append_rows(20, block_rows=30)
    described = client.describe()
    assert (described.row_count, described.block_count, described.inserted_row_count) == (90, 3, 600)
    expected = list(range(510, 600))
    assert values_in_redis(redis_client) == expected
    assert sorted(set(client.sample_values(5000).tolist())) == expected
    assert replay.metrics()[f'paceline_replay_removed_rows_total{{table="{TABLE}"}}'] == 510
    assert described.dropped_row_count == 0  # only queues drop


def test_a_smaller_capacity_trims_both_tiers_on_resume(redis_server, redis_client, serve):
    replay, client = serve(make_config(redis_server.url, capacity=100))
    client.open()
    client.append_rows(10)
    replay.stop()
    _, client = serve(make_config(redis_server.url, capacity=35), resume=True)
    wait_until(lambda: redis_client.xlen(BLOCKS) == 3, "the record is trimmed")
    assert client.describe().row_count == 30
    assert values_in_redis(redis_client) == list(range(70, 100))


@pytest.mark.parametrize("by", ["rows", "bytes"])
@pytest.mark.parametrize("remover", ["fifo", "lowest_priority"])
def test_of_a_block_larger_than_the_capacity_on_resume_the_newest_rows_stay(
    redis_server, redis_client, serve, by, remover
):
    table = {} if remover == "fifo" else {"sampler": "prioritised", "remover": remover}
    replay, client = serve(make_config(redis_server.url, table=table))
    client.open()
    client.append(*(request(number + 1, block(1000 * number, 1000)) for number in range(3)))
    replay.stop()

    smaller = make_config(
        redis_server.url,
        capacity=500 if by == "rows" else 10_000,
        table={**table, **({"capacity_bytes": 500 * SPEC.row_bytes} if by == "bytes" else {})},
    )
    with structlog.testing.capture_logs() as events:
        replay, client = serve(smaller, resume=True)
    (warning,) = [event for event in events if event["event"] == "block_exceeds_capacity"]
    assert (warning["block"], warning["rows"], warning["capacity_rows"]) == (0, 1000, 500)
    assert client.describe().row_count == 500
    assert set(client.sample_values(20_000).tolist()) == set(range(2500, 3000))
    wait_until(lambda: redis_client.xlen(BLOCKS) == 1, "the blocks that left memory leave the record")
    redis_client.flushall()
    client.append_rows(1, first=300)
    newest = list(range(2500, 3010)) if remover == "lowest_priority" else list(range(3000, 3010))
    assert values_in_redis(redis_client) == newest
    client.append_rows(100, first=301)
    wait_until(lambda: values_in_redis(redis_client)[-1] == 4009, "all is there")
    assert min(values_in_redis(redis_client)) >= 3000


def test_a_block_of_which_the_newest_rows_stayed_is_written_again_without_those_of_the_next(
    redis_server, redis_client, serve
):
    table = {"sampler": "prioritised", "remover": "lowest_priority"}
    replay, client = serve(make_config(redis_server.url, table=table))
    client.open()
    client.append(request(1, block(0, 100)), request(2, block(100, 600)), request(3, block(700, 50)))
    replay.stop()
    replay, client = serve(make_config(redis_server.url, table=table, capacity=500), resume=True)
    redis_client.flushall()
    client.append(request(4, block(750, 10)))
    headers = [(header.first_row, header.row_count) for header, _ in read_record(redis_client, RUN)]
    assert headers == [(0, 100), (200, 500), (700, 50), (750, 10)]
    assert values_in_redis(redis_client) == [*range(100), *range(200, 760)]


def test_a_run_is_imported_into_one_of_a_smaller_capacity(redis_server, redis_client, serve, tmp_path):
    replay, client = serve(make_config(redis_server.url))
    client.open()
    client.append(request(1, block(0, 1000)), request(2, block(1000, 30)))
    replay.stop()
    with closing(RunRecord(redis_server.url, RUN)) as record:
        export_run(record, tmp_path / "run.tar", progress=lambda done, total: None)
    import_run(tmp_path / "run.tar", redis_server.url, run_id="copy", progress=lambda done, total: None)
    _, client = serve(make_config(redis_server.url, run_id="copy", capacity=500), resume=True, run_id="copy")
    assert (client.describe().row_count, client.describe().inserted_row_count) == (30, 1030)
    client.append(request(3, block(1030, 400), run_id="copy"))
    assert set(client.sample_values(20_000).tolist()) == set(range(1000, 1430))


class LossyProxy:
    """Passes calls on to replay; every third block is committed first and then, once, its answer is lost."""

    def __init__(self, client: Client, port: int) -> None:
        self.client = client
        self._lost: set[int] = set()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        method = grpc.stream_stream_rpc_method_handler(
            self._append, pb.AppendRequest.FromString, pb.AppendResponse.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler("paceline.v1.ReplayService", {"Append": method})
        self._server.add_generic_rpc_handlers([handler])
        self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def _append(self, requests, context):
        for message in requests:
            try:
                (answer,) = self.client.append(message)
            except UnavailableError as error:
                context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            sequence = message.header.sequence
            if sequence % 3 == 0 and sequence not in self._lost:
                self._lost.add(sequence)
                context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost")
            yield answer


@pytest.mark.slow
def test_blocks_whose_answers_are_lost_are_stored_once_and_in_order(redis_server, redis_client, spawn):
    config = make_config(redis_server.url)
    proxied = make_config(redis_server.url)
    replay, client = spawn(config)
    client.open()
    proxy, writer = LossyProxy(client, int(proxied.replay.address.rpartition(":")[2])), Client(proxied)
    duplicates = 0
    for sequence in range(1, 301):
        if sequence == 150:  # right before a block whose answer is lost
            replay.kill()
            replay, proxy.client = spawn(config, resume=True)
        message = request(sequence, block(sequence, 1))
        (answer,) = retry(lambda message=message: writer.append(message), (UnavailableError,))
        assert answer.sequence == sequence
        duplicates += answer.duplicate
    proxy.stop()
    writer.close()
    assert duplicates == 100
    described = proxy.client.describe()
    assert (described.row_count, described.inserted_row_count, described.block_count) == (300, 300, 300)
    assert values_in_redis(redis_client) == list(range(1, 301))
    assert set(proxy.client.sample_values(10_000).tolist()) == set(range(1, 301))


def test_duplicates_are_counted_and_do_not_wait_for_the_limiter(redis_server, serve):
    # One block fills the window: a second one waits, the first one again does not.
    config = make_config(
        redis_server.url,
        limiter={"window_rows": 40, "deadline_seconds": SECONDS},
        learner={"updates": "strict", "batch_size": 10},
        collector={"block_rows": 2},
    )
    replay, client = serve(config)
    client.open()
    message = request(1, block(0, 3))
    assert not client.append(message)[0].duplicate
    assert client.append(message)[0].duplicate
    assert replay.metrics()[f'paceline_replay_duplicate_blocks_total{{table="{TABLE}"}}'] == 1


def test_a_used_run_id_needs_resume(redis_server, serve):
    config = make_config(redis_server.url)
    replay, client = serve(config)
    client.open()
    client.append_rows(3)
    replay.stop()

    refused = ReplayThread(make_config(redis_server.url))
    refused.join()
    assert isinstance(refused.error, ConflictError)
    assert "--resume" in str(refused.error)
    _, client = serve(config, resume=True)
    assert client.describe().row_count == 30


def shard_config(url: str, shards: int, shard: int) -> Config:
    """Of one of the shards of the run."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(shards)]
    replay = {"shards": shards, "address": ",".join(addresses), "listen": addresses[shard]}
    return make_config(url, replay=replay, collector={"count": shards})


@pytest.mark.parametrize(("begun", "asked"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_a_resume_with_another_number_of_shards_is_refused_and_the_rows_stay(
    redis_server, redis_client, serve, tmp_path, begun, asked
):
    for shard in range(begun):
        replay, client = serve(shard_config(redis_server.url, begun, shard), shard=shard)
        client.open()
        client.append_rows(4)
        replay.stop()
    before = set(redis_client.scan_iter())
    processes = []
    for shard in range(asked):
        path = tmp_path / f"{shard}.yaml"
        path.write_text(dump(shard_config(redis_server.url, asked, shard)))
        command = [sys.executable, "-m", "paceline", "replay", str(path), "--resume", "--shard", str(shard)]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    try:
        for process in processes:
            _, said = process.communicate(timeout=SECONDS)
            assert process.returncode == 2
            assert f"has {begun} shard(s) and replay.shards is {asked}: expected replay.shards={begun}, as when" in said
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert set(redis_client.scan_iter()) == before

    shard = begun - 1
    _, client = serve(shard_config(redis_server.url, begun, shard), resume=True, shard=shard)
    assert client.describe().row_count == 40


def test_two_runs_on_one_redis_see_only_their_own_rows(redis_server, serve):
    _, one = serve(make_config(redis_server.url, run_id="one"), run_id="one")
    _, two = serve(make_config(redis_server.url, run_id="two"), run_id="two")
    for client, first in ((one, 0), (two, 1000)):
        client.open()
        client.append(*(request(n + 1, block(first + n, 1), run_id=client.run_id) for n in range(100)))
    assert set(one.sample_values(5000).tolist()) == set(range(100))
    assert set(two.sample_values(5000).tolist()) == set(range(1000, 1100))


def test_a_replay_process_that_was_replaced_stores_nothing_and_ends(redis_server, redis_client, serve):
    older, old_client = serve(make_config(redis_server.url))
    old_client.open()
    old_client.append_rows(3)
    _, new_client = serve(make_config(redis_server.url), resume=True)
    with pytest.raises(UnavailableError):
        old_client.append(request(4, block(0, 10)))
    older.join()
    assert isinstance(older.error, ReplacedError)
    new_client.append(request(4, block(30, 10)))
    assert values_in_redis(redis_client) == list(range(40))


def test_a_newer_incarnation_of_a_collector_retires_the_older(redis_server, serve):
    replay, client = serve(make_config(redis_server.url))
    client.open()
    client.append(request(1, block(0, 1)), request(1, block(1, 1), incarnation=2))
    with pytest.raises(ReplacedError, match="incarnation 2 took over"):
        client.append(request(2, block(2, 1)))
    assert client.describe().row_count == 2
    assert replay.metrics()['paceline_replay_refused_blocks_total{reason="replaced"}'] == 1


def test_a_gap_in_a_sequence_is_accepted_counted_and_logged(redis_server, serve):
    with structlog.testing.capture_logs() as events:
        replay, client = serve(make_config(redis_server.url))
        client.open()
        client.append(request(1, block(0, 1)), request(5, block(1, 1)), request(6, block(2, 1)))
    assert client.describe().row_count == 3
    (gap,) = [event for event in events if event["event"] == "sequence_gap"]
    assert (gap["expected_sequence"], gap["sequence"]) == (2, 5)
    assert replay.metrics()[f'paceline_replay_sequence_gaps_total{{table="{TABLE}"}}'] == 1


def test_an_entry_of_the_index_with_another_first_row_takes_no_block_along(redis_server, redis_client, serve):
    config = make_config(redis_server.url)
    replay, client = serve(config)
    client.open()
    client.append_rows(10)
    replay.stop()
    entries = redis_client.xrange(BLOCKS)
    entries[8][1][b"first_row"] = b"0"
    redis_client.delete(BLOCKS)
    for identifier, fields in entries:
        redis_client.xadd(BLOCKS, fields, id=identifier)

    replay, client = serve(config, resume=True)
    client.append_rows(1, first=10)
    # The damaged entry's own block too: its end and its header agree, and its checksum holds.
    assert set(client.sample_values(5000).tolist()) == set(range(110))
    assert values_in_redis(redis_client) == list(range(110))
    replay.stop()
    _, client = serve(config, resume=True)
    assert client.describe().row_count == 110


def test_damaged_blocks_are_named_counted_and_left_out(redis_server, redis_client, serve):
    config = make_config(redis_server.url)
    replay, client = serve(config)
    client.open()
    client.append_rows(7)
    replay.stop()
    payload = redis_client.get(f"{PREFIX}:block:10")
    redis_client.set(f"{PREFIX}:block:10", bytes([payload[0] ^ 1]) + payload[1:])  # one flipped bit
    redis_client.set(f"{PREFIX}:block:30", redis_client.get(f"{PREFIX}:block:30")[:-1])  # half-written
    redis_client.delete(f"{PREFIX}:block:50")  # missing

    with structlog.testing.capture_logs() as events:
        replay, client = serve(config, resume=True)
        client.append_rows(1, first=7)  # as soon as the table is whole
    assert [event["block"] for event in events if event["event"] == "block_damaged"] == [10, 30, 50]
    assert replay.metrics()[f'paceline_replay_damaged_blocks_total{{table="{TABLE}"}}'] == 3
    intact = {*range(10), *range(20, 30), *range(40, 50), *range(60, 80)}
    assert set(client.sample_values(5000).tolist()) == intact
    described = client.describe()
    assert (described.row_count, described.inserted_row_count, described.block_count) == (50, 80, 8)
    followed = client.follow(from_row=0, rows=50)
    assert [answer.first_row for answer in followed if answer.row_count] == [0, 20, 40, 60]
    assert set(np.concatenate([values_of(answer) for answer in followed]).tolist()) == intact


def test_a_damaged_newest_block_is_still_known_and_does_not_stop_later_ones(redis_server, redis_client, serve):
    config = make_config(redis_server.url)
    replay, client = serve(config)
    client.open()
    client.append_rows(3)
    replay.stop()
    entries = redis_client.xrange(BLOCKS)
    entries[-1][1][b"header"] = b"\xff"
    redis_client.delete(BLOCKS)
    for identifier, fields in entries:
        redis_client.xadd(BLOCKS, fields, id=identifier)

    _, client = serve(config, resume=True)
    assert client.append(request(3, block(20, 10)))[0].duplicate
    assert client.describe().row_count == 20
    redis_client.flushall()
    client.append_rows(2, first=3)
    assert values_in_redis(redis_client) == [*range(20), *range(30, 50)]
    assert [header.first_row for header, _ in read_record(redis_client, RUN)] == [0, 10, 30, 40]
    wait_until(lambda: client.health() == "SERVING", "the record is kept")


def test_the_last_block_is_cut_at_the_runs_limit_of_rows(redis_server, redis_client, serve):
    config = make_config(redis_server.url, run={"id": RUN, "environment_steps": 100})
    replay, client = serve(config)
    client.open()
    answers = client.append(*(request(n, block(30 * (n - 1), 30)) for n in range(1, 6)))
    assert [(a.stored_row_count, a.complete) for a in answers] == [
        (30, False),
        (30, False),
        (30, False),
        (10, True),
        (0, True),
    ]
    (again,) = client.append(request(4, block(90, 30)))
    assert (again.stored_row_count, again.duplicate, again.complete) == (10, True, True)
    assert values_in_redis(redis_client) == list(range(100))
    replay.stop()

    _, client = serve(config, resume=True)
    (again,) = client.append(request(5, block(120, 30)))
    assert (again.stored_row_count, again.complete) == (0, True)
    assert set(client.sample_values(5000).tolist()) == set(range(100))


def test_counters_survive_a_stop(redis_server, serve):
    config = make_config(redis_server.url)
    replay, client = serve(config)
    client.open()
    client.append_rows(3)
    client.sample(64, 5)
    replay.stop()
    _, client = serve(config, resume=True)
    described = client.describe()
    assert (described.inserted_row_count, described.sampled_row_count) == (30, 320)


def test_the_counter_of_sampled_rows_reaches_redis_without_an_append(redis_server, redis_client, serve):
    _, client = serve(make_config(redis_server.url))
    client.open()
    client.append_rows(3)
    client.sample(64, 5)
    state = f"paceline:{{{RUN}}}:table:{TABLE}:state"
    wait_until(lambda: redis_client.hget(state, "sampled") == b"320", "the counter is saved")


def test_a_table_keeps_its_row_spec_over_a_restart(redis_server, serve):
    config = make_config(redis_server.url)
    replay, client = serve(config)
    client.open()
    client.open()
    replay.stop()
    _, client = serve(config, resume=True)
    client.open()
    other = RowSpec((Column("value", "float64"), Column("observation", "float32", (5,))))
    with pytest.raises(ConflictError, match=r"choose another run.id"):
        client.open(other)


def test_tables_that_are_not_configured_or_not_open_are_not_found(redis_server, serve):
    _, client = serve(make_config(redis_server.url))
    with pytest.raises(NotFoundError, match=r"no table 'unrolls': replay.tables has transitions"):
        client.open(table="unrolls")
    with pytest.raises(NotFoundError, match="OpenTable must come first"):
        client.append(request(1, block(0, 1)))
    with pytest.raises(NotFoundError, match="OpenTable must come first"):
        client.sample(4)


def test_without_a_redis_url_replay_says_what_to_do(redis_server):
    config = make_config(redis_server.url)
    config = config.model_copy(update={"replay": config.replay.model_copy(update={"redis_url": None})})
    refused = ReplayThread(config)
    refused.join()
    assert isinstance(refused.error, ConfigError)
    assert "paceline train" in str(refused.error)


def test_the_same_seed_samples_the_same_rows(redis_server, serve):
    _, client = serve(make_config(redis_server.url))
    client.open()
    client.append_rows(10)
    one, again, other = (client.sample_values(50, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert SPEC.row_bytes * 50 == sum(len(message.rows) for message in client.sample(50, seed=None))
