"""The documents against a bake: commands, outputs, trees, links, and every word set as code."""

import ast
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import documents
import pytest
from bakes import ROOT, TEMPLATE, files_of, read_pyproject, texts_of
from cookiecutter.cli import main as cookiecutter_command
from documents import ADAPTING, NAMES, PROJECT_README, Document

OTHERS = tuple(name for name in NAMES if name != ADAPTING)
MADE_LATER = {"artifacts/", "runs/"}  # by the first launch; in no bake
ENVIRONMENT = {". .venv/bin/activate", "python -m pytest -m faults"}
CHEAP = {"--help", "--cfg", "-sc"}  # what run.py answers without asking a gate
REFUSED = {("optimizer.lrr=0.1",), ("optimizer.lr=abc",)}  # shown because they are refused
TO_BE_MADE = {("task.metric=cohen_kappa",)}  # docs/adapting.md shows how


@pytest.fixture(params=NAMES)
def document(request, default_project) -> Document:
    return documents.read(request.param, default_project)


@pytest.fixture(scope="session")
def facts(default_project) -> dict:
    return documents.told(default_project, OTHERS)


@pytest.fixture(scope="session")
def adapted_project(default_project, tmp_path_factory) -> Path:
    return documents.adapt(default_project, tmp_path_factory.mktemp("adapted"))


@pytest.fixture
def typed(document, default_project, adapted_project) -> dict:
    """What becomes of the document's launches and settings in the project they are meant for."""
    if document.name == ADAPTING:
        return documents.told(adapted_project, (ADAPTING,))
    return documents.told(default_project, OTHERS)


@cache
def run(project: Path, arguments: tuple[str, ...]) -> subprocess.CompletedProcess:
    """run.py in a fresh bake. Nothing that is asked here may leave a file."""
    before = files_of(project)
    done = subprocess.run(
        [sys.executable, "run.py", *arguments],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        env=os.environ | documents.QUIET,
    )
    assert files_of(project) == before
    return done


# ---- commands -----------------------------------------------------------------------------------


def recipes(folder: Path) -> set[str]:
    """The commands of a Makefile, as typed with its environment active."""
    text = (folder / "Makefile").read_text(encoding="utf-8")
    found = re.findall(r"^\t(?:.*\|\| )?(.*)$", text, re.MULTILINE)
    for name, value in [("$(BIN)/python", "python"), ("$(RUN)", "python run.py"), ("--quiet ", "")]:
        found = [line.replace(name, value) for line in found]
    return {line.replace("$(PYTHON) -m venv $(VENV)", "python3 -m venv .venv") for line in found}


def targets(folder: Path) -> set[str]:
    text = (folder / "Makefile").read_text(encoding="utf-8")
    return set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE).group(1).split())


def test_every_command_can_be_typed(document, default_project):
    for command, folder in document.commands():
        words = shlex.split(command, comments=True)
        if words[0] == "make":
            both = targets(default_project) if document.name.startswith("docs/") else set()
            assert set(words[1:]) <= targets(folder) | both, command
        elif words[:2] == ["python", "serve.py"]:
            assert_serve_takes(words[2:], default_project)
        elif words[:3] == ["python", "-m", "cookiecutter"]:
            cookiecutter_command.make_context("cookiecutter", words[3:])
        elif words[:2] != ["python", "run.py"]:
            plain = re.sub(r"\.\[\w+\]", ".[test]", command)  # extras have a test of their own
            assert plain in ENVIRONMENT | recipes(folder) or "python run.py -sc" in command


def assert_serve_takes(words: list[str], project: Path) -> None:
    tree = ast.parse((project / "serve.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    declared = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    options = {word for word in words if word.startswith("--")}
    assert options <= {call.args[0].value for call in declared}
    assert len(words) - len(options) == 2


def test_every_launch_composes_and_fits_the_schema(document, typed):
    found = typed["launches"]
    for words in document.launches():
        overrides = tuple(documents.overrides_of(words))
        others = [word for word in words if word not in overrides and not word.startswith("-")]
        assert set(others) <= {"job", "install=bash"}, words
        refused = found[overrides] is not None
        assert refused == (overrides in REFUSED), f"{words}: {found[overrides]}"


def test_every_launch_that_needs_no_gate_works_in_a_new_project(document, default_project):
    for words in document.launches():
        if (not words or CHEAP & set(words)) and not set(words) & {"optimizer=sgd_warm"}:
            done = run(default_project, tuple(words))
            assert done.returncode == 0, f"{words}: {done.stdout}"


def test_shown_output_of_a_new_project_is_exact(document, default_project):
    for block in document.blocks:
        for command, output in block.commands() if block.info == "fresh" else []:
            words = shlex.split(command)
            assert words[:2] == ["python", "run.py"]
            done = run(default_project, tuple(words[2:]))
            lines = [line.rstrip() for line in done.stdout.strip("\n").split("\n")]
            assert lines == output.rstrip("\n").split("\n"), command


def test_the_first_screen_has_the_two_commands(default_project):
    for name in ("README.md", PROJECT_README):
        top = "\n".join(documents.read(name, default_project).text.split("\n")[:60])
        assert {"make walk", "make test"} <= set(re.findall(r"make \w+", top)), name


# ---- trees and links ----------------------------------------------------------------------------


def root_of(lines: list[str], project: Path) -> Path:
    assert lines[0] in ("takin-template/", f"{project.name}/")
    return ROOT if lines[0] == "takin-template/" else project


def test_every_path_in_a_tree_exists(document):
    for lines in document.trees():
        root, paths = root_of(lines, document.project), documents.tree_paths(lines)
        assert [p for p in paths if p not in MADE_LATER and not (root / p).exists()] == []
        assert [p for p in paths if p.endswith("/") and (root / p).is_file()] == []


def test_every_tree_shows_all_there_is(document):
    for lines in document.trees():
        root, paths = root_of(lines, document.project), documents.tree_paths(lines)
        assert top_level(root) - {path.split("/")[0] for path in paths} == set()
        if root == document.project:
            inside = [p for p in paths if p.startswith(f"{root.name}/")]
            shown = {p.split("/")[1] for p in inside}
            modules = {path.parts[0] for path in files_of(root / root.name)} - {"__init__.py"}
            assert modules - shown == set()


def top_level(root: Path) -> set[str]:
    if root != ROOT:
        return {path.parts[0] for path in files_of(root)}
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        pytest.skip("not a git repository")
    return {line.strip('"').split("/")[0] for line in done.stdout.splitlines()}


def test_every_relative_link_resolves(document):
    for link in document.links():
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.path.parent / path).resolve() if path else document.path
        assert target.exists(), link
        if anchor:
            assert anchor in documents.anchors(target.read_text(encoding="utf-8")), link


# ---- words --------------------------------------------------------------------------------------

PATH = re.compile(r"[\w.<>*{}-]*/[\w.<>*{}/-]*|[\w-]+\.(py|yaml|json|jsonl|md|png|safetensors|csv)")
# What a reader may have or see, and nothing of the project
FOREIGN = {"DIR/CLASS/*.png", "*.safetensors", ".venv/bin/activate"}
FIGURE = re.compile(r"([a-z]\w*?)_\w+\.png")


def all_text(project: Path) -> str:
    """Code and configuration of the project."""
    return "\n".join(text for name, text in texts_of(project).items() if name != "README.md")


def is_told(name: str, text: str) -> bool:
    """Whether the code writes a file of this name: as it is, or put together from a stem."""
    figure = FIGURE.fullmatch(name)
    stems = [name[:cut] for cut in range(4, len(name))] if figure else []
    return f'"{name}"' in text or any(f'"{stem}{{' in text for stem in stems)


def test_every_setting_named_in_the_prose_fits_some_stage(document, typed):
    found = typed["settings"]
    for words in map(tuple, document.settings()):
        if words not in TO_BE_MADE:
            assert (found[words] is not None) == (words in REFUSED), f"{words}: {found[words]}"


def test_every_dotted_name_in_the_prose_exists(document, facts, default_project):
    """A key of the configuration, a file, a module, or something of the four files."""
    paths = [path.as_posix() for path in files_of(default_project) + files_of(TEMPLATE.parent)]
    text = all_text(default_project)
    for name in document.dotted():
        module, _, attribute = name.partition(".")
        assert (
            name in facts["keys"]
            or attribute in facts["attributes"].get(module, ())
            or any(path.endswith((f"/{name}", f"/{name.replace('.', '/')}.py")) for path in paths)
            or name in paths
            or is_told(name, text)
        ), name


def test_every_path_in_the_prose_exists(document, default_project, adapted_project):
    text, package = all_text(default_project), default_project / default_project.name
    for path in document.in_code:
        if not PATH.fullmatch(path) or path in FOREIGN or f"{path.rstrip('/')}/" in MADE_LATER:
            continue
        first, last = path.split("/")[0], path.rstrip("/").split("/")[-1]
        made = first in ("artifacts", "runs", "walk") or path.count("/") == path.endswith("/")
        assert any(
            (root / path).exists() for root in (ROOT, default_project, package, adapted_project)
        ) or (made and (last.startswith("<") or is_told(last, text) or last in text)), path


def test_every_single_word_in_code_is_a_word_of_the_project(document, default_project):
    words = set(re.findall(r"\w+", all_text(default_project)))
    words |= set(re.findall(r"\w+", (ROOT / "Makefile").read_text(encoding="utf-8")))
    examples = documents.read(ADAPTING, default_project).text
    words |= {"cruft", *re.findall(r"^(?:class|def) (\w+)", examples, re.MULTILINE)}
    named = {text for text in document.in_code if re.fullmatch(r"[A-Za-z_]\w*", text)}
    assert named - words == set()


def test_options_that_the_prose_overrides_exist(document, adapted_project):
    option = re.compile(r"(?:override /|- )(\w+):(?: ([a-z]\w*))?")
    for match in filter(None, map(option.fullmatch, document.in_code)):
        group, choice = match.groups()
        folder = adapted_project / "configs" / group
        assert folder.is_dir(), match.group()
        assert choice is None or (folder / f"{choice}.yaml").exists(), match.group()


def test_extras_that_are_named_exist(document):
    extras = read_pyproject(document.project)["project"]["optional-dependencies"]
    assert set(re.findall(r"\.\[(\w+)\]", document.text)) <= set(extras)


# ---- the project's own page ---------------------------------------------------------------------

NASTY = [
    'It\'s "quoted" `code` <b>bold</b> #1 # \\',
    "**stars** _under_ [link](x) ![img](y) | a | b & &amp; ~~no~~ $x$ {brace} 模型 🐐",
    "# not a heading",
    "C:\\new\\*x* \\`code\\` \\",
    "1. not a list",
]


@pytest.mark.parametrize("name", NASTY)
def test_title_and_description_are_shown_as_answered(bake, name):
    from markdown_it import MarkdownIt  # comes with rich

    project = bake(project_name=name, project_slug="net", description=name)
    page = (project / "README.md").read_text(encoding="utf-8")
    tokens = MarkdownIt("commonmark").parse(page)[:6]
    kinds = ["heading_open", "inline", "heading_close"]
    kinds += ["paragraph_open", "inline", "paragraph_close"]
    assert [token.type for token in tokens] == kinds
    for token in (tokens[1], tokens[4]):
        assert {child.type for child in token.children} <= {"text", "text_special"}
        assert "".join(child.content for child in token.children) == name


def test_no_place_of_one_machine_is_in_the_documents(document):
    assert not re.search(r"/(tmp|work|root|home)/", document.text)
