"""The limiter in the running service: its window is checked at the start, and the current configuration holds."""

from __future__ import annotations

import threading

import pytest
import structlog

from integration.replay_harness import RUN, TABLE, block, make_config, request, wait_until
from paceline.errors import ConfigError, LimiterTimeoutError
from paceline.replay.tables import Tables


def test_a_window_that_would_hold_both_sides_back_is_refused_with_the_smallest_valid_one():
    with pytest.raises(ConfigError, match=r"window_rows is 128: expected at least 260"):
        make_config(
            "redis://127.0.0.1:1/0",
            limiter={"min_rows": 100, "window_rows": 128},
            learner={"updates": "strict", "batch_size": 256, "updates_per_step": 4 / 256},
            collector={"block_rows": 1},
        )


def test_replay_checks_the_window_itself(monkeypatch):
    config = make_config("redis://127.0.0.1:1/0", learner={"updates": "strict", "batch_size": 256})
    monkeypatch.setattr(type(config), "limiter_window_rows", lambda self: 128)
    with pytest.raises(ConfigError, match=r"expected at least 2816, one batch of 256 rows and one block of 10 rows"):
        Tables(config, None, None)


def test_limiter_settings_of_an_earlier_process_do_not_win_over_the_current_ones(redis_server, serve):
    strict = {"updates": "strict", "batch_size": 1}
    tight = make_config(
        redis_server.url,
        limiter={"min_rows": 1, "window_rows": 20, "deadline_seconds": 0.05},
        learner=strict,
        collector={"block_rows": 1},
    )
    replay, client = serve(tight)
    client.open()
    for sequence in range(1, 12):
        client.append(request(sequence, block(sequence, 1)))
    with pytest.raises(LimiterTimeoutError, match="11 rows are inserted and 0 sampled"):
        client.append(request(12, block(12, 1)))
    replay.stop()

    wide = make_config(
        redis_server.url, limiter={"min_rows": 1, "window_rows": 2000}, learner=strict, collector={"block_rows": 1}
    )
    with structlog.testing.capture_logs() as events:
        replay, client = serve(wide, resume=True)
    client.append(*(request(sequence, block(sequence, 1)) for sequence in range(12, 512)))
    described = client.describe()
    assert described.inserted_row_count == 511
    assert described.limiter.window_row_count == 2000
    (event,) = [event for event in events if event["event"] == "table_settings_differ"]
    assert event["stored"] == {"deadline_seconds": 0.05, "window_rows": 20}
    assert event["used"] == {"deadline_seconds": 30.0, "window_rows": 2000}
    assert replay.metrics()[f'paceline_replay_table_settings_differ{{table="{TABLE}"}}'] == 1


def test_other_settings_of_the_table_hold_after_a_restart_and_are_reported(redis_server, serve):
    replay, client = serve(make_config(redis_server.url, capacity=100))
    client.open()
    client.append_rows(10)
    assert replay.metrics()[f'paceline_replay_table_settings_differ{{table="{TABLE}"}}'] == 0
    replay.stop()
    table = {"sampler": "prioritised", "remover": "lowest_priority", "max_times_sampled": 3}
    with structlog.testing.capture_logs() as events:
        replay, client = serve(
            make_config(redis_server.url, capacity=40, table=table, learner={"batch_size": 40}), resume=True
        )
    (event,) = [event for event in events if event["event"] == "table_settings_differ"]
    changed = {"capacity_rows": 40, **table}
    assert event["used"] == changed
    assert event["stored"] == {
        "capacity_rows": 100,
        "sampler": "uniform",
        "remover": "fifo",
        "max_times_sampled": None,
    }
    assert replay.metrics()[f'paceline_replay_table_settings_differ{{table="{TABLE}"}}'] == 1
    described = client.describe()
    assert (described.capacity_row_count, described.sampler, described.max_times_sampled) == (40, "prioritised", 3)
    assert 0 < described.row_count <= 40
    assert sum(message.row_count for message in client.sample(40)) == 40


def test_the_ratio_is_held_between_a_fast_writer_and_a_fast_sampler(redis_server, serve):
    config = make_config(
        redis_server.url,
        limiter={"min_rows": 100, "window_rows": 200},
        learner={"updates": "strict", "batch_size": 32, "updates_per_step": 4 / 32},
        collector={"block_rows": 10},
        run={"id": RUN, "environment_steps": 2000},
    )
    replay, client = serve(config)
    client.open()
    samples = 0

    def sample() -> None:
        nonlocal samples
        messages = client.stub.Sample(iter([client.sample_request(32, 10_000)]), timeout=60)
        for message in messages:
            samples += message.row_count
            deviation = (message.inserted_row_count - 100) * 4 - samples
            assert message.inserted_row_count == 2000 or deviation >= -100
            if samples >= 4 * 1900:
                return

    failures: list[BaseException] = []

    def watched() -> None:
        try:
            sample()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=watched)
    thread.start()
    client.append_rows(200)
    thread.join(60)
    assert not thread.is_alive()
    assert not failures
    assert samples >= 7600
    assert not any(value for name, value in replay.metrics().items() if "limiter_timeouts_total" in name)


def test_the_learner_may_finish_its_updates_when_no_row_will_come_any_more(redis_server, serve):
    config = make_config(
        redis_server.url,
        limiter={"min_rows": 10, "window_rows": 100},
        learner={"updates": "strict", "batch_size": 32, "updates_per_step": 1 / 32},
        run={"id": RUN, "environment_steps": 50},
    )
    _, client = serve(config)
    client.open()
    assert client.append(*(request(n, block(10 * n, 10)) for n in range(1, 6)))[-1].complete
    assert sum(message.row_count for message in client.sample(32, 20)) == 640


def test_waits_are_visible_on_the_metrics_page_by_side(redis_server, serve):
    config = make_config(
        redis_server.url,
        limiter={"min_rows": 1, "window_rows": 20},
        learner={"updates": "strict", "batch_size": 1},
        collector={"block_rows": 1},
    )
    replay, client = serve(config)
    client.open()
    stream = client.stub.Append(iter([request(n, block(n, 1)) for n in range(1, 13)]), timeout=30)
    acknowledged = [next(stream) for _ in range(11)]
    assert len(acknowledged) == 11
    wait_until(lambda: replay.metrics()['paceline_replay_activity_seconds_total{activity="limiter"}'] >= 0, "metrics")
    client.sample(1)
    assert next(stream).sequence == 12
    assert replay.metrics()[f'paceline_replay_limiter_wait_seconds_total{{side="insert",table="{TABLE}"}}'] > 0
