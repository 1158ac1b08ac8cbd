"""Shared memory for snapshots: two slots that grow, seen by both sides, without a name."""

from __future__ import annotations

import os

from paceline.learner.snapshot_memory import SLOT_COUNT, SnapshotMemory


def test_what_one_side_writes_the_other_reads_also_after_the_slots_grew() -> None:
    mine = SnapshotMemory.create()
    theirs = SnapshotMemory(os.dup(mine.descriptor))
    for size in (10, 5000, 5000, 3 << 20, 100):
        mine.grow(size)
        theirs.attach(mine.slot_bytes)
        for slot in range(SLOT_COUNT):
            mine.write(slot, bytes([slot + 1]) * size)
        for slot in range(SLOT_COUNT):
            with theirs.view(slot, size) as view:
                assert bytes(view) == bytes([slot + 1]) * size
    mine.close()
    theirs.close()


def test_slots_never_shrink() -> None:
    memory = SnapshotMemory.create()
    memory.grow(1 << 20)
    memory.grow(10)
    assert memory.slot_bytes == 1 << 20
    memory.close()
