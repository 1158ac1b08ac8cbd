"""Where verified snapshots lie until the acting thread applies one: the newest, or an older one that is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.lag.bound import LagBound
from paceline.lag.injection import Injector
from paceline.replica.standing import Standings
from paceline.snapshot import SnapshotHeader, StagedActor

if TYPE_CHECKING:
    import torch

Payload = bytes | bytearray | memoryview


class Staging(Protocol):
    """`lay` belongs to the polling thread, the others to the acting one."""

    def lay(self, header: SnapshotHeader, payload: Payload) -> None:
        """Verify a snapshot and lay it ready. Raises as `StagedActor.stage` does; then nothing has changed."""

    def is_ready(self, environment_steps: int) -> bool:
        """Whether there is one to apply, that many steps into one's work."""

    def apply(self) -> SnapshotHeader | None:
        """Bring it into the live actor; None: not at this moment. Never waits."""


class NewestStaging:
    """Holds the newest snapshot only."""

    def __init__(self, staged: StagedActor) -> None:
        self._staged = staged
        self._laid: SnapshotHeader | None = None
        self._applied: SnapshotHeader | None = None

    def lay(self, header: SnapshotHeader, payload: Payload) -> None:
        """As `Staging`."""
        self._staged.stage(header, payload)
        self._laid = header

    def is_ready(self, environment_steps: int) -> bool:
        """As `Staging`."""
        # Comparing which object it is costs the acting thread nothing.
        return self._laid is not self._applied

    def apply(self) -> SnapshotHeader | None:
        """As `Staging`."""
        header = self._staged.apply()
        if header is None:
            return None  # the next one is being written; it comes with the next call
        self._applied = header
        return header


@dataclass(frozen=True)
class _Snapshot:
    header: SnapshotHeader
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Held:
    versions: tuple[int, ...] = ()
    snapshots: tuple[_Snapshot, ...] = ()


class InjectedStaging:
    """Holds the snapshots that an injected lag may still ask for: at most its largest lag and two more.

    The bound goes before the injection: a policy that is over it gives way to the oldest one within it, since a
    collector that pauses would never reach the step at which a trace has the next one.
    """

    def __init__(self, staged: StagedActor, injector: Injector, bound: LagBound, standings: Standings) -> None:
        self._staged, self._injector, self._bound, self._standings = staged, injector, bound, standings
        self._held = _Held()
        self._chosen: _Snapshot | None = None

    @property
    def held_versions(self) -> tuple[int, ...]:
        """Of the snapshots that are kept, rising."""
        return self._held.versions

    def lay(self, header: SnapshotHeader, payload: Payload) -> None:
        """As `Staging`."""
        snapshots = (*self._held.snapshots, _Snapshot(header, self._staged.check(header, payload)))
        versions = tuple(held.header.identity.version for held in snapshots)
        first = versions.index(self._injector.oldest_wanted(versions, header.identity.version))
        self._held = _Held(versions[first:], snapshots[first:])

    def is_ready(self, environment_steps: int) -> bool:
        """As `Staging`."""
        held = self._held
        if self._chosen is None and (version := self._choose(held.versions, environment_steps)) is not None:
            self._chosen = held.snapshots[held.versions.index(version)]
        return self._chosen is not None

    def apply(self) -> SnapshotHeader | None:
        """As `Staging`."""
        chosen, self._chosen = self._chosen, None
        if chosen is None:
            return None
        self._staged.lay(chosen.header, chosen.tensors)
        return self._staged.apply()

    def _choose(self, versions: tuple[int, ...], environment_steps: int) -> int | None:
        known, applied = self._standings.known, self._standings.applied
        if not versions or known is None:
            return None
        applied_version = None if applied is None else applied.identity.version
        chosen = self._injector.next_version(
            versions,
            known_version=known.version,
            applied_version=applied_version,
            environment_steps=environment_steps,
        )
        acting = applied_version if chosen is None else chosen
        if self._bound.max_lag_versions is None or acting is None or self._bound.admit(acting, known.version).may_act:
            return chosen
        least = self._bound.oldest_within(known.version)
        return next((version for version in versions if version >= least), chosen)
