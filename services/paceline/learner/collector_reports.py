"""What polls tell of collectors, to the run's registry and to the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.identity import PolicyIdentity
from paceline.learner.endpoint_metrics import EndpointMetrics
from paceline.learner.registry import RunRegistry
from paceline.rpc.wire import identity_from_wire
from paceline.v1 import parameters_pb2 as pb


class CollectorReports:
    """The learner is where reports end, whether a collector's own poll brought them or a relay's."""

    def __init__(self, registry: RunRegistry, metrics: EndpointMetrics) -> None:
        self._registry, self._metrics = registry, metrics

    def hear(self, reports: Sequence[pb.ReplicaReport]) -> None:
        """Note what these collectors act with, and how far that is behind."""
        for report, applied in [(report, _applied(report)) for report in reports]:
            if self._note(report, applied):
                self._metrics.observe_poll(applied)

    def hear_again(self, report: pb.ReplicaReport) -> None:
        """Note that a collector still lives."""
        self._note(report, _applied(report))

    def _note(self, report: pb.ReplicaReport, applied: PolicyIdentity | None) -> bool:
        # A replaced collector still gets its answer: it learns of its fate from RunService, and no row depends on it.
        return self._registry.polled(
            report.collector_index, report.collector_incarnation, applied, paused=report.paused
        )


def _applied(report: pb.ReplicaReport) -> PolicyIdentity | None:
    return identity_from_wire(report.applied) if report.HasField("applied") else None
