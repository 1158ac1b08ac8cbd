"""Batches of several shards as if they were of one table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import DeadlineError, StarvedError, StarvedForGoodError
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources.batch import SHARD_BITS, Batch, BatchSource, RowCounts, RowsEndedError, ShardSource
from paceline.learner.sources.queued import QueueSource
from paceline.telemetry import get_logger

_LOOK_UP_SECONDS = 0.1
"""A wait for one shard looks up this often, to see that it went away."""
HELD_BACK_SECONDS = 1.0
"""A shard whose limiter lets no sample pass is waited for so long; then the others give what it would have given."""
_TURN_SECONDS = 0.005
"""While no shard has a batch, each is waited for so long in turn."""
RENEWED_AFTER = 8
"""Batches that the rows which a shard drew at once may go into, where they may be drawn anew. Shards of like size need
two; renewed so seldom, no more than an eighth of what is drawn goes to waste."""


@dataclass
class _Shard:
    """One shard's source, and the batch of it that is being used up."""

    source: ShardSource
    batch: Batch | None = None
    used: int = 0
    age: int = 0
    """Batches that were begun since it came."""
    counts: RowCounts = field(default_factory=RowCounts)
    waits_since: float | None = None
    """Its limiter has let nothing pass since then, though it was asked."""
    is_held_back: bool = False
    """It has done so for `HELD_BACK_SECONDS`, and others give instead."""
    is_spent: bool = False
    """All rows that it will ever have are beyond the bound on the lag."""

    @property
    def left(self) -> int:
        """Rows of its batch that no batch has yet."""
        return 0 if self.batch is None else len(self.batch.rows) - self.used

    @property
    def weight(self) -> int:
        """Rows that may be drawn from it, as far as is known, so each row of all shards is as likely as the others."""
        if self.is_spent:
            return 0
        if self.counts.drawable_row_count is not None:
            return self.counts.drawable_row_count
        # With `max_times_sampled` its batch may have taken all that there were.
        return self.counts.table_row_count or self.left

    @property
    def has_begun(self) -> bool:
        """Whether it ever had rows enough for a batch."""
        return self.counts.inserted_row_count > 0

    @property
    def is_here(self) -> bool:
        """Whether it may be counted on."""
        return self.left > 0 or not (self.source.is_away or self.is_held_back)

    @property
    def is_waited_for(self) -> bool:
        """Whether others give less than they could while it has no batch: collectors that have yet to begin will."""
        return self.is_here and not self.is_spent and (self.weight > 0 or not self.has_begun)

    def next_batch(self, seconds: float) -> Batch:
        """Its source's next batch. Raises DeadlineError when there is none within `seconds`."""
        try:
            return self.source.next_batch(seconds)
        except StarvedForGoodError:
            self.is_spent = True
            raise

    def look(self) -> None:
        """Take over what its source knows of its rows, if that is news."""
        self.counts = self.source.counts or self.counts

    def drop(self) -> None:
        """Have no batch take what is left."""
        if self.left:
            self.source.give_back(self.left)
        self.batch = None


class _InsertedRows:
    """Rows that all shards together ever got, of which some may have said nothing yet."""

    def __init__(self, shard_count: int) -> None:
        self._counts = [0] * shard_count
        self._is_heard = [False] * shard_count
        self._unheard_rows = 0

    def go_on_from(self, counts: Sequence[int | None], least: int) -> None:
        """What each shard said, None where it is away. All have `least` at least: what is missing, those have."""
        self._counts = [count or 0 for count in counts]
        self._is_heard = [count is not None for count in counts]
        self._unheard_rows = 0 if all(self._is_heard) else max(0, least - sum(self._counts))

    def note(self, shard: int, count: int) -> None:
        """A shard says how many it ever got; 0: it says nothing."""
        if not count:
            return
        self._counts[shard] = count
        if self._is_heard[shard]:
            return
        self._is_heard[shard] = True
        self._unheard_rows = max(0, self._unheard_rows - count)
        if all(self._is_heard) and self._unheard_rows:
            get_logger().warning(
                "shard_lost_rows",
                rows=self._unheard_rows,
                meaning="a shard that was away came back with fewer rows than the checkpoint knows: no update is owed "
                "until collectors have made up for them; a learner that starts again forgives them at once",
            )
            self._unheard_rows = 0

    @property
    def total(self) -> int:
        """Over all shards."""
        return sum(self._counts) + self._unheard_rows


class ShardedSource:
    """Batches that mix rows of all shards: each row's shard is drawn with a probability in proportion to its rows.

    Of a table with a bound on the lag those within the bound count. How many there are is known from the shard's last
    batch, or better where its source has newer news. Such a batch is of a fixed size and used up row by row.

    A batch of a shard with few rows would last for hundreds of updates. What is left of it after `RENEWED_AFTER` gives
    way to another, if one is there without waiting. A source that follows has what was left count as not drawn. Where
    replay counts draws (`counts_draws`) each row is used, however old: it might never come again, or the ratio would
    hold the shard back for rows that nobody learned from.

    A shard that is away is left out, which is counted, until it is back. One that its limiter holds back is waited for,
    and after a while left out, too: its collectors may all be gone. The others are sampled no more often for it than
    the ratio says, since each has a limiter of its own. One that never had rows enough is waited for as long as it
    takes, and one that just has none to draw is not waited for while others have.
    """

    def __init__(
        self,
        sources: Sequence[ShardSource],
        *,
        batch_size: int,
        seed: int,
        metrics: LearnerMetrics,
        counts_draws: bool = False,
    ) -> None:
        """`counts_draws`: replay bounds draws, by a ratio or of each row, and they cannot be given back."""
        self._inserted = _InsertedRows(len(sources))
        self._shards = [_Shard(source) for source in sources]
        self._batch_size, self._metrics, self._counts_draws = batch_size, metrics, counts_draws
        for number in range(len(sources)):
            metrics.shard_skips.labels(str(number))  # served as 0: the first one is no growth otherwise
        self._random = np.random.default_rng(seed)
        self._rows: torch.Tensor | None = None
        self._details: dict[str, npt.NDArray[Any]] = {}
        """What the shards' batches say of their rows, by its name in `Batch`."""
        self._filled = 0
        # Rows that each shard still has to give to the batch in the making; None where none is in the making.
        self._wanted: npt.NDArray[np.int64] | None = None
        self._share = np.zeros(len(self._shards))

    def go_on_from(self, inserted_row_counts: Sequence[int | None], least: int) -> None:
        """Rows that each shard ever got, None where it is away; all together got `least` at least."""
        self._inserted.go_on_from(inserted_row_counts, least)

    def next_batch(self, seconds: float) -> Batch:
        """The next batch. Raises DeadlineError, with the reason, when there is none within `seconds`.

        What was gathered until then goes into the next one.

        Raises:
            StarvedForGoodError: no shard will ever have a row within the bound on the lag again.
        """
        until = time.monotonic() + seconds
        while not self._gather(until):
            self._wait_for_any(until, seconds)
        assert self._rows is not None
        counts = [shard.counts for shard in self._shards]
        for number, each in enumerate(counts):
            self._inserted.note(number, each.inserted_row_count)
        drawable = [
            0 if shard.is_spent else shard.counts.drawable_row_count
            for shard in self._shards
            if shard.counts.inserted_row_count
        ]
        return Batch(
            self._rows,
            sum(each.table_row_count for each in counts),
            self._inserted.total,
            drawable_row_count=None if None in drawable else sum(each or 0 for each in drawable),
            **self._details,
        )

    def update_priorities(self, keys: npt.NDArray[np.int64], priorities: npt.NDArray[np.float32]) -> None:
        """Have each shard told the priorities of its rows."""
        owner = keys >> SHARD_BITS
        for number, shard in enumerate(self._shards):
            if (mine := owner == number).any():
                shard.source.update_priorities(keys[mine] & ((1 << SHARD_BITS) - 1), priorities[mine])

    def set_policy_version(self, version: int) -> None:
        """Note the newest policy version."""
        for shard in self._shards:
            shard.source.set_policy_version(version)

    def close(self) -> None:
        """Stop fetching."""
        _close_all([shard.source for shard in self._shards])

    def _gather(self, until: float) -> bool:
        """Go on with the batch in the making until it is full; False: no shard has rows to give now.

        Raises:
            DeadlineError: a shard that is not away gave none until then, and no other could instead.
        """
        if self._wanted is None:
            for number in range(len(self._shards)):
                self._look_at(number, until)
            wanted = self._draw(self._batch_size)
            if wanted is None:
                return False
            self._wanted, self._filled = wanted, 0
            for number, shard in enumerate(self._shards):
                shard.age += 1
                if not shard.is_here:
                    self._metrics.shard_skips.labels(str(number)).inc()
        for number, shard in enumerate(self._shards):
            while self._wanted[number]:
                if shard.left or self._fetch(number, until):
                    self._copy(number)
                    continue
                # It went away amid the batch, or is held back or empty: the others give what it would have given.
                instead = self._draw(int(self._wanted[number]))
                if instead is None:
                    return False
                if not shard.is_here:
                    self._metrics.shard_skips.labels(str(number)).inc()
                self._wanted[number] = 0
                self._wanted += instead
        if self._wanted.any():  # of a shard before the one that went away
            return self._gather(until)
        self._wanted = None
        return True

    def _look_at(self, number: int, until: float) -> None:
        """Bring up to date what is known of a shard before a batch, and its own batch if that is old or used up."""
        shard = self._shards[number]
        shard.look()
        if shard.left and not shard.weight:
            shard.drop()  # the bound on the lag has passed them all
        if shard.left:
            if shard.age >= RENEWED_AFTER and not self._counts_draws:
                self._ask(shard)
        elif not (shard.is_here and shard.weight):
            self._fetch(number, until)  # it may be back

    def _wait_for_any(self, until: float, seconds: float) -> None:
        """Wait for a moment, in which a shard may come to have rows to give. Raises DeadlineError, with the reason."""
        reason: DeadlineError | None = None
        for number, shard in enumerate(self._shards):
            if shard.left or shard.source.is_away:
                continue
            try:
                self._take(shard, shard.next_batch(min(max(until - time.monotonic(), 0), _TURN_SECONDS)))
                return
            except DeadlineError as error:
                reason = _of_shard(number, error)
        if reason is not None and all(shard.is_spent for shard in self._shards):
            raise StarvedForGoodError(str(reason))
        left = until - time.monotonic()
        if left <= 0:
            raise reason or DeadlineError(
                f"no batch within {seconds:g} s: no shard of replay has rows to give, each is away"
            )
        if reason is None:
            time.sleep(min(left, _LOOK_UP_SECONDS))

    def _draw(self, row_count: int) -> npt.NDArray[np.int64] | None:
        """How many of so many rows come from each shard; None when none of them is here."""
        weight = np.array([shard.weight * shard.is_here for shard in self._shards], np.float64)
        if not weight.any():
            return None
        self._share = weight / weight.sum()
        drawn: npt.NDArray[np.int64] = self._random.multinomial(row_count, self._share)
        return drawn

    def _fetch(self, number: int, until: float) -> bool:
        """Take a shard's next batch. False: it is away, held back or empty. Raises DeadlineError, with its reason."""
        shard = self._shards[number]
        while True:
            now = time.monotonic()
            left = until - now
            wait = min(max(left, 0), _LOOK_UP_SECONDS) if shard.is_waited_for else 0
            try:
                self._take(shard, shard.next_batch(wait))
                return True
            except DeadlineError as error:
                shard.look()
                if not shard.is_waited_for:
                    return False
                if shard.has_begun:
                    # A wait may go on over several calls.
                    since = shard.waits_since = now if shard.waits_since is None else shard.waits_since
                    if now - since >= HELD_BACK_SECONDS and self._can_another(number):
                        shard.is_held_back = True
                        return False
                if left <= wait:
                    raise _of_shard(number, error) from error

    def _can_another(self, number: int) -> bool:
        """Whether a shard other than this one has rows to give, or may have soon."""
        for other, shard in enumerate(self._shards):
            if other != number and not shard.is_spent:
                if not shard.is_here:
                    self._ask(shard)
                if shard.is_here:
                    return True
        return False

    def _ask(self, shard: _Shard) -> None:
        """Take a shard's next batch if it is there."""
        with suppress(DeadlineError):
            self._take(shard, shard.next_batch(0))

    def _take(self, shard: _Shard, batch: Batch) -> None:
        shard.drop()
        shard.batch, shard.used, shard.age = batch, 0, 0
        # A spent one may have lost the end of its record, and then get rows anew.
        shard.waits_since, shard.is_held_back, shard.is_spent = None, False, False
        shard.counts = RowCounts(batch.table_row_count, batch.inserted_row_count, batch.drawable_row_count)

    def _copy(self, number: int) -> None:
        """Move rows of a shard's batch into the batch in the making, as many as are there and wanted."""
        shard = self._shards[number]
        assert shard.batch is not None
        assert self._wanted is not None
        batch, count = shard.batch, min(shard.left, int(self._wanted[number]))
        from_, into = slice(shard.used, shard.used + count), slice(self._filled, self._filled + count)
        if self._rows is None:
            self._rows = batch.rows.new_empty((self._batch_size, batch.rows.shape[1]))
        self._rows[into].copy_(batch.rows[from_])
        if batch.keys is not None:
            self._detail("keys", np.int64)[into] = batch.keys[from_] | number << SHARD_BITS
        if batch.probabilities is not None:
            self._detail("probabilities", np.float32)[into] = batch.probabilities[from_] * self._share[number]
        if batch.stored_at is not None:
            self._detail("stored_at", np.float64)[into] = batch.stored_at[from_]
        shard.used += count
        self._filled += count
        self._wanted[number] -= count

    def _detail(self, name: str, dtype: type[Any]) -> npt.NDArray[Any]:
        if name not in self._details:
            self._details[name] = np.empty(self._batch_size, dtype)
        return self._details[name]


def _of_shard(number: int, error: DeadlineError) -> DeadlineError:
    # That one has no row for good says nothing of the others.
    kind = StarvedError if isinstance(error, StarvedForGoodError) else type(error)
    return kind(f"shard {number}: {error}")


def _close_all(sources: Sequence[BatchSource]) -> None:
    """At once: each may wait for its shard."""
    with ThreadPoolExecutor(len(sources)) as threads:
        list(threads.map(lambda source: source.close(), sources))


class QueueShards:
    """Batches of several queues, each batch of one of them, in turn as they have one."""

    def __init__(self, sources: Sequence[QueueSource]) -> None:
        self._sources = list(sources)
        self._table_rows = [0] * len(sources)
        self._inserted = _InsertedRows(len(sources))
        self._turn = 0

    def go_on_from(self, inserted_row_counts: Sequence[int | None], least: int) -> None:
        """As `ShardedSource.go_on_from`."""
        self._inserted.go_on_from(inserted_row_counts, least)

    def next_batch(self, seconds: float) -> Batch:
        """The next batch; the one before is consumed. Raises DeadlineError when there is none within `seconds`.

        Raises:
            RowsEndedError: every row of every shard was in a batch.
        """
        until = time.monotonic() + seconds
        self.consume()
        while True:
            ended = 0
            for _ in self._sources:
                self._turn = (self._turn + 1) % len(self._sources)
                try:
                    batch = self._sources[self._turn].next_batch(_TURN_SECONDS)
                except DeadlineError as error:
                    reason = error
                    ended += isinstance(error, RowsEndedError)
                    continue
                self._table_rows[self._turn] = batch.table_row_count
                self._inserted.note(self._turn, batch.inserted_row_count)
                return replace(batch, table_row_count=sum(self._table_rows), inserted_row_count=self._inserted.total)
            if ended == len(self._sources):
                raise reason
            if time.monotonic() >= until:
                raise DeadlineError(f"shard {self._turn}: {reason}")

    def consume(self) -> None:
        """The last batch was learned from."""
        self._sources[self._turn].consume()

    def update_priorities(self, keys: npt.NDArray[np.int64], priorities: npt.NDArray[np.float32]) -> None:
        """Rows of a queue have no priorities."""

    def set_policy_version(self, version: int) -> None:
        """Queues do not look at it."""

    def close(self) -> None:
        """Stop fetching."""
        _close_all(self._sources)
