"""`paceline train`: every service of one run on this machine, from start to report."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline import health
from paceline.config import Config
from paceline.envs import describe_environment
from paceline.errors import DeadlineError, HandshakeError, NotFoundError, PacelineError, UnavailableError
from paceline.local.display import open_display
from paceline.local.embedded import EmbeddedRedis
from paceline.local.ports import choose_address
from paceline.local.processes import ServiceProcess
from paceline.local.run_folder import RunFolder, open_run_folder
from paceline.local.scrape import SCRAPE_SECONDS, Page, read_last_page, read_page
from paceline.local.status import StatusReader, Watched
from paceline.local.tally import Ending, Tally
from paceline.process import StopSignal, limit_threads
from paceline.replay.record import RunRecord
from paceline.report import write_report
from paceline.report.record import read_run
from paceline.rpc.client import open_channel
from paceline.rpc.status import raising
from paceline.telemetry import configure_logging

START_SECONDS = 180.0
"""Loading torch on a busy machine and rebuilding a large ring take a while."""
STOP_SECONDS = 12.0
"""From the stop signal to the last process; the services' own deadlines are shorter."""
LOOK_SECONDS = 0.5
"""How often processes are looked after."""
READ_SECONDS = 2.0
"""How often their metrics are read at least: what a process that is killed counted after that is lost with it."""
WRITE_SECONDS = 5.0
"""How often what they counted is written down."""
ASK_SECONDS = 5.0
"""How often they are asked whether they make progress."""

_MESSAGE = "paceline: "
"""How a service begins the line in which it says why it ends."""

_ADDRESS_KEYS = (
    "learner.listen",
    "learner.metrics_listen",
    "learner.endpoint_metrics_listen",
)


def run(config: Config, *, resume: bool, plain: bool, stop: StopSignal, environment: Mapping[str, str]) -> None:
    """Train on this machine until the run ends or is stopped.

    Raises:
        ConfigError: the environment is unknown, or the algorithm cannot act in it.
        ConflictError: somebody works in the run's folder, or a run has begun there; NotFoundError: there is none to
            resume.
        ServiceFailedError: a service ended with an error; carries its last lines.
    """
    # Before anything is started or written: the commonest mistakes are in the environment's settings.
    describe_environment(config.env, algorithm=config.learner.algorithm.name)
    with ExitStack() as stack:
        folder = stack.enter_context(open_run_folder(config, resume=resume, stop=stop))
        log = stack.enter_context((folder.path / "logs" / "launcher.log").open("a", encoding="utf-8"))
        configure_logging("launcher", run=config.run_id, file=log)
        title = f"{config.run_id}: {config.learner.algorithm.name} on {config.env.id}"
        display = stack.enter_context(open_display(title, plain=plain))
        display.say(f"run {config.run_id}: files in {folder.path}")
        redis: EmbeddedRedis | None = None
        if config.replay.redis_url is None:
            redis = stack.enter_context(_embedded(folder.path))
            redis_url = redis.url
        else:
            redis_url = config.replay.redis_url.get_secret_value()
        services = _Services(config, folder, redis_url, resume=resume, environment=environment)
        failure: Ending | None = None
        try:
            services.start()
            if services.wait_until_healthy(stop):
                folder.accept()
                display.say("every service is up: training")
            reader = StatusReader(Watched.of(config, title, began=time.monotonic()), services.pages)
            read, show, write = _Every(READ_SECONDS), _Every(display.interval_seconds), _Every(WRITE_SECONDS)
            ask = _Every(ASK_SECONDS)
            while not stop.is_set() and not services.look_after():
                if redis is not None and redis.process.poll() is not None:
                    redis.restart()
                    display.say("the embedded Redis server had ended and runs again, on the same data")
                if ask.is_due():
                    for sentence in services.ask_health():
                        display.say(sentence)
                if show.is_due():
                    display.show(reader.read())
                elif read.is_due():
                    services.pages()
                if write.is_due():
                    services.tally.write()
                stop.wait(LOOK_SECONDS)
            is_complete = not stop.is_set() and read_run(folder.path).finished
            display.say("the run is complete" if is_complete else "stopping")
        except BaseException as error:
            failure = Ending("failed", _sentence(error))
            raise
        finally:
            if failure is not None and not folder.is_accepted:
                services.stop()  # the resume was refused: what the run's files tell of it is as true as before
            else:
                ending = _end(services, folder.path, failure)
                display.say(f"report: {write_report(folder.path)}")
        if not folder.is_accepted:
            display.say("stopped before the learner had taken its settings: config.yaml is as it was")
        if ending.how == "stopped":
            display.say(f"go on with: paceline train {folder.path} --resume")


def _end(services: _Services, folder: Path, failure: Ending | None) -> Ending:
    """Stop the services, with their figures written down; a failed run leaves its figures, too."""
    services.pages()
    services.tally.write(failure or Ending("stopped"))
    services.stop()
    services.take_last_pages()
    # The learner ends with 0 when it is stopped as well; only at its end it writes that the run is finished.
    ending = failure or Ending("complete" if read_run(folder).finished else "stopped")
    services.tally.write(ending)
    return ending


class _Every:
    """Says when something is due that is to be done so often."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._next = seconds, 0.0

    def is_due(self) -> bool:
        """Whether so long has passed since it last was."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._seconds
        return True


class _Services:
    """The processes of the run, in the order in which they are stopped."""

    def __init__(
        self, config: Config, folder: RunFolder, redis_url: str, *, resume: bool, environment: Mapping[str, str]
    ) -> None:
        self._config, self._folder = config, folder
        self._resume = resume
        # The replay of a start that failed had begun a record, without a row.
        self._resume_replay = resume or (
            folder.is_retry and not _has_rows(config, config.replay.redis_address() or redis_url)
        )
        # The URL may hold a password, so it travels in the environment and never in a file or a command line.
        self._environment = {**environment, "PACELINE_REPLAY__REDIS_URL": redis_url}
        limit_threads(self._environment)
        self._addresses = _choose_addresses(config)
        self._replays = _choose_replay_addresses(config)
        self._addresses["replay.address"] = ",".join(replay["replay.listen"] for replay in self._replays)
        self._processes: list[ServiceProcess] = []
        self.tally = Tally(folder.path, config.run_id)
        self._stuck: set[str] = set()
        self.learner: ServiceProcess

    def start(self) -> None:
        """Start them all; each waits for those that it needs."""
        resume, resume_replay = (["--resume"] if asked else [] for asked in (self._resume, self._resume_replay))
        for shard, addresses in enumerate(self._replays):
            name = _replay_name(shard, len(self._replays))
            options = ["replay", "--shard", str(shard)]
            self._start(name, options, resume_replay, {name: "replay.metrics_listen"}, addresses)
        self.learner = self._start(
            "learner",
            ["learner"],
            resume,
            {"learner": "learner.metrics_listen", "endpoint": "learner.endpoint_metrics_listen"},
        )
        for index in range(self._config.collector.count):
            self._start_with_metrics(f"collector-{index}", "collector", ["--index", str(index)])
        if self._config.evaluator.enabled:
            self._start_with_metrics("evaluator", "evaluator", [])

    def wait_until_healthy(self, stop: StopSignal) -> bool:
        """Wait until replay and learner say SERVING, so have taken their settings; False when the stop came first.

        Raises:
            DeadlineError: one does not serve after START_SECONDS. ServiceFailedError: one ended with an error.
        """
        deadline = time.monotonic() + START_SECONDS
        served = {
            **{_replay_name(i, len(self._replays)): each["replay.listen"] for i, each in enumerate(self._replays)},
            "learner": self._addresses["learner.listen"],
        }
        for service, address in served.items():
            while not stop.is_set() and not self._is_serving(address):
                if self.look_after():
                    return True  # nothing was left to do, and the learner has ended already
                if time.monotonic() > deadline:
                    process = next(process for process in self._processes if process.name == service)
                    raise DeadlineError(
                        f"{service} does not serve on {address} after {START_SECONDS:g} s; "
                        f"the last lines of its log:\n{process.tail()}"
                    )
                stop.wait(LOOK_SECONDS)
        return not stop.is_set()

    def look_after(self) -> bool:
        """Restart what a signal ended; whether the run is complete. Raises ServiceFailedError."""
        for process in self._processes:
            process.keep_alive()
        return self.learner.has_ended_well()

    def ask_health(self) -> list[str]:
        """A sentence on each process that makes no progress any more, and on each that makes some again."""
        sentences = []
        for process in self._processes:
            for name, port in process.metrics_ports.items():
                is_well, reason = health.ask(str(port), seconds=SCRAPE_SECONDS)
                if is_well and name in self._stuck:
                    self._stuck.remove(name)
                    sentences.append(f"{name} goes on")
                elif not is_well and reason.startswith("its loop") and name not in self._stuck:
                    self._stuck.add(name)
                    sentences.append(f"{name} is stuck: {reason}; it goes on as it is, Ctrl-C ends the run")
        return sentences

    def pages(self) -> dict[str, Page]:
        """The metrics of every process that answers, by its name."""
        pages = {name: read_page(port) for process in self._processes for name, port in process.metrics_ports.items()}
        self.tally.see(pages)
        return pages

    def take_last_pages(self) -> None:
        """Take in what the processes, which have ended, counted until their end."""
        self.tally.see({process.name: read_last_page(process.last_page) for process in self._processes}, last=True)

    def stop(self) -> None:
        """Stop every process, replay last, within STOP_SECONDS."""
        deadline = time.monotonic() + STOP_SECONDS
        replays, others = self._processes[: len(self._replays)], self._processes[len(self._replays) :]
        for group, share in ((others, deadline - 3), (replays, deadline)):
            for process in group:
                process.terminate()
            for process in group:
                process.wait(share)

    def _start(
        self,
        name: str,
        arguments: list[str],
        resume: list[str],
        metrics_keys: Mapping[str, str],
        own_addresses: Mapping[str, str] | None = None,
    ) -> ServiceProcess:
        """Start one; `metrics_keys` names, for each of its pages, the address where it listens."""
        addresses = {**self._addresses, **(own_addresses or {})}
        overrides = [f"{key}={address}" for key, address in addresses.items()]
        restart_arguments: list[str] = []
        if arguments[0] in ("replay", "learner") and not resume:
            restart_arguments.append("--resume")
        if arguments[0] == "replay":
            # A person waits, and a Redis that is not there is mostly a mistyped URL; one that went away later was not.
            overrides.append("replay.redis_start_seconds=0")
            restart_arguments.append(f"replay.redis_start_seconds={self._config.replay.redis_start_seconds}")
        process = ServiceProcess(
            name,
            [*arguments, str(self._folder.settings_path), *overrides, "--parent", str(os.getpid()), *resume],
            restart_arguments=restart_arguments,
            environment=self._environment,
            log_path=self._folder.path / "logs" / f"{name}.log",
            metrics_ports={page: _port_of(addresses[key]) for page, key in metrics_keys.items()},
        )
        self._processes.append(process)
        return process

    def _start_with_metrics(self, name: str, role: str, options: list[str]) -> None:
        key = f"{role}.metrics_listen"
        self._start(name, [role, *options], [], {name: key}, {key: choose_address()})

    def _is_serving(self, address: str) -> bool:
        with open_channel(address, self._config.rpc, self._config.security) as channel:
            try:
                with raising(address):
                    answer = health_pb2_grpc.HealthStub(channel).Check(
                        health_pb2.HealthCheckRequest(), timeout=self._config.rpc.deadline_seconds
                    )
            except HandshakeError:
                raise  # waiting mends no certificate
            except UnavailableError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _has_rows(config: Config, redis_url: str) -> bool:
    """Whether the record of a run that never began has tables after all: then it is another's. Unknown: it may."""
    try:
        record = RunRecord(redis_url, config.run_id, shards=config.replay.shards)
    except NotFoundError:
        return False
    except PacelineError:
        return True  # what is wrong with Redis, replay says better
    try:
        return bool(record.tables())
    except PacelineError:
        return True
    finally:
        record.close()


def _sentence(error: BaseException) -> str:
    """What went wrong, in a sentence: of a service that failed, what it said itself."""
    said, _, lines = str(error).partition("; the last lines of ")
    if isinstance(error, PacelineError) and lines:
        last = [line.strip() for line in lines.splitlines()[1:]]
        messages = [line for line in last if line.startswith(_MESSAGE)] or last[-1:]
        return ": ".join([said, *(line.removeprefix(_MESSAGE) for line in messages[:1])])
    said = said.partition("\n")[0]
    return said if isinstance(error, PacelineError) else f"{type(error).__name__}: {said}"


@contextmanager
def _embedded(folder: Path) -> Iterator[EmbeddedRedis]:
    redis = EmbeddedRedis.start(folder / "redis")
    try:
        yield redis
    finally:
        redis.stop()


def _choose_addresses(config: Config) -> dict[str, str]:
    """Where everything listens: any free port where the configuration keeps its default."""
    addresses = {key: _choose_address(config, key) for key in _ADDRESS_KEYS}
    addresses["learner.address"] = addresses["learner.listen"]
    return addresses


def _choose_replay_addresses(config: Config) -> list[dict[str, str]]:
    """Where each shard of replay listens: as it is configured where there is one, any free port where several are."""
    if config.replay.shards == 1:
        return [{key: _choose_address(config, key) for key in ("replay.listen", "replay.metrics_listen")}]
    return [
        {"replay.listen": choose_address(), "replay.metrics_listen": choose_address()}
        for _ in range(config.replay.shards)
    ]


def _choose_address(config: Config, key: str) -> str:
    section, name = key.split(".")
    address: str = getattr(getattr(config, section), name)
    if address == getattr(getattr(Config(), section), name) or _port_of(address) == 0:
        return choose_address()
    return address


def _replay_name(shard: int, shards: int) -> str:
    return "replay" if shards == 1 else f"replay-{shard}"


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
