"""A run's lag for people, on a terminal or in a file, and for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.local.lag_data import LagData
from paceline.local.lag_view import BoundEffect, LagView, Loop
from paceline.local.scrape import Spread

BAR_WIDTH = 40
MAX_BARS = 12
"""Neighbouring buckets are shown as one where there are more."""
WIDTH = 100
"""Of lines that do not go to a terminal."""
UNKNOWN = "unknown"

_PART_WORDS = {
    "transfer": "published until applied by the collector",
    "rollout": "applied until the row's block was sealed",
    "queue": "sealed until stored by replay",
    "residence": "stored until trained on",
    "unattributed": "cannot be said: times are not known",
}


def open_console() -> Console:
    """Standard output, WIDTH wide where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def show(view: LagView, console: Console) -> None:
    """Print everything, and at the end what to change."""
    console.print(Text(f"run {view.data.run}, which {_state(view.data)}", style="bold"))
    console.print(Text(f"from {view.data.source}", style="dim"), soft_wrap=True)
    if view.data.ending is not None and view.data.ending.problem:
        console.print(Text(f"It failed: {view.data.ending.problem}", style="red"), soft_wrap=True)
    for sentence in view.data.missing:
        console.print(Text(sentence, style="yellow"))
    for title, part in _sections(view):
        console.print()
        console.print(Text(title, style="bold cyan"))
        console.print(Padding(part, (0, 0, 0, 2), expand=False))


def _state(data: LagData) -> str:
    if data.ending is None:
        return "goes on" if data.goes_on else "has ended"
    return {"complete": "is complete", "stopped": "was stopped before its end", "failed": "failed"}[data.ending.how]


def to_json(view: LagView) -> str:
    """The same for programs: null where it is not known, "+Inf" for beyond the largest bucket."""
    described = {
        "run": view.data.run,
        "source": view.data.source,
        "goes_on": view.data.goes_on,
        "ending": None if view.data.ending is None else vars(view.data.ending),
        "missing": view.data.missing,
        "training_lag": {unit: _spread_as_dict(spread) for unit, spread in view.training.items()},
        "acting_lag": {unit: _spread_as_dict(spread) for unit, spread in view.acting.items()},
        "trained_rows": view.trained_rows,
        "parts": [vars(part) for part in view.parts],
        "parts_sum_versions": view.part_sum,
        "loops": {"collector": _loop_as_dict(view.collector), "learner": _loop_as_dict(view.learner)},
        "publish_lag": [vars(collector) for collector in view.publish],
        "bound": vars(view.bound),
        "clocks": [vars(clock) for clock in view.clocks],
        "advice": {
            "limit": asdict(view.explanation.limit),
            "lag": asdict(view.explanation.lag),
            "settings_known": view.data.config is not None,
            "paragraph": view.advice,
        },
    }
    return json.dumps(_plain(described), indent=2, allow_nan=False)


def _sections(view: LagView) -> Iterator[tuple[str, RenderableType]]:
    yield (
        "Training lag: versions between the policy that acted and the learner, over rows trained on",
        _distribution(view.training["versions"], "rows"),
    )
    yield _others(view.training, "row age")
    yield (
        "Acting lag: versions between the newest that a collector knew and the one that acted, over steps",
        (_distribution(view.acting["versions"], "steps")),
    )
    yield _others(view.acting, "age")
    yield "What the training lag is made of, for a row on average", _parts(view)
    for name, loop in (("collectors", view.collector), ("the learner", view.learner)):
        yield f"Where the loop of {name} spent its time", _loop(loop)
    yield "Publish lag: how far each collector is behind what is published", _publish(view)
    yield "Bound: lag.max_lag_versions", _bound(view.bound, known=view.data.config is not None)
    yield "Clocks, against the learner's", _clocks(view)
    yield "What limits this run", Text(view.advice)


def _distribution(spread: Spread | None, what: str) -> RenderableType:
    if spread is None:
        return Text(UNKNOWN)
    lines = Table.grid(padding=(0, 1))
    lines.add_column(justify="right")
    lines.add_column(no_wrap=True)
    lines.add_column(justify="right")
    bars = _bars(spread)
    highest = max(share for _, share in bars)
    for label, share in bars:
        lines.add_row(label, "█" * round(share / highest * BAR_WIDTH) or ("▏" if share else ""), f"{share:.1%}")
    grid = Table.grid()
    grid.add_row(Text(f"{_summary(spread)}; {spread.count:,.0f} {what}"))
    grid.add_row(lines)
    return grid


def _others(spreads: Mapping[str, Spread | None], age: str) -> tuple[str, RenderableType]:
    lines = Table.grid(padding=(0, 2))
    for unit, spread in spreads.items():
        if unit != "versions":
            lines.add_row(
                "updates" if unit == "updates" else age, UNKNOWN if spread is None else _summary(spread, unit)
            )
    return "The same in other units", lines


def _summary(spread: Spread, unit: str = "versions") -> str:
    """Mean, quantiles and maximum; all but the mean as the upper bounds of their buckets."""
    quantiles = "  ".join(f"p{round(q * 100)} {_bound_text(spread.quantile(q), spread)}" for q in (0.5, 0.9, 0.99))
    return f"mean {_figure(spread.mean)}  {quantiles}  max {_bound_text(spread.largest, spread)} {unit}"


def _bound_text(bound: float, spread: Spread) -> str:
    finite = [edge for edge, _ in spread.buckets if math.isfinite(edge)]
    if math.isinf(bound):
        return f"> {max(finite):g}"
    # A bucket of one whole number says it exactly.
    below = max((edge for edge in finite if edge < bound), default=-1.0)
    exact = bound == 0 or (bound - below == 1 and all(edge == int(edge) for edge in finite))
    return f"{bound:g}" if exact else f"<={bound:g}"


def _bars(spread: Spread) -> list[tuple[str, float]]:
    """Labels and shares of the buckets up to the highest that holds any."""
    held = [(bound, count) for bound, count in spread.buckets if bound <= spread.largest]
    edges = [-1.0, *(bound for bound, _ in held)]
    bars = [(edges[index] + 1, bound, count) for index, (bound, count) in enumerate(held)]
    while len(bars) > MAX_BARS:
        # The first, lag 0, stays alone.
        rest = bars[1:]
        pairs = [rest[index : index + 2] for index in range(0, len(rest), 2)]
        bars = [bars[0], *((pair[0][0], pair[-1][1], sum(count for *_, count in pair)) for pair in pairs)]
    return [
        (f"{first:g}" if first == last else f"{first:g}+" if math.isinf(last) else f"{first:g}-{last:g}",
         count / spread.count)
        for first, last, count in bars
    ]  # fmt: skip


def _parts(view: LagView) -> RenderableType:
    if not view.parts:
        return Text(UNKNOWN)
    table = Table(box=None, pad_edge=False)
    for heading in ("part", "", "versions", "share", "seconds", "share"):
        table.add_column(heading, justify="left" if heading in ("part", "") else "right", no_wrap=True)
    for part in view.parts:
        table.add_row(
            part.name,
            Text(_PART_WORDS[part.name], style="dim"),
            _figure(part.versions),
            _percent(part.versions_share),
            _figure(part.seconds),
            _percent(part.seconds_share),
        )
    seconds = [part.seconds for part in view.parts if part.seconds is not None]
    table.add_row(
        "sum", "", _figure(view.part_sum), _percent(_sum(part.versions_share for part in view.parts)),
        _figure(sum(seconds) if seconds else None), _percent(_sum(part.seconds_share for part in view.parts)),
        style="bold",
    )  # fmt: skip
    mean = view.training["versions"].mean if view.training["versions"] is not None else None
    table.add_row("mean lag", "", _figure(mean), style="bold")
    return table


def _loop(loop: Loop | None) -> RenderableType:
    if loop is None:
        return Text(UNKNOWN)
    lines = Table.grid(padding=(0, 1))
    for activity, share in loop.shares.items():
        if share:
            lines.add_row(activity.replace("_", " "), "█" * round(share * BAR_WIDTH), Text(f"{share:.1%}"))
    beside = ", ".join(f"{activity} {seconds:.1f} s" for activity, seconds in loop.beside.items())
    grid = Table.grid()
    grid.add_row(lines)
    grid.add_row(
        Text(
            f"sum {sum(loop.shares.values()):.1%} of {loop.seconds:.1f} s"
            + (f", beside {beside}" if beside else "")
            + ("" if loop.accounted is None else f"; accounts for {loop.accounted:.1%} of the time that was watched")
        )
    )
    grid.add_row(Text(f"weight synchronisation: {loop.sync_share:.1%}", style="bold"))
    return grid


def _publish(view: LagView) -> RenderableType:
    if not view.publish:
        return Text(UNKNOWN)
    table = Table(box=None, pad_edge=False)
    for heading in ("collector", "versions", "updates", "seconds"):
        table.add_column(heading, justify="left" if heading == "collector" else "right")
    for each in view.publish:
        table.add_row(each.collector, _figure(each.versions), _figure(each.updates), _figure(each.seconds))
    return table


def _bound(bound: BoundEffect, *, known: bool) -> RenderableType:
    if bound.versions is None:
        return Text("none is set" if known else f"{UNKNOWN}, or none is set")
    lines = Table.grid(padding=(0, 2))
    paused = UNKNOWN if bound.pauses is None else f"{bound.pauses:,.0f} times"
    if bound.paused_share is not None:
        paused += f", {bound.paused_share:.1%} of the time of collectors"
    lines.add_row("bound", f"{bound.versions:g} versions")
    lines.add_row("collectors paused", f"{paused}; now {_count(bound.paused_collectors)}")
    lines.add_row("draws skipped", f"{_count(bound.skipped_rows)} of rows beyond it; a row counts once for each draw")
    lines.add_row("draws masked", f"{_count(bound.masked_rows)} of rows beyond it were made and had weight 0")
    starved = UNKNOWN if bound.starved_seconds is None else f"{bound.starved_seconds:.1f} s"
    if bound.workable_versions is not None:
        starved += f"; less than 1 % of the time with lag.max_lag_versions={bound.workable_versions:g}"
    lines.add_row("learner starved", starved)
    return lines


def _clocks(view: LagView) -> RenderableType:
    if not view.clocks:
        return Text(UNKNOWN)
    lines = Table.grid(padding=(0, 2))
    for clock in view.clocks:
        spread = UNKNOWN if clock.uncertainty_seconds is None else f"{clock.uncertainty_seconds * 1000:.1f} ms"
        lines.add_row(clock.peer, f"{clock.seconds * 1000:+.1f} ms", f"± {spread}")
    return lines


def _figure(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _count(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.1%}"


def _sum(shares: Iterator[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) if known else None


def _spread_as_dict(spread: Spread | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    return {
        "count": spread.count,
        "mean": spread.mean,
        "p50": spread.quantile(0.5),
        "p90": spread.quantile(0.9),
        "p99": spread.quantile(0.99),
        "max_bucket": spread.largest,
        "buckets": [{"up_to": bound, "count": count} for bound, count in spread.buckets if count],
    }


def _loop_as_dict(loop: Loop | None) -> dict[str, Any] | None:
    return None if loop is None else dict(vars(loop))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "+Inf" if value > 0 else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
