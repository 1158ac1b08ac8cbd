"""The folder of a run: one launcher at a time, settings that are replaced once they were taken, failed starts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from paceline import config
from paceline.config import Config
from paceline.errors import ConflictError, NotFoundError
from paceline.local.run_folder import hold, open_run_folder
from paceline.process import StopSignal


def settings_of(tmp_path: Path, seed: int = 1) -> Config:
    return config.build({"run": {"id": "trial", "directory": str(tmp_path), "seed": seed}})


def recorded_seed(folder: Path) -> int:
    return int(yaml.safe_load((folder / "config.yaml").read_text())["run"]["seed"])


def files_of(folder: Path) -> dict[str, bytes]:
    """All but the lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "launcher.lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The folder of a run that has begun with seed 1."""
    with open_run_folder(settings_of(tmp_path), resume=False, stop=StopSignal()) as folder:
        (folder.path / "metrics.jsonl").write_text('{"kind": "start"}\n')
    return folder.path


def test_a_folder_that_somebody_holds_is_refused_with_who_that_is_and_is_free_afterwards(tmp_path):
    expected = pytest.raises(ConflictError, match=r"paceline train, process \d+ on .*--resume")
    with hold(tmp_path, "paceline train"), expected, hold(tmp_path, "me"):
        pass
    with hold(tmp_path, "me"):
        pass


def test_of_launchers_that_start_in_the_same_moment_one_gets_the_run(tmp_path):
    count = 8
    together, all_tried = threading.Barrier(count), threading.Barrier(count)
    outcomes: list[str] = []

    def launch(seed: int) -> None:
        together.wait(10)
        try:
            with open_run_folder(settings_of(tmp_path, seed), resume=False, stop=StopSignal()) as folder:
                outcomes.append(f"seed {seed}")
                all_tried.wait(10)
                assert recorded_seed(folder.path) == seed
        except ConflictError:
            outcomes.append("refused")
            all_tried.wait(10)

    threads = [threading.Thread(target=launch, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("refused") == count - 1
    assert f"seed {recorded_seed(tmp_path / 'trial')}" in outcomes


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_launcher_changes_nothing_in_the_folder_of_a_live_run(tmp_path, begun, resume):
    with open_run_folder(settings_of(tmp_path, 2), resume=True, stop=StopSignal()):
        before = files_of(begun)
        with (
            pytest.raises(ConflictError, match="works there now"),
            open_run_folder(settings_of(tmp_path, 3), resume=resume, stop=StopSignal()),
        ):
            pass
        assert files_of(begun) == before


def test_settings_of_a_resume_that_is_refused_are_not_recorded(tmp_path, begun):
    with open_run_folder(settings_of(tmp_path, 2), resume=True, stop=StopSignal()) as folder:
        given = config.load(folder.settings_path)
    assert given.run.seed == 2
    assert recorded_seed(begun) == 1
    assert set(files_of(begun)) == {"config.yaml", "metrics.jsonl"}


def test_settings_that_the_learner_has_taken_are_recorded_and_stay_with_the_services(tmp_path, begun):
    with open_run_folder(settings_of(tmp_path, 2), resume=True, stop=StopSignal()) as folder:
        assert not folder.is_accepted
        folder.accept()
        assert folder.is_accepted
        assert recorded_seed(begun) == 2
        # A service that is started again later reads the same.
        assert config.load(folder.settings_path).run.seed == 2
    assert recorded_seed(begun) == 2


def test_the_settings_of_a_new_run_are_recorded_at_once(tmp_path):
    with open_run_folder(settings_of(tmp_path, 7), resume=False, stop=StopSignal()) as folder:
        assert folder.is_accepted
        assert recorded_seed(folder.path) == 7
        assert not folder.is_retry


def test_there_is_nothing_to_resume_in_a_folder_without_settings(tmp_path):
    with (
        pytest.raises(NotFoundError, match=r"config\.yaml"),
        open_run_folder(settings_of(tmp_path), resume=True, stop=StopSignal()),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def leave_failed_start(tmp_path: Path) -> Path:
    """As a wrong actor.builder leaves the folder."""
    with open_run_folder(settings_of(tmp_path), resume=False, stop=StopSignal()) as folder:
        for name in ("lag.json", "process_time.json", "report.html", "logs/learner.log", "metrics.jsonl"):
            (folder.path / name).touch()
        for name in ("redis", "checkpoints", "learner"):
            (folder.path / name).mkdir()
        (folder.path / "learner" / "incarnation.json").touch()
    return folder.path


def test_a_start_that_failed_before_its_run_began_may_be_made_again(tmp_path):
    path = leave_failed_start(tmp_path)
    with open_run_folder(settings_of(tmp_path, 2), resume=False, stop=StopSignal()) as folder:
        assert folder.is_retry
        assert recorded_seed(path) == 2
        assert (path / "logs" / "learner.log").exists()


def note(folder: Path) -> None:
    (folder / "notes.txt").write_text("of a person")


def record(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"kind": "start"}\n')


def checkpoint(folder: Path) -> None:
    (folder / "checkpoints" / "checkpoint-000001.json").touch()


def member(folder: Path) -> None:
    (folder / "learner" / "members.json").touch()


def lose_settings(folder: Path) -> None:
    (folder / "config.yaml").unlink()


@pytest.mark.parametrize("change", [note, record, checkpoint, member, lose_settings])
def test_a_folder_with_anything_that_somebody_may_want_is_in_use(tmp_path, change: Callable[[Path], None]):
    path = leave_failed_start(tmp_path)
    change(path)
    before = files_of(path)
    with (
        pytest.raises(ConflictError, match=r"is in use.*--resume"),
        open_run_folder(settings_of(tmp_path, 2), resume=False, stop=StopSignal()),
    ):
        pass
    assert files_of(path) == before


def test_no_lock_is_left_in_a_folder_that_is_of_no_run(tmp_path):
    note_of_somebody = tmp_path / "trial" / "notes.txt"
    note_of_somebody.parent.mkdir()
    note_of_somebody.touch()
    with (
        pytest.raises(ConflictError, match="is in use"),
        open_run_folder(settings_of(tmp_path), resume=False, stop=StopSignal()),
    ):
        pass
    assert list(note_of_somebody.parent.iterdir()) == [note_of_somebody]
