"""`make bench-replay` in its quick form: it measures all that it promises. What it measures is for an idle machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

SCRIPT = Path(__file__).parents[1] / "bench" / "replay.py"
SECONDS = 400


def test_every_measure_has_a_ratio_and_both_files_are_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--results", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    table = done.stdout.partition("\nmeasure ")[2].partition("\n\n")[0].splitlines()[1:]
    names = {re.split(r" {2,}", line)[0]: "not measured" in line for line in table}
    unmeasured = {name for name, missing in names.items() if missing}
    # A peer is measured where its package is.
    expected = set() if find_spec("torchrl") else {name for name in names if "TorchRL" in name}
    assert unmeasured == expected
    results = json.loads((tmp_path / "replay.json").read_text())
    assert [measure["name"] for measure in results["measures"]] == [name for name in names if name not in unmeasured]
    for measure in results["measures"]:
        assert 0 < measure["low"] <= measure["median"] <= measure["high"], measure["name"]
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")
