"""The report's figures, each drawn to the bytes of an SVG image.

Drawn through matplotlib's objects, without pyplot: no window, no global state, whichever backend the machine prefers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from paceline.report.record import Episode, Evaluation, Incarnation, RunRecord
from paceline.telemetry import LAG_BUCKETS

_INK, _FAINT, _GRID = "#1f2a37", "#6b7787", "#e4e8ee"
_EVALUATION, _TRAINING, _LAG, _RESTART = "#0b6e99", "#e0913a", "#4c7fb8", "#b23a48"
# Of activities, in the order of the time they took; soft, and apart in lightness for those who see no hue.
_COLOURS = (
    *("#2f6da3", "#e58e3a", "#4f9d69", "#c8555b", "#8573b8", "#937860"),
    *("#d486b5", "#5bb5c9", "#b5a33c", "#1f4e79", "#a35d1f", "#2d6e4a"),
)
# Words in the names of activities in which a process waits for another: for a request, for credits, for the limiter.
_WAITING = frozenset({"wait", "waiting", "idle", "receive", "credit", "limiter"})
_PART_COLOURS = {
    "transfer": "#2f6da3",
    "rollout": "#e58e3a",
    "queue": "#c8555b",
    "residence": "#5bb5c9",
    "unattributed": "#bcc4ce",
}
_GREYS = ("#d5dae1", "#bcc4ce", "#a3adb9", "#8b96a3")

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": _INK,
    "axes.edgecolor": "#b6bec9",
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "legend.frameon": False,
    # A dollar sign in a name is a dollar sign.
    "text.parse_math": False,
    # Letters stay text: smaller, searchable, and in the reader's own font.
    "svg.fonttype": "none",
    # Equal data give equal bytes.
    "svg.hashsalt": "paceline",
}
# Above this, dots are drawn as pixels: thousands of vector dots make the page slow to open.
_MAX_VECTOR_DOTS = 2_000


def return_by_steps(record: RunRecord) -> bytes:
    """Return of training episodes and evaluations against environment steps."""
    return _returns(
        record,
        "environment steps",
        lambda placed: placed.environment_steps,
    )


def return_by_seconds(record: RunRecord) -> bytes:
    """Return of training episodes and evaluations against running seconds."""
    return _returns(record, "running time (s)", lambda placed: placed.seconds)


def training_lag(record: RunRecord) -> bytes:
    """Share of the trained rows by how many versions they lagged behind the learner."""
    return _lag(record.lag_rows, "training lag (policy versions)", "rows trained on (%)")


def acting_lag(record: RunRecord) -> bytes:
    """Share of the environment steps by how many versions the acting policy lagged behind the newest known."""
    return _lag(record.lag.acting_steps, "acting lag (policy versions)", "environment steps (%)")


def lag_parts(record: RunRecord) -> bytes:
    """What the training lag of a row is made of on average, in versions and in seconds."""
    rows = [
        (unit, values)
        for unit, values in (("versions", record.lag.part_versions), ("seconds", record.lag.part_seconds))
        if sum(values.values()) > 0
    ]
    with mpl.rc_context(STYLE):
        figure, axes = new_figure(height=1.35 + 0.5 * len(rows))
        labels = []
        for row, (unit, values) in enumerate(rows):
            total, left = sum(values.values()), 0.0
            labels.append(f"{total:.3g} {unit}")
            for part, colour in _PART_COLOURS.items():
                share = 100 * values.get(part, 0.0) / total
                axes.barh(row, share, left=left, height=0.72, color=colour, edgecolor="white")
                if share >= 6:
                    ink = "white" if _is_dark(colour) else _INK
                    axes.text(left + share / 2, row, f"{share:.0f}", ha="center", va="center", color=ink, fontsize=9)
                left += share
        for part, colour in _PART_COLOURS.items():
            axes.barh(0, 0, color=colour, label=part)
        axes.set_yticks(range(len(rows)), labels)
        axes.tick_params(axis="y", length=0, labelcolor=_INK)
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the mean training lag (%)")
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside upper center", ncols=5, fontsize=9.5, handlelength=1.0)
        return svg(figure)


def _lag(counts: Mapping[float, float], label: str, share_label: str) -> bytes:
    bounds = list(counts)
    last = max(index for index, count in enumerate(counts.values()) if count)
    bounds = bounds[: last + 1]
    total = sum(counts.values())
    shares = [100 * counts[bound] / total for bound in bounds]
    with mpl.rc_context(STYLE):
        figure, axes = new_figure(height=3.4)
        axes.bar(range(len(bounds)), shares, width=0.85, color=_LAG)
        tilt: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if len(bounds) > 14 else {}
        axes.set_xticks(range(len(bounds)), [lag_label(bound) for bound in bounds], **tilt)
        axes.set_xlabel(label)
        axes.set_ylabel(share_label)
        axes.grid(visible=False, axis="x")
        return svg(figure)


def process_time(record: RunRecord) -> bytes:
    """Share of its time that each process spent in each of its activities."""
    processes = list(record.process_seconds)
    colours = activity_colours(record.process_seconds)
    with mpl.rc_context(STYLE):
        rows_of_legend = math.ceil(len(colours) / 5)
        figure, axes = new_figure(height=1.1 + 0.42 * len(processes) + 0.25 * rows_of_legend)
        for row, process in enumerate(processes):
            total, left = sum(record.process_seconds[process].values()), 0.0
            for activity in sorted(record.process_seconds[process], key=list(colours).index):
                share = 100 * record.process_seconds[process][activity] / total
                axes.barh(row, share, left=left, height=0.72, color=colours[activity], edgecolor="white")
                if share >= 6:
                    ink = "white" if _is_dark(colours[activity]) else _INK
                    axes.text(left + share / 2, row, f"{share:.0f}", ha="center", va="center", color=ink, fontsize=9)
                left += share
        for activity, colour in colours.items():
            axes.barh(0, 0, color=colour, label=activity.replace("_", " "))
        axes.set_yticks(range(len(processes)), processes)
        axes.tick_params(axis="y", length=0, labelcolor=_INK)
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the process's time (%)")
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside upper center", ncols=5, fontsize=9.5, handlelength=1.0)
        return svg(figure)


def lag_label(bound: float) -> str:
    """The lags that a bucket holds, by its upper bound: "3", "9-10", or "> 1000" for the last."""
    below = max((edge for edge in LAG_BUCKETS if edge < bound), default=-1)
    if math.isinf(bound):
        return f"> {below}"
    return f"{bound:g}" if bound <= below + 1 else f"{below + 1}–{bound:g}"


def activity_colours(process_seconds: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """One colour for each activity in every process: greys for waiting and idling, which come last."""
    totals: dict[str, float] = {}
    for activities in process_seconds.values():
        for activity, seconds in activities.items():
            totals[activity] = totals.get(activity, 0.0) + seconds
    ordered = sorted(totals, key=lambda activity: (_is_waiting(activity), -totals[activity], activity))
    colours: dict[str, str] = {}
    for activity in ordered:
        waiting = _is_waiting(activity)
        taken = sum(_is_waiting(known) == waiting for known in colours)
        colours[activity] = _GREYS[taken % len(_GREYS)] if waiting else _COLOURS[taken % len(_COLOURS)]
    return colours


def _returns(record: RunRecord, label: str, place: Callable[[Episode | Evaluation | Incarnation], float]) -> bytes:
    with mpl.rc_context(STYLE):
        figure, axes = new_figure(height=3.8)
        _draw_episodes(axes, record.episodes, place)
        _draw_evaluations(axes, sorted(record.evaluations, key=place), place)
        for incarnation in record.incarnations[1:]:
            verb = "resumed" if incarnation.resumed else "began anew"
            axes.axvline(place(incarnation), color=_RESTART, linewidth=1, linestyle=(0, (4, 3)))
            axes.annotate(
                f"incarnation {incarnation.number} {verb}",
                (place(incarnation), 0.0),
                xycoords=("data", "axes fraction"),
                xytext=(3, 4),
                textcoords="offset points",
                rotation=90,
                va="bottom",
                fontsize=8.5,
                color=_RESTART,
            )
        axes.set_xlabel(label)
        axes.set_ylabel("episode return (sum of rewards)")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        figure.legend(loc="outside upper right", ncols=3, fontsize=9.5)
        return svg(figure)


def _draw_episodes(
    axes: Axes, episodes: Sequence[Episode], place: Callable[[Episode | Evaluation | Incarnation], float]
) -> None:
    if episodes:
        axes.plot(
            [place(episode) for episode in episodes],
            [episode.episode_return for episode in episodes],
            linestyle="",
            marker="o",
            markersize=5,
            markeredgewidth=0,
            color=_TRAINING,
            alpha=0.5,
            label="training episode",
            rasterized=len(episodes) > _MAX_VECTOR_DOTS,
        )


def _draw_evaluations(
    axes: Axes, evaluations: Sequence[Evaluation], place: Callable[[Episode | Evaluation | Incarnation], float]
) -> None:
    if not evaluations:
        return
    places = [place(evaluation) for evaluation in evaluations]
    means = [evaluation.mean_return for evaluation in evaluations]
    lowest = [min(evaluation.returns, default=evaluation.mean_return) for evaluation in evaluations]
    highest = [max(evaluation.returns, default=evaluation.mean_return) for evaluation in evaluations]
    axes.plot(places, means, color=_EVALUATION, linewidth=2, marker="o", markersize=5, label="evaluation, mean")
    axes.fill_between(
        places, lowest, highest, color=_EVALUATION, alpha=0.12, linewidth=0, label="range of its episodes"
    )


def new_figure(height: float) -> tuple[Figure, Axes]:
    """A figure of the page's width; height in inches. Make it, and draw in it, within the context of STYLE."""
    figure = Figure(figsize=(8.6, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def svg(figure: Figure) -> bytes:
    """The bytes of the figure's image."""
    buffer = BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True, dpi=144)
    return buffer.getvalue()


def _is_waiting(activity: str) -> bool:
    return not _WAITING.isdisjoint(activity.split("_"))


def _is_dark(colour: str) -> bool:
    red, green, blue = mpl.colors.to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.6
