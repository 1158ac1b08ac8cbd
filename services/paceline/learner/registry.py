"""Who takes part in a run, and what they said last: the run's registry, without wire or disk.

Times are by `clock` (seconds, monotonic). Every method may be called from any thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from paceline.errors import ConflictError, InvalidInputError, ReplacedError, RunFullError
from paceline.identity import PolicyIdentity
from paceline.learner.ledger import Members

COLLECTOR, EVALUATOR = "collector", "evaluator"


@dataclass(frozen=True)
class Place:
    """What a process that joins is given."""

    index: int
    incarnation: int
    warmup_steps: int


@dataclass(frozen=True)
class CollectorState:
    """What is known of a collector that lives."""

    index: int
    incarnation: int
    applied: PolicyIdentity | None
    """The snapshot that it acts with, by its last poll."""
    paused: bool = False
    """Whether it steps no environment until it has applied a newer one, by its last poll."""


@dataclass
class _Holder:
    incarnation: int
    heard_at: float
    process_id: str | None = None
    """None: it joined with an earlier learner process, or came back after a silence."""
    presumed: bool = False
    """Known from an earlier learner process, and not heard by this one."""
    applied: PolicyIdentity | None = None
    paused: bool = False


@dataclass
class _Reports:
    incarnation: int
    sequence: int
    steps_before: int | None
    """What the incarnation had counted when this learner process began to count it; None: it has not begun."""
    steps: int

    def counted(self) -> int:
        """Steps since this learner process began to count."""
        return 0 if self.steps_before is None else self.steps - self.steps_before


class RunRegistry:
    """Gives out indices and incarnations, and refuses those that were replaced."""

    def __init__(
        self,
        members: Members,
        *,
        max_collectors: int,
        silence_seconds: float,
        warmup_steps: int,
        collector_count: int,
        resumed_environment_steps: int = 0,
        resumed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`members` is what the ledger remembers; `resumed` says that the run is past its random warm-up."""
        self._incarnations: Members = {role: dict(members.get(role, {})) for role in (COLLECTOR, EVALUATOR)}
        self._max_collectors, self._silence_seconds = max_collectors, silence_seconds
        self._warmup_steps, self._warmup_share = warmup_steps, math.ceil(warmup_steps / collector_count)
        self._resumed = resumed
        self._clock, self._lock = clock, Lock()
        # Those of an earlier learner process may live and go on without joining again, so their indices are not free.
        self._holders = {
            index: _Holder(number, clock(), presumed=True) for index, number in self._incarnations[COLLECTOR].items()
        }
        self._joined: dict[int, int] = {}
        self._reports: dict[int, _Reports] = {}
        self._resumed_steps, self._published_steps = resumed_environment_steps, 0
        self._evaluated: set[PolicyIdentity] = set()

    def join(self, role: str, index: int | None, process_id: str) -> Place:
        """A place for a process: the index that it names, else the one it has, else the lowest free one.

        Whoever held the index is replaced. Make `members()` durable before the place is told to anyone.

        Raises:
            InvalidInputError: the index is out of range.
            RunFullError: every index is taken by a collector that lives.
        """
        if index is not None and not 0 <= index < self._max_collectors:
            raise InvalidInputError(
                f"index {index}: expected 0 to {self._max_collectors - 1}; collector.max_count, "
                f"{self._max_collectors}, bounds it"
            )
        with self._lock:
            if index is None:
                # There is one evaluator, and a new one replaces it.
                index = self._free_index(process_id) if role == COLLECTOR else 0
            incarnation = self._incarnations[role].get(index, 0) + 1
            self._incarnations[role][index] = incarnation
            warmup_steps = 0
            if role == COLLECTOR:
                self._holders[index] = _Holder(incarnation, self._clock(), process_id)
                self._joined[index] = incarnation
                self._bank_steps(index)
                warm = self._resumed or incarnation > 1 or self._environment_steps() >= self._warmup_steps
                warmup_steps = 0 if warm else self._warmup_share
            return Place(index, incarnation, warmup_steps)

    def members(self) -> Members:
        """What the ledger is to remember."""
        with self._lock:
            return {role: dict(places) for role, places in self._incarnations.items()}

    def polled(self, index: int, incarnation: int, applied: PolicyIdentity | None, *, paused: bool = False) -> bool:
        """Note what a collector acts with; whether it was noted: not when it was replaced, or never joined.

        Reports may come on several ways, through relays too, and overtake each other. A collector never goes back to
        an older snapshot, so one that names an older one than is known is a sign of life and nothing else.
        """
        with self._lock:
            if self._incarnations[COLLECTOR].get(index) != incarnation:
                return False
            holder = self._hear(index, incarnation)
            if applied is None or holder.applied is None or applied >= holder.applied:
                holder.applied, holder.paused = applied or holder.applied, paused
            return True

    def begin_report(self, index: int, incarnation: int, sequence: int, environment_steps: int) -> bool:
        """Note a report of episodes; whether it is new, and its episodes are to be recorded.

        Raises:
            ReplacedError: a newer incarnation took over.
            ConflictError: the incarnation was never given out.
            InvalidInputError: the sequence or the count is out of range.
        """
        if sequence < 1 or environment_steps < 0:
            raise InvalidInputError(
                f"report {sequence} of {environment_steps} environment steps: expected a sequence of 1 or more and a "
                "count of 0 or more"
            )
        with self._lock:
            known = self._incarnations[COLLECTOR].get(index, 0)
            if incarnation < known:
                raise ReplacedError(
                    f"collector {index} has incarnation {known} now, and {incarnation} reports: "
                    "it was replaced and has to end"
                )
            if incarnation > known or incarnation < 1:
                raise ConflictError(
                    f"collector {index} reports as incarnation {incarnation}: expected one that Join gave out, "
                    f"the last was {known}; join first"
                )
            self._hear(index, incarnation)
            reports = self._reports.get(index)
            if reports is None or reports.incarnation != incarnation:
                reports = self._reports[index] = _Reports(incarnation, 0, None, 0)
            if reports.steps_before is None:
                # What a collector counted under an earlier learner process is part of the resumed steps.
                reports.steps_before = 0 if self._joined.get(index) == incarnation else environment_steps
            reports.steps = max(reports.steps, environment_steps)
            if sequence <= reports.sequence:
                return False
            reports.sequence = sequence
            return True

    def recall_report(self, index: int, incarnation: int, sequence: int) -> None:
        """Know a report that an earlier learner process recorded, so that its repeat is not recorded again."""
        with self._lock:
            if self._incarnations[COLLECTOR].get(index) == incarnation:
                self._reports[index] = _Reports(incarnation, sequence, None, 0)

    def begin_evaluation(self, policy: PolicyIdentity) -> bool:
        """Whether the evaluation of this policy is new; from now on it is known."""
        with self._lock:
            if policy in self._evaluated:
                return False
            self._evaluated.add(policy)
            return True

    def published(self, environment_steps: int) -> None:
        """Note the environment steps of the run by the newest snapshot."""
        with self._lock:
            self._published_steps = max(self._published_steps, environment_steps)

    def environment_steps(self) -> int:
        """Environment steps of the whole run, as far as known: by the newest snapshot or by the reports."""
        with self._lock:
            return self._environment_steps()

    def alive(self) -> list[CollectorState]:
        """Collectors heard within the silence, by index. The others are forgotten, but for their incarnation."""
        with self._lock:
            bound = self._clock() - self._silence_seconds
            for index in [index for index, holder in self._holders.items() if holder.heard_at < bound]:
                del self._holders[index]
            return [
                CollectorState(index, holder.incarnation, holder.applied, holder.paused)
                for index, holder in sorted(self._holders.items())
                if not holder.presumed
            ]

    def _free_index(self, process_id: str) -> int:
        now, presumed = self._clock(), None
        for index in range(self._max_collectors):
            holder = self._holders.get(index)
            if (
                holder is None
                or (process_id and holder.process_id == process_id)
                or now - holder.heard_at > self._silence_seconds
            ):
                return index
            if presumed is None and holder.presumed:
                presumed = index
        if presumed is not None:
            return presumed
        raise RunFullError(
            f"all {self._max_collectors} indices are taken: raise collector.max_count, or start fewer collectors; "
            f"the index of one that died is free after {self._silence_seconds:g} s"
        )

    def _hear(self, index: int, incarnation: int) -> _Holder:
        holder = self._holders.get(index)
        if holder is None or holder.incarnation != incarnation:
            holder = self._holders[index] = _Holder(incarnation, self._clock())
        holder.heard_at, holder.presumed = self._clock(), False
        return holder

    def _bank_steps(self, index: int) -> None:
        """Keep what the replaced incarnation counted."""
        reports = self._reports.pop(index, None)
        if reports is not None:
            self._resumed_steps += reports.counted()

    def _environment_steps(self) -> int:
        counted = sum(reports.counted() for reports in self._reports.values())
        return max(self._published_steps, self._resumed_steps + counted)
