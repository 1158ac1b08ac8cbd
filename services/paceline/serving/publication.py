"""What the endpoint serves now: the newest snapshot, where the run stands, and whether it is ending.

Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from paceline.errors import UnavailableError
from paceline.identity import PolicyIdentity
from paceline.rpc.bulk import Bulk, BulkFormat
from paceline.v1 import parameters_pb2 as pb

_CHUNK = BulkFormat(pb.GetSnapshotResponse, "chunk")


def pack_chunk(payload: memoryview | bytes) -> bytes:
    """The message that carries some bytes of a snapshot."""
    return _CHUNK.serialize(Bulk(pb.GetSnapshotResponse(), payload))


@dataclass(frozen=True)
class ServedSnapshot:
    """An immutable snapshot as it goes on the wire. Readers share it, and keep it when a newer one is published."""

    identity: PolicyIdentity
    header: pb.SnapshotHeader
    chunks: tuple[bytes, ...]
    """Each a whole `GetSnapshotResponse`, serialised once for all readers."""

    @classmethod
    def copy(cls, header: pb.SnapshotHeader, payload: memoryview, chunk_bytes: int) -> ServedSnapshot:
        """Copy `payload`, once, into chunks of `chunk_bytes`."""
        chunks = tuple(
            pack_chunk(payload[start : start + chunk_bytes]) for start in range(0, len(payload), chunk_bytes)
        )
        return cls.of(header, chunks)

    @classmethod
    def of(cls, header: pb.SnapshotHeader, chunks: tuple[bytes, ...]) -> ServedSnapshot:
        """A snapshot of chunks that `pack_chunk` made."""
        header.chunk_count = len(chunks)
        identity = PolicyIdentity(header.identity.incarnation, header.identity.version)
        return cls(identity, header, chunks)

    def header_message(self, run_state: pb.RunState) -> bytes:
        """The first message of an answer."""
        response = pb.GetSnapshotResponse(header=self.header)
        response.header.run_state = run_state
        return response.SerializeToString()


class Publication:
    """Holds what is served and wakes those who wait for a change of it."""

    def __init__(self, owner: str) -> None:
        """`owner` serves it: whom a message names."""
        self._owner = owner
        self.newest: ServedSnapshot | None = None
        self.run_state: pb.RunState = pb.RUN_STATE_RUNNING
        self._end_reason: str | None = None
        self._changed = asyncio.Event()
        self._not_modified = b""

    def serve(self, snapshot: ServedSnapshot, run_state: pb.RunState | None = None) -> None:
        """Serve a snapshot, whose version is durable, from now on; the run stands where it did, or at `run_state`."""
        self.newest = snapshot
        if run_state is not None:
            self.run_state = run_state
        self._change()

    def finish(self) -> None:
        """The run reached its end."""
        self.set_run_state(pb.RUN_STATE_FINISHED)

    def set_run_state(self, run_state: pb.RunState) -> None:
        """Where the run stands from now on; a run that had reached its end may go on."""
        if run_state != self.run_state:
            self.run_state = run_state
            self._change()

    def end(self, reason: str) -> None:
        """Serve no more: waiting calls end at once, and new ones are refused, with this reason."""
        self._end_reason = reason
        self._change()

    @property
    def is_serving(self) -> bool:
        """Whether calls are answered."""
        return self._end_reason is None

    def require_serving(self) -> None:
        """Raise UnavailableError when the owner is ending."""
        if self._end_reason is not None:
            raise UnavailableError(f"{self._end_reason}: keep the last snapshot and try again")

    def not_modified(self) -> bytes:
        """The message that says that there is nothing newer. Raises UnavailableError before the first snapshot."""
        if not self._not_modified:
            raise UnavailableError(f"{self._owner} has no snapshot yet: try again")
        return self._not_modified

    async def wait_for_change(self, seconds: float) -> None:
        """Return when something changed, or after `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _change(self) -> None:
        if self.newest is not None:
            answer = pb.NotModified(newest=self.newest.header.identity, run_state=self.run_state)
            self._not_modified = pb.GetSnapshotResponse(not_modified=answer).SerializeToString()
        # Those who wait hold the old event; whoever comes later waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()
