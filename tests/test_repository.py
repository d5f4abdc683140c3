"""The repository around the template: what its files promise to each other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from bakes import ROOT, read_pyproject
from packaging.requirements import Requirement

# Under the AGPL, or a licence that forbids some uses: a project must be free to take any licence.
BANNED = {"alibi", "alibi-detect", "deepchecks", "fastdup", "ultralytics", "yolov5"}


def names(lines: list[str]) -> set[str]:
    return {Requirement(line).name.lower().replace("_", "-") for line in lines}


def requirement_lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def declared(project: Path) -> list[str]:
    """Every requirement in the project's pyproject.toml, extras included."""
    content = read_pyproject(project)
    extras = content["project"]["optional-dependencies"].values()
    return content["project"]["dependencies"] + [line for extra in extras for line in extra]


@pytest.fixture(params=["template", "project"])
def tree(request, default_project) -> Path:
    return ROOT if request.param == "template" else default_project


def test_pre_commit_hooks_need_nothing_but_pypi(tree):
    path = tree / ".pre-commit-config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {repo["repo"] for repo in config["repos"]} <= {"local", "meta"}
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    assert hooks.keys() == {
        "ruff-check",
        "ruff-format",
        "end-of-file-fixer",
        "check-yaml",
        "no-debugger",
        "no-weights",
        "check-added-large-files",
    }
    for hook in hooks.values():
        assert hook["language"] in {"python", "pygrep", "fail"}
        assert all("==" in line for line in hook.get("additional_dependencies", []))
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(path)]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_pre_commit_catches_weights_and_debuggers(tree):
    config = yaml.safe_load((tree / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    for name in ("a.pt", "runs/b.ckpt", "artifacts/overfit/c.safetensors", "d.pkl", "e.pth"):
        assert re.search(hooks["no-weights"]["files"], name), name
    assert not re.search(hooks["no-weights"]["files"], "artifacts/overfit/gate.json")
    assert re.search(hooks["no-debugger"]["entry"], "    breakpoint()  # look")
    assert re.search(hooks["no-debugger"]["entry"], "  pdb.set_trace()")
    assert not re.search(hooks["no-debugger"]["entry"], "# the breakpoint() of the curve")


def test_pre_commit_uses_the_ruff_that_the_tests_use(tree, default_project):
    text = (tree / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    pins = set(re.findall(r"ruff==([\d.]+)", text))
    assert len(pins) == 1
    ruff = next(line for line in declared(default_project) if line.startswith("ruff"))
    assert Requirement(ruff).specifier.contains(pins.pop())


@pytest.mark.parametrize("target", ["install", "walk", "test", "lint"])
def test_both_makefiles_have_the_same_targets(tree, target):
    text = (tree / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", text, re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE).group(1).split()
    assert target in phony


def test_the_walk_runs_the_six_stages_in_their_order_then_the_board(default_project):
    text = (default_project / "Makefile").read_text(encoding="utf-8")
    recipe = text.split("walk: install\n")[1].split("\n\n")[0]
    order = (default_project / default_project.name / "stages" / "__init__.py").read_text()
    stages = re.findall(r'"(\w+)"', order.split("ORDER")[1].split(")")[0])
    assert len(stages) == 6
    expected = [*(f"\t$(RUN) stage={stage}" for stage in stages), "\t$(RUN)"]
    assert recipe.split("\n") == expected


def test_ci_runs_the_tests_and_a_walk_and_stops_at_the_first_failure():
    path = ROOT / ".ci" / "run"
    text = path.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert {"make test", "make walk"} <= set(text.splitlines())
    assert os.name == "nt" or os.access(path, os.X_OK)


def test_the_template_installs_what_the_project_needs_for_its_own_tests(default_project):
    project = read_pyproject(default_project)["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["test"]
    assert set(needed) <= set(requirement_lines(ROOT / "requirements.txt"))


def test_torch_is_pinned_the_same_in_both_trees_and_within_the_range(default_project):
    pins = requirement_lines(ROOT / "constraints.txt")
    assert pins == requirement_lines(default_project / "constraints.txt")
    assert len(pins) == 1
    (version,) = re.fullmatch(r"torch==([\d.]+)", pins[0]).groups()
    torch = next(line for line in declared(default_project) if line.startswith("torch"))
    assert Requirement(torch).specifier.contains(version)


def test_every_install_in_the_makefiles_reads_the_constraints(tree):
    text = (tree / "Makefile").read_text(encoding="utf-8")
    installs = [line for line in text.splitlines() if "pip install" in line]
    assert installs
    assert all("-c constraints.txt" in line for line in installs)


def test_nothing_under_the_agpl_can_be_installed(default_project):
    lines = requirement_lines(ROOT / "requirements.txt")
    assert not BANNED & names(lines + declared(default_project))


def test_the_template_is_under_the_mit_licence_without_a_year():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.startswith("MIT License\n\nCopyright (c) takin-template developers\n")
    assert not re.search(r"\d{4}", text)


def test_cruft_leaves_history_evidence_and_waivers_alone(default_project):
    skip = read_pyproject(default_project)["tool"]["cruft"]["skip"]
    assert {".git", "artifacts", "configs/waivers.yaml"} <= set(skip)


def test_the_questions_are_few_and_asked_in_plain_words(default_project):
    template = yaml.safe_load((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
    questions = [key for key in template if not key.startswith("_")]
    assert questions == [
        "project_name",
        "project_slug",
        "description",
        "author_name",
        "license",
        "problem",
    ]
    assert list(template["__prompts__"]) == questions
    for key in ("license", "problem"):
        assert template["__prompts__"][key].keys() == {"__prompt__", *template[key]}
