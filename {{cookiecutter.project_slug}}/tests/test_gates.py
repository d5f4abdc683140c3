import json
import subprocess
import sys
import time
from datetime import date, timedelta
from pathlib import Path

import pytest
from paper_project import PaperProject, check

from {{cookiecutter.project_slug}}.harness import files, gates


@pytest.fixture
def paper(tmp_path):
    return PaperProject(tmp_path)


@pytest.fixture
def walked(paper):
    paper.walk()
    return paper


def edit(path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8", newline="\n")


# ---- open -------------------------------------------------------------------------------------


def test_a_project_that_was_never_walked_has_six_missing_gates_and_one_first_command(paper):
    judged = gates.judge_all(paper.project, paper.config, paper.data)
    assert [j.status for j in judged] == ["missing"] * 6
    assert {j.command for j in judged} == {"python run.py stage=data_audit"}


def test_after_a_walk_all_gates_are_open_and_say_what_they_counted(walked):
    assert walked.statuses() == ["open"] * 6
    assert walked.judge("tune").because == "2 checks: 2 open"


def test_judging_writes_no_file(walked):
    before = sorted(walked.project.root.rglob("*"))
    walked.statuses()
    walked.ask("squeeze")
    assert sorted(walked.project.root.rglob("*")) == before


def test_a_rerun_that_changes_nothing_invalidates_nothing(walked):
    former = files.read_json(walked.artifact("skeleton"))
    again = walked.record("skeleton", provenance={"seed": 0, "started": "later"})
    assert again["binding"] == former["binding"]
    assert again["digest"] == former["digest"]
    assert walked.statuses() == ["open"] * 6


def test_another_measured_value_changes_the_digest_but_not_the_binding(walked):
    former = files.read_json(walked.artifact("skeleton"))
    again = walked.record("skeleton", [check(value=2.4), check("step_oracle")])
    assert again["digest"] != former["digest"]
    assert again["binding"] == former["binding"]
    assert walked.statuses() == ["open"] * 6


def test_a_gate_that_warns_is_open_and_names_the_warning(paper):
    paper.record("data_audit", [check(), check("human_metric", "warn", None, None)])
    judged = paper.judge("data_audit")
    assert (judged.status, judged.warnings) == ("open", ("human_metric",))
    assert "1 warn (human_metric)" in judged.because


# ---- tampered ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"value": 2.3', '"value": 2.2'),
        ('"value": 2.3', '"value": NaN'),
        ("is 2.3 where", "is 2.2 where"),
        ('"verdict": "open"', '"verdict": "shut"'),
        ('"schema": 1', '"schema": 2'),
        ('"splits.json"', '"split.json"'),
        ('"binding": "', '"binding": "0'),
        ('"digest"', '"digests"'),
        ("{", ""),
        ("{", "<<<<<<< HEAD\n{"),
    ],
)
def test_any_edit_of_the_evidence_is_noticed(walked, old, new):
    edit(walked.artifact("data_audit"), old, new)
    judged = walked.judge("data_audit")
    assert judged.status == "tampered"
    assert "gate.json" in judged.because
    assert judged.command == "python run.py stage=data_audit"
    assert walked.judge("skeleton").because == "'data_audit' is tampered"


def test_a_gate_copied_from_another_stage_is_tampered(walked):
    gate = walked.artifact("skeleton").read_bytes()
    walked.artifact("overfit").write_bytes(gate)
    judged = walked.judge("overfit")
    assert judged.status == "tampered"
    assert "is the gate of 'skeleton'" in judged.because


def test_one_byte_of_an_output_makes_its_gate_tampered_and_names_the_file(walked):
    walked.artifact("overfit", "best.safetensors").write_text("Weights")
    judged = walked.judge("overfit")
    assert (judged.status, judged.because) == ("tampered", "best.safetensors is not as recorded")
    assert walked.judge("regularize").because == "'overfit' is tampered"
    assert walked.judge("tune").command == "python run.py stage=overfit"


def test_provenance_and_layout_are_not_evidence(walked):
    path = walked.artifact("skeleton")
    gate = files.read_json(path)
    gate["provenance"]["seed"] = 7
    path.write_text(json.dumps(gate, sort_keys=True), encoding="utf-8")
    assert walked.statuses() == ["open"] * 6


def test_report_and_figures_are_for_people_and_may_change(walked):
    walked.artifact("skeleton", "report.md").write_text("mine")
    assert walked.judge("skeleton").status == "open"


# ---- shut -------------------------------------------------------------------------------------


def test_a_shut_gate_names_its_first_shut_check_with_value_and_limit(paper):
    paper.walk("overfit")
    gap = check("generalization_gap", "shut", 0.41, 0.3, suspect=("too little dropout.",))
    assert paper.record("regularize", [check(), gap])["verdict"] == "shut"
    with pytest.raises(gates.Refused) as refused:
        paper.ask("tune")
    assert refused.value.exit_code == 4
    assert str(refused.value) == (
        "Stage 'tune' is locked: 'regularize' is shut, generalization_gap 0.41 > 0.3 "
        "(artifacts/regularize/gate.json).\n"
        "Repair generalization_gap first (too little dropout). Then run: "
        "python run.py stage=regularize"
    )


def test_an_inconclusive_check_shuts_the_gate(paper):
    found = check("overfit_one_batch", "inconclusive", None, None, because="It needs 4 rows.")
    assert paper.record("data_audit", [check(), found])["verdict"] == "shut"
    judged = paper.judge("data_audit")
    assert judged.because == "overfit_one_batch is inconclusive: It needs 4 rows"
    assert judged.remedy.startswith("Read artifacts/data_audit/report.md")


@pytest.mark.parametrize(
    ("value", "limit", "said"),
    [
        (0.1, 0.85, "gain 0.1 < 0.85"),
        (2.0, [0.85, 1.25], "gain 2 not within [0.85, 1.25]"),
        (2.0, [0.85, None], "gain 2 not within [0.85, any]"),
        (None, 0.85, "gain: It was never measured"),
        (2.0, None, "gain: It was never measured"),
    ],
)
def test_the_limit_is_said_as_the_check_means_it(paper, value, limit, said):
    paper.record(
        "data_audit", [check("gain", "shut", value, limit, because="It was never measured.")]
    )
    assert paper.judge("data_audit").because == said


def test_a_rerun_that_shuts_an_early_gate_locks_every_later_one(walked):
    walked.record("skeleton", [check("loss_at_init", "shut", 4.1, 2.9)])
    assert walked.statuses() == ["open", "shut", "stale", "stale", "stale", "stale"]
    assert walked.judge("overfit").because == "'skeleton' is shut"
    assert walked.judge("squeeze").command == "python run.py stage=skeleton"


# ---- stale ------------------------------------------------------------------------------------


def test_an_absent_output_makes_its_gate_stale(walked):
    walked.artifact("overfit", "best.safetensors").unlink()
    judged = walked.judge("overfit")
    assert (judged.status, judged.because) == ("stale", "best.safetensors is absent")
    assert judged.command == "python run.py stage=overfit"


def test_a_deleted_gate_locks_the_next_stage_and_names_the_first_command(walked):
    walked.artifact("data_audit").unlink()
    with pytest.raises(gates.Refused) as refused:
        walked.ask("tune")
    assert str(refused.value) == (
        "Stage 'tune' is locked: 'regularize' is stale, 'overfit' is stale "
        "(artifacts/regularize/gate.json).\n"
        "'data_audit' comes first: it is missing, it has no recorded run.\n"
        "Run: python run.py stage=data_audit"
    )


def test_a_rerun_with_other_outputs_makes_the_later_gates_stale(walked):
    walked.record("overfit", contents={"best.safetensors": "other weights"})
    assert walked.statuses() == ["open"] * 3 + ["stale"] * 3
    assert walked.judge("regularize").because == "'overfit' was recorded again and is not the same"
    assert walked.judge("squeeze").command == "python run.py stage=regularize"


# ---- data -------------------------------------------------------------------------------------


def test_without_the_data_gates_are_unverifiable_and_stages_locked(walked):
    walked.data = gates.DataNow(None, None, "there is no folder 'photos'")
    assert walked.statuses() == ["unverifiable"] * 6
    with pytest.raises(gates.Refused, match=r"no folder 'photos'[\s\S]*set data.path"):
        walked.ask("tune")


def test_stale_is_said_before_unverifiable(walked):
    walked.data = gates.DataNow(None, None, "gone")
    walked.write_source("stages/tune.py", "x = 1\n")
    assert walked.statuses() == ["unverifiable"] * 4 + ["stale"] * 2


def test_data_whose_identity_is_not_known_yet_passes_and_is_verified_after_loading(walked):
    project, config = walked.project, walked.config
    gates.ask(project, "tune", config, gates.DataNow(None, None))
    gates.verify_data(project, "tune", config, gates.DataNow("d1", 3))
    with pytest.raises(gates.Refused, match=r"data_audit.*data changed \(3 records, now 4\)"):
        gates.verify_data(project, "tune", config, gates.DataNow("d2", 4))
    gates.verify_data(project, "data_audit", config, gates.DataNow("d2", 4))
    with pytest.raises(ValueError, match="identity"):
        gates.verify_data(project, "tune", config, gates.DataNow(None))


# ---- asking -----------------------------------------------------------------------------------


def test_the_first_stage_may_always_start_and_an_open_gate_lets_the_next_in(paper):
    paper.ask("data_audit")
    paper.walk("skeleton")
    assert paper.ask("overfit") is None
    with pytest.raises(gates.Refused, match="'overfit' is missing"):
        paper.ask("regularize")


def test_a_stage_needs_only_the_gate_before_it_not_its_own(walked):
    walked.artifact("tune").unlink()
    walked.ask("tune")


def test_asking_imports_nothing_heavy_and_costs_milliseconds(walked):
    package = gates.__name__.partition(".")[0]
    code = f"import sys; from {package}.harness import gates, lock; "
    code += "print([m for m in ('torch', 'numpy', 'sklearn', 'hydra') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(gates.__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
    started = time.process_time()
    walked.ask("squeeze")
    assert time.process_time() - started < 0.5


# ---- waivers that run out ---------------------------------------------------------------------


def test_an_expired_waiver_shuts_the_gate_again_without_a_rerun(paper):
    waiver = {"check": "loss_at_init", "reason": "known", "expires": date.today().isoformat()}
    gate = paper.record("data_audit", [check(verdict="shut", value=4.1)], waivers=[waiver])
    assert gate["verdict"] == "open"
    assert gate["checks"][0]["verdict"] == "shut"
    assert paper.judge("data_audit").status == "open"
    late = paper.judge("data_audit", today=date.today() + timedelta(days=1))
    assert late.status == "shut"
    assert late.because == "loss_at_init 4.1 > 2.9; its waiver has expired"
    assert "configs/waivers.yaml" in late.remedy
