"""Steps of several environments at once, made up, and the rows that a filler makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.collector.open_block import OpenBlock
from paceline.envs import VectorStep
from paceline.identity import PolicyIdentity
from paceline.replica import LearnerClock
from paceline.rows import Column, RowSpec
from paceline.rpc.wire import timestamp
from paceline.v1 import times_pb2

OBSERVATION, ACTION = Column("observation", "float32", (1,)), Column("action", "float32", (1,))
STAMPS = {"collector_index": 4, "collector_incarnation": 5}


def open_block(
    spec: RowSpec, *, block_rows: int = 10_000, block_seconds: float = 1000, clock: LearnerClock | None = None
) -> OpenBlock:
    return OpenBlock(
        spec, block_rows=block_rows, block_seconds=block_seconds, stamps=STAMPS, clock=clock or LearnerClock()
    )


def step_of(
    observation: Any,
    *,
    reward: Any = 1.0,
    next_observation: Any = None,
    terminated: Any = False,
    truncated: Any = False,
    valid: Any = True,
    episode: Any = 0,
) -> VectorStep:
    """One step of N environments; single numbers hold for all, and the next observation is one more."""
    observation = np.asarray(observation, np.float32).reshape(-1, 1)
    count = len(observation)
    following = observation + 1 if next_observation is None else np.asarray(next_observation, np.float32).reshape(-1, 1)
    return VectorStep(
        observation=observation,
        action=-observation,
        reward=np.broadcast_to(np.asarray(reward, np.float64), count),  # type: ignore[arg-type]
        next_observation=following,
        terminated=np.broadcast_to(np.asarray(terminated, np.bool_), count),
        truncated=np.broadcast_to(np.asarray(truncated, np.bool_), count),
        valid=np.broadcast_to(np.asarray(valid, np.bool_), count),
        episode=np.broadcast_to(np.asarray(episode, np.int64), count),
        finished=(),
    )


def log_prob_of(step: VectorStep) -> Any:
    """A log-density that names the step it belongs to."""
    return step.observation[:, 0] / 8


def take_rows(filler: Any, sealed: Any = ()) -> Any:
    """All rows of a filler: those of the blocks that it sealed, of the open one, and of what was under way."""
    blocks = [*sealed, *filler.cut()]
    if (last := filler.block.take()) is not None:
        blocks.append(last)
    return np.concatenate([block.columns for block in blocks]) if blocks else np.empty(0, filler.block.spec.dtype)


def policy(version: int) -> PolicyIdentity:
    return PolicyIdentity(1, version)


def synchronised_clock(now: list[float], ahead: float) -> LearnerClock:
    """A clock of a learner that is so far ahead; it stands where `now[0]` says."""
    clock, there = LearnerClock(lambda: now[0]), timestamp(now[0] + ahead)
    clock.note_poll(now[0], times_pb2.AnswerTimes(received_at=there, answered_at=there), now[0])
    return clock
