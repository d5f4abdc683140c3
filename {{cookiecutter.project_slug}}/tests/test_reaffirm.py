"""Reaffirming: gates that are stale only because checks or the loop changed."""

import pytest
from paper_project import ORDER, PaperProject, check

from {{cookiecutter.project_slug}}.harness import files, gates


@pytest.fixture
def walked(tmp_path):
    paper = PaperProject(tmp_path)
    paper.walk()
    return paper


def test_changed_checks_are_named_and_can_be_reaffirmed_stage_by_stage(walked):
    walked.write_source("harness/checks/loss.py", "def loss_at_init(pipeline):\n    return 9\n")
    assert walked.statuses() == ["stale"] * 6
    judged = walked.judge("data_audit")
    assert judged.because == "harness/checks/loss.py changed (loss_at_init)"
    assert judged.command == "python run.py stage=data_audit reaffirm=true"
    for stage in ORDER:
        own = walked.ask(stage, reaffirm=True)
        gate = walked.record(stage, contents={}, reaffirmed=own.because)
        assert gate["provenance"]["reaffirmed"] == [{"because": own.because, "seed": 0}]
    assert walked.statuses() == ["open"] * 6
    assert files.read_json(walked.artifact("overfit"))["outputs"].keys() == {"best.safetensors"}


def test_a_changed_helper_of_a_check_is_a_changed_check(tmp_path):
    paper = PaperProject(tmp_path)
    defined = "from . import probe\n\n\ndef loss_at_init(pipeline):\n    return probe.few\n"
    paper.write_source("harness/checks/loss.py", defined)
    paper.write_source("harness/checks/probe.py", "few = 3\n")
    paper.walk()
    assert paper.statuses() == ["open"] * 6
    paper.write_source("harness/checks/probe.py", "few = 3  # words\n")
    assert paper.statuses() == ["open"] * 6
    paper.write_source("harness/checks/probe.py", "few = 4\n")
    judged = paper.judge("data_audit")
    assert judged.because == "harness/checks/loss.py or what it imports changed (loss_at_init)"
    assert judged.reaffirmable
    assert gates.affected(paper.project, "data_audit") == {"loss_at_init"}


def test_a_changed_loop_can_be_reaffirmed_and_next_to_other_code_it_cannot(walked):
    walked.write_source("harness/loop.py", "def fit(model):\n    return None\n")
    assert all(walked.judge(stage).reaffirmable for stage in ORDER)
    walked.write_source("model.py", "class Net:\n    width = 3\n")
    assert walked.judge("skeleton").reaffirmable
    assert not walked.judge("overfit").reaffirmable
    assert not walked.judge("regularize").reaffirmable


def test_a_changed_loop_is_reaffirmed_along_the_whole_chain(walked):
    walked.write_source("harness/loop.py", "x = 1\n")
    for stage in ORDER:
        walked.record(stage, reaffirmed=walked.ask(stage, reaffirm=True).because)
    assert walked.statuses() == ["open"] * 6


def test_behind_a_gate_that_must_be_rerun_nothing_can_be_reaffirmed(walked):
    walked.write_source("stages/overfit.py", "x = 1\n")
    judged = walked.judge("regularize")
    assert (judged.because, judged.reaffirmable) == ("'overfit' is stale", False)


def test_behind_a_gate_with_another_result_nothing_can_be_reaffirmed(walked):
    walked.record("overfit", contents={"best.safetensors": "other weights"})
    walked.write_source("harness/loop.py", "x = 1\n")
    assert walked.judge("overfit").reaffirmable
    assert not walked.judge("regularize").reaffirmable


def test_reaffirming_is_refused_where_more_than_checks_changed(walked):
    walked.write_source("harness/loop.py", "x = 1\n")
    walked.write_source("stages/data_audit.py", "x = 1\n")
    with pytest.raises(gates.Refused) as refused:
        walked.ask("data_audit", reaffirm=True)
    assert str(refused.value) == (
        "Stage 'data_audit' cannot be reaffirmed: its gate is stale, harness/loop.py changed; "
        "stages/data_audit.py changed (artifacts/data_audit/gate.json).\n"
        "Run: python run.py stage=data_audit"
    )


def test_reaffirming_an_open_gate_is_refused_and_a_locked_stage_stays_locked(walked):
    with pytest.raises(gates.Refused, match="nothing to reaffirm"):
        walked.ask("tune", reaffirm=True)
    walked.write_source("harness/loop.py", "x = 1\n")
    with pytest.raises(gates.Refused, match=r"locked[\s\S]*stage=data_audit reaffirm=true"):
        walked.ask("tune", reaffirm=True)


def test_a_reaffirmation_that_shuts_the_gate_locks_what_follows(walked):
    walked.write_source("harness/checks/loss.py", "def loss_at_init(pipeline):\n    return 9\n")
    walked.record("data_audit", [check(verdict="shut", value=9.0)], reaffirmed="loss.py changed")
    assert walked.judge("data_audit").status == "shut"
    assert not walked.judge("skeleton").reaffirmable


def test_a_full_rerun_with_the_same_result_needs_no_new_training_behind_it(walked):
    walked.write_source("harness/checks/loss.py", "def loss_at_init(pipeline):\n    return 9\n")
    walked.record("data_audit")
    judged = walked.judge("skeleton")
    assert judged.reaffirmable
    assert judged.command == "python run.py stage=skeleton reaffirm=true"


def test_a_chain_whose_only_news_is_a_reaffirmed_gate_says_so(walked):
    walked.record("skeleton", [check()])  # step_oracle is not used any more
    judged = walked.judge("overfit")
    assert judged.because == "'skeleton' was recorded again with the same result but other checks"
    assert judged.reaffirmable


def test_only_the_affected_checks_need_to_run_again_the_others_stay(walked):
    walked.write_source("harness/checks/loss.py", "def loss_at_init(pipeline):\n    return 9\n")
    assert gates.affected(walked.project, "data_audit") == {"loss_at_init"}
    gate = walked.record("data_audit", [check(value=2.5)], reaffirmed="loss.py changed")
    assert [(c["name"], c["value"]) for c in gate["checks"]] == [
        ("loss_at_init", 2.5),
        ("step_oracle", 2.3),
    ]
    assert walked.judge("data_audit").status == "open"


def test_a_changed_loop_affects_every_check(walked):
    walked.write_source("harness/loop.py", "x = 1\n")
    assert gates.affected(walked.project, "tune") == {"loss_at_init", "step_oracle"}


def test_an_affected_check_that_was_not_run_again_keeps_the_gate_stale(walked):
    walked.write_source("harness/checks/loss.py", "def loss_at_init(pipeline):\n    return 9\n")
    walked.record("data_audit", [check("step_oracle")], reaffirmed="loss.py changed")
    assert walked.judge("data_audit").because == "harness/checks/loss.py changed (loss_at_init)"


def test_where_only_the_gate_before_was_reaffirmed_no_check_has_to_run(walked):
    walked.write_source("harness/checks/loss.py", "def loss_at_init(pipeline):\n    return 9\n")
    walked.record("data_audit", [check()], reaffirmed="loss.py changed")
    walked.record("skeleton", [check()], reaffirmed="loss.py changed")
    gate = walked.record("skeleton", [], reaffirmed="again")
    assert len(gate["checks"]) == 2
    assert walked.judge("skeleton").status == "open"


def test_provenance_stays_that_of_the_run_and_lists_each_later_look(walked):
    limit = {"limit": "max_gap", "shipped": 0.3, "value": 0.5}
    walked.record("overfit", provenance={"seed": 3, "hardware": "gpu"}, loosened=[limit])
    for why in ("loss.py changed", "loop.py changed"):
        gate = walked.record("overfit", provenance={"hardware": "cpu"}, reaffirmed=why)
    assert (gate["provenance"]["seed"], gate["provenance"]["hardware"]) == (3, "gpu")
    assert gate["provenance"]["reaffirmed"] == [
        {"because": "loss.py changed", "hardware": "cpu"},
        {"because": "loop.py changed", "hardware": "cpu"},
    ]
    assert gate["waivers"] == [{"kind": "limit", "stage": "overfit", **limit}]


def test_figures_of_the_former_run_stay(walked):
    walked.record("overfit", contents={"best.safetensors": "w", "figures/curves.png": "png"})
    walked.record("overfit", contents={"figures/loss.png": "png"}, reaffirmed="loss.py changed")
    figures = walked.artifact("overfit", "figures")
    assert sorted(path.name for path in figures.iterdir()) == ["curves.png", "loss.png"]


# ---- a waiver after the fact --------------------------------------------------------------------

WAIVER = gates.active_waivers([{"check": "curve_shape", "reason": "the last epoch is an outlier"}])


def shut_by_curve_shape(paper, stage="overfit"):
    paper.walk("skeleton")
    paper.record(stage, [check(), check("curve_shape", "shut", 2.0, 1.0)])


def test_a_waiver_opens_a_shut_gate_without_training_again(tmp_path):
    paper = PaperProject(tmp_path)
    shut_by_curve_shape(paper)
    own = paper.ask("overfit", reaffirm=True, waivers=WAIVER)
    checks = [check(), check("curve_shape", "shut", 2.0, 1.0)]
    gate = paper.record("overfit", checks, contents={}, reaffirmed=own.because, waivers=WAIVER)
    assert gate["verdict"] == "open"
    assert paper.judge("overfit").status == "open"


def test_a_waiver_of_another_check_does_not(tmp_path):
    paper = PaperProject(tmp_path)
    shut_by_curve_shape(paper)
    other = gates.active_waivers([{"check": "lr_range", "reason": "seen"}])
    with pytest.raises(gates.Refused, match="cannot be reaffirmed: its gate is shut"):
        paper.ask("overfit", reaffirm=True, waivers=other)


def test_a_waiver_does_not_revive_evidence_about_other_code(tmp_path):
    paper = PaperProject(tmp_path)
    shut_by_curve_shape(paper)
    paper.write_source("model.py", "class Net:\n    width = 3\n")
    with pytest.raises(gates.Refused, match="cannot be reaffirmed"):
        paper.ask("overfit", reaffirm=True, waivers=WAIVER)
