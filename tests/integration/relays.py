"""Real relays: in processes of their own, or on threads with clocks that a test sets."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from free_ports import free_port
from integration.waiting import wait_until
from paceline.config import load
from paceline.process import StopSignal
from paceline.relay import main as relay_main

RUN_ID = "trial"
START_SECONDS = 60.0


def settings_of(upstream: int, *overrides: str) -> list[str]:
    return [
        f"run.id={RUN_ID}",
        f"relay.upstream=127.0.0.1:{upstream}",
        "relay.listen=127.0.0.1:0",
        "relay.metrics_listen=127.0.0.1:0",
        "rpc.backoff_initial_seconds=0.02",
        "rpc.backoff_max_seconds=0.1",
        *overrides,
    ]


class WatchedRelay:
    """What a relay tells over HTTP."""

    metrics_port = 0

    def page(self) -> dict[str, float]:
        """Every sample of /metrics, by its name and labels as written there."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def value(self, thing: str) -> float | None:
        return self.page().get(f"paceline_relay_{thing}")

    def wait_for(self, thing: str, is_right: Callable[[float], bool], seconds: float = 30.0) -> None:
        """Wait until a metric is there and right."""
        wait_until(lambda: (value := self.value(thing)) is not None and is_right(value), seconds)

    def health(self, path: str) -> int:
        """The status of /healthz or /readyz."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.metrics_port}{path}")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code


class RelayProcess(WatchedRelay):
    """`paceline relay`, which polls a port of this machine."""

    def __init__(self, folder: Path, upstream: int, *overrides: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "relay.log"
        self._command = [sys.executable, "-m", "paceline", "relay", *settings_of(upstream, *overrides)]
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start it, on the port that it had before if it had one."""
        command = [*self._command, *([f"relay.listen=127.0.0.1:{self.port}"] if self.port else [])]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(lambda: self.events("relay_started") or self.process.poll() is not None, START_SECONDS)
        [started] = self.events("relay_started") or [None]
        assert started is not None, self.text()
        self.port, self.metrics_port = started["port"], started["metrics_port"]

    def text(self) -> str:
        return self._log.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of that name."""
        lines = [line for line in self.text().splitlines() if line.startswith("{") and line.endswith("}")]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def terminate(self) -> int:
        """Ask it to stop; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


class RelayThread(WatchedRelay):
    """A relay in this process, whose clock is `ahead` seconds ahead of this machine's."""

    def __init__(self, upstream: int, *overrides: str, ahead: float = 0.0) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        config = load(
            None,
            settings_of(
                upstream,
                f"relay.listen=127.0.0.1:{self.port}",
                f"relay.metrics_listen=127.0.0.1:{self.metrics_port}",
                *overrides,
            ),
        )
        self._stop = StopSignal()
        self._error: list[BaseException | None] = [None]

        def run() -> None:
            try:
                relay_main.run(config, stop=self._stop, clock=lambda: time.time() + ahead)
            except BaseException as error:
                self._error = [error]

        self._thread = threading.Thread(target=run)
        self._thread.start()
        wait_until(self._answers, START_SECONDS)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self._error[0] is not None:
            raise self._error[0]

    def _answers(self) -> bool:
        assert self._thread.is_alive(), self._error
        try:
            return self.health("/healthz") == 200
        except OSError:
            return False


def reasons(text: str) -> list[str]:
    """What a command said when it ended with an error."""
    return re.findall(r"^paceline: (.*)$", text, re.MULTILINE)
