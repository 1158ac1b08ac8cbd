"""A run with an environment and an actor of a user's own, which Paceline knows by their names alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from e2e.harness import ROOT, Training

SETTINGS = ("env.id=my_environment:Mine-v0", "actor.builder=my_actor:MyActor", "run.environment_steps=2000")


def test_it_learns_survives_the_death_of_a_collector_and_resumes_only_as_the_same_actor(
    train: Callable[..., Training], tmp_path: Path
):
    for name in ("my_environment.py", "my_actor.py"):
        shutil.copy(ROOT / "deploy/example" / name, tmp_path)
    first = train(*SETTINGS, "actor.kwargs={action_limit: 0.1, size_cost: 0.001}")
    first.wait_for_steps(500)
    first.kill("collector")
    assert first.wait() == 0, first.text()
    assert all(record["aux_action_size"] >= 0 for record in first.records("training"))
    # To stay where an episode begins costs 44 on the average of the four that are evaluated.
    assert max(record["mean_return"] for record in first.records("evaluation")) > -35

    other = train("actor.kwargs={action_limit: 0.2}", *SETTINGS, "--resume")
    assert other.wait() != 0
    assert "actor semantics differ in kwargs" in other.text()
