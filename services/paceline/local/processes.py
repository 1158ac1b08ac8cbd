"""The services of a run as child processes: start, watch, restart, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import ServiceFailedError
from paceline.process import EXIT_HELPER_LOST, EXIT_STOPPED
from paceline.telemetry import LAST_PAGE_VARIABLE, get_logger

TAIL_LINES = 15

_RESTARTED = {
    EXIT_STOPPED: "asked to stop by somebody else",
    EXIT_HELPER_LOST: "lost a process that it had started",
}


class ServiceProcess:
    """One service in a process of its own, with its output in a log file.

    A process that a signal ended, or the loss of a process of its own, is started again, with `restart_arguments`
    added: nothing is wrong with it that a restart would repeat. One that ended itself with an error is not: the error
    would come again.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        restart_arguments: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        metrics_ports: Mapping[str, int],
        max_restarts: int = 10,
    ) -> None:
        """`arguments` follow `paceline`; `metrics_ports` say where /metrics of which process answer."""
        self.name, self.metrics_ports = name, dict(metrics_ports)
        self.restart_count = 0
        self.last_page = log_path.with_suffix(".metrics")
        """Where a process that ends in order leaves its metrics."""
        self._arguments, self._restart_arguments = list(arguments), list(restart_arguments)
        self._environment, self._log_path = {**environment, LAST_PAGE_VARIABLE: str(self.last_page)}, log_path
        self._max_restarts = max_restarts
        self._log_begin = log_path.stat().st_size if log_path.exists() else 0
        self._process = self._spawn(self._arguments)

    @property
    def pid(self) -> int:
        """The process id of the current process."""
        return self._process.pid

    def is_running(self) -> bool:
        """Whether the process is there now."""
        return self._process.poll() is None

    def has_ended_well(self) -> bool:
        """Whether the process did its work and ended with 0."""
        return self._process.poll() == 0

    def keep_alive(self) -> bool:
        """Start the process again if it has to be; whether that happened.

        Raises:
            ServiceFailedError: it ended with an error, or too often; carries its last lines.
        """
        status = self._process.poll()
        if status is None or status == 0:
            return False
        reason = _RESTARTED.get(status) if status > 0 else f"ended by {signal.Signals(-status).name}"
        if reason is None or self.restart_count >= self._max_restarts:
            why = f"ended with exit code {status}" if reason is None else f"was ended {self.restart_count + 1} times"
            raise ServiceFailedError(f"{self.name} {why}; the last lines of {self._log_path}:\n{self.tail()}")
        self.restart_count += 1
        get_logger().warning("service_restarted", name=self.name, reason=reason, count=self.restart_count)
        self._process = self._spawn([*self._arguments, *self._restart_arguments])
        return True

    def terminate(self) -> None:
        """Ask the process to stop."""
        if self.is_running():
            self._process.terminate()

    def wait(self, deadline: float) -> bool:
        """Wait for the end until `deadline` (monotonic seconds), then kill; whether it ended by itself."""
        try:
            self._process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def tail(self) -> str:
        """The last lines of the log; none of an earlier launcher's, whose error may be another."""
        with self._log_path.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - 16_384, self._log_begin))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:]) or "    (it wrote nothing)"

    def _spawn(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        self.last_page.unlink(missing_ok=True)  # of a process before, whose figures are known
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "paceline", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                # Ctrl-C reaches the launcher alone, which then stops the services in their order.
                start_new_session=True,
            )
