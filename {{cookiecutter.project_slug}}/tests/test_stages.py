"""The six stages of this project with small settings: about a minute on one core."""

import shutil
from itertools import pairwise

import pytest
from command_line import DATA, ORDER, PACKAGE, SMALL, copy_project, ended, gate, launch, small

LINES = ("Question: ", "Evidence: ", "Leaves: ", "If it fails suspect: ")
MAX_LINES = 120


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """(a copy of this project that walked all six stages, what each launch printed)"""
    project = copy_project(tmp_path_factory.mktemp("walk") / "p")
    return project, {stage: small(project, stage) for stage in ORDER}


@pytest.fixture
def walked(walk, tmp_path):
    project = tmp_path / "p"
    shutil.copytree(walk[0], project)
    yield project
    shutil.rmtree(project)


@pytest.mark.parametrize("stage", ORDER)
def test_a_stage_file_is_short_and_opens_with_its_four_lines(project_root, stage):
    lines = (project_root / PACKAGE / "stages" / f"{stage}.py").read_text("utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    assert lines[0].startswith(f'"""{LINES[0]}')
    assert [lines[k].startswith(text) for k, text in enumerate(LINES) if k] == [True] * 3
    assert lines[4] == '"""'


@pytest.mark.slow
@pytest.mark.parametrize("stage", ORDER)
def test_each_stage_opens_its_gate_and_names_the_next(walk, stage):
    done = ended(walk[1][stage])
    assert f"Gate {stage}: open." in done.stdout
    after = ORDER[ORDER.index(stage) + 1 :]
    told = f"Next: python run.py stage={after[0]}" if after else "All six stages are walked."
    assert told in done.stdout


@pytest.mark.slow
def test_the_board_shows_six_open_gates_and_each_loosened_limit_once(walk):
    text = ended(launch(walk[0], DATA)).stdout
    assert [line.split()[1] for line in text.splitlines() if line.startswith(ORDER)] == ["open"] * 6
    loosened = [line for line in text.splitlines() if line.startswith("Loosened in ")]
    assert len(loosened) == sum("limits" in text for texts in SMALL.values() for text in texts)
    assert "Loosened in overfit: stage.limits.max_train_loss 0.01 -> 100.0" in loosened


@pytest.mark.slow
def test_a_gate_lists_the_limits_loosened_for_it_and_those_it_inherits(walk):
    limits = {stage: [e["limit"] for e in gate(walk[0], stage)["waivers"]] for stage in ORDER}
    assert limits["skeleton"] == []
    assert limits["overfit"] == ["stage.limits.max_train_loss", "stage.limits.min_lr_range_drop"]
    for before, stage in pairwise(ORDER):
        assert set(limits[before]) <= set(limits[stage])
    assert "stage.limits.max_loss_in_pooled_spreads" in limits["squeeze"]


@pytest.mark.slow
def test_a_gate_says_what_it_was_run_with(walk):
    told = gate(walk[0], "overfit")["provenance"]
    assert told["command"].startswith(f"python run.py stage=overfit {DATA}")
    assert told["config"]["stage"]["num_epochs"] == 2
    assert {"torch", "numpy", "hydra-core"} <= set(told["packages"])


@pytest.mark.slow
def test_a_shut_gate_locks_the_next_stage_and_a_waiver_opens_it_and_is_inherited(walked):
    strict = "stage.limits.min_gain_in_standard_errors=1e9"
    done = ended(small(walked, "regularize", strict), 3)
    assert "Gate regularize: shut. Read artifacts/regularize/report.md" in done.stdout
    refused = ended(small(walked, "tune"), 4).stderr
    assert refused.startswith("Stage 'tune' is locked: 'regularize' is shut, paired_gain ")
    assert refused.strip().endswith(f"python run.py stage=regularize {DATA}")

    (walked / "configs" / "waivers.yaml").write_text(
        "waivers:\n  - check: paired_gain\n    stage: regularize\n    reason: two epochs only\n",
        encoding="utf-8",
    )
    ended(small(walked, "regularize", strict))
    found = gate(walked, "regularize")
    verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
    assert (verdicts["paired_gain"], found["verdict"]) == ("shut", "open")
    board = ended(launch(walked, DATA)).stdout
    assert "Waived in regularize: paired_gain, two epochs only" in board
    ended(small(walked, "tune"))
    waivers = [e for e in gate(walked, "tune")["waivers"] if e["kind"] == "waiver"]
    told = [(e["stage"], e["check"], e["reason"]) for e in waivers]
    assert told == [("regularize", "paired_gain", "two epochs only")]


@pytest.mark.slow
def test_a_scratch_run_leaves_no_evidence(walked):
    artifacts = {p: p.read_bytes() for p in (walked / "artifacts").rglob("*") if p.is_file()}
    done = ended(small(walked, "regularize", "scratch=true"))
    assert "Not recorded: this is a scratch run" in done.stdout
    kept = {p: p.read_bytes() for p in (walked / "artifacts").rglob("*") if p.is_file()}
    assert kept == artifacts
