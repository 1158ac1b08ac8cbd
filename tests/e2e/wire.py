"""A network cable between two namespaces that a test can make slow and lossy, and cut.

Real packets of the kernel's own TCP go through it: it takes each frame from one end and gives it to the other later, or
not at all. (`tc netem` would do the same where the kernel has it.)

    python tests/e2e/wire.py END OTHER_END      the process that carries the frames; the test writes its orders to it
"""

from __future__ import annotations

import heapq
import os
import random
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NEAR, FAR = "198.18.77.1", "198.18.77.2"
"""Addresses of the two ends, here and in the far namespace, of the range that is set aside for tests of networks."""
NEAR_AGAIN = "198.18.77.3"
"""Another address of the near end."""

_SOL_PACKET, _PACKET_VNET_HDR = 263, 15


class Cable:
    """What a test holds of it: the far namespace, and what becomes of frames."""

    def __init__(self, name: str, carrier: subprocess.Popen[bytes]) -> None:
        """Use `lay`."""
        self._name, self._carrier = name, carrier
        self.within_far = ("ip", "netns", "exec", name)
        """Words before a command that runs in the far namespace."""

    @classmethod
    @contextmanager
    def lay(cls, **names: str) -> Iterator[Cable]:
        """A cable to a new namespace, where `names` are known by their addresses. Needs root."""
        _remove_leftovers()
        name, middle = f"paceline-far-{os.getpid()}", f"paceline-wire-{os.getpid()}"
        near_end, far_end = f"pn{os.getpid()}", f"pf{os.getpid()}"
        hosts = Path("/etc/netns", name)
        try:
            for space in (name, middle):
                _ip("netns", "add", space)
            hosts.mkdir(parents=True)
            cls._write_hosts(hosts / "hosts", names)
            _ip("link", "add", near_end, "type", "veth", "peer", "name", "near", "netns", middle)
            _ip("link", "add", far_end, "netns", name, "type", "veth", "peer", "name", "far", "netns", middle)
            for address in (NEAR, NEAR_AGAIN):
                _ip("address", "add", f"{address}/24", "dev", near_end)
            _ip("link", "set", near_end, "up")
            _ip("-n", name, "address", "add", f"{FAR}/24", "dev", far_end)
            for space, device in ((name, "lo"), (name, far_end), (middle, "near"), (middle, "far")):
                _ip("-n", space, "link", "set", device, "up")
            carrier = subprocess.Popen(
                ["ip", "netns", "exec", middle, sys.executable, __file__, "near", "far"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            try:
                assert carrier.stdout is not None
                assert carrier.stdout.readline() == b"carrying\n"
                yield cls(name, carrier)
            finally:
                carrier.kill()
                carrier.communicate()
        finally:
            _ip("link", "delete", near_end, check=False)
            for space in (name, middle):
                _ip("netns", "delete", space, check=False)
            (hosts / "hosts").unlink(missing_ok=True)
            if hosts.exists():
                hosts.rmdir()

    def be(self, *, delay_seconds: float = 0.0, loss: float = 0.0) -> None:
        """From now on each frame takes so long, either way, and so large a share of them is lost; 1 is a cut."""
        assert self._carrier.stdin is not None
        self._carrier.stdin.write(f"{delay_seconds} {loss}\n".encode())
        self._carrier.stdin.flush()

    def rename(self, **names: str) -> None:
        """Have names mean other addresses in the far namespace."""
        self._write_hosts(Path("/etc/netns", self._name, "hosts"), names)

    @staticmethod
    def _write_hosts(path: Path, names: dict[str, str]) -> None:
        # In place: what runs there has this very file mounted.
        path.write_text("".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items()))


def why_not() -> str | None:
    """Why no cable can be laid here, or None."""
    if os.geteuid() != 0:
        return "namespaces need root"
    probe = f"paceline-probe-{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        try:
            _ip("-n", probe, "link", "add", "name", "one", "type", "veth", "peer", "name", "other")
        finally:
            _ip("netns", "delete", probe, check=False)
    except FileNotFoundError:
        return "the program `ip` is not here: apt-get install iproute2"
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.strip()}"
    return None


def _remove_leftovers() -> None:
    """Take away what a test that was killed left: its end would still have the addresses of ours."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        owner = name.removeprefix("paceline-far-").removeprefix("paceline-wire-")
        if owner != name and not Path("/proc", owner).exists():
            _ip("link", "delete", f"pn{owner}", check=False)
            _ip("netns", "delete", name, check=False)


def _ip(*arguments: str, check: bool = True) -> str:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True).stdout


def carry(ends: tuple[str, str]) -> None:
    """Carry frames between two devices until standard input ends, which says how slow and lossy to be."""
    sockets = []
    for device in ends:
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
        # With each frame the kernel's note on it: large ones are not cut, and checksums not made, before they are sent.
        end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        end.bind((device, 0))
        end.setblocking(False)
        sockets.append(end)
    chance, delay_seconds, loss = random.Random(0), 0.0, 0.0
    under_way: list[tuple[float, int, socket.socket, bytes]] = []
    count = 0
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
    for end, other in zip(sockets, reversed(sockets), strict=True):
        selector.register(end, selectors.EVENT_READ, other)
    print("carrying", flush=True)
    while True:
        wait = max(under_way[0][0] - time.monotonic(), 0) if under_way else None
        for key, _ in selector.select(wait):
            if key.data is None:
                orders = os.read(sys.stdin.fileno(), 4096).split()
                if not orders:
                    return
                delay_seconds, loss = (float(word) for word in orders[-2:])
                continue
            end, other = key.fileobj, key.data
            assert isinstance(end, socket.socket)
            try:
                frame, address = end.recvfrom(1 << 17)
            except BlockingIOError:
                continue
            if address[2] == socket.PACKET_OUTGOING or chance.random() < loss:
                continue
            count += 1
            heapq.heappush(under_way, (time.monotonic() + delay_seconds, count, other, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, other, frame = heapq.heappop(under_way)
            try:
                other.send(frame)
            except OSError:
                continue  # its queue is full: a loss as any other


if __name__ == "__main__":
    carry((sys.argv[1], sys.argv[2]))
