"""The learner's entry: takes hold of the run, builds or restores the algorithm, opens its connections, trains."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import grpc
import torch
from prometheus_client import CollectorRegistry

from paceline.actors import SCHEMA_VERSION, Actor, ActorSemantics, build_actor, squashed_gaussian
from paceline.config import Config
from paceline.envs import EnvironmentDescription, describe_environment
from paceline.errors import PacelineError
from paceline.learner.algorithms import Algorithm, build_algorithm
from paceline.learner.checkpoint import Checkpoints
from paceline.learner.endpoint import Endpoint
from paceline.learner.ledger import Ledger
from paceline.learner.loop import Budget, Loop, Progress
from paceline.learner.metrics import LearnerMetrics
from paceline.learner.sources import SampleSource
from paceline.process import StopSignal
from paceline.rows import RowSpec, transition_spec
from paceline.rpc.client import Backoff, call_until_answered, open_channel
from paceline.rpc.wire import row_spec_to_wire
from paceline.snapshot import make_header, pack_state
from paceline.telemetry import get_logger, serve_metrics
from paceline.v1 import replay_pb2, replay_pb2_grpc

log = get_logger()


def run(config: Config, *, resume: bool, stop: StopSignal) -> None:
    """Train until the run ends or the process is asked to stop; in both cases a checkpoint is written.

    Raises:
        ConflictError: the run is used and `resume` is not asked for, or another learner has it.
        CheckpointError: there is no checkpoint to resume from, or it is damaged or of another run.
        NonFiniteError: a loss, gradient or weight is not finite; nothing of it was published or saved.
    """
    torch.set_num_threads(config.learner.threads)
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    server = serve_metrics(registry, config.learner.metrics_listen, "learner")
    try:
        with Ledger.open(config.run_folder, resume) as ledger:
            _train(config, ledger, metrics, resume=resume, stop=stop)
    finally:
        server.close()
