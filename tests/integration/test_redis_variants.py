"""Every way to reach a Redis keeps the record alike: over TCP, TLS or a socket, as any user, and after a failover."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
import trustme

from contract.faulty_redis import FaultyRedis
from integration.replay_harness import free_port
from integration.waiting import wait_until
from paceline.config import ReplayConfig
from paceline.errors import ConfigError, PacelineError, ServiceFailedError, UnavailableError
from paceline.local.embedded import EmbeddedRedis
from paceline.local.issuing import issue
from paceline.replay import link
from paceline.replay.log import OutOfStepError, RedisLog
from paceline.replay.logged import BlockWrite, LoggedBlock, LogState
from paceline.replay.store import RedisStore
from paceline.rows import Column, RowSpec
from paceline.v1 import rows_pb2
from redis_record import held, settle
from redis_servers import SERVERS, start_redis

SPEC = RowSpec((Column("value", "float32"),))
ROWS = 10


class Record:
    """The record of one table, opened anew as a replay process does it."""

    def __init__(self, url: str, *, resume: bool, run_id: str = "variants") -> None:
        self.store = RedisStore(url, run_id, deadline_seconds=10)
        try:
            self.store.check()
            self.store.claim(resume=resume)
            self.log = RedisLog(self.store, "transitions")
            if resume:
                settle(self.log)
            else:
                self.log.begin(LogState(SPEC, "{}"))
        except BaseException:
            self.store.close()
            raise

    def append(self, number: int, *, removed: tuple[int, ...] = ()) -> bool:
        stamp = rows_pb2.BlockHeader(collector_incarnation=1, sequence=number + 1, row_count=ROWS)
        block = LoggedBlock(ROWS * number, ROWS, stamp.SerializeToString(), b"payload %d" % number * 1000)
        return self.log.append([BlockWrite(block, stamp, removed=held(self.log, *removed), sampled=number)]) == 1

    def numbers(self) -> list[int]:
        """Of the blocks, each of which must be whole."""
        blocks = list(self.log.read_blocks())
        for block in blocks:
            assert block.payload == b"payload %d" % (block.first_row // ROWS) * 1000
        return [block.first_row // ROWS for block in blocks]

    def close(self) -> None:
        self.store.close()


@pytest.fixture(params=SERVERS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def start(kind, tmp_path) -> Iterator[Callable[..., EmbeddedRedis]]:
    servers: list[EmbeddedRedis] = []

    def start(name: str = "redis", **settings: str) -> EmbeddedRedis:
        servers.append(start_redis(kind, tmp_path / name, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def path_of(server: EmbeddedRedis) -> str:
    return server.url.removeprefix("unix://")


def append_restart_and_read_back(server: EmbeddedRedis, url: str, prepare: Callable[[], None] = lambda: None) -> None:
    """`prepare` sets what a server forgets when it ends."""
    prepare()
    record = Record(url, resume=False)
    assert record.append(0)
    assert record.append(1)
    record.close()
    server.restart()
    prepare()
    record = Record(url, resume=True)
    assert record.numbers() == [0, 1]
    assert record.log.read_state().inserted == 2 * ROWS
    assert record.append(2)
    record.close()


def test_a_unix_socket(start):
    server = start()
    append_restart_and_read_back(server, server.url)


def test_a_database_number_keeps_its_rows_apart(start):
    port = free_port()
    server = start(port=str(port))
    append_restart_and_read_back(server, f"redis://127.0.0.1:{port}/3")
    with redis.Redis.from_url(server.url) as client:
        assert client.info("keyspace").keys() == {"db3"}
    append_restart_and_read_back(server, f"{server.url}?db=5")
    with redis.Redis.from_url(server.url) as client:
        assert client.info("keyspace").keys() == {"db3", "db5"}


def test_a_database_that_is_not_there_is_named(start):
    port = free_port()
    server = start(port=str(port), databases="4")
    for url in (f"redis://127.0.0.1:{port}/4", f"{server.url}?db=4"):
        with pytest.raises(ConfigError, match=r"has no database 4: .*expected a number below its setting databases"):
            Record(url, resume=False)


@pytest.mark.parametrize("password", ["right", "a@b:c/d?e#f%20 g"])
def test_a_password(start, password):
    port = free_port()
    server = start(port=str(port))

    def prepare() -> None:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", password)

    append_restart_and_read_back(server, f"redis://:{quote(password, safe='')}@127.0.0.1:{port}/0", prepare)
    with pytest.raises(ConfigError, match="does not admit us"):
        Record(f"redis://:wrong@127.0.0.1:{port}/0", resume=True)


def test_a_password_in_a_file_which_may_be_replaced(start, tmp_path):
    port = free_port()
    server, file = start(port=str(port)), tmp_path / "pass word&?"
    file.write_text("first p/w\n")

    def require(*passwords: str, shown: str = "first p/w") -> None:
        with redis.Redis.from_url(server.url, password=shown) as client:
            client.execute_command("ACL", "SETUSER", "default", "resetpass", *(f">{each}" for each in passwords))

    settings = ReplayConfig(redis_url=f"redis://127.0.0.1:{port}/0", redis_password_file=file)
    address = str(settings.redis_address())
    assert "first" not in address
    append_restart_and_read_back(server, address, lambda: require("first p/w"))
    # Redis knows both while the file is replaced; then only the new one is left, and its connections are cut.
    record = Record(address, resume=True)
    try:
        record.append(3)
        require("first p/w", "second")
        file.write_text("second")
        require("second", shown="second")
        with redis.Redis.from_url(server.url, password="second") as client:
            client.client_kill_filter(skipme=True)
        wait_until(lambda: _answers(record))
    finally:
        record.close()
    refused = {"wrong": "does not admit us.*redis_password_file", "": "is empty", None: "cannot be read"}
    for content, message in refused.items():
        file.write_text(content) if content is not None else file.unlink()
        with pytest.raises(ConfigError, match=message) as caught:
            Record(address, resume=True)
        assert not content or content not in str(caught.value)


def _answers(record: Record) -> bool:
    try:
        return bool(record.store.command("PING"))
    except UnavailableError:
        return False


def test_what_certs_makes_for_redis_is_enough_over_tls_and_lets_nobody_else_in(start, kind, tmp_path):
    issue(tmp_path / "certs", days=2)
    folder, port = tmp_path / "certs" / "redis", free_port()
    tls = {"ca-cert": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
    settings = {f"tls-{name}-file": str(folder / file) for name, file in tls.items()}
    try:
        server = start(**settings, **{"tls-port": str(port), "tls-auth-clients": "no"})
    except ServiceFailedError as error:
        pytest.skip(f"the server {kind!r} was built without TLS: {str(error).splitlines()[-1]}")
    with redis.Redis.from_url(server.url) as client:
        words = (folder / "users.acl").read_text().split()[2:]
        client.execute_command("ACL", "SETUSER", "default", "reset", *words)
    url = f"rediss://localhost:{port}/0?ssl_ca_certs={folder / 'ca.crt'}"
    with pytest.raises(ConfigError, match="does not admit us"):
        Record(url, resume=False)
    address = str(ReplayConfig(redis_url=url, redis_password_file=folder / "password").redis_address())
    use_everything(address)
    password = (folder / "password").read_text().strip()
    with (
        redis.Redis.from_url(server.url, password=password) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.set("others", "1")


def rights() -> tuple[str, ...]:
    """Of the ACL user in the documentation."""
    text = re.search(r"ACL SETUSER paceline (.*?)\n\n", link.__doc__, re.DOTALL)
    return tuple(text[1].split())


def give_rights(server: EmbeddedRedis, *rights: str) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "paceline", "reset", *rights)


def test_an_acl_user_with_the_documented_commands_alone(start):
    port = free_port()
    server = start(port=str(port))
    url = f"redis://paceline:password@127.0.0.1:{port}/2"
    append_restart_and_read_back(server, url, lambda: give_rights(server, *rights()))
    with pytest.raises(ConfigError, match="does not admit us"):
        Record(url.replace(":password", ":wrong"), resume=True)


def use_everything(url: str) -> None:
    record = Record(url, resume=False)
    try:
        for number in range(3):
            record.append(number)
        record.append(3, removed=(0,))
        with contextlib.suppress(OutOfStepError):
            record.append(7)
        record.log.save(inserted=40, sampled=1, removed=held(record.log, 10), pages={0: b"page", 1: b"page"})
        record.log.save(inserted=40, sampled=1, first_page=1)
        assert record.numbers() == [2, 3]
        assert dict(record.log.read_pages()) == {1: b"page"}
        assert record.log.block_count() == 2
        assert record.log.page_count() == 1
        assert record.log.read_state().inserted == 40
        assert record.log.payload_bytes() > 0
        record.log.begin(LogState(SPEC, "{}"))
        record.store.command("PING")
    finally:
        record.close()


def test_each_documented_command_is_needed_and_its_lack_is_said(start):
    port = free_port()
    server = start(port=str(port))
    url = f"redis://paceline:password@127.0.0.1:{port}/2"
    give_rights(server, *rights())
    use_everything(url)
    commands = [right for right in rights() if right.startswith("+")]
    assert len(commands) > 20
    for command in commands:
        give_rights(server, *rights(), command.replace("+", "-"))
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
            client.script_flush()
        with pytest.raises(ConfigError, match=r"give it those that `pydoc paceline.replay.link` lists"):
            use_everything(url)


def test_keys_of_others_are_beyond_the_acl_user(start):
    server = start()
    give_rights(server, *rights())
    store = RedisStore(f"unix://paceline:password@{path_of(server)}", "run", deadline_seconds=10)
    with pytest.raises(ConfigError, match="forbids a command"):
        store.command("SET", "mine", "1")
    store.close()


@pytest.fixture
def start_with_tls(start, kind, tmp_path):
    """Starts a server that speaks TLS; gives it, its port and the files of CA, certificate and key."""

    def start_with_tls(**settings: str) -> tuple[EmbeddedRedis, int, dict[str, Path]]:
        authority = trustme.CA()
        files = {name: tmp_path / f"{name}.pem" for name in ("ca", "certificate", "key")}
        authority.cert_pem.write_to_path(files["ca"])
        certificate = authority.issue_cert("localhost", "127.0.0.1")
        certificate.private_key_pem.write_to_path(files["key"])
        for pem in certificate.cert_chain_pems:
            pem.write_to_path(files["certificate"], append=True)
        port = free_port()
        tls = {
            "tls-port": str(port),
            "tls-ca-cert-file": str(files["ca"]),
            "tls-cert-file": str(files["certificate"]),
            "tls-key-file": str(files["key"]),
        }
        try:
            return start(**tls, **settings), port, files
        except ServiceFailedError as error:
            pytest.skip(f"the server {kind!r} was built without TLS: {str(error).splitlines()[-1]}")

    return start_with_tls


def test_tls(start_with_tls):
    server, port, files = start_with_tls(**{"tls-auth-clients": "no"})
    append_restart_and_read_back(server, f"rediss://localhost:{port}/0?ssl_ca_certs={files['ca']}")


def test_tls_with_a_certificate_of_ones_own(start_with_tls):
    server, port, files = start_with_tls(**{"tls-auth-clients": "yes"})
    url = f"rediss://localhost:{port}/0?ssl_ca_certs={files['ca']}"
    append_restart_and_read_back(server, f"{url}&ssl_certfile={files['certificate']}&ssl_keyfile={files['key']}")
    # What the server says of it may be lost as it cuts the connection.
    with pytest.raises(PacelineError, match=r"a certificate of ours .*ssl_certfile= and ssl_keyfile="):
        Record(url, resume=True)


def test_an_older_tls_with_no_certificate_of_ones_own(start_with_tls):
    _, port, files = start_with_tls(**{"tls-auth-clients": "yes", "tls-protocols": "TLSv1.2"})
    with pytest.raises(ConfigError, match=r"cannot agree on TLS.*a certificate of ours by ssl_certfile="):
        Record(f"rediss://localhost:{port}/0?ssl_ca_certs={files['ca']}", resume=False)


def test_tls_and_no_tls_taken_for_each_other_is_said_as_possible_and_tried_again(start_with_tls):
    plain = free_port()
    _, port, files = start_with_tls(port=str(plain), **{"tls-auth-clients": "no"})
    messages = {
        f"redis://localhost:{port}/0": r"reset by peer.*is it running\? If it is, it may speak TLS: then use rediss://",
        f"rediss://localhost:{plain}/0?ssl_ca_certs={files['ca']}": r"within 1 s; if it does not speak TLS, use redis://",
    }
    for url, message in messages.items():
        store = RedisStore(url, "variants", deadline_seconds=1)
        with pytest.raises(UnavailableError, match=message):
            store.check()
        store.close()


def test_files_of_tls_that_no_connection_could_use_are_refused_at_once(start_with_tls):
    _, port, files = start_with_tls(**{"tls-auth-clients": "yes"})
    url = f"rediss://localhost:{port}/0?ssl_ca_certs"
    refused = {
        f"={files['ca']}&ssl_certfile={files['certificate']}": r"ssl_keyfile is not set: .*expected a certificate and",
        f"={files['ca']}&ssl_keyfile={files['key']}": "ssl_certfile is not set: expected both",
        f"={files['ca']}&ssl_certfile={files['ca']}&ssl_keyfile={files['key']}": "expected a certificate and its key",
        f"={files['key']}": r"ssl_ca_certs is .*key.pem: .*expected certificates in PEM form",
    }
    for rest, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            RedisStore(url + rest, "variants", deadline_seconds=1)
    both = files["key"].with_name("both.pem")
    both.write_text(files["certificate"].read_text() + files["key"].read_text())
    Record(f"{url}={files['ca']}&ssl_certfile={both}", resume=False).close()


def test_a_certificate_that_is_changed_under_a_running_process_is_waited_for(start_with_tls, tmp_path):
    server, port, files = start_with_tls(**{"tls-auth-clients": "no"})
    record = Record(f"rediss://localhost:{port}/0?ssl_ca_certs={files['ca']}", resume=False)
    other = {name: tmp_path / f"other-{name}.pem" for name in ("certificate", "key")}
    certificate = trustme.CA().issue_cert("localhost")
    certificate.private_key_pem.write_to_path(other["key"])
    certificate.cert_chain_pems[0].write_to_path(other["certificate"])

    def present(files: dict[str, Path]) -> None:
        with redis.Redis.from_url(server.url) as client:
            names = ("tls-cert-file", files["certificate"], "tls-key-file", files["key"])
            client.execute_command("CONFIG", "SET", *map(str, names))
            client.client_kill_filter(skipme=True)

    def is_refused() -> bool:
        try:
            record.store.command("PING")
        except UnavailableError as error:
            return "cannot agree on TLS" in str(error)
        return False

    try:
        record.append(0)
        record.store.note_admitted()
        present(other)
        wait_until(is_refused)
        present(files)
        wait_until(lambda: _answers(record))
        assert record.numbers() == [0]
    finally:
        record.close()


def test_a_server_that_cannot_prove_who_it_is_is_refused(start_with_tls, tmp_path):
    _, port, files = start_with_tls(**{"tls-auth-clients": "no"})
    with pytest.raises(ConfigError, match=r"cannot agree on TLS.*name its CA by ssl_ca_certs="):
        Record(f"rediss://localhost:{port}/0", resume=False)
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    with pytest.raises(ConfigError, match="cannot agree on TLS"):
        Record(f"rediss://localhost:{port}/0?ssl_ca_certs={tmp_path / 'other.pem'}", resume=False)
    with pytest.raises(ConfigError, match="cannot agree on TLS"):
        Record(f"rediss://127.0.0.2:{port}/0?ssl_ca_certs={files['ca']}", resume=False)


class Pair:
    """A primary and its replica behind one address, as a user of a managed Redis sees them."""

    def __init__(self, start: Callable[..., EmbeddedRedis]) -> None:
        ports = free_port(), free_port()
        self.primary = start("primary", port=str(ports[0]), **{"repl-diskless-sync-delay": "0"})
        self.replica = start("replica", port=str(ports[1]), replicaof=f"127.0.0.1 {ports[0]}")
        self.ports = ports
        self.proxy = FaultyRedis(path_of(self.primary))
        with redis.Redis.from_url(self.replica.url) as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up")

    def wait_until_alike(self) -> None:
        with redis.Redis.from_url(self.primary.url) as client:
            assert client.wait(1, 10_000) == 1

    def promote(self) -> None:
        with redis.Redis.from_url(self.replica.url) as client:
            client.replicaof("NO", "ONE")
        self.proxy.upstream = path_of(self.replica)

    def demote(self) -> None:
        with redis.Redis.from_url(self.primary.url) as client:
            client.replicaof("127.0.0.1", str(self.ports[1]))


@pytest.fixture
def pair(start) -> Iterator[Pair]:
    pair = Pair(start)
    yield pair
    pair.proxy.close()


def append_until_stored(record: Record, number: int) -> None:
    def attempt() -> bool:
        with contextlib.suppress(UnavailableError):
            try:
                record.append(number)
            except OutOfStepError:  # as it is on another server, and on one that has restarted
                settle(record.log)
        with contextlib.suppress(UnavailableError):
            return record.log.read_state().inserted == ROWS * (number + 1)
        return False

    wait_until(attempt)


def test_a_primary_that_becomes_a_replica_is_left_for_the_new_one(pair):
    record = Record(pair.proxy.url, resume=False)
    for number in range(5):
        assert record.append(number)
    pair.wait_until_alike()
    pair.promote()
    pair.demote()
    with pytest.raises(UnavailableError, match="is a read-only replica: its primary has moved"):
        record.append(5)  # over the connection that is open
    for number in range(5, 10):
        append_until_stored(record, number)
    assert record.numbers() == list(range(10))
    with redis.Redis.from_url(pair.replica.url) as client:
        assert client.xlen("paceline:{variants}:table:transitions:blocks") == 10
    record.close()


def test_a_replica_is_told_from_a_primary_at_the_start_and_names_it(pair):
    pair.proxy.upstream = path_of(pair.replica)
    store = RedisStore(pair.proxy.url, "variants", deadline_seconds=10)
    with pytest.raises(
        UnavailableError, match=rf"read-only replica of 127.0.0.1:{pair.ports[0]}: expected the primary"
    ):
        store.check()
    pair.proxy.upstream = path_of(pair.primary)
    store.check()  # over a new connection, whose name was resolved again
    assert not store.claim(resume=False)
    store.close()


def test_a_primary_that_dies_is_left_for_its_replica(pair):
    record = Record(pair.proxy.url, resume=False)
    for number in range(5):
        assert record.append(number)
    pair.wait_until_alike()
    pair.primary.process.kill()
    pair.primary.process.wait()
    with pytest.raises(UnavailableError):
        record.append(5)
    pair.promote()
    for number in range(5, 10):
        append_until_stored(record, number)
    assert record.numbers() == list(range(10))
    record.close()


def test_what_a_replica_had_not_got_yet_is_noticed_and_can_be_written_again(pair):
    record = Record(pair.proxy.url, resume=False)
    assert record.append(0)
    pair.wait_until_alike()
    with redis.Redis.from_url(pair.replica.url) as client:
        client.replicaof("NO", "ONE")  # from here on it gets nothing more
    assert record.append(1)
    pair.promote()
    pair.demote()

    def out_of_step() -> bool:
        try:
            record.append(2)
        except OutOfStepError:
            return True
        except UnavailableError:
            return False
        raise AssertionError("a block was stored after a gap")

    wait_until(out_of_step)
    settle(record.log)
    assert record.log.read_state().inserted == ROWS
    assert record.append(1)
    assert record.append(2)
    assert record.numbers() == [0, 1, 2]
    record.close()


def test_a_redis_that_restarts_is_found_again(start):
    server = start()
    proxy = FaultyRedis(path_of(server))
    record = Record(proxy.url, resume=False)
    assert record.append(0)
    server.process.kill()
    with pytest.raises(UnavailableError):
        record.append(1)
    server.restart()
    append_until_stored(record, 1)
    assert record.numbers() == [0, 1]
    record.close()
    proxy.close()
