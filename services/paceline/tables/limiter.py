"""When a table lets inserts and samples pass.

Let deviation = (inserted - min_rows) * samples_per_insert - sampled, in sampled rows. It is kept within half a window
to either side of 0: inserts wait at the upper edge, samples at the lower one, and samples wait for `min_rows` first.
Until these are there no insert waits: the block that brings the last of them may go beyond the upper edge.
When the table has all the rows it will ever get, samples run free: no insert could release them any more.
Rows that are too old for the bound on the lag will not be sampled, and only newer ones let samples go on: so inserts do
not wait for what such rows owe (`waive_before`). It stays owed, and the ratio is made up for with rows that come later.

Two more bounds may hold a side back: inserts wait for room (a queue that is full), samples for rows that may still be
drawn (`max_times_sampled`). Whoever moves one of these calls `wake`.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from paceline.errors import ConfigError, InvalidInputError, LimiterTimeoutError, PacelineError

Ended = Callable[[], PacelineError | None]
"""Why a wait must end now (the caller is gone, the service stops), or None."""
Bound = Callable[[], int | None]
"""Rows that may pass now, or None: any number."""


def _unbounded() -> None:
    return None


@dataclass(frozen=True)
class LimiterSettings:
    """What a limiter holds. `samples_per_insert` and `window_rows` are both None where the ratio runs free."""

    min_rows: int
    samples_per_insert: float | None
    window_rows: float | None
    deadline_seconds: float

    def __post_init__(self) -> None:
        if (self.samples_per_insert is None) != (self.window_rows is None):
            raise ConfigError(
                f"samples_per_insert is {self.samples_per_insert} and window_rows {self.window_rows}: "
                "expected both, or neither where the ratio runs free"
            )

    def require_room(self, *, batch_rows: int, block_rows: int, setting: str = "limiter.window_rows") -> None:
        """Raise ConfigError, with the smallest valid window, if some state would hold both sides back for ever.

        `setting` is what the message calls the window.
        """
        if self.samples_per_insert is None or self.window_rows is None:
            return
        # Both wait where w/2 - block * ratio < deviation < batch - w/2: impossible from this width on.
        smallest = batch_rows + math.ceil(block_rows * self.samples_per_insert)
        if self.window_rows < smallest:
            raise ConfigError(
                f"{setting} is {self.window_rows:g}: expected at least {smallest}, one batch of "
                f"{batch_rows} rows and one block of {block_rows} rows sampled {self.samples_per_insert:g} times each, "
                "or both sides wait for each other"
            )

    def to_json(self) -> str:
        """Canonical JSON, to compare with what an earlier process stored."""
        return json.dumps(asdict(self), sort_keys=True)


class Limiter:
    """The limiter of one table, shared by all its streams. Waits end at the deadline, at `ended`, or when released."""

    def __init__(
        self,
        table: str,
        settings: LimiterSettings,
        *,
        inserted: int = 0,
        sampled: int = 0,
        room: Bound = _unbounded,
        drawable: Bound = _unbounded,
    ) -> None:
        """`room`: rows that fit before others leave; `drawable`: draws left. Both are called with a lock held."""
        self.settings = settings
        self._table, self._room, self._drawable = table, room, drawable
        self._changed = threading.Condition()
        self._inserted, self._sampled = inserted, sampled
        self._reserved = 0
        """Rows that may be inserted and are not yet."""
        self._granted = 0
        """Rows that may be sampled and are not yet, where `drawable` counts them."""
        self._waived_before = 0
        """Key before which no row will be sampled, and inserts wait for none to be; 0: they do for all."""
        self._complete = False

    @property
    def inserted(self) -> int:
        """Rows ever inserted."""
        return self._inserted

    @property
    def sampled(self) -> int:
        """Rows ever sampled."""
        return self._sampled

    def reserve_insert(self, row_count: int, ended: Ended) -> None:
        """Wait until `row_count` rows may be inserted, and set them aside; then `settle_insert` must follow.

        Raises:
            InvalidInputError: no state of the window would let so many rows pass.
            LimiterTimeoutError: the deadline came first; the message says what it waited for.
            PacelineError: what `ended` gave.
        """
        ratio, window = self.settings.samples_per_insert, self.settings.window_rows
        if ratio is not None and window is not None and row_count * ratio > window:
            raise InvalidInputError(
                f"a block of {row_count} rows, each sampled {ratio:g} times: expected at most "
                f"{int(window / ratio)} rows, what limiter.window_rows = {window:g} lets pass at once"
            )
        with self._changed:
            self._wait(lambda: self._may_insert(row_count), lambda: self._why_insert(row_count), ended)
            self._reserved += row_count

    def settle_insert(self, reserved: int, stored: int) -> None:
        """Of `reserved` rows `stored` were inserted (0: none, the insert failed or was a repeat)."""
        with self._changed:
            self._reserved -= reserved
            self._inserted += stored
            self._changed.notify_all()

    def grant_samples(self, batch_size: int, batch_count: int, ended: Ended, *, wait: bool = True) -> int:
        """How many of `batch_count` batches may be sampled now; they count as sampled.

        Waits for the first one, unless `wait` is False: then the answer may be 0. Where the table's draws are bounded,
        `settle_samples` must follow.

        Raises:
            InvalidInputError: no state of the window would let such a batch pass.
            LimiterTimeoutError: the deadline came first; the message says what it waited for.
            PacelineError: what `ended` gave.
        """
        window = self.settings.window_rows
        if window is not None and batch_size > window:
            raise InvalidInputError(
                f"a batch of {batch_size} rows: expected at most {window:g}, what limiter.window_rows lets pass at once"
            )
        with self._changed:
            if wait:
                self._wait(lambda: self._free_batches(batch_size) > 0, lambda: self._why_sample(batch_size), ended)
            granted = int(min(batch_count, self._free_batches(batch_size)))
            if granted:
                self._sampled += granted * batch_size
                self._granted += granted * batch_size
                self._changed.notify_all()
            return granted

    def settle_samples(self, granted: int, drawn: int) -> None:
        """Of `granted` rows `drawn` were drawn; the others do not count as sampled."""
        with self._changed:
            self._granted -= granted
            self._sampled -= granted - drawn
            self._changed.notify_all()

    def raise_sampled(self, sampled: int) -> None:
        """Have at least so many rows count as sampled: a follower that draws from its own copy reports them."""
        with self._changed:
            if sampled > self._sampled:
                self._sampled = sampled
                self._changed.notify_all()

    def waive_before(self, row: int) -> None:
        """Have inserts pass as if all that rows before key `row` owe had been sampled; never goes back.

        The counts stay what they are. Of what comes after `row`, a window's worth may pass before it is sampled, so any
        block may.
        """
        with self._changed:
            # Of rows to come nobody can say that; some that are there already are about to be settled.
            row = min(row, self._inserted + self._reserved)
            if row > self._waived_before:
                self._waived_before = row
                self._changed.notify_all()

    def restore(self, *, inserted: int, sampled: int | None = None) -> None:
        """Set the counters to what the record says (None: leave it); the settings stay as they are configured."""
        with self._changed:
            self._inserted = inserted
            self._waived_before = min(self._waived_before, inserted)
            self._sampled = self._sampled if sampled is None else sampled
            self._changed.notify_all()

    @property
    def is_complete(self) -> bool:
        """Whether no row will come any more."""
        return self._complete

    def complete(self) -> None:
        """No further row will be inserted: from now on samples run free."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Have every wait look at its `ended` now."""
        with self._changed:
            self._changed.notify_all()

    def _may_insert(self, row_count: int) -> bool:
        return self._missing_samples(row_count) <= 0 and self._fits(row_count)

    def _fits(self, row_count: int) -> bool:
        room = self._room()
        return room is None or self._reserved + row_count <= room

    def _missing_samples(self, row_count: int) -> float:
        """Sampled rows that must come before a block of `row_count` rows may pass; 0 or less: it may."""
        ratio, window = self.settings.samples_per_insert, self.settings.window_rows
        if ratio is None or window is None:
            return 0
        before, sampled = self._inserted + self._reserved, float(self._sampled)
        if before < self.settings.min_rows:
            return 0  # no sample could come before this block
        if self._waived_before:
            # As at the lower edge, with just these rows.
            sampled = max(sampled, (self._waived_before - self.settings.min_rows) * ratio + window / 2)
        return (before + row_count - self.settings.min_rows) * ratio - sampled - window / 2

    def _free_batches(self, batch_size: int) -> float:
        return min(self._batches_of_ratio(batch_size), self._batches_of_draws(batch_size))

    def _batches_of_draws(self, batch_size: int) -> float:
        drawable = self._drawable()
        return math.inf if drawable is None else max(0, (drawable - self._granted) // batch_size)

    def _batches_of_ratio(self, batch_size: int) -> float:
        if self._complete:
            return math.inf
        if self._inserted < self.settings.min_rows:
            return 0
        ratio, window = self.settings.samples_per_insert, self.settings.window_rows
        if ratio is None or window is None:
            return math.inf
        deviation = (self._inserted - self.settings.min_rows) * ratio - self._sampled
        return max(0, (deviation + window / 2) // batch_size)

    def _wait(self, free: Callable[[], bool], why: Callable[[], str], ended: Ended) -> None:
        until = time.monotonic() + self.settings.deadline_seconds
        while not free():
            error = ended()
            if error is not None:
                raise error
            seconds = until - time.monotonic()
            if seconds <= 0:
                raise LimiterTimeoutError(why())
            self._changed.wait(seconds)

    def _why_insert(self, row_count: int) -> str:
        waited = f"append to table {self._table!r} was held back for {self.settings.deadline_seconds:g} s: "
        if not self._fits(row_count):
            return (
                f"{waited}a block of {row_count} rows, and there is room for {self._room()} until rows that wait are "
                "consumed. It waits for the learner to consume; ask again"
            )
        return (
            f"{waited}{self._inserted} rows are inserted and {self._sampled} sampled; before {row_count} more rows "
            f"fit, {math.ceil(self._missing_samples(row_count))} rows must be sampled "
            f"(samples_per_insert {self.settings.samples_per_insert:g}, window {self.settings.window_rows:g} rows). "
            "It waits for the learner to sample; ask again"
        )

    def _why_sample(self, batch_size: int) -> str:
        waited = f"sample of table {self._table!r} was held back for {self.settings.deadline_seconds:g} s: "
        if self._inserted < self.settings.min_rows:
            return (
                f"{waited}{self._inserted} of the {self.settings.min_rows} rows needed before the first sample are "
                "inserted. It waits for collectors to append; ask again"
            )
        if self._batches_of_ratio(batch_size) > 0:
            return (
                f"{waited}{self._drawable()} draws are left of the rows it holds (max_times_sampled), and a batch "
                f"needs {batch_size}. It waits for collectors to append; ask again"
            )
        return (
            f"{waited}{self._inserted} rows are inserted and {self._sampled} sampled, and a batch of {batch_size} "
            f"would overstep the window ({self.settings.window_rows:g} rows around samples_per_insert "
            f"{self.settings.samples_per_insert:g}). It waits for collectors to append; ask again"
        )
