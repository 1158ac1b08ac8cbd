from pathlib import Path

import pytest
import yaml

from paceline import config
from paceline.config import Config, load, redact_url
from paceline.errors import ConfigError, RowSpecError
from paceline.replay.settings import limiter_settings, memory_settings
from paceline.rows import Column, RowSpec

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
SECRET = "s3cr3t-Pa55"
URL = f"redis://user:{SECRET}@store:6379/0"


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def test_no_source_at_all_gives_the_defaults():
    assert load() == Config()


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(write):
    path = write("run: {seed: 1}\nlearner: {batch_size: 1}\ncollector: {count: 1}\n")
    variables = {"PACELINE_LEARNER__BATCH_SIZE": "2", "PACELINE_COLLECTOR__COUNT": "2", "HOME": "/root"}
    settings = load(path, ["collector.count=3"], variables)
    assert (settings.run.seed, settings.learner.batch_size, settings.collector.count) == (1, 2, 3)


@pytest.mark.parametrize(
    "variables",
    [
        {"REDIS_PORT": "tcp://10.0.0.1:6379", "REDIS_SERVICE_HOST": "10.0.0.1"},
        {
            "PACELINE_LEARNER_SERVICE_HOST": "10.0.0.1",
            "PACELINE_LEARNER_SERVICE_PORT": "50052",
            "PACELINE_LEARNER_SERVICE_PORT_GRPC": "50052",
            "PACELINE_LEARNER_PORT": "tcp://10.0.0.1:50052",
            "PACELINE_LEARNER_PORT_50052_TCP": "tcp://10.0.0.1:50052",
            "PACELINE_LEARNER_PORT_50052_TCP_ADDR": "10.0.0.1",
            "PACELINE_LEARNER_PORT_50052_TCP_PORT": "50052",
            "PACELINE_LEARNER_PORT_50052_TCP_PROTO": "tcp",
            "PACELINE_PORT": "tcp://10.0.0.1:80",
            "PACELINE_SERVICE_HOST": "10.0.0.1",
        },
    ],
    ids=["another service", "a service of ours"],
)
def test_what_kubernetes_says_of_services_is_no_setting(variables):
    assert load(environment=variables) == Config()


@pytest.mark.parametrize("name", ["PACELINE_LEARNER_PORT", "PACELINE_LEARNER__PORT", "PACELINE_SERVICE_HOSTS"])
def test_a_setting_that_looks_like_a_service_and_is_none_is_refused(name):
    with pytest.raises(ConfigError, match="unknown key"):
        load(environment={name: "50052"})


@pytest.mark.parametrize(
    "text",
    ["learner: {batch_size: 64}\nrun: {seed: 1}\nlearner: {}\n", "learner:\n  batch_size: 64\n  batch_size: 32\n"],
)
def test_a_key_that_comes_twice_is_refused_with_its_place(write, text):
    with pytest.raises(ConfigError, match=r"the key '(learner|batch_size)' comes twice") as caught:
        load(write(text))
    assert "line 3" in str(caught.value)


def test_what_is_wrong_says_which_variable_or_argument_it_is_from(write):
    path = write("learner: {bath_size: 64}\n")
    with pytest.raises(ConfigError) as caught:
        load(path, ["env=Foo", "run.seed=x"], {"PACELINE_LEARNER__BATCH_SIZE": "many"})
    lines = str(caught.value).splitlines()[1:]
    assert sorted(line.strip().partition(": ")[0] for line in lines) == [
        "env (command line)",
        "learner.batch_size (variable PACELINE_LEARNER__BATCH_SIZE)",
        "learner.bath_size",
        "run.seed (command line)",
    ]


def test_the_ratio_of_a_strict_run_is_set_in_one_place_only():
    strict = ["learner.updates=strict", "learner.batch_size=64", "learner.updates_per_step=0.5"]
    key = "replay.tables.transitions.limiter.samples_per_insert"
    with pytest.raises(
        ConfigError, match=r"samples_per_insert is 3 and learner\.updates is 'strict', which makes it 32"
    ):
        load(None, [*strict, f"{key}=3"])
    assert load(None, [*strict, f"{key}=32"]).samples_per_insert() == 32
    assert load(None, ["learner.updates=learner_bound", f"{key}=3"]).samples_per_insert() == 3


def test_an_override_of_one_key_leaves_its_neighbours(write):
    path = write("replay:\n  tables:\n    transitions: {capacity_rows: 5000}\n")
    settings = load(path, ["replay.tables.transitions.limiter.min_rows=50"])
    table = settings.replay.tables["transitions"]
    assert (table.capacity_rows, table.limiter.min_rows) == (5000, 50)


def test_a_section_that_the_file_leaves_empty_can_be_filled_from_outside(write):
    assert load(write("run:\nenv:\n  id: CartPole-v1\n"), ["run.seed=4"]).run.seed == 4


def test_values_on_the_command_line_are_yaml():
    settings = load(None, ["learner.algorithm.hidden=[64, 32]", "evaluator.enabled=false", "env.kwargs={g: 9.8}"])
    assert settings.learner.algorithm.hidden == (64, 32)
    assert settings.evaluator.enabled is False
    assert settings.env.kwargs == {"g": 9.8}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("learner.bath_size=3", ["learner.bath_size", "3", "unknown key", "learner.batch_size"]),
        ("lerner.batch_size=3", ["lerner", "unknown key", "learner"]),
        ("replay.tables.mine.limiter.min_row=3", ["replay.tables.mine.limiter.min_row", "3", "limiter.min_rows"]),
        ("learner.batch_size=many", ["learner.batch_size", "'many'", "a whole number"]),
        ("learner.batch_size=0", ["learner.batch_size", "0", "greater than 0"]),
        ("learner.algorithm.gamma=1.5", ["learner.algorithm.gamma", "1.5", "less than or equal to 1"]),
        ("learner.algorithm.gamma=.nan", ["learner.algorithm.gamma", "nan", "finite"]),
        ("env.autoreset=never", ["env.autoreset", "'never'", "'next_step' or 'same_step'"]),
        ("replay.listen=here", ["replay.listen", "'here'", "host:port"]),
        ("replay.listen=127.0.0.1:70000", ["replay.listen", "70000", "65535"]),
        ("run.id=../other", ["run.id", "'../other'", "letters"]),
        ("learner.table=unrolls", ["learner.table", "'unrolls'", "transitions"]),
        ("learner=3", ["learner", "3"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_was_expected(override, parts):
    with pytest.raises(ConfigError) as caught:
        load(None, [override])
    for part in parts:
        assert part in str(caught.value)


def test_every_wrong_setting_of_a_file_is_listed_at_once(write):
    with pytest.raises(ConfigError) as caught:
        load(write("run: {seed: -1}\nenv: {idd: x}\nlearner: {batch_size: no}\n"))
    message = str(caught.value)
    assert "3 wrong setting(s)" in message
    assert "run.yaml" in message
    assert "run.seed" in message
    assert "did you mean env.id?" in message
    assert "learner.batch_size" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [("run: [", "not valid YAML"), ("- a\n- b\n", "holds a list"), ("just words", "holds a str")],
)
def test_a_file_that_is_no_tree_of_settings_is_refused(write, text, said):
    with pytest.raises(ConfigError, match=said):
        load(write(text))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: no such file; presets lie in configs/"):
        load(tmp_path / "absent.yaml")


def test_an_empty_file_means_the_defaults(write):
    assert load(write("")) == Config()


@pytest.mark.parametrize("argument", ["run.seed", "=3", ""])
def test_an_argument_without_key_or_value_is_refused(argument):
    with pytest.raises(ConfigError, match="expected key=value, such as"):
        load(None, [argument])


def test_a_key_below_a_value_is_refused(write):
    with pytest.raises(ConfigError, match="'seed' is a value, not a section"):
        load(write("run: {seed: 1}"), ["run.seed.deep=1"])


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["collector.block_rows=200", "replay.tables.transitions.capacity_rows=150"], ["200", "150", "at most"]),
        (["replay.tables.transitions.capacity_rows=99"], ["min_rows is 100", "99", "sampling never begins"]),
        (["replay.tables.transitions.limiter.window_rows=10"], ["window_rows is 10", "at least 16640"]),
        (["run.environment_steps=50"], ["environment_steps is 50", "100", "ends before it learns"]),
        (
            ["replay.tables.transitions.max_times_sampled=4"],
            ["replay.tables.transitions.max_times_sampled is 4", "at least 257", "lower learner.updates_per_step"],
        ),
        (
            ["replay.tables={transitions: {}, other: {max_times_sampled: 3, limiter: {samples_per_insert: 3.5}}}"],
            ["replay.tables.other.max_times_sampled is 3", "at least 4", "replay.tables.other.limiter.samples_per_ins"],
        ),
        (
            ["replay.tables={transitions: {}, other: {limiter: {window_rows: 128, samples_per_insert: 2}}}"],
            ["replay.tables.other.limiter.window_rows is 128", "at least 384"],
        ),
    ],
)
def test_settings_that_could_only_stall_the_run_are_refused_with_the_smallest_that_works(overrides, parts):
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    for part in parts:
        assert part in str(caught.value)


def test_the_band_named_as_smallest_is_accepted():
    settings = load(None, ["replay.tables.transitions.limiter.window_rows=16640"])
    assert settings.limiter_window_rows() == 16640
    assert Config().limiter_window_rows() == 2 * 16640
    assert load(None, ["learner.updates=learner_bound"]).limiter_window_rows() is None


@pytest.mark.parametrize(
    ("overrides", "smallest"),
    [
        ([], 257),
        (["learner.updates_per_step=0.01"], 3),  # 2.56 samples of each row
        (["learner.updates=learner_bound", "replay.tables.transitions.limiter.samples_per_insert=8"], 9),
        # What is lost in a small table: 5 of the 256 draws, and 2 batches, of 37 rows.
        (["collector.block_rows=64", "replay.tables.transitions.capacity_rows=100", "learner.prefetch_batches=1"], 706),
        (["replay.shards=2", "collector.count=2"], 257),
    ],
)
def test_more_draws_of_a_row_than_the_ratio_asks_for_are_needed(overrides, smallest):
    key = "replay.tables.transitions.max_times_sampled"
    assert settings_of(*overrides, f"{key}={smallest}").replay.tables["transitions"].max_times_sampled == smallest
    with pytest.raises(ConfigError, match=f"max_times_sampled is {smallest - 1}: expected at least {smallest},"):
        settings_of(*overrides, f"{key}={smallest - 1}")


QUEUE = ["learner.updates=learner_bound", "replay.tables.transitions.queue=true"]


@pytest.mark.parametrize(
    ("settings", "key", "smallest"),
    [
        (QUEUE, "capacity_rows", 319),
        ([*QUEUE, "learner.batch_size=1000", "collector.block_rows=1"], "capacity_rows", 1000),
        ([*QUEUE, "replay.shards=2", "collector.count=2"], "capacity_rows", 319),
        (["learner.updates=learner_bound", "replay.tables.transitions.capacity_rows=100"], "max_times_sampled", 7),
    ],
)
def test_a_table_that_could_never_give_a_batch_is_refused(settings, key, smallest):
    key = f"replay.tables.transitions.{key}"
    settings_of(*settings, f"{key}={smallest}")
    with pytest.raises(ConfigError, match=f"{key} is {smallest - 1}: expected at least {smallest},"):
        settings_of(*settings, f"{key}={smallest - 1}")


def test_a_queue_that_drops_rows_may_be_smaller_than_a_batch():
    table = "replay.tables.transitions"
    assert settings_of(*QUEUE, f"{table}.overflow=drop_oldest", f"{table}.capacity_rows=100").follows


def test_bytes_that_hold_no_batch_of_a_queue_are_refused_when_the_size_of_rows_is_known():
    settings = settings_of(*QUEUE, "replay.tables.transitions.capacity_bytes=10000")
    with pytest.raises(RowSpecError, match=r"10000 bytes, 96 rows .* expected at least 319"):
        memory_settings(settings, "transitions", RowSpec((Column("value", "uint8", (100,)),)))


def test_where_no_ratio_holds_a_row_may_be_drawn_once():
    assert (
        settings_of("learner.updates=learner_bound", "replay.tables.transitions.max_times_sampled=1").follows is False
    )
    other = settings_of("replay.tables={transitions: {}, other: {max_times_sampled: 1, sampler: fifo}}").replay.tables[
        "other"
    ]
    assert other.max_times_sampled == 1


def test_the_band_of_a_table_that_is_not_the_learners_is_accepted_from_the_smallest_on():
    settings = settings_of(
        "replay.tables={transitions: {}, other: {limiter: {window_rows: 384, samples_per_insert: 2}}}"
    )
    assert limiter_settings(settings, "other").window_rows == 384


def test_rows_that_are_too_few_for_the_bytes_make_more_draws_of_each_necessary():
    spec = RowSpec((Column("value", "uint8", (100,)),))
    table = "replay.tables.transitions"
    few = settings_of(f"{table}.capacity_bytes=1000000", f"{table}.max_times_sampled=257")
    with pytest.raises(
        RowSpecError, match=r"9615 rows .* is 257: expected at least 258, .* raise replay\.tables\..*bytes"
    ):
        memory_settings(few, "transitions", spec)
    enough = settings_of(f"{table}.capacity_bytes=1000000", f"{table}.max_times_sampled=258")
    assert memory_settings(enough, "transitions", spec).capacity_rows == 9615


def test_a_password_is_in_no_dump_and_no_text():
    settings = load(None, [f"replay.redis_url={URL}"])
    assert settings.replay.redis_url is not None
    assert settings.replay.redis_url.get_secret_value() == URL
    for text in (config.dump(settings), repr(settings), str(settings), settings.model_dump_json()):
        assert SECRET not in text
    assert "redis://user:***@store:6379/0" in config.dump(settings)


@pytest.mark.parametrize(
    "override",
    [f"replay.redis_url=[{URL!r}]", f"replay.redis_url={{url: {URL!r}}}"],
)
def test_a_password_is_in_no_error(override):
    with pytest.raises(ConfigError) as caught:
        load(None, [override])
    assert "replay.redis_url" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("override", [f"replay.redis_ulr={URL}", f"replay.redis={URL}", f"replay={URL}"])
def test_a_password_under_a_misspelt_key_is_in_no_error(override):
    with pytest.raises(ConfigError) as caught:
        load(None, [override])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://store:6379/0", "redis://store:6379/0"),
        ("redis://:pw@store:6379", "redis://:***@store:6379"),
        ("rediss://me:p:w@store", "rediss://me:***@store"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("redis://me:p@w@store:1", "redis://me:***@store:1"),
        ("redis://me:p/w@store:1", "redis://me:***@store:1"),
        ("redis://store:1/0?password=pw&db=3", "redis://store:1/0?password=***&db=3"),
        ("rediss://store?ssl_password=pw&db=3", "rediss://store?ssl_password=***&db=3"),
    ],
)
def test_only_the_password_of_a_url_is_hidden(url, shown):
    assert redact_url(url) == shown


def test_a_dump_is_a_file_that_gives_the_same_settings(write):
    settings = load(None, ["run.id=first", "learner.algorithm.target_entropy=-2", "collector.environments=4"])
    dumped = config.dump(settings)
    assert load(write(dumped)) == settings
    assert yaml.safe_load(dumped)["replay"]["tables"]["transitions"]["limiter"]["deadline_seconds"] == 30.0


def test_settings_cannot_be_changed_after_they_were_checked():
    with pytest.raises(Exception, match="frozen"):
        Config().run.seed = 3


def test_a_run_without_an_id_has_no_folder_yet():
    with pytest.raises(ConfigError, match=r"run\.id=first-try"):
        Config().run_folder  # noqa: B018
    assert load(None, ["run.id=a", "run.directory=/data"]).run_folder == Path("/data/a")


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_loads(path):
    assert isinstance(load(path), Config)


def test_the_presets_that_the_documents_name_are_there():
    assert {"pendulum-sac", "halfcheetah-sac"} <= {path.stem for path in PRESETS}


def test_a_run_is_named_without_losing_the_password_of_its_store():
    settings = config.build({"replay": {"redis_url": "redis://:secret@host:6379/0"}})
    named = config.with_run_id(settings, "first")
    assert named.run_id == "first"
    assert named.replay.redis_url is not None
    assert named.replay.redis_url.get_secret_value() == "redis://:secret@host:6379/0"
    with pytest.raises(ConfigError, match=r"run\.id"):
        config.with_run_id(settings, "not an id")


def test_a_chunk_that_no_message_could_carry_is_refused():
    with pytest.raises(ConfigError, match=r"chunk_bytes is 1048576: expected at most half of rpc\.max_message_bytes"):
        config.build({"rpc": {"max_message_bytes": 1 << 20}})


def settings_of(*overrides: str) -> Config:
    return load(None, overrides)


def test_each_shard_has_its_address():
    cluster = settings_of("replay.shards=3", "replay.address=replay-{shard}.replay:50051", "collector.count=3")
    assert cluster.replay.shard_addresses() == [f"replay-{shard}.replay:50051" for shard in range(3)]
    listed = settings_of("replay.shards=2", "replay.address=127.0.0.1:1,127.0.0.1:2", "collector.count=2")
    assert listed.replay.shard_addresses() == ["127.0.0.1:1", "127.0.0.1:2"]


def test_one_address_for_two_shards_is_refused_where_it_is_used():
    with pytest.raises(ConfigError, match=r"names 1 address.*replay.shards is 2"):
        settings_of("replay.shards=2", "collector.count=2").replay.shard_addresses()
    with pytest.raises(ConfigError, match=r"names 2 address.*replay.shards is 3"):
        settings_of("replay.shards=3", "replay.address=127.0.0.1:1,127.0.0.1:2", "collector.count=3")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["replay.shards=2"], "collector.count is 1: expected at least replay.shards, 2"),
        (["replay.tables.transitions.sampler=fifo"], "max_times_sampled is not set: expected 1 or more"),
        (["replay.tables.transitions.sampler=lifo"], "max_times_sampled is not set: expected 1 or more"),
        (["replay.tables.transitions.remover=lowest_priority"], "expected sampler 'prioritised'"),
        (["replay.tables.transitions.queue=true", "learner.updates=strict"], "expected 'learner_bound'"),
        (["replay.tables.transitions.queue=true", "replay.tables.transitions.sampler=recent"], "never sampled"),
        (["replay.tables.transitions.kind=unrolls"], "expected 'transitions', what sac learns from"),
        (["replay.tables.transitions.sampler=prioritised", "replay.read=follow"], "expected 'sample' or 'auto'"),
        (["replay.tables.transitions.sampler=recent", "replay.read=follow"], "has sampler 'recent': expected"),
        (
            ["replay.tables.transitions.max_times_sampled=4", "replay.read=follow"],
            "bounds the draws of a row (max_times_sampled is 4): expected 'sample' or 'auto'",
        ),
        (
            ["replay.tables.transitions.queue=true", "learner.updates=learner_bound", "replay.read=sample"],
            "expected 'follow' or 'auto'",
        ),
    ],
)
def test_settings_of_replay_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(ConfigError) as refused:
        settings_of(*settings)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "follows"),
    [
        ([], True),
        (["replay.read=sample"], False),
        (["replay.tables.transitions.sampler=prioritised"], False),
        (["replay.tables.transitions.sampler=recent"], False),
        (["replay.tables.transitions.max_times_sampled=300"], False),
        (["replay.tables.transitions.queue=true", "learner.updates=learner_bound"], True),
    ],
)
def test_the_learner_follows_uniform_tables_and_queues(settings, follows):
    assert settings_of(*settings).follows is follows


def test_the_smaller_of_rows_and_bytes_bounds_a_table():
    table = settings_of("replay.tables.transitions={capacity_rows: 100, capacity_bytes: 1000}").replay.tables[
        "transitions"
    ]
    assert [table.rows_that_fit(size) for size in (8, 40, 1000, 1001)] == [100, 25, 1, 0]
