"""Redis refuses replay in the midst of a run: its password is replaced, or what its user may do is edited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import redis
from prometheus_client import CollectorRegistry

from integration.replay_harness import (
    RUN,
    SECONDS,
    SPEC,
    TABLE,
    Client,
    ReplayThread,
    block,
    make_config,
    request,
    retry,
    values_in_redis,
    wait_until,
)
from paceline.collector.append_metrics import AppendMetrics
from paceline.collector.writer import BlockWriter
from paceline.errors import ConfigError, UnavailableError
from paceline.local.embedded import EmbeddedRedis
from paceline.process import StopSignal
from redis_servers import start_redis

NEVER = StopSignal()


@pytest.fixture(params=["embedded", pytest.param("redis", marks=pytest.mark.slow)])
def server(request, tmp_path) -> Iterator[EmbeddedRedis]:
    server = start_redis(request.param, tmp_path / "redis")
    yield server
    server.stop()


class Login(NamedTuple):
    """Runs commands as a user whom nothing here is done to, and says where replay finds Redis."""

    admin: redis.Redis
    url: str
    file: object

    def set_user(self, *rules: str) -> None:
        self.admin.execute_command("ACL", "SETUSER", "paceline", *rules)

    def cut_connections(self) -> None:
        self.admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


@pytest.fixture
def login(server, tmp_path) -> Iterator[Login]:
    file = tmp_path / "password"
    file.write_text("old")
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "admin", "on", ">admin", "~*", "&*", "+@all")
        client.execute_command("ACL", "SETUSER", "paceline", "on", ">old", "~*", "&*", "+@all")
        client.config_set("requirepass", "old")
    with redis.Redis.from_url(server.url, username="admin", password="admin") as admin:
        yield Login(admin, server.url, file)


@pytest.fixture
def write(serve) -> Iterator[Callable[[str], tuple[ReplayThread, Client, BlockWriter]]]:
    """Starts replay, and the writer of a collector with three blocks of 10 rows that are stored."""
    writers: list[BlockWriter] = []

    def start(url: str, **replay: str) -> tuple[ReplayThread, Client, BlockWriter]:
        config = make_config(url, replay=replay, rpc={"backoff_max_seconds": 0.2})
        service, client = serve(config)
        client.open()
        writer = BlockWriter(
            client.channel,
            run_id=RUN,
            table=TABLE,
            spec=SPEC,
            collector_index=0,
            collector_incarnation=1,
            max_blocks_in_flight=4,
            block_rows=10,
            rpc=config.rpc,
            limiter_seconds=SECONDS,
            metrics=AppendMetrics(CollectorRegistry()),
        )
        writers.append(writer)
        writer.start()
        for number in range(3):
            assert writer.submit(block(10 * number, 10), NEVER.is_set)
        wait_until(lambda: writer.in_flight == 0, "the first blocks are stored")
        return service, client, writer

    yield start
    for writer in writers:
        writer.close([], 0)


def rotate_requirepass(login: Login) -> None:
    login.admin.config_set("requirepass", "new")
    login.cut_connections()


def rotate_users_password(login: Login) -> None:
    login.set_user("resetpass", ">new")
    login.cut_connections()


def follow(login: Login) -> None:
    login.file.write_text("new")


CHANGES = {
    "requirepass": ("", rotate_requirepass, "does not admit us", follow),
    "password of a user": ("paceline", rotate_users_password, "does not admit us", follow),
    "user is off": (
        "paceline",
        lambda login: (login.set_user("off"), login.cut_connections()),
        "does not admit us",
        lambda login: login.set_user("on"),
    ),
    "no scripts": (
        "paceline",
        lambda login: login.set_user("-evalsha"),
        "forbids a command",
        lambda login: login.set_user("+@all"),
    ),
    # COMMIT is broken off between the index and the counters.
    "a right within a script": (
        "paceline",
        lambda login: login.set_user("-hset"),
        "forbids a command",
        lambda login: login.set_user("+@all"),
    ),
}


@pytest.mark.parametrize(("user", "change", "message", "mend"), CHANGES.values(), ids=CHANGES)
def test_a_refusal_passes_and_what_was_acknowledged_and_what_was_retried_are_there_once(
    login, write, user, change, message, mend
):
    url = login.url.replace("unix://", f"unix://{user}@") if user else login.url
    replay, client, writer = write(url, redis_password_file=str(login.file))
    change(login)
    assert writer.submit(block(30, 10), NEVER.is_set)
    retried = request(1, block(100, 10), collector=1)
    with pytest.raises(UnavailableError, match=message):
        client.append(retried)
    wait_until(lambda: client.health() == "NOT_SERVING", "readiness goes off")
    assert client.health("") == "SERVING"  # nobody should restart the process
    assert replay.metrics()["paceline_replay_redis_available"] == 0
    assert set(client.sample_values(1000).tolist()) >= set(range(30))
    assert (writer.in_flight, writer.failed, replay.error) == (1, False, None)

    mend(login)
    retry(lambda: client.append(retried), (UnavailableError,))
    wait_until(lambda: writer.in_flight == 0, "the writer goes on")
    client.wait_until_serving()
    assert replay.metrics()["paceline_replay_redis_available"] == 1
    assert writer.submit(block(40, 10), NEVER.is_set)
    wait_until(lambda: writer.in_flight == 0, "the writer goes on")
    expected = [*range(50), *range(100, 110)]
    assert Counter(values_in_redis(login.admin)) == Counter(expected)
    assert client.describe().inserted_row_count == len(expected)
    assert set(client.sample_values(3000).tolist()) == set(expected)


@pytest.mark.parametrize("right", ["-hgetall", "-evalsha"])
def test_a_right_that_lacks_at_the_start_ends_replay_at_once(login, serve, right):
    url = login.url.replace("unix://", "unix://paceline:old@")
    replay, client = serve(make_config(url))
    client.open()
    replay.stop()
    login.set_user(right)
    replay, _ = serve(make_config(url), resume=True, ready=False)
    replay.join()
    assert isinstance(replay.error, ConfigError)
    assert "forbids a command" in str(replay.error)
