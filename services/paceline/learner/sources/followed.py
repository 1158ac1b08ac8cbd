"""Batches drawn here, from a copy of replay's table that every stored row is sent to once."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

import grpc
import numpy as np
import numpy.typing as npt
import torch

from paceline.config import RpcConfig
from paceline.errors import DeadlineError, LimiterTimeoutError, StarvedError, StarvedForGoodError, UnavailableError
from paceline.lag.bound import Starvation
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources.batch import Batch, RowCounts
from paceline.learner.sources.device_rows import DeviceRows
from paceline.learner.sources.follower import Follower
from paceline.rows import ByteMatrix, RowSpec, numpy_columns
from paceline.tables.limiter import Limiter, LimiterSettings
from paceline.tables.memory import MemorySettings, TableMemory
from paceline.telemetry import get_logger
from paceline.v1 import replay_pb2

CHUNK_ROWS = 256
"""Rows leave the ring by so many at once, which is finer than most blocks: it holds what replay's ring holds."""
MEMORY_BYTES = 8 << 20
"""Bytes of rows that replay may be ahead of this learner in the memory that they share. A ring of 340 MB is filled at
1.6 GB/s through a connection, through 2 MiB of memory at 2.0, through 4 to 32 MiB at 2.4."""
RELEASE_SHARE = 4
"""Of that memory this fraction (1/4) is released at once."""
REPORT_SHARE = 8
"""What was sampled is reported by this fraction (1/8) of the limiter's band: collectors seldom wait for the report."""
REPORT_SECONDS = 1.0
"""The longest time between two reports while batches are taken."""
WAIVE_SECONDS = 0.25
"""While all rows are beyond the bound on the lag, a window's worth of others is let in so often: soon what collectors
had in flight is through, and those that cannot get the newest policy use up few of the run's steps."""


class FollowSource:
    """Batches from a ring of the learner's own, drawn with the same seed and held back by the same limiter as replay's.

    A resumed learner first fills its ring with what replay has; then it samples, so that it never learns from the
    first few rows alone. A batch is drawn when it is asked for, so its rows are as fresh as can be.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        run_id: str,
        table: str,
        spec: RowSpec,
        memory: MemorySettings,
        limiter: LimiterSettings,
        batch_size: int,
        seed: int,
        rpc: RpcConfig,
        metrics: LearnerMetrics,
        device: torch.device | None = None,
        shard: int = 0,
        times: bool = False,
        base_version: int = 0,
        learner_id: str = "",
        learner_incarnation: int = 0,
    ) -> None:
        """Begin to follow. `memory` and `limiter` are replay's own settings of this table and shard.

        Args:
            times: batches say when their rows were stored.
            base_version: rows of an earlier policy version count for the bound on the lag as if they were of this one.
            learner_id, learner_incarnation: replay refuses another learner, and an incarnation that was replaced;
                empty and 0: they are not said.
        """
        device = device or torch.device("cpu")
        self._settings, self._spec, self._device = memory, spec, device
        on_host = device.type == "cpu"
        self._store = None if on_host else DeviceRows(memory.physical_rows, spec.row_bytes, device)
        self._base_version = base_version
        self._memory = self._make_memory()
        self._policy_version = 0
        self._stored_at = np.empty(batch_size) if times else None
        self._starvation: Starvation | None = None
        self._is_held_back, self._held_back_seconds = False, 0.0
        """Whether the limiter is why there was no batch just now, and for how long it has been, ever."""
        # This side never waits within the limiter: rows come by the same condition as other news.
        self._table, self._limiter_settings = table, replace(limiter, deadline_seconds=0)
        self._limiter = Limiter(table, self._limiter_settings)
        self._batch_size, self._metrics, self._shard = batch_size, metrics, str(shard)
        # As replay's sampler, asked with the seed of a SampleSource's first stream.
        stream = np.random.SeedSequence(seed).spawn(1)[0]
        self._random = np.random.default_rng(int(stream.generate_state(1, np.uint64)[0]))
        self._rows = torch.empty((batch_size, spec.row_bytes), dtype=torch.uint8, device=device)
        self._out = self._rows.numpy() if on_host else self._rows
        self._chunk_rows = max(1, min(CHUNK_ROWS, memory.capacity_rows // 16))
        # Where the ratio runs free nobody waits for reports.
        self._report_rows = max(batch_size, (limiter.window_rows or math.inf) / REPORT_SHARE)
        self._reported, self._reported_at = 0, 0.0
        self._waived_before, self._waived_at = 0, -math.inf
        """Rows before this key are all beyond the bound on the lag, as replay was told last, and when."""
        self._is_closed = False
        self._changed = threading.Condition()
        self._drawing = threading.Lock()
        """Held while the ring is drawn from, so that it is not exchanged meanwhile."""
        self._end = self._released = 0
        """Key of the next row to come; what replay was told that rows before it need not stay in its memory."""
        memory_rows = max(RELEASE_SHARE, MEMORY_BYTES // spec.row_bytes)
        self._release_rows = memory_rows // RELEASE_SHARE
        self._received_rows = 0
        self._caught_up_rows: int | None = 0
        """Rows that have to come before the first batch: those that replay had at the start; None: it had not restored
        all of them, so none but the key tells."""
        self._caught_up_at: int | None = None
        """The same as a key, since rows may leave replay before they were sent; None: replay has not said."""
        self._inserted = 0
        self._follower = Follower(
            channel,
            self,
            run_id=run_id,
            table=table,
            spec=spec,
            rpc=rpc,
            metrics=metrics,
            shard=shard,
            watches_clock=times,
            memory_rows=memory_rows,
            learner_id=learner_id,
            learner_incarnation=learner_incarnation,
        )
        self._follower.start()

    @property
    def is_away(self) -> bool:
        """Whether replay was asked and cannot be reached or serves nobody; batches may come none the less."""
        return self._follower.is_away

    @property
    def counts(self) -> RowCounts | None:
        """Rows in the ring now; None until there are so many that a first batch could be drawn, the ratio aside."""
        memory, has_rows = self._memory, self._limiter.inserted >= self._limiter_settings.min_rows
        if not (has_rows and self._is_caught_up() and memory.row_count):
            return None
        return RowCounts(memory.row_count, self._inserted, memory.within_bound(self._policy_version))

    def give_back(self, row_count: int) -> None:
        """So many rows that were drawn are not learned from: they count as not sampled."""
        self._limiter.settle_samples(row_count, 0)

    def next_batch(self, seconds: float) -> Batch:
        """The next batch. Raises DeadlineError, with the reason, when there is none within `seconds`.

        Raises:
            StarvedError: that is since the bound on the lag leaves no row to draw.
            PacelineError: replay refused for good.
        """
        until = time.monotonic() + seconds
        row_count, held_back = 0, self._held_back_seconds
        while not row_count:
            try:
                self._wait_for_grant(until, seconds)
            finally:
                if self._held_back_seconds > held_back:
                    self._follower.report()  # replay counts the waits of both sides
            with self._drawing:
                row_count, within_bound = self._draw()
        due = self._limiter.sampled - self._reported >= self._report_rows
        if due or time.monotonic() - self._reported_at >= REPORT_SECONDS:
            self._report()
        return Batch(self._rows, row_count, self._inserted, stored_at=self._stored_at, drawable_row_count=within_bound)

    def update_priorities(self, keys: npt.NDArray[np.int64], priorities: npt.NDArray[np.float32]) -> None:
        """Rows that are followed have no priorities."""

    def set_policy_version(self, version: int) -> None:
        """Note the newest policy version, from which the bound on the lag counts."""
        self._policy_version = version

    def close(self) -> None:
        """Stop following, once replay has noted what was sampled: the next learner's limiter goes on from there."""
        if self._caught_up_at is not None and not self._is_closed:
            self._is_closed = True
            self._wait_until_reported()
        self._follower.close()

    def _wait_until_reported(self) -> None:
        sampled, reported = self._limiter.sampled, self._reported
        if self._follower.is_away:
            noted, reason = reported, self._follower.reason if sampled > reported else None
        else:
            self._report()
            noted, reason = self._follower.wait_until_noted(lambda table: table.sampled_row_count, sampled)
        if reason is not None:
            get_logger().warning(
                "samples_not_reported",
                table=self._table,
                shard=self._shard,
                sampled_row_count=sampled,
                noted_row_count=noted,
                reason=reason,
                meaning="the next learner samples as many rows more as were not counted",
            )

    def begin(self, table: replay_pb2.TableDescription) -> replay_pb2.FollowRequest:
        """Go on from the next row; at the start from the first one that replay has."""
        with self._drawing, self._changed:
            if self._caught_up_at is None:
                self._limiter = Limiter(self._table, self._limiter_settings, sampled=table.sampled_row_count)
                self._caught_up_at, self._caught_up_rows = table.inserted_row_count, table.row_count
                if not table.HasField("whole"):
                    # An older replay, which may have restored but a few of its rows.
                    self._caught_up_rows = max(table.row_count, self._limiter_settings.min_rows)
                elif not table.whole:
                    self._caught_up_rows = None
                self._reported = self._limiter.sampled
                return self._request()
            # A record that lost its end while rows came ends there now.
            self._caught_up_at = min(self._caught_up_at, table.inserted_row_count)
            self._reported = self._limiter.sampled
            return self._request(from_row=self._end)

    def forget(self) -> None:
        """Empty the ring: it is filled with what replay has now, as at the start."""
        with self._drawing, self._changed:
            get_logger().warning("followed_rows_lost", table=self._table, had=self._end)
            self._memory, self._caught_up_at = self._make_memory(), None
            self._end = self._received_rows = self._waived_before = 0

    def progress(self) -> replay_pb2.FollowRequest:
        """Rows that were ever sampled, from this ring and before."""
        with self._changed:
            return self._request()

    def take(self, news: replay_pb2.FollowResponse, rows: ByteMatrix, stored_at: npt.NDArray[np.float64]) -> None:
        """Put rows into the ring."""
        memory, versions = self._memory, None
        if self._settings.sampler == "recent":
            versions = np.ascontiguousarray(numpy_columns(self._spec, rows)["policy_version"])
        for start in range(0, len(rows), self._chunk_rows):
            chunk = slice(start, start + self._chunk_rows)
            memory.append(
                news.first_row + start,
                rows[chunk],
                stored_at=stored_at[chunk],
                versions=None if versions is None else versions[chunk],
            )
        memory.drop_before(min(news.table_first_row, memory.end_row))
        with self._changed:
            self._end = news.first_row + len(rows)
            self._received_rows += len(rows)
            self._inserted = news.inserted_row_count
            # Not `_end`: rows that replay counts may be lost to damage, and both limiters must count alike.
            self._limiter.restore(inserted=news.inserted_row_count)
            if news.complete:
                self._limiter.complete()
            if news.HasField("rows_in_memory") and self._end - self._released >= self._release_rows:
                self._follower.report()
            self._changed.notify_all()
        self._metrics.set_followed(self._shard, behind=self._inserted - self._end, ring_rows=memory.row_count)

    def wake(self) -> None:
        """Have a wait look at what changed."""
        with self._changed:
            self._changed.notify_all()

    def _wait_for_grant(self, until: float, seconds: float) -> None:
        with self._changed:
            while not self._grant():
                if self._follower.failure is not None:
                    raise self._follower.failure
                self._report()  # whoever waits for these samples may be whom this waits for
                left = until - time.monotonic()
                if left <= 0:
                    if self._starvation is not None:
                        is_for_good = self._limiter.is_complete and self._end >= self._inserted
                        kind = StarvedForGoodError if is_for_good else StarvedError
                        raise kind(f"no batch within {seconds:g} s: {self._starvation}")
                    raise DeadlineError(f"no batch within {seconds:g} s: {self._why_not()}")
                began = time.monotonic()
                # While there is something to waive, news may come before it may be.
                self._changed.wait(left if self._starvation is None else min(left, WAIVE_SECONDS))
                waited = time.monotonic() - began
                if self._starvation is not None:
                    self._metrics.starved.add(waited, self._starvation.smallest_bound)
                if self._is_held_back:
                    self._held_back_seconds += waited

    def _grant(self) -> bool:
        """Whether a batch may be drawn now; it counts as sampled then."""
        self._starvation, self._is_held_back = None, False
        if not self._is_caught_up() or not self._memory.row_count:
            return False
        if not self._limiter.grant_samples(self._batch_size, 1, lambda: None, wait=False):
            self._is_held_back = True
            return False
        self._starvation = self._memory.find_starvation(self._batch_size, self._policy_version)
        if self._starvation is not None:
            self._limiter.settle_samples(self._batch_size, 0)
            self._waive()
        return self._starvation is None

    def _waive(self) -> None:
        """Have replay not hold inserts back for samples of the rows here: without newer ones there will be none."""
        now = time.monotonic()
        if self._end > self._waived_before and now - self._waived_at >= WAIVE_SECONDS:
            self._waived_before, self._waived_at = self._end, now
            self._follower.report()

    def _draw(self) -> tuple[int, int | None]:
        """Fill the batch: rows in the ring, and those of them within the bound on the lag. 0: there are none now."""
        memory, version = self._memory, self._policy_version
        if not (row_count := memory.row_count):
            return 0, None  # the ring was exchanged for an empty one since the grant, and the limiter with it
        try:
            memory.sample(self._random, self._out, policy_version=version, stored_at=self._stored_at)
        except UnavailableError:  # the last rows within the bound have left since
            self._limiter.settle_samples(self._batch_size, 0)
            return 0, None
        return row_count, memory.within_bound(version)

    def _make_memory(self) -> TableMemory:
        return TableMemory(self._settings, self._spec.row_bytes, rows=self._store, base_version=self._base_version)

    def _is_caught_up(self) -> bool:
        if self._caught_up_at is None:
            return False
        if self._end >= self._caught_up_at:
            return True
        return self._caught_up_rows is not None and self._received_rows >= self._caught_up_rows

    def _request(self, from_row: int | None = None) -> replay_pb2.FollowRequest:
        self._released = self._end
        return replay_pb2.FollowRequest(
            from_row=from_row,
            released_before=self._end,
            sampled_row_count=self._limiter.sampled,
            limiter_wait_seconds=self._held_back_seconds,
            waived_before=self._waived_before or None,
        )

    def _report(self) -> None:
        if self._limiter.sampled > self._reported:
            self._reported, self._reported_at = self._limiter.sampled, time.monotonic()
            self._follower.report()

    def _why_not(self) -> str:
        if self._follower.is_away or self._caught_up_at is None:
            return self._follower.reason
        if not self._is_caught_up() and self._caught_up_rows is None:
            return (
                f"{self._received_rows} rows came so far, and replay is restoring others from its record, which ends "
                f"at row {self._caught_up_at}"
            )
        if not self._is_caught_up():
            return f"{self._received_rows} of the {self._caught_up_rows} rows that replay has came so far"
        same = Limiter(
            self._table, self._limiter_settings, inserted=self._limiter.inserted, sampled=self._limiter.sampled
        )
        try:
            same.grant_samples(self._batch_size, 1, lambda: None)
        except LimiterTimeoutError as error:
            return str(error).partition(": ")[2]
        return "the ring has no rows"
