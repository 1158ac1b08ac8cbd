"""What runs that differ in one thing say together: return against steps and seconds, areas, steps to a threshold.

Runs are compared by their evaluations over the range that all of them cover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.report.record import Evaluation, RunRecord

Place = Callable[[Evaluation], float]
DEFAULT_SHARE = 0.9
"""Of the way from the first evaluations to the best: the threshold, where nobody names one."""
_GRID = 100


def by_steps(evaluation: Evaluation) -> float:
    """Where an evaluation is, by environment steps."""
    return evaluation.environment_steps


def by_seconds(evaluation: Evaluation) -> float:
    """Where an evaluation is, by running time."""
    return evaluation.seconds


@dataclass(frozen=True)
class StudyRun:
    """One run that is complete: the lag that was held, its seed, and its record."""

    versions: int
    seed: int
    record: RunRecord

    def curve(self, place: Place) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Places and mean returns of its evaluations, in order."""
        evaluations = sorted(self.record.evaluations, key=place)
        return (
            np.array([place(evaluation) for evaluation in evaluations], np.float64),
            np.array([evaluation.mean_return for evaluation in evaluations], np.float64),
        )


@dataclass(frozen=True)
class Row:
    """The runs with one lag, in numbers: means over seeds, and the lowest and the highest; None where not known."""

    versions: int
    seeds: tuple[int, ...]
    acting_lag: float | None
    """Versions, as measured."""
    training_lag: float | None
    seconds: float
    """Running time of a run."""
    area_by_steps: tuple[float, float, float] | None
    """Area under the curve over the common range, divided by the range: the mean return over it. Mean, lowest,
    highest."""
    area_by_seconds: tuple[float, float, float] | None
    last_return: tuple[float, float, float] | None
    steps_to_threshold: float | None
    """Mean over the seeds that reach it."""
    reached: int
    """Seeds that do."""


@dataclass(frozen=True)
class Study:
    """The runs of a study that are complete, and what they say together."""

    name: str
    runs: tuple[StudyRun, ...]
    wanted: int
    """Runs that the study is made of."""
    threshold: float | None
    threshold_given: bool
    steps_range: tuple[float, float] | None
    seconds_range: tuple[float, float] | None
    rows: tuple[Row, ...]


def make_study(name: str, runs: Sequence[StudyRun], *, wanted: int, threshold: float | None) -> Study:
    """Compare the runs; `threshold` None: DEFAULT_SHARE of the way from the first evaluations to the best."""
    chosen = _threshold(runs) if threshold is None else threshold
    steps_range, seconds_range = common_range(runs, by_steps), common_range(runs, by_seconds)
    rows = tuple(
        _row([run for run in runs if run.versions == versions], chosen, steps_range, seconds_range)
        for versions in sorted({run.versions for run in runs})
    )
    return Study(name, tuple(runs), wanted, chosen, threshold is not None, steps_range, seconds_range, rows)


def common_range(runs: Sequence[StudyRun], place: Place) -> tuple[float, float] | None:
    """From the latest first evaluation to the earliest last one; None where that is no range."""
    places = [run.curve(place)[0] for run in runs]
    if not places or any(len(each) == 0 for each in places):
        return None
    first, last = max(each[0] for each in places), min(each[-1] for each in places)
    return (float(first), float(last)) if last > first else None


def mean_return(run: StudyRun, place: Place, between: tuple[float, float]) -> float:
    """Area under a run's curve, straight from evaluation to evaluation, divided by the width of the range."""
    places, returns = run.curve(place)
    inner = places[(places > between[0]) & (places < between[1])]
    grid = np.array([between[0], *inner, between[1]])
    return float(np.trapezoid(np.interp(grid, places, returns), grid) / (between[1] - between[0]))


def steps_to(run: StudyRun, threshold: float) -> float | None:
    """Environment steps of the first evaluation that reaches the threshold."""
    places, returns = run.curve(by_steps)
    reached = places[returns >= threshold]
    return float(reached[0]) if len(reached) else None


def band(
    runs: Sequence[StudyRun], place: Place
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
    """Places, mean, lowest and highest return of runs with the same lag, over the range that they all cover."""
    between = common_range(runs, place)
    if between is None:
        return None
    grid = np.linspace(*between, _GRID)
    returns = np.array([np.interp(grid, *run.curve(place)) for run in runs])
    return grid, returns.mean(axis=0), returns.min(axis=0), returns.max(axis=0)


def _threshold(runs: Sequence[StudyRun]) -> float | None:
    curves = [run.curve(by_steps)[1] for run in runs]
    known = [returns for returns in curves if len(returns)]
    if not known:
        return None
    start, best = min(returns[0] for returns in known), max(returns.max() for returns in known)
    return float(start + DEFAULT_SHARE * (best - start))


def _row(
    runs: Sequence[StudyRun],
    threshold: float | None,
    steps_range: tuple[float, float] | None,
    seconds_range: tuple[float, float] | None,
) -> Row:
    reached = [] if threshold is None else [steps for run in runs if (steps := steps_to(run, threshold)) is not None]
    return Row(
        versions=runs[0].versions,
        seeds=tuple(sorted(run.seed for run in runs)),
        acting_lag=_mean([run.record.lag.acting_mean for run in runs]),
        training_lag=_mean([run.record.lag.training_mean for run in runs]),
        seconds=math.fsum(run.record.seconds for run in runs) / len(runs),
        area_by_steps=None if steps_range is None else _spread([mean_return(r, by_steps, steps_range) for r in runs]),
        area_by_seconds=(
            None if seconds_range is None else _spread([mean_return(r, by_seconds, seconds_range) for r in runs])
        ),
        last_return=_spread([run.record.last.mean_return for run in runs if run.record.last is not None]),
        steps_to_threshold=math.fsum(reached) / len(reached) if reached else None,
        reached=len(reached),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    return (math.fsum(values) / len(values), min(values), max(values)) if values else None
