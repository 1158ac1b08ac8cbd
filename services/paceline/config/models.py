"""The tree of settings: frozen models, checked when they are built, alone and against each other."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote

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
SHARD = "{shard}"
"""In an address or a Redis URL, stands for the number of the replay shard."""
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")


def _check_address(value: str) -> str:
    match = _ADDRESS.fullmatch(value)
    if not match or int(match["port"]) > 65535:
        raise ValueError("expected host:port with a port of 0 to 65535, such as 127.0.0.1:50051; 0 takes any free port")
    return value


def _check_shard_addresses(value: str) -> str:
    for address in value.split(","):
        _check_address(address.replace(SHARD, "0"))
    return value


def _check_run_id(value: str) -> str:
    if not _RUN_ID.fullmatch(value):
        raise ValueError("expected 1 to 64 letters, digits, '-', '_' or '.', beginning with a letter or digit")
    return value


Address = Annotated[str, AfterValidator(_check_address)]
ShardAddresses = Annotated[str, AfterValidator(_check_shard_addresses)]
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
    stuck_seconds: PositiveFloat = 60.0
    """A loop that does one thing for so long, and does not wait, is stuck: /healthz of its process says so."""


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

    @property
    def task_kwargs(self) -> dict[str, Any]:
        """The arguments that say what task it is, as JSON makes them."""
        return task_kwargs(self.model_dump(mode="json")["kwargs"])


def task_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What of an environment's arguments, plain values, says what task it is: who watches it changes nothing."""
    made: dict[str, Any] = json.loads(json.dumps(dict(kwargs)))
    made.pop("render_mode", None)
    return made


class ActorConfig(Model):
    """Who acts: the same for learner, collectors and evaluator."""

    builder: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")] | None = None
    """`package.module:callable` of one's own, which is called with the sizes of observation and action, `device` and
    `kwargs`, and gives a `paceline.actors.Actor`; null: the built-in squashed Gaussian. Each process imports it by
    itself, and only the one that its own settings name."""
    kwargs: dict[str, Any] = {}
    """What the builder gets, JSON values only; part of what weights mean, so another value needs a new run."""

    @model_validator(mode="after")
    def _check(self) -> ActorConfig:
        if self.kwargs and self.builder is None:
            raise ValueError("actor.kwargs are given without actor.builder: expected both, or neither")
        return self


class RpcConfig(Model):
    """Deadlines and keep-alive of every call, for both ends, so that they cannot disagree."""

    deadline_seconds: PositiveFloat = 10.0
    """Of a short call, and of each message of a snapshot; the first of them may come `poll_seconds` later."""
    stream_seconds: PositiveFloat = 600.0
    """Of a stream of rows; a client opens the next one then, and loses nothing. A snapshot may take longer."""
    keepalive_seconds: PositiveFloat = 20.0
    """Between pings on a quiet connection."""
    keepalive_timeout_seconds: PositiveFloat = 10.0
    """A peer that has not answered a ping by then is gone."""
    backoff_initial_seconds: PositiveFloat = 0.1
    """First wait before a retry; it doubles, with jitter."""
    backoff_max_seconds: PositiveFloat = 5.0
    """Longest wait before a retry."""
    max_message_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 30)] = 64 << 20
    """Largest message that either end accepts; bulk data travels in messages of 1 or 2 MiB."""
    shared_memory: bool = True
    """Rows between two processes of one machine go through memory that both map, where they can: several times as fast
    as a connection. Where they cannot, as in containers of their own, they go through it."""
    drain_seconds: PositiveFloat = 5.0
    """After a stop signal, calls in progress may finish for so long."""
    connection_seconds: PositiveFloat = 1800.0
    """A server has a connection of this age replaced, so that clients look again where a name leads, and spread anew
    over those that share one. What is in progress on it goes on to its end."""
    max_connections: PositiveInt = 4096
    """Connections that a server holds, those within their TLS handshake included; more are closed at once."""
    max_streams_per_peer: PositiveInt = 64
    """Streams that a server serves at once on one connection (a process has one to each server, and needs two or
    three)."""
    max_calls_per_second_per_peer: PositiveInt = 2_000
    """Calls that a server takes on one connection in a second; more are refused, and the client waits and repeats."""


class SecurityConfig(Model):
    """Who may talk to whom: TLS between all services, and a token for each role. `paceline certs` makes the files."""

    certificates: Path | None = None
    """A folder with `tls.crt`, `tls.key` and `ca.crt` (as a Kubernetes TLS secret has them): TLS on every connection
    between services. Read again when they change. None: no TLS."""
    client_certificates: bool = True
    """With TLS, servers want a certificate of each client, too. False: `ca.crt` is all that a client needs."""
    tokens: Path | None = None
    """A folder with the files `collector`, `learner` and `reader`, or some of them, a secret token each: a client shows
    the one of its role with every call, a server admits those that it has. Read again when they change."""
    token_grace_seconds: NonNegativeFloat = 300.0
    """A server takes a token for so long after it was replaced, so that its clients may get the new one later."""
    allow_insecure: bool = False
    """Whether a server may listen to other machines without TLS and tokens. Otherwise it refuses to start."""


class LimiterConfig(Model):
    """When a table lets samples and inserts pass."""

    min_rows: PositiveInt = 100
    """Rows needed before the first sample: the start of learning."""
    samples_per_insert: PositiveFloat | None = None
    """Times that an inserted row is sampled on average. None: the ratio runs free; on the learner's table
    `learner.updates: strict` sets it."""
    window_rows: PositiveInt | None = None
    """Width of the band that sampled rows may wander in around the ratio. None: twice the smallest that admits one
    batch and one block."""
    deadline_seconds: PositiveFloat = 30.0
    """A wait ends after this time with a reason; the client asks again and loses nothing."""


class PrioritisedConfig(Model):
    """Prioritised sampling: Schaul et al. 2016."""

    exponent: NonNegativeFloat = 0.6
    """A row is drawn in proportion to its priority to this power; 0 is uniform."""
    importance_exponent: Annotated[float, Field(ge=0, le=1)] = 0.4
    """How far importance weights undo the bias of the draw; 1 undoes it whole."""


class RecentConfig(Model):
    """Sampling by the version of the policy that acted."""

    max_lag_versions: PositiveInt | None = None
    """Rows that are further behind the newest policy are not drawn. None: no bound."""
    half_life_versions: PositiveFloat | None = None
    """A row so many versions older is half as likely to be drawn. None: all are equally likely."""


class TableConfig(Model):
    """One table of the replay service."""

    kind: Literal["transitions", "unrolls"] = "transitions"
    """What a row is: one step, or `unroll_length` steps of one environment and the observation after them."""
    unroll_length: PositiveInt = 20
    """Steps in a row of kind unrolls."""
    capacity_rows: PositiveInt = 1_000_000
    """Rows that the table may hold on each shard; the remover makes room for a block that would exceed it."""
    capacity_bytes: PositiveInt | None = None
    """Bytes of rows that the table may hold on each shard; the smaller of both bounds holds. None: only rows are
    counted."""
    sampler: Literal["uniform", "prioritised", "fifo", "lifo", "recent"] = "uniform"
    """Which rows are drawn: all alike, by priority, the oldest first, the newest first, or by policy version."""
    prioritised: PrioritisedConfig = PrioritisedConfig()
    recent: RecentConfig = RecentConfig()
    remover: Literal["fifo", "lowest_priority"] = "fifo"
    """Which rows leave a full table: the oldest block, or the rows of lowest priority (at the latest when twice as
    many rows as the table may hold have come after them)."""
    max_times_sampled: PositiveInt | None = None
    """A row is drawn at most so often: more often than a ratio asks for. None: no bound; `fifo` and `lifo` need one."""
    queue: bool = False
    """The table is a queue: followed oldest first, each row delivered once and removed when it was consumed."""
    overflow: Literal["block", "drop_oldest"] = "block"
    """What a full queue does: holds appends back, up to the limiter's deadline, or drops its oldest block."""
    allow_non_finite: bool = False
    """Whether NaN and infinity may be stored in floating columns; refused by default."""
    limiter: LimiterConfig = LimiterConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.sampler in ("fifo", "lifo") and self.max_times_sampled is None:
            raise ValueError(
                f"sampler is {self.sampler!r} and max_times_sampled is not set: expected 1 or more, "
                "or the same row would be drawn for ever"
            )
        if self.remover == "lowest_priority" and self.sampler != "prioritised":
            raise ValueError(
                f"remover is 'lowest_priority' and sampler {self.sampler!r}: expected sampler 'prioritised', "
                "the only one whose rows have priorities"
            )
        if self.queue and (self.sampler != "uniform" or self.max_times_sampled is not None or self.remover != "fifo"):
            raise ValueError(
                "queue is true: expected sampler, remover and max_times_sampled at their defaults; a queue is "
                "followed oldest first and never sampled"
            )
        return self

    def rows_that_fit(self, row_bytes: int) -> int:
        """Rows of `row_bytes` bytes that both bounds let the table hold; 0 when not even one fits."""
        if self.capacity_bytes is None:
            return self.capacity_rows
        return min(self.capacity_rows, self.capacity_bytes // row_bytes)


class ReplayConfig(Model):
    """Settings of the replay service."""

    shards: Annotated[int, Field(ge=1, le=256)] = 1
    """Replay processes among which the rows are divided; collector i appends to shard i modulo shards."""
    address: ShardAddresses = "127.0.0.1:50051"
    """Where the others reach it. With several shards: one address with `{shard}` in it, or one for each, by commas."""
    listen: Address = "127.0.0.1:50051"
    """Where it listens. Left at its default, `paceline train` takes any free port, here and for the other addresses."""
    metrics_listen: Address = "127.0.0.1:9101"
    """Where /metrics listens."""
    redis_url: SecretStr | None = None
    """Where the record is kept (redis://, rediss://, unix://); `{shard}` in it stands for the shard's number, without
    it shards share one server under different keys. None: `paceline train` starts its own."""
    read: Literal["auto", "sample", "follow"] = "auto"
    """How the learner gets rows: batches that replay draws, or every row once into a ring of its own, where it draws.
    `auto` follows uniform tables and queues, and samples the others."""
    redis_password_file: Path | None = None
    """A file with the password of Redis, read at each connection: so it is in no URL and no variable."""
    redis_deadline_seconds: PositiveFloat = 10.0
    """Of one command."""
    redis_start_seconds: NonNegativeFloat = 300.0
    """How long replay waits at its start for a Redis that is away; one that loads its data is waited for as long as
    that takes. `paceline train` tells at once when the Redis of `redis_url` is not there."""
    max_streams: PositiveInt = 96
    """Streams (Append, Sample, Follow) served at once; more are refused, so that short calls always have a thread."""
    tables: dict[str, TableConfig] = {"transitions": TableConfig()}

    @model_validator(mode="after")
    def _addresses_fit(self) -> Self:
        # A single address may be a default that the launcher of one machine replaces: it is refused where it is used.
        if "," in self.address:
            try:
                self.shard_addresses()
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return self

    def shard_addresses(self) -> list[str]:
        """The address of each shard, by its number. Raises ConfigError when there are not as many as shards."""
        if SHARD in self.address:
            return [self.address.replace(SHARD, str(shard)) for shard in range(self.shards)]
        addresses = self.address.split(",")
        if len(addresses) != self.shards:
            raise ConfigError(
                f"replay.address names {len(addresses)} address(es) and replay.shards is {self.shards}: expected one "
                "for each shard, separated by commas, or one with {shard} in it, such as replay-{shard}.replay:50051"
            )
        return addresses

    @model_validator(mode="after")
    def _has_one_password(self) -> Self:
        if self.redis_password_file is not None:
            if self.redis_url is None:
                raise ValueError("replay.redis_password_file is set and replay.redis_url is not: expected both")
            if redact_url(url := self.redis_url.get_secret_value()) != url:
                raise ValueError(
                    "replay.redis_url holds a password and replay.redis_password_file is set: expected one of both; "
                    "leave the password out of the URL, as redis://host:port/0 or redis://name@host:port/0"
                )
        return self

    def redis_address(self) -> str | None:
        """`redis_url` with all that it takes to connect; `replay.link` says what is in it. None: there is no URL.

        It holds a password only where `redis_url` does, and the path of the password's file otherwise.
        """
        if self.redis_url is None:
            return None
        url = self.redis_url.get_secret_value()
        if self.redis_password_file is None:
            return url
        return f"{url}{'&' if '?' in url else '?'}password_file={quote(str(self.redis_password_file.absolute()))}"

    @field_serializer("redis_url")
    def _hide_password(self, value: SecretStr | None) -> str | None:
        return None if value is None else redact_url(value.get_secret_value())


class SacConfig(Model):
    """Soft actor-critic: Haarnoja et al. 2018, with a learned temperature."""

    name: Literal["sac"] = "sac"
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.99
    n_step: Annotated[int, Field(ge=1, le=1000)] = 1
    """Environment steps whose rewards a row sums up before it bootstraps; fewer where an episode ends."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Share of the critic that the target critic takes over in each update."""
    actor_learning_rate: PositiveFloat = 3e-4
    critic_learning_rate: PositiveFloat = 3e-4
    temperature_learning_rate: PositiveFloat = 3e-4
    initial_temperature: PositiveFloat = 1.0
    target_entropy: float | None = None
    """None: minus the number of action dimensions."""
    hidden: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (256, 256)
    """Widths of the hidden layers of the critics, and of the built-in actor."""


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
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the learner updates and, if it follows its table, holds its rows. No visible device is an error."""
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
    block_form: Literal["auto", "plain", "compact"] = "auto"
    """`compact` leaves a next observation out of a block where it is the observation of a later row, and replay puts
    it back; `auto` does so where rows are large enough to gain by it."""
    max_blocks_in_flight: PositiveInt = 8
    """Blocks sealed but not acknowledged; collecting waits when there are so many. No more go out in the time of a
    round trip: raise it where replay is far away. Small ones that wait share messages. Lower it where the limiter holds
    rows back and their age matters: so many blocks wait then."""
    warmup_steps: NonNegativeInt = 100
    """Random environment steps at the start of the run, all collectors together."""
    poll_seconds: Annotated[float, Field(gt=0, le=60)] = 10.0
    """How long a poll may wait at the learner for something newer."""
    snapshots_address: Address | None = None
    """Where snapshots are fetched: at a relay, or None: at the learner's endpoint. All else goes to the learner."""
    on_environment_error: Literal["stop", "reset"] = "stop"
    """When an environment raises or returns nonsense: end with an error, or drop its episode, rebuild it and go on."""


class RelayConfig(Model):
    """Settings of a relay, which serves the learner's snapshots again, nearer to the collectors."""

    listen: Address = "127.0.0.1:50053"
    """Where it serves snapshots."""
    metrics_listen: Address = "127.0.0.1:9106"
    """Where /metrics listens."""
    upstream: Address | None = None
    """Where it fetches them: another relay, or None: the learner's endpoint."""
    poll_seconds: Annotated[float, Field(gt=0, le=60)] = 2.0
    """How long a poll may wait upstream for something newer, and what is heard of collectors for the next poll: the
    learner knows what a collector acts with by at most so much later for each relay on its way. A sixth of
    `learner.silence_seconds`, if that is less."""


class EvaluatorConfig(Model):
    """Settings of the evaluator."""

    enabled: bool = True
    metrics_listen: Address = "127.0.0.1:0"
    """Where /metrics listens."""
    snapshots_address: Address | None = None
    """Where snapshots are fetched, as `collector.snapshots_address`."""
    every_versions: PositiveInt = 50
    """Each n-th policy version is evaluated, or the newest where evaluation takes longer."""
    episodes: PositiveInt = 20
    """Episodes in one evaluation."""
    seed: NonNegativeInt = 10_000
    """Seed of the first episode; the others follow. Fixed, so that evaluations compare."""


class InjectConfig(Model):
    """A lag that is held or repeated, for studies. Every collector acts with an older snapshot than it has."""

    mode: Literal["none", "fixed", "distribution", "trace"] = "none"
    """`fixed`: always so many versions behind; `distribution`: drawn anew for each snapshot applied; `trace`: as a
    run with `lag.record` did it."""
    versions: NonNegativeInt = 0
    """Versions behind the newest, with mode fixed."""
    weights: dict[NonNegativeInt, NonNegativeFloat] = {}
    """Versions behind, and how often in proportion, with mode distribution."""
    trace: Path | None = None
    """The folder `lag-trace` of a run, with mode trace."""


class LagConfig(Model):
    """How far rows and collectors may lag behind the learner, and what is measured of it."""

    max_lag_versions: PositiveInt | None = None
    """A collector further behind pauses until it has applied a newer snapshot; rows further behind are not drawn, and
    those that are drawn all the same have no weight. None: no bound."""
    attribution: bool = True
    """Whether the lag of each trained row is split by where it arose."""
    record: bool = False
    """Whether each collector writes down which snapshot it applied when, in the run's `lag-trace`."""
    inject: InjectConfig = InjectConfig()


class Config(Model):
    """Everything that a run is made of."""

    run: RunConfig = RunConfig()
    env: EnvConfig = EnvConfig()
    actor: ActorConfig = ActorConfig()
    rpc: RpcConfig = RpcConfig()
    security: SecurityConfig = SecurityConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    collector: CollectorConfig = CollectorConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    relay: RelayConfig = RelayConfig()
    lag: LagConfig = LagConfig()

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
        if table.kind != "transitions":
            raise ValueError(
                f"replay.tables.{learner.table}.kind is {table.kind!r}: expected 'transitions', what "
                f"{learner.algorithm.name} learns from"
            )
        if self.replay.read == "follow" and not self._may_follow():
            why = (
                f"has sampler {table.sampler!r}"
                if table.sampler != "uniform"
                else f"bounds the draws of a row (max_times_sampled is {table.max_times_sampled})"
            )
            raise ValueError(
                f"replay.read is 'follow' and table {learner.table!r} {why}: expected 'sample' or 'auto'; who follows "
                "draws all rows alike, any number of times"
            )
        if self.replay.read == "sample" and table.queue:
            raise ValueError(
                f"replay.read is 'sample' and table {learner.table!r} is a queue: expected 'follow' or 'auto'; "
                "a queue is never sampled"
            )
        if table.queue and learner.updates == "strict":
            raise ValueError(
                f"learner.updates is 'strict' and table {learner.table!r} is a queue: expected 'learner_bound'; "
                "each of its rows is learned from once, so there is no ratio to hold"
            )
        ratio, given = self.samples_per_insert(), table.limiter.samples_per_insert
        if learner.updates == "strict" and given is not None and given != ratio:
            raise ValueError(
                f"replay.tables.{learner.table}.limiter.samples_per_insert is {given:g} and learner.updates is "
                f"'strict', which makes it {ratio:g}: updates_per_step times batch_size; leave it out, or set "
                "learner.updates_per_step, or learner.updates=learner_bound"
            )
        if self.collector.count < self.replay.shards:
            raise ValueError(
                f"collector.count is {self.collector.count}: expected at least replay.shards, {self.replay.shards}, "
                "or a shard gets no rows"
            )
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
        for name in tables:
            self._check_window(name)
            if (stuck := self.why_stuck(name)) is not None:
                raise ValueError(stuck)
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

    @property
    def follows(self) -> bool:
        """Whether the learner follows its table instead of sampling it."""
        return self.replay.read == "follow" or (self.replay.read == "auto" and self._may_follow())

    def _may_follow(self) -> bool:
        table = self.replay.tables[self.learner.table]
        return table.queue or (table.sampler == "uniform" and table.max_times_sampled is None)

    def samples_per_insert(self, name: str | None = None) -> float | None:
        """Rows sampled for each row inserted into table `name`, None: the learner's; None where the ratio runs free."""
        name = self.learner.table if name is None else name
        table = self.replay.tables[name]
        if table.queue:
            return None
        if name != self.learner.table or self.learner.updates == "learner_bound":
            return table.limiter.samples_per_insert
        return self.learner.updates_per_step * self.learner.batch_size

    def limiter_window_rows(self) -> int | None:
        """Width of the limiter's band on the learner's table, in sampled rows; None where the ratio runs free."""
        ratio = self.samples_per_insert()
        if ratio is None:
            return None
        return self.replay.tables[self.learner.table].limiter.window_rows or 2 * self._smallest_window(ratio)

    def why_stuck(self, name: str, capacity_rows: int | None = None) -> str | None:
        """Why collectors and learner would come to wait for each other at table `name` for ever; None: they never do.

        Says the smallest value that works. The width of the band is checked apart.

        Args:
            capacity_rows: rows that each shard holds; None: what the table's `capacity_rows` says.
        """
        table, ratio = self.replay.tables[name], self.samples_per_insert(name)
        capacity = table.capacity_rows if capacity_rows is None else capacity_rows
        if name == self.learner.table and table.queue:
            return self._why_queue_stuck(name, capacity)
        if table.max_times_sampled is None:
            return None
        if ratio is None:
            return self._why_starved(name, table.max_times_sampled, capacity)
        smallest = self._smallest_max_times_sampled(name, ratio, capacity)
        if table.max_times_sampled >= smallest:
            return None
        key = f"replay.tables.{name}.limiter.samples_per_insert"
        if name == self.learner.table and self.learner.updates == "strict":
            key = "learner.updates_per_step"
        return (
            f"replay.tables.{name}.max_times_sampled is {table.max_times_sampled}: expected at least {smallest}, since "
            f"the limiter has each row sampled {ratio:g} times on average and some leave before they were, or both "
            f"sides wait for each other; raise it, or lower {key}"
        )

    def _why_queue_stuck(self, name: str, capacity_rows: int) -> str | None:
        # While fewer rows wait than a batch has, one less at most, there must be room for a whole block. The rows of
        # the batch before are consumed by then, and a queue that drops rows never waits.
        batch, block = self.learner.batch_size, self.collector.block_rows
        smallest = batch + block - 1
        if self.replay.tables[name].overflow != "block" or capacity_rows >= smallest:
            return None
        return (
            f"replay.tables.{name}.capacity_rows is {capacity_rows}: expected at least {smallest}, so that a queue in "
            f"which all but one row of a batch of {batch} wait has room for a block of {block} rows, or both sides "
            "wait for each other; raise it, or lower learner.batch_size"
        )

    def _why_starved(self, name: str, max_times_sampled: int, capacity_rows: int) -> str | None:
        # Whole blocks leave a full table.
        held = capacity_rows - min(self.collector.block_rows, capacity_rows) + 1
        smallest = math.ceil(self.learner.batch_size / self.replay.shards / held)
        if name != self.learner.table or max_times_sampled >= smallest:
            return None
        return (
            f"replay.tables.{name}.max_times_sampled is {max_times_sampled}: expected at least {smallest}, or the "
            f"{held} rows that a full table has at least are no batch of {self.learner.batch_size}, and none is ever "
            f"drawn; raise it, or raise replay.tables.{name}.capacity_rows"
        )

    def _check_window(self, name: str) -> None:
        ratio, window = self.samples_per_insert(name), self.replay.tables[name].limiter.window_rows
        if ratio is not None and window is not None and window < self._smallest_window(ratio):
            raise ValueError(
                f"replay.tables.{name}.limiter.window_rows is {window}: expected at least "
                f"{self._smallest_window(ratio)}, one batch of {self.learner.batch_size} and one block of "
                f"{self.collector.block_rows} rows sampled {ratio:g} times each, or both sides wait for each other"
            )

    def _smallest_window(self, samples_per_insert: float) -> int:
        # Below this there is a state in which the next block and the next batch both overstep the band.
        return self.learner.batch_size + math.ceil(self.collector.block_rows * samples_per_insert)

    def _smallest_max_times_sampled(self, name: str, ratio: float, capacity_rows: int) -> int:
        """Draws of a row with which a batch can always be had when the band holds inserts back, whatever is drawn."""
        if name != self.learner.table:
            # What batches others ask for is not known: with fewer draws than this it would be stuck with any.
            return math.ceil(ratio)
        limiter, shards = self.replay.tables[name].limiter, self.replay.shards
        batch, min_rows = math.ceil(self.learner.batch_size / shards), math.ceil(limiter.min_rows / shards)
        block = min(self.collector.block_rows, capacity_rows)
        half_window = (limiter.window_rows or 2 * self._smallest_window(ratio)) / 2

        # Until the table is full no draw is lost. Inserts are held back when more than `edge` rows are there and none
        # was sampled; for every row more, `ratio` were.
        edge = min_rows - block + half_window / ratio
        first_held_back = max(min_rows, math.floor(edge) + 1)
        at_first = (batch + math.ceil((first_held_back - edge) * ratio) - 1) / first_held_back

        # A full table holds `held` rows at least, since whole blocks leave. After the oldest of them came, rows were
        # sampled `ratio` times for each that came, and besides: for the rest of the oldest block, for what the band let
        # pass beyond its edge before the first sample, and in batches that had been granted before. At worst all were
        # draws of these rows, and a batch is still wanted.
        held = capacity_rows - block + 1
        besides = ratio * (block - 1) + max(0.0, min_rows - edge) * ratio + batch * self.learner.prefetch_batches
        when_full = ratio + (batch + besides) / held
        return math.ceil(max(at_first, when_full))


def redact_url(text: str) -> str:
    """The text with the password of each URL in it replaced by ***: `user:password@`, or `?password=`."""
    # Up to the last @: a password may hold one.
    without = re.sub(r"(://[^:/@\s]*):\S*@", r"\1:***@", text)
    return re.sub(r"([?&](?:ssl_)?password=)[^&\s'\"]*", r"\1***", without)
