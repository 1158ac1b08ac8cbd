"""The server that `paceline train` brings along."""

from __future__ import annotations

import pytest
import redis

from paceline.errors import ServiceFailedError
from paceline.local.embedded import EmbeddedRedis


def test_what_was_written_is_there_after_a_restart_and_after_a_kill(tmp_path):
    server = EmbeddedRedis.start(tmp_path / "redis")
    try:
        with redis.Redis.from_url(server.url) as client:
            client.set("a", "1")
        server.restart()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("a") == b"1"
            client.set("b", "2")
            client.waitaof(1, 0, 5000)  # everysec: the last second may be lost otherwise
        server.process.kill()
        server.restart()
        with redis.Redis.from_url(server.url) as client:
            assert client.mget("a", "b") == [b"1", b"2"]
    finally:
        server.stop()


def test_its_settings_are_those_that_the_record_needs(tmp_path):
    server = EmbeddedRedis.start(tmp_path / "redis")
    try:
        with redis.Redis.from_url(server.url) as client:
            settings = {name: client.config_get(name)[name] for name in ("appendonly", "appendfsync", "save", "port")}
            assert settings == {"appendonly": "yes", "appendfsync": "everysec", "save": "", "port": "0"}
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
    finally:
        server.stop()


def test_a_folder_with_a_long_path_works_though_a_sockets_path_is_short(tmp_path):
    server = EmbeddedRedis.start(tmp_path / ("long" * 40))
    try:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
    finally:
        server.stop()


def test_a_stop_ends_the_process_and_leaves_no_socket(tmp_path):
    server = EmbeddedRedis.start(tmp_path / "redis")
    socket = server._socket
    assert socket.exists()
    server.stop()
    assert server.process.poll() == 0
    assert not socket.parent.exists()


def test_a_server_that_cannot_start_is_an_error_with_its_last_lines(tmp_path):
    with pytest.raises(ServiceFailedError, match=r"ended with code 1[\s\S]*no-such-setting"):
        EmbeddedRedis.start(tmp_path / "redis", settings={"no-such-setting": "1"})
