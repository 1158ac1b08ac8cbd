"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from integration.replay_harness import RUN, Client, ReplayProcess, ReplayThread, wait_until_whole
from paceline.config import Config
from paceline.local.embedded import EmbeddedRedis
from redis_servers import start_redis


@pytest.fixture(scope="session", params=["embedded", pytest.param("redis", marks=pytest.mark.slow)])
def shared_redis(request, tmp_path_factory) -> Iterator[EmbeddedRedis]:
    server = start_redis(request.param, tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis_server(shared_redis) -> EmbeddedRedis:
    """An empty server, the bundled one and Redis itself in turn; what a test sets stays its own affair."""
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
    return shared_redis


@pytest.fixture(scope="session")
def shared_bundled_redis(tmp_path_factory) -> Iterator[EmbeddedRedis]:
    server = start_redis("embedded", tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def bundled_redis(shared_bundled_redis) -> EmbeddedRedis:
    """An empty bundled server, for what is proved of others than replay: the kind of server is all one to them."""
    with redis.Redis.from_url(shared_bundled_redis.url) as client:
        client.flushall()
    return shared_bundled_redis


@pytest.fixture
def redis_client(redis_server) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[ReplayThread, Client]]]:
    """Starts a replay service in this process, and gives it with a client once it serves and has what it resumes."""
    started: list[tuple[ReplayThread, Client]] = []

    def start(
        config: Config,
        *,
        resume: bool = False,
        ready: bool = True,
        whole: bool = True,
        run_id: str = RUN,
        shard: int = 0,
    ) -> tuple[ReplayThread, Client]:
        replay, client = ReplayThread(config, resume=resume, shard=shard), Client(config, run_id, shard)
        started.append((replay, client))
        if ready:
            client.wait_until_serving()
        if ready and whole:
            wait_until_whole(replay)
        return replay, client

    yield start
    for replay, client in started:
        client.close()
        replay.stop()


@pytest.fixture
def spawn() -> Iterator[Callable[..., tuple[ReplayProcess, Client]]]:
    """Starts a replay service in a process of its own, and gives it as `serve` does."""
    started: list[tuple[ReplayProcess, Client]] = []

    def start(config: Config, *, resume: bool = False) -> tuple[ReplayProcess, Client]:
        replay, client = ReplayProcess(config, resume=resume), Client(config)
        started.append((replay, client))
        client.wait_until_serving()
        wait_until_whole(replay)
        return replay, client

    yield start
    for replay, client in started:
        client.close()
        replay.kill()
