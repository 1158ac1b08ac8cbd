"""SIGTERM to each service of a run whose services stand apart, as an orchestrator sends it."""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import redis
from google.protobuf.message import Message

from e2e.apart import ROLES, RUN, Services
from e2e.harness import ROOT, records_of
from paceline.identity import PROTOCOL_VERSION
from paceline.local.embedded import EmbeddedRedis
from paceline.rows import Column, transition_spec
from paceline.v1 import parameters_pb2, parameters_pb2_grpc, replay_pb2, replay_pb2_grpc
from redis_record import read_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    store = EmbeddedRedis.start(tmp_path / "store")
    services = Services(tmp_path, store.url)
    yield services
    services.close()
    store.stop()


def test_each_service_ends_with_nought_and_the_learner_with_a_checkpoint_of_its_last_update(services: Services):
    for role in ROLES:
        services.start(role)
    services.wait_for_updates(300)
    # In the middle of training, with streams of samples, appends and polls open.
    services.stop("learner", signals=2)
    (ended,) = services.events("learner", "training_ended")
    newest = json.loads(max((services.folder / "checkpoints").glob("*.json")).read_text())
    assert newest["counters"]["learner_step"] == ended["learner_step"]
    for role in ("replay", "collector", "evaluator"):
        services.stop(role)


def test_clients_that_never_read_their_streams_hold_nobody_up(services: Services):
    """Field case: a stop that never finishes. Every role ends within what docs/operations.md says that it takes."""
    promised = documented_stop_seconds()
    services.settings["learner.updates"] = "learner_bound"  # so that nothing but its reader holds a sampler back
    for role in ROLES:
        services.start(role)
    services.wait_for_updates(300)
    with never_reading(services.settings["replay.address"], services.settings["learner.address"]) as open_streams:
        wait_until_blocked(services)
        took = {}
        for role in ("learner", "collector", "evaluator", "replay"):
            took[role] = services.stop(role, signals=2, seconds=promised[role])
        # The last ones to end were those that nobody read: nothing had cut them before.
        assert len(open_streams) == 4
    print("seconds to stop:", {role: round(seconds, 2) for role, seconds in took.items()})
    (ended,) = services.events("learner", "training_ended")
    manifest = max((services.folder / "checkpoints").glob("*.json"))
    newest = json.loads(manifest.read_text())
    assert newest["counters"]["learner_step"] == ended["learner_step"]
    data = (manifest.parent / newest["data_file"]).read_bytes()
    assert hashlib.sha256(data).hexdigest() == newest["data_sha256"]
    services.start("replay", "--resume-or-start")
    services.start("learner", "--resume-or-start")
    (resumed,) = services.wait_for(lambda: services.events("learner", "resumed"), "the checkpoint to be loaded")
    assert resumed["learner_step"] == ended["learner_step"]


def wait_until_blocked(services: Services) -> None:
    """Wait until replay has sampled what a connection holds, and no more for a second: it is amid a send."""
    sampled, since = 0.0, time.monotonic()

    def is_blocked() -> bool:
        nonlocal sampled, since
        now = services.metrics("replay.metrics_listen")['paceline_replay_sampled_rows_total{table="transitions"}']
        if now != sampled:
            sampled, since = now, time.monotonic()
        return sampled > 0 and time.monotonic() - since > 1

    services.wait_for(is_blocked, "a stream of samples that nobody reads")


def documented_stop_seconds() -> dict[str, float]:
    """The table of docs/operations.md, which the grace periods of compose and chart are compared with too."""
    text = (ROOT / "docs" / "operations.md").read_text()
    return {role: float(seconds) for role, seconds in re.findall(r"^\| (\w+) \| (\d+) \|", text, re.MULTILINE)}


@contextmanager
def never_reading(replay: str, learner: str) -> Iterator[list[grpc.Call]]:
    """Streams that are opened and owed data, and from which nothing is ever taken."""
    stop_asking = threading.Event()

    def then_wait(first: Message) -> Iterator[Message]:
        yield first
        stop_asking.wait()

    with grpc.insecure_channel(replay) as to_replay, grpc.insecure_channel(learner) as to_learner:
        rows = replay_pb2_grpc.ReplayServiceStub(to_replay)
        many = replay_pb2.SampleRequest(run_id=RUN, table="transitions", batch_size=8192, batch_count=100_000)
        all_rows = replay_pb2.FollowRequest(run_id=RUN, table="transitions", from_row=0)
        poll = parameters_pb2.GetSnapshotRequest(run_id=RUN, protocol_version=PROTOCOL_VERSION)
        poll.wait.seconds = 60
        snapshots = parameters_pb2_grpc.ParameterServiceStub(to_learner)
        calls: list[grpc.Call] = [
            rows.Sample(then_wait(many), timeout=300),
            rows.Follow(then_wait(all_rows), timeout=300),
            rows.Append(then_wait(replay_pb2.AppendRequest(run_id="of-nobody")), timeout=300),
            snapshots.GetSnapshot(poll, timeout=300),
        ]
        try:
            yield calls
        finally:
            stop_asking.set()
            for call in calls:
                call.cancel()


def test_services_that_come_back_one_by_one_go_on(services: Services):
    for role in ROLES:
        services.start(role)
    services.wait_for_updates(300)
    services.stop("learner")
    services.stop("replay")
    # The collector is alone now, and waits.
    services.start("replay", "--resume")
    services.start("learner", "--resume")
    before = max(record["learner_step"] for record in records_of(services.folder, "training"))
    services.wait_for_updates(before + 200)
    (resumed,) = services.events("learner", "resumed")
    assert resumed["learner_step"] >= 300
    for role in ROLES:
        services.stop(role)


def test_a_run_whose_store_was_lost_goes_on_without_debt_and_without_random_actions(services: Services, tmp_path: Path):
    ratio = "learner.updates_per_step=0.8"
    for role in ROLES:
        services.start(role, ratio)
    services.wait_for_updates(400)
    for role in ("collector", "evaluator", "learner", "replay"):
        services.stop(role)
    (stopped,) = services.events("learner", "training_ended")
    url = services.redis_url
    with redis.Redis.from_url(url) as client:
        client.flushall()
    limit = int(str(stopped["environment_steps"])) + 600
    for role in ROLES:
        services.start(role, ratio, f"run.environment_steps={limit}", *(["--resume"] if role in ROLES[:2] else []))
    for role in ("learner", "collector", "evaluator"):
        assert services.processes[role].wait(90) == 0, services.log(role)
    finish = records_of(services.folder, "finish")[-1]
    # The table needs 100 rows again; the other 500 steps ask for 400 updates.
    assert limit <= finish["environment_steps"] <= limit + 64
    assert abs(finish["learner_step"] - (int(str(stopped["learner_step"])) + 400)) <= 52
    assert _random_rows(url) == 0
    services.stop("replay")


def _random_rows(url: str) -> int:
    """Rows whose action was drawn uniformly from [-2, 2]: their log-density is that of no policy."""
    spec = transition_spec(Column("observation", "float32", (3,)), Column("action", "float32", (1,)))
    with redis.Redis.from_url(url) as client:
        payloads = [payload for _, payload in read_record(client, "apart")]
    assert payloads
    densities = np.concatenate([np.frombuffer(payload, spec.dtype)["behaviour_log_prob"] for payload in payloads])
    return int((abs(densities + math.log(4)) < 1e-6).sum())
