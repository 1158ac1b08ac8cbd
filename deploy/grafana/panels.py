"""Panels and boards of Grafana: what all dashboards share.

A panel takes its unit and its description from the metric schema, so that both are written once. All of its queries are
limited to the job and instance that were chosen, and rates are taken over the window that Grafana works out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.schema import METRICS, SERIES, Unit

SELECTED = 'job=~"$job", instance=~"$instance"'
NO_TRAFFIC = "no traffic"
COLUMNS = 24
HEIGHT = 8

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_UNITS: dict[Unit, str] = {"seconds": "s", "bytes": "bytes", "ratio": "none", "flag": "bool_yes_no", "return": "none"}
_RATES: dict[Unit, str] = {"bytes": "Bps", "seconds": "suffix: s/s"}
_SHARE = "percentunit"

Kind = Literal["timeseries", "stat", "heatmap", "table"]


@dataclass(frozen=True)
class Query:
    """A query, the metric that explains it, the unit of its values, and how its series are named."""

    expression: str
    metric: str
    unit: str
    legend: str
    is_named: bool = True
    """Whether the legend tells this query from the others of its panel."""


@dataclass(frozen=True)
class Panel:
    """What is shown in one place."""

    title: str
    queries: tuple[Query, ...]
    description: str
    unit: str
    kind: Kind
    width: int
    stacked: bool
    signed: bool


@dataclass(frozen=True)
class Board:
    """A dashboard: sections of panels, from top to bottom."""

    uid: str
    title: str
    description: str
    sections: Sequence[tuple[str, Sequence[Panel]]]


def panel(
    title: str,
    *queries: Query | Sequence[Query],
    description: str = "",
    note: str = "",
    unit: str = "",
    kind: Kind = "timeseries",
    width: int = HEIGHT,
    stacked: bool = False,
    signed: bool = False,
) -> Panel:
    """A panel; `signed`: its values go below 0.

    The description, if none is given, is what the schema says, and the `note` after it.

    Raises:
        ValueError: the queries differ in their unit, and none is given.
    """
    flat = [query for group in queries for query in ([group] if isinstance(group, Query) else group)]
    units = {query.unit for query in flat}
    if not unit and len(units) > 1:
        raise ValueError(f"panel {title!r} mixes the units {sorted(units)}: expected one, or `unit`")
    if len({query.metric for query in flat}) > 1:
        flat = [query if query.is_named else replace(query, legend=_thing(query)) for query in flat]
    description = "\n\n".join(filter(None, (description or _explain(flat), note)))
    return Panel(title, tuple(flat), description, unit or flat[0].unit, kind, width, stacked, signed)


def value(series: str, *by: str, how: str = "max", where: str = "", legend: str = "") -> Query:
    """A gauge now, for each value of the labels `by`."""
    unit, query = SERIES[series].unit, _gathered(how, by, _select(series, where))
    return Query(query, series, _unit(unit), legend or _legend(by), is_named=bool(legend))


def rate(series: str, *by: str, where: str = "", legend: str = "") -> Query:
    """How much a counter grows in a second, for each value of the labels `by`."""
    metric = SERIES[series]
    unit = _RATES.get(metric.unit, f"suffix: {metric.unit}/s")
    return Query(_summed_rate(series, by, where), metric.name, unit, legend or _legend(by), is_named=bool(legend))


def share(series: str, label: str, *, where: str = "", legend: str = "") -> Query:
    """What part of a counter's growth each value of a label has; `where` leaves only some of the values."""
    by = () if where else (label,)
    part, whole = _summed_rate(series, by, where), _summed_rate(series)
    divide = "/" if where else "/ on () group_left ()"
    return Query(f"{part} {divide} {whole}", series, _SHARE, legend or _legend(by))


def each(series: str, divisor: str, *by: str, legend: str = "") -> Query:
    """Growth of a counter for each unit that another one grows by."""
    metric = SERIES[series]
    divide = "/ on () group_left ()" if by else "/"
    unit = _SHARE if metric.unit == SERIES[divisor].unit else _unit(metric.unit)
    expression = f"{_summed_rate(series, by)} {divide} {_summed_rate(divisor)}"
    return Query(expression, metric.name, unit, legend or _legend(by))


def quantiles(histogram: str, *fractions: float, by: str = "") -> list[Query]:
    """Quantiles of a histogram, worked out from its buckets."""
    labels = (by, "le") if by else ("le",)
    name = f" {{{{{by}}}}}" if by else ""
    return [
        Query(
            f"histogram_quantile({fraction}, {_summed_rate(f'{histogram}_bucket', labels)})",
            histogram,
            _unit(METRICS[histogram].unit),
            f"p{fraction * 100:g}{name}",
            is_named=False,
        )
        for fraction in fractions
    ]


def heat(histogram: str) -> Query:
    """How many observations fell into each bucket of a histogram."""
    expression = f"sum by (le) (increase({histogram}_bucket{{{SELECTED}}}[$__rate_interval]))"
    return Query(expression, histogram, _unit(METRICS[histogram].unit), "{{le}}")


def render(board: Board) -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, section in board.sections:
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": _place(0, top, COLUMNS, 1)})
        top, left = top + 1, 0
        for shown in section:
            if left + shown.width > COLUMNS:
                top, left = top + HEIGHT, 0
            panels.append(_render_panel(shown, _place(left, top, shown.width, HEIGHT)))
            left += shown.width
        top += HEIGHT
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["paceline"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "links": [
            {"type": "dashboards", "title": "Paceline", "tags": ["paceline"], "asDropdown": True, "includeVars": True}
        ],
        "templating": {"list": _variables()},
        "panels": [{"id": number, **shown} for number, shown in enumerate(panels, 1)],
    }


def _render_panel(shown: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": shown.unit,
        "noValue": NO_TRAFFIC,
        # A quantile of nothing is NaN.
        "mappings": [
            {"type": "special", "options": {"match": match, "result": {"text": NO_TRAFFIC}}}
            for match in ("nan", "null")
        ],
    }
    if not shown.signed:
        defaults["min"] = 0
    options: dict[str, Any] = {}
    if shown.kind == "timeseries":
        stacking = {"mode": "normal" if shown.stacked else "none"}
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 30 if shown.stacked else 0, "stacking": stacking}
        options = {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif shown.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "textMode": "auto"}
    elif shown.kind == "heatmap":
        options = {"calculate": False, "yAxis": {"unit": shown.unit}, "color": {"scheme": "Blues"}}
    return {
        "type": shown.kind,
        "title": shown.title,
        "description": shown.description,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "format": {"heatmap": "heatmap", "table": "table"}.get(shown.kind, "time_series"),
                "instant": shown.kind == "table",
                "range": shown.kind != "table",
            }
            for number, query in enumerate(shown.queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    def labels(name: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "label": name,
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": {"text": ["All"], "value": ["$__all"]},
        }

    return [
        {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"},
        labels("job", "label_values(paceline_build_info, job)"),
        labels("instance", 'label_values(paceline_build_info{job=~"$job"}, instance)'),
    ]


def _explain(queries: Iterable[Query]) -> str:
    metrics = dict.fromkeys(query.metric for query in queries)
    return "\n\n".join(
        f"{metric.meaning} Bad: {metric.bad}. Do: {metric.remedy}." for metric in (METRICS[name] for name in metrics)
    )


def _unit(unit: Unit) -> str:
    return _UNITS.get(unit, f"suffix: {unit}")


def _thing(query: Query) -> str:
    words = [word for word in query.metric.split("_")[2:] if word != "total"]
    return " ".join(words if query.legend == "all" else [*words, query.legend])


def _legend(by: Sequence[str]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in by) or "all"


def _select(series: str, where: str = "") -> str:
    return f"{series}{{{', '.join(filter(None, [SELECTED, where]))}}}"


def _gathered(how: str, by: Sequence[str], expression: str) -> str:
    return f"{how} by ({', '.join(by)}) ({expression})" if by else f"{how}({expression})"


def _summed_rate(series: str, by: Sequence[str] = (), where: str = "") -> str:
    return _gathered("sum", by, f"rate({_select(series, where)}[$__rate_interval])")


def _place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}
