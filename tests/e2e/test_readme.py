"""The README is true: its commands work as written, and its tables are those of the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from e2e.harness import ROOT
from paceline import config
from paceline.local.embedded import EmbeddedRedis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line]
# A person would wait for the preset's two minutes; a test makes the same command shorter, and leaves no runs/ behind.
SHORT = "learner.algorithm.hidden=[64,64] learner.batch_size=64 learner.updates_per_step=0.25 evaluator.enabled=false"
EVALUATED = "evaluator.enabled=true evaluator.episodes=2"


def run(command: str, folder: Path, *more: str, timeout: float = 200) -> str:
    """Run a command of the README in the checkout, with its run folder elsewhere."""
    result = subprocess.run(
        f"{command} {' '.join(more)}",
        shell=True,
        cwd=ROOT,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PACELINE_RUN__DIRECTORY": str(folder), "PYTHONPATH": str(folder)}


def commands(beginning: str) -> list[str]:
    found = [command for command in COMMANDS if command.startswith(beginning)]
    assert found, f"the README has no command {beginning!r}"
    return found


def test_every_command_of_the_readme_is_covered_here():
    covered = ("make ", "paceline config", "paceline train", "paceline replay", "paceline learner")
    covered += ("paceline certs", "paceline collector", "paceline evaluator", "paceline relay", "paceline lag")
    covered += ("paceline study", "PYTHONPATH=deploy/example paceline train")
    assert [command for command in COMMANDS if not command.startswith(covered)] == []


def test_every_make_target_of_the_readme_exists():
    for command in commands("make "):
        subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True, timeout=30)


def test_make_train_trains(tmp_path: Path):
    text = run("make train", tmp_path, f"ARGS='run.environment_steps=300 run.id=made {SHORT}'")
    assert (tmp_path / "made" / "report.html").exists()
    assert "report" in text


def test_a_setting_is_changed_and_the_run_resumed(tmp_path: Path):
    assert "right" in run(commands("paceline config")[0], tmp_path)
    first, resumed = (command for command in commands("paceline train") if "small" in command)
    run(first, tmp_path, SHORT)
    text = run(resumed.replace("runs/", f"{tmp_path}/"), tmp_path)
    assert "complete" in text
    (explain,) = commands("paceline lag")
    text = run(explain.replace("runs/", f"{tmp_path}/"), tmp_path)
    assert "residence" in text


def test_a_lag_is_studied(tmp_path: Path):
    (command,) = commands("paceline study")
    run(command, tmp_path, f"--folder {tmp_path}/study {SHORT} {EVALUATED} run.environment_steps=300", timeout=300)
    assert (tmp_path / "study" / "study.html").exists()


def test_an_environment_of_ones_own_is_trained_on(tmp_path: Path):
    (tmp_path / "my_package.py").write_text(
        textwrap.dedent(
            """
            import gymnasium
            from gymnasium.envs.classic_control import PendulumEnv

            gymnasium.register("MyEnv-v0", PendulumEnv, max_episode_steps=50)
            """
        )
    )
    (command,) = (command for command in commands("paceline train") if "my_package" in command)
    run(command, tmp_path, SHORT)
    assert "MyEnv-v0" in (tmp_path / "mine" / "report.html").read_text()


def test_an_actor_of_ones_own_is_trained(tmp_path: Path):
    (command,) = commands("PYTHONPATH=deploy/example paceline train")
    run(command, tmp_path, SHORT, "run.environment_steps=400")
    assert "aux_action_size" in (tmp_path / "mine" / "metrics.jsonl").read_text()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis.start(tmp_path / "store")
    yield server
    server.stop()


def test_the_services_run_apart(tmp_path: Path, store: EmbeddedRedis):
    steps = "run.environment_steps=300 collector.block_rows=8"
    through_relay = "collector.snapshots_address=127.0.0.1:50053"
    processes = {}
    for role in ("replay", "learner", "relay", "collector", "evaluator"):
        (command,) = commands(f"paceline {role} configs")
        command = command.replace("redis://127.0.0.1:6379/0", store.url)
        with (tmp_path / f"{role}.log").open("w") as log:
            processes[role] = subprocess.Popen(
                f"exec {command} {SHORT} {EVALUATED} {steps} {through_relay}",
                shell=True,
                cwd=ROOT,
                env=environment(tmp_path),
                stdout=log,
                stderr=log,
            )
    try:
        for role in ("learner", "collector", "evaluator"):
            assert processes[role].wait(120) == 0, (tmp_path / f"{role}.log").read_text()
        client = redis.Redis.from_url(store.url)
        assert client.hget("paceline:{apart}:table:transitions:state", "inserted") == b"300"
        client.close()
        for role in ("relay", "replay"):
            processes[role].terminate()
            assert processes[role].wait(20) == 0, (tmp_path / f"{role}.log").read_text()
        assert "relay_serves" in (tmp_path / "relay.log").read_text()
        for verb, says in {"inspect": "300", "export": "apart.tar", "import": "again", "delete": "again"}.items():
            (command,) = commands(f"paceline replay {verb}")
            command = command.replace("apart.tar", f"{tmp_path}/apart.tar")
            assert says in run(command.replace("redis://127.0.0.1:6379/0", store.url), tmp_path)
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def test_the_tables_of_settings_are_those_of_the_code():
    held = re.search(r"<!-- settings -->\n(.*?)<!-- /settings -->", README, re.DOTALL)
    assert held is not None
    assert held[1] == config.describe(), "run `paceline config --describe` and put its tables between the marks"


def test_every_metric_that_the_readme_names_exists(tmp_path: Path):
    source = "".join(path.read_text() for path in (ROOT / "services" / "paceline").rglob("*.py"))
    for name in re.findall(r"`(paceline_[a-z_]+)`", README):
        thing = name.removeprefix("paceline_").partition("_")[2]
        assert name in source or f'"{thing}' in source or f"_{thing}" in source, name


def test_the_paths_of_the_readme_exist():
    for path in re.findall(r"`((?:collector|replay|learner|tables|replica|local|actors|envs|rpc)/[a-z_./]*)`", README):
        assert (ROOT / "services" / "paceline" / path).exists(), path
