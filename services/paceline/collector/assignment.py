"""What a collector has to do once it has joined a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.collector.filler import Filler, StepFiller
from paceline.collector.n_step import NStepFiller
from paceline.collector.open_block import OpenBlock
from paceline.collector.unrolls import UnrollFiller
from paceline.config import Config, TableConfig
from paceline.envs import EnvironmentDescription, Environments, environment_seeds, make_vector_environment
from paceline.errors import RowSpecError
from paceline.replica import LearnerClock
from paceline.rows import CompactForm, RowSpec, transition_spec, unroll_spec
from paceline.rpc.wire import row_spec_from_wire
from paceline.v1 import run_pb2

AUTO_COMPACT_BYTES = 128
"""Bytes of next observations in a row from which on `block_form: auto` leaves them out. What is left out saves 3 ms of
CPU a MB on its way through checksums, gRPC and Redis; to leave it out and to put it back costs 2.8 ms a MB at 68 bytes
a row, 0.9 at 192 and 0.8 at 1,600 (blocks of 1,024 rows)."""


@dataclass(frozen=True)
class Assignment:
    """A collector's place in the run, and the rows that the learner wants of its environments."""

    config: Config
    place: run_pb2.JoinResponse
    description: EnvironmentDescription
    spec: RowSpec

    @classmethod
    def of(cls, config: Config, place: run_pb2.JoinResponse, description: EnvironmentDescription) -> Assignment:
        """What the learner assigned. Raises RowSpecError unless its rows are those that the environment gives."""
        spec = row_spec_from_wire(place.row_spec)
        _require_rows_of(spec, description, config.replay.tables[config.learner.table])
        return cls(config, place, description, spec)

    @property
    def table(self) -> TableConfig:
        """Settings of the table that the rows go to."""
        return self.config.replay.tables[self.config.learner.table]

    @property
    def replay_address(self) -> str:
        """The replay shard that takes the rows."""
        addresses = self.config.replay.shard_addresses()
        return addresses[self.place.index % len(addresses)]

    @property
    def row_stride(self) -> int:
        """Rows from one of an environment to that which goes on where it ends, while no episode ends."""
        return self.config.collector.environments * self.config.learner.algorithm.n_step

    @property
    def compact_form(self) -> CompactForm | None:
        """The compact form of the rows where `collector.block_form` wants it."""
        form, wanted = CompactForm.of(self.spec), self.config.collector.block_form
        least = {"plain": math.inf, "auto": AUTO_COMPACT_BYTES, "compact": 1}[wanted]
        return form if form.pair_bytes >= least else None

    @property
    def block_rows(self) -> int:
        """Rows of a full block."""
        # Half a message leaves room for what stands beside the rows.
        rows_that_fit = max(1, self.config.rpc.max_message_bytes // 2 // self.spec.row_bytes)
        return min(self.config.collector.block_rows, rows_that_fit)

    def build_environments(self, rebuild: int, first_episode: int) -> Environments:
        """Freshly seeded environments, after so many rebuilds; their first episode has that number."""
        place, count = self.place, self.config.collector.environments
        seeds = environment_seeds(place.run_seed, place.index, place.incarnation, count, rebuild=rebuild)
        vector = make_vector_environment(self.config.env, count)
        return Environments(vector, self.description, seeds, first_episode=first_episode)

    def make_filler(self, clock: LearnerClock) -> Filler:
        """What makes the rows of steps, stamped with times of the learner's clock."""
        settings, algorithm = self.config.collector, self.config.learner.algorithm
        block = OpenBlock(
            self.spec,
            block_rows=self.block_rows,
            block_seconds=settings.block_seconds,
            stamps={"collector_index": self.place.index, "collector_incarnation": self.place.incarnation},
            clock=clock,
        )
        if self.table.kind == "unrolls":
            return UnrollFiller(block, environments=settings.environments)
        if algorithm.n_step == 1:
            return StepFiller(block)
        return NStepFiller(block, environments=settings.environments, n_step=algorithm.n_step, gamma=algorithm.gamma)


def _require_rows_of(spec: RowSpec, description: EnvironmentDescription, table: TableConfig) -> None:
    if table.kind == "unrolls":
        mine = unroll_spec(description.observation, description.action, table.unroll_length)
    else:
        mine = transition_spec(description.observation, description.action)
    if mine.digest == spec.digest:
        return
    wanted, given = ({column.name: column for column in each.columns} for each in (spec, mine))
    different = [name for name in {**wanted, **given} if wanted.get(name) != given.get(name)]
    name = different[0] if different else "the order of columns"
    raise RowSpecError(
        f"the learner's rows differ from environment {description.id!r} in {name}: the learner has {wanted.get(name)}, "
        f"the environment gives {given.get(name)}; start learner and collectors with the same env and replay settings"
    )
