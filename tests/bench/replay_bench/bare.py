"""What the product is measured against: a prototype of appends and samples, and transports that do nothing."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import numpy as np
import redis

from paceline.config import RpcConfig
from paceline.rpc.server import server_options
from replay_bench.runs import MESSAGE_BYTES
from replay_bench.workloads import BLOCK_ROWS, Workload


def serve_prototype(redis_url: str, address: str, workload: Workload) -> None:
    """Durable appends and samples with nothing but their copies.

    An append has no parsing, one SET, one write into a ring; a sample is one gather for each message.
    """
    store = redis.Redis.from_url(redis_url)
    blocks = workload.ring_rows // BLOCK_ROWS
    ring = np.zeros((blocks * BLOCK_ROWS, workload.spec.row_bytes), np.uint8)

    def append(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for number, data in enumerate(requests):
            slot = number % blocks
            store.set(f"block:{slot}", data)
            ring[slot * BLOCK_ROWS : (slot + 1) * BLOCK_ROWS] = np.frombuffer(data, np.uint8).reshape(BLOCK_ROWS, -1)
            yield b"stored"

    def sample(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        random = np.random.default_rng(0)
        rows = np.empty((MESSAGE_BYTES // workload.spec.row_bytes, workload.spec.row_bytes), np.uint8)
        while True:
            np.take(ring, random.integers(0, len(ring), len(rows)), axis=0, out=rows, mode="clip")
            yield rows.tobytes()

    methods = {
        "Append": grpc.stream_stream_rpc_method_handler(append),
        "Sample": grpc.unary_stream_rpc_method_handler(sample),
    }
    _serve_grpc(address, "Prototype", methods)


def serve_bare(grpc_address: str, tcp_address: str) -> None:
    """Messages of 1 MiB with nothing done to them: gRPC streams both ways, and raw TCP to the reader."""
    payload = bytes(MESSAGE_BYTES)

    def down(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        return itertools.repeat(payload)

    def up(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        for _ in requests:
            pass
        return b""

    threading.Thread(target=_serve_tcp, args=(tcp_address, payload), daemon=True).start()
    methods = {"Down": grpc.unary_stream_rpc_method_handler(down), "Up": grpc.stream_unary_rpc_method_handler(up)}
    _serve_grpc(grpc_address, "Bare", methods)


def _serve_tcp(address: str, payload: bytes) -> None:
    """Send as fast as the reader takes it, to one reader at a time."""
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    while True:
                        connection.sendall(payload)
                except OSError:
                    pass  # the reader has seen enough


def _serve_grpc(address: str, service: str, methods: dict[str, grpc.RpcMethodHandler]) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(8), options=server_options(RpcConfig()))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, methods)])
    server.add_insecure_port(address)
    server.start()
    threading.Event().wait()  # until SIGTERM
