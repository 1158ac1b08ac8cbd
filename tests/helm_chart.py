"""The chart, rendered by Helm's own engine, as objects."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import helm_python
import yaml
from helm_python import _native

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm/paceline"
RELEASE, NAMESPACE = "demo", "rl"
CERT_MANAGER, PROMETHEUS_OPERATOR, KEDA = "cert-manager.io/v1", "monitoring.coreos.com/v1", "keda.sh/v1alpha1"

Values = Mapping[str, Any]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C where it is there: a release has a quarter of a megabyte of dashboards."""


@dataclass(frozen=True)
class Rendered:
    """The objects of a release, and its notes."""

    objects: list[dict[str, Any]]
    notes: str
    values: dict[str, Any] = field(repr=False)

    def of(self, kind: str, name: str | None = None) -> list[dict[str, Any]]:
        """Objects of a kind, with a name if one is given, which the release's name stands before."""
        full = None if name is None else f"{self.name}-{name}".removesuffix("-")
        return [o for o in self.objects if o["kind"] == kind and full in (None, o["metadata"]["name"])]

    @property
    def name(self) -> str:
        """What the names of all objects begin with."""
        return self.values["fullnameOverride"] or f"{RELEASE}-paceline"

    def one(self, kind: str, name: str) -> dict[str, Any]:
        """The object of that kind and name."""
        (found,) = self.of(kind, name)
        return found

    def pods(self) -> dict[str, dict[str, Any]]:
        """The pod template of each component, and `test` for the pod of `helm test`."""
        workloads = [*self.of("StatefulSet"), *self.of("Deployment")]
        return {
            **{component(workload): workload["spec"]["template"] for workload in workloads},
            **{component(pod): pod for pod in self.of("Pod")},
        }

    def run_file(self) -> str:
        """The run file that the services read."""
        text: str = self.one("ConfigMap", "run")["data"]["run.yaml"]
        return text


def component(thing: Mapping[str, Any]) -> str:
    """The component that an object belongs to, by its label; nothing: the whole release."""
    found: str = thing["metadata"]["labels"].get("app.kubernetes.io/component", "")
    return found


def render(
    values: Values | None = None, *, apis: Sequence[str] = (), kube_version: str = "v1.34.0", chart: Path = CHART
) -> Rendered:
    """Render the chart. Raises helm_python.HelmError."""
    options = {"name": RELEASE, "namespace": NAMESPACE, "api_versions": list(apis), "kube_version": kube_version}
    with helm_python.Chart.load(chart) as loaded:
        # Chart.render hands on neither the cluster's version nor its APIs, which the engine beneath takes.
        answer = _native.call_string("helm_render", loaded._raw(), json.dumps(values or {}), json.dumps(options))
        merged = loaded.merge_values(dict(values or {}))
    files: dict[str, str] = json.loads(answer)
    objects = [
        found
        for name, text in sorted(files.items())
        if name.endswith(".yaml")
        for found in yaml.load_all(text, Loader=_LOADER)
    ]
    notes = next(text for name, text in files.items() if name.endswith("NOTES.txt"))
    return Rendered([found for found in objects if found], notes, merged)


def without_schema(folder: Path) -> Path:
    """A copy of the chart that has only its templates to refuse values."""
    copy = folder / "paceline"
    shutil.copytree(CHART, copy)
    (copy / "values.schema.json").unlink()
    return copy


def containers(pod: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every container of a pod template."""
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]
