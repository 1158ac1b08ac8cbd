"""Judges snapshots by deterministic episodes on fixed seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.actors import Actor
from paceline.envs import Environments, FinishedEpisode
from paceline.errors import EnvironmentFaultError
from paceline.evaluator.metrics import EvaluatorMetrics
from paceline.process import StopSignal
from paceline.replica import SnapshotPoller, act
from paceline.snapshot import SnapshotHeader, StagedActor
from paceline.telemetry import ActivityClock, get_logger

MAX_TRIES = 5
"""Times that a snapshot is evaluated when environments fail; then it is skipped."""

Report = Callable[[SnapshotHeader, Sequence[FinishedEpisode]], bool]
"""Tells the learner of an evaluation; whether it took it."""


def evaluate(
    actor: Actor,
    environments: Environments,
    seeds: Sequence[int],
    *,
    stop: StopSignal,
    clock: ActivityClock,
    metrics: EvaluatorMetrics,
) -> tuple[FinishedEpisode, ...] | None:
    """The first episode of each environment after a reset with these seeds, in order; None if the stop came first.

    The same actor gives the same episodes: seeds, batch size and actions are fixed. Environments that end early go on
    until the last one ends, and what they do then is not counted.

    Raises:
        EnvironmentFaultError: an environment failed.
    """
    clock.switch("environment")
    environments.reset(seeds)
    first: dict[int, FinishedEpisode] = {}
    while len(first) < environments.count:
        if stop.is_set():
            return None
        clock.switch("acting")
        action, _ = act(actor, environments.observation, deterministic=True)
        clock.switch("environment")
        step = environments.step(action.reshape(environments.action_shape))
        metrics.environment_steps.inc(int(step.valid.sum()))
        for episode in step.finished:
            first.setdefault(episode.environment, episode)
    return tuple(first[number] for number in range(environments.count))


class EvaluatingLoop:
    """Evaluates every snapshot that the poller brings, and the last one of a finished run."""

    def __init__(
        self,
        *,
        build_environments: Callable[[], Environments],
        seeds: Sequence[int],
        survive_faults: bool,
        staged: StagedActor,
        poller: SnapshotPoller,
        report: Report,
        metrics: EvaluatorMetrics,
        clock: ActivityClock,
    ) -> None:
        """Build the environments, one for each of the seeds.

        Args:
            survive_faults: rebuild the environments when one of them fails, and evaluate again.
        """
        self._build, self._seeds, self._survive_faults = build_environments, list(seeds), survive_faults
        self._actor, self._poller, self._report = staged.actor, poller, report
        self._metrics, self._clock, self._log = metrics, clock, get_logger()
        self._environments = build_environments()

    def run(self, stop: StopSignal) -> None:
        """Evaluate until the run ended and its last snapshot is evaluated, or the stop.

        Raises:
            EnvironmentFaultError: an environment failed, and it is not to be survived.
            PacelineError: the learner refused this evaluator for good.
        """
        while True:
            self._clock.switch("waiting")
            if not self._poller.wait_and_apply(stop) or self._poller.applied is None:
                return
            self._evaluate(self._poller.applied, stop)

    def close(self) -> None:
        """End the environments."""
        self._clock.switch("finishing")
        self._environments.close()

    def _evaluate(self, header: SnapshotHeader, stop: StopSignal) -> None:
        began = time.monotonic()
        episodes = self._run_episodes(header, stop)
        if episodes is None:
            return
        mean = sum(episode.episode_return for episode in episodes) / len(episodes)
        self._metrics.evaluations.inc()
        self._metrics.evaluation_seconds.observe(time.monotonic() - began)
        self._metrics.set_mean_return(mean)
        self._clock.switch("reporting")
        reported = self._report(header, episodes)
        self._log.info(
            "snapshot_evaluated",
            policy=str(header.identity),
            environment_steps=header.environment_step_count,
            mean_return=round(mean, 3),
            reported=reported,
        )

    def _run_episodes(self, header: SnapshotHeader, stop: StopSignal) -> tuple[FinishedEpisode, ...] | None:
        """As `evaluate`, on other seeds where an environment fails; None, too, where that does not help."""
        for tries_left in reversed(range(MAX_TRIES)):
            try:
                return evaluate(
                    self._actor, self._environments, self._seeds, stop=stop, clock=self._clock, metrics=self._metrics
                )
            except EnvironmentFaultError as error:
                self._metrics.environment_faults.inc()
                if not self._survive_faults:
                    raise
                event = "evaluation_repeated" if tries_left else "evaluation_skipped"
                self._log.warning(event, policy=str(header.identity), reason=str(error))
                if error.environment is not None:
                    # The same actor would do the same in it again.
                    self._seeds[error.environment] = max(self._seeds) + 1
                self._environments.close()
                self._environments = self._build()
        return None
