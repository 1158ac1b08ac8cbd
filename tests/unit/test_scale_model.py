"""The simulation of many collectors: by hand where there are few, and by what has to hold for any number."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.scale_bench.model import Cost, Costs, Setting, layers_of, simulate

MEGABYTE = 1_000_000
COSTS = Costs(
    publish=Cost(0.001, 1e-9),
    publish_wait_seconds=0.004,
    endpoint_send=Cost(0.002, 2e-9),
    relay_take=Cost(0.003, 3e-9),
    relay_send=Cost(0.002, 2e-9),
    collector_take=Cost(0.005, 4e-9),
)
ONE = Setting(
    collectors=1,
    depth=0,
    fan_out=4,
    snapshot_bytes=MEGABYTE,
    chunk_bytes=MEGABYTE,
    publish_seconds=1.0,
    snapshots=3,
    bandwidth_bytes=100 * MEGABYTE,
    latency_seconds=0.1,
)
PUBLISH = 0.001 + 0.001 + 0.004
SEND, CARD, WAY = 0.002 + 0.002, 0.01, 0.1
TAKE, TAKE_BY_RELAY = 0.005 + 0.004, 0.003 + 0.003


def test_one_collector_waits_for_each_step_once():
    outcome = simulate(ONE, COSTS)
    assert outcome.delays == pytest.approx([PUBLISH + SEND + CARD + WAY + TAKE] * 3)
    assert outcome.endpoint_cpu_share == pytest.approx(3 * (0.002 + SEND) / 3)
    assert outcome.endpoint_bytes_per_second == pytest.approx(MEGABYTE)
    assert outcome.skipped_share == outcome.relays == outcome.relay_cpu_share == 0


def test_each_relay_on_the_way_adds_its_own_steps():
    hop = SEND + CARD + WAY + TAKE_BY_RELAY
    for depth in (1, 2, 3):
        outcome = simulate(replace(ONE, depth=depth), COSTS)
        assert outcome.delays == pytest.approx([PUBLISH + depth * hop + SEND + CARD + WAY + TAKE] * 3)
        assert outcome.relays == depth
        assert outcome.relay_cpu_share == pytest.approx(3 * (TAKE_BY_RELAY + SEND) / 3)


def test_the_second_reader_waits_for_the_first_at_the_processor_and_at_the_card():
    outcome = simulate(replace(ONE, collectors=2, snapshots=1), COSTS)
    # Both are begun before the first byte leaves; the card is the slower one.
    first = PUBLISH + 0.002 + 0.002 + 0.002 + CARD + WAY + TAKE
    assert outcome.delays == pytest.approx([first, first + CARD])


def test_collectors_that_cannot_keep_up_get_the_newest_and_skip_the_rest():
    outcome = simulate(replace(ONE, publish_seconds=0.01, snapshots=100), COSTS)
    assert 0.8 < outcome.skipped_share < 1
    assert max(outcome.delays) < 2 * (PUBLISH + SEND + CARD + 2 * WAY + TAKE)


@pytest.mark.parametrize(
    ("collectors", "depth", "layers"), [(1, 2, [1, 1]), (33, 1, [2]), (1000, 2, [32, 1]), (7, 0, [])]
)
def test_layers_have_as_many_relays_as_their_readers_need(collectors, depth, layers):
    assert layers_of(replace(ONE, collectors=collectors, depth=depth, fan_out=32)) == layers


@given(
    collectors=st.integers(1, 40),
    depth=st.integers(0, 3),
    fan_out=st.integers(1, 8),
    chunk_bytes=st.integers(100_000, 2 * MEGABYTE),
    publish_seconds=st.floats(0.01, 1),
)
def test_every_collector_gets_the_last_snapshot_and_the_endpoint_sends_no_more_than_its_readers_ask_for(
    collectors, depth, fan_out, chunk_bytes, publish_seconds
):
    setting = replace(
        ONE,
        collectors=collectors,
        depth=depth,
        fan_out=fan_out,
        chunk_bytes=chunk_bytes,
        publish_seconds=publish_seconds,
    )
    outcome = simulate(setting, COSTS)
    readers = layers_of(setting)[-1] if depth else collectors
    assert collectors <= len(outcome.delays) <= 3 * collectors
    assert outcome.endpoint_bytes_per_second * 3 * publish_seconds <= readers * 3 * MEGABYTE * (1 + 1e-9)
    assert outcome.endpoint_cpu_share <= 1
    assert outcome.relay_cpu_share <= 1
    assert outcome == simulate(setting, COSTS)
