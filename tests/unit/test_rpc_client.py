import json

import grpc
import pytest

from paceline import errors
from paceline.config import RpcConfig
from paceline.errors import ConflictError, DeadlineError, PacelineError, UnavailableError
from paceline.process import StopSignal
from paceline.rpc.client import Backoff, call_until_answered, channel_options
from paceline.rpc.server import server_options
from paceline.rpc.status import CODES, DELAYED, RETRYABLE, code_of

QUICK = RpcConfig(backoff_initial_seconds=0.001, backoff_max_seconds=0.002)
ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, PacelineError)]


def test_waits_double_up_to_their_bound_and_are_spread_over_its_upper_half():
    backoff = Backoff(RpcConfig(backoff_initial_seconds=0.1, backoff_max_seconds=1.0), seed=3)
    for bound in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert bound / 2 <= backoff.next_seconds() <= bound
    backoff.reset()
    assert backoff.next_seconds() <= 0.1


def test_two_clients_do_not_wait_in_step():
    waits = [[Backoff(RpcConfig(), seed).next_seconds() for _ in range(3)] for seed in (1, 2)]
    assert waits[0] != waits[1]


@pytest.mark.parametrize("retryable", RETRYABLE)
def test_a_call_that_may_succeed_later_is_repeated_until_it_does(retryable):
    failures = [retryable("not yet"), retryable("nor yet")]
    seen = []

    def call() -> str:
        if failures:
            raise failures.pop()
        return "answer"

    answer = call_until_answered(
        call,
        peer="replay",
        backoff=Backoff(QUICK, 0),
        stop=StopSignal(),
        on_wait=lambda error, seconds: seen.append((type(error), seconds)),
    )
    assert answer == "answer"
    assert [cls for cls, _ in seen] == [retryable, retryable]
    assert all(0 < seconds <= 0.002 for _, seconds in seen)


def test_a_call_that_would_fail_again_is_not_repeated():
    calls = []

    def call() -> None:
        calls.append(1)
        raise ConflictError("the run id is in use")

    with pytest.raises(ConflictError):
        call_until_answered(call, peer="replay", backoff=Backoff(QUICK, 0), stop=StopSignal())
    assert len(calls) == 1


def test_a_stop_ends_the_waiting_and_says_for_what():
    stop = StopSignal()

    def call() -> None:
        stop.set()
        raise UnavailableError("replay is loading")

    with pytest.raises(DeadlineError, match="waiting for replay: replay is loading"):
        call_until_answered(call, peer="replay", backoff=Backoff(RpcConfig(), 0), stop=stop)


def test_grpc_itself_retries_nothing_whatever_a_server_asks_for():
    options = dict(channel_options(RpcConfig()))
    assert options["grpc.enable_retries"] == 0
    assert json.loads(str(options["grpc.service_config"])).keys() == {"loadBalancingConfig"}  # and no policy of retries


def test_what_asks_for_a_delay_is_worth_a_retry():
    assert set(DELAYED) <= set(RETRYABLE)


@pytest.mark.parametrize("seconds", [0.5, 1, 20, 300])
def test_the_server_admits_pings_more_often_than_clients_send_them(seconds):
    config = RpcConfig(keepalive_seconds=seconds)
    client, server = dict(channel_options(config)), dict(server_options(config))
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]
    assert client["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1


def test_both_ends_accept_messages_of_the_same_size():
    client, server = channel_options(RpcConfig()), server_options(RpcConfig())
    for end in ("send", "receive"):
        option = f"grpc.max_{end}_message_length"
        assert dict(client)[option] == dict(server)[option] == RpcConfig().max_message_bytes


def test_only_what_a_repeat_may_mend_has_a_code_that_asks_for_one():
    asking = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
    for cls in ERRORS:
        if code_of(cls("x")) in asking:
            assert issubclass(cls, RETRYABLE), cls.__name__


def test_an_error_without_a_code_of_its_own_has_its_parents():
    assert code_of(errors.RowSpecError("x")) == CODES[errors.InvalidInputError]
    assert code_of(errors.ReplacedError("x")) == CODES[errors.ConflictError]
    assert code_of(PacelineError("x")) == grpc.StatusCode.INTERNAL
