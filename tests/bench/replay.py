"""Replay's throughput, each figure beside what it is measured against, in interleaved rounds of one run.

python tests/bench/replay.py [--quick] [--only SUITE] [--rounds N] [--seconds S]
"""

import os

# Before numpy and torch read it, here and in every process that is started.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

if __name__ == "__main__":  # the processes of the benchmark import this file, and need none of what the command needs
    from replay_bench.command import main

    main()
