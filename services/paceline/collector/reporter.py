"""Tells the learner of finished episodes, in the background."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence

import grpc

from paceline.collector.metrics import CollectorMetrics
from paceline.config import RpcConfig
from paceline.envs import FinishedEpisode
from paceline.errors import PacelineError
from paceline.process import StopSignal
from paceline.rpc.client import Backoff
from paceline.rpc.status import RETRYABLE, raising
from paceline.rpc.wire import timestamp
from paceline.telemetry import get_logger
from paceline.v1 import parameters_pb2, run_pb2, run_pb2_grpc

MAX_WAITING_EPISODES = 10_000
"""While the learner is away; the oldest are left out of the reports beyond, and counted."""
MAX_REPORTED_EPISODES = 1_000
"""In one report."""
_GATHER_SECONDS = 0.5
_SIGN_OF_LIFE_SECONDS = 5.0
_JOIN_SECONDS = 1.0
_PEER = "the learner's run service"


class EpisodeReporter:
    """Sends reports in order, each until it is answered, on a thread of its own."""

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        run_id: str,
        collector_index: int,
        collector_incarnation: int,
        rpc: RpcConfig,
        metrics: CollectorMetrics,
    ) -> None:
        self._stub = run_pb2_grpc.RunServiceStub(channel)
        self._run_id, self._index, self._incarnation = run_id, collector_index, collector_incarnation
        self._rpc, self._metrics, self._log = rpc, metrics, get_logger()
        self._backoff = Backoff(rpc)
        self._changed = threading.Condition()
        self._waiting: collections.deque[run_pb2.Episode] = collections.deque()
        self._pending: run_pb2.ReportEpisodesRequest | None = None
        self._sequence = 0
        self._outage = False
        self._closing, self._abandoned = StopSignal(), StopSignal()
        self._failure: PacelineError | None = None
        self._thread = threading.Thread(target=self._run, name="episode-reporter", daemon=True)
        self.environment_steps = 0
        """Set by the collecting loop: steps that this incarnation has taken."""
        self.finished = False
        """The learner said that the run reached its end."""

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def add(self, episodes: Sequence[FinishedEpisode]) -> None:
        """Take finished episodes; never waits. Raises PacelineError once the learner refused a report for good."""
        if self._failure is not None:
            raise self._failure
        now = timestamp()
        with self._changed:
            for episode in episodes:
                if len(self._waiting) >= MAX_WAITING_EPISODES:
                    self._waiting.popleft()
                    self._metrics.episodes_unreported.inc()
                self._waiting.append(
                    run_pb2.Episode(
                        episode_return=episode.episode_return,
                        length=episode.length,
                        terminated=episode.terminated,
                        ended_at=now,
                    )
                )
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Send what waits, for at most `seconds`."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(seconds)
        self._abandoned.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)  # closing the channel ends a call that it may still be in

    def _run(self) -> None:
        try:
            while not self._abandoned.is_set():
                request = self._next_request()
                if request is None:
                    return
                try:
                    with raising(_PEER):
                        answer = self._stub.ReportEpisodes(request, timeout=self._rpc.deadline_seconds)
                except RETRYABLE as error:
                    self._note_outage(error)
                    self._abandoned.wait(self._backoff.next_seconds(error))
                    continue
                self._pending = None
                self._backoff.reset()
                if self._outage:
                    self._outage = False
                    self._log.info("episode_reports_resumed")
                self.finished = self.finished or answer.run_state == parameters_pb2.RUN_STATE_FINISHED
        except PacelineError as error:
            self._failure = error
        except Exception as error:
            if self._abandoned.is_set():
                return  # the channel was closed under a call
            self._log.error("episode_reporter_failed", exc_info=error)
            self._failure = PacelineError(f"the episode reporter failed: {type(error).__name__}: {error}")

    def _next_request(self) -> run_pb2.ReportEpisodesRequest | None:
        """The report that is not answered yet, or the next one; None at the end."""
        if self._pending is not None:
            return self._pending
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._closing.is_set(), _SIGN_OF_LIFE_SECONDS)
            if self._closing.is_set() and not self._waiting:
                return None
            if self._waiting:
                # Others may end at the same time: one report for all of them.
                self._changed.wait_for(self._closing.is_set, _GATHER_SECONDS)
            episodes = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_REPORTED_EPISODES))]
        self._sequence += 1
        self._pending = run_pb2.ReportEpisodesRequest(
            run_id=self._run_id,
            collector_index=self._index,
            collector_incarnation=self._incarnation,
            sequence=self._sequence,
            episodes=episodes,
            environment_step_count=self.environment_steps,
        )
        return self._pending

    def _note_outage(self, error: PacelineError) -> None:
        self._metrics.report_failures.inc()
        if not self._outage:
            self._outage = True
            self._log.warning("episode_reports_waiting", reason=str(error))
