"""The record of a run: whole lines, readable scalars, torn lines cut off."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.learner.recorder import Recorder


@pytest.fixture
def recorder(tmp_path: Path) -> Any:
    made = Recorder(tmp_path)
    yield made
    made.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_record_is_on_its_line_when_write_returns(recorder: Recorder, tmp_path: Path) -> None:
    recorder.write("start", {"incarnation": 1, "resumed": False})
    [line] = lines(tmp_path)
    assert line.pop("time") > 1e9
    assert line == {"kind": "start", "incarnation": 1, "resumed": False}


def test_numbers_that_are_not_finite_are_null(recorder: Recorder, tmp_path: Path) -> None:
    recorder.write("training", {"environment_steps": 5, "loss": math.nan, "lags": {"+Inf": [math.inf, 1.5]}})
    [line] = lines(tmp_path)
    assert (line["loss"], line["lags"]) == (None, {"+Inf": [None, 1.5]})


def test_a_line_torn_by_a_crash_is_cut_off_and_the_record_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"time": 1, "kind": "start"}\n{"time": 2, "kind": "trai')
    recorder = Recorder(tmp_path)
    recorder.write("finish", {})
    recorder.close()
    assert [line["kind"] for line in lines(tmp_path)] == ["start", "finish"]


@pytest.mark.parametrize("torn", [b"", b"{", b"x" * 200_000])
def test_a_record_that_is_one_torn_line_begins_anew(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(torn)
    recorder = Recorder(tmp_path)
    recorder.write("start", {})
    recorder.close()
    assert [line["kind"] for line in lines(tmp_path)] == ["start"]


def test_recalling_gives_what_was_recorded(tmp_path: Path) -> None:
    first = Recorder(tmp_path)
    for sequence in range(3):
        first.write("episode", {"sequence": sequence, "environment_steps": 1})
    first.close()
    second = Recorder(tmp_path)
    assert [record["sequence"] for record in second.recall()] == [0, 1, 2]
    second.close()


def test_recalling_a_long_record_gives_its_latest_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.learner.recorder.RECALL_BYTES", 200)
    recorder = Recorder(tmp_path)
    for sequence in range(50):
        recorder.write("episode", {"sequence": sequence})
    recalled = [record["sequence"] for record in recorder.recall()]
    recorder.close()
    assert recalled == list(range(recalled[0], 50))
    assert 1 <= len(recalled) < 5


def test_scalars_are_read_back_by_tensorboard_at_their_environment_steps(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for step in (10, 20, 30):
        recorder.write(
            "training", {"environment_steps": step, "critic_loss": step / 4, "training_lag_counts": {"1": 2}}
        )
    recorder.write("evaluation", {"environment_steps": 20, "mean_return": -150.0, "returns": [-150.0], "version": 3})
    recorder.write("episode", {"environment_steps": 25, "episode_return": -900.5, "terminated": True, "sequence": 4})
    recorder.write("training", {"environment_steps": 40, "critic_loss": math.inf})
    recorder.write("start", {"environment_steps": 0, "learner_step": 0})
    recorder.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {
        "training/critic_loss",
        "evaluation/mean_return",
        "evaluation/version",
        "episode/episode_return",
    }
    assert [(event.step, event.value) for event in events.Scalars("training/critic_loss")] == [
        (10, 2.5),
        (20, 5.0),
        (30, 7.5),
    ]
    [evaluation] = events.Scalars("evaluation/mean_return")
    assert (evaluation.step, evaluation.value) == (20, -150.0)
    assert evaluation.wall_time == pytest.approx(lines(tmp_path)[3]["time"])


def test_each_process_writes_an_event_file_of_its_own_and_tensorboard_reads_all(tmp_path: Path) -> None:
    for step in (1, 2):
        recorder = Recorder(tmp_path)
        recorder.write("training", {"environment_steps": step, "loss": 1.0})
        recorder.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    # EventAccumulator reads the files of a folder in the order of their names, which is that of their times.
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("training/loss")] == [1, 2]


def test_the_endpoint_imports_neither_torch_nor_tensorflow() -> None:
    code = (
        "import sys, paceline.learner.endpoint_process; print([m for m in ('torch', 'tensorflow') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
