"""Who is refused, by both kinds of server, over real sockets, and what the refused one is told."""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest
import trustme
from cryptography import x509
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from contract.test_rpc import (
    DEADLINE_SECONDS,
    KINDS,
    Kind,
    LoopServer,
    Scene,
    call_until_refused,
    event_loop,
    health_of,
    thread_pool,
)
from paceline.config import RpcConfig, SecurityConfig
from paceline.errors import (
    ConfigError,
    ForbiddenError,
    HandshakeError,
    PacelineError,
    TooManyCallsError,
    TooManyStreamsError,
    UnauthenticatedError,
    UnavailableError,
)
from paceline.local.issuing import issue
from paceline.process import StopSignal
from paceline.rpc.access import JOIN, ROLES_OF_METHOD
from paceline.rpc.client import Backoff, call_until_answered, open_channel
from paceline.rpc.server import Server
from paceline.rpc.status import RETRYABLE, raising
from paceline.rpc.tokens import COLLECTOR, LEARNER, READER, ROLES
from paceline.v1 import parameters_pb2, replay_pb2, run_pb2, run_pb2_grpc

RPC = RpcConfig(drain_seconds=0.5)
MAKERS = {"thread pool": thread_pool, "event loop": event_loop}
PAST = {"not_before": datetime.datetime(2020, 1, 1), "not_after": datetime.datetime(2021, 1, 1)}
# A call that either server admits by its token, for a channel of that role.
ROLE_OF_KIND = {"thread pool": READER, "event loop": COLLECTOR}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """What `paceline certs` makes, for a run; nobody writes to it."""
    folder = tmp_path_factory.mktemp("certs")
    issue(folder, days=2)
    return folder


@pytest.fixture(scope="module")
def strangers(tmp_path_factory) -> Path:
    """The same of another run."""
    folder = tmp_path_factory.mktemp("strangers")
    issue(folder, days=2)
    return folder


def security(folder: Path, service: str = "learner", **more: object) -> SecurityConfig:
    return SecurityConfig(certificates=folder / service, tokens=folder / service / "tokens", **more)


@pytest.fixture(params=KINDS)
def name(request) -> str:
    return request.param


@pytest.fixture
def kind(name) -> Kind:
    return KINDS[name]


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.release.set()


@pytest.fixture
def serve(name, scene) -> Iterator[Callable[..., int]]:
    """Starts a server of the kind, and gives its port."""
    with ExitStack() as stack:

        def start(settings: SecurityConfig, config: RpcConfig = RPC) -> int:
            server: Server | LoopServer = MAKERS[name](scene, "127.0.0.1:0", config, security=settings)
            server.start()
            server.set_serving(True)
            stack.callback(server.stop)
            return server.port

        yield start
        scene.release.set()


def call(kind: Kind, port: int, settings: SecurityConfig, role: str, run_id: str = "answer") -> object:
    with open_channel(f"127.0.0.1:{port}", RPC, settings, role) as channel, raising("the server"):
        return kind.unary(channel, run_id)


def trustme_folder(folder: Path, certificate: trustme.LeafCert | None, authority: trustme.CA) -> Path:
    folder.mkdir()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    if certificate is not None:
        certificate.private_key_pem.write_to_path(folder / "tls.key")
        for blob in certificate.cert_chain_pems:
            blob.write_to_path(folder / "tls.crt", append=True)
    return folder


# Certificates


def test_with_certificates_and_tokens_calls_and_streams_are_answered(kind, name, serve, files):
    port = serve(security(files))
    with open_channel(f"127.0.0.1:{port}", RPC, security(files), ROLE_OF_KIND[name]) as channel:
        kind.unary(channel, "answer")
    with open_channel(f"127.0.0.1:{port}", RPC, security(files), COLLECTOR) as channel:
        assert len(list(kind.stream(channel, "answer"))) == 1


def test_a_server_of_another_authority_is_refused_by_the_client_which_names_its_file(kind, serve, files, strangers):
    port = serve(security(files))
    expected = rf"server at 127.0.0.1:{port} is signed by none of .*strangers.*ca.crt.*expected the ca.crt"
    with pytest.raises(HandshakeError, match=expected) as caught:
        call(kind, port, security(strangers), READER)
    assert isinstance(caught.value, RETRYABLE)  # it goes on as soon as somebody mends the file


def test_a_client_of_another_authority_is_refused_and_told_which_certificate(kind, serve, files, strangers, tmp_path):
    port = serve(security(files))
    shutil.copytree(strangers / "evaluator", tmp_path / "mixed")
    shutil.copy(files / "ca" / "ca.crt", tmp_path / "mixed" / "ca.crt")
    settings = SecurityConfig(certificates=tmp_path / "mixed", tokens=files / "learner" / "tokens")
    with pytest.raises(HandshakeError, match=rf"refuses our certificate {tmp_path}/mixed/tls.crt"):
        call(kind, port, settings, READER)


def test_a_client_without_a_certificate_is_refused_where_servers_want_one(kind, name, serve, files, tmp_path):
    (tmp_path / "bare").mkdir()
    shutil.copy(files / "ca" / "ca.crt", tmp_path / "bare")
    tokens = files / "learner" / "tokens"
    bare = SecurityConfig(certificates=tmp_path / "bare", tokens=tokens, client_certificates=False)
    with pytest.raises(HandshakeError, match=r"wants a certificate of each client, and there is no .*bare/tls.crt"):
        call(kind, serve(security(files)), bare, READER)
    with pytest.raises(ConfigError, match=r"bare has no tls.crt, tls.key: expected"):
        call(kind, 1, bare.model_copy(update={"client_certificates": True}), READER)
    call(kind, serve(security(files, client_certificates=False)), bare, ROLE_OF_KIND[name])


def test_a_plain_client_of_a_tls_server_is_told_so(kind, serve, files):
    port = serve(security(files))
    with pytest.raises(HandshakeError, match=r"speaks TLS and this client does not: set security.certificates"):
        call(kind, port, SecurityConfig(), READER)


def test_a_tls_client_of_a_plain_server_is_told_so(kind, serve, files):
    port = serve(SecurityConfig())
    with pytest.raises(HandshakeError, match=r"does not speak TLS \(WRONG_VERSION_NUMBER\) and this client does"):
        call(kind, port, security(files), READER)


def test_a_certificate_for_another_name_is_refused(kind, serve, files, tmp_path):
    authority = trustme.CA()
    folder = trustme_folder(tmp_path / "elsewhere", authority.issue_cert("elsewhere.example.org"), authority)
    settings = SecurityConfig(certificates=folder)
    with pytest.raises(HandshakeError, match=r"is for another name: .*paceline certs FOLDER --renew --host NAME"):
        call(kind, serve(settings), settings, READER)


def test_an_expired_certificate_of_a_server_is_refused_by_the_client(tmp_path):
    # Ours does not start with one (below); a server whose certificate expires as it runs serves it still.
    authority = trustme.CA()
    old = authority.issue_cert("127.0.0.1", **PAST)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    pair = (old.private_key_pem.bytes(), b"".join(blob.bytes() for blob in old.cert_chain_pems))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    settings = SecurityConfig(
        certificates=trustme_folder(tmp_path / "client", None, authority), client_certificates=False
    )
    try:
        with (
            open_channel(f"127.0.0.1:{port}", RPC, settings) as channel,
            pytest.raises(HandshakeError, match=rf"the server at 127.0.0.1:{port} has expired: renew tls.crt"),
            raising("the server"),
        ):
            health_of(channel)
    finally:
        server.stop(0).wait()


def test_an_expired_certificate_of_a_client_is_refused_by_the_server(kind, serve, tmp_path):
    authority = trustme.CA()
    port = serve(
        SecurityConfig(certificates=trustme_folder(tmp_path / "s", authority.issue_cert("127.0.0.1"), authority))
    )
    for dates, answers in ((PAST, False), ({}, True)):
        own = authority.issue_cert("client", **dates)
        chain = b"".join(blob.bytes() for blob in own.cert_chain_pems)
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes(), own.private_key_pem.bytes(), chain)
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            if answers:
                kind.unary(channel, "answer")
                continue
            with pytest.raises(UnavailableError), raising("the server"):
                kind.unary(channel, "answer")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "is no folder: expected one with tls.crt, tls.key, ca.crt"),
        (lambda folder: (folder / "tls.key").unlink(), "has no tls.key: expected"),
        (lambda folder: (folder / "ca.crt").write_text("x"), "ca.crt is no certificate"),
        (lambda folder: (folder / "tls.key").write_text("x"), "tls.key is no private key"),
        (
            lambda folder: shutil.copy(folder.parent / "other" / "tls.key", folder),
            "is not the key of tls.crt beside it",
        ),
        (lambda folder: shutil.copy(folder.parent / "old" / "tls.crt", folder), "tls.key is not the key"),
        (lambda folder: shutil.copytree(folder.parent / "old", folder, dirs_exist_ok=True), "expired at 2021-01-01"),
    ],
)
def test_files_that_are_wrong_are_refused_at_the_start_by_name(name, scene, tmp_path, damage, message):
    authority = trustme.CA()
    folder = trustme_folder(tmp_path / "own", authority.issue_cert("127.0.0.1"), authority)
    trustme_folder(tmp_path / "other", authority.issue_cert("127.0.0.1"), authority)
    trustme_folder(tmp_path / "old", authority.issue_cert("127.0.0.1", **PAST), authority)
    damage(folder)
    settings = SecurityConfig(certificates=folder)
    with pytest.raises(ConfigError, match=message) as caught:
        MAKERS[name](scene, "127.0.0.1:0", RPC, security=settings)
    assert str(folder) in str(caught.value)
    with pytest.raises(ConfigError, match=message):
        open_channel("127.0.0.1:1", RPC, settings)


def served_serial(port: int, folder: Path) -> int:
    """The serial number of the certificate that the server shows to a new connection."""
    import ssl

    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    with socket.create_connection(("127.0.0.1", port), 5) as plain:  # noqa: SIM117
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as secured:
            der = secured.getpeercert(binary_form=True)
            assert der is not None
            return x509.load_der_x509_certificate(der).serial_number


def serial_of(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def test_renewed_certificates_are_used_by_new_connections_while_open_streams_live_on(kind, serve, scene, tmp_path):
    issue(tmp_path, days=2)
    server, client = security(tmp_path, "learner"), security(tmp_path, "collector")
    port = serve(server)
    with open_channel(f"127.0.0.1:{port}", RPC, client, COLLECTOR) as channel:
        stream = kind.stream(channel, "wait")
        next(stream)
        scene.wait_until_entered()
        before = served_serial(port, tmp_path / "learner")
        assert before == serial_of(tmp_path / "learner" / "tls.crt")

        issue(tmp_path, days=2, renew=True)
        after = served_serial(port, tmp_path / "learner")
        assert after == serial_of(tmp_path / "learner" / "tls.crt") != before
        assert len(list(kind.stream(channel, "answer"))) == 1  # on a connection with the new certificate
        scene.release.set()
        assert list(stream) == []  # the old stream ended well


def test_after_a_change_of_the_authority_a_client_uses_its_new_files_and_a_call_of_before_ends_well(
    kind, serve, scene, tmp_path
):
    # An authority is replaced whole, which no connection with the old certificates would survive.
    issue(tmp_path / "a", days=2)
    issue(tmp_path / "b", days=2)
    shutil.copytree(tmp_path / "a" / "learner", tmp_path / "now")
    settings = SecurityConfig(certificates=tmp_path / "now")
    port = serve(settings)
    with open_channel(f"127.0.0.1:{port}", RPC, settings) as channel:
        answers = []
        caller = threading.Thread(target=lambda: answers.append(list(kind.stream(channel, "wait"))))
        caller.start()
        scene.wait_until_entered()
        for file in ("ca.crt", "tls.key", "tls.crt"):
            replaced = tmp_path / "now" / f"{file}.new"
            shutil.copy(tmp_path / "b" / "learner" / file, replaced)
            os.replace(replaced, tmp_path / "now" / file)
        with raising("the server"):
            kind.unary(channel, "answer")
        assert served_serial(port, tmp_path / "now") == serial_of(tmp_path / "b" / "learner" / "tls.crt")
        scene.release.set()
        caller.join(DEADLINE_SECONDS)
        assert [len(answer) for answer in answers] == [1]


def test_a_client_connects_anew_with_its_new_files_when_the_server_came_back_with_another_authority(
    kind, name, scene, tmp_path
):
    issue(tmp_path / "a", days=2)
    issue(tmp_path / "b", days=2)
    shutil.copytree(tmp_path / "a" / "learner", tmp_path / "now")
    settings = SecurityConfig(certificates=tmp_path / "now")
    server = MAKERS[name](scene, "127.0.0.1:0", RPC, security=settings)
    server.start()
    address = f"127.0.0.1:{server.port}"
    with open_channel(address, RPC, settings) as channel:
        kind.unary(channel, "answer")
        server.stop()
        shutil.copytree(tmp_path / "b" / "learner", tmp_path / "now", dirs_exist_ok=True)
        server = MAKERS[name](scene, address, RPC, security=settings)
        server.start()
        try:
            call_until_answered(
                lambda: kind.unary(channel, "answer"),
                peer="the server",
                backoff=Backoff(RPC, 0),
                stop=StopSignal(),
                on_wait=fail_after(time.monotonic() + DEADLINE_SECONDS),
            )
        finally:
            server.stop()


def fail_after(until: float) -> Callable[[PacelineError, float], None]:
    def check(error: PacelineError, seconds: float) -> None:
        assert time.monotonic() < until, error

    return check


def test_a_half_done_renewal_leaves_the_certificates_of_before_in_use(kind, name, serve, tmp_path, files):
    shutil.copytree(files / "learner", tmp_path / "now")
    settings = SecurityConfig(certificates=tmp_path / "now")
    port, whole = serve(settings), serial_of(tmp_path / "now" / "tls.crt")
    shutil.copy(files / "replay" / "tls.key", tmp_path / "now" / "tls.key")
    assert served_serial(port, files / "learner") == whole
    call(kind, port, security(files), ROLE_OF_KIND[name])
    shutil.copy(files / "replay" / "tls.crt", tmp_path / "now" / "tls.crt")
    assert served_serial(port, files / "learner") == serial_of(files / "replay" / "tls.crt")


class SlowNetwork:
    """A way to a port, each direction of which takes its time."""

    def __init__(self, port: int, seconds: float) -> None:
        self._to, self._seconds = ("127.0.0.1", port), seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        self._start(self._accept)

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _start(self, target: Callable[..., None], *arguments: socket.socket) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ends = self._listener.accept()[0], socket.create_connection(self._to)
                self._sockets += ends
                self._start(self._carry, *ends)
                self._start(self._carry, *reversed(ends))

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self._seconds)  # the network's delay
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_a_handshake_may_take_several_round_trips_of_a_slow_network(kind, name, serve, files):
    network = SlowNetwork(serve(security(files)), 0.06)
    try:
        call(kind, network.port, security(files), ROLE_OF_KIND[name])
    finally:
        network.close()


# Tokens


def test_a_call_and_a_stream_without_a_token_are_refused_and_say_how_to_get_one(kind, serve, files):
    port = serve(security(files))
    without = SecurityConfig(certificates=files / "learner")
    with open_channel(f"127.0.0.1:{port}", RPC, without) as channel:
        for attempt in (kind.unary, lambda *arguments: list(kind.stream(*arguments))):
            with pytest.raises(UnauthenticatedError, match=r"without a token: .*set security.tokens") as caught:  # noqa: SIM117
                with raising("the server"):
                    attempt(channel, "answer")
            assert caught.value.__cause__.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not isinstance(caught.value, RETRYABLE)


def test_a_token_of_another_run_is_refused(kind, serve, files, strangers):
    port = serve(security(files))
    settings = SecurityConfig(certificates=files / "learner", tokens=strangers / "learner" / "tokens")
    for role in ROLES:
        with pytest.raises(UnauthenticatedError, match="unknown token: expected one of this run"):
            call(kind, port, settings, role)


@pytest.mark.parametrize("value", ["Bearer ", "Bearer x", "bearer", "Basic abc", "Bearer " + "x" * 4000])
def test_a_malformed_token_is_refused(kind, serve, files, value):
    port = serve(security(files))
    with open_channel(f"127.0.0.1:{port}", RPC, SecurityConfig(certificates=files / "learner")) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/paceline.v1.ReplayService/DescribeTables" if kind is KINDS["thread pool"] else JOIN)(
                b"", timeout=DEADLINE_SECONDS, metadata=[("authorization", value)]
            )
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_every_rpc_of_every_proto_is_in_the_table_of_roles_and_nothing_else_is():
    methods = {
        f"/{service.full_name}/{method.name}"
        for module in (parameters_pb2, replay_pb2, run_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert {method for method in ROLES_OF_METHOD if method.startswith("/paceline.")} == methods
    assert all(roles and roles <= set(ROLES) for roles in ROLES_OF_METHOD.values())


# Written out once more: whoever changes a right has to mean it.
RIGHTS = {
    COLLECTOR: {"Join", "ReportEpisodes", "GetSnapshot", "OpenTable", "Append"},
    LEARNER: {"OpenTable", "Sample", "UpdatePriorities", "Follow", "DescribeTables"},
    READER: {"Join", "ReportEvaluation", "GetSnapshot", "DescribeTables"},
}


def _ways(streams: bool) -> str:
    return "stream" if streams else "unary"


def _answers(call: object) -> list[object]:
    return list(call) if isinstance(call, Iterator) else [call]


@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_make_its_calls_and_no_others(kind, serve, files, role):
    port = serve(security(files))
    modules = (replay_pb2,) if kind is KINDS["thread pool"] else (run_pb2, parameters_pb2)
    with open_channel(f"127.0.0.1:{port}", RPC, security(files), role) as channel:
        for module in modules:
            for service in module.DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    path, asks = f"/{service.full_name}/{method.name}", iter([b""])
                    calls = getattr(channel, f"{_ways(method.client_streaming)}_{_ways(method.server_streaming)}")(path)
                    with pytest.raises(grpc.RpcError) as caught:  # these requests are empty
                        _answers(calls(asks if method.client_streaming else b"", timeout=DEADLINE_SECONDS))
                    refused = caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
                    assert refused is (method.name not in RIGHTS[role]), path


def test_a_refusal_names_the_roles_and_a_method_that_is_in_no_table_is_refused_to_all(scene, files, monkeypatch):
    kind, server = KINDS["thread pool"], thread_pool(scene, "127.0.0.1:0", RPC, security=security(files))
    server.start()
    try:
        with pytest.raises(ForbiddenError, match=r"DescribeTables is not for role collector: .*role learner or reader"):
            call(kind, server.port, security(files), COLLECTOR)
        monkeypatch.setattr("paceline.rpc.access.ROLES_OF_METHOD", {})
        with pytest.raises(ForbiddenError, match="none that there is"):
            call(kind, server.port, security(files), READER)
    finally:
        server.stop()


def test_who_joins_needs_the_token_of_what_it_says_it_is(scene, files):
    server = event_loop(scene, "127.0.0.1:0", RPC, security=security(files))
    server.start()
    try:
        for token, role, admitted in (
            (COLLECTOR, run_pb2.ROLE_COLLECTOR, True),
            (COLLECTOR, run_pb2.ROLE_EVALUATOR, False),
            (READER, run_pb2.ROLE_COLLECTOR, False),
            (READER, run_pb2.ROLE_EVALUATOR, True),
        ):
            with open_channel(f"127.0.0.1:{server.port}", RPC, security(files), token) as channel:
                request = run_pb2.JoinRequest(run_id="answer", role=role)
                if admitted:
                    run_pb2_grpc.RunServiceStub(channel).Join(request, timeout=DEADLINE_SECONDS)
                    continue
                with pytest.raises(ForbiddenError, match=rf"Join as ROLE_\w+ is not for role {token}"), raising("peer"):
                    run_pb2_grpc.RunServiceStub(channel).Join(request, timeout=DEADLINE_SECONDS)
    finally:
        server.stop()


def test_health_needs_no_token_and_reflection_does(kind, serve, files):
    port = serve(security(files))
    with open_channel(f"127.0.0.1:{port}", RPC, SecurityConfig(certificates=files / "learner")) as channel:
        assert health_of(channel) == "SERVING"
        with pytest.raises(grpc.RpcError) as caught:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with open_channel(f"127.0.0.1:{port}", RPC, security(files), READER) as channel:
        assert set(kind.services) <= set(ProtoReflectionDescriptorDatabase(channel).get_services())


def replace_token(folder: Path, role: str, token: str) -> None:
    (folder / "new").write_text(token)
    os.replace(folder / "new", folder / role)


@pytest.mark.parametrize("first", ["server", "client"])
def test_a_replaced_token_ends_nothing_whichever_side_gets_it_first(kind, name, serve, files, tmp_path, first):
    role, places = ROLE_OF_KIND[name], {side: tmp_path / side for side in ("server", "client")}
    for place in places.values():
        shutil.copytree(files / "learner" / "tokens", place)
    port = serve(SecurityConfig(certificates=files / "learner", tokens=places["server"]))
    client = SecurityConfig(certificates=files / "learner", tokens=places["client"])
    with open_channel(f"127.0.0.1:{port}", RPC, client, role) as channel, raising("the server"):
        kind.unary(channel, "answer")
        for side in (first, *(places.keys() - {first})):
            replace_token(places[side], role, "the-new-token-of-this-role")
            kind.unary(channel, "answer")
        call(kind, port, client, role)  # which knows the new one alone


def test_a_replaced_token_is_refused_once_its_grace_is_over_and_the_client_goes_on_with_the_new_one(
    kind, name, serve, files, tmp_path
):
    role, tokens = ROLE_OF_KIND[name], tmp_path / "tokens"
    shutil.copytree(files / "learner" / "tokens", tokens)
    shutil.copytree(tokens, tmp_path / "stale")
    settings = SecurityConfig(certificates=files / "learner", tokens=tokens, token_grace_seconds=0)
    port = serve(settings)
    stale = settings.model_copy(update={"tokens": tmp_path / "stale"})
    with open_channel(f"127.0.0.1:{port}", RPC, settings, role) as channel, raising("the server"):
        kind.unary(channel, "answer")
        call(kind, port, stale, role)
        replace_token(tokens, role, "the-new-token-of-this-role")
        kind.unary(channel, "answer")
    with pytest.raises(UnauthenticatedError):
        call(kind, port, stale, role)


def test_a_stream_that_was_refused_for_a_replaced_token_shows_the_new_one_next(kind, serve, files, tmp_path):
    tokens = tmp_path / "tokens"
    shutil.copytree(files / "learner" / "tokens", tokens)
    settings = SecurityConfig(certificates=files / "learner", tokens=tokens, token_grace_seconds=0)
    port = serve(settings)
    with open_channel(f"127.0.0.1:{port}", RPC, settings, COLLECTOR) as channel:
        if kind is KINDS["event loop"]:
            kind.unary(channel, "answer")  # its token is known to be good
        replace_token(tokens, COLLECTOR, "the-new-token-of-this-role")
        until = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                with raising("the server"):
                    assert len(list(kind.stream(channel, "answer"))) == 1
                return
            except UnauthenticatedError:
                assert time.monotonic() < until


@pytest.mark.parametrize("content", ["", "short", "with a space in it, long", "käse" * 10])
def test_a_file_that_holds_no_token_is_refused_without_saying_what_it_holds(name, scene, tmp_path, content):
    (tmp_path / "reader").write_text(content)
    settings = SecurityConfig(tokens=tmp_path)
    for attempt in (
        lambda: MAKERS[name](scene, "127.0.0.1:0", RPC, security=settings),
        lambda: open_channel("127.0.0.1:1", RPC, settings, READER),
    ):
        with pytest.raises(ConfigError, match=r"reader holds no token: expected one line") as caught:
            attempt()
        assert not content or content not in str(caught.value)


def test_missing_tokens_are_refused_by_name(name, scene, tmp_path):
    with pytest.raises(ConfigError, match=r"has no token: expected files named collector, learner, reader"):
        MAKERS[name](scene, "127.0.0.1:0", RPC, security=SecurityConfig(tokens=tmp_path))
    with pytest.raises(ConfigError, match=rf"{tmp_path}/collector: no such file: expected the token of role"):
        open_channel("127.0.0.1:1", RPC, SecurityConfig(tokens=tmp_path), COLLECTOR)


# Open to other machines


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "replay.example.org:0"])
def test_a_server_that_is_open_to_other_machines_refuses_to_start_without_security(name, scene, files, listen):
    for settings in (SecurityConfig(), SecurityConfig(certificates=files / "learner"), SecurityConfig(tokens=files)):
        with pytest.raises(ConfigError, match=r"open to other machines, and security\.\w+.* not set: expected TLS"):
            MAKERS[name](scene, listen, RPC, security=settings)


@pytest.mark.parametrize(
    ("listen", "more", "words"),
    [
        ("127.0.0.1:0", {}, "any process of this machine"),
        ("localhost:0", {}, "any process of this machine"),
        ("0.0.0.0:0", {"allow_insecure": True}, "ANY PEER OF THE NETWORK"),
    ],
)
def test_security_that_is_off_is_said_in_one_line(name, scene, capsys, listen, more, words):
    MAKERS[name](scene, listen, RPC, security=SecurityConfig(**more)).stop()
    lines = [line for line in "".join(capsys.readouterr()).splitlines() if "security_off" in line]
    assert len(lines) == 1
    assert words in lines[0]


def test_with_both_a_server_may_be_open_to_other_machines_and_says_nothing(name, scene, files, capsys):
    MAKERS[name](scene, "0.0.0.0:0", RPC, security=security(files)).stop()
    assert "security_off" not in "".join(capsys.readouterr())


def test_a_token_is_never_sent_over_a_network_without_tls(files):
    tokens = SecurityConfig(tokens=files / "learner" / "tokens")
    with pytest.raises(ConfigError, match=r"a token would go to replay.example.org:1 for everybody to read"):
        open_channel("replay.example.org:1", RPC, tokens, READER)
    open_channel("127.0.0.1:1", RPC, tokens, READER).close()


def test_tokens_work_on_loopback_without_tls(kind, name, serve, files):
    tokens = SecurityConfig(tokens=files / "learner" / "tokens")
    port = serve(tokens)
    call(kind, port, tokens, ROLE_OF_KIND[name])
    with pytest.raises(UnauthenticatedError):
        call(kind, port, SecurityConfig(), READER)


# Limits


def test_a_peer_with_too_many_streams_is_refused_while_another_is_served(kind, serve, scene):
    port = serve(SecurityConfig(), RPC.model_copy(update={"max_streams_per_peer": 1}))
    # Different options keep gRPC from putting both channels on one connection.
    with grpc.insecure_channel(f"127.0.0.1:{port}") as first, open_channel(f"127.0.0.1:{port}", RPC) as second:
        held = kind.stream(first, "wait")
        next(held)
        scene.wait_until_entered()
        with pytest.raises(TooManyStreamsError, match=r"ipv4:127.0.0.1:\d+ has 1 streams open.*max_streams_per_peer"):  # noqa: SIM117
            with raising("the server"):
                list(kind.stream(first, "answer"))
        assert len(list(kind.stream(second, "answer"))) == 1
        scene.release.set()
        assert list(held) == []
        until = time.monotonic() + DEADLINE_SECONDS
        while True:  # its place is free a moment after its end
            try:
                with raising("the server"):
                    assert len(list(kind.stream(first, "answer"))) == 1
                return
            except TooManyStreamsError:
                assert time.monotonic() < until


def test_a_peer_that_makes_too_many_calls_is_refused_for_a_while(kind, serve):
    # So few that no machine is too slow to make more.
    port = serve(SecurityConfig(), RPC.model_copy(update={"max_calls_per_second_per_peer": 2}))
    with open_channel(f"127.0.0.1:{port}", RPC) as channel:
        with pytest.raises(TooManyCallsError, match=r"more than 2 calls a second, .*max_calls_per") as caught:  # noqa: SIM117
            with raising("the server"):
                call_until_refused(lambda: kind.unary(channel, "answer"))
        until = time.monotonic() + DEADLINE_SECONDS
        assert caught.value.__cause__.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(caught.value, RETRYABLE)
        while True:
            try:
                with raising("the server"):
                    kind.unary(channel, "answer")
                return
            except TooManyCallsError:
                assert time.monotonic() < until


def test_who_connects_and_says_nothing_is_cut_and_holds_no_more_places_than_there_are(kind, name, serve, files):
    port = serve(security(files), RPC.model_copy(update={"max_connections": 3, "deadline_seconds": 2}))
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 5)) for _ in range(6)]
        for connection in silent:
            connection.settimeout(DEADLINE_SECONDS)
            assert connection.recv(1) == b""  # closed by the server: at once, or when the handshake's time is over
    until = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            call(kind, port, security(files), ROLE_OF_KIND[name])
            return
        except PacelineError:
            assert time.monotonic() < until
