"""What the launcher works out for itself: whether a failed start left rows, and the sentence on why a run failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import config
from paceline.errors import ConfigError, ServiceFailedError
from paceline.local.embedded import EmbeddedRedis
from paceline.local.launcher import _has_rows, _sentence
from paceline.replay.store import RedisStore


def test_a_record_without_a_table_is_that_of_a_start_that_failed(tmp_path: Path):
    settings = config.build({"run": {"id": "trial"}})
    server = EmbeddedRedis.start(tmp_path / "redis")
    store = RedisStore(server.url, "trial", deadline_seconds=5.0)
    try:
        assert not _has_rows(settings, server.url)
        store.claim(resume=False)
        assert not _has_rows(settings, server.url)
        store.command("HSET", store.key("meta"), "table:transitions", b"of another run")
        assert _has_rows(settings, server.url)
    finally:
        store.close()
        server.stop()
    # A Redis that says nothing may have anything: replay is not told to go on with it.
    assert _has_rows(settings, server.url)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ConfigError("a is 1: expected 2"), "a is 1: expected 2"),
        (
            ServiceFailedError(
                "learner ended with exit code 2; the last lines of runs/x/logs/learner.log:\n"
                '    {"event": "started"}\n    paceline: the port is taken\n    a last word'
            ),
            "learner ended with exit code 2: the port is taken",
        ),
        (
            ServiceFailedError(
                "replay ended with exit code 1; the last lines of l:\n    Traceback (most recent call last):\n"
                "    ValueError: no"
            ),
            "replay ended with exit code 1: ValueError: no",
        ),
        (RuntimeError("one\ntwo"), "RuntimeError: one"),
    ],
)
def test_why_a_run_failed_is_told_in_a_sentence(error: Exception, sentence: str):
    assert _sentence(error) == sentence
