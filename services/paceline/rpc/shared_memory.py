"""Memory that a client and a service of one machine both map, so that rows need not go through their connection.

On its way through a connection a byte is copied five times or more, most of them in gRPC; through memory, once on each
side. The client offers a file of its own that has no name, for one stream. A service that can open it, and finds there
the key that the client wrote, has the same memory before it. On another machine, or in a container of its own, it
cannot, and rows travel in messages. What is in memory is said in messages all the same, in their order.

Nothing is left behind however the processes end. All of the file is there when it is offered, and it can neither grow
nor shrink. While a stream lives, its memory costs a client two descriptors and a service one.
"""

from __future__ import annotations

import hmac
import mmap
import os
import re
import secrets
import sys
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from paceline.errors import BlockError
from paceline.process import free_memory_bytes
from paceline.rpc.exposure import is_loopback
from paceline.v1 import rows_pb2

if sys.platform == "linux":
    import fcntl

Bytes = npt.NDArray[np.uint8]

KEY_BYTES = 32
_NAME = "paceline-rows"
_LINK = f"/memfd:{_NAME} (deleted)"
"""Where the path of an offer leads; another file is not even opened."""
_PATH = re.compile(r"/proc/[1-9][0-9]{0,9}/fd/[0-9]{1,9}")
_SHARE = 0.25
"""Of the memory that is free, so much at most is set aside: rows can do without it."""


class OfferedMemory:
    """Memory of this process that the service at the other end of a stream is asked to map."""

    def __init__(self, descriptor: int, byte_count: int) -> None:
        """Map a file of so many bytes and a key. `create` makes one."""
        content = mmap.mmap(descriptor, byte_count + KEY_BYTES)
        key = secrets.token_bytes(KEY_BYTES)
        content[byte_count:] = key
        self._descriptor = descriptor
        self.bytes: Bytes = np.frombuffer(content, np.uint8, byte_count)
        """All of it; it stays as long as anybody looks at it."""
        self.offer = rows_pb2.SharedMemory(path=f"/proc/{os.getpid()}/fd/{descriptor}", byte_count=byte_count, key=key)
        """What the first message of a stream says of it."""

    @classmethod
    def create(cls, byte_count: int) -> OfferedMemory | None:
        """New memory, 1 byte or more; None where the system has none to offer, or would have little left."""
        free_bytes = free_memory_bytes()
        if free_bytes is not None and byte_count > free_bytes * _SHARE:
            return None
        descriptor = _create_file(byte_count + KEY_BYTES)
        if descriptor is None:
            return None
        try:
            return cls(descriptor, byte_count)
        except OSError:  # no address space, or no descriptor for the map's own
            os.close(descriptor)
            return None

    def close(self) -> None:
        """Offer it no more; whoever has mapped it keeps it."""
        os.close(self._descriptor)


def open_offered(offer: rows_pb2.SharedMemory, peer: str) -> Bytes | None:
    """All of the memory that a client offers, to be read and written; None where this process does not see it.

    Args:
        peer: the client, as gRPC names it. Of a client that does not call by loopback nothing is opened.
    """
    if not is_loopback(unquote(peer.partition(":")[2])) or offer.byte_count < 1 or not _PATH.fullmatch(offer.path):
        return None
    size = offer.byte_count + KEY_BYTES
    try:
        if os.readlink(offer.path) != _LINK:
            return None
        descriptor = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not _is_safe(descriptor, size):
            return None
        content = mmap.mmap(descriptor, size)
    except (OSError, OverflowError, ValueError):  # no such size, no address space
        return None
    finally:
        os.close(descriptor)
    if not hmac.compare_digest(content[offer.byte_count :], offer.key):
        return None
    return np.frombuffer(content, np.uint8, offer.byte_count)


def part_of(memory: Bytes | None, where: rows_pb2.MemoryRange) -> Bytes:
    """A view of what a message says is in shared memory.

    Raises:
        BlockError: it is not within the memory, or there is none.
    """
    size = 0 if memory is None else len(memory)
    if memory is None or where.position < 0 or not 1 <= where.byte_count <= size - where.position:
        raise BlockError(
            f"rows are said to be in {where.byte_count} bytes of shared memory from {where.position} on: expected 1 or "
            f"more within the {size} that both sides see"
        )
    return memory[where.position : where.position + where.byte_count]


def _create_file(size: int) -> int | None:
    """The descriptor of a new file without a name, of so many bytes for good; None where there can be none."""
    if sys.platform == "linux":
        try:
            descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:  # a sandbox forbids it, or no descriptor is left
            return None
        try:
            # All of it now: whoever finds no page later is killed, and what is there is counted as the client's.
            os.posix_fallocate(descriptor, 0, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except (OSError, OverflowError):
            os.close(descriptor)
            return None
        return descriptor
    return None


def _is_safe(descriptor: int, size: int) -> bool:
    """Whether a file is of so many bytes for good, and all of them are there, in memory that cannot run out."""
    if sys.platform == "linux":
        fixed, found = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, os.fstat(descriptor)
        return (
            fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fixed == fixed
            and found.st_size == size
            and found.st_blocks * 512 >= size
            # Huge pages set aside can run out, where a client gives some of the file back.
            and os.fstatvfs(descriptor).f_bsize == mmap.PAGESIZE
        )
    return False
