"""Batches from a queue: oldest first, each row once."""

from __future__ import annotations

import collections
import threading
import time

import grpc
import numpy as np
import numpy.typing as npt
import torch

from paceline.config import RpcConfig
from paceline.errors import DeadlineError
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources.batch import Batch, RowsEndedError
from paceline.learner.sources.follower import Follower
from paceline.rows import ByteMatrix, RowSpec
from paceline.telemetry import get_logger
from paceline.v1 import replay_pb2

Seconds = npt.NDArray[np.float64]


class QueueSource:
    """Rows of a queue in their order. Taking a batch says that the one before it is consumed, and may leave replay.

    At most `prefetch` batches wait here. Rows that waited when the stream was cut, or when this process died, are
    neither lost nor learned from twice: replay keeps each until it is consumed. At the end of a run the last batch may
    have fewer rows.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        run_id: str,
        table: str,
        spec: RowSpec,
        batch_size: int,
        prefetch: int,
        rpc: RpcConfig,
        metrics: LearnerMetrics,
        device: torch.device | None = None,
        shard: int = 0,
        times: bool = False,
        learner_id: str = "",
        learner_incarnation: int = 0,
    ) -> None:
        """Begin to follow the queue.

        Args:
            times: batches say when their rows were stored.
            learner_id, learner_incarnation: replay refuses another learner, and an incarnation that was replaced;
                empty and 0: they are not said.
        """
        self._batch_size, self._prefetch_rows = batch_size, batch_size * prefetch
        self._table, self._metrics, self._shard = table, metrics, str(shard)
        self._is_closed = False
        self._device = device or torch.device("cpu")
        self._rows = torch.empty((batch_size, spec.row_bytes), dtype=torch.uint8)
        self._out: ByteMatrix = self._rows.numpy()
        self._changed = threading.Condition()
        self._stored_at: Seconds | None = np.empty(batch_size) if times else None
        self._waiting: collections.deque[tuple[int, ByteMatrix, Seconds]] = collections.deque()
        """Key of the first row, rows, and when each was stored, of what came and is in no batch yet."""
        self._waiting_rows = 0
        self._end = 0
        """Key of the next row to come."""
        self._taken = self._consumed = 0
        """Rows before these keys are in a batch; are consumed."""
        self._wanted_before = 0
        self._knows_table = self._complete = False
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
            memory_rows=self._prefetch_rows,
            learner_id=learner_id,
            learner_incarnation=learner_incarnation,
        )
        self._follower.start()

    @property
    def is_away(self) -> bool:
        """Whether replay was asked and cannot be reached or serves nobody."""
        return self._follower.is_away

    def next_batch(self, seconds: float) -> Batch:
        """The next batch; the one before is consumed. Raises DeadlineError when there is none within `seconds`.

        Raises:
            RowsEndedError: every row was in a batch.
            PacelineError: replay refused for good.
        """
        until = time.monotonic() + seconds
        self.consume()
        with self._changed:
            while self._waiting_rows < self._batch_size and not (self._is_at_end() and self._waiting_rows):
                if self._follower.failure is not None:
                    raise self._follower.failure
                if self._is_at_end():
                    raise RowsEndedError("every row that the run asked for was taken")
                left = until - time.monotonic()
                if left <= 0:
                    raise DeadlineError(f"no batch within {seconds:g} s: {self._why_not()}")
                self._changed.wait(left)
            count = self._take_rows()
            table_row_count = self._inserted - self._consumed
        stored_at = None if self._stored_at is None else self._stored_at[:count]
        return Batch(self._rows[:count].to(self._device), table_row_count, self._inserted, stored_at=stored_at)

    def consume(self) -> None:
        """The last batch was learned from: replay may let its rows go, and send others."""
        with self._changed:
            if self._taken > self._consumed:
                self._consumed = self._taken
                self._follower.report()

    def update_priorities(self, keys: npt.NDArray[np.int64], priorities: npt.NDArray[np.float32]) -> None:
        """Rows of a queue have no priorities."""

    def set_policy_version(self, version: int) -> None:
        """A queue gives its rows in their order."""

    def close(self) -> None:
        """Stop following, once replay knows what was consumed, or cannot be told it.

        The last batch counts as consumed only if `consume` was called.
        """
        if not self._is_closed:
            self._is_closed = True
            self._wait_until_reported()
        self._follower.close()
        with self._changed:
            self._waiting.clear()  # nor does the memory stay that they lie in
            self._waiting_rows = 0

    def _wait_until_reported(self) -> None:
        """Whatever replay does not know is consumed it gives to the next learner, which then trains on it again."""
        if not self._consumed:
            return
        noted, reason = self._follower.wait_until_noted(lambda table: table.consumed_row, self._consumed)
        if reason is not None:
            get_logger().warning(
                "rows_not_consumed",
                table=self._table,
                shard=self._shard,
                consumed_row=self._consumed,
                noted_row=noted,
                reason=reason,
                meaning="replay does not know of the last rows that they were learned from: the next learner gets them "
                "again",
            )

    def begin(self, table: replay_pb2.TableDescription) -> replay_pb2.FollowRequest:
        """Go on from the next row; at the start from the first one that is not consumed."""
        with self._changed:
            # They may lie in memory of the stream before, all of which would stay for them.
            self._waiting = collections.deque((first, rows.copy(), times) for first, rows, times in self._waiting)
            if not self._knows_table:
                self._end = self._taken = self._consumed = table.consumed_row
                self._knows_table = True
            self._complete = False
            request = self._progress()
            if self._end > table.consumed_row:
                request.from_row = self._end
            return request

    def forget(self) -> None:
        """Drop what waits: what is not consumed comes again, as at the start."""
        with self._changed:
            get_logger().warning("followed_rows_lost", table=self._table, had=self._end)
            self._waiting.clear()
            self._waiting_rows, self._wanted_before, self._knows_table = 0, 0, False

    def progress(self) -> replay_pb2.FollowRequest:
        """What is consumed, and how many rows are wanted."""
        with self._changed:
            return self._progress()

    def take(self, news: replay_pb2.FollowResponse, rows: ByteMatrix, stored_at: Seconds) -> None:
        """Keep rows until they are asked for."""
        with self._changed:
            if len(rows):
                self._waiting.append((news.first_row, rows, stored_at))
                self._waiting_rows += len(rows)
            skipped = news.first_row > self._end
            self._end = news.first_row + len(rows)
            self._inserted = news.inserted_row_count
            self._complete = news.complete
            if skipped:
                self._follower.report()  # keys that exist nowhere used up what was wanted
            self._changed.notify_all()
        self._metrics.set_followed(self._shard, behind=self._inserted - self._end, ring_rows=self._waiting_rows)

    def wake(self) -> None:
        """Have a wait look at what changed."""
        with self._changed:
            self._changed.notify_all()

    def _is_at_end(self) -> bool:
        """Whether no further row will come."""
        return self._complete and self._end >= self._inserted

    def _progress(self) -> replay_pb2.FollowRequest:
        # The batch that is learned from now is not among those that wait.
        self._wanted_before = max(self._wanted_before, self._end + max(0, self._prefetch_rows - self._waiting_rows))
        return replay_pb2.FollowRequest(
            consumed_row=self._consumed, wanted_before=self._wanted_before, released_before=self._taken
        )

    def _take_rows(self) -> int:
        """Fill the batch from the front of what waits; its rows."""
        filled = 0
        while self._waiting and filled < self._batch_size:
            first, rows, stored_at = self._waiting.popleft()
            count = min(len(rows), self._batch_size - filled)
            self._out[filled : filled + count] = rows[:count]
            if self._stored_at is not None:
                self._stored_at[filled : filled + count] = stored_at[:count]
            filled += count
            self._taken = first + count
            if count < len(rows):
                self._waiting.appendleft((first + count, rows[count:], stored_at[count:]))
        self._waiting_rows -= filled
        return filled

    def _why_not(self) -> str:
        if self._follower.is_away:
            return self._follower.reason
        return f"{self._waiting_rows} rows wait and a batch has {self._batch_size}: it waits for collectors to append"
