"""RunService: who takes part in the run, and what they report."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc.aio

from paceline.config import Config
from paceline.errors import InvalidInputError
from paceline.identity import PolicyIdentity, require_same_run
from paceline.learner.endpoint_metrics import EndpointMetrics
from paceline.learner.ledger import Members
from paceline.learner.registry import COLLECTOR, EVALUATOR, RunRegistry
from paceline.rpc.wire import identity_from_wire
from paceline.serving.parameter_service import require_protocol
from paceline.serving.publication import Publication
from paceline.v1 import rows_pb2, run_pb2, run_pb2_grpc

SERVICE_NAME = run_pb2.DESCRIPTOR.services_by_name["RunService"].full_name
MAX_PROCESS_ID_LENGTH = 512
_ROLES: dict[int, str] = {run_pb2.ROLE_COLLECTOR: COLLECTOR, run_pb2.ROLE_EVALUATOR: EVALUATOR}

Records = Sequence[tuple[str, Mapping[str, Any]]]
"""Kind and fields of each record."""


@dataclass(frozen=True)
class RunDescription:
    """What everybody who joins is told."""

    run_id: str
    seed: int
    table: str
    row_spec: rows_pb2.RowSpec
    actor_semantics_json: str
    environment_id: str = ""
    """Empty, as the three below where they are so: not told, and compared by nobody."""
    environment_kwargs_json: str = ""
    n_step: int = 0
    gamma: float = 0.0

    @classmethod
    def of(cls, config: Config, row_spec: rows_pb2.RowSpec, actor_semantics_json: str) -> Self:
        """What a learner with this configuration tells."""
        kwargs = config.env.model_dump(mode="json")["kwargs"]
        return cls(
            config.run_id,
            config.run.seed,
            config.learner.table,
            row_spec,
            actor_semantics_json,
            environment_id=config.env.id,
            environment_kwargs_json=json.dumps(kwargs, sort_keys=True, separators=(",", ":")),
            n_step=config.learner.algorithm.n_step,
            gamma=config.learner.algorithm.gamma,
        )


class RunService(run_pb2_grpc.RunServiceServicer):
    """Wire in, registry call, wire out."""

    def __init__(
        self,
        description: RunDescription,
        publication: Publication,
        registry: RunRegistry,
        metrics: EndpointMetrics,
        *,
        keep: Callable[[Members], Awaitable[None]],
        record: Callable[[Records], Awaitable[None]],
        evaluated: Callable[[PolicyIdentity], None],
        was_published: Callable[[PolicyIdentity], bool],
    ) -> None:
        """`keep` makes incarnations durable, `record` writes records; both return when that is done."""
        self._description, self._publication, self._registry = description, publication, registry
        self._metrics, self._keep, self._record = metrics, keep, record
        self._evaluated, self._was_published = evaluated, was_published

    async def Join(self, request: run_pb2.JoinRequest, context: grpc.aio.ServicerContext) -> run_pb2.JoinResponse:
        """Give a place in the run; it is durable before it is told."""
        self._admit(request.run_id)
        require_protocol(request.protocol_version)
        role = _ROLES.get(request.role)
        if role is None:
            raise InvalidInputError(f"role {request.role}: expected ROLE_COLLECTOR or ROLE_EVALUATOR")
        if len(request.process_id) > MAX_PROCESS_ID_LENGTH:
            raise InvalidInputError(
                f"process_id has {len(request.process_id)} characters: expected at most {MAX_PROCESS_ID_LENGTH}"
            )
        place = self._registry.join(role, request.index if request.HasField("index") else None, request.process_id)
        await self._keep(self._registry.members())
        steps_environments = role == COLLECTOR
        return run_pb2.JoinResponse(
            index=place.index,
            incarnation=place.incarnation,
            row_spec=self._description.row_spec if steps_environments else None,
            table=self._description.table if steps_environments else "",
            actor_semantics_json=self._description.actor_semantics_json,
            warmup_step_count=place.warmup_steps,
            run_seed=self._description.seed,
            run_state=self._publication.run_state,
            environment_id=self._description.environment_id,
            environment_kwargs_json=self._description.environment_kwargs_json,
            n_step=self._description.n_step,
            gamma=self._description.gamma,
        )

    async def ReportEpisodes(
        self, request: run_pb2.ReportEpisodesRequest, context: grpc.aio.ServicerContext
    ) -> run_pb2.ReportEpisodesResponse:
        """Record finished episodes, once."""
        self._admit(request.run_id)
        _check_episodes(request.episodes)
        index, incarnation = request.collector_index, request.collector_incarnation
        if self._registry.begin_report(index, incarnation, request.sequence, request.environment_step_count):
            steps = self._registry.environment_steps()
            await self._record(
                [
                    (
                        "episode",
                        {
                            "collector_index": index,
                            "collector_incarnation": incarnation,
                            "sequence": request.sequence,
                            "episode_return": episode.episode_return,
                            "length": episode.length,
                            "terminated": episode.terminated,
                            "environment_steps": steps,
                        },
                    )
                    for episode in request.episodes
                ]
            )
            self._metrics.count_episodes([episode.episode_return for episode in request.episodes])
        return run_pb2.ReportEpisodesResponse(run_state=self._publication.run_state)

    async def ReportEvaluation(
        self, request: run_pb2.ReportEvaluationRequest, context: grpc.aio.ServicerContext
    ) -> run_pb2.ReportEvaluationResponse:
        """Record the evaluation of a snapshot, once."""
        self._admit(request.run_id)
        policy = identity_from_wire(request.policy)
        if not request.episodes:
            raise InvalidInputError(f"the evaluation of policy {policy} has no episode: expected one or more")
        _check_episodes(request.episodes)
        if not self._was_published(policy):
            raise InvalidInputError(f"policy {policy} was evaluated, which this run never published")
        if self._registry.begin_evaluation(policy):
            returns = [episode.episode_return for episode in request.episodes]
            mean_return = math.fsum(returns) / len(returns)
            fields = {
                "incarnation": policy.incarnation,
                "version": policy.version,
                "learner_step": request.learner_step,
                "environment_steps": request.environment_step_count,
                "mean_return": mean_return,
                "returns": returns,
                "mean_length": math.fsum(episode.length for episode in request.episodes) / len(returns),
            }
            await self._record([("evaluation", fields)])
            self._metrics.set_evaluation(policy, mean_return)
        # Told for a repeat too: the first answer may have been lost with the learner before.
        self._evaluated(policy)
        return run_pb2.ReportEvaluationResponse(run_state=self._publication.run_state)

    def _admit(self, run_id: str) -> None:
        require_same_run(self._description.run_id, run_id)
        self._publication.require_serving()


def _check_episodes(episodes: Sequence[run_pb2.Episode]) -> None:
    for episode in episodes:
        if not math.isfinite(episode.episode_return):
            raise InvalidInputError(f"an episode has the return {episode.episode_return}: expected a finite number")
        if episode.length < 0:
            raise InvalidInputError(f"an episode has the length {episode.length}: expected 0 or more steps")
