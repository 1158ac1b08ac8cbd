"""What an evaluator measures."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.replica import ReplicaMetrics

ACTIVITIES = ("starting", "waiting", "acting", "environment", "reporting", "finishing")
_EVALUATION_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)


class EvaluatorMetrics:
    """Metrics of one evaluator process, in a registry of its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._mean_return: Gauge | None = None
        self.replica = ReplicaMetrics(registry, "evaluator")
        self.evaluations = Counter(
            "paceline_evaluator_evaluations_total",
            "Snapshots evaluated. Bad: a rate of 0 while the learner publishes.",
            registry=registry,
        )
        self.environment_steps = Counter(
            "paceline_evaluator_environment_steps_total",
            "Environment steps of evaluations. Bad: a rate of 0 in the middle of one.",
            registry=registry,
        )
        self.environment_faults = Counter(
            "paceline_evaluator_environment_faults_total",
            "Evaluations that an environment fault ended. Bad: anything above 0.",
            registry=registry,
        )
        self.evaluation_seconds = Histogram(
            "paceline_evaluator_evaluation_seconds",
            "Seconds of one evaluation. Bad: above the time between two evaluated versions.",
            buckets=_EVALUATION_BUCKETS,
            registry=registry,
        )
        self.activity_seconds = Counter(
            "paceline_evaluator_activity_seconds_total",
            "Seconds of the evaluating loop by what it did. Bad: no waiting at all, evaluations come late.",
            ["activity"],
            registry=registry,
        )

    def set_mean_return(self, value: float) -> None:
        """Mean return of the newest evaluation."""
        # Made at the first value: a gauge that is not known yet is absent, not 0.
        if self._mean_return is None:
            self._mean_return = Gauge(
                "paceline_evaluator_mean_return",
                "Mean return of the newest evaluation. Bad: falling for long.",
                registry=self._registry,
            )
        self._mean_return.set(value)
