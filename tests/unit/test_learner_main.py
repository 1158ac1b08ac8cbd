"""What the learner refuses before it touches anything."""

from __future__ import annotations

import threading
import urllib.request
from pathlib import Path

import pytest
import torch

from free_ports import free_port
from paceline.config import build
from paceline.errors import CheckpointError, ConfigError, NonFiniteError
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


@pytest.mark.parametrize(
    "settings",
    [
        {"replay": {"read": "sample"}, "learner": {"prefetch_batches": 40, "publish_every_updates": 10}},
        {"lag": {"inject": {"mode": "fixed", "versions": 4}}},
        {"lag": {"inject": {"mode": "distribution", "weights": {0: 1, 4: 0.5, 9: 0}}}},
    ],
    ids=["prefetch", "fixed", "distribution"],
)
def test_a_bound_that_no_run_can_keep_to_is_refused_before_the_run_begins(tmp_path: Path, settings) -> None:
    lag = {"max_lag_versions": 3, **settings.get("lag", {})}
    config = build({"run": {"id": "trial", "directory": str(tmp_path)}, **settings, "lag": lag})
    with pytest.raises(ConfigError, match=r"max_lag_versions is 3: expected at least 4"):
        run(config, resume=False, stop=StopSignal())
    assert list(tmp_path.iterdir()) == []


def test_a_learner_that_meets_a_number_that_is_not_finite_shows_it_to_all_who_read_its_metrics(
    tmp_path: Path, monkeypatch
) -> None:
    port = free_port()
    pages: list[str] = []
    stop = StopSignal()

    def read() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            pages.append(page.read().decode())

    def diverge(*_: object) -> None:
        read()
        readers.append(threading.Thread(target=read_until_it_was_shown_twice))
        readers[0].start()
        raise NonFiniteError("critic weight '1.weight' holds a NaN")

    def read_until_it_was_shown_twice() -> None:
        while sum("paceline_learner_non_finite_total 1.0" in page for page in pages) < 2:
            read()
        stop.set()

    readers: list[threading.Thread] = []
    monkeypatch.setattr("paceline.learner.main._Training.run", diverge)
    monkeypatch.setattr("paceline.learner.main.LAST_READ_SECONDS", 60.0)
    config = build(
        {
            "run": {"id": "trial", "directory": str(tmp_path)},
            "learner": {
                "metrics_listen": f"127.0.0.1:{port}",
                "listen": "127.0.0.1:0",
                "endpoint_metrics_listen": "127.0.0.1:0",
            },
        }
    )
    with pytest.raises(NonFiniteError):
        run(config, resume=False, stop=stop)
    readers[0].join(30)
    assert "paceline_learner_non_finite_total 0.0" in pages[0]

    # Whoever looked too rarely to see it hears of it from the next learner of the run.
    def read_once(*_: object) -> None:
        read()

    monkeypatch.setattr("paceline.learner.main._Training.run", read_once)
    run(config, resume=True, stop=StopSignal())
    assert "paceline_learner_non_finite_total 1.0" in pages[-1]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"id": "Pendulum-v1", "kwargs": {"g": 5.0}}, r"env\.kwargs \{'g': 9\.8\}: expected \{'g': 5\.0\}"),
        ({"id": "gymnasium:Pendulum-v1", "kwargs": {"g": 9.8}}, r"env\.id 'Pendulum-v1': expected 'gymnasium:Pend"),
        ({"id": "Pendulum-v1", "kwargs": {"g": 9.8, "render_mode": "rgb_array"}}, None),
    ],
    ids=["kwargs", "id", "rendering"],
)
def test_a_resume_in_another_environment_is_refused_by_the_name_of_the_setting(
    tmp_path: Path, monkeypatch, env, words
) -> None:
    def settings(env):
        addresses = dict.fromkeys(("metrics_listen", "listen", "endpoint_metrics_listen"), "127.0.0.1:0")
        return build({"run": {"id": "trial", "directory": str(tmp_path)}, "env": env, "learner": addresses})

    resumed: list[bool] = []
    monkeypatch.setattr("paceline.learner.main._Training.run", lambda self, stop: self._checkpoint(self._start))
    run(settings({"id": "Pendulum-v1", "kwargs": {"g": 9.8}}), resume=False, stop=StopSignal())
    monkeypatch.setattr("paceline.learner.main._Training.run", lambda self, stop: resumed.append(self._resumed))
    if words is None:
        run(settings(env), resume=True, stop=StopSignal())
        assert resumed == [True]
        return
    with pytest.raises(CheckpointError, match=words + ".*resume with the env"):
        run(settings(env), resume=True, stop=StopSignal())
    assert resumed == []
