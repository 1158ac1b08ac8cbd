import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline import process
from paceline.process import (
    StopSignal,
    free_memory_bytes,
    limit_threads,
    memory_bytes,
    own_time,
    own_time_ns,
    require_python,
    tune_allocator,
)

ON_GLIBC = os.confstr("CS_GNU_LIBC_VERSION") if hasattr(os, "confstr") else None

# Frees 160 MiB, more than the pad that is kept anyway, and says how many pages the next 160 MiB fault in again.
FAULTS = """
import resource, sys
from paceline.process import tune_allocator
if sys.argv[1] == "tuned":
    tune_allocator()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
del_me = bytearray(160 << 20); del del_me
before = faults()
for _ in range(4):
    del_me = bytearray(160 << 20); del del_me
print(faults() - before)
"""


@pytest.mark.skipif(not ON_GLIBC, reason="mallopt is glibc's")
def test_a_tuned_process_keeps_freed_buffers_instead_of_faulting_them_in_again():
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)

    # 160 MiB are 40,960 pages of 4 KiB; fewer where the kernel hands out huge ones.
    assert faults("tuned") * 10 < faults("plain")


@pytest.mark.skipif(not ON_GLIBC, reason="mallopt is glibc's")
def test_tuning_says_that_it_took_effect_on_glibc():
    assert tune_allocator() is True


V1, V2 = "/sys/fs/cgroup/memory/", "/sys/fs/cgroup/"


@pytest.mark.parametrize(
    ("limit", "used"),
    [(f"{V2}memory.max", f"{V2}memory.current"), (f"{V1}memory.limit_in_bytes", f"{V1}memory.usage_in_bytes")],
    ids=["cgroup 2", "cgroup 1"],
)
def test_the_memory_of_a_container_bounds_that_of_its_host(monkeypatch, limit, used):
    files = {
        "/proc/meminfo": "MemTotal: 32 kB\nMemAvailable:   2000000 kB\n",
        limit: "1000000000\n",
        used: "400000000\n",
    }
    monkeypatch.setattr(process, "_read", lambda path: files.get(path, ""))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free_memory_bytes() == 600_000_000
    assert memory_bytes() == 1_000_000_000
    files[limit] = "max\n" if limit.endswith("max") else "9223372036854771712\n"
    assert free_memory_bytes() == 2_000_000 << 10
    assert memory_bytes() == host
    files.clear()
    assert free_memory_bytes() is None
    assert memory_bytes() == host


def test_own_time_is_the_systems_until_that_is_set_and_then_goes_on_as_before(monkeypatch):
    assert own_time() == pytest.approx(time.time(), abs=1)
    before = own_time_ns()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert before < own_time_ns() < before + 60 * 10**9
    assert before < own_time() * 1e9 < before + 60 * 10**9


def test_one_compute_thread_is_set_where_nothing_is_said():
    environment: dict[str, str] = {}
    limit_threads(environment)
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_what_the_user_set_about_threads_stays():
    environment = {"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "ACTIVE"}
    limit_threads(environment, threads=2)
    assert environment["OMP_NUM_THREADS"] == "8"
    assert environment["OMP_WAIT_POLICY"] == "ACTIVE"
    assert environment["OPENBLAS_NUM_THREADS"] == "2"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_is_kept_and_a_second_one_changes_nothing(number):
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop = StopSignal.install()
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.wait(5)
        signal.raise_signal(number)
        assert stop.is_set()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


WAITS = """
import os
from paceline.process import StopSignal
stop = StopSignal.install()
print("ready", flush=True)
while not stop.wait(1e-5):
    pass
for _ in range(300_000):  # as a process that ends looks again and again
    stop.wait(0)
os._exit(0)  # as every role does
"""


def test_signals_that_come_whenever_hold_nobody_up():
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        until = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < until:
            process.send_signal(signal.SIGTERM)
            time.sleep(1e-4)  # a handler should end before the next one begins, as a rule
        status = process.poll()
        process.kill()
    assert status == 0


def test_a_stop_may_be_asked_for_from_within():
    stop = StopSignal()
    assert not stop.wait(0)
    stop.set()
    assert stop.wait(0)


def test_an_old_python_is_named_with_what_is_needed():
    assert require_python((3, 11, 0)) is None
    assert require_python((4, 0, 0)) is None
    sentence = require_python((3, 10, 12))
    assert sentence is not None
    assert "3.10.12" in sentence
    assert "3.11" in sentence


def test_a_command_dies_with_its_parent():
    program = "import subprocess, sys; from paceline.process import dying_with_parent as d; "
    program += "print(subprocess.Popen(d(['/bin/sleep', '600'])).pid, flush=True); input()"
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    until = time.monotonic() + 10
    while Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0] != b"/bin/sleep":
        assert time.monotonic() < until
    parent.kill()
    parent.communicate()
    while _state_of(child) not in (None, "Z"):
        assert time.monotonic() < until, "the command outlived its parent"


def test_a_command_whose_parent_has_ended_before_it_began_does_not_begin():
    command = process.dying_with_parent(["/bin/sleep", "600"])
    # As the child of a shell, which is not who asked for it.
    shell = subprocess.run(["/bin/sh", "-c", '"$@"; exit $?', "sh", *command], timeout=30, check=False)
    assert shell.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_process_whose_parent_has_ended_before_it_could_ask_for_that_ends_at_once(how, is_there):
    parent = os.getpid() if is_there else os.getppid()
    program = f"from paceline.process import die_with_parent as d; d({how}, parent={parent}); print('goes on')"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (child.returncode, child.stdout) == ((0, "goes on\n") if is_there else (-how, ""))


@pytest.mark.parametrize("role", ["learner", "replay", "collector", "evaluator", "relay"])
def test_a_service_whose_launcher_has_ended_before_it_began_does_not_begin(role):
    command = [sys.executable, "-m", "paceline", role, "--parent", str(os.getppid()), "run.id=trial"]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGTERM


def _state_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("error", [None, ImportError])
def test_what_imports_make_is_out_of_the_garbage_collectors_sight(error):
    try:
        with contextlib.nullcontext() if error is None else pytest.raises(error), process.importing():
            assert not gc.isenabled()
            made = [[]]
            if error is not None:
                raise error
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert not any(each is made for each in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(each is made for each in gc.get_objects())
