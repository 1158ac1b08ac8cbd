import os
import random
import subprocess
import sys
import time
from pathlib import Path

from paceline.actors import squashed_gaussian_semantics
from paceline.learner.checkpoint import Checkpoints

SAVE_FOREVER = """
import os
import sys
from pathlib import Path

import torch

from paceline.actors import squashed_gaussian_semantics
from paceline.learner.checkpoint import Checkpoints, Counters

semantics = squashed_gaussian_semantics(3, hidden=(8,), action_low=[-1.0], action_high=[1.0])
checkpoints = Checkpoints(
    Path(sys.argv[1]), run_id="run", algorithm="sac", row_spec_digest=b"0" * 16, actor_semantics=semantics, keep=2
)
newest = checkpoints.load(fallback=False)
step = newest.counters.learner_step if newest else 0
print("saving", flush=True)
while os.getppid() == int(sys.argv[2]):
    step += 1
    # A few MiB: long enough to write that a kill can come in the middle.
    tensors = {"weight": torch.full((1 << 19,), float(step)), "step": torch.tensor(step)}
    checkpoints.save(tensors, Counters(step, step, step, step, 1))
"""

KILLS = 20


def test_after_a_kill_at_any_moment_the_newest_listed_checkpoint_loads(tmp_path: Path) -> None:
    generator = random.Random(0)
    semantics = squashed_gaussian_semantics(3, hidden=(8,), action_low=[-1.0], action_high=[1.0])
    checkpoints = Checkpoints(
        tmp_path, run_id="run", algorithm="sac", row_spec_digest=b"0" * 16, actor_semantics=semantics, keep=2
    )
    last_step = 0
    for _ in range(KILLS):
        command = [sys.executable, "-c", SAVE_FOREVER, str(tmp_path), str(os.getpid())]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "saving\n"
            if last_step == 0:
                wait_for_a_checkpoint(checkpoints)
            time.sleep(generator.uniform(0, 0.06))  # the random moment itself, not a wait for anything
            process.kill()
        loaded = checkpoints.load(fallback=False)
        assert loaded is not None
        step = loaded.counters.learner_step
        assert step >= last_step
        assert loaded.tensors["step"].item() == step
        assert bool((loaded.tensors["weight"] == step).all())
        last_step = step
    assert last_step > KILLS  # it was saving all the while


def wait_for_a_checkpoint(checkpoints: Checkpoints) -> None:
    deadline = time.monotonic() + 30
    while not checkpoints.manifests():
        assert time.monotonic() < deadline, "no checkpoint was written in 30 s"
        time.sleep(0.001)
