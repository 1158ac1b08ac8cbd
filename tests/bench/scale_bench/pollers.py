"""Collectors that do nothing but follow snapshots, many in one process: each with a connection of its own.

Run with the port and the number of each server's readers. Prints a line when all of them have had one snapshot; when
standard input ends, one with what was received.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time

import grpc
import grpc.aio

from paceline.config import RpcConfig
from paceline.identity import PROTOCOL_VERSION
from paceline.rpc.client import channel_options
from paceline.v1 import parameters_pb2, parameters_pb2_grpc

RUN_ID = "bench"
WAIT_SECONDS = 10.0


async def follow(ports: list[int], counts: list[int]) -> None:
    applied: list[tuple[int, float]] = []
    started = [asyncio.Event() for _ in range(sum(counts))]

    async def collector(port: int, number: int) -> None:
        options = [*channel_options(RpcConfig()), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)
        stub = parameters_pb2_grpc.ParameterServiceStub(channel)
        request = parameters_pb2.GetSnapshotRequest(run_id=RUN_ID, protocol_version=PROTOCOL_VERSION)
        request.wait.FromNanoseconds(round(WAIT_SECONDS * 1e9))
        while True:
            header, payload = None, bytearray()
            try:
                async for response in stub.GetSnapshot(request, timeout=WAIT_SECONDS + 20):
                    if response.HasField("header"):
                        header = response.header
                    payload += response.chunk
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)  # it does not serve yet
                continue
            if header is not None:
                assert hashlib.sha256(payload).digest() == header.payload_sha256
                applied.append((header.identity.version, time.time()))
                request.have.CopyFrom(header.identity)
                started[number].set()

    places = [port for port, count in zip(ports, counts, strict=True) for _ in range(count)]
    tasks = [asyncio.create_task(collector(port, number)) for number, port in enumerate(places)]
    await asyncio.gather(*(event.wait() for event in started))
    print("started", flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    for task in tasks:
        task.cancel()
    print(json.dumps(applied), flush=True)


if __name__ == "__main__":
    pairs = [tuple(map(int, argument.split(":"))) for argument in sys.argv[1:]]
    asyncio.run(follow([port for port, _ in pairs], [count for _, count in pairs]))
