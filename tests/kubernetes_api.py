"""Kubernetes' API as far as Helm's engine needs it to install and upgrade: discovery, and objects that are kept.

No schema is checked and no controller runs: it shows what the engine finds again, not what a cluster does.
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import yaml

KINDS = {
    "v1": ["ConfigMap", "Secret", "Service", "ServiceAccount", "Pod", "Namespace"],
    "apps/v1": ["Deployment", "StatefulSet"],
    "policy/v1": ["PodDisruptionBudget"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
}
_OBJECT = re.compile(r"/(?:api|apis/[^/]+)/[^/]+/namespaces/(?P<namespace>[^/]+)/(?P<kinds>[a-z]+)/?(?P<name>[^/]*)")


class KubernetesApi:
    """The server, on a free loopback port. Use it with `with`."""

    def __init__(self, more_kinds: dict[str, list[str]] | None = None) -> None:
        self.kinds = {**KINDS, **(more_kinds or {})}
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        """By namespace, plural and name."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, name="kubernetes-api", daemon=True)

    def __enter__(self) -> KubernetesApi:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def kubeconfig(self) -> str:
        """What a client needs to find it."""
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [
                    {"name": "made-up", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}
                ],
                "users": [{"name": "me", "user": {}}],
                "contexts": [{"name": "made-up", "context": {"cluster": "made-up", "user": "me"}}],
                "current-context": "made-up",
            }
        )

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """The kept objects of a kind, by name."""
        return {o["metadata"]["name"]: o for o in self.objects.values() if o["kind"] == kind}

    def discover(self, path: str) -> dict[str, Any] | None:
        """The answer about what kinds there are; None: the path asks for something else."""
        groups = sorted({version.partition("/")[0] for version in self.kinds if "/" in version})
        if path == "/version":
            return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [self._group(group) for group in groups]}
        if path == "/openapi/v3":
            paths = {_root(version): {"serverRelativeURL": f"/openapi/v3/{_root(version)}"} for version in self.kinds}
            return {"paths": paths}
        if path.startswith("/openapi/v3/"):
            return self._openapi(path.removeprefix("/openapi/v3/"))
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version not in self.kinds:
            return None
        resources = [
            {
                "name": plural(kind),
                "singularName": kind.lower(),
                "namespaced": kind != "Namespace",
                "kind": kind,
                "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
            }
            for kind in self.kinds[version]
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}

    def _openapi(self, root: str) -> dict[str, Any]:
        """That fields are checked here: else the engine would want the schema of everything."""
        version = root.removeprefix("apis/").removeprefix("api/")
        group, _, number = version.rpartition("/")
        paths = {
            f"/{root}/namespaces/{{namespace}}/{plural(kind)}/{{name}}": {
                "patch": {
                    "parameters": [{"name": "fieldValidation", "in": "query"}],
                    "responses": {},
                    "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": kind},
                }
            }
            for kind in self.kinds[version]
        }
        return {"openapi": "3.0.0", "info": {"title": "made up", "version": "1"}, "paths": paths}

    def _group(self, group: str) -> dict[str, Any]:
        versions = [
            {"groupVersion": version, "version": version.partition("/")[2]}
            for version in self.kinds
            if version.startswith(f"{group}/")
        ]
        return {"name": group, "versions": versions, "preferredVersion": versions[0]}


def _root(version: str) -> str:
    return f"api/{version}" if "/" not in version else f"apis/{version}"


def plural(kind: str) -> str:
    """The word for a kind in a path."""
    word = kind.lower()
    return f"{word.removesuffix('y')}ies" if word.endswith("y") else f"{word}s"


def _handler(api: KubernetesApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if (found := api.discover(path)) is not None:
                self._answer(200, found)
                return
            key = self._key()
            if key is None or key not in api.objects:
                self._answer(404, _status(404, "NotFound", f"{path} is not there"))
            else:
                self._answer(200, api.objects[key])

        def do_POST(self) -> None:
            self._keep()

        def do_PUT(self) -> None:
            self._keep()

        def do_PATCH(self) -> None:
            self._keep()

        def do_DELETE(self) -> None:
            key = self._key()
            self._answer(200, api.objects.pop(key, {}) if key is not None else {})

        def _keep(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            # Server-side apply sends the whole object, as JSON or YAML.
            found = yaml.load(body, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            key = self._key(found)
            if key is None:
                self._answer(400, _status(400, "BadRequest", f"{self.path} is no object"))
                return
            found["metadata"] |= {"uid": str(key), "resourceVersion": "1", "namespace": key[0]}
            new = key not in api.objects
            api.objects[key] = found
            self._answer(201 if new else 200, found)

        def _key(self, found: dict[str, Any] | None = None) -> tuple[str, str, str] | None:
            match = _OBJECT.fullmatch(urlsplit(self.path).path)
            if match is None:
                return None
            name = match["name"] or (found or {}).get("metadata", {}).get("name", "")
            return match["namespace"], match["kinds"], name

        def _answer(self, code: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a failed request shows in what the engine says."""

    return Handler


def _status(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "code": code,
        "message": message,
    }
