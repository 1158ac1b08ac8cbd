"""Stepping environments: which transitions are complete, what an episode is, and what a fault says."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import structlog

from counting_environment import Echo, build, collect_until, require_whole_episodes
from paceline.config import EnvConfig
from paceline.envs import (
    Environments,
    describe_environment,
    environment_seeds,
    make_vector_environment,
)
from paceline.errors import ConfigError, EnvironmentFaultError

MODES = ["next_step", "same_step"]


@pytest.mark.parametrize("mode", MODES)
def test_no_transition_crosses_the_end_of_an_episode(mode):
    require_whole_episodes(build("Counting", (0, 1), autoreset=mode))


def test_the_first_episodes_are_the_same_in_both_modes_and_next_step_needs_more_steps_for_them():
    (next_step, _, more), (same_step, _, fewer) = (
        collect_until(build("Counting", (0, 1), autoreset=mode), 3) for mode in MODES
    )
    assert [each[:4] for each in next_step[0][:6]] == [each[:4] for each in same_step[0][:6]]
    assert [each[:4] for each in next_step[1][:9]] == [each[:4] for each in same_step[1][:9]]
    assert more > fewer == 9


@pytest.mark.parametrize("mode", MODES)
def test_every_episode_has_a_number_of_its_own(mode):
    transitions, _, _ = collect_until(build("Counting", (0, 1), autoreset=mode), 3)
    for each in transitions.values():
        by_number = {}
        for before, *_, episode in each:
            by_number.setdefault(episode, set()).add(int(before) // 100)
        assert all(len(hundreds) == 1 for hundreds in by_number.values())
    assert not {each[-1] for each in transitions[0]} & {each[-1] for each in transitions[1]}


@pytest.mark.parametrize("mode", MODES)
def test_termination_wins_over_truncation_in_the_same_step(mode):
    environments = build("Counting", (2,), autoreset=mode)
    action = np.zeros((1, 1), np.float32)
    environments.step(action)
    step = environments.step(action)
    assert step.terminated.tolist() == [True]
    assert step.truncated.tolist() == [False]
    assert step.finished[0].terminated
    assert step.next_observation.tolist() == [[102]]


@pytest.mark.parametrize("declared", [None, "Disabled", gymnasium.vector.AutoresetMode.DISABLED, "sometimes"])
def test_a_vector_environment_without_a_usable_autoreset_mode_is_refused(declared):
    config = EnvConfig(id="counting_environment:Counting-v0")
    vector = make_vector_environment(config, 1)
    vector.metadata = {} if declared is None else {"autoreset_mode": declared}
    with pytest.raises(ConfigError, match="autoreset mode"):
        Environments(vector, describe_environment(config), (0,))


def test_the_declared_mode_counts_not_the_configured_one():
    config = EnvConfig(id="counting_environment:Counting-v0", autoreset="next_step")
    vector = gymnasium.make_vec(
        "Counting-v0",
        1,
        "sync",
        vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP},
        disable_env_checker=True,
    )
    transitions, _, steps = collect_until(Environments(vector, describe_environment(config), (0,)), 3)
    assert steps == 6
    assert all(after - before == 1 for before, after, *_ in transitions[0])


def test_actions_are_clipped_at_the_environment_only_so_that_the_stored_one_is_the_scored_one():
    environments = build("Echo", (0,))
    mean, std = np.array([[0.5, 2.5]]), 1.0
    action = (mean + std * np.array([[2.0, 2.0]])).astype(np.float32)  # outside of both bounds

    def log_prob(stored):
        return float((-0.5 * ((stored - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)).sum())

    step = environments.step(action)
    assert step.next_observation.tolist() == [[1.0, 3.0]], "the environment sees the clipped action"
    assert step.action.tolist() == action.tolist()
    assert math.exp(log_prob(step.action) - log_prob(action)) == 1
    assert math.exp(log_prob(np.clip(step.action, -1, 3)) - log_prob(action)) != 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("step raises", "step raised ZeroDivisionError: a 100 % broken simulator"),
        ("observation is NaN", "a NaN or an infinity"),
        ("observation has a wrong shape", r"shape \(3,\): expected \(2,\)"),
        ("reward is infinite", "the reward is inf"),
    ],
)
def test_a_fault_names_environment_number_step_and_seed(fault, said):
    environments = build("Faulty", (11, 12), fault=fault, step=8)
    action = np.zeros((2, 1), np.float32)
    for _ in range(8):  # of them one resets
        environments.step(action)
    with pytest.raises(EnvironmentFaultError, match=said) as caught:
        environments.step(action)
    environments.close()
    assert "'counting_environment:Faulty-v0' number 0 (seed 11) at its step 9" in str(caught.value)
    assert (caught.value.episode, caught.value.environment) == (2, 0)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_where_in_the_environment_it_was_raised_is_logged(vectorization):
    environments = build("Faulty", (11, 12), vectorization=vectorization, fault="step raises", step=1)
    with structlog.testing.capture_logs() as events, pytest.raises(EnvironmentFaultError) as caught:
        environments.step(np.zeros((2, 1), np.float32))
    environments.close()
    (event,) = events
    assert 'counting_environment.py", line' in event["traceback"]
    assert "Traceback" not in str(caught.value)


def test_a_fault_of_a_reset_is_named():
    with pytest.raises(EnvironmentFaultError, match=r"seed 3.*reset raised OSError: no 100 % free disk"):
        build("Faulty", (3,), fault="reset raises")


def test_an_environment_whose_close_raises_keeps_no_other_from_closing(monkeypatch):
    closed = []

    def close(environment):
        closed.append(environment)
        raise OSError("the simulator is gone already")

    environments = build("Echo", (0, 1))
    monkeypatch.setattr(Echo, "close", close)
    environments.close()
    assert len(closed) == 2


def test_thirty_two_environments_of_four_collectors_begin_differently_and_reproducibly():
    def first_observations(collector, incarnation=1):
        environments = build("Pendulum-v1", environment_seeds(7, collector, incarnation, 8))
        return [tuple(each) for each in environments.observation.tolist()]

    fleet = [first_observations(collector) for collector in range(4)]
    assert len({each for collector in fleet for each in collector}) == 32
    assert [first_observations(collector) for collector in range(4)] == fleet
    restarted = first_observations(2, incarnation=2)
    assert not set(restarted) & {each for collector in fleet for each in collector}
    assert environment_seeds(7, 0, 1, 2, rebuild=1) != environment_seeds(7, 0, 1, 2)


@pytest.mark.parametrize(
    ("observation", "stored", "shape"),
    [
        ("float32", "float32", (2,)),
        ("float64", "float32", (2,)),
        ("float16", "float16", (2,)),
        ("int64", "int64", (2,)),
        ("int16", "int32", (2,)),
        ("uint8", "uint8", (4, 4, 3)),
    ],
)
def test_a_description_says_how_rows_store_observations_and_actions(observation, stored, shape):
    description = describe_environment(
        EnvConfig(id="counting_environment:Spaces-v0", kwargs={"observation": observation})
    )
    assert (description.observation.dtype, description.observation.shape) == (stored, shape)
    assert (description.action.dtype, description.action.shape) == ("float32", (3, 2))
    assert description.observation_dim == math.prod(shape)
    assert description.action_dim == len(description.action_low) == len(description.action_high) == 6
    assert describe_environment(EnvConfig(id="Pendulum-v1")).max_episode_steps == 200


def test_observations_come_as_rows_store_them():
    environments = build("Echo", (0,))
    step = environments.step(np.full((1, 2), 0.1, np.float32))
    assert environments.observation.dtype == step.observation.dtype == step.next_observation.dtype == np.float32
    assert build("Counting", (0,), dtype="uint8").observation.dtype == np.uint8


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("discrete", "discrete action space .*: sac chooses continuous actions"),
        ("unbounded", "finite bounds"),
        ("integers", "Box of floating numbers"),
    ],
)
def test_an_action_space_that_sac_cannot_act_in_is_refused(action, said):
    with pytest.raises(ConfigError, match=said):
        describe_environment(EnvConfig(id="counting_environment:Spaces-v0", kwargs={"action": action}))


@pytest.mark.parametrize(
    ("env_id", "nearest"),
    [("Pendulm-v1", "Pendulum-v1"), ("Pendulum-v0", "Pendulum-v1"), ("HalfCheeta-v5", "HalfCheetah-v5")],
)
def test_an_unknown_id_names_the_nearest_known_one(env_id, nearest):
    with pytest.raises(ConfigError, match=nearest):
        describe_environment(EnvConfig(id=env_id))


@pytest.mark.parametrize("env_id", ["no_such_module:MyEnv-v0", "a:b:c", "", "entirely strange"])
def test_an_id_that_names_nothing_is_a_configuration_error(env_id):
    with pytest.raises(ConfigError, match=r"env\.id is"):
        make_vector_environment(EnvConfig(id=env_id), 1)


def test_arguments_that_the_environment_does_not_take_are_a_configuration_error():
    with pytest.raises(ConfigError, match="gravitation"):
        describe_environment(EnvConfig(id="Pendulum-v1", kwargs={"gravitation": 3}))


def test_a_deprecated_environment_builds_although_it_warns():
    assert describe_environment(EnvConfig(id="HalfCheetah-v5")).observation.shape == (17,)
    assert describe_environment(EnvConfig(id="HalfCheetah-v4")).observation.shape == (17,)
