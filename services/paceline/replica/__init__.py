"""A process's own copy of the actor: fetched, verified, staged, applied between two steps, and acted with."""

from paceline.replica.acting import act
from paceline.replica.joining import LogFirstWait, join
from paceline.replica.metrics import ReplicaMetrics
from paceline.replica.poller import ReplicaOwner, SnapshotPoller

__all__ = ["LogFirstWait", "ReplicaMetrics", "ReplicaOwner", "SnapshotPoller", "act", "join"]
