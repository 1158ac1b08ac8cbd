"""Replacing what runs: containers that start again, services of another release, two learners where one belongs."""

from __future__ import annotations

import shutil
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from e2e.apart import ROLES, RUN, Services
from e2e.harness import records_of
from free_ports import free_port
from paceline.local.embedded import EmbeddedRedis
from paceline.v1 import rows_pb2
from redis_record import read_record
from skew import Previous, SkewProxy, as_next, as_previous

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    store = EmbeddedRedis.start(tmp_path / "store")
    yield store
    store.stop()


@pytest.fixture
def services(tmp_path: Path, store: EmbeddedRedis) -> Iterator[Services]:
    services = Services(tmp_path, store.url)
    yield services
    services.close()


def test_containers_that_are_started_again_by_the_same_command_go_on(
    services: Services, store: EmbeddedRedis, tmp_path: Path
):
    """`--resume-or-start`: nobody says whether the run is there already."""

    def start_all() -> None:
        services.start("replay", "--resume-or-start")
        services.start("learner", "--resume-or-start")
        services.start("collector")

    start_all()
    services.wait_for_updates(250)
    # A machine that loses power: all at once, Redis as well, which comes back last.
    store.process.kill()
    services.kill("replay", "learner", "collector")
    store.process.wait()
    start_all()
    services.wait_for(lambda: services.events("replay", "waiting_for_redis"), "replay to wait for Redis")
    store.restart()
    (resumed,) = services.wait_for(lambda: services.events("learner", "resumed"), "the learner to resume")
    assert resumed["learner_step"] >= 200  # the checkpoints are 200 updates apart
    services.wait_for_updates(resumed["learner_step"] + 300)
    (start,) = records_of(services.folder, "start")[1:]
    assert start["resumed"] is True

    # Another learner on the same volume.
    ports = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    services.start("learner-2", "--resume-or-start", f"learner.listen={ports[0]}", f"learner.metrics_listen={ports[1]}")
    assert services.end("learner-2") == 2
    assert "is in use: another learner trains it now" in services.log("learner-2")

    # The volume is lost: versions would begin again at 1.
    services.stop("collector")
    services.stop("learner")
    shutil.move(services.folder, tmp_path / "lost")
    services.start("learner", "--resume-or-start")
    assert services.end("learner") == 2
    assert "bring that back" in services.log("learner")
    assert "paceline replay delete RUN" in services.log("learner")
    shutil.rmtree(services.folder)
    shutil.move(tmp_path / "lost", services.folder)
    steps = services.updates()
    services.start("learner", "--resume-or-start")
    services.start("collector")
    services.wait_for_updates(steps + 200)


def test_a_learner_that_was_held_up_while_another_began_harms_nobody(services: Services, tmp_path: Path):
    """Its volume went to another host, where nobody sees the lock of its files; then it wakes, on its old port."""
    services.start("replay")
    services.start("learner")
    services.start("collector")
    services.wait_for_updates(250)
    services.stop("collector")
    held_up = services.processes.pop("learner")
    held_up.send_signal(signal.SIGSTOP)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(services.folder, elsewhere / RUN)
    for name in ("lock", "endpoint.lock"):
        (elsewhere / RUN / "learner" / name).unlink()
    old_folder, services.folder = services.folder, elsewhere / RUN
    services.settings["run.directory"] = str(elsewhere)
    listen, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    services.settings |= {"learner.listen": listen, "learner.address": listen, "learner.metrics_listen": metrics}
    services.settings["learner.endpoint_metrics_listen"] = "127.0.0.1:0"
    services.start("learner-2", "--resume")
    services.start("collector-2")
    services.wait_for_updates(services.updates() + 200)

    published = records_of(old_folder, "training")[-1]["learner_step"]
    held_up.send_signal(signal.SIGCONT)
    # It asks replay for rows, or reports what it drew: there it learns that it was replaced.
    services.wait_for(lambda: held_up.poll() is not None, "the old learner to end")
    assert held_up.returncode == 2, services.log("learner")
    assert "took over" in services.log("learner") or "it was replaced" in services.log("learner")
    assert records_of(old_folder, "training")[-1]["learner_step"] <= published + 200
    services.wait_for_updates(services.updates() + 200)
    versions = {record["incarnation"] for record in records_of(services.folder, "start")}
    assert versions == {1, 2}


def test_collectors_and_replay_are_replaced_one_by_one_while_the_run_goes_on(services: Services):
    """A rolling upgrade: each new collector is there before the old one goes; replay goes shard by shard."""
    shards = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    services.settings |= {"replay.shards": "2", "replay.address": ",".join(shards[:2]), "collector.count": "2"}

    def start_shard(number: int) -> None:
        listen = [f"replay.listen={shards[number]}", f"replay.metrics_listen={shards[2 + number]}"]
        services.start(f"replay-{number}", "--resume-or-start", "--shard", str(number), *listen)

    for number in (0, 1):
        start_shard(number)
    services.start("learner", "--resume-or-start")
    services.start("collector-0")
    services.start("collector-1")
    services.wait_for_updates(300)

    # The first takes the lowest free index, the second the one that it is given.
    for old, new, options in (("collector-0", "collector-2", ()), ("collector-1", "collector-3", ("--index", "3"))):
        services.start(new, *options)
        services.wait_for(lambda new=new: services.events(new, "joined"), f"{new} to join")
        services.stop(old)
        services.wait_for_updates(services.updates() + 100)
    assert [services.events(f"collector-{number}", "joined")[0]["index"] for number in (2, 3)] == [2, 3]

    for number in (0, 1):
        services.stop(f"replay-{number}")
        start_shard(number)
        services.wait_for(lambda number=number: services.events(f"replay-{number}", "replay_serving"), "it to serve")
        services.wait_for_updates(services.updates() + 100)

    for name in ("collector-2", "collector-3"):
        services.stop(name)
    newest = records_of(services.folder, "training")[-1]
    services.stop("learner")
    for number in (0, 1):
        services.stop(f"replay-{number}")
    (ended,) = services.events("learner", "training_ended")
    assert ended["learner_step"] >= newest["learner_step"]
    # `strict`, one update a step: the limiter's band on either side of it, in each shard, is all that it may be off.
    assert ended["environment_steps"] - 800 <= ended["learner_step"] <= ended["environment_steps"]

    # An acknowledged block that was lost would be a gap: a collector's next one only follows its acknowledgement.
    sequences: dict[tuple[int, int], list[int]] = defaultdict(list)
    rows = 0
    with redis.Redis.from_url(services.redis_url) as client:
        for shard in (0, 1):
            for header, _ in read_record(client, f"{RUN}:{shard}"):
                assert isinstance(header, rows_pb2.BlockHeader)
                sequences[header.collector_index, header.collector_incarnation].append(header.sequence)
                rows += header.row_count
    assert set(sequences) == {(0, 1), (1, 1), (2, 1), (3, 1)}
    for found in sequences.values():
        assert found == list(range(1, len(found) + 1))
    assert rows >= ended["environment_steps"]


@pytest.mark.parametrize("release", ["before", "after"])
def test_a_run_trains_whose_services_take_each_other_for_another_release(services: Services, release: str):
    """Between any two of them every message loses what the last release added, or gains what the next one may add."""

    def change() -> Any:
        return as_previous(Previous()) if release == "before" else as_next

    proxies = [SkewProxy(services.settings[f"{role}.listen"], change()) for role in ("replay", "learner")]
    services.settings["replay.address"], services.settings["learner.address"] = (proxy.address for proxy in proxies)
    try:
        for role in ROLES:
            services.start(role)
        services.wait_for_updates(300)
        services.wait_for(lambda: records_of(services.folder, "evaluation"), "an evaluation")
        assert records_of(services.folder, "episode")
        assert all(proxy.message_count > 100 for proxy in proxies)
        for role in ("collector", "evaluator", "learner", "replay"):
            services.stop(role)
    finally:
        for proxy in proxies:
            proxy.close()
