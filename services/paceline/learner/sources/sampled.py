"""Batches that replay draws, received by a process beside the training process."""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import subprocess
import sys
import time

import numpy as np
import numpy.typing as npt
import torch

from paceline import errors
from paceline.config import RpcConfig, SecurityConfig
from paceline.errors import DeadlineError, HelperLostError, PacelineError, StarvedError, StarvedForGoodError
from paceline.lag.bound import LearnerVersion, Starvation
from paceline.lag.clock import ClockOffset
from paceline.learner.batch_memory import BatchMemory
from paceline.learner.control import Message, take_messages
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.replay_stream import FLOWING
from paceline.learner.sources.batch import Batch, RowCounts
from paceline.process import own_epoch_ns
from paceline.rows import RowSpec
from paceline.rpc.client import NO_SECURITY
from paceline.rpc.wire import row_spec_to_wire
from paceline.v1 import replay_pb2

_SEND_SECONDS = 10.0
"""The receiving process has to take a message by then; it does within milliseconds."""
_EXIT_SECONDS = 5.0
"""The receiving process has to be gone so long after the socket was closed."""

_STARVED: dict[str, type[StarvedError]] = {kind.__name__: kind for kind in (StarvedError, StarvedForGoodError)}


class SampleSource:
    """Batches of one replay service, which a process of its own puts into shared memory.

    At most `prefetch` batches are ordered or waiting, so a batch is at most so many updates old when it is used.
    When the stream is cut, what was ordered but not received is ordered again; a draw that got lost harms nothing.
    """

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        table: str,
        spec: RowSpec,
        batch_size: int,
        prefetch: int,
        seed: int,
        rpc: RpcConfig,
        security: SecurityConfig = NO_SECURITY,
        metrics: LearnerMetrics,
        device: torch.device | None = None,
        shard: int = 0,
        has_priorities: bool = False,
        times: bool = False,
        is_bounded: bool = False,
        tells_rows: bool = False,
        learner: LearnerVersion | None = None,
        learner_id: str = "",
    ) -> None:
        """Start the process, which begins to fetch.

        Args:
            has_priorities: batches have keys and probabilities, and priorities of rows may be updated.
            times: batches say when their rows were stored.
            is_bounded: the bound on the lag keeps rows from being drawn, and the others are drawn all alike; batches
                say how many these are.
            tells_rows: `counts` is kept up to date; replay is asked every second.
            learner: its newest version at the start, which the first order says; None: nothing is said until
                `set_policy_version`, and then of no learner.
            learner_id: replay refuses another learner than the one that its rows came about under, so `learner` has to
                say its incarnation; empty: it is not said.
        """
        learner = learner or LearnerVersion(0)
        # One more than are ordered: that which the learner reads.
        self._memory = BatchMemory.create(slot_count=prefetch + 1, batch_size=batch_size, row_bytes=spec.row_bytes)
        self._rows = [torch.from_numpy(slot.rows) for slot in self._memory.slots]
        self._has_priorities, self._times, self._is_bounded = has_priorities, times, is_bounded
        self._prefetch, self._metrics, self._shard = prefetch, metrics, str(shard)
        self._device = device or torch.device("cpu")
        self._ready: collections.deque[Message] = collections.deque()
        self._in_use: int | None = None
        self._empty: list[int] = []
        self._policy_version = int(learner)
        self._buffer = bytearray()
        self._why_none: type[DeadlineError] = DeadlineError
        self._reason = f"replay at {address} has not answered yet"
        self._failure: PacelineError | None = None
        self.is_away = False
        """Replay was asked, and cannot be reached or serves nobody."""
        self._counts: RowCounts | None = None
        mine, theirs = socket.socketpair()
        with theirs:
            descriptors = (theirs.fileno(), self._memory.descriptor)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline.learner.receiver_process", *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        # Two objects of one socket, since a timeout belongs to the object: sending waits, receiving never does.
        self._outgoing, self._incoming = mine, mine.dup()
        self._outgoing.settimeout(_SEND_SECONDS)
        self._incoming.setblocking(False)
        self._send(
            Message(
                "start",
                {
                    "run_id": run_id,
                    "address": address,
                    "rpc": rpc.model_dump(mode="json"),
                    "security": security.model_dump(mode="json"),
                    "batch_size": batch_size,
                    "row_bytes": spec.row_bytes,
                    "row_spec_digest": spec.digest.hex(),
                    "slot_count": prefetch + 1,
                    "has_priorities": has_priorities,
                    "times": times,
                    "tells_rows": tells_rows,
                    "details": has_priorities or times or is_bounded,
                    "seed": seed,
                    "base_version": learner.base_version,
                    "learner_incarnation": learner.incarnation,
                    "epoch_ns": own_epoch_ns(),
                },
                replay_pb2.OpenTableRequest(
                    run_id=run_id,
                    table=table,
                    row_spec=row_spec_to_wire(spec),
                    learner_id=learner_id,
                    learner_incarnation=learner.incarnation,
                ).SerializeToString(),
            )
        )
        self._order(list(range(prefetch)))
        self._spare = [prefetch]

    @property
    def counts(self) -> RowCounts | None:
        """What replay said of its rows since the last batch came, if they are enough for one, the ratio aside."""
        if self._failure is None:
            self._receive()
        return self._counts

    def next_batch(self, seconds: float) -> Batch:
        """The next batch. Raises DeadlineError, with the reason, when there is none within `seconds`.

        Raises:
            StarvedError: that is since the bound on the lag leaves no row to draw.
            PacelineError: replay refused for good, or the receiving process ended; there will be no batch any more.
        """
        until = time.monotonic() + seconds
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            began = time.monotonic()
            has_news = select.select([self._incoming], [], [], max(until - began, 0))[0]
            if issubclass(self._why_none, StarvedError):
                self._metrics.starved.add(time.monotonic() - began, Starvation.read_smallest_bound(self._reason))
            if not has_news:
                raise self._why_none(f"no batch within {seconds:g} s: {self._reason}")
            self._receive()
        fields = self._ready.popleft().fields
        self._give_back()
        self._in_use = number = fields["slot"]
        slot = self._memory.slots[number]
        return Batch(
            self._rows[number].to(self._device),
            fields["table_row_count"],
            fields["inserted_row_count"],
            keys=slot.keys if self._has_priorities else None,
            probabilities=slot.probabilities if self._has_priorities else None,
            stored_at=slot.stored_at if self._times else None,
            # Where all are drawn alike, one in so many is this row.
            drawable_row_count=round(1 / float(slot.probabilities[0])) if self._is_bounded else None,
        )

    def update_priorities(self, keys: npt.NDArray[np.int64], priorities: npt.NDArray[np.float32]) -> None:
        """Have new priorities sent by the receiving process."""
        body = b"".join((keys.astype(np.int64).tobytes(), priorities.astype(np.float32).tobytes()))
        self._send(Message("priorities", {"count": len(keys)}, body))

    def set_policy_version(self, version: int) -> None:
        """Note the newest policy version; the next order says it."""
        self._policy_version = version

    def give_back(self, row_count: int) -> None:
        """What replay drew stays drawn."""

    def close(self) -> None:
        """End the receiving process."""
        if self._outgoing.fileno() < 0:
            return
        self._outgoing.close()
        self._incoming.close()
        try:
            self.process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._memory.close()

    def _give_back(self) -> None:
        """Order into the slot that the learner read until now."""
        self._empty += [self._in_use] if self._in_use is not None else self._spare
        # Half of the prefetch at a time: replay then sends several batches in one message.
        if len(self._empty) * 2 >= self._prefetch:
            self._order(self._empty)
            self._empty = []

    def _order(self, slots: list[int]) -> None:
        self._send(Message("order", {"slots": slots, "policy_version": self._policy_version}))

    def _send(self, message: Message) -> None:
        # When the process has ended, or hangs, the next wait for a batch says so.
        with contextlib.suppress(OSError):
            self._outgoing.sendall(message.encode())

    def _receive(self) -> None:
        """Take in what the receiving process says."""
        try:
            data = self._incoming.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_EXIT_SECONDS)
            self._failure = HelperLostError(
                f"the receiving process {self.process.pid} ended with exit code {self.process.poll()}: without it no "
                "rows come, so the learner ends too; its log says more. Resume the run"
            )
            return
        self._buffer += data
        for message in take_messages(self._buffer):
            self._take(message)

    def _take(self, message: Message) -> None:
        fields = message.fields
        match message.kind:
            case "batch":
                self._ready.append(message)
                self._counts = None
                self._reason, self.is_away, self._why_none = FLOWING, False, DeadlineError
            case "rows":
                if self._in_use is None or not self._is_bounded:  # of those within the bound only batches say
                    self._counts = RowCounts(**fields)
            case "cut":
                self._reason, self.is_away = fields["message"], fields["is_away"]
                self._why_none = _STARVED.get(fields["error"], DeadlineError)
                self._metrics.sample_failures.labels(fields["error"]).inc()
            case "clock":
                offset = ClockOffset(fields["seconds"], fields["uncertainty_seconds"])
                self._metrics.set_replay_clock(self._shard, offset)
            case "priorities":
                self._metrics.priority_updates.inc(fields["sent"])
                self._metrics.priority_updates_dropped.inc(fields["dropped"])
            case "failed":
                named = getattr(errors, fields["error"], PacelineError)
                self._failure = named(fields["message"])
