"""The settings of a run: one YAML file, one tree of frozen models, checked when it is built.

Sources in rising order: the file, `PACELINE_*` variables (`PACELINE_REPLAY__REDIS_URL`), `key=value` arguments
(`replay.redis_url=...`). The caller hands in the variables: this package reads no environment. Both kinds of override
go through one path, which is why pydantic-settings is not used.
"""

from paceline.config.loading import build, describe, dump, load, with_run_id
from paceline.config.models import (
    CheckpointConfig,
    CollectorConfig,
    Config,
    EnvConfig,
    EvaluatorConfig,
    LearnerConfig,
    LimiterConfig,
    ReplayConfig,
    RpcConfig,
    RunConfig,
    SacConfig,
    SecurityConfig,
    TableConfig,
    redact_url,
    task_kwargs,
)

__all__ = [
    "CheckpointConfig",
    "CollectorConfig",
    "Config",
    "EnvConfig",
    "EvaluatorConfig",
    "LearnerConfig",
    "LimiterConfig",
    "ReplayConfig",
    "RpcConfig",
    "RunConfig",
    "SacConfig",
    "SecurityConfig",
    "TableConfig",
    "build",
    "describe",
    "dump",
    "load",
    "redact_url",
    "task_kwargs",
    "with_run_id",
]
