import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import PortTakenError
from paceline.local.ports import PORTS, PortChooser

CHOOSE_ALL = """
import sys
from pathlib import Path
from paceline.errors import PortTakenError
from paceline.local.ports import PortChooser

chooser = PortChooser(range(int(sys.argv[2]), int(sys.argv[3])), Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
try:
    while True:
        print(chooser.choose(), flush=True)
except PortTakenError:
    print("all", flush=True)
sys.stdin.readline()
"""


def port_of(address: str) -> int:
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    return int(port)


def test_a_port_that_is_chosen_for_later_is_none_that_somebody_is_given_by_chance(tmp_path: Path) -> None:
    chooser = PortChooser(path=tmp_path / "ports")
    chosen = [port_of(chooser.choose()) for _ in range(50)]
    assert len(set(chosen)) == 50
    for _ in range(50):
        with socket.create_server(("127.0.0.1", 0)) as given:
            assert given.getsockname()[1] > max(chosen)


def test_a_port_that_is_taken_is_passed_over(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"{taken}"):
            PortChooser(range(taken, taken + 1), tmp_path / "ports").choose()


def test_runs_that_begin_at_the_same_time_choose_different_ports_and_give_them_back(tmp_path: Path) -> None:
    few = range(PORTS.start, PORTS.start + 300)
    path = tmp_path / "ports"
    arguments = [sys.executable, "-c", CHOOSE_ALL, str(path), str(few.start), str(few.stop)]
    runs = [
        subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        for _ in range(3)
    ]
    try:
        for run in runs:
            assert run.stdout.readline() == "ready\n"
        for run in runs:
            run.stdin.write("go\n")
        chosen = [port_of(line) for run in runs for line in iter(run.stdout.readline, "all\n")]
        assert len(chosen) > 200
        assert len(set(chosen)) == len(chosen)
        with pytest.raises(PortTakenError):
            PortChooser(few, path).choose()
    finally:
        for run in runs:
            run.communicate()
    assert port_of(PortChooser(few, path).choose()) in few


def test_where_nothing_can_be_noted_a_port_is_chosen_all_the_same(tmp_path: Path) -> None:
    assert port_of(PortChooser(path=tmp_path / "missing" / "ports").choose()) in PORTS
    (tmp_path / "ports").symlink_to(tmp_path / "elsewhere")  # somebody else's idea of where we should write
    assert port_of(PortChooser(path=tmp_path / "ports").choose()) in PORTS
    assert not (tmp_path / "elsewhere").exists()
