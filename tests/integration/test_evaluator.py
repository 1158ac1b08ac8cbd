"""A whole evaluator against a learner over sockets: which snapshots it judges, and that it judges them the same."""

from __future__ import annotations

import threading

import pytest

from integration.peers import RUN_ID, Learner, make_actor, serve
from integration.waiting import wait_until
from paceline.config import build
from paceline.errors import RunMismatchError
from paceline.evaluator import main as evaluator
from paceline.process import StopSignal

EPISODES = 3


@pytest.fixture
def evaluating():
    """Starts evaluators against a learner; gives the stop, and a function that waits for the end."""
    ended = []

    def start(learner, *, every_versions=1, run_id=RUN_ID):
        stop, errors = StopSignal(), []
        server, port = serve(learner)
        config = build(
            {
                "run": {"id": run_id},
                "learner": {"address": f"127.0.0.1:{port}"},
                "collector": {"poll_seconds": 0.5},
                "evaluator": {"every_versions": every_versions, "episodes": EPISODES},
            }
        )

        def run():
            try:
                evaluator.run(config, stop=stop)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()

        def join():
            thread.join(20)
            assert not thread.is_alive(), "the evaluator did not end"
            if errors:
                raise errors[0]

        ended.append(lambda: (stop.set(), thread.join(20), server.stop(0).wait()))
        return stop, join

    yield start
    for end in ended:
        end()


def returns_of(report):
    return [episode.episode_return for episode in report.episodes]


def test_the_same_snapshot_has_the_same_returns_however_often_it_is_evaluated(evaluating):
    learner = Learner()
    evaluating(learner)
    actor = make_actor(1)
    for version in (1, 2):
        learner.publish(version, actor)
        wait_until(lambda version=version: len(learner.evaluations) == version)
    other = Learner()
    evaluating(other)
    other.publish(7, actor)
    wait_until(lambda: other.evaluations)
    first, second, third = *learner.evaluations, *other.evaluations
    assert returns_of(first) == returns_of(second) == returns_of(third)
    assert len(set(returns_of(first))) == EPISODES, "each episode has a seed of its own"
    assert [episode.length for episode in first.episodes] == [200] * EPISODES
    assert (second.policy.version, second.learner_step, second.environment_step_count) == (2, 20, 200)


def test_each_nth_version_is_evaluated_and_the_last_one_of_the_run_before_it_ends(evaluating):
    learner = Learner()
    learner.publish(4)
    _, join = evaluating(learner, every_versions=5)
    wait_until(lambda: len(learner.polls) > 1)
    learner.publish(5)
    wait_until(lambda: len(learner.evaluations) == 1)
    learner.publish(6)
    learner.publish(9)
    learner.finish()
    join()
    assert [report.policy.version for report in learner.evaluations] == [5, 9]


def test_a_last_snapshot_that_is_evaluated_already_is_not_evaluated_again(evaluating):
    learner = Learner()
    learner.publish(5)
    _, join = evaluating(learner, every_versions=5)
    wait_until(lambda: learner.evaluations)
    learner.finish()
    join()
    assert [report.policy.version for report in learner.evaluations] == [5]


def test_a_report_is_repeated_until_the_learner_takes_it(evaluating):
    learner = Learner()
    learner.evaluation_failures = 2
    learner.publish(1)
    evaluating(learner)
    wait_until(lambda: learner.evaluations)
    assert learner.evaluation_failures == 0


def test_a_stop_ends_an_evaluator_that_waits(evaluating):
    learner = Learner()
    stop, join = evaluating(learner)
    wait_until(lambda: learner.polls)
    stop.set()
    join()


def test_a_learner_of_another_run_is_refused(evaluating):
    _, join = evaluating(Learner(), run_id="another")
    with pytest.raises(RunMismatchError, match="another"):
        join()
