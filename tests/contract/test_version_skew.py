"""One release apart: peers that know less than this one, and peers that know more, are served all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from prometheus_client import CollectorRegistry

import endpoints
from integration.replay_harness import RUN, SPEC, TABLE, ReplayThread, block, make_config, request, together, wait_until
from integration.replay_harness import Client as ReplayClient
from paceline.collector.append_metrics import AppendMetrics
from paceline.collector.writer import BlockWriter
from paceline.errors import ProtocolMismatchError
from paceline.identity import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from paceline.local.embedded import EmbeddedRedis
from paceline.rpc.bulk import APPEND_REQUEST, FOLLOW_RESPONSE, SAMPLE_RESPONSE, UPDATE_PRIORITIES_REQUEST, BulkFormat
from paceline.rpc.client import open_channel
from paceline.rpc.wire import row_spec_to_wire
from paceline.serving import parameter_service
from paceline.v1 import replay_pb2 as pb
from paceline.v1 import run_pb2
from skew import METHODS, MODULES, UNKNOWN, Previous, SkewProxy, add_unknown, as_next, as_previous

REPLAY, PARAMETERS, RUN_SERVICE = (f"/paceline.v1.{name}Service" for name in ("Replay", "Parameter", "Run"))


@pytest.fixture(scope="module")
def previous() -> Previous:
    return Previous()


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ReplayThread, ReplayClient]]:
    """A service with 40 rows, whose sampler has priorities."""
    redis = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"))
    thread = ReplayThread(make_config(redis.url, table={"sampler": "prioritised"}))
    client = ReplayClient(thread.config)
    client.wait_until_serving()
    client.open()
    client.append_rows(4)
    yield thread, client
    client.close()
    thread.stop()
    redis.stop()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[endpoints.Client]:
    """An endpoint that serves version 1."""
    endpoint = endpoints.start(endpoints.make_config(tmp_path_factory.mktemp("run")))
    endpoint.publish(*endpoints.make_snapshot(1))
    client = endpoints.Client(endpoint.port)
    client.fetch_version(1)
    yield client
    client.close()
    endpoint.close()


def call(channel: grpc.Channel, method: str, *requests: Any, answer: Any) -> list[Any]:
    """The answers to one call. On the wire a single message is a stream of one."""
    stub = channel.stream_stream(
        method, request_serializer=lambda message: message.SerializeToString(), response_deserializer=answer.FromString
    )
    return list(stub(iter(requests), timeout=30))


def test_every_field_of_the_release_before_is_where_it_was(previous: Previous) -> None:
    """Additive only: same name, number and type; what is gone is reserved."""
    for file in previous.files.file:
        if not file.name.startswith("paceline/"):
            continue
        for described in file.message_type:
            old = previous[described.name].DESCRIPTOR
            new = next(
                module.DESCRIPTOR.message_types_by_name[described.name]
                for module in MODULES
                if described.name in module.DESCRIPTOR.message_types_by_name
            )
            for field in old.fields:
                now = new.fields_by_name.get(field.name)
                assert now is not None, f"{old.name}.{field.name} is gone"
                assert _shape(now) == _shape(field), f"{old.name}.{field.name} has changed"
        for service in file.service:
            for method in service.method:
                now_method = METHODS[f"/paceline.v1.{service.name}/{method.name}"]
                assert (now_method.client_streaming, now_method.server_streaming) == (
                    method.client_streaming,
                    method.server_streaming,
                )


def _shape(field: FieldDescriptor) -> tuple[Any, ...]:
    kind = field.message_type or field.enum_type
    return field.number, field.type, field.is_repeated, field.has_presence, kind.full_name if kind else None


def test_a_collector_and_a_learner_of_the_release_before_are_served_by_replay(previous: Previous, replay) -> None:
    _, client = replay
    spec = previous["RowSpec"].FromString(row_spec_to_wire(SPEC).SerializeToString())
    opened = previous["OpenTableRequest"](run_id=RUN, table=TABLE, row_spec=spec)
    [answer] = call(client.channel, f"{REPLAY}/OpenTable", opened, answer=previous["OpenTableResponse"])
    assert answer.row_bytes == SPEC.row_bytes

    blocks = [
        previous["AppendRequest"].FromString(request(number, block(10 * number, 10), collector=7).SerializeToString())
        for number in (1, 2, 2)
    ]
    answers = call(client.channel, f"{REPLAY}/Append", *blocks, answer=previous["AppendResponse"])
    assert [(each.sequence, each.stored_row_count, each.duplicate) for each in answers] == [
        (1, 10, False),
        (2, 10, False),
        (2, 10, True),
    ]

    wanted = previous["SampleRequest"](
        run_id=RUN, table=TABLE, batch_size=64, batch_count=2, row_details=True, policy_version=3
    )
    sampled = call(client.channel, f"{REPLAY}/Sample", wanted, answer=previous["SampleResponse"])
    assert sum(each.row_count for each in sampled) == 128
    assert sum(len(each.keys) for each in sampled) == 128

    changed = previous["UpdatePrioritiesRequest"](run_id=RUN, table=TABLE, keys=[0, 1], priorities=[2.0, 3.0])
    [answer] = call(client.channel, f"{REPLAY}/UpdatePriorities", changed, answer=previous["UpdatePrioritiesResponse"])
    assert answer.updated_row_count == 2

    [answer] = call(
        client.channel,
        f"{REPLAY}/DescribeTables",
        previous["DescribeTablesRequest"](run_id=RUN),
        answer=previous["DescribeTablesResponse"],
    )
    rows = answer.tables[0].row_count
    following = previous["FollowRequest"](run_id=RUN, table=TABLE, from_row=0, wanted_before=rows)
    followed = call(client.channel, f"{REPLAY}/Follow", following, answer=previous["FollowResponse"])
    values = np.frombuffer(b"".join(each.rows for each in followed), SPEC.dtype)["value"]
    assert values.tolist() == [*map(float, range(40)), *map(float, range(10, 30))]


def test_a_collector_and_an_evaluator_of_the_release_before_are_served_by_the_endpoint(
    previous: Previous, endpoint
) -> None:
    joining = previous["JoinRequest"](run_id=endpoints.RUN_ID, protocol_version=OLDEST_PROTOCOL_VERSION, role=1)
    [place] = call(endpoint.channel, f"{RUN_SERVICE}/Join", joining, answer=previous["JoinResponse"])
    asking = previous["GetSnapshotRequest"](run_id=endpoints.RUN_ID, protocol_version=OLDEST_PROTOCOL_VERSION)
    asking.replica.collector_index, asking.replica.collector_incarnation = place.index, place.incarnation
    first, *rest = call(endpoint.channel, f"{PARAMETERS}/GetSnapshot", asking, answer=previous["GetSnapshotResponse"])
    assert first.header.identity.version == 1
    assert sum(len(each.chunk) for each in rest) == first.header.payload_bytes

    asking.have.CopyFrom(first.header.identity)
    [told] = call(endpoint.channel, f"{PARAMETERS}/GetSnapshot", asking, answer=previous["GetSnapshotResponse"])
    assert told.not_modified.newest.version == 1

    report = previous["ReportEpisodesRequest"](
        run_id=endpoints.RUN_ID,
        collector_index=place.index,
        collector_incarnation=place.incarnation,
        sequence=1,
        environment_step_count=200,
    )
    report.episodes.add(episode_return=-3.0, length=200)
    [answer] = call(
        endpoint.channel, f"{RUN_SERVICE}/ReportEpisodes", report, answer=previous["ReportEpisodesResponse"]
    )
    assert answer.run_state == 1
    judged = previous["ReportEvaluationRequest"](run_id=endpoints.RUN_ID, learner_step=10, environment_step_count=10)
    judged.policy.CopyFrom(first.header.identity)
    judged.episodes.add(episode_return=-2.0, length=200)
    [answer] = call(
        endpoint.channel, f"{RUN_SERVICE}/ReportEvaluation", judged, answer=previous["ReportEvaluationResponse"]
    )
    assert answer.run_state == 1


def requests_of_every_method() -> dict[str, Any]:
    """A request of each RPC that its service answers, with as many messages within it as it may have."""
    asking = endpoints.Client.request(None, have=(1, 1), wait=0.01)  # type: ignore[arg-type]
    report = run_pb2.ReportEpisodesRequest(
        run_id=endpoints.RUN_ID, collector_index=5, collector_incarnation=1, sequence=1
    )
    report.episodes.add(episode_return=1.0, length=3).ended_at.GetCurrentTime()
    judged = run_pb2.ReportEvaluationRequest(run_id=endpoints.RUN_ID)
    judged.policy.incarnation = judged.policy.version = 1
    judged.episodes.add(episode_return=1.0, length=3)
    appended = together(*(request(number, block(0, 10), collector=9) for number in (1, 2)))
    appended.header.sealed_at.GetCurrentTime()
    return {
        f"{REPLAY}/OpenTable": pb.OpenTableRequest(run_id=RUN, table=TABLE, row_spec=row_spec_to_wire(SPEC)),
        f"{REPLAY}/Append": appended,
        f"{REPLAY}/Sample": pb.SampleRequest(run_id=RUN, table=TABLE, batch_size=4, batch_count=1, row_details=True),
        f"{REPLAY}/UpdatePriorities": pb.UpdatePrioritiesRequest(run_id=RUN, table=TABLE, keys=[3], priorities=[1.0]),
        f"{REPLAY}/Follow": pb.FollowRequest(run_id=RUN, table=TABLE, from_row=0, wanted_before=10),
        f"{REPLAY}/DescribeTables": pb.DescribeTablesRequest(run_id=RUN),
        f"{PARAMETERS}/GetSnapshot": asking,
        f"{RUN_SERVICE}/Join": run_pb2.JoinRequest(
            run_id=endpoints.RUN_ID, protocol_version=PROTOCOL_VERSION, role=run_pb2.ROLE_COLLECTOR, index=6
        ),
        f"{RUN_SERVICE}/ReportEpisodes": report,
        f"{RUN_SERVICE}/ReportEvaluation": judged,
    }


def test_what_the_release_after_adds_to_any_message_is_passed_over(replay, endpoint) -> None:
    requests = requests_of_every_method()
    assert endpoint.join(5).incarnation == 1
    assert set(requests) == set(METHODS)
    for method, message in requests.items():
        channel = replay[1].channel if method.startswith(REPLAY) else endpoint.channel
        answer = message_factory.GetMessageClass(METHODS[method].output_type)
        without = call(channel, method, message, answer=answer)
        plain = message.SerializeToString()
        add_unknown(message)
        assert len(message.SerializeToString()) >= len(plain) + len(UNKNOWN)
        for data in (message.SerializeToString(), UNKNOWN + message.SerializeToString()):
            stub = channel.stream_stream(method, request_serializer=None, response_deserializer=answer.FromString)
            answers = list(stub(iter([data]), timeout=30))
            assert len(answers) == len(without), method
            if method in (f"{REPLAY}/OpenTable", f"{REPLAY}/UpdatePriorities", f"{REPLAY}/Follow"):
                assert answers == without, method  # those of the others have times, or are drawn


@pytest.mark.parametrize(
    ("bulk_format", "message"),
    [
        (APPEND_REQUEST, together(request(1, block(0, 3)), request(2, block(3, 3)))),
        (SAMPLE_RESPONSE, pb.SampleResponse(row_count=1, keys=[1, 2], stored_at=[0.5], rows=b"rows")),
        (UPDATE_PRIORITIES_REQUEST, pb.UpdatePrioritiesRequest(run_id=RUN, keys=[3], priorities=[1.0])),
        (FOLLOW_RESPONSE, pb.FollowResponse(first_row=4, row_count=1, stored_at=[0.5], rows=b"rows")),
    ],
    ids=["AppendRequest", "SampleResponse", "UpdatePrioritiesRequest", "FollowResponse"],
)
def test_messages_that_are_read_by_hand_pass_over_what_is_new(bulk_format: BulkFormat[Any], message: Any) -> None:
    expected = bulk_format.deserialize(message.SerializeToString())
    for data in (UNKNOWN + message.SerializeToString(), as_next(type(message), message.SerializeToString())):
        found = bulk_format.deserialize(data)
        found.head.DiscardUnknownFields()
        assert found.head == expected.head
        assert bytes(found.payload) == bytes(expected.payload)
        assert {name: values.tolist() for name, values in found.arrays.items()} == {
            name: values.tolist() for name, values in expected.arrays.items()
        }


@pytest.mark.parametrize("release", ["before", "after"])
def test_a_client_is_served_by_replay_of_another_release(release: str, previous: Previous, replay) -> None:
    """The answers lack what the release before did not say, or hold what this one does not know."""
    thread, _ = replay
    proxy = SkewProxy(thread.config.replay.address, as_previous(previous) if release == "before" else as_next)
    changed = thread.config.model_copy(
        update={"replay": thread.config.replay.model_copy(update={"address": proxy.address})}
    )
    client = ReplayClient(changed)
    try:
        client.open()
        collector = 20 if release == "before" else 21
        [answer] = client.append(request(1, block(0, 10), collector=collector))
        assert (answer.sequence, answer.duplicate) == (1, False)
        assert len(client.sample_values(100)) == 100
        assert client.describe().row_count >= 40
        rows = np.frombuffer(b"".join(answer.rows for answer in client.follow(40, from_row=0)), SPEC.dtype)
        assert rows["value"][:40].tolist() == list(range(40))
        assert proxy.message_count > 8
    finally:
        client.close()
        proxy.close()


@pytest.mark.parametrize(("release", "messages"), [("before", [1] * 4), ("this", [4])])
def test_a_collector_sends_blocks_together_only_to_a_service_that_takes_them(
    release: str, messages: list[int], previous: Previous, replay
) -> None:
    """A service of the release before would not see the blocks after the first."""
    thread, client = replay
    change = as_previous(previous) if release == "before" else lambda _, data: data
    sent: list[int] = []

    def noting(current: type[Any], data: bytes) -> bytes:
        if current is pb.AppendRequest:
            sent.append(1 + len(pb.AppendRequest.FromString(data).further_headers))
        return change(current, data)

    inserted = client.describe().inserted_row_count
    proxy = SkewProxy(thread.config.replay.address, noting)
    channel = open_channel(proxy.address, thread.config.rpc)
    writer = BlockWriter(
        channel,
        run_id=RUN,
        table=TABLE,
        spec=SPEC,
        collector_index=30 if release == "before" else 31,
        collector_incarnation=1,
        max_blocks_in_flight=4,
        block_rows=10,
        rpc=thread.config.rpc,
        limiter_seconds=10,
        metrics=AppendMetrics(CollectorRegistry()),
    )
    for number in range(4):
        writer.submit(block(10 * number, 10), lambda: False)
    writer.start()
    try:
        wait_until(lambda: writer.in_flight == 0, "all blocks are acknowledged")
        assert sent == messages
        assert client.describe().inserted_row_count == inserted + 40
    finally:
        writer.close([], 0)
        channel.close()
        proxy.close()


@pytest.mark.parametrize(
    ("oldest", "newest", "served", "refused"),
    [(1, 1, [1], [0, 2]), (1, 2, [1, 2], [0, 3]), (6, 7, [6, 7], [0, 5, 8])],
)
def test_a_server_takes_its_own_protocol_version_and_the_one_before(
    monkeypatch: pytest.MonkeyPatch, oldest: int, newest: int, served: list[int], refused: list[int]
) -> None:
    monkeypatch.setattr(parameter_service, "PROTOCOL_VERSION", newest)
    monkeypatch.setattr(parameter_service, "OLDEST_PROTOCOL_VERSION", oldest)
    for version in served:
        parameter_service.require_protocol(version)
    for version in refused:
        with pytest.raises(ProtocolMismatchError, match=rf"version {version}: expected .*{newest}; run the same"):
            parameter_service.require_protocol(version)


def test_the_oldest_version_that_is_served_is_that_of_the_release_before() -> None:
    assert max(1, PROTOCOL_VERSION - 1) == OLDEST_PROTOCOL_VERSION
