"""What a collector makes of its configuration and its place: the form, the filler and the size of its blocks."""

import pytest

from paceline.collector.assignment import Assignment
from paceline.config import build
from paceline.envs import EnvironmentDescription
from paceline.errors import RowSpecError
from paceline.replica import LearnerClock
from paceline.rows import Column, transition_spec
from paceline.rpc.wire import row_spec_to_wire
from paceline.v1 import run_pb2


def assignment_of(*, observation=3, spec=None, index=0, **settings):
    config = build({"run": {"id": "trial"}, "env": {"id": "Any-v0"}, **settings})
    columns = Column("observation", "float32", (observation,)), Column("action", "float32", (1,))
    place = run_pb2.JoinResponse(index=index, row_spec=row_spec_to_wire(spec or transition_spec(*columns)))
    description = EnvironmentDescription("Any-v0", *columns, (-1.0,), (1.0,), None)
    return Assignment.of(config, place, description)


@pytest.mark.parametrize(
    ("form", "observation", "is_compact"),
    [("auto", 17, False), ("auto", 48, True), ("plain", 400, False), ("compact", 3, True)],
)
def test_blocks_are_compact_where_it_is_asked_for_or_pays(form, observation, is_compact):
    made = assignment_of(observation=observation, collector={"block_form": form})
    assert (made.compact_form is not None) == is_compact


def test_a_row_goes_on_so_many_rows_later_as_there_are_environments_and_steps_in_a_row():
    made = assignment_of(collector={"environments": 8}, learner={"algorithm": {"name": "sac", "n_step": 3}})
    assert made.row_stride == 24


@pytest.mark.parametrize(("index", "address"), [(0, "a:1"), (1, "b:2"), (2, "c:3"), (3, "a:1"), (7, "b:2")])
def test_collectors_are_spread_over_the_shards_by_their_index(index, address):
    made = assignment_of(index=index, replay={"shards": 3, "address": "a:1,b:2,c:3"}, collector={"count": 3})
    assert made.replay_address == address


def test_a_block_has_no_more_rows_than_half_a_message_holds():
    made = assignment_of(observation=2000, rpc={"max_message_bytes": 1 << 20}, learner={"chunk_bytes": 1 << 16})
    block = made.make_filler(LearnerClock()).block
    sealed = block.add_rows(block.make_rows(64).data)
    assert sealed[0].row_count == (1 << 19) // made.spec.row_bytes == 32


def test_rows_of_another_environment_are_refused_by_the_name_of_the_column():
    other = transition_spec(Column("observation", "float32", (4,)), Column("action", "float32", (1,)))
    with pytest.raises(RowSpecError, match=r"in observation: .*\(4,\).*\(3,\)"):
        assignment_of(spec=other)
