"""What state of Redis becomes which error, and which status code; and what is checked at the start."""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid

import grpc
import pytest
import redis
import structlog

from contract.faulty_redis import FaultyRedis
from paceline.errors import (
    ConfigError,
    PacelineError,
    StoreFullError,
    StoreReadOnlyError,
    UnavailableError,
)
from paceline.replay.scripts import SAVE
from paceline.replay.store import RedisStore
from paceline.rpc.status import RETRYABLE, code_of
from redis_servers import SERVERS, start_redis


@pytest.fixture(scope="module", params=SERVERS)
def server(request, tmp_path_factory):
    server = start_redis(request.param, tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def faulty(server):
    faulty = FaultyRedis(server.url.removeprefix("unix://"))
    yield faulty
    faulty.close()


@pytest.fixture
def open_store():
    stores = []

    def open_store(url: str, *, deadline_seconds: float = 5.0) -> RedisStore:
        stores.append(RedisStore(url, uuid.uuid4().hex, deadline_seconds=deadline_seconds))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def save(store: RedisStore) -> str:
    return store.run_script(SAVE, [store.key("owner"), store.key("state")], [store.token, b"0", b"0"])


def resume_after_pause(store: RedisStore) -> None:
    store._paused_until = 0.0


STATES = [
    ("LOADING Redis is loading the dataset in memory", UnavailableError, grpc.StatusCode.UNAVAILABLE),
    ("MASTERDOWN Link with MASTER is down", UnavailableError, grpc.StatusCode.UNAVAILABLE),
    ("CLUSTERDOWN The cluster is down", UnavailableError, grpc.StatusCode.UNAVAILABLE),
    ("READONLY You can't write against a read only replica.", UnavailableError, grpc.StatusCode.UNAVAILABLE),
    ("OOM command not allowed when used memory > 'maxmemory'.", StoreFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ("MISCONF Errors writing to the AOF file", StoreReadOnlyError, grpc.StatusCode.FAILED_PRECONDITION),
    ("ERR something else", PacelineError, grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("reply", "error_type", "code"), STATES, ids=[reply.split()[0] for reply, _, _ in STATES])
def test_each_state_of_redis_has_its_error_and_its_code_and_ends_with_it(faulty, open_store, reply, error_type, code):
    store = open_store(faulty.url)
    store.claim(resume=False)
    faulty.fault = reply
    for attempt in (lambda: save(store), lambda: store.command("GET", "x")):
        resume_after_pause(store)
        with pytest.raises(PacelineError) as caught:
            attempt()
        assert type(caught.value) is error_type
        assert code_of(caught.value) is code
        assert (error_type in RETRYABLE) == (reply[:3] != "ERR")
    faulty.fault = None
    resume_after_pause(store)
    assert save(store) == "out_of_step"  # it reaches Redis again


def test_a_replica_makes_replay_connect_anew(faulty, open_store):
    store = open_store(faulty.url)
    store.claim(resume=False)
    before = faulty.connections
    faulty.fault = "READONLY You can't write against a read only replica."
    with pytest.raises(UnavailableError):
        save(store)
    faulty.fault = None
    resume_after_pause(store)
    save(store)
    assert faulty.connections == before + 1


def test_a_store_that_is_away_is_not_hammered(faulty, open_store):
    store = open_store(faulty.url)
    store.claim(resume=False)
    faulty.fault = "LOADING Redis is loading the dataset in memory"
    for _ in range(200):
        with pytest.raises(UnavailableError):
            save(store)
    assert faulty.attempts < 20


@pytest.mark.parametrize(
    "first_command",
    [lambda store: store.command("GET", "first"), lambda store: store.run_script(SAVE, [b"first"], [])],
    ids=["command", "script"],
)
def test_a_reply_that_comes_too_late_is_never_read_by_another_command(open_store, first_command):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = open_store(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", deadline_seconds=0.2)
        late = threading.Event()

        def serve() -> None:
            first, _ = listener.accept()
            with first:
                # Whatever redis-py says to begin with is answered; the reply to the command itself comes too late.
                while b"first" not in (data := first.recv(65536)):
                    first.sendall(b"+OK\r\n" * data.count(b"*"))
                late.wait(30)
                with contextlib.suppress(OSError):  # closed by the other side, as it must be
                    first.sendall(b"$5\r\nfirst\r\n")
            second, _ = listener.accept()
            with second:
                while b"second" not in (data := second.recv(65536)):
                    second.sendall(b"+OK\r\n" * data.count(b"*"))
                second.sendall(b"$6\r\nsecond\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UnavailableError, match=r"did not answer within 0.2 s"):
            first_command(store)
        late.set()
        resume_after_pause(store)
        store._deadline_seconds = 5
        assert store.command("GET", "second") == b"second"
        thread.join(30)


def test_a_redis_that_is_not_there_is_said_at_once(open_store):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(UnavailableError, match=rf"redis://127.0.0.1:{port}/0 cannot be reached.*is it running\?"):
        open_store(f"redis://127.0.0.1:{port}/0").check()


def test_an_unknown_host_is_said(open_store):
    with pytest.raises(UnavailableError, match=r"redis://no-such-host.invalid:6379 cannot be reached"):
        open_store("redis://no-such-host.invalid:6379").check()


@pytest.mark.parametrize("password", [None, "wrong"])
def test_a_wrong_password_is_said_and_never_shown(tmp_path, open_store, password):
    server = start_redis("embedded", tmp_path)
    try:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", "right")
        path = server.url.removeprefix("unix://")
        url = server.url if password is None else f"unix://:{password}@{path}"
        with pytest.raises(ConfigError, match=r"does not admit us.*set the password in replay.redis_url") as caught:
            open_store(url).check()
        assert ":wrong@" not in str(caught.value)
        open_store(f"unix://:right@{path}").check()
    finally:
        server.stop()


@pytest.mark.parametrize("url", ["127.0.0.1:6379", "http://127.0.0.1:6379", "redis://127.0.0.1:port"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="expected redis://host:port"):
        RedisStore(url, "run", deadline_seconds=1)


def set_policy(server, policy: str) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", policy)


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
def test_a_policy_that_evicts_the_record_is_refused(server, open_store, policy):
    set_policy(server, policy)
    try:
        with pytest.raises(ConfigError, match=f"has maxmemory-policy {policy}.*expected noeviction"):
            open_store(server.url).check()
    finally:
        set_policy(server, "noeviction")


@pytest.mark.parametrize("policy", ["noeviction", "volatile-lru", "volatile-ttl"])
def test_a_policy_that_spares_the_record_is_accepted(server, open_store, policy):
    set_policy(server, policy)
    try:
        open_store(server.url).check()
    finally:
        set_policy(server, "noeviction")


def test_a_redis_that_keeps_nothing_is_warned_of(server, open_store):
    with redis.Redis.from_url(server.url) as client, structlog.testing.capture_logs() as events:
        open_store(server.url).check()
        assert events == []
        client.config_set("appendonly", "no")
        try:
            open_store(server.url).check()
        finally:
            client.config_set("appendonly", "yes")
    assert [(event["event"], event["log_level"]) for event in events] == [("redis_without_append_only_file", "warning")]
    assert "lost" in events[0]["meaning"]


def test_a_server_that_loads_is_said_to_load(faulty, open_store):
    store = open_store(faulty.url)
    faulty.fault = "LOADING Redis is loading the dataset in memory"
    with pytest.raises(UnavailableError):
        store.check()
    assert store.is_loading
    faulty.fault = None
    resume_after_pause(store)
    store.check()
    assert not store.is_loading
