"""Who follows a table: what each has asked for and reported, and which of them counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from paceline.errors import ReplacedError
from paceline.replay.metrics import TableMetrics


@dataclass(eq=False)
class Follower:
    """One Follow stream. Its caller's later requests change it while rows are sent."""

    wanted_before: int | None = None
    """Rows before this key may be sent; None: all."""
    limiter_wait_seconds: float = 0.0
    """For how long its copy of the limiter has held it back, ever, as it said last."""
    released_before: int = 0
    """It has no more use for the rows before this key in the memory that it offered."""
    is_replaced: bool = False
    """A newer one took over."""

    def want(self, before: int) -> None:
        """Rows before `before` may be sent too."""
        if self.wanted_before is not None:
            self.wanted_before = max(self.wanted_before, before)

    def release(self, before: int) -> None:
        """The rows before `before` need not stay in its memory."""
        self.released_before = max(self.released_before, before)

    def count_wait(self, seconds: float) -> float:
        """The limiter has held it back for so long, ever; by how much that has grown."""
        grown = max(0.0, seconds - self.limiter_wait_seconds)
        self.limiter_wait_seconds += grown
        return grown

    def wanted_rows(self, first_row: int, most: int) -> int:
        """How many rows from `first_row` on may be sent, `most` of them at once."""
        return most if self.wanted_before is None else max(0, min(most, self.wanted_before - first_row))


class Followers:
    """Of the followers that report progress on one table, the newest counts and the older ones end.

    Two that consume a queue would each miss what the other got; two that report samples would each stand for all.
    """

    def __init__(self, table: str, metrics: TableMetrics) -> None:
        self._table, self._metrics = table, metrics
        self._lock = threading.Lock()
        self._newest: Follower | None = None

    def take_over(self, follower: Follower) -> None:
        """`follower` reports progress. Raises ReplacedError if a newer one does."""
        self.require_current(follower)
        with self._lock:
            if self._newest is not follower and self._newest is not None:
                self._newest.is_replaced = True
                self._metrics.replaced_followers.inc()
            self._newest = follower

    def leave(self, follower: Follower) -> None:
        """`follower` has ended."""
        with self._lock:
            if self._newest is follower:
                self._newest = None

    def require_current(self, follower: Follower) -> None:
        """Raise ReplacedError if a newer one took over."""
        if follower.is_replaced:
            raise ReplacedError(
                f"a newer follower of table {self._table!r} took over: this one should end; "
                "two that report progress on one table would each miss what the other got"
            )
