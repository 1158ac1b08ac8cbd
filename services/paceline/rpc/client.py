"""Channels and retries, the same for every client.

Every call names a deadline; nothing is retried by gRPC itself, since not every call may be repeated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import TypeVar

import grpc

from paceline.config import RpcConfig, SecurityConfig
from paceline.errors import DeadlineError, PacelineError
from paceline.process import StopSignal
from paceline.rpc.channel import SecuredChannel
from paceline.rpc.status import RETRYABLE, raising, retry_delay_seconds
from paceline.rpc.tokens import READER

ResultT = TypeVar("ResultT")

NO_SECURITY = SecurityConfig()
"""No TLS and no tokens, as servers want it that listen to their own machine."""


def open_channel(
    address: str, config: RpcConfig, security: SecurityConfig = NO_SECURITY, role: str = READER
) -> grpc.Channel:
    """A channel to `address`, which is resolved again after a broken connection. Connects at the first call.

    Args:
        security: TLS and tokens, as the servers have them.
        role: whose token it shows.

    Raises:
        ConfigError: the files of `security` are missing or wrong, or a token would go over a network without TLS.
    """
    return SecuredChannel(address, channel_options(config), security, role)


_BALANCING = json.dumps({"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": True}}]})
"""Of several servers behind a name each client takes one, by lot, and stays with it: what it tells in turn (streams,
reports of what acts) comes to one server, in order."""


def channel_options(config: RpcConfig) -> list[tuple[str, int | str]]:
    """Client options that agree with `server.server_options` of the same configuration."""
    return [
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.enable_retries", 0),
        ("grpc.keepalive_time_ms", round(config.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Paceline's own back-off decides; gRPC's may wait for minutes after an outage.
        # No pause, whatever its name says: the time that one attempt to connect may take, its TLS handshake included.
        # Half of a short call's, so that the call can tell why there is no connection.
        ("grpc.min_reconnect_backoff_ms", round(config.deadline_seconds * 500)),
        ("grpc.initial_reconnect_backoff_ms", round(config.backoff_initial_seconds * 1000)),
        ("grpc.max_reconnect_backoff_ms", round(config.backoff_max_seconds * 1000)),
        # A name that moved is looked up again after half a minute otherwise.
        ("grpc.dns_min_time_between_resolutions_ms", round(config.backoff_max_seconds * 1000)),
        ("grpc.service_config", _BALANCING),
    ]


class Backoff:
    """Waits that double up to a bound, each drawn from the upper half of its range so that clients spread out."""

    def __init__(self, config: RpcConfig, seed: int | None = None) -> None:
        self._initial, self._maximum = config.backoff_initial_seconds, config.backoff_max_seconds
        self._random = random.Random(seed)
        self._next = self._initial

    def next_seconds(self, error: PacelineError | None = None) -> float:
        """The next wait, in seconds: after `error` at least the delay that the server named, up to twice as long."""
        bound, self._next = self._next, min(self._next * 2, self._maximum)
        if error is not None:
            bound = max(bound, 2 * retry_delay_seconds(error))  # the delay is where the upper half begins
        return bound * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin again at the shortest wait, after a success."""
        self._next = self._initial


def call_until_answered(
    call: Callable[[], ResultT],
    *,
    peer: str,
    backoff: Backoff,
    stop: StopSignal,
    on_wait: Callable[[PacelineError, float], None] | None = None,
) -> ResultT:
    """Make a call that may be repeated until it succeeds, fails for good, or the process is asked to stop.

    Raises:
        DeadlineError: the stop came first.
        PacelineError: a failure that a repeat would not mend.
    """
    while True:
        try:
            with raising(peer):
                return call()
        except RETRYABLE as error:
            seconds = backoff.next_seconds(error)
            if on_wait is not None:
                on_wait(error, seconds)
            if stop.wait(seconds):
                raise DeadlineError(f"stopped while waiting for {peer}: {error}") from error
