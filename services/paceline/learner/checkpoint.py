"""Checkpoints: everything needed to go on, on disk, complete or not there at all.

A checkpoint is two files. `checkpoint-000007.safetensors` holds the algorithm's tensors; `checkpoint-000007.json`, its
manifest, is written last and names the other with its hash. Only manifests are listed, so a save that was cut off
anywhere leaves nothing that looks like a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as pack_tensors
from torch import Tensor

from paceline.actors import ActorSemantics
from paceline.errors import ActorSemanticsError, CheckpointError, NonFiniteError
from paceline.telemetry import get_logger

FORMAT_VERSION = 1
_log = get_logger()
_NAME = re.compile(r"checkpoint-(\d{6,})\.(json|safetensors)")
_TEMPORARY_SUFFIX = ".tmp"


@dataclass(frozen=True)
class Counters:
    """Where a run stood; all count from its very beginning, over every restart."""

    learner_step: int
    environment_steps: int
    policy_version: int
    incarnation: int
    step_offset: int
    """Environment steps whose rows the replay service no longer counts, because its store was lost."""
    ratio_from_steps: int
    """Environment steps from which on updates are owed."""
    ratio_from_updates: int
    """Updates done by then."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(getattr(self, field.name)) is not int or getattr(self, field.name) < 0:
                raise CheckpointError(
                    f"counter {field.name} is {getattr(self, field.name)!r}: expected a whole number of 0 or more"
                )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and proved whole."""

    path: Path
    """Its manifest."""
    counters: Counters
    tensors: Mapping[str, Tensor]
    """The algorithm's `state_dict`."""


class Checkpoints:
    """The checkpoints of one run, in one folder, of which the newest `keep` stay."""

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        algorithm: str,
        row_spec_digest: bytes,
        actor_semantics: ActorSemantics,
        environment: Mapping[str, Any],
        keep: int,
    ) -> None:
        """`environment` names the environment that the run trains in, by settings; JSON values only."""
        self._folder, self._keep, self._semantics = folder, keep, actor_semantics
        self._environment = dict(environment)
        self._belongs_to = {"run_id": run_id, "algorithm": algorithm, "row_spec_digest": row_spec_digest.hex()}
        folder.mkdir(parents=True, exist_ok=True)

    def manifests(self) -> list[Path]:
        """Manifests, the newest first."""
        return sorted(self._files("json"), key=_sequence, reverse=True)

    def save(self, tensors: Mapping[str, Tensor], counters: Counters) -> Path:
        """Write a checkpoint to the disk, then remove those beyond `keep`; its manifest.

        Raises:
            NonFiniteError: names a tensor that holds a NaN or an infinity; nothing was written.
            CheckpointError: the disk refused it; earlier checkpoints are as they were.
        """
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise NonFiniteError(f"tensor {name!r} holds a NaN or an infinity: no checkpoint is written of it")
        data = pack_tensors({name: tensor.contiguous() for name, tensor in tensors.items()})
        sequence = 1 + max((_sequence(path) for path in (*self._files("json"), *self._files("safetensors"))), default=0)
        stem = f"checkpoint-{sequence:06d}"
        manifest = {
            "format_version": FORMAT_VERSION,
            **self._belongs_to,
            "counters": asdict(counters),
            "saved_at": time.time(),
            "data_file": f"{stem}.safetensors",
            "data_bytes": len(data),
            "data_sha256": hashlib.sha256(data).hexdigest(),
            "environment": self._environment,
            "actor_semantics": json.loads(self._semantics.to_json()),
        }
        path = self._folder / f"{stem}.json"
        try:
            _write_durably(self._folder / f"{stem}.safetensors", data)
            _write_durably(path, json.dumps(manifest, indent=1).encode())
            self._remove_old()
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be written: {error}; earlier checkpoints are untouched, free the disk and resume"
            ) from error
        return path

    def load(self, *, fallback: bool) -> Checkpoint | None:
        """The newest checkpoint, or None where there is none.

        With `fallback`, a damaged one is reported in the log and the next older one is tried. One that is whole but of
        another run, actor or row layout is never passed over.

        Raises:
            CheckpointError: names the checkpoint, what is wrong with it, and what to do.
            ActorSemanticsError: names the field in which its actor differs.
        """
        paths = self.manifests()
        for path in paths:
            try:
                return self._read(path)
            except _DamagedError as error:
                if not fallback:
                    hint = "set learner.checkpoint.fallback=true to go on from the one before" if paths[1:] else ""
                    raise CheckpointError(f"{error}; {hint or 'there is no older one'}") from error
                _log.warning("checkpoint_damaged", path=str(path), reason=str(error))
        if paths:
            raise CheckpointError(f"{self._folder}: all {len(paths)} checkpoints are damaged; start the run anew")
        return None

    def _read(self, path: Path) -> Checkpoint:
        manifest = _read_manifest(path)
        for name, mine in self._belongs_to.items():
            if manifest.get(name) != mine:
                raise CheckpointError(
                    f"{path}: the checkpoint has {name} {manifest.get(name)!r}: expected {mine!r}; "
                    "resume with the settings that it was saved with, or start another run.id"
                )
        self._require_same_environment(path, manifest)
        try:
            self._semantics.require_same(ActorSemantics.from_json(json.dumps(manifest.get("actor_semantics"))))
        except ActorSemanticsError as error:
            raise ActorSemanticsError(f"{path}: {error}") from error
        try:
            counters = Counters(**manifest["counters"])
        except (KeyError, TypeError, CheckpointError) as error:
            raise _DamagedError(f"{path}: its counters are incomplete: {error}") from error
        return Checkpoint(path, counters, _read_data(path, manifest))

    def _require_same_environment(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Checkpoints from before environments were noted have none, and are taken."""
        saved = manifest.get("environment", self._environment)
        if not isinstance(saved, dict):
            raise _DamagedError(f"{path}: environment is {saved!r}: expected a record")
        for name, mine in self._environment.items():
            if saved.get(name) != mine:
                raise CheckpointError(
                    f"{path}: the checkpoint was trained with {name} {saved.get(name)!r}: expected {mine!r}, as the "
                    f"settings say; resume with the {name} that it was saved with, or start another run.id"
                )

    def _files(self, kind: str) -> list[Path]:
        matches = ((path, _NAME.fullmatch(path.name)) for path in self._folder.iterdir())
        return [path for path, match in matches if match and match[2] == kind]

    def _remove_old(self) -> None:
        kept = {path.stem for path in self.manifests()[: self._keep]}
        # Manifests first: a checkpoint that lost its data must not be listed.
        doomed = [path for kind in ("json", "safetensors") for path in self._files(kind) if path.stem not in kept]
        doomed += self._folder.glob(f"checkpoint-*{_TEMPORARY_SUFFIX}")
        for path in doomed:
            path.unlink(missing_ok=True)
        _sync_folder(self._folder)


class _DamagedError(CheckpointError):
    """The files are not what was written; an older checkpoint may still be."""


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _DamagedError(f"{path}: the manifest cannot be read: {error}") from error
    if not isinstance(manifest, dict):
        raise _DamagedError(f"{path}: the manifest is a {type(manifest).__name__}: expected a record")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version {manifest.get('format_version')!r}: this Paceline reads {FORMAT_VERSION}; "
            "use the version that wrote it"
        )
    return manifest


def _read_data(path: Path, manifest: Mapping[str, Any]) -> Mapping[str, Tensor]:
    name = str(manifest.get("data_file"))
    if not _NAME.fullmatch(name):  # never a path to somewhere else
        raise _DamagedError(f"{path}: data_file is {name!r}: expected checkpoint-NNNNNN.safetensors beside it")
    data_path = path.parent / name
    try:
        data = data_path.read_bytes()
    except OSError as error:
        raise _DamagedError(f"{data_path}: cannot be read: {error}") from error
    if len(data) != manifest.get("data_bytes"):
        raise _DamagedError(f"{data_path}: has {len(data)} bytes: expected {manifest.get('data_bytes')}, it was cut")
    digest = hashlib.sha256(data).hexdigest()
    if digest != manifest.get("data_sha256"):
        raise _DamagedError(f"{data_path}: has SHA-256 {digest}: expected {manifest.get('data_sha256')}")
    try:
        return load_tensors(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise _DamagedError(f"{data_path}: is not safetensors: {error}") from error


def _write_durably(path: Path, data: bytes) -> None:
    """The whole file under its name, on the disk; or nothing under its name."""
    temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sequence(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0
