"""The training process's handle on its endpoint, the process that answers collectors and evaluator beside it.

Served by threads of the training process, 64 polling collectors cost it a fifth of its updates; from a process of its
own, 1-3 %. A snapshot goes through shared memory; everything else, through a socket pair.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from paceline.config import Config
from paceline.errors import (
    ConflictError,
    HelperLostError,
    InvalidInputError,
    PacelineError,
    SnapshotError,
    UnavailableError,
)
from paceline.identity import PolicyIdentity, require_same_run
from paceline.learner.control import Message
from paceline.learner.endpoint_link import SEND_SECONDS, EndpointLink
from paceline.learner.snapshot_memory import SLOT_COUNT, SnapshotMemory
from paceline.process import StopSignal, own_epoch_ns
from paceline.rows import RowSpec
from paceline.rpc.wire import row_spec_to_wire, snapshot_header_to_wire
from paceline.snapshot import SnapshotHeader
from paceline.v1 import parameters_pb2

START_SECONDS = 60.0
"""The endpoint has to listen by then."""
CLOSE_SECONDS = 5.0
"""The endpoint has to end so long after its drain."""


class Endpoint:
    """A running endpoint process. Methods may be called from any thread; use `start` to make one.

    Leaving it as a context manager closes it; leaving it by an exception first tells everybody that the learner failed.
    """

    def __init__(self, config: Config, incarnation: int) -> None:
        """Use `start`."""
        self._run_id, self._incarnation = config.run_id, incarnation
        self._drain_seconds = config.rpc.drain_seconds
        self._free_slots = set(range(SLOT_COUNT))
        self._evaluated: PolicyIdentity | None = None
        self._started: Message | None = None
        self._last_version = 0
        self._memory = SnapshotMemory.create()
        self._link = EndpointLink(self._memory.descriptor, self._take)

    @classmethod
    def start(
        cls,
        config: Config,
        *,
        incarnation: int,
        row_spec: RowSpec,
        actor_semantics_json: str,
        resumed_environment_steps: int,
    ) -> Endpoint:
        """Start the process and wait until it listens.

        Raises:
            PortTakenError: `learner.listen` or `learner.endpoint_metrics_listen` is not free.
            ConflictError: another endpoint of the run is alive.
            InvalidInputError: the endpoint's part of the ledger is damaged.
            UnavailableError: the process ended, or did not listen in time.
        """
        endpoint = cls(config, incarnation)
        try:
            endpoint._link.send(
                Message(
                    "start",
                    {
                        "config": config.model_dump(mode="json"),
                        "actor_semantics_json": actor_semantics_json,
                        "resumed_environment_steps": resumed_environment_steps,
                        "epoch_ns": own_epoch_ns(),
                    },
                    row_spec_to_wire(row_spec).SerializeToString(),
                )
            )
            if not endpoint._link.wait(lambda: endpoint._started is not None, START_SECONDS):
                raise UnavailableError(
                    f"the endpoint does not listen after {START_SECONDS:g} s: the machine is overloaded, or its log "
                    "says more"
                )
            endpoint._last_version = int(endpoint._start_fields()["last_version"])
        except BaseException:
            endpoint._kill()
            raise
        return endpoint

    @property
    def port(self) -> int:
        """Where the services listen."""
        return int(self._start_fields()["port"])

    @property
    def metrics_port(self) -> int:
        """Where /metrics listens."""
        return int(self._start_fields()["metrics_port"])

    @property
    def pid(self) -> int:
        """The endpoint's process."""
        return self._link.process.pid

    def publish(self, header: SnapshotHeader, payload: bytes) -> None:
        """Hand over a snapshot: one copy into shared memory. It is served once its version is durable.

        Where snapshots come faster than the disk, one that was not served yet gives way to the next.

        Raises:
            ConflictError: the version is not above every earlier one of the run, or another incarnation made it.
            SnapshotError: the payload has not the length that the header says.
            UnavailableError: the endpoint ended, or does not take the snapshot.
        """
        require_same_run(self._run_id, header.run_id)
        if len(payload) != header.payload_bytes:
            raise SnapshotError(
                f"snapshot {header.identity} has {len(payload)} bytes: expected {header.payload_bytes}, as its header "
                "says"
            )
        if header.identity.incarnation != self._incarnation:
            raise ConflictError(
                f"snapshot {header.identity} is published by incarnation {self._incarnation} of the learner: "
                "expected its own"
            )
        with self._link.lock:
            if header.identity.version <= self._last_version:
                raise ConflictError(
                    f"version {header.identity.version} is published after version {self._last_version} of this run: "
                    "expected a higher one, since a version never means two policies"
                )
            # The memory can grow only when the endpoint looks at none of it.
            wanted = SLOT_COUNT if len(payload) > self._memory.slot_bytes else 1
            if not self._link.wait(lambda: len(self._free_slots) >= wanted, SEND_SECONDS):
                raise HelperLostError(f"the endpoint takes no snapshot within {SEND_SECONDS:g} s")
            self._memory.grow(len(payload))
            slot = self._free_slots.pop()
            self._memory.write(slot, payload)
            message = snapshot_header_to_wire(header, 0, parameters_pb2.RUN_STATE_UNSPECIFIED)
            self._link.send(
                Message(
                    "publish",
                    {"slot": slot, "slot_bytes": self._memory.slot_bytes},
                    message.SerializeToString(),
                )
            )
            self._last_version = header.identity.version

    def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Have one line of `metrics.jsonl` written, and its numbers drawn in TensorBoard.

        Raises:
            InvalidInputError: a field is no JSON. UnavailableError: the endpoint ended.
        """
        try:
            self._link.send(Message("record", {"kind": kind, "fields": dict(fields)}))
        except TypeError as error:
            raise InvalidInputError(f"a {kind} record cannot be written: {error}; expected plain numbers") from error

    def finish(self) -> None:
        """The run reached its end: everybody who asks is told so, once all published snapshots are served."""
        self._link.send(Message("finish"))

    def fail(self, reason: str) -> None:
        """The training loop failed: health says NOT_SERVING, and whoever asks is told the reason."""
        self._link.send(Message("fail", {"reason": reason}))

    def wait_for_evaluation(self, identity: PolicyIdentity, seconds: float, stop: StopSignal) -> bool:
        """Wait until the evaluation of this policy, or of a newer one, is recorded; whether it is.

        Ends early when the process is asked to stop. Raises UnavailableError when the endpoint ended.
        """
        return self._link.wait(lambda: self._evaluated is not None and self._evaluated >= identity, seconds, stop)

    def check(self) -> None:
        """Raise what ended the endpoint, UnavailableError for a reason unknown, if it has ended. Takes microseconds."""
        self._link.check()

    def close(self) -> None:
        """Drain and end the process: what was recorded is on disk then. Harmless when it has ended already."""
        if self._link.closed:
            return
        # It may have ended before, or hang; either way it is gone in a moment.
        with contextlib.suppress(PacelineError, subprocess.TimeoutExpired):
            self._link.send(Message("close"))
            self._link.process.wait(self._drain_seconds + CLOSE_SECONDS)
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            # The endpoint's own end may be what failed the learner.
            with contextlib.suppress(PacelineError):
                self.fail(f"the learner failed: {type(error).__name__}: {error}")
        self.close()

    def _start_fields(self) -> dict[str, Any]:
        if self._started is None:
            raise UnavailableError("the endpoint has not started")
        return self._started.fields

    def _take(self, message: Message) -> None:
        match message.kind:
            case "taken":
                self._free_slots.add(int(message.fields["slot"]))
            case "evaluated":
                policy = PolicyIdentity(message.fields["incarnation"], message.fields["version"])
                if self._evaluated is None or policy > self._evaluated:
                    self._evaluated = policy
            case "started":
                self._started = message

    def _kill(self) -> None:
        self._link.kill()
        self._memory.close()
