"""The collecting loop: apply, act, step, fill; one model forward for each step of all environments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.collector.acting_lag import ActingLag
from paceline.collector.admission import AdmissionControl
from paceline.collector.filler import Filler
from paceline.collector.metrics import CollectorMetrics
from paceline.collector.reporter import EpisodeReporter
from paceline.collector.writer import BlockWriter
from paceline.config import CollectorConfig
from paceline.envs import EnvironmentDescription, Environments, VectorStep
from paceline.errors import EnvironmentFaultError
from paceline.lag.bound import LagBound
from paceline.lag.trace import TraceWriter
from paceline.process import StopSignal
from paceline.replica import SnapshotPoller, act
from paceline.rows import Block
from paceline.snapshot import StagedActor
from paceline.telemetry import ActivityClock, get_logger

MAX_FAULTS_IN_A_ROW = 10
"""Environment faults with no finished episode between them, after which `on_environment_error: reset` gives up."""

_STOP_FOLLOWS_SECONDS = 2.0
"""How much later the stop may reach this process than those of the environments, which end by it at once."""

_STOP_CHECK_SECONDS = 0.2
"""How late a pause may notice the stop signal, which wakes nobody."""

BuildEnvironments = Callable[[int, int], Environments]
"""(rebuilds so far, number of the first episode) -> freshly seeded environments."""


class CollectingLoop:
    """Steps environments under the newest snapshot until the run has all its rows, or the stop.

    The policy, the version and the stamps change between two steps, together.
    """

    def __init__(
        self,
        config: CollectorConfig,
        *,
        description: EnvironmentDescription,
        build_environments: BuildEnvironments,
        staged: StagedActor,
        poller: SnapshotPoller,
        filler: Filler,
        writer: BlockWriter,
        reporter: EpisodeReporter,
        metrics: CollectorMetrics,
        clock: ActivityClock,
        warmup_steps: int,
        seed: int,
        bound: LagBound,
        trace: TraceWriter | None = None,
    ) -> None:
        """Build the environments; `poller` has applied a first snapshot. Raises EnvironmentFaultError.

        Args:
            bound: no step is taken with a policy that is over it.
            trace: where each application is written down; None: nowhere.
        """
        self._config, self._description = config, description
        self._build, self._rebuilds, self._faults_in_a_row = build_environments, 0, 0
        self._actor, self._poller = staged.actor, poller
        self._filler, self._writer, self._reporter = filler, writer, reporter
        self._metrics, self._clock, self._log = metrics, clock, get_logger()
        self._warmup_left = warmup_steps
        self._random = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(seed)
        low, high = (np.asarray(bound, np.float32) for bound in (description.action_low, description.action_high))
        self._low, self._range = low, high - low
        self._uniform_log_prob = -math.fsum(map(math.log, self._range.tolist()))
        self._action_shape = (config.environments, *description.action.shape)
        self._admission, self._trace = AdmissionControl(bound, metrics), trace
        self._lag = ActingLag(metrics, filler.block.clock)
        self._steps = self._uncounted_steps = 0
        self._rest: list[Block] = []
        self._environments = build_environments(0, 0)
        self._stamp()

    def run(self, stop: StopSignal) -> None:
        """Collect. Afterwards `close` ends what it began.

        Raises:
            EnvironmentFaultError: an environment failed, it may not or no longer be rebuilt, and it was not the stop.
            PacelineError: replay or the learner refused this collector for good.
        """
        try:
            self._collect(stop)
        except EnvironmentFaultError as error:
            # Whoever stops a whole process group or job ends the environments' processes as well.
            if not stop.wait(_STOP_FOLLOWS_SECONDS):
                raise
            self._log.warning("environments_ended_by_stop", reason=str(error))

    def finished(self) -> bool:
        """Whether the run wants no further rows."""
        return self._writer.complete or self._poller.finished or self._reporter.finished

    def close(self, seconds: float) -> None:
        """Append what is left, for at most `seconds` and only if the run wants it, and end the environments."""
        self._clock.switch("finishing")
        self._count()
        rest = [*self._rest, *self._filler.cut()]
        if (last := self._filler.block.take()) is not None:
            rest.append(last)
        self._writer.close(rest, 0.0 if self.finished() else seconds)
        self._environments.close()

    def _collect(self, stop: StopSignal) -> None:
        while not (stop.is_set() or self.finished()):
            self._apply()
            standing = self._poller.standing
            if not self._admission.admits(standing):
                self._pause(stop)
                continue
            self._lag.begin(standing)
            self._clock.switch("acting")
            action, log_prob = self._choose()
            self._clock.switch("environment")
            try:
                step = self._environments.step(action)
            except EnvironmentFaultError as error:
                self._recover(error, stop)
                continue
            self._clock.switch("filling")
            self._take(step, log_prob, stop)

    def _apply(self) -> None:
        if not self._poller.is_ready(self._steps):
            return
        with self._clock.during("snapshot_apply"):
            if self._poller.apply_if_ready(self._steps):
                self._stamp()

    def _stamp(self) -> None:
        applied, known = self._poller.applied, self._poller.known
        if applied is None or known is None:
            return
        self._filler.set_policy(applied.identity, applied.learner_step, self._poller.applied_at)
        if self._trace is None:
            return
        try:
            self._trace.write(
                environment_steps=self._steps,
                known_version=max(known.version, applied.identity.version),
                applied_version=applied.identity.version,
            )
        except OSError as error:
            self._log.error("lag_trace_ended", reason=str(error), environment_steps=self._steps)
            self._trace = None

    def _pause(self, stop: StopSignal) -> None:
        """Take no step until a snapshot within the bound acts, the run ends, or the stop comes."""
        poller = self._poller
        poller.paused = True
        with self._clock.during("lag_pause"), self._admission.pause(lambda: poller.standing) as tell_again:
            while not (stop.is_set() or self.finished() or self._admission.admits(poller.standing)):
                poller.wait_until_ready(_STOP_CHECK_SECONDS, self._steps)
                self._clock.turn()
                self._apply()
                # The learner may need these rows to get to its next snapshot.
                self._submit_due(stop)
                tell_again()
        poller.paused = False

    def _choose(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Actions [N, *action] and their behaviour log-densities [N]: random in the warm-up, then the policy's."""
        if self._warmup_left > 0:
            unit = self._random.random((self._action_shape[0], len(self._low)), np.float32)
            action = self._low + self._range * unit
            return action.reshape(self._action_shape), np.full(len(action), self._uniform_log_prob, np.float32)
        action, log_prob = act(
            self._actor, self._environments.observation, deterministic=False, generator=self._generator
        )
        return action.reshape(self._action_shape), log_prob

    def _take(self, step: VectorStep, log_prob: npt.NDArray[np.float32], stop: StopSignal) -> None:
        count = int(np.count_nonzero(step.valid))
        self._warmup_left -= count
        self._uncounted_steps += count
        self._steps += count
        self._lag.count(count)
        if step.finished:
            self._faults_in_a_row = 0
            self._reporter.add(step.finished)
            self._metrics.episodes.inc(len(step.finished))
            for episode in step.finished:
                self._metrics.episode_return.observe(episode.episode_return)
        sealed = self._filler.add(step, log_prob)
        if sealed:
            self._submit(sealed, stop)
        else:
            self._submit_due(stop)

    def _submit_due(self, stop: StopSignal) -> None:
        if (due := self._filler.block.take_due()) is not None:
            self._submit([due], stop)

    def _submit(self, sealed: list[Block], stop: StopSignal) -> None:
        def ended() -> bool:
            self._clock.turn()  # asked at each slice of the wait
            return stop.is_set() or self.finished()

        self._count()
        self._rest += sealed
        with self._clock.during("append_wait"):
            # The run may end while replay holds this block back, for rows that nobody wants any more.
            while self._rest and self._writer.submit(self._rest[0], ended):
                del self._rest[0]

    def _count(self) -> None:
        """Hand on what was counted since the last block; once per step would cost more than the step's filling."""
        self._metrics.environment_steps.inc(self._uncounted_steps)
        self._reporter.environment_steps += self._uncounted_steps
        self._uncounted_steps = 0
        self._lag.hand_on()

    def _recover(self, error: EnvironmentFaultError, stop: StopSignal) -> None:
        """Obey `on_environment_error`: raise, as at the stop, or drop the episode and go on with new environments."""
        while True:
            self._metrics.environment_faults.inc()
            self._faults_in_a_row += 1
            if self._config.on_environment_error == "stop" or stop.is_set():
                raise error
            if self._faults_in_a_row >= MAX_FAULTS_IN_A_ROW:
                raise EnvironmentFaultError(
                    f"{error} (the {self._faults_in_a_row}th fault in a row without a finished episode: given up)"
                ) from error
            dropped = 0 if error.episode is None else self._filler.drop_episode(error.episode)
            self._metrics.rows_dropped.inc(dropped)
            self._log.warning("environments_rebuilt", reason=str(error), dropped_rows=dropped)
            self._rest += self._filler.cut()
            self._rebuilds += 1
            next_episode = self._environments.next_episode
            self._environments.close()
            try:
                self._environments = self._build(self._rebuilds, next_episode)
                return
            except EnvironmentFaultError as again:
                error = again
