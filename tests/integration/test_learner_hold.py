"""Whose rows they are: another folder's learner is refused, and a learner that was replaced is ignored."""

from __future__ import annotations

import pytest
import torch
from prometheus_client import CollectorRegistry

from integration.replay_harness import RUN, SECONDS, SPEC, TABLE, Following, block, make_config, request, wait_until
from paceline.errors import ConflictError, InvalidInputError, ReplacedError
from paceline.lag.bound import LearnerVersion
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import open_followed, open_samples
from paceline.rpc.client import open_channel
from paceline.rpc.status import raising
from paceline.rpc.wire import row_spec_to_wire
from paceline.v1 import replay_pb2 as pb


def take(client, learner_id: str, incarnation: int) -> None:
    message = pb.OpenTableRequest(
        run_id=RUN,
        table=TABLE,
        row_spec=row_spec_to_wire(SPEC),
        learner_id=learner_id,
        learner_incarnation=incarnation,
    )
    with raising("replay"):
        client.stub.OpenTable(message, timeout=10)


def sample(client, incarnation: int) -> int:
    message = client.sample_request(4)
    message.learner_incarnation = incarnation
    with raising("replay"):
        return sum(answer.row_count for answer in client.stub.Sample(iter([message]), timeout=10))


def test_rows_belong_to_the_learner_that_they_came_about_under_also_after_a_restart(redis_server, serve):
    config = make_config(redis_server.url)
    replay, client = serve(config)
    take(client, "first", 1)
    client.append_rows(2)
    with pytest.raises(ConflictError, match=r"under learner first, and learner second.*paceline replay delete"):
        take(client, "second", 9)
    replay.stop()
    _, client = serve(config, resume=True)
    with pytest.raises(ConflictError, match="under learner first"):
        take(client, "second", 9)
    take(client, "first", 2)


def test_a_record_without_rows_is_anybodys(redis_server, serve):
    _, client = serve(make_config(redis_server.url))
    take(client, "first", 3)
    take(client, "second", 1)
    client.append_rows(1)
    with pytest.raises(ConflictError):
        take(client, "first", 4)


def test_a_learner_that_was_replaced_neither_samples_nor_follows_nor_comes_back(redis_server, serve):
    config = make_config(redis_server.url)
    replay, client = serve(config)
    take(client, "first", 1)
    client.append_rows(4)
    assert sample(client, 1) == 4
    with Following(client, learner_incarnation=1, sampled_row_count=0) as following:
        following.values(40)
        take(client, "first", 2)
        following.report(learner_incarnation=1, sampled_row_count=12)
        with pytest.raises(ReplacedError, match="incarnation 2 has this run now, and incarnation 1 asks"):
            following.next()
    for _ in range(2):
        with pytest.raises(ReplacedError):
            sample(client, 1)
        with pytest.raises(ReplacedError):
            take(client, "first", 1)
        assert sample(client, 2) == 4
        replay.stop()
        replay, client = serve(config, resume=True)
    assert sample(client, 0) == 4  # who is no learner may look


@pytest.mark.parametrize("read", ["sample", "follow", "queue"])
def test_a_source_says_whose_it_is_with_each_stream_so_a_shard_that_comes_late_is_no_other_learners(
    redis_server, serve, read
):
    table = {"tables": {TABLE: {"queue": True}}, "read": "follow"} if read == "queue" else {"read": read}
    config = make_config(redis_server.url, replay=table)
    _, client = serve(config)
    take(client, "first", 1)
    client.append_rows(4)
    metrics, cpu, channel = LearnerMetrics(CollectorRegistry()), torch.device("cpu"), None
    if read == "sample":
        newest = LearnerVersion(1, incarnation=1)
        source = open_samples(
            config, SPEC, seed=1, metrics=metrics, device=cpu, learner_version=newest, learner_id="second"
        )
    else:
        channel = open_channel(config.replay.address, config.rpc)
        source = open_followed(
            config, [channel], SPEC, seed=1, metrics=metrics, device=cpu, learner_incarnation=1, learner_id="second"
        )
    try:
        with pytest.raises(ConflictError, match="under learner first, and learner second wants them"):
            source.next_batch(SECONDS)
    finally:
        source.close()
        if channel is not None:
            channel.close()


def test_a_store_that_lost_everything_is_told_whose_it_is(redis_server, redis_client, serve):
    _, client = serve(make_config(redis_server.url))
    take(client, "first", 1)
    client.append(request(1, block(0, 10)))
    redis_client.flushall()
    meta = f"paceline:{{{RUN}}}:meta"
    wait_until(lambda: redis_client.hget(meta, "learner") == b"first 1", "the record says it again")


@pytest.mark.parametrize(("learner_id", "incarnation"), [("with space", 1), ("x" * 65, 1), ("fine", 0), ("fine", -1)])
def test_a_malformed_learner_is_refused(redis_server, serve, learner_id, incarnation):
    _, client = serve(make_config(redis_server.url))
    with pytest.raises(InvalidInputError, match="learner_id"):
        take(client, learner_id, incarnation)
