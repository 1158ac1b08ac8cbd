"""A run with a tight bound on the lag comes to its end, though at times every row is beyond the bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.harness import Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


# Without a way out about every second run of bound 3 comes to a stop: snapshots come late now and then. With bound 1
# the last rows are too old before all is learned that they owe.
@pytest.mark.parametrize(("steps", "bound"), [(1500, 3), (300, 1)])
def test_a_run_with_a_tight_bound_ends_with_all_its_steps_and_says_what_it_left_out(
    train: Callable[..., Training], steps: int, bound: int
):
    training = train(f"run.environment_steps={steps}", "evaluator.enabled=false", f"lag.max_lag_versions={bound}")
    assert training.wait(200) == 0, training.text()
    finish = training.records("finish")[-1]
    left_out = sum(event["updates"] for event in training.events("learner", "updates_left_out"))
    assert (finish["environment_steps"], finish["learner_step"] + left_out) == (steps, steps - 100)
    assert left_out < 100
    lags = training.records("training")[-1]["training_lag_counts"]
    assert max(map(float, lags)) <= bound
