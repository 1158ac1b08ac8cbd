"""Tables of every kind in one service: samplers, removers, bounds, details, priorities, and what a restart keeps."""

from __future__ import annotations

import time

import numpy as np
import pytest
import structlog

from contract.faulty_redis import FaultyRedis
from integration.replay_harness import (
    RUN,
    SECONDS,
    SPEC,
    TABLE,
    Client,
    Following,
    block,
    free_port,
    make_config,
    request,
    values_in_redis,
    values_of,
    wait_until,
)
from paceline import process
from paceline.config import Config, build
from paceline.errors import (
    BlockError,
    ConflictError,
    InvalidInputError,
    LimiterTimeoutError,
    RowSpecError,
)
from paceline.rows import Block, Column, CompactForm, RowSpec, checksum_of, transition_spec, unroll_spec
from paceline.rpc.bulk import SAMPLE_RESPONSE, UPDATE_PRIORITIES_REQUEST, Bulk
from paceline.rpc.status import raising
from paceline.rpc.wire import row_spec_from_wire
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import rows_pb2
from redis_record import read_record

VERSIONED = RowSpec((*SPEC.columns, Column("policy_version", "int64")))


def config_of(redis_url: str, tables: dict[str, dict], **settings) -> Config:
    """The usual table, which is the learner's, and `tables` beside it."""
    tree = make_config(redis_url, **settings).model_dump(mode="json")
    limiter = {"min_rows": 1, "deadline_seconds": SECONDS}
    for name, table in tables.items():
        tree["replay"]["tables"][name] = {
            "capacity_rows": 1000,
            **table,
            "limiter": {**limiter, **table.get("limiter", {})},
        }
    tree["replay"]["redis_url"] = redis_url
    return build(tree)


def sample(client: Client, table: str, batch_size: int, *, details: bool = True, **fields) -> pb.SampleResponse:
    """One batch, which must fit one message."""
    message = pb.SampleRequest(
        run_id=RUN, table=table, batch_size=batch_size, batch_count=1, seed=1, row_details=details, **fields
    )
    with raising("replay"):
        (answer,) = client.stub.Sample(iter([message]), timeout=SECONDS)
    return answer


def prioritise(client: Client, keys, priorities, table: str = TABLE) -> pb.UpdatePrioritiesResponse:
    message = pb.UpdatePrioritiesRequest(run_id=RUN, table=table, keys=keys, priorities=priorities)
    with raising("replay"):
        return client.stub.UpdatePriorities(message, timeout=SECONDS)


KINDS = {
    "prioritised": {"sampler": "prioritised", "prioritised": {"exponent": 1}},
    "pruned": {"sampler": "prioritised", "remover": "lowest_priority", "capacity_rows": 50},
    "oldest": {"sampler": "fifo", "max_times_sampled": 2},
    "newest": {"sampler": "lifo", "max_times_sampled": 1},
    "bounded": {"max_times_sampled": 3},
    "recent": {"sampler": "recent", "recent": {"max_lag_versions": 2}},
    "queue": {"queue": True},
    "unrolls": {"kind": "unrolls", "unroll_length": 5},
}


def test_tables_of_every_kind_live_side_by_side_and_survive_a_restart(redis_server, serve):
    config = config_of(redis_server.url, KINDS)
    replay, client = serve(config)
    unrolls = unroll_spec(Column("o", "float32", (3,)), Column("a", "float32", (2,)), 5)
    specs = dict.fromkeys((TABLE, *KINDS), SPEC) | {"recent": VERSIONED, "unrolls": unrolls}
    for name, spec in specs.items():
        opened = client.open(spec, table=name)
        assert opened.row_bytes == spec.row_bytes
        rows = Block.empty(spec, 40)
        if name == "recent":
            rows.columns["policy_version"] = np.arange(40) // 10
        if "value" in spec:
            rows.columns["value"] = np.arange(40)
        client.append(request(1, rows, table=name))
    before = {name: client.describe(name) for name in specs}
    assert {name: (table.kind, table.sampler, table.remover) for name, table in before.items()} == {
        TABLE: ("transitions", "uniform", "fifo"),
        "prioritised": ("transitions", "prioritised", "fifo"),
        "pruned": ("transitions", "prioritised", "lowest_priority"),
        "oldest": ("transitions", "fifo", "fifo"),
        "newest": ("transitions", "lifo", "fifo"),
        "bounded": ("transitions", "uniform", "fifo"),
        "recent": ("transitions", "recent", "fifo"),
        "queue": ("transitions", "uniform", "fifo"),
        "unrolls": ("unrolls", "uniform", "fifo"),
    }
    assert before["oldest"].max_times_sampled == 2
    assert not before["recent"].HasField("max_times_sampled")
    assert before["queue"].HasField("consumed_row")
    assert not before["recent"].HasField("consumed_row")
    for described in before.values():
        assert (described.row_count, described.inserted_row_count, described.first_row) == (40, 40, 0)
        assert described.log_bytes == 40 * row_bytes_of(described)
        assert described.memory_bytes >= described.capacity_row_count * row_bytes_of(described)
    replay.stop()

    replay, client = serve(config, resume=True)
    wait_until(lambda: all(replay.metrics()[f'paceline_replay_table_whole{{table="{name}"}}'] for name in specs), "all")
    for name in specs:
        assert client.describe(name) == before[name], name
    assert sample(client, "oldest", 80).keys == [key for key in range(40) for _ in range(2)]
    assert sample(client, "newest", 40).keys == list(range(39, -1, -1))
    assert set(sample(client, "recent", 500).keys) == set(range(10, 40))
    assert sorted(sample(client, "bounded", 120).keys) == sorted([*range(40)] * 3)
    assert len(sample(client, "unrolls", 7).rows) == 7 * unrolls.row_bytes
    with Following(client, "queue") as following:
        assert following.values(40) == list(range(40))


def row_bytes_of(described: pb.TableDescription) -> int:
    return row_spec_from_wire(described.row_spec).row_bytes


def test_details_tell_of_each_row_its_key_chance_count_and_time(redis_server, serve):
    began = time.time()
    _, client = serve(config_of(redis_server.url, KINDS))
    client.open(table="prioritised")
    for number in range(3):
        client.append(request(number + 1, block(10 * number, 10), table="prioritised"))
    prioritise(client, range(30), [0.0] * 10 + [1.0] * 10 + [3.0] * 10, "prioritised")
    answer = sample(client, "prioritised", 4000)
    keys = np.array(answer.keys)
    assert values_of(answer) == keys.tolist()
    assert set(keys.tolist()) == set(range(10, 30))
    assert np.allclose(answer.probabilities, np.where(keys < 20, 1 / 40, 3 / 40))
    assert np.bincount(keys, minlength=30)[keys].tolist() == list(answer.times_sampled)
    assert 2600 < (keys >= 20).sum() < 3400
    stored = np.array(answer.stored_at)
    assert (began <= stored).all()
    assert (stored <= time.time()).all()
    assert len(set(stored[keys < 20].tolist())) == 1
    plain = sample(client, "prioritised", 10, details=False)
    assert [len(column) for column in (plain.keys, plain.probabilities, plain.times_sampled, plain.stored_at)] == [
        0
    ] * 4


def test_bulk_peers_get_details_and_send_priorities_as_arrays(redis_server, serve):
    _, client = serve(make_config(redis_server.url, table={"sampler": "prioritised"}))
    client.open()
    client.append_rows(3)
    stream = client.channel.stream_stream(
        "/paceline.v1.ReplayService/Sample", pb.SampleRequest.SerializeToString, SAMPLE_RESPONSE.deserialize
    )
    message = pb.SampleRequest(run_id=RUN, table=TABLE, batch_size=64, batch_count=1, seed=3, row_details=True)
    (bulk,) = stream(iter([message]), timeout=SECONDS)
    assert np.frombuffer(bulk.payload, SPEC.dtype)["value"].tolist() == bulk.arrays["keys"].tolist()
    update = client.channel.unary_unary(
        "/paceline.v1.ReplayService/UpdatePriorities",
        UPDATE_PRIORITIES_REQUEST.serialize,
        pb.UpdatePrioritiesResponse.FromString,
    )
    arrays = {"keys": np.arange(28, 33), "priorities": np.full(5, 0.5, np.float32)}
    answer = update(Bulk(pb.UpdatePrioritiesRequest(run_id=RUN, table=TABLE), arrays=arrays), timeout=SECONDS)
    assert (answer.updated_row_count, answer.unknown_row_count) == (2, 3)


def test_priorities_are_counted_and_what_makes_no_sense_is_refused(redis_server, serve):
    replay, client = serve(config_of(redis_server.url, {}, table={"sampler": "prioritised"}))
    client.open()
    client.append_rows(2)
    answer = prioritise(client, [3, 19, 20, 2**63, 2**64 - 1, 3], [1, 2, 3, 4, 5, 6])
    assert (answer.updated_row_count, answer.unknown_row_count) == (3, 3)
    metrics = replay.metrics()
    assert metrics[f'paceline_replay_updated_priorities_total{{table="{TABLE}"}}'] == 3
    assert metrics[f'paceline_replay_unknown_priorities_total{{table="{TABLE}"}}'] == 3
    for keys, priorities in (([1, 2], [1.0]), ([1], [-1.0]), ([1], [float("nan")]), ([1], [float("inf")])):
        with pytest.raises(InvalidInputError):
            prioritise(client, keys, priorities)
    assert prioritise(client, [], []).updated_row_count == 0


def test_rows_without_priorities_cannot_be_given_any(redis_server, serve):
    _, client = serve(make_config(redis_server.url))
    client.open()
    with pytest.raises(ConflictError, match="has sampler 'uniform', whose rows have no priorities"):
        prioritise(client, [0], [1.0])


def test_priorities_and_counts_survive_a_stop_whole_and_a_kill_up_to_the_last_second(redis_server, redis_client, spawn):
    config = config_of(
        redis_server.url,
        {"bounded": {"sampler": "fifo", "max_times_sampled": 3}},
        table={"sampler": "prioritised", "prioritised": {"exponent": 1}},
        capacity=2000,
    )
    replay, client = spawn(config)
    for table in (TABLE, "bounded"):
        client.open(table=table)
        for number in range(90):
            client.append(request(number + 1, block(10 * number, 10), table=table))
    weights = np.where(np.arange(900) % 3 == 0, 2.0, 0.0)
    prioritise(client, range(900), weights.tolist())
    assert sample(client, "bounded", 600).keys == [key for key in range(200) for _ in range(3)]
    replay.stop()

    replay, client = spawn(config, resume=True)
    assert {key % 3 for key in sample(client, TABLE, 2000).keys} == {0}
    assert sample(client, "bounded", 4).keys == [200, 200, 200, 201]
    prioritise(client, range(900), np.roll(weights, 1).tolist())
    pages = f"paceline:{{{RUN}}}:table:{TABLE}:pages"
    sampled = f"paceline:{{{RUN}}}:table:bounded:state"
    wait_until(
        lambda: redis_client.hget(sampled, "sampled") == b"604" and _priority_of(redis_client, pages, 1) == 2.0,
        "the pages are in Redis",
    )
    replay.kill()

    _, client = spawn(config, resume=True)
    assert {key % 3 for key in sample(client, TABLE, 2000).keys} == {1}
    assert sample(client, "bounded", 3).keys == [201, 201, 202]


def _priority_of(redis_client, pages: str, row: int) -> float:
    page = redis_client.hget(pages, 0)
    return -1.0 if page is None else float(np.frombuffer(page, "<f4", 256)[row])


def test_priorities_that_redis_lost_are_written_again(redis_server, redis_client, serve):
    config = make_config(redis_server.url, table={"sampler": "prioritised"}, capacity=2000)
    replay, client = serve(config)
    client.open()
    client.append_rows(60)
    prioritise(client, range(600), [float(key < 5) for key in range(600)])
    pages = f"paceline:{{{RUN}}}:table:{TABLE}:pages"
    wait_until(lambda: redis_client.hlen(pages) == 3 and _priority_of(redis_client, pages, 6) == 0, "they are in Redis")
    redis_client.flushall()
    wait_until(lambda: redis_client.hlen(pages) == 3, "they are there again")
    replay.stop()
    assert values_in_redis(redis_client) == list(range(600))
    _, client = serve(config, resume=True)
    assert set(sample(client, TABLE, 1000).keys) == set(range(5))


def test_damaged_pages_are_named_and_their_rows_count_as_new(redis_server, redis_client, serve):
    config = make_config(redis_server.url, table={"sampler": "prioritised"}, capacity=2000)
    replay, client = serve(config)
    client.open()
    client.append_rows(60)
    prioritise(client, range(600), [0.0] * 600)
    replay.stop()
    redis_client.hset(f"paceline:{{{RUN}}}:table:{TABLE}:pages", 1, b"half")
    with structlog.testing.capture_logs() as events:
        replay, client = serve(config, resume=True)
    assert [event["page"] for event in events if event["event"] == "page_damaged"] == [1]
    assert replay.metrics()[f'paceline_replay_damaged_pages_total{{table="{TABLE}"}}'] == 1
    assert set(sample(client, TABLE, 5000).keys) <= set(range(256, 512))


def test_of_rows_that_were_sampled_as_often_as_they_may_be_a_sample_waits_for_others(redis_server, serve):
    config = make_config(
        redis_server.url, table={"max_times_sampled": 2}, limiter={"min_rows": 1, "deadline_seconds": 0.1}
    )
    replay, client = serve(config)
    client.open()
    client.append_rows(1)
    assert sorted(sample(client, TABLE, 20).keys) == sorted([*range(10)] * 2)
    assert client.describe().row_count == 0
    with pytest.raises(LimiterTimeoutError, match=r"0 draws are left .*max_times_sampled.*a batch needs 1"):
        sample(client, TABLE, 1)
    assert client.describe().sampled_row_count == 20
    replay.stop()

    patient = make_config(redis_server.url, table={"max_times_sampled": 2})
    _, client = serve(patient, resume=True)
    waiting = client.stub.Sample(iter([client.sample_request(5, 4)]), timeout=SECONDS)
    client.append_rows(1, first=1)
    assert sum(answer.row_count for answer in waiting) == 20
    assert client.describe().sampled_row_count == 40


def test_draws_that_were_granted_to_a_caller_that_goes_away_are_given_back(redis_server, serve):
    spec = RowSpec((Column("x", "uint8", (100_000,)),))
    config = make_config(redis_server.url, table={"max_times_sampled": 20}, capacity=100)
    replay, client = serve(config)
    client.open(spec)
    client.append(request(1, Block.empty(spec, 20)))
    stream = client.stub.Sample(iter([client.sample_request(300)]), timeout=SECONDS)  # 30 MB: more than it reads
    next(stream)
    stream.cancel()
    open_streams = 'paceline_replay_open_streams{rpc="Sample"}'
    wait_until(lambda: replay.metrics()[open_streams] == 0, "the stream has ended")
    left = 400 - client.describe().sampled_row_count
    assert left > 100
    assert sum(answer.row_count for answer in client.sample(left)) == left


def test_a_sample_waits_while_every_priority_is_zero_and_says_so(redis_server, serve):
    config = make_config(
        redis_server.url, table={"sampler": "prioritised"}, limiter={"min_rows": 1, "deadline_seconds": 0.1}
    )
    replay, client = serve(config)
    client.open()
    client.append_rows(1)
    prioritise(client, range(10), [0.0] * 10)
    with pytest.raises(LimiterTimeoutError, match="priority"):
        sample(client, TABLE, 4)
    assert client.describe().sampled_row_count == 0
    assert replay.metrics()[f'paceline_replay_limiter_timeouts_total{{side="sample",table="{TABLE}"}}'] == 1
    replay.stop()
    _, client = serve(make_config(redis_server.url, table={"sampler": "prioritised"}), resume=True)
    waiting = client.stub.Sample(iter([client.sample_request(4)]), timeout=SECONDS)
    prioritise(client, [7], [1.0])
    assert values_of(next(waiting)) == [7, 7, 7, 7]


def test_rows_behind_the_newest_policy_that_a_client_knows_of_are_not_sampled(redis_server, serve):
    _, client = serve(config_of(redis_server.url, KINDS))
    client.open(VERSIONED, table="recent")
    rows = Block.empty(VERSIONED, 100)
    rows.columns["policy_version"] = np.arange(100)
    client.append(request(1, rows, table="recent"))
    assert set(sample(client, "recent", 200).keys) == {97, 98, 99}
    assert set(sample(client, "recent", 200, policy_version=100).keys) == {98, 99}


def test_a_table_that_is_sampled_by_version_needs_rows_that_have_one(redis_server, serve):
    _, client = serve(config_of(redis_server.url, KINDS))
    with pytest.raises(RowSpecError, match="expected an int64 column policy_version"):
        client.open(table="recent")


def test_rows_of_lowest_priority_leave_a_full_table_and_stay_away_after_a_restart(redis_server, serve):
    config = config_of(redis_server.url, {"pruned": {**KINDS["pruned"], "capacity_rows": 640}})
    replay, client = serve(config)
    client.open(table="pruned")
    for number in range(6):
        client.append(request(number + 1, block(100 * number, 100), table="pruned"))
    prioritise(client, range(600), [0.1 if key % 2 else 5.0 for key in range(600)], "pruned")
    client.append(request(7, block(600, 100), table="pruned"))
    described = client.describe("pruned")
    assert described.row_count <= 640
    answers = client.follow(described.row_count, table="pruned")
    kept = {value for answer in answers for value in values_of(answer)}
    gone = set(range(700)) - kept
    assert len(kept) == described.row_count
    assert len(gone) >= 60
    assert {value % 2 for value in gone} == {1}
    assert set(sample(client, "pruned", 20_000).keys) <= kept
    described = client.describe("pruned")
    replay.stop()
    _, client = serve(config, resume=True)
    assert client.describe("pruned") == described
    assert set(sample(client, "pruned", 20_000).keys) <= kept


def test_a_capacity_in_bytes_holds_beside_that_in_rows_and_must_fit_a_block(redis_server, redis_client, serve):
    config = make_config(redis_server.url, table={"capacity_bytes": 50 * SPEC.row_bytes})
    replay, client = serve(config)
    assert client.open().capacity_row_count == 50
    client.append_rows(20)
    assert client.describe().row_count == 50
    assert values_in_redis(redis_client) == list(range(150, 200))
    metrics = replay.metrics()
    assert metrics[f'paceline_replay_table_log_bytes{{table="{TABLE}"}}'] == 50 * SPEC.row_bytes
    assert 50 * SPEC.row_bytes <= metrics[f'paceline_replay_table_memory_bytes{{table="{TABLE}"}}'] < 20_000
    with pytest.raises(BlockError, match="at most the rows that fit in capacity_bytes, 50"):
        client.append(request(21, block(0, 51)))
    replay.stop()
    tight = make_config(redis_server.url, run_id="tight", table={"capacity_bytes": 10 * SPEC.row_bytes - 1})
    _, client = serve(tight, run_id="tight")
    with pytest.raises(RowSpecError, match=r"may hold 319 bytes, 9 rows .* room for a block of 10 rows, 320 bytes"):
        client.open()


def test_tables_that_do_not_fit_the_machine_together_are_refused(redis_server, serve):
    huge = RowSpec((Column("x", "uint8", (1 << 20,)),))
    _, client = serve(config_of(redis_server.url, {"other": {"capacity_rows": 100_000_000}}))
    client.open()
    with pytest.raises(RowSpecError, match=r"table 'other' needs \d+ bytes of memory beside \d+ of the other tables"):
        client.open(huge, table="other")


def test_a_table_that_does_not_fit_the_container_is_refused_though_the_host_has_room(redis_server, serve, monkeypatch):
    files = {"/sys/fs/cgroup/memory.max": "10000000", "/sys/fs/cgroup/memory.current": "0"}
    monkeypatch.setattr(process, "_read", lambda path: files.get(path, ""))
    _, client = serve(config_of(redis_server.url, {"other": {"capacity_rows": 20_000}}))
    client.open()
    with pytest.raises(RowSpecError, match=r"expected at most 10000000 in all, what this machine or its container has"):
        client.open(RowSpec((Column("x", "uint8", (1000,)),)), table="other")


def test_a_table_that_is_not_the_learners_has_a_ratio_of_its_own(redis_server, serve):
    limiter = {"min_rows": 1, "samples_per_insert": 2, "deadline_seconds": 0.05, "window_rows": 600}
    _, client = serve(config_of(redis_server.url, {"other": {"limiter": limiter}}))
    client.open(table="other")
    described = client.describe("other").limiter
    assert (described.samples_per_insert, described.window_row_count) == (2, 600)
    client.append(request(1, block(0, 150), table="other"))
    with pytest.raises(LimiterTimeoutError, match="before 100 more rows fit, 198 rows must be sampled"):
        client.append(request(2, block(150, 100), table="other"))
    sample(client, "other", 198, details=False)
    client.append(request(2, block(150, 100), table="other"))


def compact_request(spec: RowSpec, rows: Block, sequence: int, stride: int, table: str = TABLE) -> pb.AppendRequest:
    payload = CompactForm.of(spec).encode(rows, stride)
    assert payload is not None
    header = rows_pb2.BlockHeader(
        collector_index=0,
        collector_incarnation=1,
        sequence=sequence,
        row_count=rows.row_count,
        row_spec_digest=spec.digest,
        checksum=checksum_of(payload),
        compact_stride=stride,
    )
    return pb.AppendRequest(run_id=RUN, table=table, header=header, rows=bytes(payload))


def walk(first: int, count: int, spec: RowSpec) -> Block:
    """Rows of one environment: each next observation is the observation of the row after it."""
    rows = Block.empty(spec, count)
    observations = np.arange(first, first + count + 1, dtype=np.float32)[:, None] * np.ones((1, 8), np.float32)
    rows.columns["observation"], rows.columns["next_observation"] = observations[:-1], observations[1:]
    rows.columns["episode"] = np.arange(first, first + count)
    return rows


def test_compact_blocks_are_kept_as_they_came_and_their_rows_are_whole(redis_server, redis_client, serve):
    spec = transition_spec(Column("o", "float32", (8,)), Column("a", "float32", (1,)))
    config = make_config(redis_server.url, run={"id": RUN, "environment_steps": 250})
    replay, client = serve(config)
    client.open(spec)
    blocks = [walk(100 * number, 100, spec) for number in range(3)]
    requests = [compact_request(spec, rows, number + 1, 1) for number, rows in enumerate(blocks)]
    answers = client.append(*requests)
    assert [answer.stored_row_count for answer in answers] == [100, 100, 50]  # the last one is cut, and stored plain
    stored = list(read_record(redis_client, RUN))
    assert [header.compact_stride for header, _ in stored] == [1, 1, 0]
    assert [payload for _, payload in stored[:2]] == [message.rows for message in requests[:2]]
    assert client.describe().log_bytes == sum(len(payload) for _, payload in stored)
    metrics = replay.metrics()
    assert metrics[f'paceline_replay_appended_bytes_total{{table="{TABLE}"}}'] == 250 * spec.row_bytes
    payload_bytes = metrics[f'paceline_replay_appended_payload_bytes_total{{table="{TABLE}"}}']
    assert payload_bytes == client.describe().log_bytes

    def check(client: Client) -> None:
        rows = b"".join(answer.rows for answer in client.follow(250))
        assert rows == b"".join(rows.data.tobytes() for rows in blocks)[: 250 * spec.row_bytes]

    check(client)
    replay.stop()
    replay, client = serve(config, resume=True)
    check(client)
    redis_client.flushall()
    wait_until(lambda: redis_client.xlen(f"paceline:{{{RUN}}}:table:{TABLE}:blocks") == 3, "it is written again")
    replay.stop()
    _, client = serve(config, resume=True)
    check(client)


def test_a_compact_block_that_lies_is_refused(redis_server, serve):
    spec = transition_spec(Column("o", "float32", (8,)), Column("a", "float32", (1,)))
    _, client = serve(make_config(redis_server.url))
    client.open(spec)
    for change in ({"compact_stride": 7}, {"compact_stride": -1}, {"row_count": 101}, {"row_count": 99}):
        message = compact_request(spec, walk(0, 100, spec), 1, 1)
        for name, value in change.items():
            setattr(message.header, name, value)
        with pytest.raises(BlockError):
            client.append(message)
    assert client.describe().inserted_row_count == 0


@pytest.fixture
def slow(redis_server):
    faulty = FaultyRedis(redis_server.url.removeprefix("unix://"))
    yield faulty
    faulty.close()


def test_sampling_begins_before_the_table_is_whole_and_blocks_wait_for_it(redis_server, slow, serve):
    spec = RowSpec((*SPEC.columns, Column("x", "uint8", (8_000,))))
    rows = Block.empty(spec, 500)  # 4 MB a block: two in one step of the restore

    def numbered(number: int) -> Block:
        rows.columns["value"] = np.arange(500 * number, 500 * number + 500)
        return rows

    replay, client = serve(make_config(redis_server.url, limiter={"min_rows": 600}))
    client.open(spec)
    for number in range(12):
        client.append(request(number + 1, numbered(number)))
    replay.stop()

    slow.only, slow.pass_first = b"MGET", 2  # the rest of the rows is held until they were looked for
    replay, client = serve(
        make_config(slow.url, limiter={"min_rows": 600}, rpc={"drain_seconds": 1}), resume=True, ready=False
    )
    client.wait_until_serving()
    described = client.describe()
    assert 600 <= described.row_count < 6000 == described.inserted_row_count
    assert replay.metrics()[f'paceline_replay_table_whole{{table="{TABLE}"}}'] == 0
    assert sum(answer.row_count for answer in client.sample(500)) == 500
    waiting = client.stub.Append(iter([request(13, numbered(12))]), timeout=SECONDS)
    with Following(client) as following:
        got = []
        while len(got) < 6500:
            answer = following.next()
            assert answer.first_row == len(got) or not answer.row_count
            got += np.frombuffer(answer.rows, spec.dtype)["value"].tolist()
            slow.released.set()
    assert got == list(range(6500))
    assert next(waiting).stored_row_count == 500
    assert replay.metrics()[f'paceline_replay_table_whole{{table="{TABLE}"}}'] == 1


def test_a_restore_that_redis_interrupts_goes_on(redis_server, slow, serve):
    replay, client = serve(make_config(redis_server.url))
    client.open()
    client.append_rows(50)
    replay.stop()
    slow.fault, slow.only = "LOADING Redis is loading the dataset in memory", b"MGET"
    with structlog.testing.capture_logs() as events:
        replay, client = serve(make_config(slow.url), resume=True, ready=False)
        wait_until(lambda: slow.attempts >= 1, "the restore met the fault")
        assert client.health() == "NOT_SERVING"
        slow.fault = None
        client.wait_until_serving()
    assert "restore_interrupted" in [event["event"] for event in events]
    client.append_rows(1, first=50)
    assert sorted(set(client.sample_values(20_000).tolist())) == list(range(510))


def test_each_shard_has_its_part_of_the_minimum_and_of_the_rows(redis_server, redis_client, serve):
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    limits = []
    for shard in range(3):
        config = make_config(
            redis_server.url,
            limiter={"min_rows": 10, "deadline_seconds": 0.05},
            run={"id": RUN, "environment_steps": 32},
            collector={"count": 3, "block_rows": 5},
            replay={"shards": 3, "address": ",".join(addresses), "listen": addresses[shard]},
        )
        _, client = serve(config, shard=shard)
        client.open()
        assert client.describe().limiter.min_row_count == 4
        client.append(request(1, block(0, 3)))
        with pytest.raises(LimiterTimeoutError, match="3 of the 4 rows needed"):
            client.sample(1)
        answers = client.append(*(request(n, block(5 * n, 5)) for n in range(2, 5)))
        assert answers[-1].complete
        limits.append(client.describe().inserted_row_count)
    assert limits == [11, 11, 10]
    assert len({key.split(b"}")[0] for key in redis_client.scan_iter("*")}) == 3
