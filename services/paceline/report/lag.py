"""What `lag.json` in the folder of a run says, read leniently: acting lag, and what the training lag is made of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ACTING = "paceline_collector_acting_lag_versions"
_TRAINING = "paceline_learner_training_lag_versions"


@dataclass(frozen=True)
class LagRecord:
    """None, or empty, where it is not known."""

    acting_steps: Mapping[float, float] = field(default_factory=dict)
    """Environment steps by the upper bound of their lag's bucket, in policy versions."""
    acting_mean: float | None = None
    """Versions, over environment steps."""
    training_mean: float | None = None
    """Versions, over rows trained on."""
    part_versions: Mapping[str, float] = field(default_factory=dict)
    """Training lag of a row on average, by part; their sum is the mean."""
    part_seconds: Mapping[str, float] = field(default_factory=dict)
    ending: str | None = None
    """How the run, or its last part, ended: complete, stopped or failed; None: it goes on, or nobody noted it."""
    problem: str = ""
    """Of one that failed, in a sentence."""


def read_lag(path: Path, missing: list[str]) -> LagRecord:
    """Read the file; what it lacks is told in `missing`."""
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        missing.append("lag.json is not there: acting lag, and what the training lag is made of, are unknown.")
        return LagRecord()
    except (OSError, ValueError) as error:
        missing.append(f"lag.json cannot be read: {error}.")
        return LagRecord()
    samples = list(_samples(tree))
    if not samples:
        missing.append("lag.json holds no figures: acting lag, and what the training lag is made of, are unknown.")
    rows = _total(samples, "paceline_learner_trained_rows_total") or _total(samples, f"{_TRAINING}_count")
    return LagRecord(
        acting_steps=_buckets(samples, _ACTING),
        acting_mean=_mean(samples, _ACTING),
        training_mean=_mean(samples, _TRAINING),
        part_versions=_parts(samples, "paceline_learner_training_lag_part_versions_total", rows),
        part_seconds=_parts(samples, "paceline_learner_row_part_seconds_total", rows),
        ending=_text(tree, "ending"),
        problem=_text(tree, "problem") or "",
    )


def _text(tree: Any, key: str) -> str | None:
    value = tree.get(key) if isinstance(tree, Mapping) else None
    return value if isinstance(value, str) else None


_Sample = tuple[str, Mapping[str, Any], float]


def _samples(tree: Any) -> Iterator[_Sample]:
    entries = tree.get("totals") if isinstance(tree, Mapping) else None
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, Mapping):
            continue
        name, labels, value = entry.get("name"), entry.get("labels"), entry.get("value")
        if not isinstance(name, str) or not isinstance(labels, Mapping) or not isinstance(value, int | float):
            continue
        if math.isfinite(value):
            yield name, labels, float(value)


def _total(samples: list[_Sample], name: str) -> float | None:
    found = [value for sample, _, value in samples if sample == name]
    return math.fsum(found) if found else None


def _mean(samples: list[_Sample], name: str) -> float | None:
    total, count = (_total(samples, f"{name}_{suffix}") for suffix in ("sum", "count"))
    return None if total is None or not count else total / count


def _buckets(samples: list[_Sample], name: str) -> dict[float, float]:
    accumulated: dict[float, float] = {}
    for sample, labels, value in samples:
        if sample == f"{name}_bucket":
            try:
                accumulated[float(labels["le"])] = value
            except (KeyError, TypeError, ValueError):
                continue
    bounds = sorted(accumulated)
    below = [0.0, *(accumulated[bound] for bound in bounds)]
    counts = {bound: accumulated[bound] - before for bound, before in zip(bounds, below, strict=False)}
    return counts if any(counts.values()) else {}


def _parts(samples: list[_Sample], name: str, rows: float | None) -> dict[str, float]:
    if not rows:
        return {}
    return {str(labels.get("part")): value / rows for sample, labels, value in samples if sample == name}
