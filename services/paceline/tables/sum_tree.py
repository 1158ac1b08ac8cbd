"""Draws in proportion to weights, and finds by running sums, over up to some ten million slots.

Slots lie in groups of FAN, groups in blocks of FAN. A group keeps the running sums of its weights, a block those of its
groups, and all blocks together a running sum that is made when it is next needed. Whatever changes is summed up anew
from the weights, never adjusted, so no sum drifts. A draw chooses a block, then a group, then a slot, each by a random
number of its own; all slots of a batch go down together, in a few numpy calls a level.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]

FAN_BITS = 4
FAN = 1 << FAN_BITS
BLOCK_BITS = 2 * FAN_BITS
GUIDED_FROM = 1024
"""Draws of so many slots find their blocks by a guide; making it would cost a smaller draw more than it saves."""
BUCKETS_PER_BLOCK = 4
SMALLEST_WEIGHT = 1e-290
"""Weights below count as 0: near the end of the float64 range a product can round up to the sum that it is below."""
LARGEST_WEIGHT = 1e290


class SumTree:
    """Weights of slots. Not for several threads at once."""

    def __init__(self, slot_count: int) -> None:
        block_count = -(-slot_count >> BLOCK_BITS)
        self._weights: Weights = np.zeros(block_count << BLOCK_BITS)
        self._in_group: Weights = np.zeros((block_count << FAN_BITS, FAN))
        """Running sums of the weights of each group."""
        self._group_sums: Weights = np.zeros(block_count << FAN_BITS)
        self._in_block: Weights = np.zeros((block_count, FAN))
        """Running sums of the groups of each block."""

    @property
    def nbytes(self) -> int:
        """Bytes set aside."""
        return sum(sums.nbytes for sums in (self._weights, self._in_group, self._group_sums, self._in_block))

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._blocks[-1])

    def weights(self, slots: Slots) -> Weights:
        """The weight of each slot."""
        return self._weights.take(slots)

    def set_weights(self, slots: Slots, weights: Weights) -> None:
        """Set the weight of each slot, between 0 and LARGEST_WEIGHT; where a slot comes twice, the last counts."""
        if not len(slots):
            return
        self._weights[slots] = np.where(weights < SMALLEST_WEIGHT, 0, weights)
        groups = _distinct(slots >> FAN_BITS, len(self._in_group))
        sums = _running_sums(self._weights.reshape(-1, FAN).take(groups, axis=0))
        self._in_group[groups], self._group_sums[groups] = sums, sums[:, -1]
        blocks = _distinct(groups >> FAN_BITS, len(self._in_block))
        self._in_block[blocks] = _running_sums(self._group_sums.reshape(-1, FAN).take(blocks, axis=0))
        self.__dict__.pop("_blocks", None)
        self.__dict__.pop("_guide", None)

    def draw(self, random: np.random.Generator, n: int) -> Slots:
        """`[n]` slots, each drawn by itself in proportion to its weight. The sum of weights must be above 0."""
        values = random.random(n)
        values *= self.total
        at = self._find_blocks(values)
        for sums in (self._in_block.reshape(-1), self._in_group.reshape(-1)):
            at <<= FAN_BITS
            # A fresh number for each level: what is left of the one above has lost some of its digits.
            values = random.random(n)
            values *= sums.take(at + (FAN - 1))
            _descend(sums, at, values, FAN)
        return at

    def find(self, values: Weights) -> Slots:
        """For each value the slot whose share of the running sum holds it; values are 0 or more, and below `total`.

        For weights and values that are whole numbers: others may fall to a neighbour, even one without weight.
        """
        at = np.searchsorted(self._blocks, values, side="right")
        values = values - np.where(at > 0, self._blocks[at - 1], 0)
        for sums in (self._in_block.reshape(-1), self._in_group.reshape(-1)):
            at <<= FAN_BITS
            _descend(sums, at, values, FAN)
            values -= np.where(at & (FAN - 1), sums[at - 1], 0)
        return at

    def sum_before(self, slot: int) -> float:
        """Sum of the weights of all slots before this one."""
        group, block = slot >> FAN_BITS, slot >> BLOCK_BITS
        before = float(self._blocks[block - 1]) if block else 0.0
        if group & (FAN - 1):
            before += float(self._in_block[block, (group & (FAN - 1)) - 1])
        if slot & (FAN - 1):
            before += float(self._in_group[group, (slot & (FAN - 1)) - 1])
        return before

    @cached_property
    def _blocks(self) -> Weights:
        """Running sums of the blocks."""
        return np.cumsum(self._in_block[:, -1])

    @cached_property
    def _guide(self) -> tuple[Slots, int]:
        """For equal buckets of the whole sum: blocks that end below the bucket, and the most that end in one."""
        buckets = self._bucket(self._blocks)
        ends = np.bincount(buckets, minlength=len(self._blocks) * BUCKETS_PER_BLOCK + 1)
        return np.cumsum(ends) - ends, int(ends.max())

    def _bucket(self, values: Weights) -> Slots:
        return (values * (len(self._blocks) * BUCKETS_PER_BLOCK / self.total)).astype(np.int64)

    def _find_blocks(self, values: Weights) -> Slots:
        if len(values) < GUIDED_FROM:
            return np.searchsorted(self._blocks, values, side="right")
        first, most = self._guide
        at = first.take(self._bucket(values))
        _descend(self._blocks, at, values, most + 1)
        return at


def _descend(sums: Weights, at: Slots, values: Weights, count: int) -> None:
    """Move each of `at` past the running sums that its value reaches, fewer than `count` of them."""
    # A search by halves without a branch: on random numbers a processor mispredicts every other one of searchsorted's.
    probe, reached, moved = np.empty_like(at), np.empty(len(at), np.bool_), np.empty_like(at)
    found = np.empty_like(values)
    step = 1 << max(0, (count - 1).bit_length() - 1)
    while step and count > 1:
        np.add(at, step - 1, out=probe)
        np.take(sums, probe, out=found, mode="clip")
        np.less_equal(found, values, out=reached)
        np.multiply(reached, step, out=moved)
        at += moved
        step >>= 1


def _running_sums(rows: Weights) -> Weights:
    """Running sums along each row, in place."""
    # Column by column: many times as fast as cumsum along rows as short as these.
    for column in range(1, FAN):
        rows[:, column] += rows[:, column - 1]
    return rows


def _distinct(numbers: Slots, count: int) -> Slots:
    """The numbers, each once, in order; all are below `count`."""
    marked = np.zeros(count, np.bool_)
    marked[numbers] = True
    return np.flatnonzero(marked)
