"""Channels and Redis connections are of use in the process that made them, and refuse a fork of it."""

from __future__ import annotations

import os
import re
import select
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from calling_environment import ECHO
from paceline.config import EnvConfig, RpcConfig
from paceline.envs import make_vector_environment
from paceline.errors import ConflictError, PacelineError
from paceline.replay.link import RedisLink
from paceline.replay.scripts import SAVE
from paceline.rpc.client import open_channel
from paceline.rpc.server import server_options
from paceline.rpc.status import RETRYABLE
from redis_servers import start_redis

SECONDS = 20.0
WORKERS, CALLS = 4, 20


class Echo(grpc.GenericRpcHandler):
    """Gives back what it gets, and remembers it."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.heard.append(request)
            return request

        def answer_each(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            for request in requests:
                yield answer(request, context)

        if details.method == ECHO:
            return grpc.unary_unary_rpc_method_handler(answer)
        return grpc.stream_stream_rpc_method_handler(answer_each)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def address(echo) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(8), options=server_options(RpcConfig()))
    server.add_generic_rpc_handlers((echo,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory) -> Iterator[str]:
    server = start_redis("embedded", tmp_path_factory.mktemp("redis"))
    yield server.url
    server.stop()


def in_a_fork(act: Callable[[], object]) -> str:
    """What `act` raises in a forked process, as its class and message, or gives; the process is killed if it hangs."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = f"gave {act()!r}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    try:
        answers, _, _ = select.select([reading], [], [], SECONDS)
        assert answers, f"the fork hangs for {SECONDS:g} s"
        return os.read(reading, 65536).decode().replace(f"process {child}", "process CHILD")
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_spawned_workers_call_beside_a_parent_that_called_before(address, redis_url):
    with open_channel(address, RpcConfig()) as channel:
        link = RedisLink(redis_url, deadline_seconds=10)
        assert channel.unary_unary(ECHO)(b"parent", timeout=10) == link.command("ECHO", b"parent")
        arguments = {"address": address, "redis_url": redis_url}
        config = EnvConfig(id="calling_environment:Calling-v0", vectorization="async", kwargs=arguments)
        workers = make_vector_environment(config, WORKERS)
        try:
            workers.reset(seed=list(range(1, 1 + WORKERS)))
            said = [workers.step(np.zeros((WORKERS, 1), np.float32))[0] for _ in range(CALLS)]
        finally:
            workers.close()
        asked = np.arange(1, 1 + WORKERS) * 1000 + np.arange(1, 1 + CALLS)[:, None]
        assert (np.stack(said)[:, :, 0] == asked).all()
        assert (np.stack(said)[:, :, 1] == asked).all()
        processes = set(np.stack(said)[:, :, 2].ravel())
        assert len(processes) == WORKERS
        assert os.getpid() not in processes
        assert channel.unary_unary(ECHO)(b"parent", timeout=10) == link.command("ECHO", b"parent")
        link.close()


CALLS_OF_A_CHANNEL: dict[str, Callable[[grpc.Channel], object]] = {
    "unary": lambda channel: channel.unary_unary(ECHO)(b"child", timeout=3),
    "stream": lambda channel: next(channel.stream_stream("/test.Test/Each")(iter([b"child"]), timeout=3)),
    "watch": lambda channel: channel.subscribe(print, try_to_connect=True),
}


@pytest.mark.parametrize("call", CALLS_OF_A_CHANNEL.values(), ids=CALLS_OF_A_CHANNEL)
@pytest.mark.parametrize("held", [False, True], ids=["its lock free", "its lock held"])
def test_a_fork_is_refused_its_parents_channel_which_goes_on(address, echo, call, held):
    with open_channel(address, RpcConfig()) as channel:
        callable_of_the_parent = channel.unary_unary(ECHO)
        assert callable_of_the_parent(b"parent", timeout=10) == b"parent"

        def use() -> object:
            try:
                return call(channel)
            finally:
                channel.close()

        if held:
            with channel._lock:  # as where another thread begins a call: in the fork nobody lets go of it
                said = in_a_fork(use)
        else:
            said = in_a_fork(use)
        assert re.match(
            rf"ConflictError: the channel to {address} was opened in process {os.getpid()} and is used in its fork, "
            r"process CHILD: .*; open a channel in the process that uses it, and start processes with spawn",
            said,
        ), said
        assert callable_of_the_parent(b"again", timeout=10) == b"again"
        assert list(channel.stream_stream("/test.Test/Each")(iter([b"1", b"2"]), timeout=10)) == [b"1", b"2"]
        assert echo.heard == [b"parent", b"again", b"1", b"2"]


COMMANDS: dict[str, Callable[[RedisLink], object]] = {
    "command": lambda link: link.command("SET", "forked", "1"),
    "read each": lambda link: link.read_each([("GET", "x")]),
    "values": lambda link: link.read_values([b"x"]),
    "script": lambda link: link.run_script(SAVE, [b"forked"], []),
    "script that reads": lambda link: link.read_by_script(SAVE, [b"forked"]),
    "server": lambda link: link.read_server(),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("held", [False, True], ids=["its lock free", "its lock held"])
def test_a_fork_is_refused_its_parents_connections_to_redis_which_go_on(redis_url, command, held):
    link = RedisLink(redis_url, deadline_seconds=3)
    assert link.command("ECHO", b"parent") == b"parent"

    def use() -> object:
        try:
            return command(link)
        finally:
            link.close()

    if held:
        with link._pausing:
            said = in_a_fork(use)
    else:
        said = in_a_fork(use)
    assert re.match(
        rf"ConflictError: the connections to Redis at {redis_url} were made in process {os.getpid()} and are used in "
        r"its fork, process CHILD: .*; make a RedisLink in the process that uses it, and start processes with spawn",
        said,
    ), said
    before = link.command("INFO", "stats").split(b"total_connections_received:")[1].split()[0]
    for number in range(20):
        assert link.command("ECHO", b"%d" % number) == b"%d" % number
    assert link.command("EXISTS", "forked") == 0
    after = link.command("INFO", "stats").split(b"total_connections_received:")[1].split()[0]
    assert before == after  # it has the connection that it had
    link.close()


def test_a_refused_fork_is_not_tried_again():
    assert issubclass(ConflictError, PacelineError)
    assert not issubclass(ConflictError, RETRYABLE)


def test_a_channel_is_used_by_any_thread_of_its_process(address):
    with open_channel(address, RpcConfig()) as channel:
        answers: list[bytes] = []
        thread = threading.Thread(target=lambda: answers.append(channel.unary_unary(ECHO)(b"thread", timeout=10)))
        thread.start()
        thread.join(SECONDS)
        assert answers == [b"thread"]
