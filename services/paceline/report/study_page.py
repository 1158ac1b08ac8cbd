"""A study as one self-contained HTML page and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.ticker import EngFormatter

from paceline import __version__
from paceline.report.figures import STYLE as FIGURE_STYLE
from paceline.report.figures import new_figure, svg
from paceline.report.page import STYLE, duration_text, figure_section, table_row
from paceline.report.study import DEFAULT_SHARE, Place, Row, Study, band, by_seconds, by_steps

_UNKNOWN = "not known"


def write_study(folder: Path, study: Study) -> Path:
    """Write `study.json` and `study.html` into the folder and give the path of the page."""
    _write(folder / "study.json", json.dumps(to_json(study), indent=1, allow_nan=False))
    _write(folder / "study.html", render(study))
    return folder / "study.html"


def to_json(study: Study) -> dict[str, Any]:
    """The study for programs; null where a figure is not known."""
    return {
        "kind": "lag",
        "name": study.name,
        "complete_runs": len(study.runs),
        "wanted_runs": study.wanted,
        "threshold": study.threshold,
        "threshold_given": study.threshold_given,
        "steps_range": study.steps_range,
        "seconds_range": study.seconds_range,
        "by_versions": [asdict(row) for row in study.rows],
        "runs": [
            {
                "run_id": run.record.run_id,
                "versions": run.versions,
                "seed": run.seed,
                "seconds": run.record.seconds,
                "environment_steps": run.record.environment_steps,
                "acting_lag": run.record.lag.acting_mean,
                "training_lag": run.record.lag.training_mean,
                "evaluations": [
                    {
                        "environment_steps": each.environment_steps,
                        "seconds": each.seconds,
                        "mean_return": each.mean_return,
                    }
                    for each in run.record.evaluations
                ],
            }
            for run in study.runs
        ],
    }


def render(study: Study) -> str:
    """The page."""
    title = escape(study.name)
    whole = len(study.runs) == study.wanted
    kind, words = ("finished", "finished") if whole else ("unfinished", f"{len(study.runs)} of {study.wanted} runs")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · Paceline</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<p class="kind">Paceline study of policy lag <span class="state {kind}">{words}</span></p>
<h1>{title}</h1>
<p>Every collector acts so many policy versions behind the newest that it knows of. All else is equal but the seed.</p>
</header>
{"".join(_sections(study))}
<footer>Paceline {escape(__version__)} · made from the runs beside this page</footer>
</body>
</html>
"""


def draw_returns(study: Study, place: Place, label: str) -> bytes:
    """Return of evaluations: the mean over seeds for each lag, within the band of its seeds, as SVG."""
    with mpl.rc_context(FIGURE_STYLE):
        figure, axes = new_figure(height=4.2)
        colours = mpl.colormaps["viridis"]
        for index, row in enumerate(study.rows):
            colour = colours(0.9 * index / max(len(study.rows) - 1, 1))
            runs = [run for run in study.runs if run.versions == row.versions]
            for run in runs:
                axes.plot(*run.curve(place), color=colour, alpha=0.35, linewidth=0.8, marker="o", markersize=2)
            drawn = band(runs, place)
            if drawn is not None:
                grid, mean, lowest, highest = drawn
                axes.plot(grid, mean, color=colour, linewidth=2, label=f"lag {row.versions}")
                axes.fill_between(grid, lowest, highest, color=colour, alpha=0.12, linewidth=0)
        if study.threshold is not None:
            axes.axhline(study.threshold, color="#b23a48", linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xlabel(label)
        axes.set_ylabel("evaluation return (sum of rewards)")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside upper center", ncols=6, fontsize=9.5)
        return svg(figure)


def threshold_words(study: Study) -> str:
    """What the threshold is."""
    if study.threshold is None:
        return "There is no threshold: no evaluation was recorded."
    why = (
        "as asked for"
        if study.threshold_given
        else f"{DEFAULT_SHARE:.0%} of the way from the lowest first evaluation to the best one"
    )
    return f"The threshold is a return of {study.threshold:,.1f}, {why}."


def columns(row: Row) -> tuple[str, ...]:
    """A row of the study's table, as text, in the order of HEADINGS."""
    count = len(row.seeds)
    steps = f"{row.steps_to_threshold:,.0f}" if row.steps_to_threshold is not None else "not reached"
    return (
        str(row.versions),
        str(count),
        _UNKNOWN if row.acting_lag is None else f"{row.acting_lag:.2f}",
        _UNKNOWN if row.training_lag is None else f"{row.training_lag:.1f}",
        _spread_text(row.area_by_steps),
        _spread_text(row.area_by_seconds),
        _spread_text(row.last_return),
        steps if row.reached in (0, count) else f"{steps} ({row.reached} of {count} seeds)",
        duration_text(row.seconds),
    )


HEADINGS = (
    "lag held", "seeds", "acting lag", "training lag", "mean return by steps", "mean return by seconds", "last return",
    "steps to threshold", "running time",
)  # fmt: skip


def _sections(study: Study) -> Iterator[str]:
    nothing = "Nothing to draw yet: no run with evaluations is complete."
    have = bool(study.rows) and any(run.record.evaluations for run in study.runs)
    for title, place, label in (
        ("Return against environment steps", by_steps, "environment steps"),
        ("Return against seconds", by_seconds, "running time (s)"),
    ):
        caption = "Thick: the mean over seeds, within the band from lowest to highest. Thin: each run's evaluations."
        yield figure_section(title, caption, draw_returns(study, place, label) if have else None, nothing)
    if not study.rows:
        return
    head = "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS)
    body = "".join(table_row(*columns(row)) for row in study.rows)
    yield (
        f'<section><h2>By lag</h2><div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
        f"</table></div><p><small>{escape(_caption(study))}</small></p></section>\n"
    )


def _caption(study: Study) -> str:
    words = [
        "Lags are in policy versions. Mean return is the area under a run's evaluations divided by the range that all "
        "runs cover" + _range_text(study) + "; in brackets the lowest and the highest of the seeds.",
        threshold_words(study),
    ]
    return " ".join(words)


def _range_text(study: Study) -> str:
    if study.steps_range is None or study.seconds_range is None:
        return ""
    return (
        f" ({study.steps_range[0]:,.0f} to {study.steps_range[1]:,.0f} steps, "
        f"{study.seconds_range[0]:,.0f} to {study.seconds_range[1]:,.0f} s)"
    )


def _spread_text(spread: tuple[float, float, float] | None) -> str:
    if spread is None:
        return _UNKNOWN
    mean, lowest, highest = spread
    return f"{mean:,.1f}" if lowest == highest else f"{mean:,.1f} ({lowest:,.1f} to {highest:,.1f})"


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(path.suffix + ".new")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
