"""The chart, rendered by Helm's engine for many values: what Kubernetes accepts, and what the services need."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml

import crd_schemas
from helm_chart import (
    CERT_MANAGER,
    CHART,
    KEDA,
    NAMESPACE,
    PROMETHEUS_OPERATOR,
    RELEASE,
    ROOT,
    Rendered,
    Values,
    component,
    containers,
    render,
    without_schema,
)
from paceline import cli, config

SHA = "sha256:" + "0" * 64
PLACE = {
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]}
    ]}}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "runtimeClassName": "nvidia",
    "priorityClassName": "research",
    "podAnnotations": {"note": "mine"},
    "extraEnv": [{"name": "MUJOCO_GL", "value": "egl"}],
    "extraVolumes": [{"name": "assets", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "assets", "mountPath": "/assets"}],
}  # fmt: skip
ROLES = ("learner", "collectors", "replay", "evaluator", "relay", "redis")
EXISTING = {name: f"{name}-certificate" for name in ("learner", "collector", "replay", "evaluator", "relay", "redis")}
EXTERNAL = {"mode": "external", "external": {"url": "redis://redis.data:6379/2", "existingSecret": "redis-login"}}

CASES: dict[str, tuple[Values, tuple[str, ...]]] = {
    "defaults": ({}, ()),
    "everything a cluster may have": ({}, (CERT_MANAGER, PROMETHEUS_OPERATOR, KEDA)),
    "GPU learner": ({"config": {"learner": {"device": "cuda"}}, "learner": {"gpu": {"count": 1}, **PLACE}}, ()),
    "placed and extended": (dict.fromkeys(ROLES, PLACE) | {"relay": {"enabled": True, **PLACE}}, ()),
    "collectors with GPUs": ({"collectors": {"gpu": {"count": 1, "resource": "amd.com/gpu"}}}, ()),
    "nothing is kept": (
        {"learner": {"persistence": {"enabled": False}}, "redis": {"persistence": {"enabled": False}}}, ()
    ),
    "volumes of the user": (
        {"learner": {"persistence": {"existingClaim": "runs"}}, "redis": {"persistence": {"storageClass": "fast"}}}, ()
    ),
    "three shards": ({"config": {"replay": {"shards": 3}}, "collectors": {"replicas": 5}}, ()),
    "a Redis for each shard": (
        {"config": {"replay": {"shards": 2}}, "redis": {"perShard": True, "appendfsync": "always"}}, ()
    ),
    "external Redis, password": ({"redis": EXTERNAL}, ()),
    "external Redis, whole URL": (
        {"redis": {"mode": "external", "external": {"existingSecret": "redis-login", "urlKey": "url"}}}, ()
    ),
    "external Redis, TLS": (
        {"redis": {"mode": "external", "external": {
            "url": "rediss://{shard}.redis.data:6380/0", "port": 6380, "caSecret": "redis-ca", "cidr": "10.1.0.0/16"
        }}},
        (),
    ),
    "cert-manager, an issuer of the user": (
        {"security": {"certificates": {"issuerRef": {"name": "lab", "kind": "ClusterIssuer"}}}}, (CERT_MANAGER,)
    ),
    "own certificates beside cert-manager": ({"security": {"certificates": {"source": "chart"}}}, (CERT_MANAGER,)),
    "secrets of the user": (
        {
            "security": {
                "certificates": {"source": "existing", "existingSecrets": EXISTING},
                "tokens": {"existingSecret": "tokens"},
            },
            "redis": {"existingSecret": "redis-password"},
        },
        (),
    ),
    "no security": ({"security": {"enabled": False}}, ()),
    "certificates of servers only": ({"security": {"clientCertificates": False}}, ()),
    "relays": ({"relay": {"enabled": True, "replicas": 3}, "collectors": {"replicas": 200}}, (PROMETHEUS_OPERATOR,)),
    "hpa": ({"collectors": {"autoscaling": {"kind": "hpa", "maxReplicas": 64}}}, ()),
    "keda": (
        {"collectors": {"autoscaling": {
            "kind": "keda", "keda": {"prometheusAddress": "http://prometheus.monitoring:9090"}
        }}},
        (KEDA, PROMETHEUS_OPERATOR),
    ),
    "another preset": ({"preset": "halfcheetah-sac", "config": {"run": {"seed": 7, "id": "cheetah"}}}, ()),
    "a run file of the user": (
        {"config": {
            "run": {"environment_steps": 12345678},
            "env": {"id": "my_package:MyEnv-v0", "kwargs": {"speed": 1.5}},
            "learner": {"algorithm": {"actor_learning_rate": 1e-7}, "checkpoint": {"keep": 9}},
            "evaluator": {"enabled": False},
        }},
        (),
    ),
    "images of the user": (
        {
            "global": {"imageRegistry": "registry.example", "imagePullSecrets": ["pull"], "other": 1},
            "images": {
                "tag": "2.0",
                "collector": {"repository": "lab/robots", "digest": SHA},
                "pullSecrets": ["pull", "too"],
            },
        },
        (),
    ),
    "other names": ({"fullnameOverride": "rl", "listenHost": "[::]"}, (PROMETHEUS_OPERATOR,)),
    "open network": ({"networkPolicy": {"enabled": False}, "monitoring": {"dashboards": {"enabled": False}}}, ()),
}  # fmt: skip

METRICS_PORTS = {"replay": [9101], "learner": [9102, 9103], "collector": [9104], "evaluator": [9105], "relay": [9106]}
LISTENS = {
    ("replay", "listen"): ("replay", "grpc"),
    ("replay", "metrics_listen"): ("replay", "metrics"),
    ("learner", "listen"): ("learner", "grpc"),
    ("learner", "metrics_listen"): ("learner", "metrics"),
    ("learner", "endpoint_metrics_listen"): ("learner", "endpoint"),
    ("collector", "metrics_listen"): ("collector", "metrics"),
    ("evaluator", "metrics_listen"): ("evaluator", "metrics"),
    ("relay", "listen"): ("relay", "grpc"),
    ("relay", "metrics_listen"): ("relay", "metrics"),
}
"""Section and key of each listening address, and the component and port name that serve it."""


@pytest.fixture(scope="module")
def releases() -> dict[str, Rendered]:
    """Every case, rendered."""
    return {name: render(values, apis=apis) for name, (values, apis) in CASES.items()}


@pytest.fixture(params=CASES)
def release(request: pytest.FixtureRequest, releases: dict[str, Rendered]) -> Rendered:
    return releases[request.param]


@pytest.fixture(scope="module")
def accepted() -> set[str]:
    """Manifests that were validated: most are the same in every release."""
    return set()


@pytest.fixture
def default(releases: dict[str, Rendered]) -> Rendered:
    return releases["defaults"]


def port(pod: Mapping[str, Any], name: str) -> int:
    (found,) = [p["containerPort"] for c in containers(pod) for p in c.get("ports", []) if p["name"] == name]
    assert isinstance(found, int)
    return found


def load(release: Rendered, folder: Path) -> config.Config:
    """The settings as the services of a release read them."""
    path = folder / "run.yaml"
    path.write_text(release.run_file(), encoding="utf-8")
    variables = {}
    (replay,) = containers(release.pods()["replay"])
    if any(v["name"] == "PACELINE_REPLAY__REDIS_URL" for v in replay["env"]):
        variables["PACELINE_REPLAY__REDIS_URL"] = "redis://:secret@redis.data:6379/0"
    return config.load(path, environment=variables)


# Kubernetes


@pytest.mark.parametrize("version", ["1.28", "1.34"])
def test_every_manifest_is_what_kubernetes_accepts(version: str, release: Rendered, accepted: set[str]) -> None:
    for manifest in release.objects:
        if manifest["kind"] in crd_schemas.SPECS:
            jsonschema.Draft202012Validator(crd_schemas.manifest(manifest["kind"])).validate(manifest)
        elif (text := f"{version} {json.dumps(manifest)}") not in accepted:
            kubernetes_validate.validate(manifest, version, strict=True)
            accepted.add(text)


def test_names_are_unique_and_in_the_namespace(release: Rendered) -> None:
    names = [(o["kind"], o["metadata"]["name"]) for o in release.objects]
    assert len(set(names)) == len(names)
    assert all(o["metadata"]["namespace"] == NAMESPACE for o in release.objects)


def test_a_long_release_name_makes_names_that_kubernetes_accepts() -> None:
    release = render({"fullnameOverride": "a" * 40, "relay": {"enabled": True}}, apis=[CERT_MANAGER])
    for manifest in release.objects:
        # The limit of a label, which is what the name of a service or of a pod becomes.
        assert len(manifest["metadata"]["name"]) <= 63
        assert len(manifest["spec"].get("commonName", "") if manifest["kind"] == "Certificate" else "") <= 64


def test_every_pod_is_restricted(release: Rendered) -> None:
    for name, pod in release.pods().items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] == 10001, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(spec), name
        allowed = {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "projected", "downwardAPI", "csi"}
        assert all(set(volume) - {"name"} <= allowed for volume in spec.get("volumes", [])), name
        for container in containers(pod):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert security["readOnlyRootFilesystem"] is True, name
            assert not {"privileged", "procMount", "runAsUser", "seccompProfile"} & set(security), name
            assert "hostPort" not in str(container.get("ports")), name


def test_every_container_has_requests_and_limits(release: Rendered) -> None:
    for name, pod in release.pods().items():
        for container in containers(pod):
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= set(container["resources"][kind]), name


def test_no_pod_has_a_token_or_variables_of_other_services(release: Rendered) -> None:
    accounts = {account["metadata"]["name"]: account for account in release.of("ServiceAccount")}
    for name, pod in release.pods().items():
        assert pod["spec"]["enableServiceLinks"] is False, name
        assert pod["spec"]["automountServiceAccountToken"] is False, name
        account = accounts[pod["spec"]["serviceAccountName"]]
        assert account["automountServiceAccountToken"] is False, name
    assert not [o for o in release.objects if "Role" in o["kind"]]


def test_every_mount_has_a_volume_and_every_volume_is_there(release: Rendered) -> None:
    made = {(o["kind"], o["metadata"]["name"]) for o in release.objects}
    made |= {("Secret", o["spec"]["secretName"]) for o in release.of("Certificate")}
    mine = {"tokens", "redis-password", "redis-login", "redis-ca", *EXISTING.values()}
    for workload in [*release.of("StatefulSet"), *release.of("Deployment"), *release.of("Pod")]:
        pod = workload if workload["kind"] == "Pod" else workload["spec"]["template"]
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        assert not claims & set(volumes)
        for container in containers(pod):
            mounts = container.get("volumeMounts", [])
            assert {mount["name"] for mount in mounts} <= claims | set(volumes)
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        for volume in volumes.values():
            if "secret" in volume and volume["secret"]["secretName"] not in mine:
                assert ("Secret", volume["secret"]["secretName"]) in made
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made


def test_selectors_find_their_own_pods_only(release: Rendered) -> None:
    pods = {name: pod["metadata"]["labels"] for name, pod in release.pods().items()}
    kinds = ("StatefulSet", "Deployment", "Service", "PodDisruptionBudget")
    for found in itertools.chain.from_iterable(release.of(kind) for kind in kinds):
        selector = found["spec"]["selector"]
        wanted = selector.get("matchLabels", selector)
        matched = [name for name, labels in pods.items() if wanted.items() <= labels.items()]
        assert matched == [component(found)], found["metadata"]["name"]


def test_images_are_pinned_and_named_as_asked(releases: dict[str, Rendered]) -> None:
    def images(case: str) -> dict[str, str]:
        return {name: next(containers(pod))["image"] for name, pod in releases[case].pods().items()}

    version = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
    redis = images("defaults").pop("redis")
    # Compose and the chart start the same one.
    assert f"REDIS_IMAGE={redis}\n" in (ROOT / "deploy/.env").read_text(encoding="utf-8")
    assert images("defaults") == {
        "learner": f"paceline/learner:{version}",
        "replay": f"paceline/replay:{version}",
        "collector": f"paceline/collector:{version}",
        "evaluator": f"paceline/collector:{version}",
        "test": f"paceline/replay:{version}",
        "redis": redis,
    }
    assert images("relays")["relay"] == f"paceline/replay:{version}"
    mine = images("images of the user")
    assert mine["learner"] == "registry.example/paceline/learner:2.0"
    assert mine["collector"] == mine["evaluator"] == f"registry.example/lab/robots@{SHA}"
    assert mine["redis"] == f"registry.example/{redis}"
    for pod in releases["images of the user"].pods().values():
        assert pod["spec"]["imagePullSecrets"] == [{"name": "pull"}, {"name": "too"}]


def test_the_chart_has_the_versions_of_the_package() -> None:
    from paceline import __version__

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_placement_reaches_every_pod(releases: dict[str, Rendered]) -> None:
    release = releases["placed and extended"]
    for name, pod in release.pods().items():
        if name == "test":
            continue
        for key in ("nodeSelector", "tolerations", "affinity", "runtimeClassName", "priorityClassName"):
            assert pod["spec"][key] == PLACE[key], (name, key)
        (spread,) = pod["spec"]["topologySpreadConstraints"]
        assert spread["topologyKey"] == "topology.kubernetes.io/zone"
        assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        (container,) = containers(pod)
        assert {"name": "MUJOCO_GL", "value": "egl"} in container["env"]
        assert {"name": "assets", "mountPath": "/assets"} in container["volumeMounts"]
        assert pod["metadata"]["annotations"]["note"] == "mine"


def test_gpus_are_asked_for_where_they_are_wanted(releases: dict[str, Rendered]) -> None:
    def limits(case: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(containers(releases[case].pods()[name]))["resources"]["limits"]
        return found

    assert limits("GPU learner", "learner")["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in limits("GPU learner", "collector")
    assert limits("collectors with GPUs", "collector")["amd.com/gpu"] == 1
    assert "gpu" not in str(limits("defaults", "learner"))


# The run file


def test_the_run_file_is_the_users_but_for_what_only_the_chart_can_know(
    releases: dict[str, Rendered], tmp_path: Path
) -> None:
    def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for key in one:
            if isinstance(one[key], dict):
                yield from differences(one[key], other[key], f"{prefix}{key}.")
            elif one[key] != other[key]:
                yield f"{prefix}{key}"

    owned = {
        "run.id", "run.directory", "security.certificates", "security.tokens", "security.allow_insecure",
        "security.client_certificates", "collector.count", "collector.snapshots_address", "replay.address",
        "replay.redis_url", "replay.redis_password_file", "learner.address",
        *(f"{section}.{key}" for section, key in LISTENS),
    }  # fmt: skip
    for name, (values, _) in CASES.items():
        given = values.get("config", {})
        preset = values.get("preset", "" if given else "pendulum-sac")
        overrides = [
            f"{s}.{k}={yaml.safe_dump(v).strip().removesuffix('...')}" for s in given for k, v in given[s].items()
        ]
        count = releases[name].values["collectors"]["replicas"]
        path = ROOT / f"configs/{preset}.yaml" if preset else None
        mine = config.load(path, [*overrides, f"collector.count={count}"])
        rendered = load(releases[name], tmp_path)
        found = set(differences(mine.model_dump(mode="json"), rendered.model_dump(mode="json")))
        assert found <= owned, name
        assert rendered.run.id == given.get("run", {}).get("id", RELEASE)


def test_the_command_line_finds_the_run_file_right(default: Rendered, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(default.run_file(), encoding="utf-8")
    command = [sys.executable, "-m", "paceline", "config", "--check", str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "The settings are right.\n"


def test_services_listen_where_the_ports_are_and_clients_call_there(release: Rendered, tmp_path: Path) -> None:
    settings, pods = load(release, tmp_path), release.pods()
    for (section, key), (name, port_name) in LISTENS.items():
        if name in pods:
            host, _, number = getattr(getattr(settings, section), key).rpartition(":")
            assert host == release.values["listenHost"]
            assert int(number) == port(pods[name], port_name)
    services = {service["metadata"]["name"]: service for service in release.of("Service")}
    (sets,) = [s for s in release.of("StatefulSet") if component(s) == "replay"]
    assert len(settings.replay.shard_addresses()) == sets["spec"]["replicas"] == settings.replay.shards
    for shard, address in enumerate(settings.replay.shard_addresses()):
        pod, service, namespace, kind = address.partition(":")[0].split(".")
        assert (pod, service, namespace, kind) == (
            f"{sets['metadata']['name']}-{shard}", sets["spec"]["serviceName"], NAMESPACE, "svc"
        )  # fmt: skip
        assert services[service]["spec"]["ports"][0]["port"] == int(address.partition(":")[2])
    for address in (settings.learner.address, settings.collector.snapshots_address):
        if address is not None:
            host, _, number = address.partition(":")
            service, namespace, kind = host.split(".")
            assert (namespace, kind) == (NAMESPACE, "svc")
            (offered,) = services[service]["spec"]["ports"]
            target = pods[component(services[service])]
            assert offered["port"] == int(number) == port(target, offered["targetPort"])


def test_names_lead_to_pods_so_that_a_replaced_one_is_found_again(releases: dict[str, Rendered]) -> None:
    for name in ("learner", "replay", "redis"):
        spec = releases["defaults"].one("Service", name)["spec"]
        assert spec["clusterIP"] == "None"
        # Or a learner that waits for replay and a replay that nobody may resolve would wait for each other.
        assert spec["publishNotReadyAddresses"] is True
    assert "clusterIP" not in releases["relays"].one("Service", "relay")["spec"]


def test_a_changed_setting_starts_pods_anew_and_a_scaled_collector_does_not(default: Rendered) -> None:
    def checksums(values: Values) -> dict[str, str]:
        pods = render(values).pods()
        return {n: p["metadata"]["annotations"]["checksum/config"] for n, p in pods.items() if n not in ("test",)}

    before = checksums({"preset": "pendulum-sac"})
    changed = checksums({"preset": "pendulum-sac", "config": {"learner": {"batch_size": 128}}})
    assert {name for name in before if before[name] != changed[name]} == {"learner", "collector", "replay", "evaluator"}
    assert checksums({"preset": "pendulum-sac", "collectors": {"replicas": 7}}) == before
    redis = checksums({"preset": "pendulum-sac", "redis": {"maxmemory": "2gb"}})
    assert {name for name in before if before[name] != redis[name]} == {"redis"}
    assert "count: 7" in render({"collectors": {"replicas": 7}}).run_file()


def test_every_pod_starts_a_command_that_exists(release: Rendered) -> None:
    root = typer.main.get_command(cli.app)
    for name, pod in release.pods().items():
        for container in containers(pod):
            if name == "redis":
                assert container["command"] == ["redis-server", "/etc/redis/conf/redis.conf"]
                continue
            # The image's entry point is `python -m paceline`; a variable is filled in by the kubelet.
            assert "command" not in container
            arguments = container["args"]
            if name == "replay":
                assert "SHARD" in {variable["name"] for variable in container["env"]}
                arguments = [argument.replace("$(SHARD)", "0") for argument in arguments]
            with root.make_context("paceline", arguments) as context:
                while isinstance(context.command, type(root)):
                    rest = [*context._protected_args, *context.args]
                    _, command, rest = context.command.resolve_command(context, rest)
                    context = command.make_context(command.name, rest, parent=context)
            assert context.command.name in (name, "serve", "health")


def test_a_shard_knows_its_number(releases: dict[str, Rendered]) -> None:
    (replay,) = containers(releases["three shards"].pods()["replay"])
    (number,) = [v for v in replay["env"] if v["name"] == "SHARD"]
    assert number["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    assert replay["args"][-2:] == ["--shard", "$(SHARD)"]


def test_every_redis_has_its_name_in_the_url(releases: dict[str, Rendered], tmp_path: Path) -> None:
    for case, count in (("defaults", 1), ("three shards", 1), ("a Redis for each shard", 2)):
        release = releases[case]
        (redis,) = [s for s in release.of("StatefulSet") if component(s) == "redis"]
        assert redis["spec"]["replicas"] == count
        url = load(release, tmp_path).replay.redis_url
        assert url is not None
        for shard in range(count):
            host = f"{redis['metadata']['name']}-{shard}.{redis['spec']['serviceName']}.{NAMESPACE}.svc"
            assert url.get_secret_value().replace("{shard}", str(shard)).startswith(f"rediss://{host}:6379/0?")


def test_no_secret_is_in_a_variable_an_argument_or_the_run_file(release: Rendered) -> None:
    for secret in release.of("Secret"):
        for key, value in secret["data"].items():
            if key in ("tls.crt", "ca.crt"):
                continue
            for other in release.objects:
                if other["kind"] != "Secret":
                    assert value not in str(other)
    for pod in release.pods().values():
        for container in containers(pod):
            for variable in container["env"]:
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                # A whole URL is the user's choice; the password alone comes as a file.
                assert reference is None or reference["key"] == "url"


# Rollouts, starts and stops


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("gpus", [0, 1])
def test_a_learner_is_stopped_before_the_next_one_starts(persistent: bool, gpus: int) -> None:
    values = {
        "config": {"learner": {"device": "cuda" if gpus else "cpu"}},
        "learner": {"persistence": {"enabled": persistent}, "gpu": {"count": gpus}},
    }
    learner = render(values).one("StatefulSet", "learner")
    assert learner["spec"]["replicas"] == 1
    assert learner["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
    assert bool(learner["spec"].get("volumeClaimTemplates")) is persistent


def test_workloads_with_a_volume_or_a_gpu_start_no_second_pod(release: Rendered) -> None:
    for deployment in release.of("Deployment"):
        pod = deployment["spec"]["template"]
        gpu = any("gpu" in key for c in containers(pod) for key in c["resources"]["limits"])
        claim = any("persistentVolumeClaim" in volume for volume in pod["spec"]["volumes"])
        strategy = deployment["spec"]["strategy"]
        if gpu or claim:
            assert strategy["type"] == "Recreate" or strategy["rollingUpdate"]["maxSurge"] == 0
        if component(deployment) == "evaluator":
            assert strategy == {"type": "Recreate"}


def test_a_second_learner_is_refused_by_the_schema_and_by_the_templates(tmp_path: Path) -> None:
    with pytest.raises(helm_python.HelmError, match=r"at '/learner/replicas': value must be 1"):
        render({"learner": {"replicas": 2}})
    with pytest.raises(helm_python.HelmError, match=r"learner.replicas is 2: a run has exactly 1 learner"):
        render({"learner": {"replicas": 2}}, chart=without_schema(tmp_path))


def test_probes_ask_the_right_port_for_the_right_thing(release: Rendered) -> None:
    for name, pod in release.pods().items():
        if name in ("test", "redis"):
            continue
        (container,) = containers(pod)
        ready = "endpoint" if name == "learner" else "metrics"
        asked = {
            kind: (container[f"{kind}Probe"]["httpGet"]["path"], container[f"{kind}Probe"]["httpGet"]["port"])
            for kind in ("startup", "liveness", "readiness")
        }
        # What a process depends on may show in readiness only.
        assert asked == {
            "startup": ("/healthz", "metrics"),
            "liveness": ("/healthz", "metrics"),
            "readiness": ("/readyz", ready),
        }
        assert [port(pod, "metrics"), *([port(pod, "endpoint")] if name == "learner" else [])] == METRICS_PORTS[name]


def test_a_start_may_take_as_long_as_a_large_checkpoint(release: Rendered) -> None:
    for name, pod in release.pods().items():
        if name == "test":
            continue
        (container,) = containers(pod)
        start, alive = container["startupProbe"], container["livenessProbe"]
        assert start["periodSeconds"] * start["failureThreshold"] >= 300
        assert alive["periodSeconds"] * alive["failureThreshold"] >= 60


def test_a_pod_has_twice_the_time_that_its_role_takes_to_stop(release: Rendered) -> None:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    table = page.partition("| role | stop_seconds |")[2].partition("\n\n")[0]
    seconds = {name: float(number) for name, number in re.findall(r"\| (\w+) \| ([\d.]+) \|", table)}
    assert set(seconds) >= {"replay", "learner", "collector", "evaluator", "relay"}
    for name, pod in release.pods().items():
        if name in seconds:
            waits = [c["lifecycle"]["preStop"]["exec"]["command"][-1] for c in containers(pod) if "lifecycle" in c]
            before = sum(float(number) for wait in waits for number in re.findall(r"sleep\((\d+)\)", wait))
            assert pod["spec"]["terminationGracePeriodSeconds"] >= before + 2 * seconds[name], name


def test_disruptions_take_some_collectors_and_one_shard_at_a_time(default: Rendered) -> None:
    budgets = {component(b): b["spec"]["maxUnavailable"] for b in default.of("PodDisruptionBudget")}
    assert budgets == {"collector": "25%", "replay": 1}


def test_processes_that_share_memory_have_it(release: Rendered) -> None:
    for name in ("learner", "collector", "evaluator"):
        if name in release.pods():
            pod = release.pods()[name]
            (volume,) = [v for v in pod["spec"]["volumes"] if v["name"] == "shared-memory"]
            assert volume["emptyDir"]["medium"] == "Memory"
            assert volume["emptyDir"]["sizeLimit"]
            assert {"name": "shared-memory", "mountPath": "/dev/shm"} in next(containers(pod))["volumeMounts"]


# Security


def test_a_pod_has_the_certificate_and_the_tokens_of_its_role(releases: dict[str, Rendered]) -> None:
    every = ["collector", "learner", "reader"]
    expected = {"learner": every, "replay": every, "relay": every, "collector": ["collector"], "evaluator": ["reader"]}
    for case in ("relays", "defaults", "secrets of the user"):
        for name, pod in releases[case].pods().items():
            secrets = {v["name"]: v["secret"] for v in pod["spec"].get("volumes", []) if "secret" in v}
            if name == "test":
                assert not secrets
                continue
            own = EXISTING[name] if case == "secrets of the user" else f"{RELEASE}-paceline-{name}-tls"
            assert secrets["tls"]["secretName"] == own
            tokens = [item["path"] for item in secrets["tokens"]["items"]] if "tokens" in secrets else []
            assert tokens == expected.get(name, [])
            # Only replay and Redis itself may log in to Redis.
            assert bool({"login", "redis-password"} & set(secrets)) is (name in ("redis", "replay"))


def test_cert_manager_is_used_where_it_is_there(releases: dict[str, Rendered]) -> None:
    there = releases["everything a cluster may have"]
    assert [s["metadata"]["name"] for s in there.of("Secret") if s["type"] == "kubernetes.io/tls"] == []
    made = {component(c): c["spec"] for c in there.of("Certificate")}
    assert set(made) - {""} == {"learner", "collector", "replay", "evaluator", "redis"}
    full = f"{RELEASE}-paceline-replay"
    hosts = [full, f"{full}.{NAMESPACE}", f"{full}.{NAMESPACE}.svc", f"*.{full}.{NAMESPACE}.svc", "localhost"]
    assert made["replay"]["dnsNames"] == hosts
    assert {issuer["metadata"]["name"] for issuer in there.of("Issuer")} >= {made["replay"]["issuerRef"]["name"]}
    mine = releases["cert-manager, an issuer of the user"]
    assert not mine.of("Issuer")
    assert mine.one("Certificate", "learner")["spec"]["issuerRef"] == {"name": "lab", "kind": "ClusterIssuer"}
    own = releases["own certificates beside cert-manager"]
    assert not own.of("Certificate")
    assert own.one("Secret", "replay-tls")


def test_security_off_is_said_loudly(releases: dict[str, Rendered], tmp_path: Path) -> None:
    off = releases["no security"]
    assert "WARNING: security.enabled is false" in off.notes
    assert load(off, tmp_path).security.allow_insecure is True
    assert {s["metadata"]["name"] for s in off.of("Secret")} == {f"{RELEASE}-paceline-redis-password"}
    assert load(releases["defaults"], tmp_path).security.allow_insecure is False


# The network


def allowed(release: Rendered, source: Mapping[str, str], target: Mapping[str, str], number: int) -> bool:
    """Whether the policies let a pod open a port of another; both by labels, `namespace` among them."""

    def selects(policy: Mapping[str, Any], pod: Mapping[str, str], direction: str) -> bool:
        mine = policy["spec"]["podSelector"]["matchLabels"].items() <= pod.items()
        return mine and pod["namespace"] == NAMESPACE and direction in policy["spec"]["policyTypes"]

    def matches(peer: Mapping[str, Any], pod: Mapping[str, str]) -> bool:
        assert not set(peer) - {"podSelector", "namespaceSelector"}
        wanted = peer.get("namespaceSelector", {}).get("matchLabels", {"kubernetes.io/metadata.name": NAMESPACE})
        if not wanted.items() <= {("kubernetes.io/metadata.name", pod["namespace"])}:
            return False
        labels: dict[str, str] = peer.get("podSelector", {}).get("matchLabels", {})
        return labels.items() <= pod.items()

    def lets(rule: Mapping[str, Any], peers: str, pod: Mapping[str, str]) -> bool:
        ports = any(p["port"] <= number <= p.get("endPort", p["port"]) for p in rule["ports"])
        return ports and (peers not in rule or any(matches(peer, pod) for peer in rule[peers]))

    policies = release.of("NetworkPolicy")
    outward = [p for p in policies if selects(p, source, "Egress")]
    inward = [p for p in policies if selects(p, target, "Ingress")]
    sends = not outward or any(lets(r, "to", target) for p in outward for r in p["spec"].get("egress", []))
    takes = not inward or any(lets(r, "from", source) for p in inward for r in p["spec"].get("ingress", []))
    # Either side alone would do; a peer that only one of them lets through is a mistake in one of them.
    assert sends == takes or "app.kubernetes.io/instance" not in source, (source, target, number)
    return sends and takes


def reachable(release: Rendered) -> set[tuple[str, str, int]]:
    """Who may open which open port of whom."""
    pods = {name: {**pod["metadata"]["labels"], "namespace": NAMESPACE} for name, pod in release.pods().items()}
    others = {"prometheus": {"namespace": "monitoring"}, "stranger": {"namespace": NAMESPACE}}
    found = set()
    for target, pod in release.pods().items():
        for number in (p["containerPort"] for c in containers(pod) for p in c.get("ports", [])):
            for source, labels in (pods | others).items():
                if source != target and allowed(release, labels, pods[target], number):
                    found.add((source, target, number))
    return found


def test_only_the_right_peers_may_talk(releases: dict[str, Rendered]) -> None:
    def looks(*names: str) -> set[tuple[str, str, int]]:
        return {(who, name, n) for who in ("prometheus", "test") for name in names for n in METRICS_PORTS[name]}

    wanted = {
        ("collector", "learner", 50052), ("evaluator", "learner", 50052), ("collector", "replay", 50051),
        ("learner", "replay", 50051), ("replay", "redis", 6379),
    }  # fmt: skip
    usual = ("learner", "collector", "replay", "evaluator")
    assert reachable(releases["defaults"]) == wanted | looks(*usual)
    relayed = {("collector", "relay", 50053), ("relay", "learner", 50052)}
    assert reachable(releases["relays"]) == wanted | relayed | looks(*usual, "relay")


def test_replay_may_reach_an_external_redis_and_nothing_else_outside(releases: dict[str, Rendered]) -> None:
    egress = releases["external Redis, TLS"].one("NetworkPolicy", "replay")["spec"]["egress"]
    assert egress == [{"ports": [{"port": 6380}], "to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}]
    (dns,) = releases["defaults"].one("NetworkPolicy", "")["spec"]["egress"]
    assert {(p["port"], p["protocol"]) for p in dns["ports"]} == {(53, "UDP"), (53, "TCP")}


def test_replay_logs_in_to_an_external_redis_as_the_secret_says(releases: dict[str, Rendered], tmp_path: Path) -> None:
    url = load(releases["external Redis, TLS"], tmp_path).replay.redis_url
    assert url is not None
    assert url.get_secret_value() == "rediss://{shard}.redis.data:6380/0?ssl_ca_certs=/etc/paceline/redis-tls/ca.crt"
    spec = releases["external Redis, password"].pods()["replay"]["spec"]
    (login,) = [v["secret"] for v in spec["volumes"] if v["name"] == "redis-password"]
    assert (login["secretName"], login["items"]) == ("redis-login", [{"key": "password", "path": "password"}])
    assert load(releases["external Redis, password"], tmp_path).replay.redis_password_file == Path(
        "/etc/paceline/redis/password"
    )
    (container,) = containers(releases["external Redis, whole URL"].pods()["replay"])
    (variable,) = [v for v in container["env"] if v["name"] == "PACELINE_REPLAY__REDIS_URL"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "redis-login", "key": "url"}


# Monitoring


def test_monitoring_is_there_only_where_its_api_is(releases: dict[str, Rendered]) -> None:
    kinds = {"PodMonitor", "PrometheusRule"}
    assert not {o["kind"] for o in releases["defaults"].objects} & kinds
    assert {o["kind"] for o in releases["relays"].objects} >= kinds
    forced = {"monitoring": {kind: {"enabled": "always"} for kind in ("podMonitor", "prometheusRule")}}
    assert {o["kind"] for o in render(forced).objects} >= kinds
    never = {"monitoring": {kind: {"enabled": "never"} for kind in ("podMonitor", "prometheusRule")}}
    assert not {o["kind"] for o in render(never, apis=[PROMETHEUS_OPERATOR]).objects} & kinds


def test_every_page_of_metrics_is_scraped_once_under_its_job(releases: dict[str, Rendered]) -> None:
    release = releases["relays"]
    (monitor,) = release.of("PodMonitor")
    targets = []
    for name, pod in release.pods().items():
        if (
            name == "test"
            or not monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        ):
            continue
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            for p in next(containers(pod))["ports"]:
                if p["name"] == endpoint["port"]:
                    labels = {}
                    for relabeling in endpoint["relabelings"]:
                        source = "__meta_kubernetes_pod_label_app_kubernetes_io_component"
                        by_label = relabeling.get("sourceLabels") == [source]
                        labels[relabeling["targetLabel"]] = name if by_label else relabeling["replacement"]
                    targets.append((p["containerPort"], labels["job"], labels["release"]))
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text(encoding="utf-8"))
    jobs = {job["job_name"] for job in scraped["scrape_configs"]}
    assert sorted(targets) == sorted(
        (number, "endpoint" if number == 9103 else name, RELEASE)
        for name, numbers in METRICS_PORTS.items()
        for number in numbers
    )
    assert jobs <= {job for _, job, _ in targets}


def test_all_rules_and_dashboards_are_there_unchanged(releases: dict[str, Rendered]) -> None:
    release = releases["relays"]
    (rule,) = release.of("PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files/rules/paceline.yaml").read_text(encoding="utf-8"))
    boards = {p.stem: p.read_text(encoding="utf-8") for p in (CHART / "files/dashboards").glob("*.json")}
    found = {
        key.removeprefix("paceline-").removesuffix(".json"): text.rstrip("\n")
        for o in release.of("ConfigMap")
        if o["metadata"]["labels"].get("grafana_dashboard") == "1"
        for key, text in o["data"].items()
    }
    assert found == {name: text.rstrip("\n") for name, text in boards.items()}
    labelled = render(
        {"monitoring": {"prometheusRule": {"enabled": "always", "labels": {"release": "kube-prometheus-stack"}}}}
    )
    (rule,) = labelled.of("PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def test_autoscaling_leaves_the_number_to_the_autoscaler(releases: dict[str, Rendered]) -> None:
    assert releases["defaults"].one("Deployment", "collector")["spec"]["replicas"] == 2
    for case, kind in (("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        deployment = releases[case].one("Deployment", "collector")
        assert "replicas" not in deployment["spec"]
        assert releases[case].one(kind, "collector")["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


# What is refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"collectrs": {}}, "additional properties 'collectrs' not allowed"),
        ({"learner": {"gpus": 1}}, "at '/learner': additional properties 'gpus' not allowed"),
        (
            {"config": {"learner": {"batchsize": 1}}},
            "at '/config/learner': additional properties 'batchsize' not allowed",
        ),
        ({"config": {"learner": {"batch_size": 0}}}, "at '/config/learner/batch_size'"),
        ({"redis": {"mode": "sentinel"}}, "at '/redis/mode': value must be one of 'bundled', 'external'"),
        ({"images": {"redis": {"digest": "abc"}}}, "at '/images/redis/digest'"),
    ],
)
def test_the_schema_refuses(values: Values, message: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"config": {"replay": {"shards": 3}}}, "config.replay.shards is 3 and there are 2 collectors"),
        (
            {"config": {"replay": {"shards": 3}}, "collectors": {"autoscaling": {"kind": "hpa"}}},
            "raise collectors.autoscaling.minReplicas",
        ),
        ({"collectors": {"replicas": 300}}, "there may be up to 300 collectors and config.collector.max_count is 256"),
        ({"collectors": {"autoscaling": {"kind": "hpa", "minReplicas": 9}}}, "minReplicas is 9: expected at most"),
        ({"collectors": {"autoscaling": {"kind": "keda"}}}, "keda.prometheusAddress is empty"),
        ({"config": {"learner": {"device": "cuda"}}}, "config.learner.device is cuda and learner.gpu.count is 0"),
        ({"learner": {"gpu": {"count": 1}}}, "learner.gpu.count is 1 and config.learner.device is cpu"),
        ({"config": {"learner": {"listen": "0.0.0.0:1"}}}, "config.learner.listen is 0.0.0.0:1: the chart sets it to"),
        ({"config": {"collector": {"count": 4}}}, "config.collector.count is 4: the chart sets it to 2"),
        ({"config": {"replay": {"redis_url": "redis://:hunter2@db:6379/0"}}}, "config.replay.redis_url is set"),
        ({"config": {"security": {"allow_insecure": True}}}, "config.security.allow_insecure is set"),
        ({"config": {"collector": {"snapshots_address": "a:1"}}}, "config.collector.snapshots_address is set"),
        ({"redis": {"mode": "external"}}, "there is no redis.external.url"),
        ({"redis": {"mode": "external", "external": {"url": "redis://:pw@h:1/0"}}}, "holds a password or a user"),
        ({"redis": {**EXTERNAL, "perShard": True}}, "redis.perShard is for the bundled Redis"),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://h:1/0", "caSecret": "ca"}}},
            "does not begin with rediss://",
        ),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://h:1/0", "urlKey": "url"}}},
            "redis.external.url and redis.external.urlKey are both set",
        ),
        ({"security": {"certificates": {"source": "existing"}}}, "existingSecrets.learner is empty"),
        ({"learner": {"terminationGracePeriodSeconds": 10}}, "learner.terminationGracePeriodSeconds is 10: expected"),
        ({"config": {"rpc": {"drain_seconds": 100}}}, "terminationGracePeriodSeconds is 60: expected at least 120"),
    ],
)  # fmt: skip
def test_impossible_combinations_are_refused_with_a_sentence(values: Values, message: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert message in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_setting_that_says_what_the_chart_says_is_no_contradiction() -> None:
    render({"config": {"collector": {"count": 2}, "run": {"directory": "/var/lib/paceline/runs"}}})


# What is written by a script


def test_schema_table_and_presets_are_up_to_date() -> None:
    script = importlib.util.spec_from_file_location("chart_values", ROOT / "deploy/chart/values.py")
    assert script is not None
    assert script.loader is not None
    module = importlib.util.module_from_spec(script)
    script.loader.exec_module(module)
    for path, text in module.files():
        assert path.read_text(encoding="utf-8") == text, f"{path} is out of date: make chart"


def test_helm_finds_nothing_to_warn_of() -> None:
    report = helm_python.lint(CHART, strict=True)
    assert report["errors"] == []
    # 1 is advice: it would like an icon.
    assert [m for m in report["messages"] if m["severity"] > 1] == []


def test_notes_say_what_to_do_next(releases: dict[str, Rendered]) -> None:
    notes = releases["defaults"].notes
    for step in ("helm test demo", "kubectl logs", "helm upgrade demo", "kubectl cp", "no Prometheus operator"):
        assert step in notes
    assert "WARNING" not in notes
    assert "learner.persistence.enabled is false" in releases["nothing is kept"].notes
    assert "paceline lag http" in releases["relays"].notes
    (learner,) = releases["defaults"].of("StatefulSet", "learner")
    assert f"statefulset/{learner['metadata']['name']}" in notes
