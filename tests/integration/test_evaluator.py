"""A whole evaluator against a learner over sockets: which snapshots it judges, and that it judges them the same."""

from __future__ import annotations

import threading

import pytest

from integration.peers import PENDULUM, RUN_ID, Learner, make_actor, serve
from integration.waiting import wait_until
from paceline.actors import squashed_gaussian_semantics
from paceline.config import EvaluatorConfig, build
from paceline.errors import ActorSemanticsError, ConfigError, EnvironmentFaultError, RunMismatchError
from paceline.evaluator import main as evaluator
from paceline.process import StopSignal
from paceline.v1 import run_pb2

EPISODES = 3


@pytest.fixture
def evaluating():
    """Starts evaluators against a learner; gives the stop, and a function that waits for the end."""
    ended = []

    def start(learner, *, every_versions=1, run_id=RUN_ID, env=None, on_environment_error="stop"):
        stop, errors = StopSignal(), []
        server, port = serve(learner)
        config = build(
            {
                "run": {"id": run_id},
                "env": env or {},
                "learner": {"address": f"127.0.0.1:{port}"},
                "collector": {"poll_seconds": 0.5, "on_environment_error": on_environment_error},
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


class TellingLearner(Learner):
    """Tells those who join what it trains in, too; `peers.Learner` says as little as an older one."""

    def __init__(self, environment_id, kwargs_json):
        super().__init__()
        self.told = run_pb2.JoinResponse(
            environment_id=environment_id, environment_kwargs_json=kwargs_json, n_step=5, gamma=0.5
        )

    def Join(self, request, context):
        answer = super().Join(request, context)
        answer.MergeFrom(self.told)
        return answer


@pytest.mark.parametrize(
    ("environment_id", "kwargs_json", "words"),
    [
        ("Mine-v0", "{}", r"env\.id is 'Pendulum-v1' for this evaluator and 'Mine-v0' for the learner"),
        ("Pendulum-v1", '{"g":5}', r"env\.kwargs is \{\} for this evaluator and \{'g': 5\} for the learner"),
    ],
)
def test_another_environment_than_the_learners_is_refused_by_name(evaluating, environment_id, kwargs_json, words):
    _, join = evaluating(TellingLearner(environment_id, kwargs_json))
    with pytest.raises(ConfigError, match=words + ".*start learner and evaluator with the same"):
        join()


def test_an_environment_with_another_range_of_actions_than_the_learners_actor_is_refused(evaluating):
    semantics = squashed_gaussian_semantics(3, hidden=(8,), action_low=(-0.5,), action_high=(0.5,))
    _, join = evaluating(Learner(PENDULUM, semantics))
    with pytest.raises(
        ActorSemanticsError, match=r"action_low \[-0\.5\]: environment 'Pendulum-v1' here has \[-2\.0\]"
    ):
        join()


@pytest.mark.parametrize(
    "learner", [TellingLearner("Pendulum-v1", "{}"), TellingLearner("", "")], ids=["same", "older"]
)
def test_an_evaluator_that_renders_is_taken(evaluating, learner):
    learner.publish(1)
    evaluating(learner, env={"id": "Pendulum-v1", "kwargs": {"render_mode": "rgb_array"}})
    wait_until(lambda: learner.evaluations)


SOUR = squashed_gaussian_semantics(1, hidden=(16, 16), action_low=(-1.0,), action_high=(1.0,))


def sour(bad):
    return {"id": "counting_environment:Sour-v0", "kwargs": {"bad": bad}}


def test_a_seed_on_which_the_environment_fails_gives_way_to_another_where_faults_are_survived(evaluating):
    learner = Learner(semantics=SOUR)
    evaluating(learner, env=sour(EvaluatorConfig().seed + 1), on_environment_error="reset")
    for version in (1, 2):
        learner.publish(version, make_actor(1, SOUR))
        wait_until(lambda version=version: len(learner.evaluations) == version)
    assert [len(report.episodes) for report in learner.evaluations] == [EPISODES] * 2


def test_an_environment_that_fails_ends_an_evaluator_that_is_to_stop(evaluating):
    learner = Learner(semantics=SOUR)
    _, join = evaluating(learner, env=sour(EvaluatorConfig().seed + 1))
    learner.publish(1, make_actor(1, SOUR))
    with pytest.raises(EnvironmentFaultError, match="this seed is sour"):
        join()
