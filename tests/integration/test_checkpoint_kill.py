import random
import subprocess
import sys
from pathlib import Path

from paceline.actors import squashed_gaussian_semantics
from paceline.learner.checkpoint import Checkpoints

KILLS = 20

# Forks a saver for each line that it reads, kills it with SIGKILL after so many seconds, and says so.
SAVE_AND_KILL = """
import os
import signal
import sys
import time
from pathlib import Path

import torch

from paceline.actors import squashed_gaussian_semantics
from paceline.learner.checkpoint import Checkpoints, Counters

semantics = squashed_gaussian_semantics(3, hidden=(8,), action_low=[-1.0], action_high=[1.0])
checkpoints = Checkpoints(
    Path(sys.argv[1]),
    run_id="run",
    algorithm="sac",
    row_spec_digest=b"0" * 16,
    actor_semantics=semantics,
    environment={},
    keep=2,
)

def save_forever(step, first_is_there):
    while True:
        step += 1
        # A few MiB: long enough to write that a kill can come in the middle.
        tensors = {"weight": torch.full((1 << 19,), float(step)), "step": torch.tensor(step)}
        checkpoints.save(tensors, Counters(step, step, step, 1, 0, 0, 0))
        os.write(first_is_there, b"!")

for line in sys.stdin:
    newest = checkpoints.load(fallback=False)
    step = newest.counters.learner_step if newest else 0
    read, write = os.pipe()
    saver = os.fork()
    if saver == 0:
        save_forever(step, write)
    os.read(read, 1)
    time.sleep(float(line))  # the random moment itself, not a wait for anything
    os.kill(saver, signal.SIGKILL)
    os.waitpid(saver, 0)
    os.close(read)
    os.close(write)
    print("killed", flush=True)
"""


def test_after_a_kill_at_any_moment_the_newest_listed_checkpoint_loads(tmp_path: Path) -> None:
    generator = random.Random(0)
    semantics = squashed_gaussian_semantics(3, hidden=(8,), action_low=[-1.0], action_high=[1.0])
    checkpoints = Checkpoints(
        tmp_path,
        run_id="run",
        algorithm="sac",
        row_spec_digest=b"0" * 16,
        actor_semantics=semantics,
        environment={},
        keep=2,
    )
    command = [sys.executable, "-c", SAVE_AND_KILL, str(tmp_path)]
    last_step = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(KILLS):
            process.stdin.write(f"{generator.uniform(0, 0.06)}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "killed\n"
            loaded = checkpoints.load(fallback=False)
            assert loaded is not None
            step = loaded.counters.learner_step
            assert step > last_step
            assert loaded.tensors["step"].item() == step
            assert bool((loaded.tensors["weight"] == step).all())
            last_step = step
