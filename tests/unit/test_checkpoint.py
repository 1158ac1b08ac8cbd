import dataclasses
import hashlib
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.actors import squashed_gaussian_semantics
from paceline.errors import ActorSemanticsError, CheckpointError, NonFiniteError
from paceline.learner.checkpoint import Checkpoints, Counters

SEMANTICS = squashed_gaussian_semantics(3, hidden=(8, 8), action_low=[-2.0], action_high=[2.0])


def open_checkpoints(folder: Path, **changes: Any) -> Checkpoints:
    belongs: dict[str, Any] = {
        "run_id": "run",
        "algorithm": "sac",
        "row_spec_digest": b"0123456789abcdef",
        "actor_semantics": SEMANTICS,
        "environment": {"env.id": "Pendulum-v1", "env.kwargs": {"g": 9.8}},
        "keep": 3,
    }
    return Checkpoints(folder, **{**belongs, **changes})


def counters(step: int) -> Counters:
    return Counters(
        learner_step=step,
        environment_steps=step + 100,
        policy_version=step // 10,
        incarnation=1,
        step_offset=0,
        ratio_from_steps=100,
        ratio_from_updates=0,
    )


def state(step: int) -> dict[str, Tensor]:
    return {
        "actor/weight": torch.full((4, 3), float(step)),
        "log_temperature": torch.tensor([0.5]),
        "generator": torch.arange(16, dtype=torch.uint8),
        "count": torch.tensor(step),
    }


def data_of(manifest: Path) -> Path:
    return manifest.with_suffix(".safetensors")


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    assert open_checkpoints(tmp_path / "new").load(fallback=False) is None
    path = open_checkpoints(tmp_path).save(state(7), counters(7))
    loaded = open_checkpoints(tmp_path).load(fallback=False)
    assert loaded is not None
    assert loaded.path == path
    assert loaded.counters == counters(7)
    assert loaded.tensors.keys() == state(7).keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in state(7).items())


def test_the_newest_few_are_kept_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path, keep=2)
    (tmp_path / "checkpoint-000001.safetensors.tmp").write_bytes(b"cut off by a kill")
    (tmp_path / "notes.txt").write_text("a user's own")
    paths = [checkpoints.save(state(step), counters(step)) for step in range(4)]
    assert checkpoints.manifests() == [paths[3], paths[2]]
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {each.name for path in paths[2:] for each in (path, data_of(path))} | {"notes.txt"}


def test_a_resumed_run_that_saves_the_same_step_again_has_the_newer_one(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(state(9), counters(9))
    checkpoints.save(state(5), counters(5))
    loaded = checkpoints.load(fallback=False)
    assert loaded is not None
    assert loaded.counters.learner_step == 5


def test_state_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(state(1), counters(1))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(NonFiniteError, match="'actor/weight'"):
        checkpoints.save({**state(2), "actor/weight": torch.full((4, 3), math.nan)}, counters(2))
    assert sorted(tmp_path.iterdir()) == before


def truncate_data(path: Path) -> str:
    data = data_of(path)
    data.write_bytes(data.read_bytes()[:-10])
    return r"000002\.safetensors: has \d+ bytes"


def flip_data(path: Path) -> str:
    content = bytearray(data_of(path).read_bytes())
    content[-1] ^= 1
    data_of(path).write_bytes(content)
    return r"000002\.safetensors: has SHA-256"


def remove_data(path: Path) -> str:
    data_of(path).unlink()
    return r"000002\.safetensors: cannot be read"


def truncate_manifest(path: Path) -> str:
    path.write_text(path.read_text()[:30])
    return r"000002\.json: the manifest cannot be read"


def edit(change: Callable[[dict[str, Any]], None], words: str) -> Callable[[Path], str]:
    def spoil(path: Path) -> str:
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))
        return words

    return spoil


def point_elsewhere(manifest: dict[str, Any]) -> None:
    manifest["data_file"] = "../../elsewhere.safetensors"


def lose_a_counter(manifest: dict[str, Any]) -> None:
    del manifest["counters"]["learner_step"]


@pytest.mark.parametrize(
    "spoil",
    [
        truncate_data,
        flip_data,
        remove_data,
        truncate_manifest,
        edit(point_elsewhere, "data_file is"),
        edit(lose_a_counter, "counters are incomplete"),
    ],
)
def test_a_damaged_newest_is_refused_by_name_and_the_one_before_is_used_only_if_asked(
    tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(state(1), counters(1))
    words = spoil(checkpoints.save(state(2), counters(2)))
    with pytest.raises(CheckpointError, match=words) as failure:
        checkpoints.load(fallback=False)
    assert "learner.checkpoint.fallback=true" in str(failure.value)

    fallen_back = checkpoints.load(fallback=True)
    assert fallen_back is not None
    assert fallen_back.counters == counters(1)
    # The next one that is saved is the newest, whatever became of the damaged one.
    checkpoints.save(state(3), counters(3))
    newest = checkpoints.load(fallback=False)
    assert newest is not None
    assert newest.counters == counters(3)


def test_when_all_are_damaged_that_is_said(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path)
    truncate_data(checkpoints.save(state(1), counters(1)))
    with pytest.raises(CheckpointError, match="all 1 checkpoints are damaged"):
        checkpoints.load(fallback=True)
    with pytest.raises(CheckpointError, match="there is no older one"):
        checkpoints.load(fallback=False)


@pytest.mark.parametrize(
    ("field", "value"), [("run_id", "other"), ("algorithm", "fast_sac"), ("row_spec_digest", b"fedcba9876543210")]
)
def test_a_checkpoint_of_something_else_is_never_passed_over(tmp_path: Path, field: str, value: Any) -> None:
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(state(1), counters(1))
    open_checkpoints(tmp_path, **{field: value}).save(state(2), counters(2))
    for fallback in (False, True):
        with pytest.raises(CheckpointError, match=f"has {field}"):
            checkpoints.load(fallback=fallback)


CHANGES: dict[str, Any] = {
    "kind": "another",
    "builder": "elsewhere:Actor",
    "kwargs": {"hidden": [8]},
    "observation_dim": 4,
    "action_dim": 3,
    "action_transform": "clip",
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_checkpoint_of_another_actor_is_refused_by_the_field(tmp_path: Path, field: str) -> None:
    other = dataclasses.replace(SEMANTICS, **{field: CHANGES[field]})
    open_checkpoints(tmp_path, actor_semantics=other).save(state(1), counters(1))
    for fallback in (False, True):
        with pytest.raises(ActorSemanticsError, match=f"differ in {field}:"):
            open_checkpoints(tmp_path).load(fallback=fallback)


OTHER_ENVIRONMENTS: dict[str, Any] = {
    "env.id": {"env.id": "Mine-v0", "env.kwargs": {"g": 9.8}},
    "env.kwargs": {"env.id": "Pendulum-v1", "env.kwargs": {"g": 5.0}},
}


@pytest.mark.parametrize("field", OTHER_ENVIRONMENTS)
def test_a_checkpoint_of_another_environment_is_refused_by_the_field(tmp_path: Path, field: str) -> None:
    open_checkpoints(tmp_path, environment=OTHER_ENVIRONMENTS[field]).save(state(1), counters(1))
    for fallback in (False, True):
        with pytest.raises(CheckpointError, match=rf"trained with {field} .*(Mine|5\.0).*: expected .*(Pendulum|9\.8)"):
            open_checkpoints(tmp_path).load(fallback=fallback)


def test_a_checkpoint_from_before_environments_were_noted_is_taken(tmp_path: Path) -> None:
    path = open_checkpoints(tmp_path).save(state(1), counters(1))
    edit(lambda manifest: manifest.pop("environment"), "")(path)
    loaded = open_checkpoints(tmp_path).load(fallback=False)
    assert loaded is not None
    assert loaded.counters == counters(1)


def remove_semantics(manifest: dict[str, Any]) -> None:
    del manifest["actor_semantics"]


def null_semantics(manifest: dict[str, Any]) -> None:
    manifest["actor_semantics"] = None


def newer_semantics(manifest: dict[str, Any]) -> None:
    manifest["actor_semantics"]["schema_version"] = 2


@pytest.mark.parametrize("change", [remove_semantics, null_semantics, newer_semantics])
def test_a_checkpoint_without_a_known_meaning_is_refused(tmp_path: Path, change: Any) -> None:
    checkpoints = open_checkpoints(tmp_path)
    edit(change, "")(checkpoints.save(state(1), counters(1)))
    with pytest.raises(ActorSemanticsError, match=r"missing|schema_version 2"):
        checkpoints.load(fallback=True)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path)
    edit(lambda manifest: manifest.update(format_version=2), "")(checkpoints.save(state(1), counters(1)))
    with pytest.raises(CheckpointError, match="format_version 2"):
        checkpoints.load(fallback=True)


class Marker:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickled_checkpoint_is_refused_and_never_run(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path / "checkpoints")
    path = checkpoints.save(state(1), counters(1))
    payload = pickle.dumps(Marker(tmp_path / "marker"))
    data_of(path).write_bytes(payload)
    edit(
        lambda manifest: manifest.update(data_bytes=len(payload), data_sha256=hashlib.sha256(payload).hexdigest()),
        "",
    )(path)
    with pytest.raises(CheckpointError, match="not safetensors"):
        checkpoints.load(fallback=False)
    assert not (tmp_path / "marker").exists()


def test_counters_are_whole_numbers() -> None:
    with pytest.raises(CheckpointError, match="learner_step is -1"):
        dataclasses.replace(counters(1), learner_step=-1)
    with pytest.raises(CheckpointError, match=r"incarnation is 1\.5"):
        dataclasses.replace(counters(1), incarnation=1.5)  # type: ignore[arg-type]


def test_a_disk_that_refuses_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(state(1), counters(1))
    # A folder in the way of the temporary file: works as root too, unlike a read-only folder.
    (tmp_path / "checkpoint-000002.safetensors.tmp").mkdir()
    with pytest.raises(CheckpointError, match=r"000002\.json: cannot be written"):
        checkpoints.save(state(2), counters(2))
    loaded = checkpoints.load(fallback=False)
    assert loaded is not None
    assert loaded.counters == counters(1)
