import pytest
from paper_project import SOURCES, PaperProject

from {{cookiecutter.project_slug}}.harness import gates


@pytest.fixture
def walked(tmp_path):
    paper = PaperProject(tmp_path)
    paper.walk()
    return paper


def test_where_the_data_lies_and_what_the_owner_says_of_it_is_no_evidence(walked):
    walked.config["data"] |= {"path": "elsewhere", "statement": {"because": "new"}, "public": True}
    assert walked.statuses() == ["open"] * 6


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_comment_in_any_source_leaves_all_gates_open(walked, name):
    walked.write_source(name, "# words\n\n" + SOURCES[name].replace("\n", "  # more\r\n"))
    assert walked.statuses() == ["open"] * 6


@pytest.mark.parametrize("name", ["data.py", "preprocessing.py", "task.py"])
def test_changed_code_makes_every_gate_stale_and_is_named(walked, name):
    walked.write_source(name, SOURCES[name] + "x = 1\n")
    assert walked.statuses() == ["stale"] * 6
    assert walked.judge("tune").because == f"{name} changed"
    assert walked.judge("tune").command == "python run.py stage=data_audit"


def test_a_changed_model_leaves_the_gates_before_overfit_open(walked):
    walked.write_source("model.py", "class Net:\n    width = 32\n")
    assert walked.statuses() == ["open"] * 2 + ["stale"] * 4
    assert walked.judge("squeeze").command == "python run.py stage=overfit"


def test_a_changed_stage_concerns_its_own_gate_and_what_is_chained_to_it(walked):
    walked.write_source("stages/tune.py", "def run(cfg, run):\n    return 'other'\n")
    assert walked.statuses() == ["open"] * 4 + ["stale"] * 2
    assert walked.judge("tune").because == "stages/tune.py changed"
    assert walked.judge("squeeze").because == "'tune' is stale"


def test_a_file_that_a_stage_sets_itself_up_with_is_part_of_its_evidence(tmp_path):
    paper = PaperProject(tmp_path)
    paper.write_source("stages/tune.py", "from . import setup\n")
    paper.write_source("stages/setup.py", "from . import deeper\n")
    paper.write_source("stages/deeper.py", "x = 1\n")
    paper.walk()
    paper.write_source("stages/deeper.py", "x = 2\n")
    assert paper.statuses() == ["open"] * 4 + ["stale"] * 2
    assert paper.judge("tune").because == "stages/deeper.py changed"


def test_a_removed_source_is_said_to_be_gone(walked):
    (walked.project.source / "task.py").unlink()
    assert walked.judge("overfit").because == "task.py is gone"


def test_changed_settings_are_named_by_their_dotted_key_with_both_values(walked):
    walked.config["data"]["split"]["seed"] = 1
    walked.config["model"]["params"] = {"width": 16, "depth": 2}
    because = walked.judge("overfit").because
    assert because == "data.split.seed was 0, now 1; model.params.depth was absent, now 2"
    assert walked.judge("skeleton").because == "data.split.seed was 0, now 1"


def test_more_than_three_changes_are_counted(walked):
    for name in ("data.py", "preprocessing.py", "task.py", "model.py"):
        walked.write_source(name, "x = 1\n")
    assert walked.judge("tune").because == (
        "data.py changed; model.py changed; preprocessing.py changed; and 1 more"
    )


def test_a_changed_split_is_evidence_of_the_later_gates_too(walked):
    walked.record("data_audit", contents={"splits.json": "{}", "preprocessing.json": "{}"})
    because = walked.judge("overfit").because
    assert "the split changed (artifacts/data_audit/splits.json)" in because
    assert "the preprocessing state changed" in because


def test_other_data_makes_the_gates_stale_with_both_counts(walked):
    walked.data = gates.DataNow("d2", 4)
    assert walked.judge("data_audit").because == "the data changed (3 records, now 4)"
    walked.data = gates.DataNow("d2", 3)
    assert "still 3 records, with other content" in walked.judge("data_audit").because
