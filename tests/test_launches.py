"""Launches that are no plain run of the next stage: many at once, killed, for play, reaffirmed."""

import os
import re
import time

import pytest
import walking
from walking import (
    FAILED,
    REFUSED,
    SHUT,
    STAGES,
    append,
    board,
    gate,
    launch,
    newest,
    read_json,
    source,
    statuses,
    succeed,
    tree,
)


def jobs(project):
    """The folders of the only multirun's jobs, in their order."""
    (folder,) = (project / "runs" / "multirun").iterdir()
    return sorted((p for p in folder.iterdir() if p.is_dir()), key=lambda path: int(path.name))


# ---- many launches of one stage -----------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(walks, tmp_path_factory):
    """Four jobs of overfit: two seeds, each under a loose limit and one that nothing meets."""
    project = walking.copy(walks[0].project, tmp_path_factory.mktemp("swept") / "p")
    settings = [text for text in walking.tiny("overfit") if "max_train_loss" not in text]
    before = tree(project / "artifacts")
    done = launch(project, "-m", *settings, "seed=0,1", "stage.limits.max_train_loss=100,0")
    assert tree(project / "artifacts") == before
    return project, done


def test_each_job_of_a_multirun_leaves_its_gate_and_its_code_in_its_own_folder(swept):
    codes = []
    for folder in jobs(swept[0]):
        found = read_json(folder / "gate.json")
        told = read_json(folder / "launch.json")
        assert told["stage"] == found["stage"] == "overfit"
        assert told["exit_code"] == {"open": 0, "shut": SHUT}[found["verdict"]]
        codes.append(told["exit_code"])
    assert codes == [0, SHUT, 0, SHUT]


def test_a_multirun_exits_with_the_highest_code_of_its_jobs(swept):
    succeed(swept[1], SHUT)


def test_a_multirun_records_nothing_and_takes_no_lock(swept):
    assert statuses(swept[0]) == ["open"] * 6
    assert not (swept[0] / "runs" / "locks").exists()


def test_another_seed_gives_other_losses_and_another_limit_the_same(swept):
    curves = [read_json(folder / "handoff" / "curves.json") for folder in jobs(swept[0])]
    losses = [[row["train_loss"] for row in found["runs"][0]["epochs"]] for found in curves]
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
    assert not set(losses[0]) & set(losses[2])


def test_a_multirun_that_would_show_the_board_is_bad_input(walked):
    assert "-m needs a stage" in succeed(launch(walked, "-m", "seed=0,1"), FAILED).stderr


# ---- one study, from several launches, one of them killed ---------------------------------------


@pytest.fixture(scope="module")
def study(walks, tmp_path_factory):
    """Two trials as jobs; then a plain tune, asked for eight, that is killed in its second trial; a
    launch while it lived and one right after; and, its lock having gone cold, one that ends it."""
    project = walking.copy(walks[0].project, tmp_path_factory.mktemp("study") / "p")
    # trials long enough to be interrupted
    settings = [*walking.tiny("tune"), "stage.trial_epochs=6"]
    told = {"jobs": launch(project, "-m", *settings, "trial=range(0,2)")}
    told["artifacts"] = tree(project / "artifacts")
    first = walking.start(project, *settings)
    lines = [first.stdout.readline() for _ in range(2)]  # the launch, and its first trial
    told["second launch"] = launch(project, *settings)
    assert first.poll() is None, "the first launch ended before it could be killed"
    first.kill()
    told["killed"] = "".join(lines) + first.communicate()[0]
    told["right after"] = launch(project, *settings)
    told["artifacts after the kill"] = tree(project / "artifacts")
    beat = project / "runs" / "locks" / "tune" / "heartbeat"
    os.utime(beat, (time.time() - 60, time.time() - 60))
    told["resumed"] = launch(project, *settings)
    return project, told


def trials_of(text: str) -> list[int]:
    return [int(index) for index in re.findall(r"(?m)^trial +(\d+) ", text)]


def test_trials_of_a_multirun_have_no_gate_and_fill_one_study(study):
    project, told = study
    succeed(told["jobs"])
    assert trials_of(told["jobs"].stdout) == [0, 1]
    for folder in jobs(project):
        assert read_json(folder / "launch.json") == {"stage": "tune", "exit_code": 0}
        assert not (folder / "gate.json").exists()
    assert len(list((project / "runs" / "studies").glob("*.log"))) == 2  # this, and the walk's own


def test_a_plain_run_tops_the_study_up_and_starts_at_the_first_missing_trial(study):
    assert trials_of(study[1]["killed"])[0] == 2


def test_a_second_launch_is_refused_while_the_first_runs(study):
    done = succeed(study[1]["second launch"], REFUSED)
    assert done.stderr.startswith("Stage 'tune' is already running: process ")
    assert done.stdout == ""


def test_a_killed_launch_has_recorded_nothing_and_its_lock_holds_until_it_is_cold(study):
    told = study[1]
    assert told["artifacts after the kill"] == told["artifacts"]
    refused = succeed(told["right after"], REFUSED)
    assert re.search(r"if it was killed, run again in \d+ s", refused.stderr)


def test_a_resumed_study_takes_the_lock_over_and_runs_only_what_is_missing(study):
    project, told = study
    resumed = succeed(told["resumed"])
    assert "Took over the lock of 'tune'" in resumed.stdout
    finished = trials_of(told["jobs"].stdout) + trials_of(told["killed"])
    assert trials_of(resumed.stdout) == [index for index in range(8) if index not in finished]
    rows = read_json(project / "artifacts" / "tune" / "trials.json")
    assert [row["index"] for row in rows] == list(range(8))
    assert not (project / "runs" / "locks").exists()


# ---- for play -----------------------------------------------------------------------------------


def test_scratch_asks_no_gate_leaves_no_evidence_and_keeps_the_test_rows_sealed(walked):
    (walked / "artifacts" / "skeleton" / "gate.json").unlink()
    before = {k: v for k, v in tree(walked).items() if not k.startswith("runs/")}
    done = succeed(launch(walked, "stage=squeeze", "stage.candidates=[ensemble]", "scratch=true"))
    assert "Not recorded: this is a scratch run" in done.stdout
    assert {k: v for k, v in tree(walked).items() if not k.startswith("runs/")} == before
    folder = newest(walked, "squeeze")
    assert gate_is_sealed(read_json(folder / "gate.json"))
    final = read_json(folder / "handoff" / "final.json")
    assert all(row["test accuracy"] is None for row in final["table"])


def gate_is_sealed(found) -> bool:
    sealed = walking.checks(found)["sealed_test"]
    return sealed["verdict"] == "not_applicable" and "sealed" in sealed["because"]


def test_scratch_in_a_fresh_project_says_what_has_to_be_there_first(fresh):
    done = succeed(launch(fresh, "stage=overfit", "scratch=true"), FAILED)
    assert done.stderr.strip().endswith("run first: python run.py stage=data_audit")
    assert not (fresh / "artifacts").exists()


def test_an_unknown_candidate_is_refused_before_anything_is_trained(walked):
    before = tree(walked)
    done = launch(walked, "stage=squeeze", "stage.candidates=[longer,shorter]")
    assert "names 'shorter'; there are longer, ensemble" in succeed(done, FAILED).stderr
    assert tree(walked) == before


# ---- reaffirmed ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reaffirmed(walks, tmp_path_factory):
    """The loop and one check were edited; every gate was reaffirmed, in order."""
    project = walking.copy(walks[0].project, tmp_path_factory.mktemp("reaffirmed") / "p")
    before = board(project)
    for name in ("harness/loop.py", "harness/checks/step.py"):
        append(source(project, name), "\n\nUNUSED = 1\n")
    boards, launches = [before, board(project)], []
    for stage in STAGES:
        launches.append(succeed(launch(project, f"stage={stage}", "reaffirm=true")))
        boards.append(board(project))
    return project, boards, launches


def test_an_edited_check_or_loop_makes_gates_stale_that_can_be_reaffirmed(reaffirmed):
    stale = reaffirmed[1][1]
    assert all(stale[stage].startswith("stale") for stage in STAGES)
    assert "harness/loop.py changed" in stale["data_audit"]
    assert "harness/checks/step.py or what it imports changed" in stale["skeleton"]
    command = "python run.py stage=data_audit reaffirm=true"
    assert (
        stale["next"]
        == f"Next. Only checks or the loop changed, nothing is trained again; run: {command}"
    )


def test_reaffirming_opens_one_gate_after_the_other(reaffirmed):
    for place, found in enumerate(reaffirmed[1][2:]):
        assert [found[stage].split()[0] for stage in STAGES[: place + 1]] == ["open"] * (place + 1)
    assert {reaffirmed[1][-1][stage].split()[0] for stage in STAGES} == {"open"}


def test_reaffirming_trains_nothing_and_keeps_every_output(walks, reaffirmed):
    for done in reaffirmed[2]:
        assert "training rows" not in done.stdout  # the line before a first step
    for stage in STAGES:
        assert gate(reaffirmed[0], stage)["outputs"] == gate(walks[0].project, stage)["outputs"]
    ledger = "artifacts/test_ledger.jsonl"
    assert (reaffirmed[0] / ledger).read_bytes() == (walks[0].project / ledger).read_bytes()


def test_the_reason_for_reaffirming_is_recorded(reaffirmed):
    for stage in STAGES:
        (look,) = gate(reaffirmed[0], stage)["provenance"]["reaffirmed"]
        assert "harness/loop.py changed" in look["because"]


def test_reaffirm_is_refused_when_more_than_checks_or_the_loop_changed(walked):
    append(source(walked, "harness/loop.py"), "\n\nUNUSED = 1\n")
    append(source(walked, "task.py"), "\n\nUNUSED = 1\n")
    done = succeed(launch(walked, "stage=data_audit", "reaffirm=true"), REFUSED)
    assert "cannot be reaffirmed" in done.stderr
    assert "task.py changed" in done.stderr
    assert done.stderr.strip().endswith("python run.py stage=data_audit")


def test_reaffirm_is_refused_when_there_is_nothing_to_reaffirm(walked):
    done = succeed(launch(walked, "stage=tune", "reaffirm=true"), REFUSED)
    assert "there is nothing to reaffirm" in done.stderr
