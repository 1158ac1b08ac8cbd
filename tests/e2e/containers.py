"""A Docker engine, the images on a base that needs no registry, and the stack of deploy/compose.yaml."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest
from docker.models.containers import Container

ROOT = Path(__file__).parents[2]
BASE = "paceline-test/base:bookworm"
STORE, PROMETHEUS = "paceline-test/redis:7.0.15", "paceline-test/prometheus:2.42.0"
ENGINE_ROOT = Path("/var/tmp/paceline-test-engine")
"""What an engine that is started here keeps, base image and layers among it: nobody else's images are touched."""
TARGETS = ("replay", "collector", "learner")
TAG = "0.1.0"
SERVICES = ("certs", "redis", "replay", "learner", "collector", "evaluator", "prometheus")
"""All but Grafana, of which Debian has no package."""

BUILD_SECONDS = 900.0
START_SECONDS = 60.0
SECONDS = 180.0
"""The bound of every other wait; nothing takes a third of it on two idle cores."""


def wait_until(condition: Callable[[], Any], what: str | Callable[[], str], seconds: float = SECONDS) -> Any:
    """The first true value of `condition`."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"not within {seconds:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.2)  # between two looks at a condition that has a deadline
    return value


@contextmanager
def engine(folder: Path) -> Iterator[docker.DockerClient]:
    """A client of the engine, which is started, and ended afterwards, where none runs. Skips where none can."""
    with _connected(folder) as client:
        yield client
        client.close()


@contextmanager
def _connected(folder: Path) -> Iterator[docker.DockerClient]:
    if _answers():
        yield docker.from_env()
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("no Docker engine runs, and none can be started: that takes root and `apt-get install docker.io`")
    process, client = _start(folder)
    if client is None and (ENGINE_ROOT / "network").exists():
        # An engine that was killed may leave a note of a network on which the next one fails.
        shutil.rmtree(ENGINE_ROOT / "network")
        process, client = _start(folder)
    try:
        if client is None:
            lines = (folder / "dockerd.log").read_text().strip().splitlines()
            why = next((line for line in lines if line.startswith(("panic", "failed"))), lines[-1])
            pytest.skip(f"dockerd cannot run here: {why}")
        yield client
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], docker.DockerClient | None]:
    """An engine, and a client of it; None: it has ended."""
    command = ["dockerd", "--data-root", str(ENGINE_ROOT), "--pidfile", str(folder / "docker.pid")]
    with (folder / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        client = wait_until(lambda: _answering(process), "an engine that answers", START_SECONDS)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process, None if client == "ended" else client


def _answers() -> bool:
    """Whether an engine answers. The SDK is not asked: it leaves its socket open where none does."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "version"], capture_output=True, timeout=30, check=False).returncode == 0


def _answering(process: subprocess.Popen[bytes]) -> docker.DockerClient | str | None:
    if process.poll() is not None:
        return "ended"
    return docker.from_env() if _answers() else None


def build_images(client: docker.DockerClient, folder: Path) -> None:
    """Build the three images and those of the servers, all on Debian, of which nothing is pulled.

    The base is kept in the engine, and what pip brought in deploy/wheels: the next build takes seconds.
    """
    if not _has_image(client, BASE):
        _make_base(client, folder)
    servers = (
        f"FROM {BASE}\n"
        "RUN apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive "
        "apt-get install -y -qq --no-install-recommends redis-server prometheus\n"
    )
    for tag, ending in ((STORE, ""), (PROMETHEUS, 'ENTRYPOINT ["prometheus"]\n')):
        if not _has_image(client, tag):
            client.images.build(fileobj=BytesIO((servers + ending).encode()), tag=tag, network_mode="host", rm=True)
    run("make", "wheels", "images", f"BASE={BASE}", "ARGS=--build-arg PIP_NO_INDEX=1")


def _make_base(client: docker.DockerClient, folder: Path) -> None:
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        pytest.skip("there is no base image: making one takes root and `apt-get install debootstrap`")
    root, archive = folder / "base", folder / "base.tar"
    packages = "--include=python3,python3-venv,ca-certificates"
    run("debootstrap", "--variant=minbase", packages, "bookworm", str(root))
    run("tar", "-C", str(root), "-cf", str(archive), ".")
    repository, _, tag = BASE.partition(":")
    client.api.import_image_from_file(
        str(archive), repository=repository, tag=tag, changes=["ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    )
    shutil.rmtree(root)
    archive.unlink()


def _has_image(client: docker.DockerClient, tag: str) -> bool:
    try:
        client.images.get(tag)
    except docker.errors.ImageNotFound:
        return False
    return True


def run(*command: str, environment: Mapping[str, str] | None = None, seconds: float = BUILD_SECONDS) -> str:
    """What a command prints; it ends with 0. The older builder, which every engine has."""
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "DOCKER_BUILDKIT": "0", **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert result.returncode == 0, f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout[-4000:]}"
    return result.stdout


def compose_command() -> tuple[str, ...]:
    """Compose 2, or the one that Debian ships."""
    for command in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(command[0]) and not subprocess.run([*command, "version"], capture_output=True).returncode:
            return command
    pytest.skip("no Compose: `apt-get install docker-compose` brings one")


class Stack:
    """The services of deploy/compose.yaml, on images of this machine and with settings of a small run."""

    def __init__(self, client: docker.DockerClient, run_file: Path, *, tag: str = TAG) -> None:
        self.client = client
        self.project = f"paceline-test-{tag}-{os.getpid()}".replace(".", "-")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._prometheus = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self._environment = {
            "COMPOSE_PROJECT_NAME": self.project,
            "TAG": tag,
            "RUN_FILE": str(run_file),
            "REDIS_IMAGE": STORE,
            "PROMETHEUS_IMAGE": PROMETHEUS,
            "PROMETHEUS_PORT": self._prometheus.rpartition(":")[2],
            "BASE": BASE,
        }
        self._command = (*compose_command(), "-f", "deploy/compose.yaml")

    def compose(self, *arguments: str) -> str:
        """What compose prints."""
        return run(*self._command, *arguments, environment=self._environment, seconds=2 * SECONDS)

    def containers(self, service: str) -> list[Container]:
        """The containers of a service, ended ones too, in the order of their numbers."""
        labels = [f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}"]
        found = self.client.containers.list(all=True, filters={"label": labels})
        return sorted(found, key=lambda each: int(each.labels["com.docker.compose.container-number"]))

    def one(self, service: str) -> Container:
        """The container of a service that has one."""
        (container,) = self.containers(service)
        return container

    def are_healthy(self, *services: str) -> bool:
        """Whether every container of these services runs and says that it is well."""
        containers = [container for service in services for container in self.containers(service)]
        return all(each.attrs["State"].get("Health", {}).get("Status") == "healthy" for each in containers)

    def wait_until_healthy(self, *services: str) -> None:
        """Wait for `are_healthy`; otherwise their last lines are shown."""
        wait_until(lambda: self.are_healthy(*services), lambda: f"{services} are healthy\n{self.describe(*services)}")

    def describe(self, *services: str) -> str:
        """State and last lines of each container."""
        lines = []
        for container in (container for service in services for container in self.containers(service)):
            state = container.attrs["State"]
            probes = [each["Output"].strip() for each in state.get("Health", {}).get("Log", [])[-2:]]
            lines.append(f"--- {container.name}: {state['Status']} {state['ExitCode']} {probes}")
            lines.append(container.logs(tail=15).decode(errors="replace"))
        return "\n".join(lines)

    def query(self, expression: str) -> dict[str, float]:
        """What Prometheus answers: the newest value by instance."""
        found = self._ask("query", query=expression)
        return {each["metric"].get("instance", ""): float(each["value"][1]) for each in found}

    def peaks(self, metric: str) -> float:
        """What a counter ever counted, all its series together: the last value before each of its resets, summed."""
        total = 0.0
        for series in self._ask("query", query=f"{metric}[1h]"):
            values = [float(value) for _, value in series["values"]]
            following = [*values[1:], 0.0]
            total += sum(value for value, after in zip(values, following, strict=True) if after < value)
        return total

    def total(self, expression: str) -> float:
        """The sum of what Prometheus answers; 0 for nothing."""
        return sum(self.query(expression).values())

    def _ask(self, path: str, **parameters: str) -> list[dict[str, Any]]:
        url = f"{self._prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except OSError:
            return []
        return found

    def kill(self, container: Container) -> None:
        """Have the kernel end the service in a container, as it ends what has no memory; the engine starts it again.

        Not by the engine's own `kill`: that counts as a person's wish, after which nothing is started again.
        """
        before = (container.attrs["State"]["StartedAt"], container.attrs["RestartCount"])
        container.exec_run(["sh", "-c", "kill -9 -1"])

        def is_new() -> bool:
            container.reload()
            return container.status == "running" and container.attrs["State"]["StartedAt"] != before[0]

        wait_until(is_new, lambda: f"{container.name} runs again: {container.attrs['State']}")
        assert container.attrs["RestartCount"] > before[1]

    def close(self) -> None:
        """Remove everything."""
        run(*self._command, "down", "--volumes", "--timeout", "5", environment=self._environment, seconds=SECONDS)
