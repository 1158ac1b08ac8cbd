"""SIGTERM to each service of a run whose services stand apart, as an orchestrator sends it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from e2e.harness import PACELINE, ROOT, SMALL, records_of
from paceline.local.embedded import EmbeddedRedis
from paceline.rows import Column, transition_spec
from redis_record import read_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROLES = ("replay", "learner", "collector", "evaluator")


class Services:
    """Each role in a process of its own, on the addresses of the defaults."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder / "apart"
        self._log_folder = folder
        self._environment = {
            **os.environ,
            "PACELINE_REPLAY__REDIS_URL": redis_url,
            "PACELINE_RUN__DIRECTORY": str(folder),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, *options: str) -> None:
        with (self._log_folder / f"{role}.log").open("ab") as log:
            self.processes[role] = subprocess.Popen(
                [*PACELINE, role, "configs/pendulum-sac.yaml", "run.id=apart", *SMALL, *options],
                cwd=ROOT,
                env={**self._environment, "PACELINE_RUN__ENVIRONMENT_STEPS": "100000"},
                stdout=log,
                stderr=log,
            )

    def log(self, role: str) -> str:
        return (self._log_folder / f"{role}.log").read_text()

    def stop(self, role: str, *, twice: bool = False) -> None:
        """It ends with 0 within the promised time."""
        process = self.processes[role]
        process.send_signal(signal.SIGTERM)
        if twice:
            process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0, self.log(role)

    def wait_for_updates(self, count: int) -> None:
        deadline = time.monotonic() + 90
        while not any(record["learner_step"] >= count for record in records_of(self.folder, "training")):
            for role, process in self.processes.items():
                assert process.poll() is None, self.log(role)
            assert time.monotonic() < deadline, "\n".join(map(self.log, ROLES))
            time.sleep(0.05)  # between two looks at a condition that has a deadline


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    store = EmbeddedRedis.start(tmp_path / "store")
    services = Services(tmp_path, store.url)
    yield services
    for process in services.processes.values():
        if process.poll() is None:
            process.kill()
            process.wait()
    store.stop()


def _events(log: str, name: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [event for event in found if event["event"] == name]


def test_each_service_ends_with_nought_and_the_learner_with_a_checkpoint_of_its_last_update(services: Services):
    for role in ROLES:
        services.start(role)
    services.wait_for_updates(300)
    # In the middle of training, with streams of samples, appends and polls open.
    services.stop("learner", twice=True)
    (ended,) = _events(services.log("learner"), "training_ended")
    newest = json.loads(max((services.folder / "checkpoints").glob("*.json")).read_text())
    assert newest["counters"]["learner_step"] == ended["learner_step"]
    for role in ("replay", "collector", "evaluator"):
        services.stop(role)


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
    (resumed,) = _events(services.log("learner"), "resumed")
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
    (stopped,) = _events(services.log("learner"), "training_ended")
    url = services._environment["PACELINE_REPLAY__REDIS_URL"]
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
