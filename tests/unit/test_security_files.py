"""Tokens, limits and files on their own, with a clock that the test turns; and what `paceline certs` writes."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import RpcConfig
from paceline.errors import ConfigError, TooManyCallsError, TooManyStreamsError
from paceline.local.issuing import SERVICES, issue
from paceline.rpc.exposure import is_loopback
from paceline.rpc.limits import PeerLimits
from paceline.rpc.tokens import ClientToken, ServerTokens

OLD, NEW = "an-old-token-of-this-role", "a-new-token-of-this-role"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def write(path: Path, text: str) -> None:
    (path.parent / "new").write_text(text)
    (path.parent / "new").replace(path)


def roles(tokens: ServerTokens, token: str) -> set[str]:
    found = tokens.roles_of({"authorization": f"Bearer {token}"})
    assert found is not None
    return set(found)


def test_a_replaced_token_is_good_until_its_grace_is_over_and_not_a_moment_longer(tmp_path, clock):
    write(tmp_path / "reader", OLD)
    tokens = ServerTokens(tmp_path, grace_seconds=10, clock=clock)
    assert (roles(tokens, OLD), roles(tokens, NEW)) == ({"reader"}, set())
    clock.now = 5
    write(tmp_path / "reader", NEW)
    assert (roles(tokens, OLD), roles(tokens, NEW)) == ({"reader"}, {"reader"})
    clock.now = 14.9
    assert roles(tokens, OLD) == {"reader"}
    clock.now = 15
    assert (roles(tokens, OLD), roles(tokens, NEW)) == (set(), {"reader"})


def test_a_token_that_comes_back_is_good_for_ever_again(tmp_path, clock):
    write(tmp_path / "reader", OLD)
    tokens = ServerTokens(tmp_path, grace_seconds=10, clock=clock)
    for token in (NEW, OLD):
        write(tmp_path / "reader", token)
        assert roles(tokens, token) == {"reader"}
    clock.now = 100
    assert roles(tokens, OLD) == {"reader"}


def test_a_removed_token_goes_after_its_grace_and_an_added_one_comes(tmp_path, clock):
    write(tmp_path / "reader", OLD)
    tokens = ServerTokens(tmp_path, grace_seconds=10, clock=clock)
    write(tmp_path / "collector", NEW)
    (tmp_path / "reader").unlink()
    assert (roles(tokens, OLD), roles(tokens, NEW)) == ({"reader"}, {"collector"})
    clock.now = 10
    assert roles(tokens, OLD) == set()


def test_one_token_in_two_files_has_both_roles(tmp_path):
    for role in ("reader", "collector"):
        write(tmp_path / role, OLD)
    assert roles(ServerTokens(tmp_path, grace_seconds=0), OLD) == {"reader", "collector"}


def test_tokens_that_turn_malformed_leave_those_before_in_use(tmp_path):
    write(tmp_path / "reader", OLD)
    tokens = ServerTokens(tmp_path, grace_seconds=0)
    write(tmp_path / "reader", "short")
    assert roles(tokens, OLD) == {"reader"}
    write(tmp_path / "reader", NEW)
    assert (roles(tokens, OLD), roles(tokens, NEW)) == (set(), {"reader"})


def test_a_client_shows_what_was_good_first_and_forgets_it_when_it_is_refused(tmp_path):
    write(tmp_path / "reader", OLD)
    token = ClientToken(tmp_path, "reader")
    token.accept(OLD)
    write(tmp_path / "reader", NEW)
    assert token.candidates() == [OLD, NEW]
    token.refuse(OLD)
    assert token.candidates() == [NEW]


def test_calls_are_admitted_at_the_rate_that_is_set_for_each_peer(clock):
    limits = PeerLimits(RpcConfig(max_calls_per_second_per_peer=3), clock)
    for _ in range(3):
        limits.take_call("a")
    for _ in range(5):
        with pytest.raises(TooManyCallsError):
            limits.take_call("a")
    limits.take_call("b")
    clock.now = 0.34  # time for one
    limits.take_call("a")
    with pytest.raises(TooManyCallsError):
        limits.take_call("a")
    clock.now = 100
    for _ in range(3):  # silence saves up no more than a second's
        limits.take_call("a")
    with pytest.raises(TooManyCallsError):
        limits.take_call("a")


def test_peers_that_are_gone_cost_no_memory(clock):
    limits = PeerLimits(RpcConfig(max_connections=5), clock)
    for number in range(100):
        limits.take_call(f"peer {number}")
        with limits.stream(f"peer {number}"):
            pass
    assert len(limits._left) == 5
    assert not limits._streams


def test_a_stream_gives_its_place_back_however_it_ends():
    limits = PeerLimits(RpcConfig(max_streams_per_peer=1))
    for _ in range(2):
        with (
            pytest.raises(TooManyStreamsError, match="peer a has 1 streams"),
            limits.stream("peer a"),
            limits.stream("peer a"),
        ):
            pass
    with limits.stream("peer a"):
        pass


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("localhost.example.org:1", False),
        ("127.0.0.1.example.org:1", False),
    ],
)
def test_only_this_machine_reaches_a_loopback_address(address, expected):
    assert is_loopback(address) is expected


def names_of(path: Path) -> set[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def test_certs_makes_a_folder_for_each_service_with_what_it_needs_and_keys_for_their_owner_alone(tmp_path):
    result = CliRunner().invoke(app, ["certs", str(tmp_path), "--host", "replay.example.org", "--host", "10.0.0.7"])
    assert result.exit_code == 0, result.output
    for service, needed in SERVICES.items():
        folder = tmp_path / service
        assert names_of(folder / "tls.crt") == {
            *(service, f"*.{service}", "localhost", "127.0.0.1", "::1", "replay.example.org", "10.0.0.7")
        }
        assert (folder / "ca.crt").read_bytes() == (tmp_path / "ca" / "ca.crt").read_bytes()
        assert {path.name for path in folder.glob("tokens/*")} == set(needed)
    secrets = [*tmp_path.rglob("*.key"), *tmp_path.rglob("tokens/*"), tmp_path / "redis" / "password"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    for role in ("collector", "learner", "reader"):
        assert len({path.read_text() for path in tmp_path.glob(f"*/tokens/{role}")}) == 1
    assert len({path.read_text() for path in tmp_path.glob("learner/tokens/*")}) == 3
    # What was made is said, and no secret of it.
    for path in secrets:
        assert str(path.read_text().strip()) not in result.output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_certs_keeps_what_is_there_and_renews_certificates_alone(tmp_path):
    issue(tmp_path, days=2)
    before = contents(tmp_path)
    assert "everything is there already" in issue(tmp_path, days=2)[0]
    assert contents(tmp_path) == before
    issue(tmp_path, days=3, renew=True)
    after = contents(tmp_path)
    changed = {name for name in before if before[name] != after[name]}
    assert before.keys() == after.keys()
    assert changed == {f"{service}/{name}" for service in SERVICES for name in ("tls.crt", "tls.key")}


def test_certs_mends_a_folder_that_lost_something(tmp_path):
    issue(tmp_path, days=2)
    token = (tmp_path / "learner" / "tokens" / "reader").read_text()
    shutil.rmtree(tmp_path / "evaluator")
    issue(tmp_path, days=2)
    assert (tmp_path / "evaluator" / "tokens" / "reader").read_text() == token
    (tmp_path / "redis" / "password").write_text("another-password\n")
    rules = (tmp_path / "redis" / "users.acl").read_text()
    issue(tmp_path, days=2)
    assert (tmp_path / "redis" / "users.acl").read_text() != rules


def test_certs_is_valid_for_the_days_that_were_asked_for(tmp_path):
    issue(tmp_path, days=7)
    certificate = x509.load_pem_x509_certificate((tmp_path / "replay" / "tls.crt").read_bytes())
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 7


@pytest.mark.parametrize("host", ["", "a b", "https://host", "host:1", ".x"])
def test_certs_refuses_what_is_no_host(tmp_path, host):
    with pytest.raises(ConfigError, match="expected a host name"):
        issue(tmp_path, hosts=[host], days=1)
    assert list(tmp_path.iterdir()) == []


def test_certs_refuses_an_authority_that_is_damaged_or_no_pair(tmp_path):
    issue(tmp_path / "a", days=1)
    issue(tmp_path / "b", days=1)
    shutil.copy(tmp_path / "b" / "ca" / "ca.key", tmp_path / "a" / "ca" / "ca.key")
    with pytest.raises(ConfigError, match="are no pair"):
        issue(tmp_path / "a", days=1)
    (tmp_path / "a" / "ca" / "ca.key").write_text("x")
    with pytest.raises(ConfigError, match="is no certificate authority"):
        issue(tmp_path / "a", days=1)
