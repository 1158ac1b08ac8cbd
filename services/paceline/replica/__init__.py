"""A process's own copy of the actor: fetched, verified, staged, applied between two steps, and acted with."""

from paceline.replica.acting import act
from paceline.replica.clock import LearnerClock
from paceline.replica.joining import LogFirstWait, join
from paceline.replica.metrics import ReplicaMetrics
from paceline.replica.poller import ReplicaOwner, SnapshotPoller
from paceline.replica.staging import InjectedStaging, NewestStaging, Staging
from paceline.replica.standing import Standing, Standings

__all__ = [
    "InjectedStaging",
    "LearnerClock",
    "LogFirstWait",
    "NewestStaging",
    "ReplicaMetrics",
    "ReplicaOwner",
    "SnapshotPoller",
    "Staging",
    "Standing",
    "Standings",
    "act",
    "join",
]
