"""What the runs of a study say together, and how the study is planned."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline import config
from paceline.errors import ConfigError, ConflictError, ServiceFailedError
from paceline.local import study as local_study
from paceline.local.study import Plan, run_study, whole_numbers
from paceline.process import StopSignal
from paceline.report.record import RunRecord, read_run
from paceline.report.study import StudyRun, by_seconds, by_steps, common_range, make_study, mean_return, steps_to
from paceline.report.study_page import render, to_json, write_study

ROOT = Path(__file__).parents[2]


def write_run(folder: Path, evaluations: list[tuple[int, float]], *, steps_per_second: float = 10.0) -> Path:
    """A finished run with evaluations at these environment steps, and its acting lag."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"kind": "start", "time": 1000.0, "incarnation": 1, "environment_steps": 0, "learner_step": 0}]
    lines += [
        {
            "kind": "evaluation",
            "time": 1000.0 + steps / steps_per_second,
            "incarnation": 1,
            "version": steps,
            "environment_steps": steps,
            "mean_return": mean,
            "returns": [mean],
        }
        for steps, mean in evaluations
    ]
    last = 1000.0 + evaluations[-1][0] / steps_per_second if evaluations else 1000.0
    lines.append({"kind": "finish", "time": last, "environment_steps": evaluations[-1][0] if evaluations else 0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def record(tmp_path: Path, name: str, evaluations: list[tuple[int, float]], **options: float) -> RunRecord:
    return read_run(write_run(tmp_path / name, evaluations, **options))


@pytest.fixture
def runs(tmp_path: Path) -> list[StudyRun]:
    return [
        StudyRun(0, 0, record(tmp_path, "a", [(0, 0.0), (100, 10.0), (200, 10.0)])),
        StudyRun(0, 1, record(tmp_path, "b", [(0, 0.0), (100, 6.0), (200, 10.0)])),
        StudyRun(4, 0, record(tmp_path, "c", [(50, 0.0), (150, 0.0), (250, 8.0)], steps_per_second=5.0)),
    ]


def test_runs_are_compared_over_the_range_that_all_of_them_cover(runs):
    assert common_range(runs, by_steps) == (50, 200)
    assert common_range(runs, by_seconds) == (10, 20)
    assert common_range([], by_steps) is None


def test_the_area_under_a_curve_is_that_of_its_straight_lines(runs):
    # From (50, 5) to (100, 10) to (200, 10): 375 + 1000 over 150 steps.
    assert mean_return(runs[0], by_steps, (50, 200)) == pytest.approx(1375 / 150)
    assert mean_return(runs[2], by_steps, (50, 200)) == pytest.approx(0.5 * 50 * 4.0 / 150)


def test_the_threshold_is_reached_at_the_first_evaluation_above_it(runs):
    assert steps_to(runs[0], 9.0) == 100
    assert steps_to(runs[1], 9.0) == 200
    assert steps_to(runs[2], 9.0) is None


def test_a_study_has_a_row_for_each_lag_with_its_seeds_together(runs):
    study = make_study("trial", runs, wanted=4, threshold=None)
    assert study.threshold == pytest.approx(9.0)  # nine tenths of the way from 0 to 10
    first, second = study.rows
    assert (first.versions, first.seeds, first.steps_to_threshold, first.reached) == (0, (0, 1), 150, 2)
    assert (second.versions, second.seeds, second.steps_to_threshold, second.reached) == (4, (0,), None, 0)
    assert first.last_return == (10.0, 10.0, 10.0)
    assert first.area_by_steps is not None
    assert first.area_by_steps[0] == pytest.approx(sum(first.area_by_steps[1:]) / 2)
    assert second.acting_lag is None


def test_a_threshold_that_is_given_holds(runs):
    assert make_study("trial", runs, wanted=3, threshold=5.0).rows[1].steps_to_threshold == 250


def test_the_page_has_both_figures_and_the_table_and_needs_no_other_file(runs):
    page = render(make_study("trial", runs, wanted=4, threshold=None))
    assert page.count("data:image/svg+xml") == 2
    for words in ("3 of 4 runs", "steps to threshold", "not reached", "150", "not known", "lowest first evaluation"):
        assert words in page
    assert "<script" not in page


def test_a_study_without_a_complete_run_has_a_page_that_says_so(tmp_path):
    path = write_study(tmp_path, make_study("trial", [], wanted=2, threshold=None))
    assert "Nothing to draw yet" in path.read_text()
    assert json.loads((tmp_path / "study.json").read_text())["by_versions"] == []
    assert {each.name for each in tmp_path.iterdir()} == {"study.html", "study.json"}


def test_runs_without_evaluations_are_no_failure(tmp_path):
    study = make_study("trial", [StudyRun(0, 0, record(tmp_path, "a", []))], wanted=1, threshold=None)
    assert study.rows[0].area_by_steps is None
    assert study.threshold is None
    assert "There is no threshold" in render(study)
    json.dumps(to_json(study), allow_nan=False)


@pytest.mark.parametrize("text", ["", "1,", "a", "-1", "1.5", "0, x"])
def test_lags_and_seeds_that_are_no_numbers_are_refused(text):
    with pytest.raises(ConfigError, match=r"--versions is .*: expected whole numbers"):
        whole_numbers(text, "--versions")


def test_each_number_counts_once():
    assert whole_numbers("0, 2,2,1", "--seeds") == (0, 2, 1)


def make_plan(
    folder: Path, *overrides: str, versions: tuple[int, ...] = (0, 2), seeds: tuple[int, ...] = (0, 1)
) -> Plan:
    return Plan(ROOT / "configs/pendulum-sac.yaml", overrides, versions, seeds, folder, None)


def write_complete(plan: Plan) -> None:
    for versions, seed in plan.parts():
        settings = config.load(plan.path, plan.arguments(versions, seed), {})
        write_run(settings.run_folder, [(0, -10.0), (100, 0.0)])
        (settings.run_folder / "config.yaml").write_text(config.dump(settings))


def test_each_run_differs_in_lag_and_seed_only(tmp_path):
    plan = make_plan(tmp_path / "sweep", "run.seed=7", "learner.batch_size=32")
    assert list(plan.parts()) == [(0, 0), (2, 0), (0, 1), (2, 1)]
    trees = [config.load(plan.path, plan.arguments(*part), {}).model_dump(mode="json") for part in plan.parts()]
    assert [(tree["lag"]["inject"]["versions"], tree["run"]["seed"]) for tree in trees] == list(plan.parts())
    for tree in trees:
        assert tree["lag"]["inject"].pop("mode") == "fixed"
        del tree["lag"]["inject"]["versions"], tree["run"]["seed"], tree["run"]["id"]
    assert all(tree == trees[0] for tree in trees)
    assert trees[0]["learner"]["batch_size"] == 32


def test_a_study_whose_runs_are_complete_runs_nothing_and_draws_again(tmp_path, monkeypatch, capsys):
    plan = make_plan(tmp_path / "sweep")
    write_complete(plan)
    monkeypatch.setattr(local_study, "_run", lambda *_: pytest.fail("a complete run was run again"))
    run_study(plan, plain=True, stop=StopSignal(), environment={})
    assert "4 runs, 4 complete" in capsys.readouterr().out
    assert json.loads((plan.folder / "study.json").read_text())["complete_runs"] == 4


def test_runs_that_were_begun_with_other_settings_are_not_mixed_in(tmp_path):
    write_complete(make_plan(tmp_path / "sweep"))
    with pytest.raises(ConflictError, match=r"learner\.batch_size is 256 there, 32 now.*--folder"):
        run_study(make_plan(tmp_path / "sweep", "learner.batch_size=32"), plain=True, stop=StopSignal(), environment={})


def test_a_lag_over_the_bound_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"lag\.max_lag_versions is 1"):
        run_study(make_plan(tmp_path / "s", "lag.max_lag_versions=1"), plain=True, stop=StopSignal(), environment={})
    assert not (tmp_path / "s").exists()


def test_after_a_stop_nothing_more_is_started(tmp_path, monkeypatch, capsys):
    stop = StopSignal()
    stop.set()
    monkeypatch.setattr(local_study, "_run", lambda *_: pytest.fail("a run was started after the stop"))
    run_study(make_plan(tmp_path / "sweep"), plain=True, stop=stop, environment={})
    assert "the same command goes on" in capsys.readouterr().out


def test_a_run_that_fails_ends_the_study_with_its_last_lines(tmp_path):
    plan = make_plan(tmp_path / "sweep", "env.id=Absent-v0")
    with pytest.raises(ServiceFailedError, match=r"(?s)sweep-lag-0-seed-0 ended with exit code 2.*Absent"):
        run_study(plan, plain=True, stop=StopSignal(), environment=dict(os.environ))
    assert json.loads((plan.folder / "study.json").read_text())["complete_runs"] == 0
