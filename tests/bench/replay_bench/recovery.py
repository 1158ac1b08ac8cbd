"""A restart: the record is read into a ring, against plain reads of the same blocks."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack

import redis
from prometheus_client import CollectorRegistry

from paceline.replay.log_reader import READ_BYTES
from paceline.replay.metrics import ReplayMetrics
from paceline.replay.store import RedisStore
from paceline.replay.tables import Tables
from replay_bench.processes import Remote
from replay_bench.product import log_problems
from replay_bench.rounds import Extent, Figures, Moved, take_turns
from replay_bench.runs import RUN, TABLE, make_config
from replay_bench.workloads import Workload


class Recovery:
    """A replay process that starts again and again on what Redis holds.

    Its ring's memory was touched by the warm-up already, as the plain reads' memory was.
    """

    def __init__(self, redis_url: str, workload: Workload) -> None:
        log_problems()
        self._url, self._ring_rows = redis_url, workload.ring_rows
        self._client = redis.Redis.from_url(redis_url)
        keys = sorted(self._client.scan_iter(match=f"*:{TABLE}:block:*", count=10_000))
        sizes = [self._client.strlen(key) for key in keys]
        self._bytes, at_a_time = sum(sizes), max(1, READ_BYTES // max(sizes))
        self._steps = [keys[begin : begin + at_a_time] for begin in range(0, len(keys), at_a_time)]

    def restore(self) -> Moved:
        """Bytes of the record, now in the ring, each block checked."""
        gc.collect()  # the ring of the last round, whose pages this one takes over
        store = RedisStore(self._url, RUN, deadline_seconds=60)
        try:
            store.check()
            store.claim(resume=True)
            config = make_config(self._url, "127.0.0.1:1", self._ring_rows)
            began = time.perf_counter()
            tables = Tables(config, store, ReplayMetrics(CollectorRegistry()))
            tables.load()
            tables.restore(lambda: None, lambda: None)
            return Moved(self._bytes, time.perf_counter() - began)
        finally:
            store.close()

    def read(self) -> Moved:
        """Bytes of the same blocks, by MGET, which are thrown away."""
        began = time.perf_counter()
        for keys in self._steps:
            self._client.mget(keys)
        return Moved(self._bytes, time.perf_counter() - began)


def measure_recovery(workload: Workload, redis_url: str, extent: Extent) -> Figures:
    """Figures of one workload, whose record `redis_url` holds and nobody serves."""
    with ExitStack() as stack:
        recovery = Remote(stack, Recovery, redis_url, workload).ready()
        return take_turns(
            f"{workload.name} recovery",
            [
                lambda _: {f"{workload.name}.restore_bytes_per_s": recovery.call("restore").per_second},
                lambda _: {f"{workload.name}.mget_bytes_per_s": recovery.call("read").per_second},
            ],
            extent,
        )
