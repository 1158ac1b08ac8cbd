"""Rows lie in order in blocks of the size asked for, with the stamps of their time."""

import numpy as np
import pytest

from paceline.collector.filler import StepFiller
from paceline.replica import LearnerClock
from paceline.rows import transition_spec
from vector_steps import (
    ACTION,
    OBSERVATION,
    log_prob_of,
    open_block,
    policy,
    step_of,
    synchronised_clock,
    take_rows,
)

SPEC = transition_spec(OBSERVATION, ACTION)


def columns_of(*numbers):
    return {"episode": np.asarray(numbers)}


def whole_rows(block, *numbers):
    rows = block.make_rows(len(numbers))
    rows.columns["episode"] = numbers
    return rows.data


@pytest.mark.parametrize("whole", [False, True])
def test_rows_are_cut_into_full_blocks_and_the_rest_stays_open(whole):
    block = open_block(SPEC, block_rows=4)

    def add(*numbers):
        if whole:
            return block.add_rows(whole_rows(block, *numbers))
        return block.add_columns(columns_of(*numbers), len(numbers))

    assert add(0, 1, 2) == []
    sealed = add(3, 4, 5, 6, 7, 8, 9)
    assert [each.columns["episode"].tolist() for each in sealed] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert block.row_count == 2
    last = block.take()
    assert last.columns["episode"].tolist() == [8, 9]
    assert (last.columns["collector_index"] == 4).all()
    assert block.take() is None


def test_a_stamp_is_in_all_rows_from_its_time_on_and_in_no_earlier_one():
    block = open_block(SPEC, block_rows=4)
    block.stamp({"policy_version": 1})
    sealed = block.add_columns(columns_of(0, 1, 2), 3)
    block.stamp({"policy_version": 2})
    sealed += block.add_columns(columns_of(3, 4), 2)
    assert sealed[0].columns["policy_version"].tolist() == [1, 1, 1, 2]
    assert block.take().columns["policy_version"].tolist() == [2]


def test_rows_after_a_dropped_episode_are_stamped_as_before():
    block = open_block(SPEC, block_rows=8)
    block.stamp({"policy_version": 1})
    block.add_columns(columns_of(7, 8, 7, 9), 4)
    block.stamp({"policy_version": 2})
    assert block.drop_episode(7) == 2
    assert block.drop_episode(7) == 0
    block.add_columns(columns_of(10), 1)
    rows = block.take().columns
    assert rows["episode"].tolist() == [8, 9, 10]
    assert rows["policy_version"].tolist() == [1, 1, 2]


def test_an_open_block_is_due_once_it_has_a_row_that_is_old_enough():
    block = open_block(SPEC, block_seconds=0)
    assert block.take_due() is None
    block.add_columns(columns_of(3), 1)
    assert block.take_due().columns["episode"].tolist() == [3]
    later = open_block(SPEC, block_seconds=1000)
    later.add_columns(columns_of(3), 1)
    assert later.take_due() is None


def test_one_step_is_one_row_of_each_environment_that_took_it():
    filler = StepFiller(open_block(SPEC))
    filler.set_policy(policy(3), 30)
    step = step_of(
        [1, 2, 3], reward=[4, 5, 6], truncated=[False, False, True], valid=[True, False, True], episode=[7, 8, 9]
    )
    assert filler.add(step, log_prob_of(step)) == []
    rows = take_rows(filler)
    assert rows["observation"][:, 0].tolist() == [1, 3]
    assert rows["next_observation"][:, 0].tolist() == [2, 4]
    assert rows["reward"].tolist() == [4, 6]
    assert rows["truncated"].tolist() == [False, True]
    assert rows["behaviour_log_prob"].tolist() == [1 / 8, 3 / 8]
    assert rows["step_count"].tolist() == [1, 1]
    assert rows["policy_version"].tolist() == [3, 3]
    assert (rows["collected_at"] > 1e9).all()


def test_rows_say_when_their_block_was_sealed_and_their_policy_applied():
    now = [1_700_000_000.0]
    filler = StepFiller(open_block(SPEC, block_rows=4, clock=synchronised_clock(now, ahead=1000)))
    sealed = []
    for number in range(6):
        now[0] += 1
        if number in (0, 3):
            filler.set_policy(policy(number + 1), 10, applied_at=filler.block.clock.stamp())
        step = step_of([number])
        sealed += filler.add(step, log_prob_of(step))
    now[0] += 10
    rows = take_rows(filler, sealed)
    since = rows["collected_at"] - 1_700_001_000
    assert since == pytest.approx([1, 2, 3, 4, 5, 6], abs=1e-5)
    assert rows["policy_applied_at"] - 1_700_001_000 == pytest.approx([1, 1, 1, 4, 4, 4], abs=1e-5)
    assert rows["sealed_at"] - 1_700_001_000 == pytest.approx([4, 4, 4, 4, 16, 16], abs=1e-5)


def test_while_the_learners_clock_is_unknown_rows_have_ones_own_time_and_no_other():
    filler = StepFiller(open_block(SPEC, clock=LearnerClock(lambda: 1_700_000_000.0)))
    filler.set_policy(policy(1), 10)
    step = step_of([1])
    filler.add(step, log_prob_of(step))
    rows = take_rows(filler)
    assert rows["collected_at"].tolist() == [1_700_000_000.0]
    assert rows["policy_applied_at"].tolist() == rows["sealed_at"].tolist() == [0.0]
