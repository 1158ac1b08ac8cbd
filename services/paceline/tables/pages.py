"""What a record keeps of rows that change after they were stored: priorities and times sampled, a page at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from paceline.errors import BlockError
from paceline.tables.ring import Ring
from paceline.tables.samplers import Counts, Flags, Floats, Places, WeightedSampler

PAGE_ROWS = 256
"""Rows of a page; page p holds those with keys p * PAGE_ROWS and after."""
PAGE = np.dtype([("priority", "<f4", (PAGE_ROWS,)), ("times_sampled", "<u4", (PAGE_ROWS,))])
"""A priority is GONE where the row is there no more, and NaN where nothing is known of it."""
GONE = np.float32(-1)
PAGES_AT_ONCE = 64
"""Pages that are read while draws wait."""


class Pages:
    """The pages of a sampler's rows. The ring's places are a whole number of pages, one of them more than it needs."""

    def __init__(self, ring: Ring, sampler: WeightedSampler) -> None:
        self._ring, self._sampler = ring, sampler
        self._page_count = ring.physical_rows // PAGE_ROWS
        self._changed = np.zeros(self._page_count, np.bool_)

    def mark(self, places: Places) -> None:
        """The state of rows changed. Call with the ring's lock held."""
        self._changed[places // PAGE_ROWS] = True

    def take_changed(self) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of each page that changed since it was last taken."""
        changed = np.flatnonzero(self._changed.copy())  # numpy refuses an array that changes while it looks
        for at in range(0, len(changed), PAGES_AT_ONCE):
            yield from self._take(changed[at : at + PAGES_AT_ONCE])

    def restore(self, page: int, data: bytes) -> None:
        """Set the state of those of the page's rows that are held. Raises BlockError if the page is damaged."""
        known, alive, priorities, times = _decode(page, data)
        first_row = page * PAGE_ROWS
        with self._ring.lock:
            known &= self._ring.held(first_row, PAGE_ROWS)
            places = first_row % self._ring.physical_rows + np.flatnonzero(known)
            self._sampler.set_states(places, alive[known], priorities[known], times[known])

    def _take(self, at: npt.NDArray[np.int64]) -> Iterator[tuple[int, bytes]]:
        places = at[:, None] * PAGE_ROWS + np.arange(PAGE_ROWS)
        pages = np.empty(len(at), PAGE)
        with self._ring.lock:
            self._changed[at] = False
            first_row, end_row = self._ring.first_row, self._ring.end_row
            alive, priorities, times = self._sampler.states(places.reshape(-1))
        first_page = first_row // PAGE_ROWS
        numbers = first_page + (at - first_page) % self._page_count
        keys = numbers[:, None] * PAGE_ROWS + np.arange(PAGE_ROWS)
        pages["priority"] = np.where(alive, priorities, GONE).reshape(places.shape)
        pages["priority"][(keys < first_row) | (keys >= end_row)] = np.nan
        pages["times_sampled"] = times.reshape(places.shape)
        for number, page in zip(numbers.tolist(), pages, strict=True):
            if number * PAGE_ROWS < end_row:  # otherwise all its rows have left since they changed
                yield number, page.tobytes()


def _decode(page: int, data: bytes) -> tuple[Flags, Flags, Floats, Counts]:
    """Which rows of a page it knows, which of them are there, their priorities and times sampled."""
    if len(data) != PAGE.itemsize:
        raise BlockError(f"page {page} has {len(data)} bytes: expected {PAGE.itemsize}")
    content = np.frombuffer(data, PAGE)[0]
    priorities: Floats = content["priority"].astype(np.float32)
    known = ~np.isnan(priorities)
    alive = known & (priorities >= 0)
    if not ((priorities[known] == GONE) | (alive[known] & np.isfinite(priorities[known]))).all():
        raise BlockError(f"page {page} holds a priority that is neither finite and 0 or more, nor {GONE:g}")
    return known, alive, np.where(alive, priorities, 0), content["times_sampled"].astype(np.uint32)
