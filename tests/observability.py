"""A real Prometheus over given targets, and what dashboards and rules ask of it."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.waiting import wait_until
from paceline.process import dying_with_parent

ROOT = Path(__file__).parents[1]
DASHBOARDS = ROOT / "helm/paceline/files/dashboards"
RULES = ROOT / "helm/paceline/files/rules/paceline.yaml"

_LISTENING = re.compile(r'msg="Listening on" address=127\.0\.0\.1:(\d+)')
_MINUTES = re.compile(r"\b(\d+)m\b")
_AGE_BOUND = re.compile(r"(_age_seconds\) > )(\d+)\b")
_VARIABLES = {"$__rate_interval": "1m", "$job": ".+", "$instance": ".+"}
REQUEST_SECONDS = 10.0


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test where it is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine; `apt-get install prometheus` brings it")
    return found


def hurried(rules: str) -> str:
    """The text of a rule file with seconds for its minutes, so that a test need not wait for them.

    Ages in seconds that it compares with are a sixtieth too. Shares, versions and counts stay as they are.
    """
    return _AGE_BOUND.sub(lambda match: f"{match[1]}{int(match[2]) / 60:g}", _MINUTES.sub(r"\1s", rules))


def alert_rules() -> dict[str, dict[str, Any]]:
    """The alert rules of the rule file, by their names."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


class QueryError(Exception):
    """Prometheus did not accept a query, or did not evaluate it."""


@dataclass(frozen=True)
class Sample:
    """One series of an answer, with its newest value."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Query:
    """A query of a dashboard, as Grafana would send it when everything is chosen."""

    board: str
    panel: str
    expression: str


def panels(board: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The panels of a dashboard that show something: rows left out."""
    return (panel for panel in board["panels"] if panel["type"] not in ("row", "text"))


def panel_queries() -> Iterator[Query]:
    """Every query of every dashboard in the chart."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        for panel in panels(board):
            for target in panel["targets"]:
                yield Query(path.stem, panel["title"], _everything(target["expr"]))


def rule_queries() -> Iterator[Query]:
    """Every expression of the rule file."""
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield Query(RULES.name, rule.get("alert") or rule["record"], rule["expr"])


def _everything(expression: str) -> str:
    for variable, value in _VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


Targets = Mapping[str, Sequence[str]]
"""job -> "host:port" of each /metrics."""


class Prometheus:
    """A running server with its data in a folder, on a free loopback port. Use it with `with`."""

    def __init__(
        self,
        folder: Path,
        targets: Targets,
        *,
        releases: Mapping[str, Targets] | None = None,
        rules: str | None = None,
        interval: str = "1s",
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, and wait until it answers.

        Args:
            folder: gets its configuration, log and data.
            targets: what to scrape.
            releases: what else to scrape: targets by the label `release` that they get, as a chart would label them.
            rules: the text of a rule file.
            interval: between two scrapes, and between two evaluations of the rules.
            labels: on every series, as an operator's scrape would add them.
        """
        binary = tool("prometheus")
        jobs: dict[str, list[dict[str, Any]]] = {}
        for release, scraped in [(None, targets), *(releases or {}).items()]:
            added = {**(labels or {}), **({} if release is None else {"release": release})}
            for job, addresses in scraped.items():
                jobs.setdefault(job, []).append({"targets": list(addresses), "labels": added})
        self._target_count = sum(len(group["targets"]) for groups in jobs.values() for group in groups)
        folder.mkdir(parents=True, exist_ok=True)
        configuration: dict[str, Any] = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
            "scrape_configs": [{"job_name": job, "static_configs": groups} for job, groups in jobs.items()],
        }
        if rules is not None:
            (folder / "rules.yaml").write_text(rules, encoding="utf-8")
            configuration["rule_files"] = ["rules.yaml"]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
        self.log_path = folder / "prometheus.log"
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                dying_with_parent(
                    [
                        binary,
                        f"--config.file={folder / 'prometheus.yaml'}",
                        f"--storage.tsdb.path={folder / 'data'}",
                        "--web.listen-address=127.0.0.1:0",
                    ]
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self.port = int(wait_until(self._find_port))
            wait_until(self._is_ready)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it; its data stay in the folder."""
        self._process.terminate()
        try:
            self._process.wait(REQUEST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def query(self, expression: str) -> list[Sample]:
        """The value of an expression now. Raises QueryError."""
        result = self._ask("query", query=expression)
        if result["resultType"] != "vector":
            raise QueryError(f"{expression!r} gives a {result['resultType']}: expected a vector")
        return [Sample(entry["metric"], float(entry["value"][1])) for entry in result["result"]]

    def formatted(self, expression: str) -> str:
        """The expression as Prometheus writes what it understood, without running it. Raises QueryError."""
        return str(self._ask("format_query", query=expression))

    def firing(self) -> dict[str, list[Mapping[str, str]]]:
        """The labels of the alerts that fire now, by their names."""
        firing: dict[str, list[Mapping[str, str]]] = {}
        for alert in self._ask("alerts")["alerts"]:
            if alert["state"] == "firing":
                firing.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return firing

    def wait_for_scrapes(self, count: int) -> None:
        """Wait until every target was scraped `count` times within the last minute."""
        wait_until(lambda: len(self.query(f"sum_over_time(up[1m]) >= {count}")) >= self._target_count)

    def _ask(self, path: str, **parameters: str) -> Any:
        answer = json.loads(self._get(f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}")[1])
        if answer["status"] != "success":
            raise QueryError(f"{parameters or path}: {answer['error']}")
        return answer["data"]

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def _find_port(self) -> str | None:
        text = self.log_path.read_text(encoding="utf-8")
        assert self._process.poll() is None, text
        found = _LISTENING.search(text)
        return found[1] if found else None

    def _is_ready(self) -> bool:
        return self._get("/-/ready")[0] == 200
