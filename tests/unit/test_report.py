import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline import config
from paceline.errors import NotFoundError
from paceline.report import write_report
from paceline.report.figures import activity_colours, lag_label, return_by_steps
from paceline.report.page import duration_text
from paceline.report.record import read_run
from paceline.telemetry import LAG_BUCKETS

START = 1_700_000_000.0


def line(kind: str, second: float, **fields: object) -> str:
    return json.dumps({"time": START + second, "kind": kind, **fields})


def training(second: float, step: int, lag: dict[str, int]) -> str:
    return line(
        "training",
        second,
        learner_step=step - 10,
        environment_steps=step,
        achieved_ratio=0.9,
        training_lag_counts=lag,
    )


def evaluation(second: float, incarnation: int, version: int, step: int, mean: float) -> str:
    return line(
        "evaluation",
        second,
        incarnation=incarnation,
        version=version,
        learner_step=step - 10,
        environment_steps=step,
        mean_return=mean,
        returns=[mean - 5, mean + 5],
        mean_length=200.0,
    )


def episode(second: float, step: int, episode_return: float) -> str:
    return line("episode", second, collector_index=0, episode_return=episode_return, length=200, environment_steps=step)


RESUMED_RUN = [
    line("start", 0, incarnation=1, resumed=False, environment_steps=0, learner_step=0),
    training(10, 100, {"0": 5, "1": 10}),
    episode(12, 110, -900.0),
    evaluation(15, 1, 5, 120, -700.0),
    training(20, 200, {"0": 8, "1": 20}),
    # Stopped for 1,000 seconds.
    line("start", 1020, incarnation=2, resumed=True, environment_steps=180, learner_step=170),
    training(1030, 300, {"0": 2, "1000": 4}),
    evaluation(1035, 2, 30, 310, -150.0),
    evaluation(1040, 2, 35, 320, -160.0),
    line("finish", 1045, environment_steps=400, learner_step=390),
]
PROCESSES = {"learner": {"update": 30.0, "wait_batch": 10.0}, "collector 0": {"environment": 20.0, "act": 20.0}}


def total(name: str, value: float, **labels: str) -> dict[str, object]:
    return {"name": name, "labels": labels, "value": value}


LAG = [
    *(
        total("paceline_collector_acting_lag_versions_bucket", count, le=bound)
        for bound, count in {"0.0": 30, "1.0": 38, "2.0": 40, "+Inf": 40}.items()
    ),
    total("paceline_collector_acting_lag_versions_sum", 12),
    total("paceline_collector_acting_lag_versions_count", 40),
    total("paceline_learner_trained_rows_total", 10),
    total("paceline_learner_training_lag_versions_sum", 40),
    total("paceline_learner_training_lag_versions_count", 10),
    total("paceline_learner_training_lag_part_versions_total", 10, part="transfer"),
    total("paceline_learner_training_lag_part_versions_total", 30, part="residence"),
    total("paceline_learner_row_part_seconds_total", 5, part="residence"),
]


def write_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(config.dump(config.load(None, ["run.id=first-try"])))
    (folder / "metrics.jsonl").write_text("\n".join(RESUMED_RUN) + "\n")
    (folder / "process_time.json").write_text(json.dumps(PROCESSES))
    (folder / "lag.json").write_text(json.dumps({"totals": LAG}))
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first-try")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> "Page":
    return page_of(write_run(tmp_path_factory.mktemp("runs") / "first-try"))


class Page(HTMLParser):
    """Checks that tags are balanced, and gathers text, images and references."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.open: list[str] = []
        self.text, self.images, self.references = "", [], []
        self.tags: set[str] = set()
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        values = dict(attributes)
        self.references += [values[key] for key in ("src", "href") if key in values]
        if tag == "img":
            assert values["alt"]
            self.images.append(b64decode(values["src"].removeprefix("data:image/svg+xml;base64,")).decode())
        if tag not in {"meta", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data + "\n"


def page_of(folder: Path) -> Page:
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def labels_of(svg: str) -> list[str]:
    texts = [node for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("text")]
    return ["".join(node.itertext()).strip() for node in texts]


def test_a_finished_run_gets_a_page_with_everything_in_it(page):
    for part in ("first-try", "Pendulum-v1", "sac", "45 s", "400", "390", "0.900", "-150.0", "-160.0", "version 30"):
        assert part in page.text
    assert "What is missing" not in page.text
    assert len(page.images) == 6
    assert "run:\n  id: first-try" in page.text


def test_the_page_needs_no_other_file_and_no_script(page):
    assert all(reference.startswith("data:") for reference in page.references)
    assert not page.tags & {"script", "link", "iframe", "object"}
    assert "url(" not in page.html


def test_every_figure_says_what_its_axes_are_and_in_which_unit(page):
    steps, seconds, lag, acting, parts, processes = (labels_of(svg) for svg in page.images)
    assert {"environment steps", "episode return (sum of rewards)"} <= set(steps)
    assert {"running time (s)", "episode return (sum of rewards)"} <= set(seconds)
    assert {"training lag (policy versions)", "rows trained on (%)"} <= set(lag)
    assert {"acting lag (policy versions)", "environment steps (%)", "0", "1", "2"} <= set(acting)
    assert {"share of the mean training lag (%)", "4 versions", "0.5 seconds", "25", "75"} <= set(parts)
    assert {"share of the process's time (%)", "learner", "collector 0", "wait batch"} <= set(processes)
    assert "incarnation 2 resumed" in steps


def test_the_time_between_two_starts_is_not_running_time(run_folder):
    record = read_run(run_folder)
    assert record.seconds == 45
    assert [incarnation.seconds for incarnation in record.incarnations] == [0, 20]
    assert [evaluation.seconds for evaluation in record.evaluations] == [15, 35, 40]


def test_lag_counts_grow_within_an_incarnation_and_are_summed_over_incarnations(run_folder):
    assert read_run(run_folder).lag_rows == {0.0: 10, 1.0: 20, 1000.0: 4}


def test_the_parts_of_the_lag_are_of_a_row_and_sum_to_its_mean(run_folder):
    lag = read_run(run_folder).lag
    assert lag.part_versions == {"transfer": 1.0, "residence": 3.0}
    assert sum(lag.part_versions.values()) == lag.training_mean
    assert lag.acting_steps == {0.0: 30, 1.0: 8, 2.0: 2, float("inf"): 0}
    assert lag.acting_mean == pytest.approx(0.3)


def test_a_lag_of_which_nothing_is_known_is_neither_drawn_nor_nought(run_folder):
    (run_folder / "lag.json").write_text(json.dumps({"totals": [total("paceline_learner_trained_rows_total", 10)]}))
    lag = read_run(run_folder).lag
    assert (lag.acting_mean, lag.training_mean, lag.part_versions) == (None, None, {})
    assert len(page_of(run_folder).images) == 4


def test_best_is_by_return_and_last_by_policy(run_folder):
    record = read_run(run_folder)
    assert record.best is not None
    assert record.last is not None
    assert (record.best.version, record.last.version) == (30, 35)


def test_a_run_that_was_killed_while_it_wrote_gets_a_page_that_says_so(run_folder):
    whole = "\n".join(RESUMED_RUN[:3]) + "\n"
    (run_folder / "metrics.jsonl").write_text(whole + RESUMED_RUN[3][:-20])
    (run_folder / "process_time.json").unlink()
    (run_folder / "lag.json").unlink()
    page = page_of(run_folder)
    for said in (
        "1 line(s) of metrics.jsonl",
        "process_time.json is not there",
        "lag.json is not there",
        "No evaluation",
        "not finished",
    ):
        assert said in page.text
    assert "best evaluation\nnot known" in re.sub(r"\n+", "\n", page.text)
    assert len(page.images) == 3


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "lag.json", "process_time.json"])
@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"\xff\xfe{", b'{"learner": 3}', b"null\n"])
def test_a_damaged_file_is_read_as_far_as_it_goes(run_folder, name, content):
    (run_folder / name).write_bytes(content)
    record = read_run(run_folder)
    assert record.run_id == "first-try"
    if name != "config.yaml":
        assert name.partition(".")[0] in " ".join(record.missing) or "recorded" in " ".join(record.missing)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "lag.json", "process_time.json"])
def test_whatever_file_is_absent_there_is_a_page_that_says_so(run_folder, name):
    (run_folder / name).unlink()
    assert f"{name} is not there" in page_of(run_folder).text


def test_an_empty_folder_gets_a_page_that_lists_what_is_missing(tmp_path):
    page = page_of(tmp_path)
    for name in ("config.yaml", "metrics.jsonl", "lag.json", "process_time.json"):
        assert f"{name} is not there" in page.text
    assert page.images == []


def test_values_of_the_wrong_kind_are_left_out(run_folder):
    odd = [
        line("episode", 3, episode_return=None, environment_steps=1),
        line("episode", 3, episode_return=float("nan"), environment_steps=1),
        line("evaluation", 4, mean_return="good", environment_steps=5),
        line("evaluation", 4, mean_return=-3.0, returns=[None, "x", -3.0]),
        line("training", 5, training_lag_counts={"+Inf": 2, "x": 3, "1": "y"}, achieved_ratio=None),
        line("unheard-of", 6),
        json.dumps({"kind": "episode"}),
    ]
    (run_folder / "metrics.jsonl").write_text("\n".join(odd))
    record = read_run(run_folder)
    assert record.episodes == ()
    assert [evaluation.returns for evaluation in record.evaluations] == [(-3.0,)]
    assert record.lag_rows == {float("inf"): 2}
    page_of(run_folder)


def test_names_from_the_run_are_text_and_never_markup(run_folder):
    (run_folder / "config.yaml").write_text("run: {id: '<b>x</b>'}\nenv: {id: '<script>1</script>'}\n")
    (run_folder / "process_time.json").write_text('{"<i>p</i> $x$": {"<u>a</u>": 1, "_b": 2}}')
    page = page_of(run_folder)
    assert "<b>x</b>" in page.text
    assert not page.tags & {"b", "script", "i", "u"}
    assert "<i>p</i> $x$" in labels_of(page.images[-1])


def test_a_figure_of_many_episodes_stays_small(run_folder):
    many = [episode(second / 10, second, -float(second % 1500)) for second in range(20_000)]
    (run_folder / "metrics.jsonl").write_text("\n".join([*RESUMED_RUN[:2], *many]))
    assert len(return_by_steps(read_run(run_folder))) < 1 << 18


def test_the_same_run_gives_the_same_figure(run_folder):
    record = read_run(run_folder)
    assert return_by_steps(record) == return_by_steps(record)


def test_a_report_replaces_the_one_before_and_leaves_nothing_else(tmp_path):
    first = write_report(tmp_path)
    first.write_text("old")
    assert write_report(tmp_path).read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("ending", "problem", "state"),
    [
        ("stopped", "", "stopped before its end"),
        ("failed", "port <7> is taken", "failed"),
        (None, "", "not finished"),
    ],
)
def test_a_run_that_did_not_finish_says_how_it_ended(run_folder, ending, problem, state):
    (run_folder / "metrics.jsonl").write_text("\n".join(RESUMED_RUN[:-1]) + "\n")
    (run_folder / "lag.json").write_text(json.dumps({"totals": LAG, "ending": ending, "problem": problem}))
    page = page_of(run_folder)
    assert f"Paceline run \n{state}\n" in page.text
    assert ("It failed: port <7> is taken" in page.text) == (ending == "failed")
    assert ("has not finished, or was killed" in page.text) == (ending is None)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(NotFoundError, match="absent: no such folder"):
        write_report(tmp_path / "absent")


def test_lag_buckets_are_named_by_the_lags_they_hold():
    labels = [lag_label(float(bound)) for bound in LAG_BUCKETS]
    assert labels[:9] == ["0", "1", "2", "3", "4", "5", "6", "7–8", "9–10"]
    assert labels[-1] == "601–1000"
    assert lag_label(float("inf")) == "> 1000"


def test_waiting_is_grey_and_no_two_activities_share_a_colour():
    activities = [f"activity_{i}" for i in range(12)] + ["waiting", "append_wait", "limiter"]
    colours = activity_colours({"p": dict.fromkeys(activities, 1.0)})
    assert len(set(colours.values())) == len(activities)
    for activity, colour in colours.items():
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        assert (max(red, green, blue) - min(red, green, blue) < 30) == (not activity.startswith("activity"))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 00 s"), (188, "3 min 08 s"), (7500, "2 h 05 min")]
)
def test_durations_are_for_people(seconds, text):
    assert duration_text(seconds) == text
