"""The collector's entry: joins the run, opens its connections, collects, and ends in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from paceline.actors import ActorSemantics, build_actor
from paceline.actors.checks import require_made_for
from paceline.collector.assignment import Assignment
from paceline.collector.loop import CollectingLoop
from paceline.collector.metrics import ACTIVITIES, CollectorMetrics
from paceline.collector.reporter import EpisodeReporter
from paceline.collector.writer import BlockWriter
from paceline.config import Config, task_kwargs
from paceline.envs import acting_seed, describe_environment
from paceline.errors import ConfigError, DeadlineError
from paceline.health import Health
from paceline.lag.bound import LagBound, require_reachable
from paceline.lag.injection import make_injector
from paceline.lag.trace import TraceWriter
from paceline.process import StopSignal, own_time
from paceline.replica import InjectedStaging, LearnerClock, ReplicaOwner, SnapshotPoller, Staging, Standings, join
from paceline.rpc.client import open_channel
from paceline.rpc.tokens import COLLECTOR
from paceline.snapshot import StagedActor
from paceline.telemetry import ActivityClock, get_logger, serve_metrics
from paceline.v1 import parameters_pb2, run_pb2, run_pb2_grpc

_LAST_REPORT_SECONDS = 2.0
"""At the end, how long finished episodes may wait to be reported."""


def run(config: Config, *, index: int | None, stop: StopSignal, clock: Callable[[], float] = own_time) -> None:
    """Collect rows for the run until it has all of them, or until the stop.

    Args:
        index: the index to hold in the run, whoever held it before; None: the lowest free one.
        clock: this host's, in seconds since 1970.

    Raises:
        PacelineError: something that a person can mend; what was sealed before is appended.
    """
    registry = CollectorRegistry()
    learner_clock = LearnerClock(clock)
    metrics = CollectorMetrics(registry, learner_clock)
    activities = ActivityClock(metrics.activity_seconds, ACTIVITIES, "starting")
    log, health = get_logger(), Health(config.run.stuck_seconds, unready="no snapshot is applied yet")
    health.watch(activities.doing, exempt=("starting", "waiting", "finishing"))
    with ExitStack() as cleanup:
        cleanup.callback(serve_metrics(registry, config.collector.metrics_listen, "collector", health).close)
        description = describe_environment(config.env, algorithm=config.learner.algorithm.name)
        learner = open_channel(config.learner.address, config.rpc, config.security, COLLECTOR)
        cleanup.callback(learner.close)
        try:
            place = join(run_pb2_grpc.RunServiceStub(learner), config, run_pb2.ROLE_COLLECTOR, stop, index=index)
        except DeadlineError:
            return  # stopped before the learner answered
        if place.run_state == parameters_pb2.RUN_STATE_FINISHED:
            log.info("run_finished")
            return
        _require_same_settings(config, place)
        assignment = Assignment.of(config, place, description)
        semantics = ActorSemantics.from_json(place.actor_semantics_json)
        require_made_for(
            semantics,
            description.id,
            observation_dim=description.observation_dim,
            action_low=description.action_low,
            action_high=description.action_high,
        )
        staged = StagedActor(build_actor(semantics, own_builder=config.actor.builder))
        standings = Standings()
        snapshots = learner
        if config.collector.snapshots_address is not None:
            snapshots = open_channel(config.collector.snapshots_address, config.rpc, config.security, COLLECTOR)
            cleanup.callback(snapshots.close)
        poller = SnapshotPoller(
            snapshots,
            staged,
            run_id=config.run_id,
            rpc=config.rpc,
            poll_seconds=config.collector.poll_seconds,
            metrics=metrics.replica,
            owner=ReplicaOwner(place.index, place.incarnation),
            clock=learner_clock,
            standings=standings,
            staging=_make_staging(config, place, staged, standings),
        )
        poller.start()
        cleanup.callback(poller.close)
        activities.switch("waiting")
        # The first snapshot needs no rows: the learner serves one before there are any.
        if poller.wait_and_apply(stop):
            health.set_ready()
            with ExitStack() as collecting:
                loop = _open_loop(assignment, learner, staged, poller, metrics, activities, collecting)
                loop.run(stop)
        log.info("collector_ended", stopped=stop.is_set(), finished=poller.finished)


def _require_same_settings(config: Config, place: run_pb2.JoinResponse) -> None:
    """Raise ConfigError where the rows would be of another environment, or of other returns, than the learner's.

    What an older learner does not tell is not compared.
    """
    told: list[tuple[str, Any, Any]] = []
    if place.environment_id:
        told.append(("env.id", config.env.id, place.environment_id))
    if place.environment_kwargs_json:
        theirs = task_kwargs(json.loads(place.environment_kwargs_json))
        told.append(("env.kwargs", config.env.task_kwargs, theirs))
    algorithm = config.learner.algorithm
    if place.n_step:
        told.append(("learner.algorithm.n_step", algorithm.n_step, place.n_step))
    # Rows of one step hold the reward alone, and the learner's own gamma is all that counts.
    if place.gamma and algorithm.n_step > 1:
        told.append(("learner.algorithm.gamma", algorithm.gamma, place.gamma))
    for name, mine, theirs in told:
        if mine != theirs:
            raise ConfigError(
                f"{name} is {mine!r} for this collector and {theirs!r} for the learner: expected the same, since the "
                f"learner would take the rows for what they are not; start learner and collectors with the same {name}"
            )


def _make_staging(
    config: Config, place: run_pb2.JoinResponse, staged: StagedActor, standings: Standings
) -> Staging | None:
    """What holds the lag that `lag.inject` asks for; None: no lag is injected.

    Raises:
        ConfigError: the injection makes no sense, or is over the lag bound.
        NotFoundError, InvalidInputError: the trace is missing or damaged.
    """
    settings, most = config.lag.inject, config.lag.max_lag_versions
    injector = make_injector(
        settings.mode,
        versions=settings.versions,
        weights=settings.weights,
        trace=settings.trace,
        collector=place.index,
        seed=place.run_seed,
    )
    if injector is None:
        return None
    require_reachable(most, injector.most_versions)
    return InjectedStaging(staged, injector, LagBound(most), standings)


def _open_loop(
    assignment: Assignment,
    learner: grpc.Channel,
    staged: StagedActor,
    poller: SnapshotPoller,
    metrics: CollectorMetrics,
    activities: ActivityClock,
    cleanup: ExitStack,
) -> CollectingLoop:
    """The loop with its writer and reporter, which run; `cleanup` ends all three in order."""
    config, place = assignment.config, assignment.place
    replay = open_channel(assignment.replay_address, config.rpc, config.security, COLLECTOR)
    cleanup.callback(replay.close)
    reporter = EpisodeReporter(
        learner,
        run_id=config.run_id,
        collector_index=place.index,
        collector_incarnation=place.incarnation,
        rpc=config.rpc,
        metrics=metrics,
    )
    writer = BlockWriter(
        replay,
        run_id=config.run_id,
        table=place.table,
        spec=assignment.spec,
        collector_index=place.index,
        collector_incarnation=place.incarnation,
        max_blocks_in_flight=config.collector.max_blocks_in_flight,
        block_rows=assignment.block_rows,
        rpc=config.rpc,
        limiter_seconds=assignment.table.limiter.deadline_seconds,
        metrics=metrics.appends,
        compact_form=assignment.compact_form,
        compact_stride=assignment.row_stride,
    )
    trace = None
    if config.lag.record:
        trace = TraceWriter.open(config.run_folder / "lag-trace", place.index)
        cleanup.callback(trace.close)
    loop = CollectingLoop(
        config.collector,
        description=assignment.description,
        build_environments=assignment.build_environments,
        staged=staged,
        poller=poller,
        filler=assignment.make_filler(poller.clock),
        writer=writer,
        reporter=reporter,
        metrics=metrics,
        clock=activities,
        warmup_steps=place.warmup_step_count,
        seed=acting_seed(place.run_seed, place.index, place.incarnation),
        bound=LagBound(config.lag.max_lag_versions),
        trace=trace,
    )
    writer.start()
    reporter.start()
    cleanup.callback(reporter.close, _LAST_REPORT_SECONDS)
    cleanup.callback(loop.close, config.rpc.drain_seconds)
    return loop
