"""What ends a command with a sentence, and what with its traceback."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from paceline.cli.starting import _keeps_from_folder

FOLDER = Path("runs/trial")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError(errno.ENOENT, "", "runs"), True),
        (FileExistsError(errno.EEXIST, "", "runs/trial"), True),
        (NotADirectoryError(errno.ENOTDIR, "", "runs/trial/learner"), True),
        (PermissionError(errno.EACCES, "", Path("runs/trial/launcher.lock")), True),
        # Files that ought to be there, or are of no folder of the run: faults of ours.
        (FileNotFoundError(errno.ENOENT, "", "runs/trial/metrics.jsonl"), False),
        (PermissionError(errno.EACCES, "", "runs/trial/learner/lock"), False),
        (PermissionError(errno.EACCES, "", "/elsewhere"), False),
        (OSError(errno.ENOENT, "without a name"), False),
        (ConnectionRefusedError(errno.ECONNREFUSED, ""), False),
    ],
    ids=repr,
)
def test_only_an_error_on_making_the_folder_of_the_run_is_said_to_be_of_it(error: OSError, expected: bool):
    assert _keeps_from_folder(error, FOLDER) is expected
