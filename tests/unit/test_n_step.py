"""n-step rows: what the recipes give, and what a slow reading of RECIPES 2.8 gives for any steps."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counting_environment import build
from paceline.collector.n_step import NStepFiller
from paceline.rows import Column, CompactForm, transition_spec
from vector_steps import ACTION, OBSERVATION, log_prob_of, open_block, policy, step_of, take_rows

DATA = json.loads((Path(__file__).parents[1] / "data" / "sac-cases.json").read_text())
SPEC = transition_spec(OBSERVATION, ACTION, reward_dtype="float64")


def filler_of(environments, n_step, gamma, *, spec=SPEC, **settings):
    filler = NStepFiller(open_block(spec, **settings), environments=environments, n_step=n_step, gamma=gamma)
    filler.set_policy(policy(1), 10)
    return filler


def add(filler, step):
    return filler.add(step, log_prob_of(step))


@pytest.mark.parametrize("case", DATA["n_step"], ids=lambda case: case["name"])
def test_the_reference_cases_are_met(case):
    filler = filler_of(1, case["n"], case["gamma"])
    episode = 0
    for t, reward in enumerate(case["rewards"]):
        terminated, truncated = case["terminated"][t], case["truncated"][t]
        add(
            filler,
            step_of(
                [t],
                reward=reward,
                next_observation=[t],
                terminated=terminated,
                truncated=truncated and not terminated,
                episode=episode,
            ),
        )
        episode += terminated or truncated
    rows, expected, tolerance = take_rows(filler), case["expected"], DATA["tolerance"]["float64"]
    assert rows["observation"][:, 0].tolist() == list(range(len(case["rewards"])))
    assert rows["reward"] == pytest.approx(expected["n_step_reward"], abs=tolerance)
    assert rows["step_count"].tolist() == expected["steps"]
    last = rows["next_observation"][:, 0].astype(int)
    assert last.tolist() == expected["bootstrap_index"]
    discount = case["gamma"] ** rows["step_count"].astype(float) * ~rows["terminated"]
    assert discount == pytest.approx(expected["bootstrap_discount"], abs=tolerance)
    target = rows["reward"] + discount * np.asarray(case["next_values"])[last]
    assert target == pytest.approx(expected["target"], abs=tolerance)


def test_a_window_ends_with_its_episode_and_the_next_one_begins_anew():
    filler = filler_of(1, 3, 0.9)
    for t in range(1, 8):  # rewards 1 to 7; the first episode is cut at reward 4
        add(filler, step_of([t], reward=t, truncated=t == 4, episode=int(t > 4)))
    rows = {int(row["observation"][0]): row for row in take_rows(filler)}
    for start, reward, discount, last, truncated in [
        (3, 6.6, 0.81, 5, True),
        (4, 4.0, 0.9, 5, True),
        (5, 16.07, 0.729, 8, False),
        (6, 12.3, 0.81, 8, False),
        (7, 7.0, 0.9, 8, False),
    ]:
        row = rows[start]
        assert row["reward"] == pytest.approx(reward)
        assert 0.9 ** row["step_count"] == pytest.approx(discount)
        assert (row["next_observation"][0], row["truncated"], row["terminated"]) == (last, truncated, False)
        assert row["episode"] == int(start > 4)


@dataclass
class Episode:
    """Steps of one episode, and how it ended; an oracle's notes."""

    steps: list = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False


def slowly_summed(episode, n_step, gamma):
    """(start, sum, steps, next observation, terminated, truncated) of each step of an episode, by RECIPES 2.8."""
    for start in range(len(episode.steps)):
        window = episode.steps[start : start + n_step]
        reaches_end = start + n_step >= len(episode.steps)
        yield (
            window[0][0],
            sum(gamma**j * reward for j, (_, reward) in enumerate(window)),
            len(window),
            window[-1][0] + 1,
            reaches_end and episode.terminated,
            reaches_end and episode.truncated,
        )


@settings(max_examples=150, deadline=None)
@given(
    n_step=st.integers(1, 6),
    gamma=st.floats(0.5, 1.0),
    seed=st.integers(0, 2**32 - 1),
    environments=st.integers(1, 5),
    end_share=st.sampled_from([0.0, 0.1, 0.5]),
    block_rows=st.sampled_from([1, 3, 7, 10_000]),
)
def test_any_steps_give_the_rows_of_a_slow_reading(n_step, gamma, seed, environments, end_share, block_rows):
    random = np.random.default_rng(seed)
    filler = filler_of(environments, n_step, gamma, block_rows=block_rows)
    running = [Episode() for _ in range(environments)]
    done, sealed, number = [], [], environments
    episodes = np.arange(environments)
    resets = np.zeros(environments, bool)  # the step after an episode's end only resets, for half of the environments
    for t in range(40):
        version = 1 + t // 10
        filler.set_policy(policy(version), 10 * version)
        valid = ~resets
        ends = (random.random(environments) < end_share) & valid
        terminated = ends & (random.random(environments) < 0.5)
        reward = random.standard_normal(environments)
        observation = 100.0 * np.arange(environments) + t
        step = step_of(
            observation,
            reward=reward,
            terminated=terminated,
            truncated=ends & ~terminated,
            valid=valid,
            episode=episodes,
        )
        sealed += add(filler, step)
        episodes = episodes.copy()
        for e in np.flatnonzero(valid):
            running[e].steps.append((float(observation[e]), float(reward[e])))
            if ends[e]:
                running[e].terminated, running[e].truncated = bool(terminated[e]), not terminated[e]
                done.append(running[e])
                running[e] = Episode()
                episodes[e], number = number, number + 1
        resets = ends & (np.arange(environments) % 2 == 0)
    rows = take_rows(filler, sealed)
    expected = {each[0]: each for episode in [*done, *running] for each in slowly_summed(episode, n_step, gamma)}
    assert len(rows) == len(expected)
    for row in rows:
        start, total, steps, following, terminated, truncated = expected[float(row["observation"][0])]
        assert row["reward"] == pytest.approx(total, abs=1e-9)
        assert (row["step_count"], row["next_observation"][0]) == (steps, following)
        assert (row["terminated"], row["truncated"]) == (terminated, truncated)
        version = 1 + int(start % 100) // 10
        assert (row["policy_version"], row["policy_learner_step"]) == (version, 10 * version)
        assert row["behaviour_log_prob"] == np.float32(start) / 8
        assert row["action"][0] == -start
        assert (row["collector_index"], row["collector_incarnation"]) == (4, 5)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_windows_of_real_environments_cross_no_end_in_either_autoreset_mode(autoreset):
    environments = build("Counting", (0, 1, 2, 3), autoreset=autoreset)
    filler = filler_of(4, 2, 0.5)
    sealed, finished = [], 0
    while finished < 40:
        step = environments.step(np.zeros(environments.action_shape, np.float32))
        finished += len(step.finished)
        sealed += filler.add(step, np.zeros(4, np.float32))
    environments.close()
    rows = take_rows(filler, sealed)
    ended = rows["terminated"] | rows["truncated"]
    steps = rows["step_count"]
    assert np.array_equal(rows["next_observation"][:, 0], rows["observation"][:, 0] + steps)
    assert np.array_equal(rows["reward"], np.where(steps == 2, 1.5, 1.0))
    assert (rows["observation"] // 100 == rows["next_observation"] // 100).all()
    # Episodes of 2 steps that terminate, and of 3 that are cut: two windows of each reach the end.
    taken = rows["next_observation"][:, 0] % 100
    assert (taken[rows["terminated"]] == 2).all()
    assert (taken[rows["truncated"]] == 3).all()
    for episode in np.unique(rows["episode"][ended]):
        own = rows[rows["episode"] == episode]
        assert own["step_count"].tolist() == [2] * (len(own) - 1) + [1]
        assert (own["terminated"] | own["truncated"]).tolist() == [False] * (len(own) - 2) + [True, True]


def test_a_dropped_episode_takes_its_open_windows_along_and_the_others_are_cut():
    filler = filler_of(2, 3, 0.5)
    for t in range(4):
        add(filler, step_of([t, 100 + t], episode=[7, 8]))
    assert filler.drop_episode(7) == 2 + 2  # two rows, and two open windows
    filler.cut()
    for t in range(3):  # new environments
        add(filler, step_of([200 + t, 300 + t], episode=[9, 10]))
    rows = take_rows(filler)
    assert 7 not in rows["episode"]
    assert rows["observation"][rows["episode"] == 8, 0].tolist() == [100, 101, 102, 103]
    assert rows["step_count"][rows["episode"] == 8].tolist() == [3, 3, 2, 1]
    assert (rows["next_observation"][rows["episode"] == 8, 0] <= 104).all()
    assert not rows["truncated"].any()
    assert rows["reward"][rows["observation"][:, 0] == 200] == pytest.approx(1.75)


def test_rows_carry_the_stamps_of_their_first_step():
    filler = filler_of(1, 3, 0.9)
    for t in range(6):
        filler.set_policy(policy(t + 1), 10 * t)
        add(filler, step_of([t]))
    rows = take_rows(filler)
    assert rows["policy_version"].tolist() == [1, 2, 3, 4, 5, 6]
    assert rows["policy_learner_step"].tolist() == [0, 10, 20, 30, 40, 50]
    assert (np.diff(rows["collected_at"]) >= 0).all()


def test_the_row_that_goes_on_lies_n_times_the_environments_later():
    spec = transition_spec(Column("observation", "float32", (32,)), ACTION)
    filler = NStepFiller(open_block(spec), environments=4, n_step=3, gamma=0.9)
    random = np.random.default_rng(3)
    observation = random.standard_normal((4, 32), np.float32)
    for _ in range(40):
        following = random.standard_normal((4, 32), np.float32)
        step = step_of([0] * 4)
        fields = {**vars(step), "observation": observation, "next_observation": following}
        filler.add(type(step)(**fields), np.zeros(4, np.float32))
        observation = following
    block = filler.block.take()
    payload = CompactForm(spec).encode(block, 4 * 3)
    assert payload.nbytes < 0.75 * block.data.nbytes
    assert CompactForm(spec).encode(block, 4) is None
