"""Snapshots: the complete acting state of an actor as verified bytes, and its way into a live replica.

The payload is safetensors: names, types, shapes and raw bytes, no code. Torch is imported where tensors are touched
only, so that the process that serves snapshots needs none.
"""

from __future__ import annotations

import hashlib
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import NonFiniteError, SnapshotError
from paceline.identity import PolicyIdentity
from paceline.rows import NUMPY_TYPES

if TYPE_CHECKING:
    import torch

    from paceline.actors import Actor

MAX_PAYLOAD_BYTES = 64 << 30
"""A snapshot above this is a mistake, or an attack."""
MAX_TENSOR_COUNT = 65_536
_MAX_NAME_LENGTH = 1_024
_MAX_DIMENSIONS = 16
_ENVELOPE_BYTES_PER_TENSOR = 2_048  # what safetensors may need for a name, a shape and two offsets


@dataclass(frozen=True)
class TensorDescription:
    """One tensor of a snapshot: its name in the actor, element type and shape (empty: a scalar)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= _MAX_NAME_LENGTH:
            raise SnapshotError(f"a tensor's name has {len(self.name)} characters: expected 1 to {_MAX_NAME_LENGTH}")
        if self.dtype not in NUMPY_TYPES:
            raise SnapshotError(f"tensor {self.name!r} has dtype {self.dtype!r}: expected {', '.join(NUMPY_TYPES)}")
        if len(self.shape) > _MAX_DIMENSIONS or any(size < 0 for size in self.shape):
            raise SnapshotError(
                f"tensor {self.name!r} has shape {self.shape}: expected at most {_MAX_DIMENSIONS} sizes, none negative"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return math.prod(self.shape) * NUMPY_TYPES[self.dtype].itemsize


@dataclass(frozen=True)
class SnapshotHeader:
    """What a snapshot is, and how its bytes are recognised. `published_at` is in seconds since 1970."""

    run_id: str
    identity: PolicyIdentity
    learner_step: int
    environment_step_count: int
    published_at: float
    payload_bytes: int
    payload_sha256: bytes
    tensors: tuple[TensorDescription, ...]
    actor_semantics_json: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.tensors) <= MAX_TENSOR_COUNT:
            raise SnapshotError(f"a snapshot has {len(self.tensors)} tensors: expected 1 to {MAX_TENSOR_COUNT}")
        # Python integers: a header that claims 10^12 elements is counted, never allocated.
        least = sum(tensor.nbytes for tensor in self.tensors)
        most = min(MAX_PAYLOAD_BYTES, least + 1_024 + _ENVELOPE_BYTES_PER_TENSOR * len(self.tensors))
        if not least < self.payload_bytes <= most:
            raise SnapshotError(
                f"a snapshot claims {self.payload_bytes} bytes for tensors of {least} bytes: "
                f"expected more than the tensors and at most {most}"
            )
        if len(self.payload_sha256) != 32:
            raise SnapshotError(f"a snapshot's SHA-256 has {len(self.payload_sha256)} bytes: expected 32")


def describe(actor: Actor) -> tuple[TensorDescription, ...]:
    """Every parameter and buffer of the actor, in its own order."""
    return tuple(
        TensorDescription(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in actor.named_tensors()
    )


def pack_state(actor: Actor) -> bytes:
    """All parameters and buffers of the actor as safetensors, copied: later updates do not reach the bytes.

    Raises:
        NonFiniteError: names the first tensor that holds a NaN or an infinity.
    """
    from safetensors.torch import save

    state = {}
    for name, tensor in actor.named_tensors():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise NonFiniteError(
                f"tensor {name!r} of the actor holds a NaN or an infinity: nothing of it is published; the last "
                "checkpoint is finite, so resume from there with a smaller learning rate"
            )
        state[name] = tensor.detach().contiguous()
    return save(state)


def make_header(
    actor: Actor,
    payload: bytes,
    *,
    run_id: str,
    identity: PolicyIdentity,
    learner_step: int,
    environment_step_count: int,
    published_at: float,
) -> SnapshotHeader:
    """The header of what `pack_state(actor)` gave."""
    return SnapshotHeader(
        run_id=run_id,
        identity=identity,
        learner_step=learner_step,
        environment_step_count=environment_step_count,
        published_at=published_at,
        payload_bytes=len(payload),
        payload_sha256=hashlib.sha256(payload).digest(),
        tensors=describe(actor),
        actor_semantics_json=actor.semantics.to_json(),
    )


def verify(header: SnapshotHeader, payload: bytes | bytearray | memoryview) -> None:
    """Raise SnapshotError unless these are the bytes that the header describes: length, then SHA-256."""
    if len(payload) != header.payload_bytes:
        raise SnapshotError(
            f"snapshot {header.identity} has {len(payload)} bytes: expected {header.payload_bytes}; fetch it again"
        )
    digest = hashlib.sha256(payload).digest()
    if digest != header.payload_sha256:
        raise SnapshotError(
            f"snapshot {header.identity} has SHA-256 {digest.hex()}: expected {header.payload_sha256.hex()}; "
            "its bytes were damaged on the way, fetch it again"
        )


class StagedActor:
    """A live actor that takes snapshots whole or not at all.

    Parameters and buffers become views of one flat tensor per dtype, so that a snapshot is applied with one copy each.
    `stage` and `lay` may run on any one thread while another acts; `apply` belongs to that one, between two steps.
    """

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self._descriptions = describe(actor)
        self._live, self._staged, self._staged_views = _flatten(actor)
        self._staged_header: SnapshotHeader | None = None
        self._lock = threading.Lock()

    def require_fits(self, header: SnapshotHeader) -> None:
        """Raise unless the snapshot is one of this actor. Needs no payload: call it before fetching one.

        Raises:
            ActorSemanticsError: names the field of the semantics that differs, or says that they are missing.
            SnapshotError: names the tensor that is missing, unknown, or of another dtype or shape.
        """
        mine = self.actor.semantics
        mine.require_same(type(mine).from_json(header.actor_semantics_json))
        _require_same_tensors(self._descriptions, header.tensors, header.identity)

    def stage(self, header: SnapshotHeader, payload: bytes | bytearray | memoryview) -> None:
        """Check a snapshot and lay it ready. The live actor does not change, whatever happens here.

        What was staged before is replaced only on success. Raises as `check` does.
        """
        self.lay(header, self.check(header, payload))

    def check(self, header: SnapshotHeader, payload: bytes | bytearray | memoryview) -> dict[str, torch.Tensor]:
        """The tensors of a snapshot, by name, once it has passed every check; nothing changes.

        Checks the semantics field by field, then the tensors' names, dtypes and shapes, then length and hash, then that
        the payload holds those tensors and only finite values.

        Raises:
            ActorSemanticsError, SnapshotError: as `require_fits` and `verify` do.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        self.require_fits(header)
        verify(header, payload)
        try:
            tensors = load(bytes(payload))
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise SnapshotError(f"snapshot {header.identity} is not safetensors: {error}") from error
        held = tuple(
            TensorDescription(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()
        )
        _require_same_tensors(self._descriptions, held, header.identity)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise SnapshotError(f"snapshot {header.identity}: tensor {name!r} holds a NaN or an infinity")
        return tensors

    def lay(self, header: SnapshotHeader, tensors: dict[str, torch.Tensor]) -> None:
        """Lay a snapshot ready whose tensors `check` gave."""
        with self._lock:
            for name, view in self._staged_views.items():
                view.copy_(tensors[name])
            self._staged_header = header

    def apply(self) -> SnapshotHeader | None:
        """Bring the staged snapshot into the live actor; its header, or None where there is nothing to apply.

        Never waits: while `stage` is writing, it leaves the snapshot to the next call.
        """
        if self._staged_header is None or not self._lock.acquire(blocking=False):
            return None
        try:
            header, self._staged_header = self._staged_header, None
            for live, staged in zip(self._live, self._staged, strict=True):
                live.copy_(staged)
            return header
        finally:
            self._lock.release()


def _flatten(actor: Actor) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Make the actor's tensors views of one flat tensor per dtype; that, its double, and the views of the double."""
    import torch

    groups: dict[torch.dtype, dict[str, torch.Tensor]] = {}
    for name, tensor in actor.named_tensors():
        groups.setdefault(tensor.dtype, {})[name] = tensor
    live, double, views = [], [], {}
    with torch.no_grad():
        for group in groups.values():
            flat = torch.cat([tensor.detach().flatten() for tensor in group.values()])
            staged = torch.empty_like(flat)
            position = 0
            for name, tensor in group.items():
                end = position + tensor.numel()
                tensor.data = flat[position:end].view(tensor.shape)
                views[name] = staged[position:end].view(tensor.shape)
                position = end
            live.append(flat)
            double.append(staged)
    return live, double, views


def _require_same_tensors(
    mine: tuple[TensorDescription, ...], theirs: tuple[TensorDescription, ...], identity: PolicyIdentity
) -> None:
    wanted, given = ({tensor.name: tensor for tensor in each} for each in (mine, theirs))
    missing, unknown = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or unknown or len(given) != len(theirs):
        raise SnapshotError(
            f"snapshot {identity} lacks tensors {missing}, has unknown ones {unknown}, and names {len(theirs)}: "
            f"expected exactly the {len(mine)} of the actor"
        )
    for name, tensor in wanted.items():
        if given[name] != tensor:
            raise SnapshotError(
                f"snapshot {identity}: tensor {name!r} is {given[name].dtype}{list(given[name].shape)}: "
                f"expected {tensor.dtype}{list(tensor.shape)}"
            )
