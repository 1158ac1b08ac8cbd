"""A whole run over mutual TLS with tokens and a Redis that wants a password, and where its secrets turn up: nowhere."""

from __future__ import annotations

import shlex
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from e2e.harness import PACELINE, ROOT, SMALL, Training
from e2e.test_readme import commands
from integration.replay_harness import free_port
from paceline.config import RpcConfig, SecurityConfig
from paceline.errors import HandshakeError, PacelineError
from paceline.identity import PROTOCOL_VERSION
from paceline.rpc.client import open_channel
from paceline.rpc.status import raising
from paceline.rpc.tokens import READER
from paceline.v1 import run_pb2, run_pb2_grpc
from redis_servers import start_redis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

PASSWORD = "a-password-that-nobody-may-see"


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    server = start_redis("embedded", tmp_path / "redis", port=str(port))
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", PASSWORD)
    yield f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
    server.stop()


def paceline(*arguments: str) -> str:
    """What a command says, on both outputs."""
    result = subprocess.run(
        [*PACELINE, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return result.stdout + result.stderr


def join(address: str, run_id: str, settings: SecurityConfig) -> None:
    request = run_pb2.JoinRequest(run_id=run_id, protocol_version=PROTOCOL_VERSION, role=run_pb2.ROLE_EVALUATOR)
    with open_channel(address, RpcConfig(), settings, READER) as channel, raising("the learner"):
        run_pb2_grpc.RunServiceStub(channel).Join(request, timeout=20)


def command_lines(training: Training) -> list[str]:
    lines = []
    for pid in [training.process.pid, *training.children()]:
        path = Path("/proc", str(pid), "cmdline")
        lines.append(path.read_bytes().replace(b"\0", b" ").decode() if path.exists() else "")
    return lines


def test_a_run_trains_with_everything_secured_and_shows_its_secrets_nowhere(tmp_path, redis_url, monkeypatch):
    monkeypatch.setenv("PACELINE_REPLAY__REDIS_URL", redis_url)
    make, train = commands("paceline certs")[0], next(each for each in commands("paceline train") if "secured" in each)
    said = [paceline(*shlex.split(make.replace("secrets", str(tmp_path / "secrets")))[1:])]
    folder = tmp_path / "runs" / "secured"
    folder.parent.mkdir()
    arguments = [
        *shlex.split(train.replace("secrets/", f"{tmp_path}/secrets/"))[2:],
        f"run.directory={tmp_path / 'runs'}",
        "run.environment_steps=900",
        "replay.read=sample",  # by a process of its own
        *SMALL,
    ]
    said.append(paceline("config", *arguments))
    training = Training(folder, arguments)
    training.wait_for_steps(200)

    lines = command_lines(training)
    addresses = training.metrics_addresses()
    assert {"replay", "learner", "endpoint", "collector", "evaluator"} <= addresses.keys()
    for address in (each for some in addresses.values() for each in some):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as page:
            said.append(page.read().decode())
    learner = next(
        part.partition("=")[2] for line in lines for part in line.split() if part.startswith("learner.listen=")
    )
    mine = SecurityConfig(
        certificates=tmp_path / "secrets" / "evaluator", tokens=tmp_path / "secrets" / "evaluator" / "tokens"
    )
    join(learner, "secured", mine)
    with pytest.raises(HandshakeError, match="speaks TLS"):
        join(learner, "secured", SecurityConfig())
    with pytest.raises(PacelineError, match="without a token"):
        join(learner, "secured", SecurityConfig(certificates=mine.certificates))

    assert training.wait() == 0, training.text()
    assert "the run is complete" in training.text()
    said += [*lines, training.text()]
    said += [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    assert any("replay_serving" in text for text in said)  # logs are among them
    assert not any("security_off" in text for text in said)

    secrets = {PASSWORD} | {path.read_text().strip() for path in (tmp_path / "secrets").rglob("tokens/*")}
    secrets |= {path.read_text().splitlines()[1] for path in (tmp_path / "secrets").rglob("*.key")}
    assert len(secrets) == 1 + 3 + 7
    shown = [(secret, text[:200]) for secret in secrets for text in said if secret in text]
    assert shown == []


def test_a_service_that_listens_to_other_machines_unsecured_ends_with_the_remedy(tmp_path):
    command = [*PACELINE, "replay", "run.id=open", "replay.listen=0.0.0.0:0", "replay.redis_url=redis://127.0.0.1:1/0"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "0.0.0.0:0 is open to other machines" in result.stderr
    assert "paceline certs FOLDER" in result.stderr
