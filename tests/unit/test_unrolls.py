"""Unrolls follow each other without a gap, and hold the real last observation of each episode that they cross."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counting_environment import build
from paceline.collector.unrolls import UnrollFiller
from paceline.rows import unroll_spec
from vector_steps import ACTION, OBSERVATION, log_prob_of, open_block, policy, step_of, synchronised_clock

PER_STEP = ("action", "reward", "behaviour_log_prob", "policy_version", "episode", "valid", "terminated", "truncated")


def filler_of(environments, length, **settings):
    filler = UnrollFiller(open_block(unroll_spec(OBSERVATION, ACTION, length), **settings), environments=environments)
    filler.set_policy(policy(1), 10)
    return filler


def rows_of(filler, sealed):
    last = filler.block.take()
    blocks = [*sealed, *([] if last is None else [last])]
    return np.concatenate([block.columns for block in blocks]) if blocks else np.empty(0, filler.block.spec.dtype)


def chains_of(rows, key):
    """The unrolls of each environment after each other: observations [L + 1], and the other columns [L]."""
    for number in np.unique(key):
        own = rows[key == number]
        observation = own["observation"][:, :, 0]
        assert np.array_equal(observation[1:, 0], observation[:-1, -1]), "an unroll begins where the last one ended"
        chain = {name: own[name].reshape(-1, *own[name].shape[2:]) for name in PER_STEP}
        yield number, np.append(observation[:, :-1].ravel(), observation[-1, -1]), chain


@pytest.mark.parametrize("length", [1, 2, 5, 20])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_unrolls_of_real_environments_hold_every_observation_in_either_autoreset_mode(autoreset, length):
    environments = build("Counting", (0, 1), autoreset=autoreset)
    filler, sealed, owner = filler_of(2, length), [], {}
    for _ in range(120):
        step = environments.step(np.full(environments.action_shape, 0.5, np.float32))
        sealed += filler.add(step, np.full(2, -0.25, np.float32))
        owner.update(zip(step.episode.tolist(), (0, 1), strict=True))
    environments.close()
    rows = rows_of(filler, sealed)
    assert len(rows) >= 150 // length
    for number, observation, chain in chains_of(rows, np.array([owner[row["episode"][0]] for row in rows])):
        steps = 2 + number  # of an episode: the first environment's terminate, the other's are cut
        position = np.arange(len(chain["valid"])) % (steps + 1)
        episode = 1 + np.arange(len(position)) // (steps + 1)
        assert np.array_equal(observation[:-1], 100 * episode + position)
        assert np.array_equal(chain["valid"], position < steps)
        assert np.array_equal(chain["reward"], position < steps)
        assert np.array_equal(chain["terminated"], (position == steps - 1) & (number == 0))
        assert np.array_equal(chain["truncated"], (position == steps - 1) & (number == 1))
        assert np.array_equal(chain["action"][:, 0], 0.5 * chain["valid"])
        assert np.array_equal(chain["behaviour_log_prob"], -0.25 * chain["valid"])
        assert (np.diff(chain["episode"])[position[:-1] != steps] == 0).all()
    assert (rows["collector_index"] == 4).all()


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
    environments=st.integers(1, 4),
    end_share=st.sampled_from([0.0, 0.1, 0.6]),
    block_rows=st.sampled_from([1, 3, 1000]),
    rebuilds=st.sampled_from([(), (15,), (15, 16)]),
)
def test_any_steps_give_the_unrolls_of_a_slow_reading(length, seed, environments, end_share, block_rows, rebuilds):
    random = np.random.default_rng(seed)
    filler, sealed = filler_of(environments, length, block_rows=block_rows), []
    # Per environment, entries (observation, next observation, valid, terminated, truncated, version).
    expected = [[] for _ in range(environments)]
    owner, episode = {e: e for e in range(environments)}, np.arange(environments)
    ended, last = np.zeros(environments, bool), np.zeros(environments)
    for t in range(40):
        if t in rebuilds:
            sealed += filler.cut()
            ended[:] = True
        version = 1 + t // 10
        filler.set_policy(policy(version), 10 * version)
        valid = random.random(environments) < 0.8
        ends = (random.random(environments) < end_share) & valid
        terminated = ends & (random.random(environments) < 0.5)
        begins = 1000.0 * np.arange(environments) + 10 * t
        observation = np.where(ended | (last == 0), begins, last)
        step = step_of(observation, terminated=terminated, truncated=ends & ~terminated, valid=valid, episode=episode)
        sealed += filler.add(step, log_prob_of(step))
        episode = episode.copy()
        for e in np.flatnonzero(valid):
            if ended[e] and expected[e]:
                expected[e].append((last[e], observation[e], False, False, False, version))
            one = (observation[e], observation[e] + 1, True, terminated[e], ends[e] and not terminated[e], version)
            expected[e].append(one)
            last[e], ended[e] = observation[e] + 1, ends[e]
            if ends[e]:
                episode[e] = len(owner)
                owner[len(owner)] = e
    rows = rows_of(filler, sealed)
    key = np.array([owner[row["episode"][0]] for row in rows])
    for e in range(environments):
        assert np.count_nonzero(key == e) == len(expected[e]) // length
    for e, observation, chain in chains_of(rows, key):
        steps = expected[e][: len(chain["valid"])]
        assert observation.tolist() == [each[0] for each in steps] + [steps[-1][1]]
        for place, name in enumerate(("valid", "terminated", "truncated", "policy_version"), 2):
            assert chain[name].tolist() == [each[place] for each in steps]
        assert chain["behaviour_log_prob"].tolist() == [each[0] / 8 if each[2] else 0 for each in steps]


def test_a_dropped_episode_takes_its_unrolls_along_and_the_next_begins_anew():
    filler = filler_of(2, 3)
    for t in range(7):
        filler.add(step_of([t, 100 + t], truncated=[t == 2, False], episode=[7 if t < 3 else 9, 8]), np.zeros(2))
    # Environment 0 has made two unrolls: of episode 7 alone, and of the step between and 9; and begun a third, of 9.
    assert filler.drop_episode(9) == 1 + 1
    assert filler.cut() == []
    for t in range(3):
        filler.add(step_of([200 + t, 300 + t], episode=[10, 11]), np.zeros(2))
    rows = rows_of(filler, ())
    assert [row["episode"].tolist() for row in rows if 8 not in row["episode"]] == [[7, 7, 7], [10, 10, 10]]
    assert rows[-2:]["observation"][:, :, 0].tolist() == [[106, 107, 300, 301], [200, 201, 202, 203]]
    of_the_other = rows[[8 in row["episode"] for row in rows]][-1]
    assert of_the_other["valid"].tolist() == [True, False, True]
    assert not rows["terminated"].any()


def test_an_episode_that_is_dropped_right_behind_an_unroll_leaves_nothing_and_spares_the_others():
    filler = filler_of(2, 3)
    for t in range(3):
        filler.add(step_of([t, 100 + t], valid=[True, t < 2], episode=[0, 1]), np.zeros(2))
    assert filler.drop_episode(0) == 1  # the unroll; none is begun
    filler.cut()
    for t in range(3):
        filler.add(step_of([200 + t, 300 + t], episode=[2, 3]), np.zeros(2))
    rows = rows_of(filler, ())
    assert rows["observation"][:, :, 0].tolist() == [[100, 101, 102, 300], [200, 201, 202, 203], [300, 301, 302, 303]]
    assert rows["valid"].tolist() == [[True, True, False], [True, True, True], [True, True, True]]


def test_an_unroll_says_of_each_step_when_its_policy_was_applied_and_once_when_it_was_sealed():
    now = [1_700_000_000.0]
    spec = unroll_spec(OBSERVATION, ACTION, 3)
    filler = UnrollFiller(open_block(spec, block_rows=2, clock=synchronised_clock(now, ahead=-50)), environments=1)
    sealed = []
    for number in range(6):
        now[0] += 1
        if number in (0, 2):
            filler.set_policy(policy(number + 1), 10, applied_at=filler.block.clock.stamp())
        step = step_of([number])
        sealed += filler.add(step, log_prob_of(step))
    rows, began = rows_of(filler, sealed), 1_700_000_000 - 50
    assert rows["collected_at"] - began == pytest.approx(np.array([[1, 2, 3], [4, 5, 6]]), abs=1e-5)
    assert rows["policy_applied_at"] - began == pytest.approx(np.array([[1, 1, 3], [3, 3, 3]]), abs=1e-5)
    assert rows["sealed_at"] - began == pytest.approx([6, 6], abs=1e-5)
