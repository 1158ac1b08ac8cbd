"""How a collector or an evaluator gets its place in a run."""

from __future__ import annotations

from paceline.config import Config
from paceline.errors import PacelineError
from paceline.identity import PROTOCOL_VERSION
from paceline.process import StopSignal, process_id
from paceline.rpc.client import Backoff, call_until_answered
from paceline.telemetry import get_logger
from paceline.v1 import run_pb2, run_pb2_grpc


class LogFirstWait:
    """Logs the first wait of a call with its reason, once for each kind of failure: the others tell nothing new."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._told: set[type[PacelineError]] = set()

    def __call__(self, error: PacelineError, seconds: float) -> None:
        """Take note of a failure, after which the call waits for `seconds`."""
        if type(error) not in self._told:
            self._told.add(type(error))
            get_logger().warning(self._event, reason=str(error))


def join(
    stub: run_pb2_grpc.RunServiceStub, config: Config, role: run_pb2.Role, stop: StopSignal, *, index: int | None = None
) -> run_pb2.JoinResponse:
    """Join the run, however long the learner takes to be there.

    Raises:
        DeadlineError: the stop came first.
        RunMismatchError, ProtocolMismatchError: the learner belongs to another run, or speaks another protocol.
        PacelineError: the learner refuses for another reason, such as an index out of range.
    """
    request = run_pb2.JoinRequest(
        run_id=config.run_id, protocol_version=PROTOCOL_VERSION, role=role, index=index, process_id=process_id()
    )
    answer: run_pb2.JoinResponse = call_until_answered(
        lambda: stub.Join(request, timeout=config.rpc.deadline_seconds),
        peer=f"the learner at {config.learner.address}",
        backoff=Backoff(config.rpc),
        stop=stop,
        on_wait=LogFirstWait("waiting_for_learner"),
    )
    get_logger().info("joined", index=answer.index, incarnation=answer.incarnation)
    return answer
