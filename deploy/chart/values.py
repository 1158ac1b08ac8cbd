"""Writes what follows from the chart's values: their schema, their table, and the chart's copies of the presets.

    python deploy/chart/values.py

values.yaml is the source: its defaults give the types, its `# --` comments the words. The schema of `config` is that of
the settings' own models, so that a misspelt setting is refused before anything is installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from paceline.config import Config

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/paceline"
PRESETS = ROOT / "configs"

POSITIVE = {"type": "integer", "minimum": 1}
NOT_NEGATIVE = {"type": "integer", "minimum": 0}
WANTED = {"enum": ["auto", "always", "never"]}
RESOURCES = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "requests": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
        "limits": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
        "claims": {"type": "array"},
    },
}

FREE: dict[str, Any] = {"type": "object"}
"""A part of a manifest that the chart hands on as it is."""

KNOWN: dict[str, Any] = {
    "config": {"$ref": "#/$defs/Config"},
    "preset": {"enum": ["", *sorted(path.stem for path in PRESETS.glob("*.yaml"))]},
    "images.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "learner.replicas": {"const": 1},
    "collectors.replicas": POSITIVE,
    "collectors.autoscaling.kind": {"enum": ["none", "hpa", "keda"]},
    "collectors.autoscaling.minReplicas": POSITIVE,
    "collectors.autoscaling.maxReplicas": POSITIVE,
    "collectors.autoscaling.hpa.targetCPUUtilizationPercentage": POSITIVE,
    "collectors.autoscaling.keda.starvedShare": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "collectors.podDisruptionBudget.maxUnavailable": {"type": ["integer", "string"]},
    "relay.replicas": POSITIVE,
    "redis.mode": {"enum": ["bundled", "external"]},
    "redis.appendfsync": {"enum": ["everysec", "always"]},
    "redis.external.url": {"type": "string", "pattern": "^(rediss?://.+)?$"},
    "security.certificates.source": {"enum": ["auto", "certManager", "chart", "existing"]},
    "security.certificates.issuerRef": FREE,
    "monitoring.podMonitor.enabled": WANTED,
    "monitoring.prometheusRule.enabled": WANTED,
    "monitoring.dashboards.labels": FREE,
    "global": {"type": "object", "description": "Shared with other charts of an umbrella chart; more keys are theirs."},
}
"""What a default does not say, by the value's path."""

KNOWN_LEAVES: dict[str, Any] = {
    "resources": RESOURCES,
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "fullnameOverride": {"type": "string", "maxLength": 40},
}
"""As KNOWN, by the last part of the path."""


def schema() -> dict[str, Any]:
    """The schema of the values."""
    models = _without_defaults(Config.model_json_schema(ref_template="#/$defs/{model}"))
    definitions = {**models.pop("$defs"), "Config": models}
    values = _schema_of(yaml.safe_load(_text()), "", dict(descriptions()))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **values, "$defs": definitions}


def table() -> str:
    """The values as Markdown: key, default, meaning."""
    words, lines = dict(descriptions()), [
        "# Values of the chart",
        "",
        "Written from `helm/paceline/values.yaml` by `make chart`.",
        "",
        "| value | default | meaning |",
        "| --- | --- | --- |",
    ]  # fmt: skip
    for path, value in _leaves(yaml.safe_load(_text()), ""):
        default = json.dumps(value).replace("|", "\\|")
        lines.append(f"| `{path}` | `{default}` | {words[path].replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def descriptions() -> Iterator[tuple[str, str]]:
    """Path and `# --` comment of each value that has one."""
    parents: list[tuple[int, str]] = []
    words: list[str] = []
    for line in _text().splitlines():
        stripped = line.strip()
        if stripped.startswith("# --"):
            words = [stripped.removeprefix("# --").strip()]
        elif stripped.startswith("#") and words:
            words.append(stripped.removeprefix("#").strip())
        elif match := re.match(r"(\s*)([A-Za-z]\w*):", line):
            indent = len(match[1])
            parents = [parent for parent in parents if parent[0] < indent]
            parents.append((indent, match[2]))
            if words:
                yield ".".join(name for _, name in parents), " ".join(words)
            words = []
        else:
            words = []


def files() -> Iterator[tuple[Path, str]]:
    """Each file that this script writes, and what is in it."""
    yield CHART / "values.schema.json", json.dumps(schema(), indent=1) + "\n"
    yield ROOT / "docs/chart.md", table()
    for preset in sorted(PRESETS.glob("*.yaml")):
        yield CHART / "files/presets" / preset.name, preset.read_text(encoding="utf-8")


def _text() -> str:
    return (CHART / "values.yaml").read_text(encoding="utf-8")


def _known(path: str) -> dict[str, Any] | None:
    return KNOWN.get(path, KNOWN_LEAVES.get(path.rpartition(".")[2]))


def _is_section(value: Any, path: str) -> bool:
    return isinstance(value, dict) and bool(value) and (path == "global" or _known(path) is None)


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if _is_section(value, path):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _schema_of(value: Any, path: str, words: dict[str, str]) -> dict[str, Any]:
    known = _known(path) if path else None
    said = {"description": words[path]} if path in words else {}
    if known is not None:
        return {**said, **known}
    if isinstance(value, dict):
        if not value:
            return {**said, **FREE}
        properties = {key: _schema_of(child, f"{path}.{key}".lstrip("."), words) for key, child in value.items()}
        return {**said, "type": "object", "additionalProperties": False, "properties": properties}
    if isinstance(value, bool):
        return {**said, "type": "boolean"}
    if isinstance(value, int):
        return {**said, **NOT_NEGATIVE}
    if isinstance(value, float):
        return {**said, "type": "number"}
    return {**said, "type": "array" if isinstance(value, list) else "string"}


def _without_defaults(schema: Any) -> Any:
    """Without titles, defaults and formats of Python's: what is left is what Helm checks."""
    if isinstance(schema, list):
        return [_without_defaults(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # A property may itself be called `title`: only its schema is cleaned then.
    return {
        key: {name: _without_defaults(child) for name, child in item.items()}
        if key in ("properties", "$defs")
        else _without_defaults(item)
        for key, item in schema.items()
        if key not in ("title", "default", "format")
    }


def main() -> None:
    """Write every file."""
    for path, text in files():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
