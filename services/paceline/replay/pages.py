"""Priorities and times sampled of a table's rows, on their way to the record and back.

They change with every draw, far more often than Redis should be asked: once a second what changed is written, page by
page, and no more in one step than a fraction of a second's work. So a process that is killed forgets the draws and
priorities of its last seconds; one that stops forgets none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

from paceline.errors import BlockError
from paceline.replay.metrics import TableMetrics
from paceline.tables.memory import TableMemory
from paceline.telemetry import get_logger

STEP_PAGES = 1024
"""Pages in one step: 2 MiB, a hundredth of a second for Redis."""


class Pages:
    """What the record does not have yet."""

    def __init__(self, table: str, memory: TableMemory, metrics: TableMetrics) -> None:
        self._table, self._memory = table, memory
        self._waiting: dict[int, bytes] = {}
        self._metrics = metrics

    def restore(self, page: int, data: bytes) -> None:
        """Give a page of the record to memory, or leave it out where it is damaged."""
        try:
            self._memory.restore_page(page, data)
        except BlockError as error:
            self._metrics.damaged_pages.inc()
            get_logger().error("page_damaged", table=self._table, page=page, error=str(error))

    @contextmanager
    def changed(self, *, everything: bool = False) -> Iterator[Mapping[int, bytes]]:
        """The pages to write in this step, those that wait longest first; written, unless the body raises."""
        self._waiting.update(self._memory.take_changed_pages())
        first = self._memory.first_page
        for page in [page for page in self._waiting if page < first]:
            del self._waiting[page]
        step = dict(islice(self._waiting.items(), None if everything else STEP_PAGES))
        try:
            yield step
            for page in step:
                del self._waiting[page]
            self._metrics.saved_pages.inc(len(step))
        finally:
            self._metrics.unsaved_pages.set(len(self._waiting))

    def were_lost(self) -> None:
        """The record no longer has what was written: all of it is to be written again."""
        self._memory.mark_pages()
