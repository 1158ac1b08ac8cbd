"""Connections that grow old, and clients that share the servers behind one name."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from paceline.config import RpcConfig
from paceline.rpc.client import open_channel
from paceline.rpc.server import server_options

HOLD, WHOM = "/test.Test/Hold", "/test.Test/Whom"
RPC = RpcConfig(connection_seconds=0.3, deadline_seconds=10)


class Peers(grpc.GenericRpcHandler):
    """Answers a call with its own name and the connection that it came by: after it was let go, or at once."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self.held, self.let_go = threading.Event(), threading.Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if details.method == HOLD:
                self.held.set()
                assert self.let_go.wait(60)
            return f"{self._name} {context.peer()}".encode()

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.let_go.set()


def serve(peers: Peers, address: str, stack: list[grpc.Server]) -> int:
    server = grpc.server(ThreadPoolExecutor(4), options=server_options(RPC))
    server.add_generic_rpc_handlers((peers,))
    port = int(server.add_insecure_port(address))
    server.start()
    stack.append(server)
    return port


@pytest.fixture
def servers() -> Iterator[list[grpc.Server]]:
    servers: list[grpc.Server] = []
    yield servers
    for server in servers:
        server.stop(0).wait()


def test_a_connection_that_grew_old_is_replaced_and_a_call_on_it_is_answered(peers: Peers, servers) -> None:
    port = serve(peers, "127.0.0.1:0", servers)
    with open_channel(f"127.0.0.1:{port}", RPC) as channel:
        answers: list[bytes] = []
        holding = threading.Thread(target=lambda: answers.append(channel.unary_unary(HOLD)(b"", timeout=60)))
        holding.start()
        assert peers.held.wait(30)
        first = channel.unary_unary(WHOM)(b"", timeout=10)
        deadline = time.monotonic() + 30
        while (newest := channel.unary_unary(WHOM)(b"", timeout=10)) == first:
            assert time.monotonic() < deadline, "the connection is never replaced"
            time.sleep(0.02)  # between two looks at a condition that has a deadline
        peers.let_go.set()
        holding.join(30)
        assert len(answers) == 1  # it was answered, and by the connection that it came by
        assert answers[0] != newest


def test_clients_spread_over_the_servers_behind_a_name(servers) -> None:
    ports = [serve(Peers(name), "127.0.0.1:0", servers) for name in ("one", "two", "three")]
    target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
    counts: collections.Counter[str] = collections.Counter()
    for _ in range(90):
        with open_channel(target, RPC) as channel:
            peer = channel.unary_unary(WHOM)(b"", timeout=10)
            counts[peer.decode().partition(" ")[0]] += 1
    assert min(counts[name] for name in ("one", "two", "three")) >= 10, counts
