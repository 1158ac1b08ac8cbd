"""Both kinds of server keep the same promises: errors, ports, health, reflection, drain."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from free_ports import free_port
from paceline import errors
from paceline.config import RpcConfig, SecurityConfig
from paceline.errors import PacelineError, PortTakenError, TooManyStreamsError, UnavailableError
from paceline.process import StopSignal
from paceline.rpc.client import NO_SECURITY, Backoff, call_until_answered, open_channel
from paceline.rpc.server import AioServer, Server
from paceline.rpc.status import DELAYED, RETRY_DELAY_KEY, RETRYABLE, code_of, raising, retry_delay_seconds
from paceline.v1 import parameters_pb2, parameters_pb2_grpc, replay_pb2, replay_pb2_grpc, run_pb2, run_pb2_grpc

ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, PacelineError)]
DEADLINE_SECONDS = 20
CONFIG = RpcConfig(drain_seconds=10)
QUICK = RpcConfig(backoff_initial_seconds=0.01, backoff_max_seconds=0.02)


class Scene:
    """What the test's services do is told in the run id of a call; waits end when the test says so."""

    def __init__(self) -> None:
        self.played: list[str] = []
        self.entered, self.release = threading.Semaphore(0), threading.Event()

    def play(self, run_id: str) -> None:
        self.played.append(run_id)
        action, _, message = run_id.partition(":")
        if action == "wait":
            self.entered.release()
            self.release.wait(float(message or DEADLINE_SECONDS))
        elif action == "bug":
            raise ZeroDivisionError(message)
        elif action != "answer":
            raise getattr(errors, action)(message)

    def wait_until_entered(self) -> None:
        assert self.entered.acquire(timeout=DEADLINE_SECONDS), "the call did not reach the server"


class Replay(replay_pb2_grpc.ReplayServiceServicer):
    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def DescribeTables(self, request, context):
        self._scene.play(request.run_id)
        return replay_pb2.DescribeTablesResponse()

    def Append(self, requests, context):
        for request in requests:
            yield replay_pb2.AppendResponse(sequence=request.header.sequence)
            self._scene.play(request.run_id)


class Run(run_pb2_grpc.RunServiceServicer):
    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    async def Join(self, request, context):
        await asyncio.to_thread(self._scene.play, request.run_id)
        return run_pb2.JoinResponse()


class Parameters(parameters_pb2_grpc.ParameterServiceServicer):
    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    async def GetSnapshot(self, request, context):
        yield parameters_pb2.GetSnapshotResponse(chunk=b"x")
        await asyncio.to_thread(self._scene.play, request.run_id)


class LoopServer:
    """An AioServer on an event loop in a thread, with the methods of Server."""

    def __init__(self, make: Callable[[], AioServer]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        try:
            self._server = self._on_loop(self._make(make))
        except BaseException:
            self._end_loop()
            raise
        self.port = self._server.port

    async def _make(self, make: Callable[[], AioServer]) -> AioServer:
        return make()

    def _on_loop(self, coroutine):
        future: Future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(DEADLINE_SECONDS)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_SECONDS)
        self._loop.close()

    def start(self) -> None:
        self._on_loop(self._server.start())

    def set_serving(self, serving: bool) -> None:
        self._on_loop(self._server.set_serving(serving))

    def stop(self) -> None:
        self._on_loop(self._server.stop())
        self._end_loop()


@dataclass
class Kind:
    """One kind of server with its services: how to make it, and how to call it."""

    make: Callable[[Scene, str, RpcConfig], Server | LoopServer]
    services: tuple[str, ...]
    unary: Callable[..., object]
    stream: Callable[[grpc.Channel, str], Iterator[object]]


def thread_pool(
    scene: Scene,
    listen: str = "127.0.0.1:0",
    config: RpcConfig = CONFIG,
    max_streams: int = 4,
    security: SecurityConfig = NO_SECURITY,
) -> Server:
    return Server(
        listen,
        config,
        services=["paceline.v1.ReplayService"],
        register=[partial(replay_pb2_grpc.add_ReplayServiceServicer_to_server, Replay(scene))],
        max_streams=max_streams,
        security=security,
    )


def event_loop(
    scene: Scene,
    listen: str = "127.0.0.1:0",
    config: RpcConfig = CONFIG,
    security: SecurityConfig = NO_SECURITY,
) -> LoopServer:
    register = [
        partial(run_pb2_grpc.add_RunServiceServicer_to_server, Run(scene)),
        partial(parameters_pb2_grpc.add_ParameterServiceServicer_to_server, Parameters(scene)),
    ]
    services = ["paceline.v1.RunService", "paceline.v1.ParameterService"]
    return LoopServer(lambda: AioServer(listen, config, services=services, register=register, security=security))


def describe(channel: grpc.Channel, run_id: str, timeout: float = DEADLINE_SECONDS) -> object:
    request = replay_pb2.DescribeTablesRequest(run_id=run_id)
    return replay_pb2_grpc.ReplayServiceStub(channel).DescribeTables(request, timeout=timeout)


def append(channel: grpc.Channel, run_id: str) -> Iterator[object]:
    requests = iter([replay_pb2.AppendRequest(run_id=run_id)])
    return replay_pb2_grpc.ReplayServiceStub(channel).Append(requests, timeout=DEADLINE_SECONDS)


def join(channel: grpc.Channel, run_id: str, timeout: float = DEADLINE_SECONDS) -> object:
    return run_pb2_grpc.RunServiceStub(channel).Join(run_pb2.JoinRequest(run_id=run_id), timeout=timeout)


def get_snapshot(channel: grpc.Channel, run_id: str) -> Iterator[object]:
    request = parameters_pb2.GetSnapshotRequest(run_id=run_id)
    return parameters_pb2_grpc.ParameterServiceStub(channel).GetSnapshot(request, timeout=DEADLINE_SECONDS)


KINDS = {
    "thread pool": Kind(thread_pool, ("paceline.v1.ReplayService",), describe, append),
    "event loop": Kind(event_loop, ("paceline.v1.RunService", "paceline.v1.ParameterService"), join, get_snapshot),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture(scope="module")
def running(kind: Kind) -> Iterator[grpc.Channel]:
    server = kind.make(Scene(), "127.0.0.1:0", CONFIG)
    server.start()
    server.set_serving(True)
    with open_channel(f"127.0.0.1:{server.port}", CONFIG) as channel:
        yield channel
    server.stop()


@pytest.fixture
def start(kind: Kind, scene: Scene):
    """Starts servers of the kind, and stops what the test left."""
    servers = []

    def start_server(config: RpcConfig = CONFIG, make=kind.make, listen: str = "127.0.0.1:0") -> Server | LoopServer:
        server = make(scene, listen, config)
        server.start()
        servers.append(server)
        stop = server.stop

        def stop_once() -> None:
            if server in servers:
                servers.remove(server)
                stop()

        server.stop = stop_once
        return server

    yield start_server
    scene.release.set()
    for server in list(servers):
        server.stop()


def call_until_refused(call: Callable[[], object]) -> None:
    """Raises what the first refused call raises; a drain begins some time after it was asked for."""
    give_up = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < give_up:
        call()


def health_of(channel: grpc.Channel, service: str = "") -> str:
    request = health_pb2.HealthCheckRequest(service=service)
    response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_SECONDS)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_an_error_of_a_unary_call_arrives_as_the_class_that_was_raised(kind, running, cls):
    with pytest.raises(PacelineError) as caught, raising("peer"):
        kind.unary(running, f"{cls.__name__}:wert für β: 3\nerwartet: 4")
    assert type(caught.value) is cls
    assert str(caught.value) == "wert für β: 3\nerwartet: 4"
    assert caught.value.__cause__.code() == code_of(cls(""))


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_an_error_within_a_stream_arrives_as_the_class_that_was_raised_after_what_was_sent(kind, running, cls):
    received = []
    with pytest.raises(PacelineError) as caught, raising("peer"):
        received.extend(kind.stream(running, f"{cls.__name__}:message"))
    assert type(caught.value) is cls
    assert str(caught.value) == "message"
    assert caught.value.__cause__.code() == code_of(cls(""))


@pytest.mark.parametrize("cls", RETRYABLE, ids=lambda cls: cls.__name__)
def test_an_error_worth_waiting_for_names_a_delay_that_the_back_off_keeps(kind, start, scene, cls):
    server = start()
    waits = []
    stop = StopSignal()

    def stop_at_the_wait(error: PacelineError, seconds: float) -> None:
        waits.append(seconds)
        stop.set()

    for call in (kind.unary, lambda channel, run_id: list(kind.stream(channel, run_id))):
        with open_channel(f"127.0.0.1:{server.port}", QUICK) as channel:
            with pytest.raises(cls) as caught, raising("peer"):
                call(channel, f"{cls.__name__}:not now")
            error = caught.value.__cause__
            assert error.code() == code_of(cls(""))
            assert dict(error.trailing_metadata()).get(RETRY_DELAY_KEY) == ("1000" if cls in DELAYED else None)
            assert retry_delay_seconds(caught.value) == (1.0 if cls in DELAYED else 0.0)
            assert len(scene.played) == 1  # gRPC itself tried it once, and not again after the delay

            with pytest.raises(errors.DeadlineError, match="not now"):
                call_until_answered(
                    partial(call, channel, f"{cls.__name__}:not now"),
                    peer="peer",
                    backoff=Backoff(QUICK, 0),
                    stop=stop,
                    on_wait=stop_at_the_wait,
                )
            assert (1.0 <= waits[-1] <= 2.0) if cls in DELAYED else (waits[-1] <= 0.02)
        scene.played.clear()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("250", 0.25),
        ("0", 0.0),
        ("-1", 0.0),
        ("", 0.0),
        ("soon", 0.0),
        ("1e3", 0.0),
        ("nan", 0.0),
        ("3600000", 60.0),
        (str(2**63 - 1), 60.0),
        ("9" * 5000, 0.0),
    ],
)
def test_a_delay_is_taken_as_it_can_be_meant_and_lays_no_client_up(value, seconds):
    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata(((RETRY_DELAY_KEY, value),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {"DescribeTables": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("paceline.v1.ReplayService", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with open_channel(f"127.0.0.1:{port}", QUICK) as channel:
            with pytest.raises(TooManyStreamsError) as caught, raising("peer"):
                describe(channel, "answer")
            assert caught.value.__cause__.trailing_metadata()
            assert retry_delay_seconds(caught.value) == seconds
            bound = max(QUICK.backoff_initial_seconds, 2 * seconds)
            assert bound / 2 <= Backoff(QUICK, 0).next_seconds(caught.value) <= bound
    finally:
        server.stop(0).wait()


def test_a_message_too_long_for_a_trailer_arrives_shortened_and_with_its_class(kind, running):
    with pytest.raises(errors.RowSpecError, match=r"^x{2000}$"), raising("peer"):
        kind.unary(running, "RowSpecError:" + "x" * 20_000)


def test_a_fault_of_the_service_itself_is_internal_and_names_the_exception(kind, running):
    for call in (kind.unary, lambda channel, run_id: list(kind.stream(channel, run_id))):
        with pytest.raises(PacelineError, match=r"INTERNAL.*ZeroDivisionError: by nought") as caught, raising("peer"):
            call(running, "bug:by nought")
        assert type(caught.value) is PacelineError


def test_an_absent_peer_is_unavailable_and_named(kind):
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound, so that nobody else listens there, and not listening
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        with open_channel(address, CONFIG) as channel, pytest.raises(UnavailableError, match=f"learner at {address}"):  # noqa: SIM117
            with raising(f"learner at {address}"):
                kind.unary(channel, "answer")


def test_health_is_off_until_the_service_says_so_for_the_server_and_for_each_service(kind, start):
    server = start()
    with open_channel(f"127.0.0.1:{server.port}", CONFIG) as channel:
        assert {health_of(channel, service) for service in ("", *kind.services)} == {"NOT_SERVING"}
        server.set_serving(True)
        assert {health_of(channel, service) for service in ("", *kind.services)} == {"SERVING"}
        server.set_serving(False)
        assert {health_of(channel, service) for service in ("", *kind.services)} == {"NOT_SERVING"}
        with pytest.raises(grpc.RpcError) as caught:
            health_of(channel, "paceline.v1.NoSuchService")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_services_and_describes_them(kind, running):
    database = ProtoReflectionDescriptorDatabase(running)
    expected = {*kind.services, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert set(database.get_services()) == expected
    for service in kind.services:
        file = database.FindFileContainingSymbol(service)
        assert service.rpartition(".")[2] in {described.name for described in file.service}


def test_a_port_that_another_server_or_program_holds_is_refused_by_address(kind, start, scene):
    server = start()
    address = f"127.0.0.1:{server.port}"
    with pytest.raises(PortTakenError, match=f"cannot listen on {address}: the port is taken"):
        kind.make(scene, address, CONFIG)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortTakenError):
        kind.make(scene, f"127.0.0.1:{other.getsockname()[1]}", CONFIG)
    with open_channel(address, CONFIG) as channel:
        kind.unary(channel, "answer")


def have_names_mean(monkeypatch, *addresses: str) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


@pytest.mark.parametrize("held", ["127.0.0.1", "127.0.0.2"])
def test_a_name_is_listened_on_at_all_of_its_addresses_or_none(kind, start, scene, held, monkeypatch):
    """Of two servers at one port of a name each would get some of the clients."""
    have_names_mean(monkeypatch, "127.0.0.1", "127.0.0.2")
    server = start(listen="localhost:0")
    for host in ("127.0.0.1", "127.0.0.2"):
        with open_channel(f"{host}:{server.port}", CONFIG) as channel:
            kind.unary(channel, "answer")
    with pytest.raises(PortTakenError, match=f"cannot listen on localhost:{server.port}"):
        kind.make(scene, f"localhost:{server.port}", CONFIG)
    other = start(listen=f"{held}:0")
    with pytest.raises(PortTakenError, match=f"cannot listen on localhost:{other.port}"):
        kind.make(scene, f"localhost:{other.port}", CONFIG)


def test_addresses_of_a_name_that_this_machine_lacks_are_passed_over(kind, start, scene, monkeypatch):
    have_names_mean(monkeypatch, "192.0.2.1", "127.0.0.1")
    with open_channel(f"127.0.0.1:{start(listen='localhost:0').port}", CONFIG) as channel:
        kind.unary(channel, "answer")
    have_names_mean(monkeypatch, "192.0.2.1")
    with pytest.raises(PortTakenError, match="the host is not this machine's"):
        kind.make(scene, "localhost:0", CONFIG)


def test_a_drain_lets_calls_in_progress_finish_and_refuses_new_ones(kind, start, scene):
    server = start()
    server.set_serving(True)
    with open_channel(f"127.0.0.1:{server.port}", CONFIG) as channel:
        answers: list[object] = []
        caller = threading.Thread(target=lambda: answers.append(kind.unary(channel, "wait")))
        caller.start()
        scene.wait_until_entered()
        stopper = threading.Thread(target=server.stop)
        stopper.start()
        with pytest.raises(UnavailableError), raising("peer"):
            call_until_refused(lambda: kind.unary(channel, "answer"))
        assert stopper.is_alive()
        scene.release.set()
        for thread in (caller, stopper):
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()
        assert len(answers) == 1


def test_a_drain_cuts_what_outlasts_it(kind, start, scene):
    server = start(RpcConfig(drain_seconds=0.1))
    with open_channel(f"127.0.0.1:{server.port}", CONFIG) as channel:
        stream = kind.stream(channel, "wait")
        next(stream)
        scene.wait_until_entered()
        stopper = threading.Thread(target=server.stop)
        stopper.start()
        with pytest.raises(UnavailableError), raising("peer"):
            next(stream)
        scene.release.set()
        stopper.join(DEADLINE_SECONDS)
        assert not stopper.is_alive()


def test_a_client_finds_a_server_that_starts_later(kind, scene):
    address = f"127.0.0.1:{free_port()}"
    config = RpcConfig(backoff_initial_seconds=0.01, backoff_max_seconds=0.1)
    servers = []

    def start_after_a_failure(error: PacelineError, seconds: float) -> None:
        if not servers:
            servers.append(kind.make(scene, address, config))
            servers[0].start()

    with open_channel(address, config) as channel:
        call_until_answered(
            lambda: kind.unary(channel, "answer"),
            peer="peer",
            backoff=Backoff(config, 0),
            stop=StopSignal(),
            on_wait=start_after_a_failure,
        )
    servers[0].stop()


def test_streams_above_the_limit_are_refused_while_short_calls_are_answered(scene):
    server = thread_pool(scene, max_streams=2)
    server.start()
    try:
        with open_channel(f"127.0.0.1:{server.port}", CONFIG) as channel:
            held = [append(channel, "wait") for _ in range(2)]
            for stream in held:
                next(stream)
                scene.wait_until_entered()
            with pytest.raises(TooManyStreamsError, match="2 streams are open"), raising("replay"):
                next(append(channel, "answer"))
            describe(channel, "answer")
            assert health_of(channel) == "NOT_SERVING"

            scene.release.set()
            for stream in held:
                assert list(stream) == []
            call_until_answered(
                lambda: list(append(channel, "answer")), peer="replay", backoff=Backoff(CONFIG, 0), stop=StopSignal()
            )
    finally:
        scene.release.set()
        server.stop()


def test_a_stream_that_failed_gives_its_place_back(scene):
    server = thread_pool(scene, max_streams=1)
    server.start()
    try:
        with open_channel(f"127.0.0.1:{server.port}", CONFIG) as channel:
            for _ in range(5):
                with pytest.raises(errors.BlockError), raising("replay"):
                    call_until_answered(
                        lambda: list(append(channel, "BlockError:bad")),
                        peer="replay",
                        backoff=Backoff(CONFIG, 0),
                        stop=StopSignal(),
                    )
    finally:
        server.stop()


@pytest.mark.slow
def test_pings_in_a_silent_call_as_frequent_as_the_settings_say_are_not_taken_for_abuse(kind, start):
    # A ping a second, the most that gRPC sends: a server that expects fewer closes the connection at the fourth.
    config = RpcConfig(keepalive_seconds=0.5)
    server = start(config)
    with open_channel(f"127.0.0.1:{server.port}", config) as channel:
        kind.unary(channel, "wait:8")
