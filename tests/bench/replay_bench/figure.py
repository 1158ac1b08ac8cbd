"""All measures in one picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from replay_bench.measures import MEASURES, Result
from replay_bench.rounds import Figures

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

_COLOURS = {"goal": "#2a7f62", "pass": "#3b6fb6", "below": "#c0392b"}
_MEANINGS = {"goal": "goal reached", "pass": "floor holds", "below": "below the floor"}


def draw_figure(path: Path, machine: dict[str, str], figures: Figures) -> None:
    """Write a PNG: each ratio as a share of its goal, with the spread of the rounds and the floor."""
    results = [result for measure in MEASURES if (result := measure.result(figures)) is not None]
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.27 * len(results)), layout="constrained")
    for row, result in enumerate(results):
        low, middle, high, floor = (
            _share_of_goal(result, value)
            for value in (result.ratio.low, result.ratio.median, result.ratio.high, result.measure.floor)
        )
        colour = _COLOURS[result.verdict]
        axes.plot([low, high], [row, row], color=colour, linewidth=2, alpha=0.5)
        axes.plot([middle], [row], "o", color=colour, markersize=6)
        axes.plot([floor, floor], [row - 0.35, row + 0.35], color="black", linewidth=1.2)
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    ticks = [0.25, 0.5, 0.75, 1, 1.5, 2, 3]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(results)), [f"{each.measure.name}   {each.ratio.median:.2f}" for each in results])
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("share of the goal (dashed: 1); dot: median, bar: all rounds, tick: the floor")
    axes.set_title(f"Replay: {machine['cpu']}, {machine['cores']} cores, commit {machine['commit']}", fontsize=10)
    handles = [Line2D([], [], marker="o", linestyle="", color=_COLOURS[word]) for word in _COLOURS]
    figure.legend(handles, [_MEANINGS[word] for word in _COLOURS], loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _share_of_goal(result: Result, ratio: float) -> float:
    goal = result.measure.goal
    return goal / ratio if result.measure.lower_is_better else ratio / goal
