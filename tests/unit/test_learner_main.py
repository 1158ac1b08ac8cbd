"""What the learner refuses before it touches anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.config import build
from paceline.errors import ConfigError
from paceline.learner.main import run
from paceline.process import StopSignal


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_visible_is_an_error_that_names_it(tmp_path: Path) -> None:
    config = build({"run": {"id": "trial", "directory": str(tmp_path)}, "learner": {"device": "cuda"}})
    with pytest.raises(ConfigError, match=r"'cuda' and no CUDA device is visible to this process.*learner\.device=cpu"):
        run(config, resume=False, stop=StopSignal())
    assert list(tmp_path.iterdir()) == []


def test_a_ring_that_cannot_fit_is_an_error_before_the_run_begins(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.learner.sources.room.available_bytes", lambda device: 1_000_000)
    config = build({"run": {"id": "trial", "directory": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"follows table 'transitions'.*Lower replay\.tables\.transitions"):
        run(config, resume=False, stop=StopSignal())
    assert list(tmp_path.iterdir()) == []
