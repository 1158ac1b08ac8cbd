"""What a run must remember whatever dies: incarnations and the last published version.

Two processes of a learner keep it, each its own part, under `<run folder>/learner/`:

- the training process holds `lock` for its life and owns `incarnation.json` and `failures.json` (`Ledger`);
- its endpoint process holds `endpoint.lock` and owns `version` and `members.json` (`EndpointLedger`).

So two learners of one run exclude each other, and a new learner waits for the endpoint of one that was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from paceline.errors import ConflictError, InvalidInputError

ENDPOINT_END_SECONDS = 5.0
"""How long a new learner waits for the endpoint of a learner that was killed; it ends within two seconds."""
_LOCK_RETRY_SECONDS = 0.02
_VERSION_BYTES = 128
"""One record, padded: less than a sector, so that a write of it is never half done."""

Members = dict[str, dict[int, int]]
"""For each role, the incarnation that each index has reached."""


class Ledger:
    """The training process's part: the exclusive hold on a run, and the learner's incarnation."""

    def __init__(
        self, lock: int, folder: Path, *, learner_id: str, incarnation: int, last_version: int, non_finite_count: int
    ) -> None:
        """Use `open`."""
        self._lock, self._folder = lock, folder
        self.learner_id = learner_id
        """Of the run's folder, made with its first incarnation: two folders never have the same."""
        self.incarnation = incarnation
        """Of this start: one more than any before."""
        self.last_version = last_version
        """The last version that was served, by any incarnation; 0: none. Publish above it."""
        self.non_finite_count = non_finite_count
        """Incarnations that ended by a number that is not finite."""

    @classmethod
    def open(cls, run_folder: Path, resume: bool) -> Ledger:
        """Take hold of the run and begin the next incarnation, durably.

        A run is used once a snapshot was published or a collector joined; a start that failed before leaves it unused.

        Raises:
            ConflictError: the run is used and `resume` is false, or another learner has it.
            InvalidInputError: a file of the ledger is damaged.
        """
        folder = _folder_of(run_folder)
        lock = _take_lock(folder / "lock", _in_use(run_folder, "another learner trains it now"), seconds=0)
        try:
            # Released at once: it only shows that no endpoint of an earlier learner is still about to write.
            os.close(
                _take_lock(
                    folder / "endpoint.lock",
                    _in_use(run_folder, "the endpoint of an earlier learner is still running"),
                    seconds=ENDPOINT_END_SECONDS,
                )
            )
            (learner_id, incarnation), version = _read_incarnation(folder), _read_version(folder)
            members = _read_members(folder)
            if not resume and (version or any(members.values())):
                raise ConflictError(
                    f"run {run_folder.name!r} was used before (incarnation {incarnation}, version {version}, in "
                    f"{run_folder}): resume it with --resume, or choose another run.id"
                )
            content = {"incarnation": incarnation + 1, "learner_id": learner_id}
            _write_file(folder / "incarnation.json", _seal(content))
            return cls(
                lock,
                folder,
                learner_id=learner_id,
                incarnation=incarnation + 1,
                last_version=version,
                non_finite_count=_read_non_finite_count(folder),
            )
        except BaseException:
            os.close(lock)
            raise

    def note_non_finite(self) -> None:
        """This incarnation ends by a number that is not finite: remember that, durably."""
        self.non_finite_count += 1
        _write_file(self._folder / "failures.json", _seal({"non_finite": self.non_finite_count}))

    def close(self) -> None:
        """Let go of the run."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EndpointLedger:
    """The endpoint process's part: the last published version, and the incarnation of each index."""

    def __init__(self, lock: int, version_file: int, folder: Path, *, last_version: int, members: Members) -> None:
        """Use `open`."""
        self._lock, self._version_file, self._folder = lock, version_file, folder
        self.last_version = last_version
        """The last version that is durable; 0: none."""
        self.members = members
        """As found at `open`."""

    @classmethod
    def open(cls, run_folder: Path) -> EndpointLedger:
        """Take hold of the endpoint's files, making them where there are none.

        Raises:
            ConflictError: another endpoint of this run is still alive.
            InvalidInputError: a file of the ledger is damaged.
        """
        folder = _folder_of(run_folder)
        lock = _take_lock(folder / "endpoint.lock", _in_use(run_folder, "another endpoint serves it now"), seconds=0)
        try:
            version, members = _read_version(folder), _read_members(folder)
            if not (folder / "version").exists():
                _write_file(folder / "version", _version_record(0, 0))
            version_file = os.open(folder / "version", os.O_RDWR)
        except BaseException:
            os.close(lock)
            raise
        return cls(lock, version_file, folder, last_version=version, members=members)

    def write_version(self, incarnation: int, version: int) -> None:
        """Make a version durable; it may be served when this returns.

        The record is written over in place, so that one fdatasync without any change of metadata suffices.

        Raises:
            ConflictError: the version is not above the last one.
        """
        if version <= self.last_version:
            raise ConflictError(
                f"version {version} is published after version {self.last_version} of this run: "
                "expected a higher one, since a version never means two policies"
            )
        os.pwrite(self._version_file, _version_record(incarnation, version), 0)
        _data_sync(self._version_file)
        self.last_version = version

    def write_members(self, members: Mapping[str, Mapping[int, int]]) -> None:
        """Make the incarnation of each index durable; a place may be given out when this returns."""
        _write_file(
            self._folder / "members.json",
            _seal(
                {
                    role: {str(index): number for index, number in sorted(places.items())}
                    for role, places in members.items()
                }
            ),
        )

    def close(self) -> None:
        """Let go of the files."""
        os.close(self._version_file)
        os.close(self._lock)


def _folder_of(run_folder: Path) -> Path:
    folder = run_folder / "learner"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _in_use(run_folder: Path, reason: str) -> str:
    return f"run {run_folder.name!r} in {run_folder} is in use: {reason}; stop it first, or choose another run.id"


def _take_lock(path: Path, message: str, *, seconds: float) -> int:
    """An exclusive lock, as a descriptor that holds it until it is closed. Raises ConflictError after `seconds`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            # flock knows no deadline, so it is asked again and again.
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise ConflictError(message) from error
            time.sleep(_LOCK_RETRY_SECONDS)


def _seal(content: Mapping[str, Any]) -> bytes:
    """The content as one JSON line that carries the checksum of its other bytes."""
    text = json.dumps(content, sort_keys=True)
    return json.dumps({"content": content, "crc32": zlib.crc32(text.encode())}, sort_keys=True).encode()


def _unseal(path: Path, data: bytes) -> dict[str, Any]:
    try:
        sealed = json.loads(data)
        content = sealed["content"]
        if zlib.crc32(json.dumps(content, sort_keys=True).encode()) != sealed["crc32"]:
            raise ValueError("the checksum differs")
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path} is damaged ({error}): expected one JSON object with its checksum; restore the file from a backup, "
            "or choose another run.id, since without it a version could come to mean two policies"
        ) from error
    return dict(content)


def _version_record(incarnation: int, version: int) -> bytes:
    return _seal({"incarnation": incarnation, "version": version}).ljust(_VERSION_BYTES - 1) + b"\n"


def _read_file(path: Path) -> dict[str, Any] | None:
    return _unseal(path, path.read_bytes()) if path.exists() else None


def _read_incarnation(folder: Path) -> tuple[str, int]:
    """The id of the folder's learner, made where it has none yet, and the incarnation that it reached."""
    content = _read_file(folder / "incarnation.json") or {}
    return str(content.get("learner_id") or uuid.uuid4().hex), int(content.get("incarnation", 0))


def _read_non_finite_count(folder: Path) -> int:
    content = _read_file(folder / "failures.json")
    return 0 if content is None else int(content["non_finite"])


def _read_version(folder: Path) -> int:
    content = _read_file(folder / "version")
    return 0 if content is None else int(content["version"])


def _read_members(folder: Path) -> Members:
    content = _read_file(folder / "members.json") or {}
    return {role: {int(index): int(number) for index, number in places.items()} for role, places in content.items()}


def _write_file(path: Path, data: bytes) -> None:
    """Replace a file as a whole: after a crash it is the old one or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# macOS has no fdatasync.
_data_sync = getattr(os, "fdatasync", os.fsync)
