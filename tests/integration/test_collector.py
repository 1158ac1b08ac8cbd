"""A whole collector against a learner and a replay service over sockets: what its rows say, and how it ends."""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback

import numpy as np
import pytest
import torch

from integration.peers import PENDULUM, RUN_ID, SEMANTICS, Learner, Replay, make_actor, serve
from integration.waiting import wait_until
from mortal_environment import killed_in_its_step
from paceline.actors import squashed_gaussian_semantics
from paceline.collector import main as collector
from paceline.config import TableConfig, build
from paceline.envs import describe_environment
from paceline.errors import ActorSemanticsError, ConfigError, EnvironmentFaultError, RowSpecError, RunMismatchError
from paceline.process import StopSignal
from paceline.rows import Column, transition_spec, unroll_spec
from paceline.v1 import run_pb2


class Collecting:
    """A learner, a replay service, and a collector that runs on a thread."""

    def __init__(
        self, *, env=None, learner=None, replay=None, run_id=RUN_ID, index=None, algorithm=None, table=None, **settings
    ):
        self.stop, self.error, self.index = StopSignal(), None, index
        env = env or {"id": "Pendulum-v1"}
        self.learner, self.replay = learner or learner_of(env), replay or Replay()
        self.learner_server, learner_port = serve(self.learner)
        self.replay_server, replay_port = serve(self.replay)
        self.config = build(
            {
                "run": {"id": run_id},
                "env": env,
                "rpc": {"deadline_seconds": 2, "backoff_initial_seconds": 0.01, "backoff_max_seconds": 0.1},
                "learner": {"address": f"127.0.0.1:{learner_port}", "algorithm": algorithm or {}},
                "replay": {"address": f"127.0.0.1:{replay_port}"},
                "collector": {"environments": 2, "block_rows": 16, "poll_seconds": 0.5, **settings},
            }
        )
        if table:  # not checked: no algorithm of today learns from other tables than sac's
            replay_config = self.config.replay.model_copy(update={"tables": {"transitions": TableConfig(**table)}})
            self.config = self.config.model_copy(update={"replay": replay_config})
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            collector.run(self.config, index=self.index, stop=self.stop)
        except Exception as error:
            self.error = error

    def start(self, version=1):
        if version:
            self.learner.publish(version)
        self.thread.start()
        return self

    def join(self):
        self.thread.join(20)
        assert not self.thread.is_alive(), "the collector did not end"
        if self.error is not None:
            raise self.error

    def end(self):
        self.stop.set()
        self.join()
        return self.replay.columns()

    def close(self):
        self.stop.set()
        self.replay.open.set()
        if self.thread.ident is not None:
            self.thread.join(20)
        self.learner_server.stop(0).wait()
        self.replay_server.stop(0).wait()


def learner_of(env, *, unroll_length=None, **settings):
    description = describe_environment(build({"env": env}).env)
    spec = transition_spec(description.observation, description.action)
    if unroll_length is not None:
        spec = unroll_spec(description.observation, description.action, unroll_length)
    return Learner(
        spec,
        squashed_gaussian_semantics(
            description.observation_dim,
            hidden=(8,),
            action_low=description.action_low,
            action_high=description.action_high,
        ),
        **settings,
    )


@pytest.fixture
def collecting():
    """Makes collectors with their peers, and ends them."""
    made = []

    def make(**settings):
        made.append(Collecting(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def is_within(thread, function):
    """Whether the thread has been in that function for a while: it waits there."""
    for _ in range(10):
        frames = traceback.extract_stack(sys._current_frames()[thread.ident])
        if function not in [frame.name for frame in frames]:
            return False
        threading.Event().wait(0.02)
    return True


def require_unbroken_chains(rows):
    for episode in np.unique(rows["episode"]):
        chain = rows[rows["episode"] == episode]
        assert np.array_equal(chain["next_observation"][:-1], chain["observation"][1:])
        assert not chain["truncated"][:-1].any()
        assert len(chain) == 200 or not chain["truncated"][-1]
    assert not rows["terminated"].any()


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_the_rows_of_each_episode_form_an_unbroken_chain(collecting, autoreset):
    run = collecting(env={"id": "Pendulum-v1", "autoreset": autoreset}).start()
    run.replay.wait_for(lambda replay: replay.row_count >= 900)
    rows = run.end()
    require_unbroken_chains(rows)
    assert rows["truncated"].sum() >= 4
    episodes = np.unique(rows["episode"])
    assert episodes.tolist() == list(range(len(episodes)))


def test_every_row_is_stamped_with_the_policy_that_acted_and_its_own_log_density(collecting):
    run = collecting().start()
    for version in (2, 3, 4):
        reached = run.replay.row_count
        run.replay.wait_for(lambda replay, reached=reached: replay.row_count > reached + 64)
        run.learner.publish(version)
    run.replay.wait_for(lambda replay: (replay.columns()["policy_version"] == 4).sum() > 64)
    rows = run.end()
    assert (np.diff(rows["policy_version"]) >= 0).all()
    assert (rows["policy_incarnation"] == 1).all()
    assert (rows["policy_learner_step"] == 10 * rows["policy_version"]).all()
    assert (rows["collector_index"] == 0).all()
    assert (rows["collector_incarnation"] == 1).all()
    assert (np.diff(rows["collected_at"]) >= 0).all()
    for version in (1, 4):
        mine = rows[rows["policy_version"] == version]
        mine = mine[np.abs(mine["action"][:, 0]) < 1.9]  # far from the bounds, where tanh can be undone
        actor = make_actor(version, run.learner.semantics)
        with torch.no_grad():
            mean, std = actor.get_mean_and_std(torch.from_numpy(mine["observation"].copy()))
        unit = torch.from_numpy(mine["action"].astype(np.float64)) / 2
        normal = torch.distributions.Normal(mean.double(), std.double())
        expected = (normal.log_prob(torch.atanh(unit)) - torch.log(2 * (1 - unit**2))).sum(-1)
        assert np.abs(expected.numpy() - mine["behaviour_log_prob"]).max() < 1e-3


def test_the_warm_up_is_random_and_ends_after_the_steps_that_the_learner_names(collecting):
    run = collecting(learner=learner_of({"id": "Pendulum-v1"}, warmup_steps=60)).start(version=5)
    run.replay.wait_for(lambda replay: replay.row_count >= 100)
    rows = run.end()
    warm_up = rows[:60]
    assert np.allclose(warm_up["behaviour_log_prob"], -math.log(4))
    assert (warm_up["policy_version"] == 5).all()
    assert abs(warm_up["action"].mean()) < 0.5
    assert warm_up["action"].min() < -1.5
    assert warm_up["action"].max() > 1.5
    assert not np.isclose(rows[60:]["behaviour_log_prob"], -math.log(4)).all()


def test_acting_goes_on_with_the_last_good_snapshot_while_the_learner_is_away(collecting):
    run = collecting().start(version=3)
    run.replay.wait_for(lambda replay: replay.row_count > 0)
    run.learner_server.stop(0).wait()
    reached = run.replay.row_count
    run.replay.wait_for(lambda replay: replay.row_count > reached + 1000)
    assert (run.end()["policy_version"] == 3).all()


def test_a_slow_replay_service_holds_the_collector_back_and_loses_nothing(collecting):
    run = collecting().start()
    run.replay.wait_for(lambda replay: replay.row_count > 0)
    run.replay.open.clear()
    held_at = run.replay.received
    run.replay.wait_for(lambda replay: replay.received > held_at)
    run.replay.open.set()
    reached = run.replay.row_count
    run.replay.wait_for(lambda replay: replay.row_count > reached + 200)
    require_unbroken_chains(run.end())


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_stop_appends_every_row_that_was_collected(collecting, n_step):
    run = collecting(algorithm={"name": "sac", "n_step": n_step}, block_rows=4096, block_seconds=1000).start()
    wait_until(lambda: any(report.episodes for report in run.learner.reports))
    rows = run.end()
    reported = sum(episode.length for report in run.learner.reports for episode in report.episodes)
    assert len(rows) >= reported >= 400
    assert rows["step_count"][-1] == 1, "the last step begins a row too"
    if n_step == 1:
        require_unbroken_chains(rows)


def test_a_block_is_due_by_time_however_few_rows_it_has(collecting):
    run = collecting(block_rows=4096, block_seconds=0.01).start()
    run.replay.wait_for(lambda replay: len(replay.blocks) > 3)
    assert 0 < run.replay.blocks[0].header.row_count < 4096


def test_finished_episodes_are_reported_once_each(collecting):
    run = collecting().start()
    wait_until(lambda: sum(len(report.episodes) for report in run.learner.reports) >= 4)
    rows = run.end()
    reports = run.learner.reports
    assert [report.sequence for report in reports] == list(range(1, len(reports) + 1))
    episodes = [episode for report in reports for episode in report.episodes]
    assert len(episodes) == rows["truncated"].sum()
    ended = rows[np.isin(rows["episode"], np.unique(rows["episode"][rows["truncated"]]))]
    assert sum(episode.episode_return for episode in episodes) == pytest.approx(ended["reward"].sum(), rel=1e-4)
    assert {episode.length for episode in episodes} == {200}
    assert 0 < reports[-1].environment_step_count <= len(rows)


@pytest.mark.parametrize("says", ["the learner", "replay"])
def test_the_collector_ends_by_itself_when_the_run_is_over(collecting, says):
    run = collecting(replay=Replay(complete_after_rows=200 if says == "replay" else None)).start()
    run.replay.wait_for(lambda replay: replay.row_count >= 100)
    if says == "the learner":
        run.learner.finish()
    run.join()


def test_the_collector_ends_with_the_run_while_replay_holds_its_rows_back(collecting):
    run = collecting().start()
    run.replay.wait_for(lambda replay: replay.row_count >= 100)
    run.replay.open.clear()
    wait_until(lambda: is_within(run.thread, "submit"))
    run.learner.finish()
    run.join()


def test_a_run_that_is_over_already_is_not_joined(collecting):
    run = collecting()
    run.learner.finish()
    run.start()
    run.join()
    assert run.replay.received == 0


def test_a_stop_ends_a_collector_that_waits_for_its_first_snapshot(collecting):
    run = collecting().start(version=None)
    wait_until(lambda: run.learner.polls)
    run.stop.set()
    run.join()


def test_a_stop_ends_a_collector_that_waits_for_the_learner(collecting):
    run = collecting()
    run.learner_server.stop(0).wait()
    run.start()
    run.stop.set()
    run.join()


FAULTY = "counting_environment:Faulty-v0"


def test_a_fault_ends_the_collector_and_what_was_collected_before_is_kept(collecting):
    env = {"id": FAULTY, "kwargs": {"fault": "step raises", "step": 8}}
    run = collecting(env=env, on_environment_error="stop").start()
    with pytest.raises(EnvironmentFaultError, match=r"number 0 \(seed \d+\) at its step 9"):
        run.join()
    assert run.replay.row_count == 2 * 7  # the sixth of the eight steps before only reset


def test_a_fault_drops_its_episode_and_the_collector_goes_on_where_it_may(collecting):
    env = {"id": FAULTY, "kwargs": {"fault": "step raises", "step": 8}}
    run = collecting(env=env, on_environment_error="reset", environments=1, block_rows=200, block_seconds=1000).start()
    run.replay.wait_for(lambda replay: replay.row_count >= 400)
    rows = run.end()
    episodes, lengths = np.unique(rows["episode"], return_counts=True)
    assert len(episodes) > 50
    # A block that was sealed in the middle of an episode keeps what it has of it.
    broken = [length for length in lengths[:-1] if length != 5]
    assert len(broken) <= len(run.replay.blocks)


def test_ten_faults_in_a_row_end_the_collector(collecting):
    env = {"id": FAULTY, "kwargs": {"fault": "observation is NaN", "step": 2}}
    run = collecting(env=env, on_environment_error="reset").start()
    with pytest.raises(EnvironmentFaultError, match="10th fault in a row"):
        run.join()


def mortal(tells):
    """Settings of environments, in processes of their own, whose first one waits in its 40th step to be killed."""
    return {
        "id": "mortal_environment:Mortal-v0",
        "vectorization": "async",
        "kwargs": {"tells": str(tells), "step": 40},
    }


@pytest.mark.parametrize("environments", [1, 2])
def test_an_environment_process_that_dies_in_a_step_ends_the_collector_which_says_so(
    collecting, tmp_path, environments
):
    tells = tmp_path / "tells"
    run = collecting(env=mortal(tells), on_environment_error="stop", environments=environments)
    with killed_in_its_step(tells):
        run.start()
    with pytest.raises(EnvironmentFaultError, match=r"'mortal_environment:Mortal-v0'.* an environment process died"):
        run.join()
    assert run.replay.row_count > 0


@pytest.mark.parametrize("environments", [1, 2])
def test_an_environment_process_that_dies_in_a_step_is_replaced_where_it_may(collecting, tmp_path, environments):
    tells = tmp_path / "tells"
    run = collecting(env=mortal(tells), on_environment_error="reset", environments=environments)
    with killed_in_its_step(tells):
        run.start()
    run.replay.wait_for(lambda replay: replay.row_count >= 400)
    rows = run.end()
    assert (rows["next_observation"] - rows["observation"] == 1).all()
    assert (np.bincount(rows["episode"]) <= 3).all(), "an episode's number is never taken twice"


@pytest.mark.parametrize("setting", ["stop", "reset"])
def test_a_stop_that_ends_an_environment_process_first_is_a_stop_and_no_fault(collecting, tmp_path, setting):
    tells = tmp_path / "tells"
    run = collecting(env=mortal(tells), on_environment_error=setting)
    with killed_in_its_step(tells):
        run.start()
    rows = run.end()
    assert len(rows) > 0


def test_rows_that_the_learner_does_not_want_are_refused_at_the_start(collecting):
    wanted = transition_spec(Column("observation", "float32", (4,)), Column("action", "float32", (1,)))
    run = collecting(learner=Learner(wanted, SEMANTICS)).start()
    with pytest.raises(RowSpecError, match=r"in observation: .*\(4,\).*\(3,\)"):
        run.join()


class TellingLearner(Learner):
    """Tells those who join how it was configured, too; `peers.Learner` says as little as an older one."""

    told: dict[str, object]

    def Join(self, request, context):
        answer = super().Join(request, context)
        answer.MergeFrom(run_pb2.JoinResponse(**self.told))
        return answer


def telling(**told):
    learner = TellingLearner()
    learner.told = {
        "environment_id": "Pendulum-v1",
        "environment_kwargs_json": '{"g":9.8}',
        "n_step": 3,
        "gamma": 0.99,
        **told,
    }
    return learner


MINE = {
    "env": {"id": "Pendulum-v1", "kwargs": {"g": 9.8}},
    "algorithm": {"name": "sac", "n_step": 3, "gamma": 0.99},
}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"environment_id": "Mine-v0"}, r"env\.id is 'Pendulum-v1' for this collector and 'Mine-v0' for the learner"),
        ({"environment_kwargs_json": '{"g":5}'}, r"env\.kwargs is \{'g': 9\.8\} .* \{'g': 5\} for the learner"),
        ({"environment_kwargs_json": "{}"}, r"env\.kwargs is \{'g': 9\.8\} .* \{\} for the learner"),
        ({"n_step": 2}, r"learner\.algorithm\.n_step is 3 .* 2 for the learner"),
        ({"gamma": 0.5}, r"learner\.algorithm\.gamma is 0\.99 .* 0\.5 for the learner"),
    ],
)
def test_settings_that_make_other_rows_than_the_learner_takes_them_for_are_refused_by_name(collecting, told, words):
    run = collecting(learner=telling(**told), **MINE).start()
    with pytest.raises(ConfigError, match=words + r": expected the same.*start learner and collectors with the same"):
        run.join()
    assert run.replay.row_count == 0


@pytest.mark.parametrize(
    ("told", "mine"),
    [
        ({}, {}),
        # As many environments as it likes, another kind of stepping, a window to watch one.
        (
            {"environment_kwargs_json": '{"g":9.8,"render_mode":"human"}'},
            {
                "env": {
                    "id": "Pendulum-v1",
                    "kwargs": {"render_mode": "rgb_array", "g": 9.8},
                    "autoreset": "same_step",
                },
                "environments": 3,
            },
        ),
        # Rows of one step hold no gamma.
        ({"n_step": 1, "gamma": 0.5}, {"algorithm": {"name": "sac", "n_step": 1, "gamma": 0.99}}),
        # An older learner says nothing of it, or only some.
        ({"environment_id": "", "environment_kwargs_json": "", "n_step": 0, "gamma": 0.0}, {}),
    ],
    ids=["same", "harmless", "one_step", "older"],
)
def test_settings_that_make_the_same_rows_are_taken(collecting, told, mine):
    run = collecting(learner=telling(**told), **{**MINE, **mine}).start()
    run.replay.wait_for(lambda replay: replay.row_count > 0)
    run.end()


def test_an_environment_with_another_range_of_actions_than_the_learners_actor_is_refused(collecting):
    semantics = squashed_gaussian_semantics(3, hidden=(8,), action_low=(-0.5,), action_high=(0.5,))
    run = collecting(learner=Learner(PENDULUM, semantics)).start()
    with pytest.raises(
        ActorSemanticsError, match=r"action_low \[-0\.5\]: environment 'Pendulum-v1' here has \[-2\.0\]"
    ):
        run.join()
    assert run.replay.row_count == 0


def test_a_learner_of_another_run_is_refused_at_the_start(collecting):
    run = collecting(run_id="another").start()
    with pytest.raises(RunMismatchError, match="another"):
        run.join()


def test_a_discrete_action_space_is_refused_before_the_run_is_joined(collecting):
    run = collecting(env={"id": "CartPole-v1"}, learner=Learner(PENDULUM, SEMANTICS)).start()
    with pytest.raises(ConfigError, match="discrete action space"):
        run.join()
    assert run.learner.joins == 0


def test_two_collectors_and_a_restarted_one_begin_with_different_observations(collecting):
    def first_observations(earlier_joins):
        run = collecting()
        run.learner.joins = earlier_joins
        run.start()
        run.replay.wait_for(lambda replay: replay.row_count > 0)
        return {tuple(each) for each in run.end()["observation"][:2].tolist()}

    assert not first_observations(0) & first_observations(1)
    assert first_observations(0) == first_observations(0)


def test_of_a_learner_that_tells_no_time_rows_keep_ones_own_and_leave_the_others_unknown(collecting):
    began = time.time()
    run = collecting().start()
    run.replay.wait_for(lambda replay: replay.row_count >= 32)
    rows = run.end()
    assert ((began <= rows["collected_at"]) & (rows["collected_at"] <= time.time())).all()
    assert (rows["policy_applied_at"] == 0).all()
    assert (rows["sealed_at"] == 0).all()


@pytest.mark.parametrize("n_step", [1, 3])
def test_blocks_in_the_compact_form_hold_the_same_rows(collecting, n_step):
    run = collecting(algorithm={"name": "sac", "n_step": n_step}, block_form="compact", block_rows=100).start()
    run.replay.wait_for(lambda replay: replay.row_count >= 900)
    rows = run.end()
    full = [block.header for block in run.replay.blocks if block.header.row_count == 100]
    assert {header.compact_stride for header in full} == {2 * n_step}
    for episode in np.unique(rows["episode"]):
        chain = rows[rows["episode"] == episode]
        assert np.array_equal(chain["next_observation"][:-n_step], chain["observation"][n_step:])


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_rows_of_several_steps_sum_up_the_rewards_of_their_own_episode(collecting, autoreset):
    env = {"id": "counting_environment:Counting-v0", "autoreset": autoreset}
    run = collecting(env=env, algorithm={"name": "sac", "n_step": 2, "gamma": 0.5}, environments=6).start()
    run.replay.wait_for(lambda replay: replay.row_count >= 600)
    rows = run.end()
    assert set(rows["step_count"].tolist()) == {1, 2}
    assert np.array_equal(rows["reward"], np.where(rows["step_count"] == 2, 1.5, 1.0))
    assert np.array_equal(rows["next_observation"][:, 0], rows["observation"][:, 0] + rows["step_count"])
    assert (rows["observation"] // 100 == rows["next_observation"] // 100).all()


@pytest.mark.parametrize("environments", [1, 2])
def test_a_fault_drops_the_open_windows_of_its_episode_and_cuts_those_of_the_others(collecting, environments):
    env = {"id": FAULTY, "kwargs": {"fault": "step raises", "step": 8}}
    run = collecting(
        env=env,
        algorithm={"name": "sac", "n_step": 3, "gamma": 1.0},
        on_environment_error="reset",
        environments=environments,
        block_rows=200,
        block_seconds=1000,
    ).start()
    run.replay.wait_for(lambda replay: replay.row_count >= 400)
    rows = run.end()
    rows = rows[rows["episode"] < rows["episode"].max() - environments]  # those under way at the end are cut too
    assert np.array_equal(rows["reward"], 0.5 * rows["step_count"])
    was_cut = (rows["step_count"] < 3) & ~rows["terminated"]
    assert was_cut.any() == (environments == 2)


def test_a_collector_appends_to_the_shard_of_its_index(collecting):
    run, other = collecting(index=3), collecting()
    addresses = [other.config.replay.address, run.config.replay.address]
    run.config = run.config.model_copy(
        update={"replay": run.config.replay.model_copy(update={"shards": 2, "address": ",".join(addresses)})}
    )
    run.start()
    run.replay.wait_for(lambda replay: replay.row_count > 0)
    assert (run.end()["collector_index"] == 3).all()
    assert other.replay.received == 0


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_table_of_unrolls_gets_unrolls(collecting, autoreset):
    env = {"id": "counting_environment:Counting-v0", "autoreset": autoreset}
    run = collecting(
        env=env, learner=learner_of(env, unroll_length=6), table={"kind": "unrolls", "unroll_length": 6}, environments=4
    ).start()
    run.replay.wait_for(lambda replay: replay.row_count >= 200)
    rows = run.end()
    observation, step = rows["observation"][:, :, 0], rows["valid"]
    assert np.array_equal(np.diff(observation)[step], np.ones(step.sum()))
    ended = rows["terminated"] | rows["truncated"]
    assert np.array_equal(ended[:, :-1], ~step[:, 1:]), "behind an episode's end is the step to the next"
    assert (observation[:, 1:][~step] % 100 == 0).all(), "which ends with the next one's first observation"
    assert (rows["policy_version"] == 1).all()


def test_rows_of_another_kind_are_refused_at_the_start(collecting):
    run = collecting(table={"kind": "unrolls", "unroll_length": 6}).start()
    with pytest.raises(RowSpecError, match=r"in observation: .*\(3,\).*\(7, 3\)"):
        run.join()
