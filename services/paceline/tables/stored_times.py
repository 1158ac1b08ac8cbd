"""When the row at each place of a ring was stored.

Rows of a block share their time, so most places are answered from a table with one entry for 32 of them. That one stays
in a cache beside a gather of rows, which the times of all places, one by one, do not: a batch's times from those alone
cost a seventh of its rows (8,192 of 448 bytes, from 224 MB).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

GROUP_SHIFT = 5
GROUP_PLACES = 1 << GROUP_SHIFT


class StoredTimes:
    """Seconds of each place. One writer; a reader may look at other places meanwhile."""

    def __init__(self, place_count: int) -> None:
        group_count = -(-place_count // GROUP_PLACES)
        self._times: Seconds = np.empty(group_count * GROUP_PLACES, np.float64)
        self._common: Seconds = np.full(group_count, np.nan)
        """Of each group of places their time, or NaN where they differ or not all are known to be alike."""

    @property
    def nbytes(self) -> int:
        """Bytes set aside."""
        return self._times.nbytes + self._common.nbytes

    def write(self, position: int, count: int, times: float | Seconds) -> None:
        """Set the times of `count` places from `position` on, to one for all of them or to `[count]`."""
        if not count:
            return
        end = position + count
        first, last = position >> GROUP_SHIFT, end - 1 >> GROUP_SHIFT
        # Of a group that is written in part, other rows may be read meanwhile: first it says nothing of them any more.
        self._common[first] = self._common[last] = np.nan
        self._times[position:end] = times
        if isinstance(times, np.ndarray):
            self._compare(first, last + 1)
            return
        self._common[-(-position // GROUP_PLACES) : end // GROUP_PLACES] = times
        # A block may come in pieces that meet within a group; that of another is told by a single look.
        if position % GROUP_PLACES and self._times[first << GROUP_SHIFT] == times:
            self._compare(first, first + 1)

    def _compare(self, first: int, end: int) -> None:
        """Note of each of these groups what all its places have in common, if they do."""
        whole = self._times[first * GROUP_PLACES : end * GROUP_PLACES].reshape(-1, GROUP_PLACES)
        lead = whole[:, 0]
        self._common[first:end] = np.where((whole == lead[:, None]).all(axis=1), lead, np.nan)

    def gather(self, places: Places, out: Seconds) -> None:
        """Fill `out`, `[n]`, with the times of places."""
        self._common.take(places >> GROUP_SHIFT, out=out, mode="clip")
        (differing,) = np.isnan(out).nonzero()
        if len(differing):
            out[differing] = self._times[places[differing]]

    def read(self, position: int, count: int) -> Seconds:
        """The times of `count` places from `position` on; a view."""
        return self._times[position : position + count]
