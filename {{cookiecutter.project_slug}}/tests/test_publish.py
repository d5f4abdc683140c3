import math
import os

import numpy as np
import pytest
from paper_project import PaperProject, check

from {{cookiecutter.project_slug}}.harness import artifact, files, gates, publish
from {{cookiecutter.project_slug}}.harness.artifact import KEYS


@pytest.fixture
def paper(tmp_path):
    return PaperProject(tmp_path)


def names_below(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


# ---- the file ---------------------------------------------------------------------------------


def test_gate_json_has_its_keys_in_the_order_of_the_design(paper):
    returned = paper.record("data_audit")
    read = files.read_json(paper.artifact("data_audit"))
    assert list(read) == list(KEYS)
    assert read == returned
    assert KEYS[:4] == ("schema", "stage", "verdict", "checks")
    assert KEYS[-3:] == ("binding", "digest", "provenance")


@pytest.mark.parametrize("key", [key for key in KEYS if key not in ("binding", "digest")])
def test_what_binds_the_next_gate_and_what_the_digest_covers(paper, key):
    gate = paper.record("data_audit")
    changed = {**gate, key: "other"}
    binds = key in ("stage", "verdict", "previous", "evidence_of", "outputs")
    assert (artifact.binding_of(changed) != gate["binding"]) == binds
    assert (artifact.digest_of(changed) != gate["digest"]) == (key != "provenance")


def test_the_same_run_writes_the_same_bytes(paper):
    paper.record("data_audit")
    first = paper.artifact("data_audit").read_bytes()
    paper.record("data_audit")
    assert paper.artifact("data_audit").read_bytes() == first


def test_evidence_names_data_split_preprocessing_config_sources_and_checks(paper):
    paper.walk("skeleton")
    about = paper.record("overfit")["evidence_of"]
    state = paper.artifact("data_audit", "preprocessing.json")
    assert about["data"] == {"identity": "d1", "num_records": 3}
    assert about["split"] == files.sha256_json(
        files.read_json(paper.artifact("data_audit", "splits.json"))
    )
    assert about["preprocessing"] == files.sha256_file(state)
    assert about["config"]["data"] == {
        "source": "paper",
        "split": {"seed": 0, "test_fraction": 0.2},
    }
    assert about["config"]["model"]["params"] == {"width": 16}
    assert sorted(about["sources"]) == [
        "data.py",
        "harness/loop.py",
        "model.py",
        "preprocessing.py",
        "stages/overfit.py",
        "task.py",
    ]
    assert about["checks"]["step_oracle"]["file"] == "harness/checks/step.py"
    assert "model" not in files.read_json(paper.artifact("skeleton"))["evidence_of"]["config"]


def test_a_check_is_found_by_its_function_then_by_its_name_then_in_its_stage(paper):
    paper.write_source("harness/audit/noise.py", "AXES = ('label_noise',)\n")
    checks = [check("loss_at_init"), check("label_noise"), check("gain")]
    about = paper.record("data_audit", checks)["evidence_of"]
    assert [about["checks"][c.name]["file"] for c in checks] == [
        "harness/checks/loss.py",
        "harness/audit/noise.py",
        "stages/data_audit.py",
    ]


def test_values_are_kept_to_six_digits_and_numpy_numbers_become_plain(paper):
    checks = [
        check("a", value=1 / 3, limit=[np.float32(0.1), 2.0]),
        check("b", value=1_234_567, limit=None),
        check("c", value=np.int64(7), limit=math.inf),
        check("d", value=-0.0),
    ]
    rows = paper.record("data_audit", checks)["checks"]
    assert rows[0]["value"] == 0.333333
    assert rows[0]["limit"] == [0.1, 2.0]
    assert (rows[1]["value"], rows[2]["value"], rows[2]["limit"]) == (1_234_567, 7, None)
    assert math.copysign(1.0, rows[3]["value"]) == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_opens_nothing(paper, value):
    gate = paper.record("data_audit", [check("gain", value=value)])
    assert gate["verdict"] == "shut"
    assert gate["checks"][0]["value"] is None
    assert gate["checks"][0]["verdict"] == "inconclusive"
    assert "No finite value was measured" in gate["checks"][0]["because"]
    assert paper.judge("data_audit").status == "shut"


def test_a_finding_without_a_limit_needs_no_value(paper):
    found = check("curve_shape", value=None, limit=None)
    assert paper.record("data_audit", [found])["verdict"] == "open"


def test_provenance_may_hold_anything_and_never_fails_a_finished_run(paper):
    odd = {"lr": math.nan, "where": paper.project.root, "betas": (0.9, 0.99), 3: np.float32(1)}
    kept = paper.record("data_audit", provenance=odd)["provenance"]
    assert (kept["lr"], kept["betas"], kept["3"]) == ("nan", [0.9, 0.99], 1.0)


def test_a_gate_without_checks_or_with_one_twice_is_refused(paper):
    with pytest.raises(ValueError, match="no check"):
        paper.record("data_audit", [])
    with pytest.raises(ValueError, match="two checks named loss_at_init"):
        paper.record("data_audit", [check(), check()])
    assert not paper.artifact("data_audit").exists()


def test_a_gate_needs_known_data_and_a_gate_before_it(paper):
    with pytest.raises(ValueError, match="identity of the data"):
        paper.record("data_audit", data=gates.DataNow(None))
    with pytest.raises(ValueError, match="'data_audit' has no gate"):
        paper.record("skeleton")


# ---- what was launched is what is recorded -----------------------------------------------------


def test_sources_edited_while_the_stage_ran_are_recorded_as_launched(paper):
    paper.walk("skeleton")
    launched = gates.snapshot(paper.project, "overfit")
    paper.write_source("model.py", "class Net:\n    width = 99\n")
    paper.record("overfit", launched=launched)
    judged = paper.judge("overfit")
    assert (judged.status, judged.because) == ("stale", "model.py changed")


def test_a_gate_recorded_meanwhile_is_not_what_let_the_stage_in(paper):
    paper.walk("skeleton")
    launched = gates.snapshot(paper.project, "overfit")
    paper.record("skeleton", contents={"other.json": "{}"})
    paper.record("overfit", launched=launched)
    assert "'skeleton' was recorded again" in paper.judge("overfit").because


# ---- files ------------------------------------------------------------------------------------


def test_files_are_published_and_only_reports_and_figures_are_no_outputs(paper):
    contents = {"a/b.json": "1", "figures/loss.png": "png", ".half.json": "", "gate.json": "{}"}
    gate = paper.record("data_audit", contents=contents)
    published = paper.artifact("data_audit", "a/b.json")
    assert gate["outputs"] == {"a/b.json": files.sha256_file(published)}
    folder = paper.artifact("data_audit").parent
    assert names_below(folder) == ["a/b.json", "figures/loss.png", "gate.json", "report.md"]


def test_files_no_longer_produced_are_removed_and_a_persons_own_stay(paper):
    paper.record("data_audit", contents={"a/b.json": "1", "figures/old.png": "png"})
    paper.artifact("data_audit", "notes.txt").write_text("mine")
    paper.record("data_audit", contents={"c.json": "2", "figures/new.png": "png"})
    folder = paper.artifact("data_audit").parent
    assert names_below(folder) == [
        "c.json",
        "figures/new.png",
        "gate.json",
        "notes.txt",
        "report.md",
    ]
    assert not (folder / "a").exists()


def test_nothing_outside_the_stage_is_removed_whatever_the_former_gate_lists(paper, monkeypatch):
    (paper.project.root / "precious.txt").write_text("mine")
    former = paper.record("data_audit", contents={"a.json": "1"})
    former["outputs"] = {"../../precious.txt": "0"}
    monkeypatch.setattr(publish, "_gate_or_none", lambda *_: former)
    paper.record("data_audit", contents={})
    assert (paper.project.root / "precious.txt").exists()


def test_a_job_writes_its_gate_into_its_own_folder_and_touches_no_evidence(paper):
    paper.walk("skeleton")
    before = {p: p.read_bytes() for p in paper.project.artifacts.rglob("*") if p.is_file()}
    job = paper.project.runs / "job"
    gate = paper.record("overfit", contents={"w.bin": "w"}, out=job)
    assert files.read_json(job / "gate.json") == gate
    assert {p: p.read_bytes() for p in paper.project.artifacts.rglob("*") if p.is_file()} == before


def test_free_play_leaves_a_gate_even_where_nothing_was_recorded_before(paper):
    gate = paper.record("tune", out=paper.project.runs / "play", data=gates.DataNow(None))
    assert (gate["verdict"], gate["previous"]) == ("open", None)
    assert gate["evidence_of"]["split"] is None


class Crash(BaseException):
    """A killed process, as far as the code under test can tell."""


@pytest.mark.parametrize("survived", range(8))
def test_a_crash_while_publishing_never_leaves_a_gate_falsely_open(paper, monkeypatch, survived):
    """Killed before the n-th move of a file into place, the gate is the old one over the old
    outputs, the new one, or visibly neither."""
    paper.record("data_audit", contents={"a.json": "1", "b.json": "1", "figures/f.png": "1"})
    real, moves = os.replace, []

    def replace(source, target):
        if len(moves) == survived:
            raise Crash
        moves.append(target)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    new = {"a.json": "2", "b.json": "2", "figures/f.png": "2"}
    shut = [check(verdict="shut", value=4.0)]
    crashed = False
    try:
        paper.record("data_audit", shut, contents=new)
    except Crash:
        crashed = True
    monkeypatch.setattr(os, "replace", real)
    status = paper.judge("data_audit").status
    outputs = [paper.artifact("data_audit", name).read_text() for name in ("a.json", "b.json")]
    if crashed:
        assert (status == "open") == (outputs == ["1", "1"])
        assert status in ("open", "tampered")
    else:
        assert status == "shut"
    folder = paper.artifact("data_audit").parent
    assert names_below(folder) == ["a.json", "b.json", "figures/f.png", "gate.json", "report.md"]
