"""Replay processes for tests, forked from one that has imported the service: to import it costs a second each time."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess
from typing import Any

from paceline import process
from paceline.config import build
from paceline.process import StopSignal, tune_allocator
from paceline.replay.main import run
from paceline.telemetry import configure_logging

_FORKS = multiprocessing.get_context("forkserver")
# pytest is the main module of whoever asks, and a child imports that too. Nothing here starts a thread.
_FORKS.set_forkserver_preload(["paceline.replay.main", "pytest"])


def start_replay(tree: dict[str, Any], *, resume: bool = False, shard: int = 0, ahead: float = 0.0) -> BaseProcess:
    """A new process that serves replay with the configuration `tree`, its clock `ahead` seconds before this one's."""
    replay = _FORKS.Process(target=_serve, args=(tree, resume, shard, ahead), daemon=True)
    replay.start()
    return replay


def _serve(tree: dict[str, Any], resume: bool, shard: int, ahead: float) -> None:
    tune_allocator()
    stop = StopSignal.install()
    if ahead:
        process._EPOCH_NS += int(ahead * 1e9)  # of what replay stamps with
    configure_logging("replay")
    run(build(tree), resume=resume, stop=stop, shard=shard)
