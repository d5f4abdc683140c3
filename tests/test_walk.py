"""The walk by command line: six stages in order, what they leave, and the same a second time."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import walking
from PIL import Image
from sklearn.datasets import load_digits
from walking import STAGES, board, checks, gate, launch, read_json, succeed

GATE_KEYS = [
    "schema",
    "stage",
    "verdict",
    "checks",
    "waivers",
    "previous",
    "evidence_of",
    "outputs",
    "binding",
    "digest",
    "provenance",
]
CHECK_KEYS = ["name", "verdict", "value", "limit", "unit", "because", "suspect", "figure"]

# What the issue asks each stage to measure. A gate may hold more.
SKELETON = [
    "loss_at_init",
    "prior_bias",
    "human_metric",
    "input_independent_baseline",
    "overfit_one_batch",
    "last_seam",
    "sample_boundary",
    "trainable_parameters",
    "step_oracle",
    "loss_contract",
    "modes",
    "split_parity",
    "human_reference",
]
NAMED = {
    "data_audit": [
        "imbalance",
        "exact_duplicates",
        "near_duplicates",
        "conflicting_labels",
        "corrupt",
        "outliers",
        "cross_split_leakage",
        "label_noise",
        "split_drift",
        "order_and_groups",
        "statement",
    ],
    "skeleton": SKELETON,
    "overfit": [*SKELETON, "lr_range", "train_loss", "one_change"],
    "regularize": [
        "paired_gain",
        "unit_activity",
        "first_layer",
        "dropout_beside_norm",
        "human_reference",
    ],
    "tune": ["trials", "sensitivities", "best_configuration", "human_reference"],
    "squeeze": ["candidates", "sealed_test", "stands", "bundle_parity", "human_reference"],
}


@pytest.fixture(scope="module")
def project(walks):
    return walks[0].project


# ---- in order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_opens_its_gate_and_exits_with_zero(walks, stage):
    done = succeed(walks[0].launches[stage])
    assert f"Gate {stage}: open." in done.stdout
    assert "Warning" not in done.stderr


def test_the_board_shows_six_open_gates(project):
    found = board(project)
    assert [found[stage].split()[0] for stage in STAGES] == ["open"] * 6
    assert found["next"] == "All gates are open. Read: artifacts/<stage>/report.md"


@pytest.mark.parametrize("stage", STAGES)
def test_a_gate_has_the_documented_keys_in_their_order(project, stage):
    found = gate(project, stage)
    assert list(found) == GATE_KEYS
    assert all(list(check) == CHECK_KEYS for check in found["checks"])
    place = STAGES.index(stage)
    if place:
        previous = gate(project, STAGES[place - 1])
        assert found["previous"] == {k: previous[k] for k in ("stage", "binding")}
    else:
        assert found["previous"] is None
    kept = ["seed", "command", "config", "git", "packages", "hardware", "started", "duration_s"]
    assert not set(kept) - set(found["provenance"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_gate_holds_the_checks_that_are_asked_for_and_each_says_why(project, stage):
    found = gate(project, stage)
    assert not set(NAMED[stage]) - set(checks(found))
    for check in found["checks"]:
        assert check["because"].strip(), check
        assert check["suspect"] or check["verdict"] not in ("shut", "warn"), check


@pytest.mark.parametrize("stage", STAGES[1:])
def test_an_unset_human_reference_warns_in_every_gate_from_skeleton_on(project, stage):
    assert checks(gate(project, stage))["human_reference"]["verdict"] == "warn"


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_leaves_a_report_and_figures_that_it_shows(project, stage):
    folder = project / "artifacts" / stage
    report = (folder / "report.md").read_text(encoding="utf-8")
    for name in checks(gate(project, stage)):
        assert f"| {name} |" in report
    drawn = sorted((folder / "figures").glob("*.png"))
    assert drawn
    for path in drawn:
        assert f"(figures/{path.name})" in report


def test_the_audit_states_its_recall_on_planted_faults_along_every_axis(project):
    report = read_json(project / "artifacts" / "data_audit" / "report.json")
    kept = [
        "axis",
        "method",
        "n",
        "estimate",
        "interval",
        "planted_recall",
        "planted_false",
        "verdict",
        "ids",
    ]
    for statement in report["statements"]:
        assert not set(kept) - set(statement)
        blind = statement["planted_recall"] is not None and statement["planted_recall"] < 0.8
        assert not (blind and statement["verdict"] == "open"), statement


def test_the_test_rows_are_read_once_and_stand_in_the_final_table(project):
    final = read_json(project / "artifacts" / "squeeze" / "final.json")
    rows = {row["model"]: row for row in final["table"]}
    low, high = rows[final["chosen"]]["interval"]
    assert low < rows[final["chosen"]]["test accuracy"] <= high
    assert {"overfit, mean single model", "regularize, mean single model"} <= set(rows)
    assert any(name.startswith("baseline") for name in rows)
    assert final["earlier_openings"] == 0
    ledger = (project / "artifacts" / "test_ledger.jsonl").read_text(encoding="utf-8")
    assert len(ledger.splitlines()) == 1


# ---- what comes out serves ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Four digits as files that a user would send."""
    folder, found = tmp_path_factory.mktemp("digits"), load_digits()
    paths = [folder / f"{found.target[row]}-{row}.png" for row in (0, 1, 2, 3)]
    for row, path in enumerate(paths):
        Image.fromarray(found.images[row].astype(np.uint8)).save(path)
    return paths


def test_serve_answers_for_image_files(project, digits):
    bundle = ["serve.py", "artifacts/squeeze/bundle"]
    done = succeed(walking.run(project, [sys.executable, *bundle, *map(str, digits)]))
    told = [line.split("\t") for line in done.stdout.splitlines()]
    assert [(path, answer) for path, answer, _ in told] == [
        (str(path), path.name[0]) for path in digits
    ]


def test_the_bundle_predicts_in_python(project, digits):
    code = "import sys, json; from serve import Bundle; "
    code += "print(json.dumps(Bundle.load('artifacts/squeeze/bundle').predict(sys.argv[1])))"
    done = succeed(walking.run(project, [sys.executable, "-c", code, str(digits[3])]))
    found = json.loads(done.stdout)
    assert found["answer"] == "3"
    assert 0 < found["probability"] <= 1


def test_serving_imports_neither_hydra_nor_wandb(project):
    code = "import sys, serve; print({'hydra', 'wandb', 'optuna', 'sklearn'} & set(sys.modules))"
    done = succeed(walking.run(project, [sys.executable, "-c", code]))
    assert done.stdout.strip() == "set()"


# ---- the same again -----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES[:3])
def test_two_bakes_walked_with_one_seed_have_identical_evidence(walks, stage):
    one, two = (gate(walk.project, stage) for walk in walks)
    assert one["checks"] == two["checks"]
    assert one["outputs"] == two["outputs"]
    assert (one["binding"], one["digest"]) == (two["binding"], two["digest"])


def test_two_runs_with_one_seed_have_bit_equal_histories(walks):
    one, two = (walking.newest(walk.project, "overfit") for walk in walks)
    paths = sorted(path.relative_to(one) for path in one.rglob("history.jsonl"))
    assert paths
    for path in paths:
        rows = walking.history((one / path).parent)
        assert len(rows) > 30
        assert rows == walking.history((two / path).parent)


@pytest.fixture(scope="module")
def short_walks(walks, tmp_path_factory):
    """Both projects walked again from overfit to the end, with small settings. What the first has
    from there on is removed: a gate also says what came before it."""
    folder = tmp_path_factory.mktemp("short")
    projects = [walking.copy(w.project, folder / str(k) / "p") for k, w in enumerate(walks)]
    (projects[0] / "artifacts" / "test_ledger.jsonl").unlink()
    for stage in STAGES[3:]:
        shutil.rmtree(projects[0] / "artifacts" / stage)

    def go_on(project):
        return [succeed(launch(project, *walking.tiny(stage))) for stage in STAGES[2:]]

    walking.together(*[lambda p=project: go_on(p) for project in projects])
    return projects


@pytest.mark.parametrize("stage", STAGES[3:])
def test_the_later_stages_have_identical_evidence_too(short_walks, stage):
    one, two = (gate(project, stage) for project in short_walks)
    assert one["checks"] == two["checks"]
    assert one["outputs"] == two["outputs"]
    assert (one["binding"], one["digest"]) == (two["binding"], two["digest"])


def test_rerunning_a_stage_that_changes_nothing_leaves_later_gates_open(walks, walked):
    succeed(launch(walked, "stage=skeleton"))
    assert gate(walked, "skeleton")["digest"] == gate(walks[0].project, "skeleton")["digest"]
    assert walking.statuses(walked) == ["open"] * 6


# ---- the sealed test rows -----------------------------------------------------------------------


def test_a_second_look_with_other_weights_is_marked_and_the_same_weights_are_not(short_walks):
    """Only an opening that may have steered what is measured now makes the figure optimistic."""
    project = short_walks[1]
    first = gate(project, "squeeze")
    chosen = read_json(project / "artifacts" / "squeeze" / "final.json")["chosen"]
    assert chosen in ("longer", "ensemble")

    succeed(launch(project, *walking.tiny("squeeze")))
    assert gate(project, "squeeze")["digest"] == first["digest"]
    assert checks(first)["sealed_test"]["verdict"] == "open"

    other = {"longer": "ensemble", "ensemble": "longer"}[chosen]
    succeed(launch(project, *walking.tiny("squeeze"), f"stage.candidates=[{other}]"))
    sealed = checks(gate(project, "squeeze"))["sealed_test"]
    assert sealed["verdict"] == "warn"
    assert "Optimistic: opened 2 times before" in sealed["because"]
    ledger = (project / "artifacts" / "test_ledger.jsonl").read_text(encoding="utf-8")
    assert len(ledger.splitlines()) == 3


def test_git_would_commit_the_evidence_and_no_weights(project):
    told = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=all"],
        cwd=project,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    ).stdout
    names = {line[3:] for line in told.splitlines()}
    assert {f"artifacts/{stage}/gate.json" for stage in STAGES} <= names
    assert not [name for name in names if name.startswith("runs/")]
    assert not [name for name in names if name.endswith((".safetensors", ".log", ".pyc"))]
