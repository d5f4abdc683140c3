"""docs/gates.md, the stage tables and the shown boards against the code that makes them."""

import ast
import re
from pathlib import Path

import documents
import pytest
from bakes import texts_of
from documents import ADAPTING, NAMES, PROJECT_README, Document

OTHERS = tuple(name for name in NAMES if name != ADAPTING)
BOARD = ["stage", "status", "warnings", "why"]


@pytest.fixture(scope="session")
def facts(default_project) -> dict:
    return documents.told(default_project, OTHERS)


@pytest.fixture(scope="session")
def gates(default_project) -> Document:
    return documents.read("docs/gates.md", default_project)


def listed_checks(gates: Document, stage: str, facts: dict) -> set[str]:
    """The checks that gates.md lists for a stage; overfit's preflight is not listed again."""
    listed = {row[0].strip("`") for row in documents.rows(gates.section(stage), "check")}
    return listed - {"finite_loss"} | (set(facts["preflight"]) if stage == "overfit" else set())


def returned_checks(project: Path, stage: str, facts: dict) -> set[str]:
    """The checks that `run` of a stage returns. A check's function is named as the check is."""
    path = project / project.name / "stages" / f"{stage}.py"
    functions = [n for n in ast.parse(path.read_text(encoding="utf-8")).body if named(n) == "run"]
    returned = functions[0].body[-1].value
    parts = returned.elts if isinstance(returned, ast.List) else [ast.Starred(returned)]
    found: set[str] = set()
    for part in parts:
        if not isinstance(part, ast.Starred):
            found.add(named(part.func))
        elif isinstance(part.value, ast.Call):  # run_checks(REGULARIZED, ...)
            found |= set(facts[named(part.value.args[0]).lower()])
        elif isinstance(part.value, ast.GeneratorExp):
            found |= set(facts["axes"])
        else:
            found |= set(facts["preflight" if stage == "overfit" else stage])
    return found


def named(node: ast.AST) -> str:
    """Its name, whatever kind of node it is."""
    return next((getattr(node, key) for key in ("name", "attr", "id") if hasattr(node, key)), "")


def test_gates_lists_exactly_the_checks_of_every_stage(gates, facts, default_project):
    for stage in facts["order"]:
        listed = listed_checks(gates, stage, facts)
        assert listed == returned_checks(default_project, stage, facts), stage


def test_every_check_that_the_code_makes_is_in_gates(gates, facts, default_project):
    made = set(facts["skeleton"]) | set(facts["axes"])
    for path, text in texts_of(default_project / default_project.name).items():
        made |= set(re.findall(r"\bCheck\(\s*\"(\w+)\"", text))
        if path.startswith("harness/checks/"):
            made |= set(re.findall(r"^    name(?:, \w+)? = \"(\w+)\"", text, re.MULTILINE))
    assert made == {row[0].strip("`") for row in documents.rows(gates.text, "check")}


def test_limits_in_gates_are_those_of_the_code(gates, facts):
    """A keyword in backticks before a number is a limit in code, with its value."""
    seen = 0
    for row in documents.rows(gates.text, "check"):
        limits = facts["limits_in_code"].get(row[0].strip("`"), {})
        told = re.findall(r"`(\w+)` (\d+(?:\.\d+)?(?:e-?\d+)?)", " ".join(row[1:]))
        for keyword, number in told:
            assert limits[keyword] == float(number), f"{row[0]}: {keyword}"
        seen += len(told)
    assert seen > 20


def test_limits_of_the_stages_are_all_in_gates(gates, facts):
    limits = {key for key in facts["keys"] if key.startswith("stage.limits.")}
    assert {key for key in limits if f"`{key}`" not in gates.text} == set()


def test_gates_tells_every_status_verdict_key_and_exit_code(gates, facts):
    told = {
        heading: [row[0] for row in documents.rows(gates.text, heading)]
        for heading in ("status", "key", "verdict", "code")
    }
    assert {cell.strip("`") for cell in told["status"]} == set(facts["statuses"])
    assert {cell.strip("`") for cell in told["verdict"]} == set(facts["verdicts"])
    assert set(re.findall(r"`(\w+)`", " ".join(told["key"]))) == set(facts["gate_keys"])
    assert set(map(int, told["code"])) == {*facts["exit_codes"], 130}


def test_both_readmes_list_the_stages_in_order(default_project, facts):
    for name in ("README.md", PROJECT_README):
        text = documents.read(name, default_project).text
        assert [row[0] for row in documents.rows(text, "stage")] == facts["order"], name


@pytest.mark.parametrize("name", NAMES)
def test_shown_boards_have_the_stages_and_counts_of_the_real_one(
    name, default_project, facts, gates
):
    lines = [
        line
        for block in documents.read(name, default_project).blocks
        for line in block.text.split("\n")
    ]
    for place in (at for at, line in enumerate(lines) if line.split()[:2] == BOARD[:2]):
        assert lines[place].split() == BOARD
        shown = [row.split(maxsplit=3) for row in lines[place + 1 : place + 7]]
        assert [row[0] for row in shown] == facts["order"]
        assert {row[1] for row in shown} <= set(facts["statuses"])
        for stage, _, _, why in shown:
            numbers = [int(number) for number in re.findall(r"\b\d+\b", why)]
            if "checks: " in why:
                assert numbers[0] == sum(numbers[1:]) == len(listed_checks(gates, stage, facts))


def test_the_board_that_is_shown_has_the_columns_of_the_code(default_project):
    text = (default_project / default_project.name / "harness" / "board.py").read_text("utf-8")
    assert re.findall(r"table\.add_column\(\"(\w+)\"", text) == BOARD


def test_adapting_lists_what_the_task_offers(default_project, facts):
    section = documents.read(ADAPTING, default_project).section("What task.py must offer")
    cells = " ".join(row[0] for row in documents.rows(section, "name"))
    offered = set(facts["attributes"]["task"]) - {"label_smoothing"}
    assert set(re.findall(r"`(\w+)`", cells)) == offered
