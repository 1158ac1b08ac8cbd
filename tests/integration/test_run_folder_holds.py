"""Who works in the folder of a run, where processes die: a killed launcher lets go, its server is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline import config
from paceline.errors import ConflictError
from paceline.local import run_folder
from paceline.local.embedded import EmbeddedRedis
from paceline.local.records import open_own_redis
from paceline.local.run_folder import hold, open_run_folder
from paceline.process import StopSignal

HOLDER = """
import pathlib, sys, time
from paceline.local.run_folder import hold
with hold(pathlib.Path(sys.argv[1]), "paceline train"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that has ended."""
    settings = config.build({"run": {"id": "trial", "directory": str(tmp_path)}})
    with open_run_folder(settings, resume=False, stop=StopSignal()) as opened:
        (opened.path / "redis").mkdir()
        return opened.path


def test_the_kernel_lets_go_of_a_folder_whose_launcher_was_killed(folder):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConflictError, match=f"process {holder.pid} on"), hold(folder, "me"):
            pass
        holder.kill()
    with hold(folder, "me"):
        pass


def resume(folder: Path) -> None:
    with open_run_folder(config.load(folder / "config.yaml"), resume=True, stop=StopSignal()):
        pass


def test_a_server_that_outlived_its_launcher_is_not_given_a_second_one_beside(folder, monkeypatch):
    monkeypatch.setattr(run_folder, "SERVER_END_SECONDS", 0.3)
    before = (folder / "config.yaml").read_bytes()
    server = EmbeddedRedis.start(folder / "redis")
    try:
        with pytest.raises(ConflictError, match=rf"kill {server.process.pid}\)"):
            resume(folder)
    finally:
        server.stop()
    assert (folder / "config.yaml").read_bytes() == before
    resume(folder)


def test_a_server_that_is_ending_is_waited_for(folder):
    server = EmbeddedRedis.start(folder / "redis")
    server.process.terminate()
    resume(folder)
    server.stop()


def test_the_server_of_a_replay_command_and_that_of_a_launcher_are_never_there_at_once(folder):
    with open_own_redis(folder):
        with pytest.raises(ConflictError, match="paceline replay, process"):
            resume(folder)
        with open_own_redis(folder):
            pass  # a second command uses the server of the first
    with hold(folder, "paceline train"), pytest.raises(ConflictError, match="paceline train"), open_own_redis(folder):
        pass
