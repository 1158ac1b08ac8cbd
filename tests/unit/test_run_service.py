"""What the learner's run service tells those who join."""

from __future__ import annotations

import asyncio
import json

import pytest
from prometheus_client import CollectorRegistry

from paceline.config import build
from paceline.identity import PROTOCOL_VERSION
from paceline.learner.endpoint_metrics import EndpointMetrics
from paceline.learner.registry import RunRegistry
from paceline.learner.run_service import RunDescription, RunService
from paceline.rows import Column, transition_spec
from paceline.rpc.wire import row_spec_to_wire
from paceline.serving.publication import Publication
from paceline.v1 import run_pb2

SPEC = row_spec_to_wire(transition_spec(Column("observation", "float32", (3,)), Column("action", "float32", (1,))))


async def join(description: RunDescription, role: run_pb2.Role) -> run_pb2.JoinResponse:
    async def done(_: object) -> None:
        pass

    registry = RunRegistry({}, max_collectors=2, silence_seconds=30.0, warmup_steps=0, collector_count=1)
    service = RunService(
        description,
        Publication("the learner"),
        registry,
        EndpointMetrics(CollectorRegistry(), registry),
        keep=done,
        record=done,
        evaluated=lambda policy: None,
        was_published=lambda policy: True,
    )
    request = run_pb2.JoinRequest(run_id="trial", protocol_version=PROTOCOL_VERSION, role=role, process_id="host:1")
    return await service.Join(request, None)


@pytest.mark.parametrize("role", [run_pb2.ROLE_COLLECTOR, run_pb2.ROLE_EVALUATOR])
def test_joining_tells_what_the_learner_was_configured_with(role: run_pb2.Role) -> None:
    config = build(
        {
            "run": {"id": "trial", "seed": 17},
            "env": {"id": "my_package:Mine-v0", "kwargs": {"size": (1, 2.5), "a": {"y": 1, "x": None}}},
            "learner": {"algorithm": {"name": "sac", "n_step": 3, "gamma": 0.9}},
        }
    )
    place = asyncio.run(join(RunDescription.of(config, SPEC, "{}"), role))
    assert place.environment_id == "my_package:Mine-v0"
    assert place.environment_kwargs_json == '{"a":{"x":null,"y":1},"size":[1,2.5]}'
    assert (place.n_step, place.gamma) == (3, 0.9)
    assert (place.run_seed, place.actor_semantics_json) == (17, "{}")


def test_an_environment_without_kwargs_is_told_apart_from_one_that_is_not_told() -> None:
    place = asyncio.run(join(RunDescription.of(build({"run": {"id": "trial"}}), SPEC, "{}"), run_pb2.ROLE_COLLECTOR))
    assert json.loads(place.environment_kwargs_json) == {}
    place = asyncio.run(join(RunDescription("trial", 0, "transitions", SPEC, "{}"), run_pb2.ROLE_COLLECTOR))
    assert (place.environment_id, place.environment_kwargs_json, place.n_step, place.gamma) == ("", "", 0, 0.0)
