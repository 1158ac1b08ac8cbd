"""Reads the pages of a run that a Prometheus scrapes, through its HTTP API."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.config import redact_url
from paceline.errors import ConfigError, InvalidInputError, NotFoundError, UnavailableError
from paceline.local.scrape import Page

ANSWER_SECONDS = 10.0
_SERVICES = ("replay", "learner", "endpoint", "collector", "evaluator")
_ONE_OF_A_RUN = "paceline_learner_step"


class Prometheus:
    """A Prometheus server that scrapes a run."""

    def __init__(self, url: str, *, job: str | None = None, run: str | None = None) -> None:
        """`job`: a regular expression for the label of that name; `run`: the value of the label `run`.

        Raises:
            InvalidInputError: the URL is none.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInputError(
                f"{redact_url(url)} is no URL of a Prometheus server: expected one such as http://127.0.0.1:9090"
            )
        self.shown = redact_url(url)
        self._headers = {"Accept": "application/json"}
        if parts.username is not None:
            user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        place = parts.netloc.rpartition("@")[2]
        self._url = f"{parts.scheme}://{place}{parts.path.rstrip('/')}/api/v1/query"
        self._matchers = [f'{name}{operator}"{_quoted(value)}"' for name, operator, value in _chosen(job, run)]

    def read_pages(self, names: Iterable[str], *, ago: str | None = None) -> dict[str, Page]:
        """The series of these names now, or `ago` ("10m"), as one page for each process, by a name for it.

        Raises:
            UnavailableError: the server does not answer. InvalidInputError: it is no Prometheus, or refuses.
            NotFoundError: it has nothing of Paceline. ConfigError: it has several runs.
        """
        result = self._query(self._selector(names) + (f" offset {ago}" if ago else ""))
        targets: dict[tuple[str, str, str], Page] = {}
        for entry in result:
            labels = dict(entry["metric"])
            name = labels.pop("__name__")
            target = (name.split("_")[1], labels.pop("job", ""), labels.pop("instance", ""))
            targets.setdefault(target, Page()).samples.append((name, labels, float(entry["value"][1])))
        if ago is None:
            self._require_one_run(targets)
        return {_name(target, targets): page for target, page in sorted(targets.items()) if target[0] in _SERVICES}

    def _selector(self, names: Iterable[str]) -> str:
        return "{" + ",".join([f'__name__=~"{"|".join(sorted(names))}"', *self._matchers]) + "}"

    def _require_one_run(self, targets: Mapping[tuple[str, str, str], Page]) -> None:
        if not targets:
            chosen = f" with {', '.join(self._matchers)}" if self._matchers else ""
            raise NotFoundError(
                f"{self.shown} has no metric of Paceline{chosen}: expected that it scrapes the services of a run that "
                "goes on; see Status, Targets on its page"
            )
        learners = [
            (target, labels)
            for target, page in targets.items()
            for name, labels, _ in page.samples
            if name == _ONE_OF_A_RUN
        ]
        if len(learners) > 1:
            described = "; ".join(
                ", ".join(
                    f'{key}="{value}"'
                    for key, value in {"job": target[1], "instance": target[2], **labels}.items()
                    if value
                )
                for target, labels in learners
            )
            raise ConfigError(
                f"{self.shown} scrapes {len(learners)} runs: expected one; choose it by --job (a regular expression) "
                f"or --run (the label run). Their learners: {described}"
            )

    def _query(self, expression: str) -> list[dict[str, Any]]:
        # By POST: the names make it longer than some proxies let a URL be.
        body = urllib.parse.urlencode({"query": expression}).encode()
        request = urllib.request.Request(self._url, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read()
            if error.code >= 500:
                raise UnavailableError(f"{self.shown} answers {error.code}: {_message(text)}") from error
            raise InvalidInputError(
                f"{self.shown} answers {error.code}: {_message(text)}; expected the address of a Prometheus server, "
                "below which api/v1/query is, such as http://127.0.0.1:9090"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise UnavailableError(
                f"{self.shown} does not answer: {reason}; expected the URL of a Prometheus server that runs"
            ) from error
        answer = _parse(text)
        if answer is None or answer.get("status") != "success":
            raise InvalidInputError(
                f"{self.shown} does not answer as a Prometheus does: expected the URL of one, such as "
                "http://127.0.0.1:9090, and not of a /metrics page"
            )
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


def _chosen(job: str | None, run: str | None) -> list[tuple[str, str, str]]:
    chosen = [("job", "=~", job), ("run", "=", run)]
    return [(name, operator, value) for name, operator, value in chosen if value is not None]


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')


def _name(target: tuple[str, str, str], targets: Iterable[tuple[str, str, str]]) -> str:
    """A process by its service, and by its address where there may be several."""
    service, _, instance = target
    alone = sum(other[0] == service for other in targets) == 1
    return service if alone and service != "collector" else f"{service} {instance}"


def _message(text: bytes) -> str:
    answer = _parse(text)
    return str(answer["error"]) if answer and "error" in answer else text[:200].decode(errors="replace").strip()


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None
