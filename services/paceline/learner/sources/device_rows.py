"""Rows of a ring in a tensor: on a GPU, a batch then never leaves it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.rows import ByteMatrix


class DeviceRows:
    """A `RowStore` of `tables` in the memory of a torch device. Batches are gathered to uint8 tensors there.

    A gather on a GPU only begins here. That is safe: writes and gathers go to one CUDA stream, in the order in which
    they were asked for, so a gather never sees a write that the ring announced after it.
    """

    def __init__(self, row_count: int, row_bytes: int, device: torch.device) -> None:
        # Whole words, which rows are made of: moving single bytes would be eight times the work.
        self._rows = torch.empty((row_count, row_bytes // 8), dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes set aside."""
        return self._rows.nbytes

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return 8 * self._rows.shape[1]

    def write(self, position: int, rows: ByteMatrix) -> None:
        """Copy `rows` to the device, to `position` and the places after it."""
        # The bytes of a message are read-only, of which torch would warn; they are only read.
        words = np.array(rows, copy=None if rows.flags.writeable and rows.flags.c_contiguous else True, order="C")
        self._rows[position : position + len(rows)].copy_(torch.from_numpy(words.view(np.int64)))

    def gather(self, index: npt.NDArray[np.int64], out: Tensor) -> None:
        """Copy the rows at the places `index` to `out`, `[n, row_bytes]` uint8 on the same device."""
        places = torch.from_numpy(index).to(self._rows.device)
        torch.index_select(self._rows, 0, places, out=out.view(torch.int64))

    def read(self, position: int, out: ByteMatrix) -> None:
        """Copy the rows from `position` on to `out`, in host memory."""
        out[:] = self._rows[position : position + len(out)].cpu().numpy().view(np.uint8)
