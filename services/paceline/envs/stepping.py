"""Steps the environments of a process and gives complete transitions only, in either autoreset mode."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, cast

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from paceline.envs.description import EnvironmentDescription
from paceline.envs.guard import FAULT, TRACEBACK
from paceline.errors import ConfigError, EnvironmentFaultError
from paceline.rows import NUMPY_TYPES
from paceline.telemetry import get_logger

STEP_DEADLINE_SECONDS = 300.0
"""An environment process that has not answered a step or a reset by then has failed."""
CLOSE_DEADLINE_SECONDS = 5.0
"""Environment processes that have not ended by then are terminated, and killed where that is not enough."""

_SIGNAL_SECONDS = 1.0
"""How long a process may take to end by a signal."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class FinishedEpisode:
    """An episode that ended in a step."""

    environment: int
    episode_return: float
    length: int
    terminated: bool


@dataclass(frozen=True)
class VectorStep:
    """One step of every environment; where `valid`, a complete transition that crosses no episode's end.

    Shapes: N environments; `observation` and `next_observation` [N, *observation], `action` [N, *action], the others
    [N]. `truncated` is false where the step also terminated.
    """

    observation: Array
    action: Array
    reward: npt.NDArray[np.float32]
    next_observation: Array
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    valid: npt.NDArray[np.bool_]
    episode: npt.NDArray[np.int64]
    finished: tuple[FinishedEpisode, ...]


class Environments:
    """Steps the environments of one process, and gives complete transitions only.

    In next-step mode the step after an episode's end ignores the action and returns the next episode's first
    observation: it is masked. In same-step mode that observation comes at once, and the ended episode's last one is in
    the infos: it is put in place. Episodes are numbered in the order in which they begin.
    """

    def __init__(
        self,
        vector: VectorEnv[Any, Any, Any],
        description: EnvironmentDescription,
        seeds: Sequence[int],
        *,
        first_episode: int = 0,
    ) -> None:
        """Reset `vector`, which is closed by `close`.

        Args:
            seeds: one for each environment.
            first_episode: number of the first episode; those after a rebuild go on where the last ones ended.

        Raises:
            ConfigError: the environments declare no autoreset mode, or one without resets.
            EnvironmentFaultError: a reset failed.
        """
        self._vector, self._description, self._seeds = vector, description, tuple(seeds)
        self._same_step = _declared_mode(vector, description.id) is AutoresetMode.SAME_STEP
        self._count = vector.num_envs
        self._stored_type = NUMPY_TYPES[description.observation.dtype]
        space = cast(gymnasium.spaces.Box, vector.single_action_space)
        self._low, self._high, self._action_type = space.low, space.high, space.dtype
        self._steps = 0
        self._returns = np.zeros(self._count, np.float64)
        self._lengths = np.zeros(self._count, np.int64)
        self._episode = np.arange(first_episode, first_episode + self._count, dtype=np.int64)
        self.next_episode = first_episode + self._count
        """The number that the next episode gets."""
        self._workers = vector if isinstance(vector, AsyncVectorEnv) else None
        self._ended = np.zeros(self._count, np.bool_)
        self.observation: Array = np.empty(0)
        """[N, *observation] what the next actions answer to, as rows store it."""
        try:
            self.reset(seeds)
        except EnvironmentFaultError:
            self.close()  # nobody else has them yet
            raise

    @property
    def count(self) -> int:
        """Number of environments."""
        return self._count

    @property
    def action_shape(self) -> tuple[int, ...]:
        """[N, *action], what `step` takes."""
        return (self._count, *self._description.action.shape)

    def reset(self, seeds: Sequence[int]) -> None:
        """Begin anew with these seeds; unfinished episodes are dropped. Raises EnvironmentFaultError."""
        self._seeds = tuple(seeds)
        with self._faults_named():
            if self._workers is not None:
                self._workers.reset_async(seed=list(self._seeds))
                observation, infos = self._workers.reset_wait(timeout=STEP_DEADLINE_SECONDS)
            else:
                observation, infos = self._vector.reset(seed=list(self._seeds))  # type: ignore[arg-type]
        self._raise_fault(infos)
        self.observation = self._stored(observation)
        self._ended = np.zeros(self._count, np.bool_)
        self._returns[:] = 0
        self._lengths[:] = 0

    def step(self, action: Array) -> VectorStep:
        """Take `action` [N, *action] in every environment, clipped to the bounds at this border only.

        Raises:
            EnvironmentFaultError: names the environment, its number, the step and the seed.
        """
        clipped = np.minimum(np.maximum(action, self._low), self._high).astype(self._action_type, copy=False)
        with self._faults_named():
            if self._workers is not None:
                self._workers.step_async(clipped)
                result = self._workers.step_wait(timeout=STEP_DEADLINE_SECONDS)
            else:
                result = self._vector.step(clipped)
        self._steps += 1
        after, reward, terminated, truncated, infos = result
        if FAULT in infos:
            self._raise_fault(infos)
        after = self._stored(after)
        valid = np.logical_not(self._ended) if not self._same_step else np.ones(self._count, np.bool_)
        ended = terminated | truncated
        episode = self._episode
        finished: tuple[FinishedEpisode, ...] = ()
        self._returns += reward  # 0 in a reset step
        self._lengths += valid
        next_observation = after
        if ended.any():
            finished = self._finish(ended, terminated)
            if self._same_step:
                next_observation = after.copy()
                for number in np.flatnonzero(ended):
                    next_observation[number] = infos["final_obs"][number]
        step = VectorStep(
            observation=self.observation,
            action=action,
            reward=reward.astype(np.float32),
            next_observation=next_observation,
            terminated=terminated,
            truncated=truncated & ~terminated,
            valid=valid,
            episode=episode,
            finished=finished,
        )
        self.observation = after
        self._ended = ended if not self._same_step else self._ended
        return step

    def close(self) -> None:
        """End the environments, and their processes within CLOSE_DEADLINE_SECONDS and a little; what fails is no error.

        It may be called again.
        """
        if self._workers is not None:
            _end_workers(self._workers)
        else:
            self._vector.close()

    def _finish(self, ended: npt.NDArray[np.bool_], terminated: npt.NDArray[np.bool_]) -> tuple[FinishedEpisode, ...]:
        numbers = np.flatnonzero(ended)
        finished = tuple(
            FinishedEpisode(int(n), float(self._returns[n]), int(self._lengths[n]), bool(terminated[n]))
            for n in numbers
        )
        self._returns[numbers] = 0
        self._lengths[numbers] = 0
        self._episode = self._episode.copy()  # the step just made keeps the old numbers
        self._episode[numbers] = np.arange(self.next_episode, self.next_episode + len(numbers))
        self.next_episode += len(numbers)
        return finished

    def _stored(self, observation: Array) -> Array:
        return observation.astype(self._stored_type, copy=False)

    def _raise_fault(self, infos: dict[str, Any]) -> None:
        for number, fault in enumerate(infos.get(FAULT, ())):
            if fault is not None:
                if infos[TRACEBACK][number]:
                    # One sentence is for whoever started this; where in the environment it was, for whoever mends it.
                    get_logger().error("environment_raised", traceback=infos[TRACEBACK][number])
                error = EnvironmentFaultError(
                    f"environment {self._description.id!r} number {number} (seed {self._seeds[number]}) at its step "
                    f"{self._steps}: {fault}; mend the environment, or set collector.on_environment_error=reset to "
                    "drop the episode and go on"
                )
                error.episode, error.environment = int(self._episode[number]), number
                raise error

    @contextmanager
    def _faults_named(self) -> Iterator[None]:
        """What the vector environment itself raises: a worker that died, or that does not answer."""
        try:
            yield
        except (Exception, multiprocessing.TimeoutError) as error:
            raise EnvironmentFaultError(
                f"environments {self._description.id!r} (seeds {self._seeds[0]} and on) at step {self._steps + 1}: "
                f"{type(error).__name__}: {error}; an environment process died or does not answer within "
                f"{STEP_DEADLINE_SECONDS:g} s"
            ) from error


def _end_workers(vector: AsyncVectorEnv) -> None:
    """End the processes of `vector`, whatever became of them, and close what they share with this one.

    Gymnasium's own way reads the pipe of each, without a deadline: one that died in a step makes it raise, and one that
    hangs makes it hang.
    """
    if vector.closed:
        return
    vector.closed = True  # else Gymnasium closes it in its own way, too, when nobody refers to it any more
    pipes = [pipe for pipe in vector.parent_pipes if pipe is not None]
    for pipe in pipes:
        with suppress(OSError):  # its process has ended
            pipe.send(("close", None))
    _join(vector.processes, CLOSE_DEADLINE_SECONDS)
    for end in (BaseProcess.terminate, BaseProcess.kill):
        left = [process for process in vector.processes if process.is_alive()]
        for process in left:
            end(process)
        _join(left, _SIGNAL_SECONDS)
    for pipe in pipes:
        pipe.close()
    del vector.error_queue  # its semaphores are files, which else stay for as long as an error refers to a frame here


def _join(processes: Iterable[BaseProcess], seconds: float) -> None:
    """Wait until they have all ended, for at most so long."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))


def _declared_mode(vector: VectorEnv[Any, Any, Any], environment_id: str) -> AutoresetMode:
    declared = vector.metadata.get("autoreset_mode")
    try:
        mode = AutoresetMode(declared)
    except ValueError:
        mode = AutoresetMode.DISABLED
    if mode is AutoresetMode.DISABLED:
        raise ConfigError(
            f"vector environment {environment_id!r} declares autoreset mode {declared!r} in its metadata: expected "
            "AutoresetMode.NEXT_STEP or AutoresetMode.SAME_STEP; without it no one can tell where an episode ends"
        )
    return mode
