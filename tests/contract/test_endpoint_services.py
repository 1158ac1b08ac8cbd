"""Each RPC of the endpoint over real sockets, by plain protobuf clients: codes, repeats, waits."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from endpoints import SEMANTICS, SPEC, Client, make_config, make_snapshot, metrics_page, start, until
from paceline.identity import PolicyIdentity
from paceline.learner.endpoint import Endpoint
from paceline.process import StopSignal
from paceline.rpc.status import REASON_KEY
from paceline.rpc.wire import row_spec_from_wire, seconds_of
from paceline.v1 import parameters_pb2, run_pb2

Code = grpc.StatusCode


class Served:
    """One endpoint, started once for many tests; each takes the next version."""

    def __init__(self, folder: Path) -> None:
        self.config = make_config(folder, "collector.count=2", "run.seed=17", "collector.max_count=8")
        self.endpoint: Endpoint = start(self.config)
        self.client = Client(self.endpoint.port)
        self.version = 0

    def publish(self, client: Client | None = None) -> bytes:
        """Publish the next version and wait until it is served; its bytes."""
        self.version += 1
        header, payload = make_snapshot(self.version)
        self.endpoint.publish(header, payload)
        (client or self.client).fetch_version(self.version)
        return payload

    def lines(self, kind: str) -> list[dict[str, Any]]:
        text = (self.config.run_folder / "metrics.jsonl").read_text()
        return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]

    def close(self) -> None:
        self.client.close()
        self.endpoint.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("served"))
    served.publish()
    yield served
    served.close()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Served]:
    """An endpoint of one test, which has published nothing."""
    served = Served(tmp_path)
    yield served
    served.close()


def refused(call: Callable[[], object], code: grpc.StatusCode, reason: str | None = None) -> str:
    """Make a call that has to fail with this code and class; the message."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is code, caught.value.details()
    if reason is not None:
        assert dict(caught.value.trailing_metadata())[REASON_KEY] == reason
    return str(caught.value.details())


def test_a_caller_that_has_nothing_gets_the_newest_snapshot(served: Served) -> None:
    payload = served.publish()
    fetched = served.client.fetch()
    assert fetched.payload == payload
    assert fetched.header is not None
    assert fetched.header.run_state == parameters_pb2.RUN_STATE_RUNNING
    assert fetched.header.actor_semantics_json == SEMANTICS
    assert fetched.header.payload_bytes == len(payload)


@pytest.mark.parametrize("newer", [(0, 0), (0, 5), (1, -1000)])
def test_a_caller_that_has_the_newest_or_a_newer_one_is_told_so(served: Served, newer: tuple[int, int]) -> None:
    have = (1 + newer[0], max(served.version + newer[1], 1))
    fetched = served.client.fetch(served.client.request(have=have))
    assert fetched.not_modified is not None
    assert fetched.not_modified.newest.version == served.version


def test_not_modified_is_a_few_bytes(served: Served) -> None:
    [answer] = served.client.parameters.GetSnapshot(served.client.request(have=(1, served.version)), timeout=10)
    assert answer.ByteSize() < 64


def test_the_first_message_of_each_answer_says_how_long_the_call_was_here_and_the_others_do_not(
    served: Served,
) -> None:
    served.publish()
    stub, request = served.client.parameters, served.client.request
    for asked, held in (
        (request(), 0.0),
        (request(have=(1, served.version)), 0.0),
        (request(have=(9, 1), wait=0.3), 0.3),
    ):
        before = time.time()
        first, *others = stub.GetSnapshot(asked, timeout=10)
        after = time.time()
        received, answered = seconds_of(first.times.received_at), seconds_of(first.times.answered_at)
        assert before <= received <= received + held * 0.99 <= answered <= after
        assert not any(other.HasField("times") for other in others)


@pytest.mark.parametrize("have", [None, (1, 1)])
def test_versions_below_the_one_asked_for_are_skipped(served: Served, have: tuple[int, int] | None) -> None:
    served.publish()
    request = served.client.request(have=have, at_least=served.version + 1)
    assert served.client.fetch(request).not_modified is not None
    served.publish()
    assert served.client.fetch(request).version == served.version


def test_a_waiting_poll_gets_the_next_version_when_it_is_published(served: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.client.fetch, served.client.request(have=(1, served.version), wait=20.0))
        until(lambda: metrics_page(served.endpoint)["paceline_endpoint_waiting_polls"] == 1)
        payload = served.publish()
        assert waiting.result(20).payload == payload


def test_a_waiting_poll_is_answered_before_the_callers_deadline(served: Served) -> None:
    request = served.client.request(have=(1, served.version), wait=60.0)
    fetched = served.client.fetch(request, seconds=1.0)
    assert fetched.not_modified is not None


def test_polls_of_another_run_or_protocol_are_refused(served: Served) -> None:
    client = served.client
    message = refused(lambda: client.fetch(client.request(run_id="other")), Code.INVALID_ARGUMENT, "RunMismatchError")
    assert "'trial'" in message
    assert "'other'" in message
    message = refused(lambda: client.fetch(client.request(protocol=99)), Code.INVALID_ARGUMENT, "ProtocolMismatchError")
    assert "99" in message
    refused(lambda: client.fetch(client.request(have=(0, 5))), Code.INVALID_ARGUMENT)


def test_before_the_first_snapshot_polls_are_told_to_try_again_and_joining_works(fresh: Served) -> None:
    refused(fresh.client.fetch, Code.UNAVAILABLE, "UnavailableError")
    assert health_of(fresh) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert fresh.client.join().index == 0
    page = metrics_page(fresh.endpoint)
    assert not [name for name in page if "publish_lag" in name or "published" in name or "age" in name]
    fresh.publish()
    until(lambda: health_of(fresh) == health_pb2.HealthCheckResponse.SERVING)


def test_a_poll_that_waits_for_the_first_snapshot_gets_it(fresh: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fresh.client.fetch, fresh.client.request(wait=20.0))
        until(lambda: metrics_page(fresh.endpoint)["paceline_endpoint_waiting_polls"] == 1)
        payload = fresh.publish()
        assert waiting.result(20).payload == payload


def test_joining_tells_a_collector_all_that_it_needs(fresh: Served) -> None:
    first = fresh.client.join(process_id="a")
    second = fresh.client.join(process_id="b")
    assert [(place.index, place.incarnation, place.warmup_step_count) for place in (first, second)] == [
        (0, 1, 50),
        (1, 1, 50),
    ]
    assert row_spec_from_wire(first.row_spec) == SPEC
    assert (first.table, first.run_seed, first.actor_semantics_json) == ("transitions", 17, SEMANTICS)
    assert first.run_state == parameters_pb2.RUN_STATE_RUNNING
    assert (first.environment_id, first.environment_kwargs_json) == ("Pendulum-v1", "{}")
    assert (first.n_step, first.gamma) == (1, 0.99)


def test_joining_again_makes_a_new_incarnation_that_is_durable_before_it_is_told(served: Served) -> None:
    before = served.client.join(5).incarnation
    after = served.client.join(5).incarnation
    assert after == before + 1
    members = json.loads((served.config.run_folder / "learner" / "members.json").read_text())
    assert members["content"]["collector"]["5"] == after


def test_an_evaluator_joins_beside_the_collectors(served: Served) -> None:
    place = served.client.join(role=run_pb2.ROLE_EVALUATOR)
    assert (place.index, place.table, place.HasField("row_spec"), place.warmup_step_count) == (0, "", False, 0)
    assert place.actor_semantics_json == SEMANTICS


def test_joining_wrongly_is_refused(served: Served) -> None:
    client = served.client
    refused(lambda: client.join(run_id="other"), Code.INVALID_ARGUMENT, "RunMismatchError")
    refused(lambda: client.join(protocol=2), Code.INVALID_ARGUMENT, "ProtocolMismatchError")
    refused(lambda: client.join(8), Code.INVALID_ARGUMENT, "InvalidInputError")
    refused(lambda: client.join(-1), Code.INVALID_ARGUMENT, "InvalidInputError")
    refused(lambda: client.join(role=run_pb2.ROLE_UNSPECIFIED), Code.INVALID_ARGUMENT, "InvalidInputError")
    refused(lambda: client.join(process_id="x" * 1000), Code.INVALID_ARGUMENT, "InvalidInputError")


def test_a_run_whose_indices_are_all_taken_says_so(fresh: Served) -> None:
    for number in range(8):
        fresh.client.join(process_id=f"process {number}")
    refused(lambda: fresh.client.join(process_id="one more"), Code.RESOURCE_EXHAUSTED, "RunFullError")


def test_reported_episodes_are_recorded_once(served: Served) -> None:
    incarnation = served.client.join(3).incarnation
    for sequence, returns in ((1, (-5.0, -6.0)), (1, (-5.0, -6.0)), (2, (-7.0,)), (3, ())):
        answer = served.client.report(sequence, *returns, index=3, incarnation=incarnation)
        assert answer.run_state == parameters_pb2.RUN_STATE_RUNNING
    recorded = [line for line in served.lines("episode") if line["collector_index"] == 3]
    assert [(line["sequence"], line["episode_return"]) for line in recorded] == [(1, -5.0), (1, -6.0), (2, -7.0)]
    assert recorded[0].keys() == {
        "time",
        "kind",
        "collector_index",
        "collector_incarnation",
        "sequence",
        "episode_return",
        "length",
        "terminated",
        "environment_steps",
    }


def test_reporting_wrongly_is_refused(served: Served) -> None:
    client = served.client
    old = client.join(4).incarnation
    new = client.join(4).incarnation
    refused(lambda: client.report(1, -1.0, index=4, incarnation=old), Code.FAILED_PRECONDITION, "ReplacedError")
    refused(lambda: client.report(1, index=4, incarnation=new + 1), Code.FAILED_PRECONDITION, "ConflictError")
    refused(lambda: client.report(1, index=7, incarnation=1), Code.FAILED_PRECONDITION, "ConflictError")
    refused(lambda: client.report(1, index=4, incarnation=new, run_id="other"), Code.INVALID_ARGUMENT)
    for value in (math.nan, math.inf):
        refused(lambda value=value: client.report(1, value, index=4, incarnation=new), Code.INVALID_ARGUMENT)
    refused(lambda: client.report(1, -1.0, length=-1, index=4, incarnation=new), Code.INVALID_ARGUMENT)
    refused(lambda: client.report(0, index=4, incarnation=new), Code.INVALID_ARGUMENT)
    # Nothing of it was kept: the first sequence is still new.
    client.report(1, -3.0, index=4, incarnation=new)
    recorded = [line for line in served.lines("episode") if line["collector_index"] == 4]
    assert [line["episode_return"] for line in recorded] == [-3.0]


def test_an_evaluation_is_recorded_once_and_told_to_the_training_process(served: Served) -> None:
    served.publish()
    identity = PolicyIdentity(1, served.version)
    assert not served.endpoint.wait_for_evaluation(identity, 0.0, StopSignal())
    for _ in range(2):
        served.client.evaluate(served.version, -100.0, -200.0)
    assert served.endpoint.wait_for_evaluation(identity, 10.0, StopSignal())
    recorded = [line for line in served.lines("evaluation") if line["version"] == served.version]
    assert [(line["mean_return"], line["returns"], line["mean_length"]) for line in recorded] == [
        (-150.0, [-100.0, -200.0], 200.0)
    ]
    assert recorded[0]["environment_steps"] == served.version * 10
    assert metrics_page(served.endpoint)["paceline_endpoint_evaluation_return_mean"] == -150.0


def test_evaluating_wrongly_is_refused(served: Served) -> None:
    client = served.client
    refused(lambda: client.evaluate(1, -1.0, run_id="other"), Code.INVALID_ARGUMENT, "RunMismatchError")
    refused(lambda: client.evaluate(1), Code.INVALID_ARGUMENT)
    refused(lambda: client.evaluate(1, math.nan), Code.INVALID_ARGUMENT)
    refused(lambda: client.evaluate(0, -1.0), Code.INVALID_ARGUMENT)
    refused(lambda: client.evaluate(10**9, -1.0), Code.INVALID_ARGUMENT)


def test_what_the_training_process_records_is_written_with_unknown_numbers_as_null(served: Served) -> None:
    served.endpoint.record("training", {"environment_steps": 5, "critic_loss": 0.5, "training_lag_p99": math.inf})
    until(lambda: bool(served.lines("training")))
    [line] = served.lines("training")
    assert (line["critic_loss"], line["training_lag_p99"]) == (0.5, None)


def test_polls_are_counted_by_result_and_lag_is_measured_from_them(fresh: Served) -> None:
    fresh.client.join(2)
    for _ in range(3):
        fresh.publish()
    applied = parameters_pb2.PolicyIdentity(incarnation=1, version=1)
    replica = parameters_pb2.ReplicaReport(collector_index=2, collector_incarnation=1, applied=applied)
    stranger = parameters_pb2.ReplicaReport(collector_index=6, collector_incarnation=1, applied=applied)
    for report in (replica, stranger):
        fresh.client.fetch(fresh.client.request(have=(1, 3), replica=report))
    refused(lambda: fresh.client.fetch(fresh.client.request(run_id="other")), Code.INVALID_ARGUMENT)
    page = metrics_page(fresh.endpoint)
    assert page['paceline_endpoint_publish_lag_versions{collector="2"}'] == 2
    assert page['paceline_endpoint_publish_lag_updates{collector="2"}'] == 20
    assert not [name for name in page if 'collector="6"' in name]
    assert page['paceline_endpoint_polls_total{result="not_modified"}'] == 2
    assert page['paceline_endpoint_polls_total{result="refused"}'] == 1
    assert page["paceline_endpoint_poll_lag_versions_count"] == 1


def test_a_caller_that_goes_away_is_counted_and_leaves_nothing_behind(served: Served) -> None:
    call = served.client.parameters.GetSnapshot(served.client.request(have=(1, served.version), wait=50.0), timeout=60)
    until(lambda: metrics_page(served.endpoint)["paceline_endpoint_waiting_polls"] == 1)
    before = metrics_page(served.endpoint)['paceline_endpoint_polls_total{result="cancelled"}']
    call.cancel()
    until(lambda: metrics_page(served.endpoint)["paceline_endpoint_waiting_polls"] == 0)
    until(lambda: metrics_page(served.endpoint)['paceline_endpoint_polls_total{result="cancelled"}'] == before + 1)


def test_a_finished_run_is_said_at_once_to_those_who_wait_and_to_those_who_come(fresh: Served) -> None:
    fresh.publish()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fresh.client.fetch, fresh.client.request(have=(1, 1), wait=50.0), seconds=60.0)
        until(lambda: metrics_page(fresh.endpoint)["paceline_endpoint_waiting_polls"] == 1)
        fresh.endpoint.finish()
        answer = waiting.result(10).not_modified
    assert answer is not None
    assert answer.run_state == parameters_pb2.RUN_STATE_FINISHED
    answer = fresh.client.fetch(fresh.client.request(have=(1, 1), wait=50.0), seconds=10.0).not_modified
    assert answer is not None
    assert answer.run_state == parameters_pb2.RUN_STATE_FINISHED
    assert fresh.client.fetch().header.run_state == parameters_pb2.RUN_STATE_FINISHED  # type: ignore[union-attr]
    assert fresh.client.join().run_state == parameters_pb2.RUN_STATE_FINISHED


def test_the_last_snapshot_is_served_before_the_run_is_said_to_be_finished(fresh: Served) -> None:
    fresh.publish()
    for version in range(2, 40):
        fresh.endpoint.publish(*make_snapshot(version, size=1 << 20))
    fresh.endpoint.finish()
    have, finished = 1, False
    while not finished:
        fetched = fresh.client.fetch(fresh.client.request(have=(1, have), wait=10.0))
        state = fetched.header or fetched.not_modified
        assert state is not None
        finished = state.run_state == parameters_pb2.RUN_STATE_FINISHED
        have = fetched.version or have
    assert have == 39


def test_a_failed_learner_is_not_serving_and_says_why(fresh: Served) -> None:
    fresh.publish()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fresh.client.fetch, fresh.client.request(have=(1, 1), wait=50.0), seconds=60.0)
        until(lambda: metrics_page(fresh.endpoint)["paceline_endpoint_waiting_polls"] == 1)
        fresh.endpoint.fail("the learner failed: a loss is not finite")
        message = refused(lambda: waiting.result(10), Code.UNAVAILABLE, "UnavailableError")
    assert "a loss is not finite" in message
    assert health_of(fresh) == health_pb2.HealthCheckResponse.NOT_SERVING
    refused(fresh.client.fetch, Code.UNAVAILABLE)
    refused(fresh.client.join, Code.UNAVAILABLE)


def test_both_services_are_found_by_reflection(served: Served) -> None:
    names = ProtoReflectionDescriptorDatabase(served.client.channel).get_services()
    assert {"paceline.v1.ParameterService", "paceline.v1.RunService", "grpc.health.v1.Health"} <= set(names)


def health_of(served: Served) -> int:
    stub = health_pb2_grpc.HealthStub(served.client.channel)
    answers = {
        stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status
        for service in ("", "paceline.v1.ParameterService", "paceline.v1.RunService")
    }
    [status] = answers
    return int(status)
