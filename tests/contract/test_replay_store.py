"""What state of Redis becomes which error, and which status code; and what is checked at the start."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import redis
import structlog

from contract.faulty_redis import FaultyRedis
from integration.waiting import wait_until
from paceline.errors import (
    ConfigError,
    ConflictError,
    PacelineError,
    StoreFullError,
    StoreReadOnlyError,
    UnavailableError,
)
from paceline.replay.link import ServerChangedError
from paceline.replay.scripts import CLAIM, COMMIT, SAVE
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
    keys = [store.key(part) for part in ("owner", "state", "blocks", "pages")]
    return store.run_script(SAVE, keys, [store.token, 1, 0, 0, 0, 0, 0, "-", 0])


def commit(store: RedisStore) -> str:
    keys = [store.key(part) for part in ("owner", "state", "positions", "blocks", "staged", "block:0")]
    arguments = [store.token, 1, b"header", "0 0 1 0 1 1 1 0 0 0 7 0 - 0"]
    return store.run_script(COMMIT, keys, arguments, before=[("SET", store.key("staged"), b"payload")])


def succeeds(attempt: Callable[[], object]) -> bool:
    with contextlib.suppress(PacelineError):
        attempt()
        return True
    return False


def resume_after_pause(store: RedisStore) -> None:
    store._link._paused_until = 0.0


def open_admitted(open_store, url: str) -> RedisStore:
    """The store of a process that has got by at its start."""
    store = open_store(url)
    store.claim(resume=False)
    store.note_admitted()
    return store


REFUSALS = [
    "ERR DB index is out of range",
    "NOAUTH Authentication required.",
    "WRONGPASS invalid username-password pair or user is disabled.",
    "NOPERM User default has no permissions to run the 'evalsha' command",
    "NOPERM ACL failure in script: User default has no permissions to run the 'hset' command",
]

STATES = [
    ("LOADING Redis is loading the dataset in memory", UnavailableError, grpc.StatusCode.UNAVAILABLE),
    ("MASTERDOWN Link with MASTER is down", UnavailableError, grpc.StatusCode.UNAVAILABLE),
    ("CLUSTERDOWN The cluster is down", UnavailableError, grpc.StatusCode.UNAVAILABLE),
    ("READONLY You can't write against a read only replica.", UnavailableError, grpc.StatusCode.UNAVAILABLE),
    ("OOM command not allowed when used memory > 'maxmemory'.", StoreFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ("MISCONF Errors writing to the AOF file", StoreReadOnlyError, grpc.StatusCode.FAILED_PRECONDITION),
    *((refusal, UnavailableError, grpc.StatusCode.UNAVAILABLE) for refusal in REFUSALS),
    ("ERR something else", PacelineError, grpc.StatusCode.INTERNAL),
]
STATE_IDS = ["-".join(re.findall(r"^\w+|script|DB", reply)) for reply, _, _ in STATES]


@pytest.mark.parametrize(("reply", "error_type", "code"), STATES, ids=STATE_IDS)
def test_each_state_of_redis_has_its_error_and_its_code_and_ends_with_it(faulty, open_store, reply, error_type, code):
    store = open_admitted(open_store, faulty.url)
    faulty.fault = reply
    for attempt in (lambda: save(store), lambda: store.command("GET", "x")):
        resume_after_pause(store)
        with pytest.raises(PacelineError) as caught:
            attempt()
        assert type(caught.value) is error_type
        assert code_of(caught.value) is code
        assert (error_type in RETRYABLE) == (error_type is not PacelineError)
    faulty.fault = None
    resume_after_pause(store)
    assert save(store) == "out_of_step"  # it reaches Redis again


@pytest.mark.parametrize(("reply", "error_type", "code"), STATES, ids=STATE_IDS)
def test_a_transaction_that_is_refused_at_any_of_its_parts_says_why(faulty, open_store, reply, error_type, code):
    store = open_admitted(open_store, faulty.url)
    for refused in (b"MULTI", b"SET", b"EVALSHA", b"EXEC"):
        resume_after_pause(store)
        faulty.fault, faulty.only = reply, refused
        with pytest.raises(PacelineError) as caught:
            commit(store)
        assert type(caught.value) is error_type
        faulty.fault = faulty.only = None
    resume_after_pause(store)
    assert commit(store) == "out_of_step"
    assert store.command("EXISTS", store.key("staged")) == 0


@pytest.mark.parametrize("reply", REFUSALS, ids=STATE_IDS[-1 - len(REFUSALS) : -1])
@pytest.mark.parametrize("claimed", [False, True])
def test_a_refusal_at_the_start_is_an_error_of_the_configuration_each_time(faulty, open_store, reply, claimed):
    store = open_store(faulty.url)
    if claimed:
        store.claim(resume=False)
    faulty.fault = reply
    for attempt in (lambda: save(store), lambda: store.command("GET", "x"), store.check) * 2:
        with pytest.raises(ConfigError, match=r"does not admit us|forbids a command|has no database"):
            attempt()
    faulty.fault = None
    assert store.command("GET", "x") is None  # no pause hides that a person has mended it


def test_what_a_script_did_that_was_broken_off_is_not_built_upon(faulty, open_store):
    store = open_admitted(open_store, faulty.url)
    server = store.read_server()
    keys = [store.key(part) for part in ("owner", "state", "blocks", "pages")]

    def save_on(server: str) -> str:
        resume_after_pause(store)
        return store.run_script(SAVE, keys, [store.token, 1, 0, 0, 0, 0, 0, "-", 0], server=server)

    for refusal in REFUSALS:
        assert save_on(server) == "out_of_step"
        faulty.fault = refusal
        with pytest.raises(UnavailableError):
            save_on(server)
        faulty.fault = None
    with pytest.raises(ServerChangedError, match="broke a script off half-way"):
        save_on(server)
    assert save_on(store.read_server()) == "out_of_step"


def test_a_transaction_that_is_aborted_at_its_end_says_why(faulty, open_store):
    store = open_store(faulty.url)
    store.claim(resume=False)
    faulty.fault, faulty.only = "EXECABORT Transaction discarded because of: OOM command not allowed", b"EXEC"
    with pytest.raises(StoreFullError):
        commit(store)


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


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS[:1], indirect=True)
@pytest.mark.parametrize("reply", ["LOADING it", "READONLY it", "MISCONF it", "OOM it", "NOAUTH it", "NOPERM it"])
def test_five_seconds_of_trouble_cost_fewer_than_twenty_attempts_and_pass(faulty, open_store, reply):
    store = open_admitted(open_store, faulty.url)
    faulty.fault = reply
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with pytest.raises(PacelineError):
            commit(store)
        # As a collector's writer: a full store is left alone for the delay that it was told.
        threading.Event().wait(0.5 if reply.startswith("OOM") else 0.01)
    # What is sent in one go is one attempt. A login that is refused ends it as it connects.
    assert faulty.attempts / (4 if reply.startswith("OOM") else 1) < 20
    assert faulty.connections < 20
    faulty.fault = None
    wait_until(lambda: succeeds(lambda: commit(store)))


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
        store._link._deadline_seconds = 5
        assert store.command("GET", "second") == b"second"
        thread.join(30)


def test_reads_that_are_cut_at_random_never_mix_up_replies(server, faulty, open_store):
    store = open_store(faulty.url, deadline_seconds=0.3)  # far above what a busy machine takes without a delay
    with redis.Redis.from_url(server.url) as client:
        client.mset({f"k{number}": f"k{number}" for number in range(200)})
    random = np.random.default_rng(7)
    faulty.delay = lambda: float(random.uniform(0, 0.6))
    cut, others = [], []

    def read(number: int) -> None:
        resume_after_pause(store)
        try:
            others.append((f"k{number}".encode(), store.command("GET", f"k{number}")))
        except UnavailableError:
            cut.append(number)

    with ThreadPoolExecutor(20) as readers:
        list(readers.map(read, range(200)))
    assert len(cut) > 20
    assert len(others) > 20
    faulty.delay = float
    for number in range(200):
        resume_after_pause(store)
        others.append((f"k{number}".encode(), store.command("GET", f"k{number}")))
    assert all(value == key for key, value in others)
    assert not store._link._pool._in_use_connections
    assert len(store._link._pool._available_connections) <= 20


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
        with pytest.raises(
            ConfigError, match=r"does not admit us.*set name and password in replay.redis_url"
        ) as caught:
            open_store(url).check()
        assert ":wrong@" not in str(caught.value)
        open_store(f"unix://:right@{path}").check()
    finally:
        server.stop()


@pytest.mark.parametrize("url", ["127.0.0.1:6379", "http://127.0.0.1:6379", "redis://127.0.0.1:port"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="expected redis://host:port"):
        RedisStore(url, "run", deadline_seconds=1)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://127.0.0.1:6379/0?no_such_thing=1", "has an option no_such_thing, and known ones are db, ssl_ca"),
        ("redis://127.0.0.1:6379/0?decode_responses=true", "has an option decode_responses"),
        ("redis://127.0.0.1:6379/0?decode_responses=", "has an option decode_responses"),
        ("rediss://127.0.0.1:6379/0?ssl_cert_reqs=none", "has an option ssl_cert_reqs"),
        ("redis://127.0.0.1:6379/0?ssl_ca_certs=/etc/ca.pem", "ssl_ca_certs is for TLS, which rediss:// speaks"),
        ("rediss://127.0.0.1:6379/0?ssl_ca_certs=/no/such/file.pem", "ssl_ca_certs is /no/such/file.pem"),
        ("redis://127.0.0.1:6379/abc", r"its path is /abc, .*expected redis://host:port/number"),
        ("redis://127.0.0.1:6379/1/2", r"its path is /1/2"),
        ("redis://127.0.0.1:6379/0?db=abc", "'db'"),
        ("redis://[127.0.0.1/0", "expected redis://host:port/number"),
    ],
)
def test_a_part_of_the_url_that_means_nothing_is_refused_at_once(url, message):
    with pytest.raises(ConfigError, match=message):
        RedisStore(url, "run", deadline_seconds=1)


@pytest.mark.parametrize("password", ["half/hidden", "half?hidden", "half?hidden=1&x"])
def test_a_password_that_is_not_encoded_is_refused_and_never_shown(password):
    with pytest.raises(ConfigError, match="percent-encoded") as caught:
        RedisStore(f"redis://:{password}@127.0.0.1:6379/0", "run", deadline_seconds=1)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:6379", "redis://127.0.0.1:6379/", "redis://a%40b:c%2Fd@127.0.0.1/7"]
)
def test_a_url_may_leave_the_database_out(url):
    RedisStore(url, "run", deadline_seconds=1).close()


@contextlib.contextmanager
def full(server):
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
        try:
            yield client
        finally:
            client.config_set("maxmemory", 0)


def test_a_run_is_taken_over_on_a_full_redis(server):
    first, second = (RedisStore(server.url, "taken-over", deadline_seconds=5) for _ in range(2))
    assert not first.claim(resume=False)
    with full(server):
        with pytest.raises(ConflictError, match="go on with it by --resume"):
            second.claim(resume=False)
        assert second.command("GET", second.key("owner")) == first.token
        assert second.claim(resume=True)
        assert second.command("GET", second.key("owner")) == second.token
        with pytest.raises(StoreFullError):
            second.command("SET", second.key("other"), "value")
    second.command("HSET", second.key("meta"), "format", "0")
    with pytest.raises(ConflictError, match="has format 0: expected 2 or 3"):
        first.claim(resume=True)
    assert second.command("GET", second.key("owner")) == second.token
    first.close()
    second.close()


def test_a_claim_whose_answer_was_lost_can_be_repeated(server, faulty, open_store):
    open_store(server.url).claim(resume=False)  # Redis knows the script
    store = open_store(faulty.url)
    faulty.lose_replies_to = CLAIM.sha
    with pytest.raises(UnavailableError):
        store.claim(resume=False)
    resume_after_pause(store)
    assert not store.claim(resume=False)
    assert store.command("GET", store.key("owner")) == store.token


def test_a_server_older_than_redis_7_is_claimed_by_commands(server, faulty):
    faulty.fault = "ERR Error compiling script (new function): user_script:1: unexpected symbol near '#' "
    faulty.only = b"EVAL"
    first, second = (RedisStore(faulty.url, "older", deadline_seconds=5) for _ in range(2))
    assert not first.claim(resume=True)
    with pytest.raises(ConflictError, match="go on with it by --resume"):
        second.claim(resume=False)
    assert second.command("GET", second.key("owner")) == first.token
    assert second.claim(resume=True)
    assert second.command("GET", second.key("owner")) == second.token
    with full(server), pytest.raises(StoreFullError):
        first.claim(resume=True)
    second.command("HSET", second.key("meta"), "format", "0")
    with pytest.raises(ConflictError, match="has format 0: expected 2 or 3"):
        first.claim(resume=True)
    first.close()
    second.close()


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


def check(store: RedisStore) -> dict[str, object]:
    """The one line that a check logs."""
    with structlog.testing.capture_logs() as events:
        store.check()
    (event,) = events
    assert event["event"] == "redis_checked"
    return event


@pytest.mark.parametrize(
    ("settings", "level", "meaning"),
    [
        ({"appendfsync": "always"}, "info", "every acknowledged row is on its disk"),
        ({"appendfsync": "everysec"}, "info", "rows of the last second or two are lost"),
        ({"appendfsync": "no"}, "info", "rows of the last half minute are lost"),
        ({"appendonly": "no", "save": "60 1"}, "warning", "rows since its last snapshot are lost; set appendonly yes"),
        ({"appendonly": "no", "save": ""}, "warning", "every row is lost; set appendonly yes"),
    ],
    ids=["always", "everysec", "no", "snapshots", "nothing"],
)
def test_the_start_says_what_the_settings_mean_for_loss(server, open_store, settings, level, meaning):
    names = ("appendonly", "appendfsync", "save")
    with redis.Redis.from_url(server.url) as client:
        before = {name: client.config_get(name)[name] for name in names}
        for name, value in settings.items():
            client.config_set(name, value)
        try:
            event = check(open_store(server.url))
        finally:
            for name, value in before.items():
                client.config_set(name, value)
    assert event["log_level"] == level
    assert meaning in event["meaning"]
    expected = {**before, **settings}
    assert (event["appendonly"], event["appendfsync"]) == (expected["appendonly"] == "yes", expected["appendfsync"])
    assert (event["save"], event["maxmemory_policy"]) == (expected["save"], "noeviction")


def test_another_check_says_only_what_has_changed(server, open_store):
    store = open_store(server.url)
    check(store)
    with structlog.testing.capture_logs() as events:
        store.check()
    assert not events
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1 << 30)
        try:
            assert check(store)["maxmemory_bytes"] == 1 << 30
        finally:
            client.config_set("maxmemory", 0)


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
