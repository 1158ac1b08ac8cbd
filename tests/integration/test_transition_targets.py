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


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_time_limit_bootstraps_and_an_end_does_not_from_the_environment_to_the_target(redis_server, serve, autoreset):
    env = {"id": "counting_environment:Counting-v0", "autoreset": autoreset}
    learner, address, close = _learner_of(env)
    config = make_config(
        redis_server.url,
        run_id=RUN_ID,
        env=env,
        learner={"updates": "learner_bound", "address": address},
        collector={"environments": 12, "block_rows": 10, "poll_seconds": 0.5},
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
    assert np.array_equal(rows["next_observation"], rows["observation"] + 1), "no row crosses an episode's end"
    target = soft_target(
        torch.from_numpy(rows["reward"].copy()),
        torch.from_numpy(rows["terminated"].copy()),
        torch.tensor([[10.0], [12.0]]).expand(2, len(rows)),
        torch.full((len(rows),), -1.5),
        torch.tensor(0.2),
        0.99,
    ).numpy()
    steps_taken = rows["next_observation"][:, 0] % 100
    # Environments of three kinds: those that end after 2 steps, by themselves or by both, and those cut after 3.
    terminated, truncated = rows["terminated"], rows["truncated"]
    assert terminated.any()
    assert truncated.any()
    assert (steps_taken[terminated] == 2).all()
    assert (steps_taken[truncated] == 3).all()
    assert not (terminated & truncated).any(), "termination wins"
    running = ~terminated & ~truncated
    assert target[running] == pytest.approx(11.197, abs=1e-4)
    assert target[truncated] == pytest.approx(11.197, abs=1e-4)
    assert target[terminated] == pytest.approx(1.0, abs=1e-4)


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
