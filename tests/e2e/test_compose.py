"""The system in containers, on the real engine: it trains, grows, survives the death of each part, and stops in order.

The tests of this file go in order, each on what the one before left.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import numpy as np
import pytest
import redis
import yaml

from e2e.containers import ROOT, SERVICES, TAG, TARGETS, Stack, build_images, engine, run, wait_until
from paceline.rows import Column, transition_spec
from redis_record import read_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = "sum(paceline_learner_environment_steps)"
UPDATES = "sum(paceline_learner_step)"
RUN = "compose"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[docker.DockerClient]:
    folder = tmp_path_factory.mktemp("engine")
    with engine(folder) as found:
        build_images(found, folder)
        yield found


@pytest.fixture(scope="module")
def stack(client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("run")
    settings = yaml.safe_load((ROOT / "configs" / "pendulum-sac.yaml").read_text())
    settings["run"]["environment_steps"] = 90_000  # below the table's capacity: the log holds every row
    settings["learner"] |= {"batch_size": 64, "algorithm": {"hidden": [64, 64]}, "checkpoint": {"every_updates": 200}}
    settings["evaluator"] = {"every_versions": 100, "episodes": 2}
    run_file = folder / "run.yaml"
    run_file.write_text(yaml.safe_dump(settings))
    run_file.chmod(0o644)
    folder.chmod(0o755)
    stack = Stack(client, run_file)
    try:
        stack.compose("up", "--detach", "--no-build", *SERVICES)
        yield stack
    finally:
        stack.close()


def in_image(client: docker.DockerClient, target: str, *command: str, **options: Any) -> str:
    """What a command prints in an image, on a read-only root, as the image's own user."""
    output = client.containers.run(
        f"paceline/{target}:{TAG}",
        list(command[1:]),
        entrypoint=command[0],
        remove=True,
        read_only=True,
        network_mode="none",
        **options,
    )
    return str(output.decode())


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_holds_its_role_and_no_tools(client, target):
    image = client.images.get(f"paceline/{target}:{TAG}")
    assert image.attrs["Config"]["User"] == "10001:10001"
    assert image.attrs["Config"]["Entrypoint"] == ["python", "-m", "paceline"]
    assert image.labels["org.opencontainers.image.version"] == "0.1.0"
    assert in_image(client, target, "id", "-u").strip() == "10001"
    packages = in_image(client, target, "cat", "/usr/share/paceline/packages.txt")
    assert "paceline==0.1.0" in packages
    assert ("torch==" in packages, "tensorboard==" in packages) == (target != "replay", target == "learner")
    # As root, who would see them.
    found = in_image(
        client, target, "sh", "-c", "ls /wheels /root/.cache 2>&1; command -v gcc cc make; id -u", user="0"
    )
    assert found.count("No such file") == 2
    assert found.endswith("\n0\n")
    assert len(found.splitlines()) == 3, found
    # Whatever reads the settings of a role imports what the role needs.
    listing = in_image(client, target, "python", "-m", "paceline", "config", "run.id=x")
    assert yaml.safe_load(listing)["run"]["id"] == "x"
    module = f"paceline.{target}.main"
    in_image(client, target, "python", "-c", f"import {module}")


def test_images_of_ones_own_train_with_their_environment_and_actor(client):
    for target in ("learner", "collector"):
        run(
            "docker", "build", "-q", "--build-arg", f"IMAGE={target}", "-t", f"paceline/{target}:mine", "deploy/example"
        )
    client.images.get(f"paceline/replay:{TAG}").tag("paceline/replay", "mine")
    stack = Stack(client, ROOT / "deploy/example/example.yaml", tag="mine")
    try:
        stack.compose("up", "--detach", "--no-build", *SERVICES)
        stack.wait_until_healthy(*SERVICES[1:])
        wait_until(lambda: stack.total(UPDATES) > 50, lambda: f"updates\n{stack.describe(*SERVICES[1:])}")
        records = f"cat /var/lib/paceline/runs/{RUN}/metrics.jsonl"
        wait_until(
            lambda: b"aux_action_size" in stack.one("learner").exec_run(["sh", "-c", records]).output, "a record"
        )
        semantics = newest_checkpoint(stack)["actor_semantics"]
        assert (semantics["kind"], semantics["builder"]) == ("own", "my_actor:MyActor")
    finally:
        stack.close()


def test_it_starts_in_order_and_trains_as_prometheus_sees(stack):
    stack.wait_until_healthy(*SERVICES[1:])
    assert stack.one("certs").wait()["StatusCode"] == 0
    assert len(stack.containers("collector")) == 2
    steps = wait_until(lambda: stack.total(STEPS), "environment steps in Prometheus")
    wait_until(lambda: stack.total(STEPS) > steps + 200, "further environment steps")
    wait_until(lambda: stack.total(UPDATES) > 100, "updates")
    wait_until(lambda: len(stack.query('up{job="collector"} == 1')) == 2, "both collectors scraped")
    wait_until(lambda: stack.total("count(up == 1)") == 6, lambda: f"every target up: {stack.query('up')}")
    started = {name: stack.one(name).attrs["State"]["StartedAt"] for name in ("redis", "replay", "learner")}
    assert started["redis"] < started["replay"] < started["learner"]


def test_it_listens_nowhere_else_and_admits_nobody_without_certificate(stack):
    published = {
        (port, each["HostIp"])
        for name in SERVICES
        for container in stack.containers(name)
        for port, places in (container.attrs["NetworkSettings"]["Ports"] or {}).items()
        for each in places or []
    }
    assert published == {("9090/tcp", "127.0.0.1")}
    code = (
        "import grpc; from paceline.v1 import replay_pb2, replay_pb2_grpc as g; "
        "g.ReplayServiceStub(grpc.insecure_channel('replay:50051')).DescribeTables("
        f"replay_pb2.DescribeTablesRequest(run_id='{RUN}'), timeout=5)"
    )
    refused = stack.one("evaluator").exec_run(["python", "-c", code])
    assert refused.exit_code != 0
    assert b"UNAVAILABLE" in refused.output
    store = stack.one("redis").exec_run(["redis-cli", "dbsize"])
    assert b"NOAUTH" in store.output


def test_further_collectors_join(stack):
    stack.compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "collector=3", *SERVICES)
    stack.wait_until_healthy("collector")
    assert len(stack.containers("collector")) == 3
    wait_until(lambda: len(stack.query('up{job="collector"} == 1')) == 3, "three collectors scraped")
    wait_until(
        lambda: len([rows for rows in stack.query("paceline_collector_rows_appended_total").values() if rows]) == 3,
        "rows of every collector",
    )


@pytest.mark.parametrize("service", ["replay", "collector", "learner", "evaluator", "redis", "prometheus"])
def test_a_service_that_is_killed_comes_back_and_training_goes_on(stack, service):
    stack.kill(stack.containers(service)[-1])
    stack.wait_until_healthy(*SERVICES[1:])
    steps = wait_until(lambda: stack.total(STEPS), "environment steps in Prometheus")
    wait_until(
        lambda: stack.total(STEPS) > steps + 100, lambda: f"progress after {service}\n{stack.describe(*SERVICES[1:])}"
    )


def test_it_stops_in_order_with_a_checkpoint_and_nothing_that_was_acknowledged_is_lost(stack):
    stack.compose("stop", "collector", "evaluator", "learner")
    acknowledged = stack.peaks("paceline_collector_rows_appended_total")
    assert acknowledged > 500
    check_record(stack, acknowledged)
    stack.compose("stop")
    codes = {each.name: each.attrs["State"]["ExitCode"] for name in SERVICES for each in stack.containers(name)}
    assert set(codes.values()) == {0}, codes
    lines = stack.one("learner").logs().decode().splitlines()
    ended = [json.loads(line) for line in lines if '"training_ended"' in line][-1]
    assert newest_checkpoint(stack)["counters"]["learner_step"] == ended["learner_step"]
    for name in SERVICES:
        assert "Traceback" not in "\n".join(each.logs().decode() for each in stack.containers(name)), name


def test_what_was_stopped_goes_on_where_it_was(stack):
    before = newest_checkpoint(stack)["counters"]["learner_step"]
    stack.compose("start")
    wait_until(lambda: stack.total(UPDATES) > before + 50, lambda: f"updates\n{stack.describe(*SERVICES[1:])}")
    assert any('"resumed"' in line for line in stack.one("learner").logs().decode().splitlines())


def check_record(stack: Stack, acknowledged: float) -> None:
    """Every block is there once and in order, as many rows as were acknowledged, and no policy goes back."""
    store = stack.one("redis")
    (address,) = (each["IPAddress"] for each in store.attrs["NetworkSettings"]["Networks"].values())
    password = store.exec_run(["cat", "/etc/paceline/redis/password"]).output.decode().strip()
    spec = transition_spec(Column("observation", "float32", (3,)), Column("action", "float32", (1,)))
    sequences: dict[tuple[int, int], list[int]] = {}
    versions: dict[int, list[tuple[int, int]]] = {}
    rows = 0
    with redis.Redis(address, password=password) as client:
        for header, payload in read_record(client, RUN):
            sequences.setdefault((header.collector_index, header.collector_incarnation), []).append(header.sequence)
            rows += header.row_count
            block = np.frombuffer(payload, spec.dtype)
            identities = versions.setdefault(header.collector_index, [])
            identities += zip(block["policy_incarnation"].tolist(), block["policy_version"].tolist(), strict=True)
    for who, numbers in sequences.items():
        assert numbers == list(range(1, len(numbers) + 1)), who
    for index, identities in versions.items():
        assert identities == sorted(identities), index
    assert rows >= acknowledged


def newest_checkpoint(stack: Stack) -> dict[str, Any]:
    """What the newest checkpoint on the learner's volume says of itself."""
    stream, _ = stack.one("learner").get_archive(f"/var/lib/paceline/runs/{RUN}/checkpoints")
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
        newest = max(name for name in archive.getnames() if re.search(r"\.json$", name))
        file = archive.extractfile(newest)
        assert file is not None
        manifest: dict[str, Any] = json.load(file)
    return manifest


def test_the_folder_of_this_file_needs_no_registry():
    """Nothing of the test names a registry's host: what pip and apt use is the machine's own affair."""
    for name in ("test_compose.py", "containers.py"):
        assert not re.search(r"https?://(?!127\.0\.0\.1)", (Path(__file__).parent / name).read_text())
