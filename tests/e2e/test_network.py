"""A collector on another host, behind a network that is slow, lossy, cut, and whose names move."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.apart import Services
from e2e.wire import NEAR, NEAR_AGAIN, Cable, why_not
from free_ports import free_port
from observability import RULES, Prometheus, hurried
from paceline.local.embedded import EmbeddedRedis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DELAY_SECONDS = 0.5
RING_ROWS = 400


@pytest.fixture
def cable() -> Iterator[Cable]:
    if reason := why_not():
        pytest.skip(f"two network namespaces cannot be made here: {reason}")
    with Cable.lay(learner=NEAR, replay=NEAR) as cable:
        yield cable


@pytest.fixture
def services(cable: Cable, tmp_path: Path) -> Iterator[Services]:
    """Learner and replay here, the collector at the far end, which knows them by name."""
    store = EmbeddedRedis.start(tmp_path / "store")
    settings = [
        "security.allow_insecure=true",
        "rpc.keepalive_seconds=2",
        "rpc.keepalive_timeout_seconds=2",
        "rpc.deadline_seconds=5",
        "rpc.backoff_max_seconds=1",
        "collector.poll_seconds=2",
        # The preset sends two rows and waits for their acknowledgement: here that would be two rows a round trip.
        "collector.block_rows=32",
        "collector.max_blocks_in_flight=8",
        "learner.silence_seconds=8",  # well above what a poll takes over the slow network
        f"replay.tables.transitions.capacity_rows={RING_ROWS}",
    ]
    replay, learner = free_port(), free_port()
    services = Services(tmp_path, store.url, settings=settings)
    services.settings |= {
        "replay.listen": f"{NEAR}:{replay}",
        "replay.address": f"replay:{replay}",
        "learner.listen": f"{NEAR}:{learner}",
        "learner.address": f"learner:{learner}",
    }
    services.prefixes["collector"] = cable.within_far
    yield services
    services.close()
    store.stop()


def test_training_goes_on_over_a_bad_network_and_the_lag_is_what_the_network_makes_it(
    services: Services, cable: Cable, tmp_path: Path
):
    far_replay = f"replay.address={services.settings['replay.address']}"
    services.settings["replay.address"] = services.settings["replay.listen"]  # the learner is here, too
    services.start("replay")
    services.start("learner")
    services.start("collector", far_replay)
    services.wait_for_updates(300)
    collector = services.processes["collector"]
    # What is near is scraped: the far end's page would not come over a cut network either.
    scraped = ("replay.metrics_listen", "learner.metrics_listen", "learner.endpoint_metrics_listen")
    targets = {setting: [services.settings[setting]] for setting in scraped}
    with Prometheus(tmp_path / "prometheus", targets, rules=hurried(RULES.read_text("utf-8"))) as prometheus:
        cross_a_bad_network(services, cable, prometheus)
    assert services.processes["collector"] is collector
    for name in ("collector", "learner", "replay"):
        services.stop(name)


def cross_a_bad_network(services: Services, cable: Cable, prometheus: Prometheus) -> None:
    def misses_collectors() -> bool:
        alerts = prometheus.firing().get("PacelineNoCollectors", [])
        return any(labels["cause"] == "none_alive" for labels in alerts)

    # A slow and lossy network: no snapshot acts before its last byte has come, which takes so long.
    cable.be(delay_seconds=DELAY_SECONDS, loss=0.01)
    services.wait_for(
        lambda: mean_transfer_seconds(services) >= DELAY_SECONDS,
        "rows in the ring whose policy was so long under way",
    )
    services.wait_for_updates(services.updates() + 100)
    assert not misses_collectors()

    # A cut: no row comes, an alert says so, nobody ends, and all of it goes on by itself.
    cable.be(loss=1.0)
    wait_until_nothing_comes(services)
    services.wait_for(misses_collectors, "the alert that no collector is there")
    cable.be()
    services.wait_for_updates(services.updates() + 200)
    services.wait_for(lambda: not misses_collectors(), "the alert to end")

    services.wait_for(
        lambda: mean_transfer_seconds(services) < DELAY_SECONDS,
        "rows whose policy came faster than through that network",
    )


def mean_transfer_seconds(services: Services) -> float:
    """How long the policy of a row was under way to its collector, on average over rows that are trained on now."""

    def read() -> tuple[float, float]:
        page = services.metrics("learner.metrics_listen")
        return (
            page['paceline_learner_row_part_seconds_total{part="transfer"}'],
            page["paceline_learner_trained_rows_total"],
        )

    seconds, rows = read()
    # Draws are with replacement: so many rows are of all that the ring holds, and of nothing that it held before.
    services.wait_for(lambda: read()[1] >= rows + RING_ROWS, "rows to be trained on")
    seconds_now, rows_now = read()
    return (seconds_now - seconds) / (rows_now - rows)


def test_a_collector_finds_a_learner_that_moved_to_another_address(services: Services, cable: Cable):
    """Field case: the pod is replaced, and its name means another address from then on."""
    port = services.settings["learner.listen"].rpartition(":")[2]
    services.settings["replay.address"] = services.settings["replay.listen"]
    services.start("replay")
    services.start("learner")
    services.start("collector")
    services.wait_for_updates(250)
    services.stop("learner")
    services.settings["learner.listen"] = f"{NEAR_AGAIN}:{port}"
    cable.rename(learner=NEAR_AGAIN, replay=NEAR)
    services.start("learner", "--resume-or-start")
    services.wait_for(lambda: services.events("learner", "resumed"), "the learner to come back")
    began = time.monotonic()
    # Its snapshots reach the collector again: it reports what it applied.
    services.wait_for(
        lambda: (
            services.metrics("learner.endpoint_metrics_listen").get(
                'paceline_endpoint_publish_lag_versions{collector="0"}', -1.0
            )
            >= 0
        ),
        "the collector to poll the learner where it is now",
        30,
    )
    print(f"found again after {time.monotonic() - began:.1f} s")
    services.wait_for_updates(services.updates() + 200)
    assert services.processes["collector"].poll() is None


def wait_until_nothing_comes(services: Services) -> None:
    """Wait until no row has come for longer than the keep-alive needs to notice."""
    rows, since = -1.0, time.monotonic()

    def is_still() -> bool:
        nonlocal rows, since
        now = services.metrics("replay.metrics_listen")['paceline_replay_appended_rows_total{table="transitions"}']
        if now != rows:
            rows, since = now, time.monotonic()
        return time.monotonic() - since > 6

    services.wait_for(is_still, "a cut connection")
