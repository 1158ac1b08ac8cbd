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
        self._times: Seconds = np.empty(place_count, np.float64)
        self._common: Seconds = np.full(-(-place_count // GROUP_PLACES), np.nan)
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
        # Of a group that is written in part, other rows may be read meanwhile: first it says nothing of them any more.
        self._common[position >> GROUP_SHIFT] = self._common[end - 1 >> GROUP_SHIFT] = np.nan
        self._times[position:end] = times
        begin_group, end_group = -(-position // GROUP_PLACES), end // GROUP_PLACES
        if not isinstance(times, np.ndarray):
            self._common[begin_group:end_group] = times
        elif begin_group < end_group:
            whole = self._times[begin_group * GROUP_PLACES : end_group * GROUP_PLACES].reshape(-1, GROUP_PLACES)
            first = whole[:, 0]
            self._common[begin_group:end_group] = np.where((whole == first[:, None]).all(axis=1), first, np.nan)

    def gather(self, places: Places, out: Seconds) -> None:
        """Fill `out`, `[n]`, with the times of places."""
        np.take(self._common, places >> GROUP_SHIFT, out=out, mode="clip")
        differing = np.flatnonzero(np.isnan(out))
        if len(differing):
            out[differing] = self._times[places[differing]]

    def read(self, position: int, count: int) -> Seconds:
        """The times of `count` places from `position` on; a view."""
        return self._times[position : position + count]
