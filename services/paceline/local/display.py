"""Shows how a run goes: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.config import Config
from paceline.local.status import RunStatus

LINE_SECONDS = 5.0
"""Between two plain lines."""


class Display(Protocol):
    """Where the launcher shows what it does."""

    interval_seconds: float
    """How often `show` is worth calling: looking costs every process a little."""

    def say(self, text: str) -> None:
        """One line that stays."""

    def show(self, status: RunStatus) -> None:
        """The status now."""


@contextmanager
def open_display(config: Config, *, plain: bool) -> Iterator[Display]:
    """A live table if standard output is a terminal and `plain` is not asked for, lines otherwise."""
    console = Console()
    if plain or not console.is_terminal:
        yield _Lines()
        return
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        yield _LiveTable(live, title=f"{config.run_id}: {config.learner.algorithm.name} on {config.env.id}")


class _Lines:
    """A line for each look."""

    interval_seconds = LINE_SECONDS

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, status: RunStatus) -> None:
        rows = "  ".join(f"{name} {value}" for name, value in _figures(status))
        print(f"{_clock(status.seconds)}  {status.share_done:4.0%}  {rows}", flush=True)


class _LiveTable:
    """A table that stays in place, with the lines above it."""

    interval_seconds = 1.0

    def __init__(self, live: Live, title: str) -> None:
        self._live, self._title = live, title

    def say(self, text: str) -> None:
        self._live.console.print(text)

    def show(self, status: RunStatus) -> None:
        table = Table(title=self._title, show_header=False, title_justify="left", min_width=64)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for name, value in _figures(status):
            table.add_row(name, value)
        remaining = "?" if status.seconds_left is None else _clock(status.seconds_left)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=1.0, completed=status.share_done, width=40),
            Text(f"{status.share_done:4.0%}  {_clock(status.seconds)} so far, {remaining} left"),
        )
        self._live.update(Group(table, bar))


def _figures(status: RunStatus) -> list[tuple[str, str]]:
    applied = status.applied_versions
    return [
        (
            "environment steps",
            f"{_number(status.environment_steps)}/{status.environment_step_limit} ({_rate(status.steps_per_second)})",
        ),
        ("updates", f"{_number(status.learner_step)} ({_rate(status.updates_per_second)})"),
        ("ratio", _number(status.update_ratio, ".3f")),
        ("return", _number(status.episode_return, ".1f")),
        ("evaluation", _number(status.evaluation_return, ".1f")),
        (
            "version",
            f"{_number(status.published_version)} applied "
            + (",".join(str(version) for _, version in sorted(applied.items(), key=lambda item: int(item[0]))) or "-"),
        ),
        ("lag p50/p99", f"{_number(status.lag_p50, 'g')}/{_number(status.lag_p99, 'g')}"),
        (
            "weight sync",
            f"{_number(status.collector_sync_share, '.1%')} of collecting, "
            f"{_number(status.learner_sync_share, '.1%')} of learning",
        ),
        (
            "replay",
            f"{_number(status.replay_rows)}/{status.replay_capacity} rows"
            + (f", {status.waiting}s wait" if status.waiting else ""),
        ),
        ("left", _clock(status.seconds_left) if status.seconds_left is not None else "-"),
    ]


def _number(value: float | None, form: str = "d") -> str:
    return "-" if value is None else format(value, form)


def _rate(value: float | None) -> str:
    return "-/s" if value is None else f"{value:.1f}/s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
