"""Shows how a run goes: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.local.status import Bound, RunStatus

LINE_SECONDS = 5.0
"""Between two plain lines."""


class Display(Protocol):
    """Where a run is shown."""

    interval_seconds: float
    """How often `show` is worth calling: looking costs every process a little."""

    def say(self, text: str) -> None:
        """One line that stays."""

    def show(self, status: RunStatus) -> None:
        """The status now."""


@contextmanager
def open_display(title: str, *, plain: bool) -> Iterator[Display]:
    """A live table if standard output is a terminal and `plain` is not asked for, lines otherwise."""
    console = Console()
    if plain or not console.is_terminal:
        yield _Lines()
        return
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        yield _LiveTable(live, title)


class _Lines:
    """A line for each look."""

    interval_seconds = LINE_SECONDS

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, status: RunStatus) -> None:
        rows = "  ".join(f"{name} {value}" for name, value in _figures(status))
        done = "" if status.share_done is None else f"  {status.share_done:4.0%}"
        print(f"{_clock(status.seconds)}{done}  {rows}", flush=True)


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
        self._live.update(Group(table, _progress(status)))


def _progress(status: RunStatus) -> RenderableType:
    so_far = f"{_clock(status.seconds)} so far"
    if status.share_done is None:
        return Text(so_far)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=1.0, completed=status.share_done, width=40),
        Text(f"{status.share_done:4.0%}  {so_far}, {_clock(status.seconds_left, '?')} left"),
    )
    return bar


def _figures(status: RunStatus) -> list[tuple[str, str]]:
    applied = status.applied_versions
    limit = "" if status.environment_step_limit is None else f"/{status.environment_step_limit}"
    return [
        ("environment steps", f"{_number(status.environment_steps)}{limit} ({_rate(status.steps_per_second)})"),
        ("updates", f"{_number(status.learner_step)} ({_rate(status.updates_per_second)})"),
        ("ratio", _number(status.update_ratio, ".3f")),
        ("return", _number(status.episode_return, ".1f")),
        ("evaluation", _number(status.evaluation_return, ".1f")),
        (
            "version",
            f"{_number(status.published_version)} applied "
            + (",".join(str(version) for _, version in sorted(applied.items(), key=lambda item: int(item[0]))) or "-"),
        ),
        ("lag p50/p99", f"{_lag(status.training_lag)} training, {_lag(status.acting_lag)} acting"),
        (
            "lag by part",
            ", ".join(f"{part} {share:.0%}" for part, share in status.lag_parts.items() if share >= 0.01) or "-",
        ),
        *([] if status.bound is None else [("lag bound", _bound(status.bound))]),
        (
            "weight sync",
            f"{_number(status.collector_sync_share, '.1%')} of collecting, "
            f"{_number(status.learner_sync_share, '.1%')} of learning",
        ),
        (
            "replay",
            f"{_number(status.replay_rows)}/{_number(status.replay_capacity)} rows"
            + (f", {status.waiting}s wait" if status.waiting else ""),
        ),
        ("left", _clock(status.seconds_left)),
    ]


def _number(value: float | None, form: str = "d") -> str:
    return "-" if value is None else format(value, form)


def _rate(value: float | None) -> str:
    return "-/s" if value is None else f"{value:.1f}/s"


def _lag(lag: tuple[float, float] | None) -> str:
    return "-" if lag is None else f"{lag[0]:g}/{lag[1]:g}"


def _bound(bound: Bound) -> str:
    return (
        f"{bound.versions:g}: {_number(bound.paused_collectors, 'g')} paused, "
        f"{_number(bound.skipped_rows, '.0f')} draws skipped, {_number(bound.masked_rows, '.0f')} masked"
    )


def _clock(seconds: float | None, unknown: str = "-") -> str:
    if seconds is None:
        return unknown
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
