"""The services of a run as an orchestrator has them: each a process of its own, started and stopped one by one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from e2e.harness import PACELINE, ROOT, SMALL, records_of
from free_ports import free_port

RUN = "apart"
ROLES = ("replay", "learner", "collector", "evaluator")

_PORTS = {
    "replay.listen": "replay.address",
    "replay.metrics_listen": None,
    "learner.listen": "learner.address",
    "learner.metrics_listen": None,
    "learner.endpoint_metrics_listen": None,
}


class Services:
    """Processes by name: a role, or a role and a number, such as `collector-2`. A start begins its log anew."""

    def __init__(
        self, folder: Path, redis_url: str, *, settings: Sequence[str] = (), addresses: Mapping[str, str] | None = None
    ) -> None:
        """Settings are those of every service; `addresses` replace free ports of this machine."""
        self.folder = folder / RUN
        self.redis_url = redis_url
        self._logs = folder
        ports = [free_port() for _ in _PORTS]
        self.settings: dict[str, str] = {}
        for (listen, address), port in zip(_PORTS.items(), ports, strict=True):
            self.settings[listen] = f"127.0.0.1:{port}"
            if address is not None:
                self.settings[address] = f"127.0.0.1:{port}"
        self.settings |= {"run.id": RUN, "run.directory": str(folder), "run.environment_steps": "100000"}
        self.settings |= dict(setting.split("=", 1) for setting in (*SMALL, *settings))
        self.settings |= addresses or {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.prefixes: dict[str, Sequence[str]] = {}
        """Words that go before the command of a name, such as those that enter a namespace."""
        self.every: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *options: str) -> None:
        """Start the service of that name; one of the same name should have ended."""
        role = name.partition("-")[0]
        overrides = [f"{key}={value}" for key, value in self.settings.items()]
        with (self._logs / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*self.prefixes.get(name, ()), *PACELINE, role, "configs/pendulum-sac.yaml", *overrides, *options],
                cwd=ROOT,
                env={**os.environ, "PACELINE_REPLAY__REDIS_URL": self.redis_url},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.every.append(self.processes[name])

    def log(self, name: str) -> str:
        """What the newest process of that name has written."""
        return (self._logs / f"{name}.log").read_text()

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Its log lines of one event."""
        found = [json.loads(line) for line in self.log(name).splitlines() if line.startswith("{") and line[-1] == "}"]
        return [each for each in found if each["event"] == event]

    def stop(self, name: str, *, signals: int = 1, seconds: float = 15.0) -> float:
        """End it by SIGTERM, as often as `signals` says; it ends with 0. How long it took, in seconds."""
        process, began = self.processes.pop(name), time.monotonic()
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} runs on {seconds:g} s after SIGTERM:\n{self.log(name)}") from None
        assert status == 0, f"{name} ended with {status}:\n{self.log(name)}"
        return time.monotonic() - began

    def end(self, name: str, seconds: float = 60.0) -> int:
        """Wait for its end by itself; the exit status."""
        try:
            return self.processes.pop(name).wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} still runs after {seconds:g} s:\n{self.log(name)}") from None

    def kill(self, *names: str) -> None:
        """End them as the kernel ends what has no memory: at once, all of them before the first is waited for."""
        ended = [self.processes.pop(name) for name in names]
        for process in ended:
            process.kill()
        for process in ended:
            process.wait()

    def wait_for(self, condition: Callable[[], Any], what: str, seconds: float = 180.0) -> Any:
        """The first true value of `condition`, while every process lives that was not stopped."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended while waiting for {what}:\n{self.log(name)}"
            assert time.monotonic() < deadline, f"no {what} after {seconds:g} s:\n" + "\n".join(
                f"--- {name}\n{self.log(name)[-3000:]}" for name in self.processes
            )
            time.sleep(0.05)  # between two looks at a condition that has a deadline
        return value

    def updates(self) -> int:
        """Learner steps of the newest record."""
        return max((int(each["learner_step"]) for each in records_of(self.folder, "training")), default=0)

    def wait_for_updates(self, count: int, seconds: float = 180.0) -> None:
        """Wait until the learner has recorded so many."""
        self.wait_for(lambda: self.updates() >= count, f"{count} updates", seconds)

    def metrics(self, setting: str) -> dict[str, float]:
        """The page that listens where `setting` says; empty while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{self.settings[setting]}/metrics", timeout=5) as page:
                lines = page.read().decode().splitlines()
        except OSError:
            return {}
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {series: float(value) for series, value in pairs}

    def close(self) -> None:
        """End every process that was ever started here."""
        for process in self.every:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
