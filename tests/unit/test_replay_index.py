"""Which entries of a record's index count, where some are damaged."""

from __future__ import annotations

import pytest

from paceline.replay.index import IndexEntry, header_of, without_replaced
from paceline.v1 import rows_pb2


def entry(first_row: int, end_row: int, *, epoch: int = 1, claims: int | None = None) -> IndexEntry:
    """An intact entry; `claims`: but for its first row, which is damaged to this."""
    header = rows_pb2.BlockHeader(first_row=first_row, row_count=end_row - first_row)
    return IndexEntry(first_row if claims is None else claims, end_row, header.SerializeToString(), epoch)


def rows(entries: list[IndexEntry]) -> list[tuple[int, int]]:
    return [(each.first_row, each.end_row) for each in entries]


TEN = [entry(first, first + 10) for first in range(0, 100, 10)]
ALL = [(first, first + 10) for first in range(0, 100, 10)]


@pytest.mark.parametrize("claims", [0, 8, 79])
@pytest.mark.parametrize("place", [8, 9])
def test_within_an_epoch_an_entry_takes_the_place_of_none(claims, place):
    damaged = entry(10 * place, 10 * place + 10, claims=claims)
    assert rows(without_replaced([*TEN[:place], damaged, *TEN[place + 1 :]])) == ALL


@pytest.mark.parametrize("claims", [8, 25])
def test_an_entry_of_a_later_epoch_that_its_header_contradicts_takes_only_what_its_end_says(claims):
    # Epoch 1 got to row 100, epoch 2 went on at 40.
    found = without_replaced([*TEN, entry(40, 50, epoch=2, claims=claims), entry(50, 60, epoch=2)])
    assert rows(found) == ALL[:6]
    assert [each.epoch for each in found] == [1, 1, 1, 1, 2, 2]


def test_an_entry_that_cannot_be_where_it_says_is_seen_to_be_damaged():
    found = without_replaced([*TEN, entry(45, 65, epoch=2, claims=5)])
    assert rows(found) == [*ALL[:6], (60, 65)]
    assert [header_of(each) is None for each in found] == [False] * 6 + [True]


def test_intact_entries_of_a_later_epoch_end_those_from_there_on():
    found = without_replaced([*TEN, entry(35, 45, epoch=2), entry(45, 50, epoch=2)])
    assert rows(found) == [*ALL[:3], (35, 45), (45, 50)]


def test_an_entry_that_claims_all_rows_has_none_before_it_to_go_by():
    assert rows(without_replaced([entry(50, 60, claims=0), entry(60, 70)])) == [(0, 60), (60, 70)]
