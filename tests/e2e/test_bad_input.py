"""What a person may get wrong: each is said at once, with what was expected and how to mend it, and nothing hangs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from e2e.harness import PACELINE, ROOT
from paceline.local.embedded import EmbeddedRedis

pytestmark = pytest.mark.slow

PRESET = "configs/pendulum-sac.yaml"
ALONE = ("evaluator.enabled=false",)
"""One process fewer to start where a run ends before it begins."""


def paceline(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PACELINE, *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """It ended with the code for what a person can mend, a message with these words, and no traceback."""
    text = result.stdout + result.stderr
    assert result.returncode == 2, text
    assert "Traceback" not in text
    for word in words:
        assert word in text, f"{word!r} is not in:\n{text}"


def test_a_misspelt_key_is_named_with_the_nearest_one(tmp_path: Path):
    result = paceline("train", PRESET, "learner.batchsize=3", f"run.directory={tmp_path}")
    refused(result, "learner.batchsize", "3", "learner.batch_size")
    assert list(tmp_path.iterdir()) == []


def test_a_value_out_of_range_is_named_with_the_range():
    refused(paceline("config", "--check", PRESET, "learner.algorithm.gamma=1.5"), "learner.algorithm.gamma", "1.5", "1")


def test_a_file_that_is_not_there_is_named():
    refused(paceline("train", "configs/pendulm.yaml"), "configs/pendulm.yaml", "no such file")


def test_an_unknown_environment_is_named_with_the_nearest_and_nothing_is_left_behind(tmp_path: Path):
    result = paceline("train", PRESET, "env.id=Pendulun-v1", f"run.directory={tmp_path}")
    refused(result, "Pendulun-v1", "Pendulum-v1")
    assert list(tmp_path.iterdir()) == []


def test_a_discrete_action_space_is_refused_for_sac(tmp_path: Path):
    result = paceline("train", PRESET, "env.id=CartPole-v1", f"run.directory={tmp_path}")
    refused(result, "CartPole-v1", "discrete", "sac")


def test_a_window_that_would_hold_both_sides_back_is_refused_with_the_smallest_valid_one():
    result = paceline("config", "--check", PRESET, "replay.tables.transitions.limiter.window_rows=128")
    refused(result, "128", "768")


def test_a_port_that_is_taken_is_named(tmp_path: Path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        result = paceline("train", PRESET, f"learner.listen={address}", f"run.directory={tmp_path}", *ALONE)
        refused(result, "learner", address)


@pytest.mark.parametrize("role", ["learner", "collector"])
def test_a_role_whose_packages_are_missing_says_which_extra_brings_them(role: str, tmp_path: Path):
    code = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, role, PRESET, "run.id=bare", f"run.directory={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    refused(result, "'torch'", "paceline[learner,collector]")


def test_replay_starts_where_torch_is_missing():
    code = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "replay", PRESET, "run.id=bare"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    refused(result, "replay.redis_url")


def test_a_redis_that_is_not_there_is_named(tmp_path: Path):
    url = f"unix://{tmp_path}/nobody.sock"
    result = paceline("train", PRESET, "run.id=away", f"run.directory={tmp_path}", f"replay.redis_url={url}", *ALONE)
    refused(result, "replay", "nobody.sock")


def test_a_wrong_password_is_said_and_not_shown(tmp_path: Path):
    store = EmbeddedRedis.start(tmp_path / "store")
    try:
        with redis.Redis.from_url(store.url) as client:
            client.config_set("requirepass", "right")
        url = store.url.replace("unix://", "unix://:wr0ng@")
        result = paceline(
            "train", PRESET, "run.id=locked", f"run.directory={tmp_path}", f"replay.redis_url={url}", *ALONE
        )
        refused(result, "does not admit us")
        assert "wr0ng" not in result.stdout + result.stderr
        for path in (tmp_path / "locked").rglob("*"):
            assert not path.is_file() or b"wr0ng" not in path.read_bytes(), path
    finally:
        store.stop()


def test_an_evicting_redis_is_refused(tmp_path: Path):
    store = EmbeddedRedis.start(tmp_path / "store", settings={"maxmemory-policy": "allkeys-lru"})
    try:
        ports = [f"replay.{name}=127.0.0.1:0" for name in ("listen", "metrics_listen")]
        result = paceline("replay", PRESET, "run.id=evict", f"replay.redis_url={store.url}", *ports)
        refused(result, "maxmemory-policy", "allkeys-lru", "noeviction")
    finally:
        store.stop()


@pytest.mark.parametrize("role", ["train", "learner"])
def test_a_folder_that_cannot_be_made_is_named(role: str, tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    for place in ("/proc/nowhere", str(file)):
        refused(paceline(role, PRESET, "run.id=x", f"run.directory={place}"), "run.directory", place, "cannot be made")


def test_there_is_nothing_to_resume(tmp_path: Path):
    refused(paceline("train", PRESET, "run.id=none", f"run.directory={tmp_path}", "--resume"), "none", "resume")


def test_a_setting_may_come_from_the_environment_and_an_unknown_one_is_refused_there_too():
    good = paceline("config", PRESET, environment={"PACELINE_LEARNER__BATCH_SIZE": "77"})
    assert "batch_size: 77" in good.stdout
    refused(paceline("config", PRESET, environment={"PACELINE_LEARNER__BATCHSIZE": "77"}), "learner.batchsize")
