"""From an environment through collector, wire, Redis and a sample to the target: where learning bootstraps."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from integration import peers
from integration.peers import RUN_ID, Learner
from integration.replay_harness import Client, make_config
from integration.waiting import wait_until
from paceline.actors import squashed_gaussian_semantics
from paceline.collector import main as collector
from paceline.envs import describe_environment
from paceline.learner.algorithms.sac_math import soft_target
from paceline.process import StopSignal
from paceline.rows import transition_spec

# The critics say 10, and -0.2 log-densities of 1.5 are added: what follows a step of reward 1 is worth 10.3.
RUNNING = {1: 1 + 0.99 * 10.3, 2: 1.99 + 0.99**2 * 10.3}
TERMINATED = {1: 1.0, 2: 1.99}


@pytest.mark.parametrize("n_step", [1, 2])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_time_limit_bootstraps_and_an_end_does_not_from_the_environment_to_the_target(
    redis_server, serve, autoreset, n_step
):
    env = {"id": "counting_environment:Counting-v0", "autoreset": autoreset}
    learner, address, close = _learner_of(env)
    config = make_config(
        redis_server.url,
        run_id=RUN_ID,
        env=env,
        learner={"updates": "learner_bound", "address": address, "algorithm": {"name": "sac", "n_step": n_step}},
        collector={"environments": 12, "block_rows": 40, "poll_seconds": 0.5, "block_form": "compact"},
    )
    _, client = serve(config, run_id=RUN_ID)
    stop = StopSignal()
    thread = threading.Thread(target=collector.run, args=(config,), kwargs={"index": None, "stop": stop})
    thread.start()
    try:
        wait_until(lambda: learner.reports)
        rows = _sample(client, learner.spec, 4_000)
    finally:
        stop.set()
        thread.join(20)
        close()
    steps = rows["step_count"]
    assert np.array_equal(rows["next_observation"][:, 0], rows["observation"][:, 0] + steps), "no row crosses an end"
    target = soft_target(
        torch.from_numpy(rows["reward"].copy()),
        torch.from_numpy(rows["terminated"].copy()),
        torch.tensor([[10.0], [12.0]]).expand(2, len(rows)),
        torch.full((len(rows),), -1.5),
        torch.tensor(0.2),
        torch.from_numpy(0.99 ** steps.astype(np.float32)),
    ).numpy()
    steps_taken = rows["next_observation"][:, 0] % 100
    # Environments of three kinds: those that end after 2 steps, by themselves or by both, and those cut after 3.
    terminated, truncated = rows["terminated"], rows["truncated"]
    assert (steps_taken[terminated] == 2).all()
    assert (steps_taken[truncated] == 3).all()
    assert not (terminated & truncated).any(), "termination wins"
    running = ~terminated & ~truncated
    for count in range(1, n_step + 1):
        of_so_many = steps == count
        assert (of_so_many & terminated).any()
        assert (of_so_many & truncated).any()
        assert target[of_so_many & running] == pytest.approx(RUNNING[count], abs=1e-4)
        assert target[of_so_many & truncated] == pytest.approx(RUNNING[count], abs=1e-4)
        assert target[of_so_many & terminated] == pytest.approx(TERMINATED[count], abs=1e-4)


def _learner_of(env):
    config = make_config("redis://127.0.0.1:1/0", env=env).env
    description = describe_environment(config)
    semantics = squashed_gaussian_semantics(
        description.observation_dim,
        hidden=(8,),
        action_low=description.action_low,
        action_high=description.action_high,
    )
    learner = Learner(transition_spec(description.observation, description.action), semantics)
    learner.publish(1)
    server, port = peers.serve(learner)
    return learner, f"127.0.0.1:{port}", lambda: server.stop(0).wait()


def _sample(client: Client, spec, count):
    return np.frombuffer(b"".join(message.rows for message in client.sample(count)), spec.dtype)
