"""Memory that two processes share: both see the same bytes, and an offer that is not what it says is passed over."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import subprocess
import sys
import tempfile

import pytest

from paceline.errors import BlockError
from paceline.rpc import shared_memory
from paceline.rpc.shared_memory import KEY_BYTES, OfferedMemory, open_offered, part_of
from paceline.v1 import rows_pb2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory that can be offered")

HERE = "ipv4:127.0.0.1:4711"
SIZE = 3 * mmap.PAGESIZE + 5
VIRTUAL_BYTES = 1 << 20
"""Of address space: less than any process has taken."""

SERVICE = """
import sys
from paceline.rpc.shared_memory import open_offered
from paceline.v1 import rows_pb2

seen = open_offered(rows_pb2.SharedMemory.FromString(bytes.fromhex(sys.argv[1])), "ipv6:%5B::1%5D:4711")
print(bytes(seen[:5]).decode())
seen[-5:] = list(b"there")
"""


@pytest.fixture
def memory():
    made = OfferedMemory.create(SIZE)
    yield made
    made.close()


def changed(offer, **fields):
    other = rows_pb2.SharedMemory()
    other.CopyFrom(offer)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_service_in_another_process_has_the_same_memory_before_it(memory):
    memory.bytes[:5] = list(b"hello")
    offer = memory.offer.SerializeToString().hex()
    done = subprocess.run(
        [sys.executable, "-c", SERVICE, offer], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "hello\n"
    assert bytes(memory.bytes[-5:]) == b"there"


def test_what_was_mapped_stays_when_it_is_offered_no_more():
    memory = OfferedMemory.create(SIZE)
    seen = open_offered(memory.offer, HERE)
    memory.close()
    memory.bytes[7] = 1
    assert seen[7] == 1
    assert open_offered(memory.offer, HERE) is None


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.1:4711", "ipv6:%5Bfe80::1%5D:4711", "unix:/tmp/socket", ""])
def test_nothing_is_opened_for_a_peer_of_another_machine(memory, peer):
    assert open_offered(memory.offer, HERE) is not None
    assert open_offered(memory.offer, peer) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"key": bytes(KEY_BYTES)},
        {"key": b""},
        {"byte_count": SIZE - 1},
        {"byte_count": SIZE + 1},
        {"byte_count": 0},
        {"byte_count": -1},
        {"byte_count": 2**63 - 1},
        {"path": "/proc/self/fd/0"},
        {"path": "/proc/1/fd/../../etc/passwd"},
        {"path": ""},
        {"path": f"/proc/{os.getpid()}/fd/999999"},
        {"path": "/proc/4294967295/fd/1"},
    ],
)
def test_an_offer_that_is_not_what_it_says_is_passed_over(memory, fields):
    before = descriptors()
    assert open_offered(changed(memory.offer, **fields), HERE) is None
    assert descriptors() == before


def test_another_file_of_the_same_process_is_not_even_opened(memory, monkeypatch):
    opened = []
    with tempfile.TemporaryFile() as file:
        file.write(bytes(SIZE) + memory.offer.key)
        file.flush()
        monkeypatch.setattr(os, "open", lambda *arguments: opened.append(arguments))
        assert open_offered(changed(memory.offer, path=f"/proc/{os.getpid()}/fd/{file.fileno()}"), HERE) is None
    assert not opened


def test_memory_that_could_shrink_beneath_the_service_is_passed_over(memory):
    loose = os.memfd_create("paceline-rows", os.MFD_ALLOW_SEALING)
    try:
        os.write(loose, bytes(SIZE) + memory.offer.key)
        assert open_offered(changed(memory.offer, path=f"/proc/{os.getpid()}/fd/{loose}"), HERE) is None
    finally:
        os.close(loose)


def test_memory_of_which_not_all_is_there_is_passed_over(memory):
    sparse = os.memfd_create("paceline-rows", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(sparse, SIZE)
        os.lseek(sparse, 0, os.SEEK_END)
        os.write(sparse, memory.offer.key)
        fcntl.fcntl(sparse, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        offer = changed(memory.offer, path=f"/proc/{os.getpid()}/fd/{sparse}")
        assert open_offered(offer, HERE) is None
        os.pwrite(sparse, bytes(SIZE), 0)
        assert open_offered(offer, HERE) is not None
    finally:
        os.close(sparse)


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
def test_where_the_system_refuses_memory_none_is_offered_and_nothing_is_left_open(monkeypatch, call):
    def refuse(*arguments):
        raise OSError(errno.ENOMEM, "no memory")

    before = descriptors()
    monkeypatch.setattr(os, call, refuse)
    assert OfferedMemory.create(SIZE) is None
    assert descriptors() == before


def test_memory_that_would_leave_little_of_what_is_free_is_not_set_aside(monkeypatch):
    monkeypatch.setattr(shared_memory, "free_memory_bytes", lambda: 4 * SIZE)
    OfferedMemory.create(SIZE).close()
    assert OfferedMemory.create(SIZE + 1) is None


def test_more_memory_than_there_can_be_is_not_offered():
    before, limits = descriptors(), resource.getrlimit(resource.RLIMIT_AS)
    assert OfferedMemory.create(2**63 - 1) is None
    resource.setrlimit(resource.RLIMIT_AS, (VIRTUAL_BYTES, limits[1]))  # the file can be made, and not mapped
    try:
        assert OfferedMemory.create(1 << 26) is None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert descriptors() == before


def test_a_client_cannot_change_the_size_of_what_it_offers(memory):
    path = memory.offer.path
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.truncate(path, size)


def test_neither_side_keeps_a_descriptor_for_longer_than_it_looks_at_the_memory():
    before = descriptors()
    for _ in range(20):
        memory = OfferedMemory.create(SIZE)
        seen = open_offered(memory.offer, HERE)
        memory.close()
        del memory, seen
    assert descriptors() == before


@pytest.mark.parametrize(("position", "count"), [(-1, 1), (0, 0), (0, -1), (0, SIZE + 1), (SIZE, 1), (2**62, 2**62)])
def test_a_range_beyond_the_memory_is_refused(memory, position, count):
    where = rows_pb2.MemoryRange(position=position, byte_count=count)
    with pytest.raises(BlockError, match=f"within the {SIZE} that both sides see"):
        part_of(memory.bytes, where)
    with pytest.raises(BlockError, match="within the 0 that both sides see"):
        part_of(None, where)
    assert len(part_of(memory.bytes, rows_pb2.MemoryRange(position=SIZE - 2, byte_count=2))) == 2
