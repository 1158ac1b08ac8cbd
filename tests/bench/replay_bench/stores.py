"""Redis servers whose append-only files are rewritten between turns, so that none pays for what others wrote.

Redis writes such a file anew, on a core of its own, when it has doubled: once in a few seconds at full rate. Measured
on two cores: inserts beside a sampler keep half of their rate, and a third in a turn that this falls into.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import redis

from paceline.local.embedded import EmbeddedRedis

_GROWTH = 2.0
"""Times its size after a rewrite: from there on the next one is due."""
_SETTLE_SECONDS = 20.0
"""A rewrite may take so long; figures that begin before it is over are no figures."""
_LOOK_SECONDS = 0.02


class Store:
    """An embedded server, or another one in its place, until `stack` ends."""

    def __init__(self, stack: ExitStack, folder: Path, redis_binary: Path | None) -> None:
        server = EmbeddedRedis.start(folder, binary=redis_binary, settings={"auto-aof-rewrite-percentage": "0"})
        stack.callback(server.stop)
        self.url = server.url
        self._client = stack.enter_context(redis.Redis.from_url(server.url))

    def settle(self) -> None:
        """Have the file rewritten if that is due, and wait until it is."""
        info = self._client.info("persistence")
        if info["aof_current_size"] > _GROWTH * info["aof_base_size"]:
            self._client.bgrewriteaof()
        until = time.monotonic() + _SETTLE_SECONDS
        while self._rewrites():
            if time.monotonic() > until:
                raise RuntimeError(f"Redis did not rewrite its append-only file within {_SETTLE_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)

    def _rewrites(self) -> bool:
        info = self._client.info("persistence")
        return bool(info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"])
