"""The evaluator's entry: joins the run, opens its connections, evaluates, and ends in order."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack

from prometheus_client import CollectorRegistry

from paceline.actors import ActorSemantics, build_actor
from paceline.actors.checks import require_made_for
from paceline.config import Config, task_kwargs
from paceline.envs import Environments, FinishedEpisode, describe_environment, make_vector_environment
from paceline.errors import ConfigError, DeadlineError, PacelineError
from paceline.evaluator.loop import EvaluatingLoop
from paceline.evaluator.metrics import ACTIVITIES, EvaluatorMetrics
from paceline.health import Health
from paceline.process import StopSignal
from paceline.replica import LogFirstWait, SnapshotPoller, join
from paceline.rpc.client import Backoff, call_until_answered, open_channel
from paceline.rpc.tokens import READER
from paceline.rpc.wire import identity_to_wire
from paceline.snapshot import SnapshotHeader, StagedActor
from paceline.telemetry import ActivityClock, get_logger, serve_metrics
from paceline.v1 import run_pb2, run_pb2_grpc

_PEER = "the learner's run service"


def run(config: Config, *, stop: StopSignal) -> None:
    """Evaluate each n-th snapshot until the run ended and its last one is evaluated, or until the stop.

    Raises:
        PacelineError: something that a person can mend.
    """
    settings, registry = config.evaluator, CollectorRegistry()
    metrics = EvaluatorMetrics(registry)
    clock = ActivityClock(metrics.activity_seconds, ACTIVITIES, "starting")
    log, health = get_logger(), Health(config.run.stuck_seconds, unready="it has not joined the run yet")
    health.watch(clock.doing, exempt=("starting", "waiting", "reporting", "finishing"))
    with ExitStack() as cleanup:
        cleanup.callback(serve_metrics(registry, settings.metrics_listen, "evaluator", health).close)
        # In this process: one more process for each episode of an evaluation would crowd out the collectors.
        environment = config.env.model_copy(update={"vectorization": "sync"})
        description = describe_environment(environment, algorithm=config.learner.algorithm.name)
        channel = open_channel(config.learner.address, config.rpc, config.security, READER)
        cleanup.callback(channel.close)
        stub = run_pb2_grpc.RunServiceStub(channel)
        try:
            place = join(stub, config, run_pb2.ROLE_EVALUATOR, stop)
        except DeadlineError:
            return  # stopped before the learner answered
        _require_same_environment(config, place)
        semantics = ActorSemantics.from_json(place.actor_semantics_json)
        require_made_for(
            semantics,
            description.id,
            observation_dim=description.observation_dim,
            action_low=description.action_low,
            action_high=description.action_high,
        )
        staged = StagedActor(build_actor(semantics, own_builder=config.actor.builder))
        snapshots = channel
        if settings.snapshots_address is not None:
            snapshots = open_channel(settings.snapshots_address, config.rpc, config.security, READER)
            cleanup.callback(snapshots.close)
        poller = SnapshotPoller(
            snapshots,
            staged,
            run_id=config.run_id,
            rpc=config.rpc,
            poll_seconds=config.collector.poll_seconds,
            metrics=metrics.replica,
            every_versions=settings.every_versions,
        )
        seeds = [settings.seed + number for number in range(settings.episodes)]
        loop = EvaluatingLoop(
            build_environments=lambda: Environments(
                make_vector_environment(environment, settings.episodes), description, seeds
            ),
            seeds=seeds,
            survive_faults=config.collector.on_environment_error == "reset",
            staged=staged,
            poller=poller,
            report=lambda header, episodes: _report(stub, config, poller, stop, header, episodes),
            metrics=metrics,
            clock=clock,
        )
        cleanup.callback(loop.close)
        poller.start()
        health.set_ready()  # the snapshot that it is to judge first may be far ahead
        cleanup.callback(poller.close)
        loop.run(stop)
        log.info("evaluator_ended", stopped=stop.is_set(), finished=poller.finished)


def _report(
    stub: run_pb2_grpc.RunServiceStub,
    config: Config,
    poller: SnapshotPoller,
    stop: StopSignal,
    header: SnapshotHeader,
    episodes: Sequence[FinishedEpisode],
) -> bool:
    """Report one evaluation until the learner takes it; False when nobody takes it any more, or the stop came first."""
    request = run_pb2.ReportEvaluationRequest(
        run_id=config.run_id,
        policy=identity_to_wire(header.identity),
        learner_step=header.learner_step,
        environment_step_count=header.environment_step_count,
        episodes=[
            run_pb2.Episode(episode_return=episode.episode_return, length=episode.length, terminated=episode.terminated)
            for episode in episodes
        ],
    )
    try:
        call_until_answered(
            lambda: stub.ReportEvaluation(request, timeout=config.rpc.deadline_seconds),
            peer=_PEER,
            backoff=Backoff(config.rpc),
            stop=stop,
            on_wait=_ReportWait(poller, config.learner.final_evaluation_seconds),
        )
    except DeadlineError:
        return False
    return True


class _ReportWait(LogFirstWait):
    """Gives up once the run is over for so long that nobody waits for the evaluation any more."""

    def __init__(self, poller: SnapshotPoller, seconds: float) -> None:
        super().__init__("evaluation_report_waiting")
        self._poller, self._until = poller, time.monotonic() + seconds

    def __call__(self, error: PacelineError, seconds: float) -> None:
        super().__call__(error, seconds)
        if self._poller.finished and time.monotonic() > self._until:
            raise DeadlineError(
                f"the run is over, and the learner did not take its last evaluation: {error}"
            ) from error


def _require_same_environment(config: Config, place: run_pb2.JoinResponse) -> None:
    """Raise ConfigError where the learner trains in another environment; an older one may not tell."""
    mine, theirs = config.env.id, place.environment_id
    if theirs and mine != theirs:
        raise _difference("env.id", mine, theirs)
    if place.environment_kwargs_json:
        here, there = config.env.task_kwargs, task_kwargs(json.loads(place.environment_kwargs_json))
        if here != there:
            raise _difference("env.kwargs", here, there)


def _difference(name: str, mine: object, theirs: object) -> ConfigError:
    return ConfigError(
        f"{name} is {mine!r} for this evaluator and {theirs!r} for the learner: expected the same, since its figures "
        f"would be of another task; start learner and evaluator with the same {name}"
    )
