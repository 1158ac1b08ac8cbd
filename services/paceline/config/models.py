"""The tree of settings: frozen models, checked when they are built, alone and against each other."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    field_serializer,
    model_validator,
)

from paceline.errors import ConfigError

_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_.:\-\[\]]+):(?P<port>\d{1,5})")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")


def _check_address(value: str) -> str:
    match = _ADDRESS.fullmatch(value)
    if not match or int(match["port"]) > 65535:
        raise ValueError("expected host:port with a port of 0 to 65535, such as 127.0.0.1:50051; 0 takes any free port")
    return value


def _check_run_id(value: str) -> str:
    if not _RUN_ID.fullmatch(value):
        raise ValueError("expected 1 to 64 letters, digits, '-', '_' or '.', beginning with a letter or digit")
    return value


Address = Annotated[str, AfterValidator(_check_address)]
RunId = Annotated[str, AfterValidator(_check_run_id)]


class Model(BaseModel):
    """Frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class RunConfig(Model):
    """What is trained, and for how long."""

    id: RunId | None = None
    """Names the run: its folder and its keys in Redis. None: `paceline train` makes one of file name and time."""
    directory: Path = Path("runs")
    """Where runs keep their folders."""
    seed: NonNegativeInt = 0
    """Every random generator of the run derives from it."""
    environment_steps: PositiveInt = 10_000
    """The run ends when so many environment steps are stored and their updates are done."""
    schedule: Literal["async"] = "async"
    """How collecting and updating take turns: `async` lets both run, bounded by the limiter."""


class EnvConfig(Model):
    """The environment of collectors and evaluator."""

    id: str = "Pendulum-v1"
    """A Gymnasium id; a module that registers it may be named before a colon, as `my_package:MyEnv-v0`."""
    kwargs: dict[str, Any] = {}
    """Passed to the environment."""
    vectorization: Literal["sync", "async"] = "sync"
    """`sync` steps the environments of a collector in its process, `async` each in a process of its own."""
    autoreset: Literal["next_step", "same_step"] = "next_step"
    """When a finished environment is reset: on the step after its last, or within it."""


class RpcConfig(Model):
    """Deadlines and keep-alive of every call, for both ends, so that they cannot disagree."""

    deadline_seconds: PositiveFloat = 10.0
    """Of a short call."""
    stream_seconds: PositiveFloat = 600.0
    """Of a stream; a client opens the next one then, and loses nothing."""
    keepalive_seconds: PositiveFloat = 20.0
    """Between pings on a quiet connection."""
    keepalive_timeout_seconds: PositiveFloat = 10.0
    """A peer that has not answered a ping by then is gone."""
    backoff_initial_seconds: PositiveFloat = 0.1
    """First wait before a retry; it doubles, with jitter."""
    backoff_max_seconds: PositiveFloat = 5.0
    """Longest wait before a retry."""
    max_message_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 30)] = 64 << 20
    """Largest message that either end accepts; bulk data travels in messages of about 1 MiB."""
    drain_seconds: PositiveFloat = 5.0
    """After a stop signal, calls in progress may finish for so long."""


class LimiterConfig(Model):
    """When a table lets samples and inserts pass."""

    min_rows: PositiveInt = 100
    """Rows needed before the first sample: the start of learning."""
    window_rows: PositiveInt | None = None
    """Width of the band that sampled rows may wander in around the ratio (with `learner.updates: strict`). None: twice
    the smallest that admits one batch and one block."""
    deadline_seconds: PositiveFloat = 30.0
    """A wait ends after this time with a reason; the client asks again and loses nothing."""


class TableConfig(Model):
    """One table of the replay service."""

    capacity_rows: PositiveInt = 1_000_000
    """The oldest blocks are removed, from memory and from Redis, when a block would exceed it."""
    allow_non_finite: bool = False
    """Whether NaN and infinity may be stored in floating columns; refused by default."""
    limiter: LimiterConfig = LimiterConfig()


class ReplayConfig(Model):
    """Settings of the replay service."""

    address: Address = "127.0.0.1:50051"
    """Where the others reach it."""
    listen: Address = "127.0.0.1:50051"
    """Where it listens. Left at its default, `paceline train` takes any free port, here and for the other addresses."""
    metrics_listen: Address = "127.0.0.1:9101"
    """Where /metrics listens."""
    redis_url: SecretStr | None = None
    """Where the record is kept (redis://, rediss://, unix://). None: `paceline train` starts its own."""
    redis_deadline_seconds: PositiveFloat = 10.0
    """Of one command."""
    max_streams: PositiveInt = 96
    """Append and Sample streams that are served at once; more are refused, so that short calls always have a thread."""
    tables: dict[str, TableConfig] = {"transitions": TableConfig()}

    @field_serializer("redis_url")
    def _hide_password(self, value: SecretStr | None) -> str | None:
        return None if value is None else redact_url(value.get_secret_value())


class SacConfig(Model):
    """Soft actor-critic: Haarnoja et al. 2018, with a learned temperature."""

    name: Literal["sac"] = "sac"
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.99
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Share of the critic that the target critic takes over in each update."""
    actor_learning_rate: PositiveFloat = 3e-4
    critic_learning_rate: PositiveFloat = 3e-4
    temperature_learning_rate: PositiveFloat = 3e-4
    initial_temperature: PositiveFloat = 1.0
    target_entropy: float | None = None
    """None: minus the number of action dimensions."""
    hidden: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (256, 256)
    """Widths of the hidden layers of actor and critics."""


class CheckpointConfig(Model):
    """What the learner keeps on disk to go on from."""

    every_updates: PositiveInt = 2_000
    keep: PositiveInt = 3
    """Complete checkpoints kept; older ones are removed."""
    fallback: bool = False
    """On resume, use the next older checkpoint when the newest is damaged; otherwise that is an error."""


class LearnerConfig(Model):
    """Settings of the learner: its training process and its endpoint process."""

    address: Address = "127.0.0.1:50052"
    """Where the others reach its endpoint."""
    listen: Address = "127.0.0.1:50052"
    """Where the endpoint listens."""
    metrics_listen: Address = "127.0.0.1:9102"
    """Where /metrics of the training process listens."""
    endpoint_metrics_listen: Address = "127.0.0.1:9103"
    """Where /metrics of the endpoint process listens."""
    algorithm: SacConfig = SacConfig()
    table: str = "transitions"
    """The table to learn from."""
    batch_size: PositiveInt = 256
    updates: Literal["strict", "learner_bound"] = "strict"
    """`strict` holds `updates_per_step`, `learner_bound` updates as fast as it can."""
    updates_per_step: PositiveFloat = 1.0
    """Updates per environment step."""
    prefetch_batches: PositiveInt = 4
    """Batches asked for ahead of the update."""
    publish_every_updates: PositiveInt = 10
    """A snapshot is published after so many updates."""
    chunk_bytes: Annotated[int, Field(ge=1 << 10, le=32 << 20)] = 1 << 20
    """Snapshot bytes in one message."""
    record_every_seconds: PositiveFloat = 2.0
    """Between two records of training figures in TensorBoard and metrics.jsonl."""
    silence_seconds: PositiveFloat = 30.0
    """The series of a collector that has not been heard for so long are removed."""
    device: Literal["cpu"] = "cpu"
    threads: PositiveInt = 1
    """Compute threads of the training process."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    final_evaluation_seconds: NonNegativeFloat = 60.0
    """At the end of the run, how long to wait for the evaluation of the last snapshot."""


class CollectorConfig(Model):
    """Settings of each collector."""

    count: PositiveInt = 1
    """Collectors that `paceline train` starts, and among which the warm-up is divided."""
    max_count: Annotated[int, Field(ge=1, le=4096)] = 256
    """Indices that may be given out: the bound on metric labels."""
    metrics_listen: Address = "127.0.0.1:0"
    """Where /metrics listens; on one machine each collector needs a port of its own, so 0."""
    environments: PositiveInt = 1
    """Environments in one collector."""
    block_rows: PositiveInt = 64
    """Rows in a full block."""
    block_seconds: PositiveFloat = 0.1
    """A block that has rows is sealed after so long, full or not."""
    max_blocks_in_flight: PositiveInt = 4
    """Blocks sealed but not acknowledged; collecting waits when there are so many."""
    warmup_steps: NonNegativeInt = 100
    """Random environment steps at the start of the run, all collectors together."""
    poll_seconds: Annotated[float, Field(gt=0, le=60)] = 10.0
    """How long a poll may wait at the learner for something newer."""
    on_environment_error: Literal["stop", "reset"] = "stop"
    """When an environment raises or returns nonsense: end with an error, or drop its episode, rebuild it and go on."""


class EvaluatorConfig(Model):
    """Settings of the evaluator."""

    enabled: bool = True
    metrics_listen: Address = "127.0.0.1:0"
    """Where /metrics listens."""
    every_versions: PositiveInt = 50
    """Each n-th policy version is evaluated, or the newest where evaluation takes longer."""
    episodes: PositiveInt = 20
    """Episodes in one evaluation."""
    seed: NonNegativeInt = 10_000
    """Seed of the first episode; the others follow. Fixed, so that evaluations compare."""


class Config(Model):
    """Everything that a run is made of."""

    run: RunConfig = RunConfig()
    env: EnvConfig = EnvConfig()
    rpc: RpcConfig = RpcConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    collector: CollectorConfig = CollectorConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        tables, learner = self.replay.tables, self.learner
        if learner.table not in tables:
            raise ValueError(
                f"learner.table is {learner.table!r}: expected a table of replay.tables, which has {', '.join(tables)}"
            )
        if learner.chunk_bytes > self.rpc.max_message_bytes // 2:
            raise ValueError(
                f"learner.chunk_bytes is {learner.chunk_bytes}: expected at most half of rpc.max_message_bytes, "
                f"{self.rpc.max_message_bytes // 2}, or no message could carry a chunk"
            )
        table = tables[learner.table]
        if self.collector.count > self.collector.max_count:
            raise ValueError(
                f"collector.count is {self.collector.count}: expected at most collector.max_count, "
                f"{self.collector.max_count}"
            )
        if self.collector.block_rows > table.capacity_rows:
            raise ValueError(
                f"collector.block_rows is {self.collector.block_rows}: expected at most the table's capacity_rows, "
                f"{table.capacity_rows}"
            )
        if table.limiter.min_rows > table.capacity_rows:
            raise ValueError(
                f"replay.tables.{learner.table}.limiter.min_rows is {table.limiter.min_rows}: expected at most "
                f"capacity_rows, {table.capacity_rows}, or sampling never begins"
            )
        ratio, window = self.samples_per_insert(), table.limiter.window_rows
        if ratio is not None and window is not None and window < self._smallest_window(ratio):
            raise ValueError(
                f"replay.tables.{learner.table}.limiter.window_rows is {window}: expected at least "
                f"{self._smallest_window(ratio)}, one batch of {learner.batch_size} and one block of "
                f"{self.collector.block_rows} rows sampled {ratio:g} times each, or both sides wait for each other"
            )
        if table.limiter.min_rows > self.run.environment_steps:
            raise ValueError(
                f"run.environment_steps is {self.run.environment_steps}: expected at least limiter.min_rows, "
                f"{table.limiter.min_rows}, or the run ends before it learns"
            )
        return self

    @property
    def run_folder(self) -> Path:
        """Where the run's files lie. Raises ConfigError when the run has no id yet."""
        return self.run.directory / self.run_id

    @property
    def run_id(self) -> str:
        """The run's id. Raises ConfigError when it has none yet."""
        if self.run.id is None:
            raise ConfigError(
                "run.id is not set: expected a name that all services of the run share, such as run.id=first-try"
            )
        return self.run.id

    def samples_per_insert(self) -> float | None:
        """Rows sampled for each row inserted into the learner's table; None where the ratio runs free."""
        if self.learner.updates == "learner_bound":
            return None
        return self.learner.updates_per_step * self.learner.batch_size

    def limiter_window_rows(self) -> int | None:
        """Width of the limiter's band on the learner's table, in sampled rows; None where the ratio runs free."""
        ratio = self.samples_per_insert()
        if ratio is None:
            return None
        return self.replay.tables[self.learner.table].limiter.window_rows or 2 * self._smallest_window(ratio)

    def _smallest_window(self, samples_per_insert: float) -> int:
        # Below this there is a state in which the next block and the next batch both overstep the band.
        return self.learner.batch_size + math.ceil(self.collector.block_rows * samples_per_insert)


def redact_url(text: str) -> str:
    """The text with the password of each URL in it replaced by ***: `user:password@`, or `?password=`."""
    # Up to the last @: a password may hold one.
    without = re.sub(r"(://[^:/@\s]*):\S*@", r"\1:***@", text)
    return re.sub(r"([?&]password=)[^&\s'\"]*", r"\1***", without)
