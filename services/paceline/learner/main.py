"""The learner's entry: takes hold of the run, builds or restores the algorithm, opens its connections, trains."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import grpc
import torch
from prometheus_client import CollectorRegistry

from paceline.actors import ActorSemantics, build_actor, own_semantics, squashed_gaussian_semantics
from paceline.config import Config
from paceline.envs import EnvironmentDescription, describe_environment
from paceline.errors import CheckpointError, ConfigError, DeadlineError, NonFiniteError, PacelineError
from paceline.health import Health
from paceline.identity import PolicyIdentity
from paceline.lag.bound import LagBound, LearnerVersion, require_reachable, smallest_reachable_bound
from paceline.lag.injection import make_injector
from paceline.learner.algorithms import Algorithm, build_algorithm
from paceline.learner.checkpoint import Checkpoints, Counters
from paceline.learner.endpoint import Endpoint
from paceline.learner.ledger import Ledger
from paceline.learner.loop import Loop, Progress
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.published import PublishedVersions
from paceline.learner.sources import (
    BatchSource,
    QueueShards,
    QueueSource,
    ShardedSource,
    open_followed,
    open_samples,
    require_ring_fits,
)
from paceline.learner.training_lag import TrainingLag
from paceline.process import StopSignal, own_time
from paceline.rows import RowSpec, transition_spec
from paceline.rpc.client import Backoff, call_until_answered, open_channel
from paceline.rpc.tokens import LEARNER
from paceline.rpc.wire import row_spec_to_wire
from paceline.snapshot import make_header, pack_state
from paceline.telemetry import get_logger, serve_metrics
from paceline.v1 import replay_pb2, replay_pb2_grpc

LAST_READ_SECONDS = 6.0
"""A learner that ends by a number that is not finite keeps its /metrics for so long, a little longer than
deploy/prometheus lets pass between two scrapes; not at all where nobody looks. To slower ones the next learner of the
run tells of it, since the count goes on."""


def run(config: Config, *, resume: bool, stop: StopSignal) -> None:
    """Train until the run ends or the process is asked to stop; either way a checkpoint is written.

    Args:
        resume: go on from the newest checkpoint; a run that stopped before its first begins.

    Raises:
        ConfigError: there is no such device, not the memory to follow the table, or a bound on the lag that cannot be
            met.
        ConflictError: the run is used and `resume` is not asked for, another learner has it, or the rows in replay
            came about under the learner of another folder.
        CheckpointError: policies were published and their checkpoints are gone, or one is damaged or of another run.
        NonFiniteError: a loss, gradient or weight is not finite; nothing of it was published or saved.
    """
    torch.set_num_threads(config.learner.threads)
    device = _device(config)
    _require_reachable_bound(config)
    environment = describe_environment(config.env, algorithm=config.learner.algorithm.name)
    spec = transition_spec(environment.observation, environment.action)
    semantics = _actor_semantics(config, environment)
    require_ring_fits(config, spec, device)
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    health = Health(config.run.stuck_seconds)
    server = serve_metrics(registry, config.learner.metrics_listen, "learner", health)
    try:
        with Ledger.open(config.run_folder, resume) as ledger, contextlib.ExitStack() as cleanup:
            published = None
            if config.lag.attribution:
                published = PublishedVersions(config.run_folder / "learner" / "publications.jsonl")
                cleanup.callback(published.close)
            training = _Training(
                config,
                ledger,
                spec,
                semantics,
                metrics,
                health,
                published=published,
                device=device,
                resume=resume,
            )
            metrics.non_finite.go_on_from(ledger.non_finite_count)
            try:
                training.run(stop)
            except NonFiniteError:
                metrics.non_finite.note()
                ledger.note_non_finite()
                raise
    except NonFiniteError:
        # Everybody knows already: the endpoint told that this learner failed, and the run is free for the next.
        metrics.non_finite.wait_for_readers(LAST_READ_SECONDS, stop)
        raise
    finally:
        server.close()


class _ShardAwayError(PacelineError):
    """A shard was waited for long enough."""


class _Training:
    """One start of the learner: what the loop hands things to."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        spec: RowSpec,
        semantics: ActorSemantics,
        metrics: LearnerMetrics,
        health: Health,
        *,
        published: PublishedVersions | None,
        device: torch.device,
        resume: bool,
    ) -> None:
        self._device = device
        self._config, self._spec, self._semantics, self._metrics = config, spec, semantics, metrics
        self._health = health
        self._incarnation, self._learner_id = ledger.incarnation, ledger.learner_id
        self._log = get_logger()
        self._checkpoints = Checkpoints(
            config.run_folder / "checkpoints",
            run_id=config.run_id,
            algorithm=config.learner.algorithm.name,
            row_spec_digest=spec.digest,
            actor_semantics=semantics,
            environment={"env.id": config.env.id, "env.kwargs": config.env.task_kwargs},
            keep=config.learner.checkpoint.keep,
        )
        self._algorithm = _build_algorithm(config, semantics)
        # Versions go on above the last one that was served, which a checkpoint may be older than.
        self._start = Progress(policy_version=ledger.last_version)
        self._resumed = resume and self._restore(ledger.last_version)
        if resume and not self._resumed:
            self._log.warning("nothing_to_resume", meaning="the run's folder has no checkpoint; the run begins")
        self._bound = LagBound(config.lag.max_lag_versions, self._start.policy_version if self._resumed else 0)
        self._published = published
        self._waits_for: dict[int, str] = {}
        """Why a shard's table is not open yet, as was said last."""
        self._endpoint: Endpoint

    def run(self, stop: StopSignal) -> None:
        """Train, with the endpoint beside, which tells everybody if this ends by an exception."""
        with Endpoint.start(
            self._config,
            incarnation=self._incarnation,
            row_spec=self._spec,
            actor_semantics_json=self._semantics.to_json(),
            resumed_environment_steps=self._start.environment_steps,
        ) as self._endpoint:
            self._endpoint.record(
                "start",
                {
                    "incarnation": self._incarnation,
                    "resumed": self._resumed,
                    "environment_steps": self._start.environment_steps,
                    "learner_step": self._start.learner_step,
                },
            )
            if not self._resumed:
                # Whatever dies from here on, there is something to resume from.
                self._checkpoint(self._start)
            self._start = replace(self._start, policy_version=self._start.policy_version + 1)
            # Served before replay is even asked for, so that nobody's readiness waits for anybody's.
            self._publish(self._start)
            self._health.set_ready()
            with contextlib.ExitStack() as cleanup:
                source = None
                if not self._config.follows:
                    # Processes are started while this one has no channel open.
                    newest = LearnerVersion(
                        self._start.policy_version,
                        incarnation=self._incarnation,
                        base_version=self._bound.base_version,
                    )
                    source = open_samples(self._config, self._spec, learner_version=newest, **self._source_options())
                    cleanup.callback(source.close)
                channels = [
                    cleanup.enter_context(open_channel(address, self._config.rpc, self._config.security, LEARNER))
                    for address in self._config.replay.shard_addresses()
                ]
                try:
                    inserted_by_shard = self._open_tables(channels, stop)
                except DeadlineError:
                    if not stop.is_set():
                        raise
                    self._log.info("stopped_before_training")
                    return
                if source is None:
                    source = open_followed(
                        self._config,
                        channels,
                        self._spec,
                        base_version=self._bound.base_version,
                        learner_incarnation=self._incarnation,
                        **self._source_options(),
                    )
                    cleanup.callback(source.close)
                self._learn(source, inserted_by_shard, stop)

    def _source_options(self) -> dict[str, Any]:
        seed = _seed_of(self._config, self._incarnation)
        return {"seed": seed, "metrics": self._metrics, "device": self._device, "learner_id": self._learner_id}

    def _learn(self, source: BatchSource, inserted_by_shard: Sequence[int | None], stop: StopSignal) -> None:
        settings, table = self._config.learner, self._config.replay.tables[self._config.learner.table]
        inserted_rows = sum(each or 0 for each in inserted_by_shard)
        if None in inserted_by_shard:
            # What those that are away have is known from the checkpoint; by now it may be more. Whether one of them
            # lost its rows shows when it comes.
            inserted_rows = max(inserted_rows, self._start.environment_steps - self._start.step_offset)
        start = self._start.beside(inserted_rows, table.limiter.min_rows)
        if table.queue:
            # Its last rows may all be consumed: then no batch comes to learn from how far the run is.
            start = replace(start, environment_steps=inserted_rows + start.step_offset)
        source.set_policy_version(start.policy_version)
        if isinstance(source, ShardedSource | QueueShards):
            source.go_on_from(inserted_by_shard, inserted_rows)
        loop = Loop(
            self._config,
            algorithm=self._algorithm,
            source=source,
            spec=self._spec,
            start=start,
            incarnation=self._incarnation,
            metrics=self._metrics,
            lag=TrainingLag(
                self._spec,
                bound=self._bound,
                publications=None if self._published is None else self._published.publications,
                metrics=self._metrics,
            ),
            publish=self._publish,
            checkpoint=self._checkpoint,
            record=self._record,
            check_endpoint=self._endpoint.check,
        )
        self._health.watch(loop.doing, exempt=("starting", "finishing"))
        finished = loop.run(stop)
        if isinstance(source, QueueSource | QueueShards):
            source.consume()  # the last checkpoint holds what the last batch taught
        source.close()
        self._log.info("training_ended", finished=finished, **vars(loop.progress))
        if finished:
            self._endpoint.finish()
            if self._config.evaluator.enabled and not self._endpoint.wait_for_evaluation(
                loop.identity(), settings.final_evaluation_seconds, stop
            ):
                self._log.warning("last_snapshot_not_evaluated", waited_seconds=settings.final_evaluation_seconds)
            self._endpoint.record(
                "finish",
                {
                    "learner_step": loop.progress.learner_step,
                    "environment_steps": loop.progress.environment_steps,
                    "policy_version": loop.progress.policy_version,
                },
            )

    def _restore(self, last_version: int) -> bool:
        """Go on from the newest checkpoint; False when the run stopped before its first."""
        checkpoint = self._checkpoints.load(fallback=self._config.learner.checkpoint.fallback)
        if checkpoint is None:
            if last_version > 0:
                raise CheckpointError(
                    f"{self._config.run_folder} has published policies and no checkpoint: expected one in "
                    "checkpoints/; restore it, or start another run.id"
                )
            return False
        self._algorithm.load_state_dict(checkpoint.tensors)
        saved = asdict(checkpoint.counters)
        del saved["incarnation"]
        self._start = replace(Progress(**saved), policy_version=max(saved["policy_version"], last_version))
        self._log.info("resumed", checkpoint=str(checkpoint.path), **vars(self._start))
        return True

    def _open_tables(self, channels: Sequence[grpc.Channel], stop: StopSignal) -> list[int | None]:
        """Declare the rows to every shard; rows that its table ever got, before and now, or None where it is away.

        A run begins when all are there. One that goes on does so without those that do not come within
        `rpc.deadline_seconds` each, as it would if they went away now; one has to be there.

        Raises:
            DeadlineError: the process was asked to stop first.
            ConflictError: their rows came about under another learner, or (ReplacedError) a newer one took over.
        """
        seconds = self._config.rpc.deadline_seconds if self._resumed and len(channels) > 1 else math.inf
        opened: list[int | None] = [None]
        while not any(each is not None for each in opened):
            opened = [self._open_table(shard, channel, stop, seconds) for shard, channel in enumerate(channels)]
        for shard, each in enumerate(opened):
            if each is None:
                self._log.warning("shard_left_out", shard=shard, meaning="it is away; it is taken in when it comes")
        return opened

    def _open_table(self, shard: int, channel: grpc.Channel, stop: StopSignal, seconds: float) -> int | None:
        """Declare the rows to a shard; rows that its table ever got, or None if it does not answer within `seconds`.

        Raises:
            DeadlineError: the process was asked to stop first.
            ConflictError: its rows came about under another learner, or (ReplacedError) a newer one took over.
        """
        stub = replay_pb2_grpc.ReplayServiceStub(channel)
        run_id, table = self._config.run_id, self._config.learner.table
        request = replay_pb2.OpenTableRequest(
            run_id=run_id,
            table=table,
            row_spec=row_spec_to_wire(self._spec),
            learner_id=self._learner_id,
            learner_incarnation=self._incarnation,
        )
        until = time.monotonic() + seconds
        deadline = self._config.rpc.deadline_seconds

        def open_and_describe() -> replay_pb2.DescribeTablesResponse:
            stub.OpenTable(request, timeout=deadline)
            answer: replay_pb2.DescribeTablesResponse = stub.DescribeTables(
                replay_pb2.DescribeTablesRequest(run_id=run_id), timeout=deadline
            )
            return answer

        def waiting(error: PacelineError, seconds: float) -> None:
            self._endpoint.check()
            if str(error) != self._waits_for.get(shard):
                self._waits_for[shard] = str(error)
                self._log.info("waiting_for_replay", shard=shard, reason=str(error))
            if time.monotonic() >= until:
                raise _ShardAwayError(str(error)) from error

        try:
            answer = call_until_answered(
                open_and_describe,
                peer=f"replay at {self._config.replay.shard_addresses()[shard]}",
                backoff=Backoff(self._config.rpc),
                stop=stop,
                on_wait=waiting,
            )
        except _ShardAwayError:
            return None
        return next(described.inserted_row_count for described in answer.tables if described.name == table)

    def _publish(self, progress: Progress) -> None:
        self._metrics.set_policy_version(progress.policy_version)
        actor = self._algorithm.actor
        payload, now = pack_state(actor), own_time()
        self._endpoint.publish(
            make_header(
                actor,
                payload,
                run_id=self._config.run_id,
                identity=PolicyIdentity(self._incarnation, progress.policy_version),
                learner_step=progress.learner_step,
                environment_step_count=progress.environment_steps,
                published_at=now,
            ),
            payload,
        )
        if self._published is not None:
            self._published.note(progress.policy_version, now, progress.learner_step)

    def _checkpoint(self, progress: Progress) -> None:
        path = self._checkpoints.save(
            self._algorithm.state_dict(),
            Counters(incarnation=self._incarnation, **asdict(progress)),
        )
        self._log.info("checkpoint_written", path=str(path), learner_step=progress.learner_step)

    def _record(self, fields: Mapping[str, Any]) -> None:
        self._endpoint.record("training", fields)


def _device(config: Config) -> torch.device:
    if config.learner.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "learner.device is 'cuda' and no CUDA device is visible to this process: expected one (nvidia-smi lists "
            "them; a pod needs a GPU limit and a runtime class, CUDA_VISIBLE_DEVICES must not be empty, torch must be "
            "built for CUDA), or learner.device=cpu"
        )
    return torch.device(config.learner.device)


def _require_reachable_bound(config: Config) -> None:
    """Raise ConfigError where no run could keep to `lag.max_lag_versions`, or the lag to inject makes no sense."""
    inject, table = config.lag.inject, config.replay.tables[config.learner.table]
    injector = None
    if inject.mode != "trace":  # which collectors read, each its own
        injector = make_injector(inject.mode, versions=inject.versions, weights=inject.weights, collector=0, seed=0)
    # From a ring of its own a learner draws a batch when it wants it.
    is_ring = config.follows and not table.queue
    smallest = smallest_reachable_bound(
        prefetch_batches=0 if is_ring else config.learner.prefetch_batches,
        publish_every_updates=config.learner.publish_every_updates,
        most_injected_versions=0 if injector is None else injector.most_versions,
    )
    require_reachable(config.lag.max_lag_versions, smallest)


def _actor_semantics(config: Config, environment: EnvironmentDescription) -> ActorSemantics:
    if config.actor.builder is not None:
        return own_semantics(
            config.actor.builder,
            config.actor.kwargs,
            observation_dim=environment.observation_dim,
            action_dim=len(environment.action_low),
            device=config.learner.device,
        )
    return squashed_gaussian_semantics(
        environment.observation_dim,
        hidden=config.learner.algorithm.hidden,
        action_low=environment.action_low,
        action_high=environment.action_high,
    )


def _build_algorithm(config: Config, semantics: ActorSemantics) -> Algorithm:
    torch.manual_seed(config.run.seed)
    settings = config.learner.algorithm.model_dump()
    actor = build_actor(semantics, config.learner.device, own_builder=config.actor.builder)
    return build_algorithm(settings, actor, seed=config.run.seed)


def _seed_of(config: Config, incarnation: int) -> int:
    # A resumed learner draws other rows than the one before it did, and the same ones each time it is tried.
    return config.run.seed * 1_000_003 + incarnation
