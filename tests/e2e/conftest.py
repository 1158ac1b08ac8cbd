"""Starts trainings, and ends those that a test left running."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.harness import SMALL, Training


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Start `paceline train` on the Pendulum preset, small; `run_id` names its folder, modules lie beside it."""
    started: list[Training] = []

    def start(*arguments: str, run_id: str = "trial") -> Training:
        settings = [f"run.id={run_id}", f"run.directory={tmp_path}", *SMALL, *arguments]
        training = Training(tmp_path / run_id, ["configs/pendulum-sac.yaml", *settings], module_folder=tmp_path)
        started.append(training)
        return training

    yield start
    left = [training.process for training in started if training.process.poll() is None]
    for process in left:
        process.terminate()
    for process in left:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
