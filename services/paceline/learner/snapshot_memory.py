"""The memory through which snapshots go from the training process to its endpoint process."""

from __future__ import annotations

import mmap
import os

from paceline.learner.anonymous_memory import create_anonymous_file

SLOT_COUNT = 2
"""The training process fills one slot while the endpoint copies from the other."""


class SnapshotMemory:
    """`SLOT_COUNT` slots of equal size, which grow with the largest snapshot."""

    def __init__(self, descriptor: int) -> None:
        """Map the file behind `descriptor`, which this object then owns."""
        self.descriptor = descriptor
        self.slot_bytes = 0
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> SnapshotMemory:
        """New memory, without any size yet."""
        return cls(create_anonymous_file("paceline-snapshots"))

    def grow(self, slot_bytes: int) -> None:
        """Make each slot hold `slot_bytes` or more. No slot may be in use."""
        if slot_bytes > self.slot_bytes:
            page = mmap.PAGESIZE
            rounded = -(-slot_bytes // page) * page
            os.ftruncate(self.descriptor, SLOT_COUNT * rounded)
            self.attach(rounded)

    def attach(self, slot_bytes: int) -> None:
        """See the slots at the size that the other process gave them."""
        if slot_bytes != self.slot_bytes:
            if self._map is not None:
                self._map.close()
            self._map = mmap.mmap(self.descriptor, SLOT_COUNT * slot_bytes)
            self.slot_bytes = slot_bytes

    def write(self, slot: int, payload: bytes) -> None:
        """Copy `payload` into a slot."""
        start = slot * self.slot_bytes
        self._mapped()[start : start + len(payload)] = payload

    def view(self, slot: int, payload_bytes: int) -> memoryview:
        """The first bytes of a slot, without a copy; release it before the memory grows or closes."""
        start = slot * self.slot_bytes
        return memoryview(self._mapped())[start : start + payload_bytes]

    def close(self) -> None:
        """Let go of the memory; it is gone when both processes have."""
        if self._map is not None:
            self._map.close()
        os.close(self.descriptor)

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            raise RuntimeError("snapshot memory has no size yet")
        return self._map
