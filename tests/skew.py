"""Peers of the release before and of the one after: what they know of messages, and a proxy that stands for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from grpc_tools import protoc

from paceline.v1 import parameters_pb2, replay_pb2, rows_pb2, run_pb2

PREVIOUS_PROTOS = Path(__file__).parent / "data" / "previous"
MODULES = (replay_pb2, parameters_pb2, run_pb2, rows_pb2)
SERVICES: tuple[ServiceDescriptor, ...] = tuple(
    service for module in MODULES for service in module.DESCRIPTOR.services_by_name.values()
)
METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method for service in SERVICES for method in service.methods
}

UNKNOWN = (
    b"\xc0\x3e\x96\x01"  # field 1000, a varint
    b"\xc9\x3e\x01\x02\x03\x04\x05\x06\x07\x08"  # field 1001, 8 bytes
    b"\xd2\x3e\x03new"  # field 1002, of a length
    b"\xdb\x3e\x08\x07\xdc\x3e"  # field 1003, a group
    b"\xe5\x3e\x01\x02\x03\x04"  # field 1004, 4 bytes
)
"""What a later release may have added to any message, once in each way that the wire knows."""


class Previous:
    """The messages of `tests/data/previous`, in a pool of their own: beside the current ones, with the same names."""

    def __init__(self) -> None:
        """Compile them."""
        files = sorted(path.relative_to(PREVIOUS_PROTOS).as_posix() for path in PREVIOUS_PROTOS.rglob("*.proto"))
        include = Path(protoc.__file__).parent / "_proto"
        with TemporaryDirectory() as folder:
            out = Path(folder) / "previous.binpb"
            arguments = [f"-I{PREVIOUS_PROTOS}", f"-I{include}", f"--descriptor_set_out={out}", "--include_imports"]
            assert protoc.main(["protoc", *arguments, *files]) == 0
            self.files = FileDescriptorSet.FromString(out.read_bytes())
        self.pool = DescriptorPool()
        for file in self.files.file:
            self.pool.Add(file)

    def __getitem__(self, name: str) -> Any:
        """The message class of a name within paceline.v1."""
        return self.of(f"paceline.v1.{name}")

    def of(self, full_name: str) -> type[Message]:
        """The message class of a full name."""
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(full_name))


Change = Callable[[type[Message], bytes], bytes]


def as_previous(previous: Previous) -> Change:
    """What the release before reads of a message, and so hands on: all that it knows, and nothing else."""

    def change(current: type[Message], data: bytes) -> bytes:
        message = previous.of(current.DESCRIPTOR.full_name).FromString(data)
        message.DiscardUnknownFields()
        return message.SerializeToString()

    return change


def as_next(current: type[Message], data: bytes) -> bytes:
    """A message as a later release may send it: something new in it, and in each message within it."""
    message = current.FromString(data)
    add_unknown(message)
    return message.SerializeToString()


def add_unknown(message: Message) -> None:
    """Give a message, and each one that is set within it, fields that nobody knows."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for each in value if field.is_repeated else [value]:
                add_unknown(each)
    message.MergeFromString(UNKNOWN)


class SkewProxy:
    """Forwards every call to a service, with each message of either direction changed on its way."""

    def __init__(self, target: str, change: Change) -> None:
        """Listens on a free port of this machine."""
        self._change, self._channel = change, grpc.insecure_channel(target)
        self.message_count = 0
        """Messages that were changed."""
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)]
        self._server = grpc.server(ThreadPoolExecutor(64), options=options)
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """For the server: any method. On the wire a single message is a stream of one."""
        method = METHODS.get(details.method)

        def change(kind: Any, data: bytes) -> bytes:
            if kind is None:
                return data
            self.message_count += 1
            return self._change(message_factory.GetMessageClass(kind), data)

        def forward(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            call = self._channel.stream_stream(details.method)(
                (change(method and method.input_type, data) for data in requests), timeout=context.time_remaining()
            )
            context.add_callback(call.cancel)
            try:
                for data in call:
                    yield change(method and method.output_type, data)
            except grpc.RpcError:
                context.set_trailing_metadata(call.trailing_metadata())
                context.abort(call.code(), call.details())

        return grpc.stream_stream_rpc_method_handler(forward)

    def close(self) -> None:
        """Stop listening, and cut what is open."""
        self._server.stop(0).wait()
        self._channel.close()
