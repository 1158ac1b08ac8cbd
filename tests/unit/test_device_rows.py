"""Rows in a tensor behave as rows in the process's own memory do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.learner.sources import room
from paceline.learner.sources.device_rows import DeviceRows
from paceline.tables.memory import MemorySettings, TableMemory
from paceline.tables.ring import HostRows

ROW_BYTES = 24
CPU = torch.device("cpu")


def some_rows(random: np.random.Generator, count: int) -> np.ndarray:
    return random.integers(0, 256, (count, ROW_BYTES), np.uint8)


@given(
    writes=st.lists(st.tuples(st.integers(0, 15), st.integers(1, 5)), max_size=8),
    index=st.lists(st.integers(0, 19), max_size=12),
)
def test_writes_gathers_and_reads_are_those_of_host_memory(writes, index):
    random = np.random.default_rng(0)
    host, device = HostRows(20, ROW_BYTES), DeviceRows(20, ROW_BYTES, CPU)
    stores = host, device
    first = some_rows(random, 20)
    for store in stores:
        store.write(0, first)
    for position, count in writes:
        rows = some_rows(random, count)
        rows.flags.writeable = False  # as the bytes of a message are
        for store in stores:
            store.write(position, rows)
    places = np.array(index, np.int64)
    expected, out = np.empty((len(index), ROW_BYTES), np.uint8), torch.empty((len(index), ROW_BYTES), dtype=torch.uint8)
    host.gather(places, expected)
    device.gather(places, out)
    np.testing.assert_array_equal(out.numpy(), expected)
    read = [np.empty((9, ROW_BYTES), np.uint8) for _ in stores]
    for store, rows in zip(stores, read, strict=True):
        store.read(3, rows)
    np.testing.assert_array_equal(*read)
    assert (device.nbytes, device.row_bytes) == (host.nbytes, host.row_bytes)


def test_a_ring_of_them_gives_the_batches_of_a_ring_in_host_memory():
    settings, random = MemorySettings(50), np.random.default_rng(1)
    host = TableMemory(settings, ROW_BYTES)
    device = TableMemory(settings, ROW_BYTES, rows=DeviceRows(settings.physical_rows, ROW_BYTES, CPU))
    draws = np.random.default_rng(2), np.random.default_rng(2)
    expected, out = np.empty((16, ROW_BYTES), np.uint8), torch.empty((16, ROW_BYTES), dtype=torch.uint8)
    for _ in range(30):
        rows = some_rows(random, 7)
        for memory in (host, device):
            memory.append(memory.end_row, rows, stored_at=0.0)
        host.sample(draws[0], expected)
        device.sample(draws[1], out)
        np.testing.assert_array_equal(out.numpy(), expected)


def test_rings_that_fit_are_let_through(monkeypatch):
    monkeypatch.setattr(room, "available_bytes", lambda device: 10 << 30)
    room.require_room(9 << 30, device=CPU, table="transitions")


@pytest.mark.parametrize(("device", "place"), [("cpu", "this host"), ("cuda:0", "device cuda:0")])
def test_rings_that_do_not_fit_are_refused_with_both_sizes_and_what_to_lower(monkeypatch, device, place):
    monkeypatch.setattr(room, "available_bytes", lambda device: 10_000_000_000)
    with pytest.raises(ConfigError) as caught:
        room.require_room(9_500_000_000, device=torch.device(device), table="steps", ring_count=2)
    message = str(caught.value)
    assert "9.5 GB" in message
    assert f"{place} has 10 GB" in message
    assert "replay.tables.steps.capacity_rows or .capacity_bytes, or set replay.read=sample" in message
