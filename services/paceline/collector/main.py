"""The collector's entry: joins the run, opens its connections, collects, and ends in order."""

from __future__ import annotations

from contextlib import ExitStack

import grpc
from prometheus_client import CollectorRegistry

from paceline.actors import ActorSemantics, build_actor
from paceline.collector.filler import BlockFiller
from paceline.collector.loop import CollectingLoop
from paceline.collector.metrics import ACTIVITIES, CollectorMetrics
from paceline.collector.reporter import EpisodeReporter
from paceline.collector.writer import BlockWriter
from paceline.config import Config
from paceline.envs import (
    EnvironmentDescription,
    Environments,
    acting_seed,
    describe_environment,
    environment_seeds,
    make_vector_environment,
)
from paceline.errors import DeadlineError, RowSpecError
from paceline.process import StopSignal
from paceline.replica import ReplicaOwner, SnapshotPoller, join
from paceline.rows import RowSpec, transition_spec
from paceline.rpc.client import open_channel
from paceline.rpc.wire import row_spec_from_wire
from paceline.snapshot import StagedActor
from paceline.telemetry import ActivityClock, get_logger, serve_metrics
from paceline.v1 import parameters_pb2, run_pb2, run_pb2_grpc

_LAST_REPORT_SECONDS = 2.0
"""At the end, how long finished episodes may wait to be reported."""


def run(config: Config, *, index: int | None, stop: StopSignal) -> None:
    """Collect rows for the run until it has all of them, or until the stop.

    Args:
        index: the index to hold in the run, whoever held it before; None: the lowest free one.

    Raises:
        PacelineError: something that a person can mend; what was sealed before is appended.
    """
    registry = CollectorRegistry()
    metrics = CollectorMetrics(registry)
    clock = ActivityClock(metrics.activity_seconds, ACTIVITIES, "starting")
    log = get_logger()
    with ExitStack() as cleanup:
        cleanup.callback(serve_metrics(registry, config.collector.metrics_listen, "collector").close)
        description = describe_environment(config.env, algorithm=config.learner.algorithm.name)
        learner = open_channel(config.learner.address, config.rpc)
        cleanup.callback(learner.close)
        try:
            place = join(run_pb2_grpc.RunServiceStub(learner), config, run_pb2.ROLE_COLLECTOR, stop, index=index)
        except DeadlineError:
            return  # stopped before the learner answered
        if place.run_state == parameters_pb2.RUN_STATE_FINISHED:
            log.info("run_finished")
            return
        spec = row_spec_from_wire(place.row_spec)
        _require_rows_of(spec, description)
        staged = StagedActor(build_actor(ActorSemantics.from_json(place.actor_semantics_json)))
        poller = SnapshotPoller(
            learner,
            staged,
            run_id=config.run_id,
            rpc=config.rpc,
            poll_seconds=config.collector.poll_seconds,
            metrics=metrics.replica,
            owner=ReplicaOwner(place.index, place.incarnation),
        )
        poller.start()
        cleanup.callback(poller.close)
        clock.switch("waiting")
        # The first snapshot needs no rows: the learner serves one before there are any.
        if poller.wait_and_apply(stop):
            _collect(config, stop, place, spec, description, staged, poller, learner, metrics, clock)
        log.info("collector_ended", stopped=stop.is_set(), finished=poller.finished)


def _collect(
    config: Config,
    stop: StopSignal,
    place: run_pb2.JoinResponse,
    spec: RowSpec,
    description: EnvironmentDescription,
    staged: StagedActor,
    poller: SnapshotPoller,
    learner: grpc.Channel,
    metrics: CollectorMetrics,
    clock: ActivityClock,
) -> None:
    settings, index, incarnation = config.collector, place.index, place.incarnation

    def build_environments(rebuild: int, first_episode: int) -> Environments:
        seeds = environment_seeds(place.run_seed, index, incarnation, settings.environments, rebuild=rebuild)
        vector = make_vector_environment(config.env, settings.environments)
        return Environments(vector, description, seeds, first_episode=first_episode)

    with ExitStack() as cleanup:
        replay = open_channel(config.replay.address, config.rpc)
        cleanup.callback(replay.close)
        reporter = EpisodeReporter(
            learner,
            run_id=config.run_id,
            collector_index=index,
            collector_incarnation=incarnation,
            rpc=config.rpc,
            metrics=metrics,
        )
        writer = BlockWriter(
            replay,
            run_id=config.run_id,
            table=place.table,
            spec=spec,
            collector_index=index,
            collector_incarnation=incarnation,
            max_blocks_in_flight=settings.max_blocks_in_flight,
            rpc=config.rpc,
            limiter_seconds=config.replay.tables[config.learner.table].limiter.deadline_seconds,
            metrics=metrics,
        )
        loop = CollectingLoop(
            settings,
            description=description,
            build_environments=build_environments,
            staged=staged,
            poller=poller,
            filler=BlockFiller(
                spec,
                block_rows=settings.block_rows,
                block_seconds=settings.block_seconds,
                collector_index=index,
                collector_incarnation=incarnation,
            ),
            writer=writer,
            reporter=reporter,
            metrics=metrics,
            clock=clock,
            warmup_steps=place.warmup_step_count,
            seed=acting_seed(place.run_seed, index, incarnation),
        )
        writer.start()
        reporter.start()
        cleanup.callback(reporter.close, _LAST_REPORT_SECONDS)
        cleanup.callback(loop.close, config.rpc.drain_seconds)
        loop.run(stop)


def _require_rows_of(spec: RowSpec, description: EnvironmentDescription) -> None:
    """Raise RowSpecError unless the learner wants the rows that this environment gives."""
    mine = transition_spec(description.observation, description.action)
    if mine.digest == spec.digest:
        return
    wanted, given = ({column.name: column for column in each.columns} for each in (spec, mine))
    different = [name for name in {**wanted, **given} if wanted.get(name) != given.get(name)]
    name = different[0] if different else "the order of columns"
    raise RowSpecError(
        f"the learner's rows differ from environment {description.id!r} in {name}: the learner has {wanted.get(name)}, "
        f"the environment gives {given.get(name)}; start learner and collectors with the same env settings"
    )
