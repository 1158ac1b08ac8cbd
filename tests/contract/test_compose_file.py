"""What deploy/compose.yaml promises, as it is written: it starts anywhere, exposes nothing, and kills nobody early."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGES = {"prometheus", "grafana"}
OURS = {"replay", "learner", "collector", "evaluator"}


def pins() -> dict[str, str]:
    """The variables of .env."""
    lines = (DEPLOY / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def load(name: str) -> dict[str, Any]:
    """A compose file with the variables of .env in it; one that is not there fails the test."""
    values = pins()
    text = re.sub(r"(?<!\$)\$\{(\w+)\}", lambda match: values[match[1]], (DEPLOY / name).read_text())
    tree: dict[str, Any] = yaml.safe_load(text)
    return tree


COMPOSE = load("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
each_service = pytest.mark.parametrize("name", SERVICES)


def seconds(text: str) -> float:
    return float(re.fullmatch(r"(\d+)s", text)[1])  # type: ignore[index]


def test_it_starts_everything_that_a_run_needs():
    assert SERVICES.keys() == OURS | PAGES | {"redis", "certs"}
    assert SERVICES["collector"]["scale"] == 2


@each_service
def test_a_service_is_hardened(name):
    service = SERVICES[name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert any(each.startswith("/tmp:") for each in service["tmpfs"])
    assert not {"privileged", "pid", "ipc", "devices"} & service.keys()


@each_service
def test_a_service_has_limits_and_its_log_has_an_end(name):
    service = SERVICES[name]
    assert re.fullmatch(r"\d+[gm]", service["mem_limit"])
    assert service["pids_limit"] > 0
    assert service["logging"]["options"]["max-size"]


@each_service
def test_nothing_but_the_pages_is_published_and_they_on_loopback(name):
    ports = SERVICES[name].get("ports", [])
    if name in PAGES:
        assert ports
        assert all(port.startswith("127.0.0.1:") for port in ports)
    else:
        assert not ports
        networks = SERVICES[name].get("networks", [])
        assert all(COMPOSE["networks"][network]["internal"] for network in networks)
        assert networks or SERVICES[name]["network_mode"] == "none"


@each_service
def test_any_service_can_be_scaled_and_none_needs_a_gpu(name):
    assert "container_name" not in SERVICES[name]
    assert "hostname" not in SERVICES[name]
    assert "gpu" not in str(SERVICES[name])


@each_service
def test_a_service_has_a_health_check_that_its_image_can_run(name):
    check = SERVICES[name]["healthcheck"]
    if name == "certs":
        assert check == {"disable": True}  # it ends, and the others wait for that
        return
    test = check["test"]
    assert seconds(check["timeout"]) > 4  # the answer's own limit, so that the reason is still said
    if name in OURS:
        port = {"replay": ["9101"], "learner": ["9102", "9103"], "collector": ["9104"], "evaluator": ["9105"]}[name]
        assert test == ["CMD", "python", "-m", "paceline", "health", *port, "--ready"]
    elif name == "redis":
        assert "= PONG ]" in test[1]
        assert "^loading:0" in test[1]
    else:
        assert test[0] == "CMD"
        assert test[1] in {"promtool", "wget"}


@pytest.mark.parametrize(
    ("ping", "loading", "is_well"),
    [
        ("PONG", "loading:0", True),
        ("LOADING Redis is loading the dataset in memory", "loading:0", False),
        ("PONG", "loading:1", False),
        ("NOAUTH Authentication required.", "NOAUTH Authentication required.", False),
        ("", "", False),
    ],
)
def test_redis_is_well_when_it_says_pong_and_has_loaded_whatever_redis_cli_exits_with(tmp_path, ping, loading, is_well):
    # The client ends with 0 in each of these states.
    client = tmp_path / "redis-cli"
    client.write_text(f'#!/bin/sh\n[ "$1" = ping ] && echo "{ping}" || printf "# Persistence\\r\\n{loading}\\r\\n"\n')
    client.chmod(0o755)
    kind, command = SERVICES["redis"]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    done = subprocess.run(
        ["/bin/sh", "-c", command.replace("$$", "$")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode == 0) is is_well


@each_service
def test_a_service_waits_until_those_before_it_are_well(name):
    for before, how in SERVICES[name].get("depends_on", {}).items():
        expected = "service_completed_successfully" if before == "certs" else "service_healthy"
        assert how == {"condition": expected}, before


def test_the_start_is_in_the_order_of_what_is_needed():
    order: list[str] = []
    while len(order) < len(SERVICES):
        free = [
            name
            for name, service in SERVICES.items()
            if name not in order and set(service.get("depends_on", {})) <= set(order)
        ]
        assert free, "services wait for each other"
        order += free
    for before, after in (("certs", "redis"), ("redis", "replay"), ("replay", "learner"), ("learner", "collector")):
        assert order.index(before) < order.index(after)
    assert "learner" in SERVICES["evaluator"]["depends_on"]


def test_grace_periods_are_twice_what_a_stop_takes():
    text = (ROOT / "docs" / "operations.md").read_text()
    documented = {role: float(took) for role, took in re.findall(r"^\| (\w+) \| (\d+) \|", text, re.MULTILINE)}
    assert documented.keys() >= OURS
    for name in SERVICES:
        grace = seconds(SERVICES[name]["stop_grace_period"])
        assert grace >= max(2 * documented.get(name, 0), 10), name


def test_what_ends_by_itself_is_not_started_again_and_what_stays_is():
    restarts = {name: service["restart"] for name, service in SERVICES.items()}
    ends = {"certs", "learner", "collector", "evaluator"}
    assert {name for name, restart in restarts.items() if restart == "on-failure"} == ends
    assert {name for name, restart in restarts.items() if restart == "unless-stopped"} == SERVICES.keys() - ends
    for name in ("replay", "learner"):
        assert "--resume-or-start" in SERVICES[name]["command"]


def test_redis_keeps_what_it_acknowledged_and_evicts_nothing_and_wants_a_password():
    words = " ".join(SERVICES["redis"]["command"])
    for option in ("--appendonly yes", "--appendfsync everysec", "--maxmemory-policy noeviction", "--aclfile "):
        assert option in words
    assert SERVICES["redis"]["networks"] == ["record"]
    assert [name for name, service in SERVICES.items() if "record" in service.get("networks", [])] == [
        "redis",
        "replay",
    ]


def test_a_service_gets_its_own_secrets_and_cannot_change_them():
    secret = {name for name in COMPOSE["volumes"] if name.startswith("certs-")}
    allowed = {"redis": {"certs-redis"}, "replay": {"certs-replay", "certs-redis"}}
    for name, service in SERVICES.items():
        if name == "certs":
            continue
        mounted = [each for each in service.get("volumes", []) if isinstance(each, dict) and each["source"] in secret]
        assert {each["source"] for each in mounted} <= allowed.get(name, {f"certs-{name}"})
        assert all(each["read_only"] for each in mounted)
    for name in OURS:
        environment = SERVICES[name]["environment"]
        assert environment["PACELINE_SECURITY__CERTIFICATES"] == "/etc/paceline/tls"
        assert environment["PACELINE_SECURITY__TOKENS"].startswith("/etc/paceline/tls/")
        assert not any("ALLOW_INSECURE" in key or "PASSWORD:" in str(value) for key, value in environment.items())


def test_an_empty_volume_takes_the_user_of_the_services_as_its_owner():
    """Each named volume is mounted first by `certs` or the learner, on a folder of the image that was made for it."""
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    made = set(
        re.findall(r"paceline(?:/[a-z]+)+", dockerfile[dockerfile.index("install -d") : dockerfile.index("chown")])
    )
    first = {
        each.split(":")[0]: each.split(":")[1]
        for each in SERVICES["certs"]["volumes"] + SERVICES["learner"]["volumes"]
        if isinstance(each, str) and each.split(":")[0] in COMPOSE["volumes"]
    }
    assert first.keys() == COMPOSE["volumes"].keys()
    for volume, target in first.items():
        assert target.removeprefix("/var/lib/") in made, volume
    for name, service in SERVICES.items():
        for each in service.get("volumes", []):
            if isinstance(each, dict):
                assert each["volume"] == {"nocopy": True}, (name, each)


def test_versions_are_pinned():
    project = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None
    assert pins()["TAG"] == project[1]
    for name, service in SERVICES.items():
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), name
    default = re.search(r"^ARG BASE=(.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert default is not None
    assert pins()["BASE"] == default[1]
    assert re.search(r":\d+\.\d+\.\d+", default[1])


def test_every_file_that_is_mounted_is_there():
    for name, service in SERVICES.items():
        for each in service.get("volumes", []):
            if isinstance(each, str) and each.startswith("."):
                assert (DEPLOY / each.split(":")[0]).exists(), (name, each)
                assert each.endswith(":ro"), (name, each)


def test_the_settings_in_the_variables_are_settings():
    from paceline import config

    for name in OURS:
        environment = SERVICES[name]["environment"]
        settings = config.load(ROOT / "configs" / "pendulum-sac.yaml", [], environment)
        assert settings.run_id == pins()["RUN_ID"]
        assert settings.replay.address == "replay:50051"
        assert settings.learner.address == "learner:50052"


def test_prometheus_scrapes_where_the_services_listen():
    environment = SERVICES["replay"]["environment"]
    ports = {key: value.rpartition(":")[2] for key, value in environment.items() if key.endswith("METRICS_LISTEN")}
    scraped = (DEPLOY / "prometheus" / "prometheus.yaml").read_text()
    for port in ports.values():
        assert port in scraped


def test_gpus_are_in_a_file_of_their_own():
    (learner,) = load("compose.gpu.yaml")["services"].values()
    assert learner["environment"]["PACELINE_LEARNER__DEVICE"] == "cuda"
    (device,) = learner["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_the_images_start_python_itself_as_nobody():
    text = (DEPLOY / "Dockerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    assert ast.literal_eval(entry) == ["python", "-m", "paceline"]
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    for stage in stages:
        if re.match(r"\S+ AS (replay|collector|learner)\n", stage):
            assert re.findall(r"^USER (.*)$", stage, re.MULTILINE)[-1] == "10001:10001"
