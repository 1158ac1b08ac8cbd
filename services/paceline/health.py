"""Whether a process makes progress and is useful now, and the question from outside. Standard library only.

An orchestrator asks every few seconds, each time with a new process where it cannot ask over HTTP itself: what is
imported here costs a core a noticeable share.
"""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

PATHS = ("/healthz", "/readyz")
ASK_SECONDS = 4.0
"""How long an answer may take: less than the usual timeout of a probe, so that the reason is still printed."""

Doing = tuple[str, float]
"""What a loop does, and for how many seconds already."""


class Health:
    """What /healthz and /readyz of a process answer.

    Alive: its loop has turned within `stuck_seconds`. To wait is to turn: whoever waits does so in slices and says so
    at each. Ready: alive, and nothing that it needs to be useful is missing. From any thread.
    """

    def __init__(self, stuck_seconds: float, *, unready: str = "it is starting") -> None:
        """Alive and not ready, for the reason `unready`, until something else is said."""
        self._stuck_seconds = stuck_seconds
        self._unready: str | None = unready
        self._doing: Callable[[], Doing] | None = None
        self._exempt: frozenset[str] = frozenset()
        self._turned_at: float | None = None

    def watch(self, doing: Callable[[], Doing], *, exempt: Iterable[str] = ()) -> None:
        """Ask `doing` what the loop does; what is in `exempt` may take as long as it takes."""
        self._doing, self._exempt = doing, frozenset(exempt)

    def turn(self) -> None:
        """The loop has turned; for one that has no activities to watch."""
        self._turned_at = time.monotonic()

    def set_ready(self) -> None:
        """The process is useful from now on."""
        self._unready = None

    def set_unready(self, reason: str) -> None:
        """The process is of no use now, and alive."""
        self._unready = reason

    def why_not_alive(self) -> str | None:
        """Why the process should be started again, in one line; None: it makes progress."""
        if self._turned_at is not None:
            seconds = time.monotonic() - self._turned_at
            if seconds > self._stuck_seconds:
                return self._stuck("its loop has not turned", seconds)
        if self._doing is not None:
            activity, seconds = self._doing()
            if seconds > self._stuck_seconds and activity not in self._exempt:
                return self._stuck(f"its loop is in {activity!r}", seconds)
        return None

    def why_not_ready(self) -> str | None:
        """Why the process is of no use now, in one line; None: it is ready."""
        return self.why_not_alive() or self._unready

    def _stuck(self, what: str, seconds: float) -> str:
        return f"{what} for {seconds:.0f} s: expected less than {self._stuck_seconds:g} s (run.stuck_seconds)"


def answering(health: Health | None, others: Callable[..., Any]) -> Callable[..., Any]:
    """The WSGI application that answers /healthz and /readyz by 200, or 503 and a reason; the rest is for `others`.

    Without a `health` the two are not found: an answer of `others` would pass for a good one.
    """

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path = environ["PATH_INFO"].rstrip("/")
        if path not in PATHS:
            return others(environ, start_response)
        reason: str | None
        if health is None:
            status, reason = "404 Not Found", "this process does not say how it is"
        else:
            reason = health.why_not_alive() if path == "/healthz" else health.why_not_ready()
            status = "200 OK" if reason is None else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")])
        return [f"{'ok' if reason is None else ' '.join(reason.split())}\n".encode()]

    return application


def ask(target: str, *, ready: bool = False, seconds: float = ASK_SECONDS) -> tuple[bool, str]:
    """Ask a process whether it is alive, or ready: the answer, and its reason.

    Args:
        target: the port of its /metrics on this machine, `host:port`, or the URL that stands before /metrics.
        seconds: how long the answer may take.
    """
    base = target.rstrip("/").removesuffix("/metrics")
    if base.isdecimal():
        base = f"127.0.0.1:{base}"
    if "://" not in base:
        base = f"http://{base}"
    url = base + PATHS[ready]
    # No proxy of the environment: what is asked is beside us.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=seconds) as answer:
            return True, answer.read(1000).decode(errors="replace").strip()
    except urllib.error.HTTPError as error:
        with error:
            reason = error.read(1000).decode(errors="replace").strip()
        return False, reason if error.code == 503 else f"{url} answers {error.code}: expected 200 or 503"
    except (OSError, ValueError) as error:
        return False, f"{url} does not answer: {getattr(error, 'reason', error)}"


def main(arguments: list[str]) -> int:
    """`python -m paceline health TARGET... [--ready]`: print each answer; 0: all are well, 1: not all, 2: misuse."""
    ready = "--ready" in arguments
    targets = [argument for argument in arguments if argument != "--ready"]
    if not targets or any(target.startswith("-") for target in targets):
        print("usage: python -m paceline health URL|HOST:PORT|PORT... [--ready]", file=sys.stderr)
        return 2
    answers = [ask(target, ready=ready) for target in targets]
    for _, reason in answers:
        print(reason)
    return 0 if all(good for good, _ in answers) else 1
