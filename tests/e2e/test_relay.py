"""A whole run whose collectors and evaluator get every snapshot through a relay, which is killed on the way."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from e2e.apart import Services
from e2e.harness import records_of
from paceline.local.embedded import EmbeddedRedis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STEPS = 1000
COLLECTORS = ("collector-1", "collector-2")
ENDPOINT, RELAY = "learner.endpoint_metrics_listen", "relay.metrics_listen"


def free_addresses(count: int) -> list[str]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    return addresses


def test_a_run_trains_through_a_relay_and_publish_lag_is_known_at_the_learner(tmp_path: Path) -> None:
    listen, metrics_listen = free_addresses(2)
    redis = EmbeddedRedis.start(tmp_path / "redis")
    services = Services(
        tmp_path,
        redis.url,
        settings=[
            f"run.environment_steps={STEPS}",
            "collector.count=2",
            f"relay.listen={listen}",
            f"relay.metrics_listen={metrics_listen}",
            f"collector.snapshots_address={listen}",
            f"evaluator.snapshots_address={listen}",
            "rpc.backoff_max_seconds=0.5",
        ],
    )

    def lag_of(index: int) -> float | None:
        """Publish lag of a collector, as the learner's endpoint knows it."""
        return services.metrics(ENDPOINT).get(f'paceline_endpoint_publish_lag_versions{{collector="{index}"}}')

    def served_version() -> float:
        return services.metrics(RELAY).get("paceline_relay_served_version", 0)

    try:
        for name in ("replay", "learner", "relay", "evaluator", *COLLECTORS):
            services.start(name)
        services.wait_for(lambda: None not in (lag_of(0), lag_of(1)), "the publish lag of both collectors")
        services.wait_for_updates(200)
        services.kill("relay")
        services.start("relay")
        served = services.wait_for(served_version, "the relay to serve again")
        services.wait_for(lambda: served_version() > served, "the next version")
        services.wait_for(
            lambda: services.metrics(RELAY).get("paceline_relay_collectors") == 2, "both collectors to come back"
        )
        # Of all that read snapshots the learner knows one.
        page = services.metrics(ENDPOINT)
        assert page["paceline_endpoint_collectors"] == 2
        assert page["paceline_endpoint_waiting_polls"] + page["paceline_endpoint_sending_polls"] <= 1
        for name in ("learner", "evaluator", *COLLECTORS):
            assert services.end(name, 120) == 0, services.log(name)
        assert services.events("relay", "relay_serves")
        services.stop("relay")
    finally:
        services.close()
        redis.stop()
    assert records_of(services.folder, "finish")[-1]["environment_steps"] == STEPS
    assert records_of(services.folder, "evaluation")
