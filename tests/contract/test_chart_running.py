"""What the chart makes, at work: kept over upgrades, certificates in real handshakes, its Redis under a real server."""

from __future__ import annotations

import base64
import itertools
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import helm_python
import pytest
import redis
import yaml
from cryptography import x509
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from free_ports import free_port
from helm_chart import CERT_MANAGER, CHART, NAMESPACE, RELEASE, ROOT, Rendered, component, containers, render
from integration.waiting import wait_until
from kubernetes_api import KubernetesApi
from paceline.local import issuing
from paceline.process import dying_with_parent

SECONDS = 20.0


class Cluster:
    """Helm's engine over an API that keeps what it is given."""

    def __init__(self, api: KubernetesApi) -> None:
        self.api = api
        self._helm = helm_python.Config(
            kubeconfig_content=api.kubeconfig(), namespace=NAMESPACE, storage_driver="memory"
        )

    def close(self) -> None:
        self._helm.close()

    def install(self, values: dict[str, Any] | None = None, release: str = RELEASE) -> None:
        self._helm.install(CHART, release, values or {}, namespace=NAMESPACE)

    def upgrade(self, values: dict[str, Any] | None = None, release: str = RELEASE) -> None:
        self._helm.upgrade(CHART, release, values or {}, namespace=NAMESPACE)

    def secrets(self) -> dict[str, dict[str, bytes]]:
        """Files of each secret, by the name behind that of the release."""
        return {
            name.removeprefix(f"{RELEASE}-paceline-"): decoded(secret) for name, secret in self.api.of("Secret").items()
        }


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with KubernetesApi() as api:
        cluster = Cluster(api)
        yield cluster
        cluster.close()


def decoded(secret: dict[str, Any]) -> dict[str, bytes]:
    return {name: base64.b64decode(value) for name, value in secret["data"].items()}


def test_an_upgrade_keeps_certificates_tokens_and_passwords(cluster: Cluster) -> None:
    cluster.install()
    before = cluster.secrets()
    assert set(before) == {
        "tokens", "redis-password", "ca-key", "learner-tls", "collector-tls", "replay-tls", "evaluator-tls", "redis-tls"
    }  # fmt: skip
    assert len(set(before["tokens"].values())) == 3
    cluster.upgrade({"relay": {"enabled": True}, "collectors": {"replicas": 5}})
    after = cluster.secrets()
    # The new component's certificate comes from the authority that the others trust already.
    relay = after.pop("relay-tls")
    assert after == before
    authority = x509.load_pem_x509_certificate(before["ca-key"]["tls.crt"])
    x509.load_pem_x509_certificate(relay["tls.crt"]).verify_directly_issued_by(authority)
    assert relay["ca.crt"] == before["ca-key"]["tls.crt"]


def test_a_secret_that_was_deleted_is_made_anew(cluster: Cluster) -> None:
    cluster.install()
    before = cluster.secrets()
    del cluster.api.objects[NAMESPACE, "secrets", f"{RELEASE}-paceline-tokens"]
    cluster.upgrade()
    after = cluster.secrets()
    assert not set(before.pop("tokens").values()) & set(after.pop("tokens").values())
    assert after == before


def test_a_certificate_of_another_authority_is_replaced(cluster: Cluster) -> None:
    cluster.install()
    before = cluster.secrets()
    del cluster.api.objects[NAMESPACE, "secrets", f"{RELEASE}-paceline-ca-key"]
    cluster.upgrade()
    after = cluster.secrets()
    for name in ("learner-tls", "collector-tls", "replay-tls", "evaluator-tls", "redis-tls"):
        assert after[name]["ca.crt"] == after["ca-key"]["tls.crt"] != before["ca-key"]["tls.crt"]


def test_cert_manager_that_comes_later_does_not_change_the_authority(cluster: Cluster) -> None:
    cluster.install()
    before = cluster.secrets()
    cluster.api.kinds[CERT_MANAGER] = ["Issuer", "Certificate"]
    cluster.upgrade()
    assert cluster.secrets() == before
    assert not cluster.api.of("Certificate")


def test_cert_manager_that_is_there_makes_the_certificates(cluster: Cluster) -> None:
    cluster.api.kinds[CERT_MANAGER] = ["Issuer", "Certificate"]
    cluster.install()
    assert set(cluster.secrets()) == {"tokens", "redis-password"}
    assert f"{RELEASE}-paceline-replay" in cluster.api.of("Certificate")


def test_the_commands_of_the_readme_install_and_upgrade(cluster: Cluster) -> None:
    lines = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("helm ")]
    given: dict[str, list[str]] = {}
    for line in lines:
        _, verb, release, *words = shlex.split(line)
        if verb == "test":
            assert release in given
            continue
        assert words[0] == str(CHART.relative_to(ROOT))
        settings = [value for option, value in itertools.pairwise(words) if option == "--set"]
        assert set(words[1:]) - set(settings) <= {"--set", "--reuse-values"}
        if verb == "install":
            cluster.install(helm_python.parse_set_string(",".join(settings)), release)
        else:
            settings = [*given[release], *settings]
            cluster.upgrade(helm_python.parse_set_string(",".join(settings)), release)
        given[release] = settings
    assert len(lines) == 4
    deployments = cluster.api.of("Deployment")
    assert deployments["first-paceline-collector"]["spec"]["replicas"] == 4
    assert deployments["gpu-paceline-collector"]["spec"]["replicas"] == 2


@pytest.mark.parametrize("server", ["learner", "replay", "relay"])
def test_a_client_that_calls_by_a_services_name_is_shown_a_certificate_for_it(server: str) -> None:
    release = render({"relay": {"enabled": True}, "config": {"replay": {"shards": 2}}})
    files = {component(s): decoded(s) for s in release.of("Secret") if s["type"] == "kubernetes.io/tls"}
    settings = yaml.safe_load(release.run_file())
    addresses = {
        "learner": [settings["learner"]["address"]],
        "relay": [settings["collector"]["snapshots_address"]],
        "replay": [settings["replay"]["address"].replace("{shard}", str(shard)) for shard in (0, 1)],
    }
    mine = files[server]
    credentials = grpc.ssl_server_credentials([(mine["tls.key"], mine["tls.crt"])], mine["ca.crt"], True)
    listening = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, listening)
    port = listening.add_secure_port("127.0.0.1:0", credentials)
    listening.start()
    try:
        for address in addresses[server]:
            assert ask(port, address.partition(":")[0], files["collector"]) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError):
            ask(port, "somewhere.else.svc", files["collector"])
        with pytest.raises(grpc.RpcError):
            ask(port, addresses[server][0].partition(":")[0], {"ca.crt": mine["ca.crt"]})
    finally:
        listening.stop(None)


def ask(port: int, name: str, files: dict[str, bytes]) -> int:
    """The health of a server, which has to prove that it has that name."""
    credentials = grpc.ssl_channel_credentials(files["ca.crt"], files.get("tls.key"), files.get("tls.crt"))
    options = [("grpc.ssl_target_name_override", name)]
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS, wait_for_ready=False)
    status: int = answer.status
    return status


class BundledRedis:
    """A real redis-server with the chart's configuration, files and probes, below a folder."""

    def __init__(self, release: Rendered, folder: Path, **settings: str) -> None:
        if shutil.which("redis-server") is None or shutil.which("redis-cli") is None:
            pytest.skip("no redis-server on this machine; `apt-get install redis-server` brings it")
        self.folder, self._port = folder, free_port()
        self._secrets = {s["metadata"]["name"].removeprefix(f"{RELEASE}-paceline-"): s for s in release.of("Secret")}
        self._scripts = release.one("ConfigMap", "redis")["data"]
        (container,) = containers(release.pods()["redis"])
        self._probes = {name: container[f"{name}Probe"]["exec"]["command"] for name in ("liveness", "readiness")}
        for name in ("conf", "login", "tls", "data"):
            (folder / name).mkdir(exist_ok=True)
        self.write("redis-password", "login")
        if "redis-tls" in self._secrets:
            self.write("redis-tls", "tls")
        for name, text in self._scripts.items():
            (folder / "conf" / name).write_text(self._here(text), encoding="utf-8")
        command = [self._here(word) for word in container["command"]]
        path = shutil.which(command[0])
        assert path is not None
        extra = [word for key, value in settings.items() for word in (f"--{key}", value)]
        self._process = subprocess.Popen(
            dying_with_parent([path, *command[1:], *extra]), stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )

    def __enter__(self) -> BundledRedis:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(SECONDS)

    def write(self, secret: str, folder: str, release: Rendered | None = None) -> None:
        """Put the files of a secret where the pod would have them."""
        found = self._secrets[secret] if release is None else release.one("Secret", secret)
        for name, data in decoded(found).items():
            (self.folder / folder / name).write_bytes(data)

    def probe(self, kind: str) -> int:
        """The exit status of the probe's command."""
        command = [self._here(word) for word in self._probes[kind]]
        environment = {"PATH": os.environ["PATH"]}
        return subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS, check=False).returncode

    def client(self, password: str = "", user: str = "default", **settings: Any) -> redis.Redis:
        """A client as replay would be one, or as the probes are."""
        known = self.folder / "login" / {"default": "password"}.get(user, user)
        password = password or known.read_text(encoding="utf-8")
        return redis.Redis(host="localhost", port=self._port, username=user, password=password, **settings)

    def _here(self, text: str) -> str:
        """A text of the chart with the places and the port of this server."""
        for there, here in (("/etc/redis", ""), ("/data", "/data"), ("/tmp/certificate", "/certificate")):
            text = text.replace(there, f"{self.folder}{here}")
        return text.replace("6379", str(self._port))


def test_the_bundled_redis_keeps_everything_and_admits_only_who_knows_the_password(tmp_path: Path) -> None:
    release = render()
    login = decoded(release.one("Secret", "redis-password"))
    assert login["users.acl"].decode().startswith(issuing._redis_rules(login["password"].decode()))
    with BundledRedis(release, tmp_path) as server:
        wait_until(lambda: server.probe("readiness") == 0, SECONDS)
        assert server.probe("liveness") == 0
        tls = {"ssl": True, "ssl_ca_certs": str(tmp_path / "tls/ca.crt")}
        with server.client(**tls) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("appendonly") == {"appendonly": "yes"}
            assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
            assert client.config_get("maxmemory") == {"maxmemory": str(1 << 30)}
            client.set("paceline:run:key", "1")
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.set("other", "1")
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.config_set("dir", "/etc")
        with server.client("wrong", **tls) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with server.client() as plain, pytest.raises(redis.RedisError):
            plain.ping()


def test_the_bundled_redis_serves_a_renewed_certificate_without_a_restart(tmp_path: Path) -> None:
    with BundledRedis(render(), tmp_path) as server:
        wait_until(lambda: server.probe("readiness") == 0, SECONDS)
        server.write("redis-tls", "tls", render())
        tls = {"ssl": True, "ssl_ca_certs": str(tmp_path / "tls/ca.crt")}
        with server.client(**tls) as client, pytest.raises(redis.ConnectionError):
            client.ping()
        assert server.probe("readiness") == 0
        with server.client(**tls) as client:
            assert client.ping()


@pytest.mark.slow
def test_the_probes_of_redis_tell_loading_from_ready_and_from_gone(tmp_path: Path) -> None:
    release = render({"security": {"enabled": False}})
    with BundledRedis(release, tmp_path) as server:
        wait_until(lambda: server.probe("readiness") == 0, SECONDS)
        with server.client() as client, client.pipeline(transaction=False) as pipeline:
            for number in range(20_000):
                pipeline.set(f"paceline:key-{number}", number)
            pipeline.execute()
    assert server.probe("liveness") == 1
    assert server.probe("readiness") == 1
    # A millisecond for each key, until the test lets it go on.
    with BundledRedis(release, tmp_path, **{"key-load-delay": "1000"}) as server:
        wait_until(lambda: server.probe("liveness") == 0, SECONDS)
        assert server.probe("readiness") == 1
        with server.client(user="probe") as client:
            client.config_set("key-load-delay", 0)
        wait_until(lambda: server.probe("readiness") == 0, SECONDS)
        with server.client() as client:
            assert client.get("paceline:key-19999") == b"19999"
