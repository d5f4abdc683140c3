import math
import subprocess
import sys
import time

import optuna
import pytest
import torch

from {{cookiecutter.project_slug}}.harness import study
from {{cookiecutter.project_slug}}.harness.instruments import NonFiniteLoss

SPACE = {
    "optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "width": {"low": 8, "high": 32, "step": 8},
    "batch_size": {"choices": [32, 64, "all"]},
}
PACKAGE = study.__name__.partition(".")[0]
WORKER = """
import sys, os
from pathlib import Path
from {package}.harness import study
space = {space!r}
def objective(parameters, report):
    report(1, 1.0)
    if "--die" in sys.argv:
        os._exit(7)
    return parameters["optimizer.lr"]
found = study.open_study("s", folder=Path(sys.argv[1]))
for index in range(int(sys.argv[2]), int(sys.argv[3])):
    study.run_trial(found, index, space, 0, objective)
"""


def open_in(folder, name="s"):
    return study.open_study(name, folder=folder)


def objective(parameters, report):
    distance = abs(math.log10(parameters["optimizer.lr"]) + 2)
    for epoch in range(1, 4):
        report(epoch, distance + 1 / epoch)
    return distance


def run(found, indices, asked=objective, **more):
    return [study.run_trial(found, index, SPACE, 0, asked, **more) for index in indices]


def worker(folder, start, stop, *more):
    code = WORKER.format(package=PACKAGE, space=SPACE)
    return subprocess.Popen([sys.executable, "-c", code, str(folder), str(start), str(stop), *more])


# ---- the name -----------------------------------------------------------------------------------


def test_the_name_changes_with_the_evidence_and_the_space_and_with_nothing_else():
    name = study.study_name({"code": "a", "seed": 0}, SPACE)
    assert name == study.study_name({"seed": 0, "code": "a"}, dict(reversed(SPACE.items())))
    wider = {**SPACE, "width": {"low": 8, "high": 64, "step": 8}}
    assert len({name, study.study_name({"code": "b", "seed": 0}, SPACE)}) == 2
    assert name != study.study_name({"code": "a", "seed": 0}, wider)


def test_a_bad_space_has_no_name():
    with pytest.raises(ValueError, match="must be below"):
        study.study_name({}, {"lr": {"low": 2.0, "high": 1.0}})


# ---- which points are tried ---------------------------------------------------------------------


def test_one_process_a_split_and_a_resumed_study_try_the_same_points(tmp_path):
    whole = open_in(tmp_path / "whole")
    run(whole, range(8))
    split = open_in(tmp_path / "split")
    run(split, [5, 4, 6, 7])
    run(open_in(tmp_path / "split"), range(8))
    assert study.table(whole) == study.table(open_in(tmp_path / "split"))
    points = {tuple(row["parameters"].values()) for row in study.table(whole)}
    assert len(points) == 8


def test_another_seed_tries_other_points_and_the_order_of_the_space_does_not_matter(tmp_path):
    found = open_in(tmp_path)
    first = study.run_trial(found, 0, SPACE, 0, objective)
    other = study.run_trial(found, 1, SPACE, 1, objective)
    again = study.run_trial(open_in(tmp_path, "t"), 0, dict(reversed(SPACE.items())), 0, objective)
    assert first["parameters"] == again["parameters"] != other["parameters"]


def test_parameters_keep_their_types(tmp_path):
    for row in run(open_in(tmp_path), range(6)):
        assert isinstance(row["parameters"]["width"], int)
        assert isinstance(row["parameters"]["optimizer.lr"], float)
        assert row["parameters"]["batch_size"] in (32, 64, "all")


def test_a_finished_trial_is_not_run_again(tmp_path):
    found = open_in(tmp_path)
    run(found, [3])
    assert run(found, [3], lambda *_: pytest.fail("ran twice")) == study.table(found)


def test_tpe_resumed_does_not_repeat_its_points(tmp_path):
    run(open_in(tmp_path), range(8), sampler="tpe")
    run(open_in(tmp_path), range(8, 16), sampler="tpe")
    rows = study.table(open_in(tmp_path))
    assert len({row["parameters"]["optimizer.lr"] for row in rows}) == 16


def test_an_unknown_sampler_is_named(tmp_path):
    with pytest.raises(ValueError, match="'grid' is not one of random, tpe"):
        run(open_in(tmp_path), [0], sampler="grid")


# ---- how a trial ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("raised", [NonFiniteLoss("nan"), torch.OutOfMemoryError("too large")])
def test_a_diverged_trial_has_failed_and_the_study_goes_on(tmp_path, raised):
    def diverge(parameters, report):
        report(1, 2.0)
        raise raised

    found = open_in(tmp_path)
    (row,) = run(found, [0], diverge)
    assert (row["state"], row["value"], row["epochs"]) == ("failed", None, 1)
    assert str(raised) in row["because"]
    assert study.missing_indices(found, 2) == [1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_number_is_a_failed_trial(tmp_path, value):
    found = open_in(tmp_path)
    rows = run(found, [0], lambda *_: value)
    rows += run(found, [1], lambda _, report: report(4, value))
    assert [row["state"] for row in rows] == ["failed", "failed"]
    assert "epoch 4" in rows[1]["because"]


def test_a_bug_is_raised_and_its_trial_counts_as_never_run(tmp_path):
    def broken(parameters, report):
        raise KeyError("oops")

    found = open_in(tmp_path)
    with pytest.raises(KeyError, match="oops"):
        run(found, [0], broken)
    assert study.missing_indices(found, 1) == [0]
    assert run(found, [0])[0]["state"] == "complete"
    assert study.missing_indices(found, 1) == []


def test_a_hopeless_trial_is_pruned_after_the_warm_up_and_keeps_its_last_value(tmp_path):
    def curve(level, seen):
        def train(parameters, report):
            for epoch in range(1, 11):
                seen.append(epoch)
                report(epoch, level + 1 / epoch)
            return level

        return train

    found, seen = open_in(tmp_path), []
    for index in range(5):
        run(found, [index], curve(index / 10, []), warmup_epochs=4)
    (row,) = run(found, [5], curve(3.0, seen), warmup_epochs=4)
    assert (row["state"], row["epochs"], row["value"]) == ("pruned", 4, 3.25)
    assert seen == [1, 2, 3, 4]
    assert run(found, [6], curve(3.0, []))[0]["state"] == "complete"  # without pruning


def test_a_killed_trial_is_run_again(tmp_path):
    assert worker(tmp_path, 2, 3, "--die").wait(60) == 7
    found = open_in(tmp_path)
    assert study.missing_indices(found, 4) == [0, 1, 2, 3]
    assert [trial.state.name for trial in found.trials] == ["RUNNING"]
    run(found, study.missing_indices(found, 4))
    assert [row["index"] for row in study.table(found)] == [0, 1, 2, 3]


def test_two_processes_at_once_share_one_study(tmp_path):
    started = [worker(tmp_path, 0, 6), worker(tmp_path, 3, 9)]
    assert [process.wait(120) for process in started] == [0, 0]
    rows = study.table(open_in(tmp_path))
    assert [row["index"] for row in rows] == list(range(9))
    assert {row["state"] for row in rows} == {"complete"}


def test_of_one_index_run_twice_the_complete_one_counts(tmp_path):
    found = open_in(tmp_path)
    for state, value in [("FAIL", None), ("COMPLETE", 2.0), ("COMPLETE", 1.0)]:
        trial = found.ask()
        trial.set_user_attr("index", 0)
        found.tell(trial, value, state=optuna.trial.TrialState[state])
    assert [row["value"] for row in study.table(found)] == [2.0]


# ---- what was found -----------------------------------------------------------------------------


def rows_of(*found):
    return [
        {"index": i, "state": state, "value": value, "epochs": 1, "parameters": {}, "because": ""}
        for i, (state, value) in enumerate(found)
    ]


def test_the_best_trial_is_the_lowest_complete_one_and_of_equals_the_first():
    rows = rows_of(("pruned", 0.1), ("complete", 0.5), ("complete", 0.3), ("complete", 0.3))
    assert study.best(rows)["index"] == 2


def test_no_finished_trial_is_said_with_what_to_do():
    with pytest.raises(ValueError, match=r"1 failed and 1 were pruned.*stage=tune"):
        study.best(rows_of(("failed", None), ("pruned", 0.3)))


# ---- the store ----------------------------------------------------------------------------------


def test_a_database_url_holds_the_same_study(tmp_path):
    url = f"sqlite:///{(tmp_path / 's.db').as_posix()}"
    run(study.open_study("s", url, folder=tmp_path), range(2))
    run(open_in(tmp_path / "journal"), range(2))
    again = study.open_study("s", url, folder=tmp_path)
    assert study.table(again) == study.table(open_in(tmp_path / "journal"))
    assert study.missing_indices(again, 3) == [2]


def test_a_missing_driver_is_named_with_its_remedy_and_without_the_password(tmp_path):
    url = "postgresql+nosuchdriver://me:secret@host/db"
    with pytest.raises(ValueError, match=r"^stage\.storage=postgresql") as refusal:
        study.open_study("s", url, folder=tmp_path)
    assert "secret" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_database_that_cannot_be_opened_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(ValueError, match=r"unable to open .*leave stage\.storage empty"):
        study.open_study("s", f"sqlite:///{tmp_path.as_posix()}/no/such/s.db", folder=tmp_path)


def test_half_a_line_left_by_a_power_cut_costs_nothing_but_its_trial(tmp_path):
    run(open_in(tmp_path), range(2))
    with (tmp_path / "s.log").open("ab") as journal:
        journal.write(b'{"op_code":4,"worker_id":"x')
    run(open_in(tmp_path), range(3))
    assert [row["index"] for row in study.table(open_in(tmp_path))] == [0, 1, 2]


def test_a_damaged_journal_is_named(tmp_path):
    run(open_in(tmp_path), [0])
    journal = tmp_path / "s.log"
    journal.write_bytes(b"{broken\n" + journal.read_bytes())
    with pytest.raises(ValueError, match=r"s\.log cannot be read.*Move the file away"):
        open_in(tmp_path)
