"""What is wrong with a query, by the metric schema: unknown names, rates of gauges, quantiles without buckets."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from paceline.schema import SERIES

COUNTER_FUNCTIONS = {"rate", "irate", "increase", "resets"}
PRESENCE_FUNCTIONS = {"count", "absent", "group"}
"""These ask whether a series is there, so that its kind does not matter."""
TARGET_LABELS = {
    "job",
    "instance",
    "namespace",
    "release",
    "alertname",
    "alertstate",
    "severity",
    "le",
    "kind",
    "where",
}
FROM_PROMETHEUS = {"up", "ALERTS"}

_KEYWORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right) ?\(([^)]*)\)")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_TOKEN = re.compile(r"(?P<number>\d[\w.]*)|(?P<name>[A-Za-z_:][\w:]*)|(?P<mark>\[\]|[()])|(?P<other>\S)")
_QUANTILE = re.compile(r"histogram_quantile\(\s*[\d.]+,\s*sum by \(([^)]*)\)")


@dataclass(frozen=True)
class Selector:
    """One use of a series."""

    series: str
    function: str
    """The innermost call around it, or the empty string."""
    has_range: bool
    within_quantile: bool


def problems(expression: str, recorded: Collection[str] = ()) -> list[str]:
    """What is wrong with an expression that Prometheus has parsed and formatted; `recorded` names exist as well."""
    found = [problem for selector in selectors(expression) for problem in _problems_of(selector, recorded)]
    if expression.count("histogram_quantile") != sum(
        "le" in _words(labels) for labels in _QUANTILE.findall(expression)
    ):
        found.append("histogram_quantile does not sum by le")
    known = TARGET_LABELS | {
        label.name for use in selectors(expression) if use.series in SERIES for label in SERIES[use.series].labels
    }
    grouped = {label for _, labels in _GROUPING.findall(_STRING.sub('""', expression)) for label in _words(labels)}
    found += [f"no metric here has the label {label}" for label in sorted(grouped - known)]
    for name, matchers in re.findall(r"([\w:]+)\{([^}]*)\}", expression):
        if name in SERIES:
            found += _wrong_matchers(name, matchers)
    return found


def selectors(expression: str) -> Iterator[Selector]:
    """Every use of a series in a formatted expression."""
    text = re.sub(r"\{[^}]*\}", "", _STRING.sub('""', expression))
    text = re.sub(r"\[[^\]]*\]", "[]", _GROUPING.sub("", text))
    text = re.sub(r"\boffset -?\w+", "", text)
    tokens = [(match.lastgroup, match.group()) for match in _TOKEN.finditer(text)]
    calls: list[str] = []
    for number, (kind, token) in enumerate(tokens):
        following = tokens[number + 1][1] if number + 1 < len(tokens) else ""
        if token == "(":
            before, name = tokens[number - 1] if number else ("", "")
            is_call = before == "name" and name.lower() not in _KEYWORDS
            calls.append(name if is_call else (calls[-1] if calls else ""))
        elif token == ")":
            calls.pop()
        elif kind == "name" and following != "(" and token.lower() not in _KEYWORDS:
            yield Selector(token, calls[-1] if calls else "", following == "[]", "histogram_quantile" in calls)


def _problems_of(use: Selector, recorded: Collection[str]) -> Iterator[str]:
    if use.series in recorded or use.series in FROM_PROMETHEUS:
        return
    if use.series not in SERIES:
        yield f"{use.series} is not in the schema"
        return
    counts = SERIES[use.series].kind != "gauge"
    if use.function in COUNTER_FUNCTIONS and not counts:
        yield f"{use.function} of the gauge {use.series}"
    elif counts and use.function not in COUNTER_FUNCTIONS | PRESENCE_FUNCTIONS:
        yield f"{use.series} counts: its value says nothing without rate or increase"
    if use.within_quantile and not use.series.endswith("_bucket"):
        yield f"a quantile of {use.series}, which are no buckets"


def _wrong_matchers(series: str, matchers: str) -> Iterator[str]:
    labels = {label.name: label for label in SERIES[series].labels}
    for name, operator, value in _MATCHER.findall(matchers):
        if name not in labels and name not in TARGET_LABELS:
            yield f"{series} has no label {name}"
        elif name in labels and labels[name].values:
            wanted = value.split("|") if "~" in operator else [value]
            yield from (f"{series}: {name} is never {word}" for word in wanted if word not in labels[name].values)


def _words(labels: str) -> list[str]:
    return [label.strip() for label in labels.split(",") if label.strip()]
