"""The Redis-compatible servers that tests run against."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline.local.embedded import EmbeddedRedis

SERVERS = ("embedded", "redis")


def start_redis(kind: str, folder: Path, **settings: str) -> EmbeddedRedis:
    """Start the bundled server, or the system's redis-server; skip the test where the latter is missing."""
    binary = None
    if kind == "redis":
        found = shutil.which("redis-server")
        if found is None:
            pytest.skip("no redis-server on this machine; `apt-get install redis-server` brings it")
        binary = Path(found)
    return EmbeddedRedis.start(folder, binary=binary, settings=settings)
