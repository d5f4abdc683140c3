"""What a bake gives: exactly these files, valid, lint-free and the same every time."""

import datetime
import json
import re
import subprocess
import sys

import pytest
import yaml
from bakes import DEFAULT_SLUG, ROOT, TEMPLATE, files_of, read_pyproject, texts_of

LICENSES = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))["license"]
FILE_LIST = ROOT / "tests" / "project_files.txt"
LONGEST_SLUG = "a_name_of_forty_letters_is_long_for_code"

# Answers with everything that has a meaning in TOML, Markdown, Python, YAML, Jinja or a shell.
HOSTILE_TEXT = 'It\'s "quoted", C:\\new\\tab {braces} 100 % $HOME `x` <b> & #1 : é 模型 🐐 \\'


def test_a_bake_has_exactly_the_listed_files(default_project):
    """tests/project_files.txt is the list; {slug} stands for the project's slug."""
    listed = FILE_LIST.read_text(encoding="utf-8").split("\n")[:-1]
    assert listed == sorted(listed), "tests/project_files.txt is not sorted"
    expected = {line.replace("{slug}", DEFAULT_SLUG) for line in listed}
    found = {path.as_posix() for path in files_of(default_project)}
    assert {"new": found - expected, "gone": expected - found} == {"new": set(), "gone": set()}


def test_the_choice_of_licence_changes_no_other_file_but_pyproject(bake, default_project):
    default = texts_of(default_project)
    other = texts_of(bake(license="Proprietary"))
    assert {name for name in default if default[name] != other[name]} <= {
        "LICENSE",
        "README.md",
        "pyproject.toml",
    }
    assert default.keys() == other.keys()


@pytest.mark.parametrize("license_name", LICENSES)
def test_every_licence_is_whole_and_names_the_owner(bake, license_name):
    project = bake(license=license_name, author_name='Åsa "Ace" Öberg')
    text = (project / "LICENSE").read_text(encoding="utf-8")
    opening, closing = {
        "MIT": ("MIT License\n", "DEALINGS IN THE\nSOFTWARE.\n"),
        "BSD-3-Clause": ("BSD 3-Clause License\n", "POSSIBILITY OF SUCH DAMAGE.\n"),
        "Apache-2.0": ("\n" + " " * 33 + "Apache License\n", "limitations under the License.\n"),
        "Proprietary": ("Copyright (c) ", "OR ITS USE.\n"),
    }[license_name]
    assert text.startswith(opening)
    assert text.endswith(closing)
    assert 'Åsa "Ace" Öberg' in text
    declared = read_pyproject(project)["project"]["license"]
    assert declared == license_name.replace("Proprietary", "LicenseRef-Proprietary")


def test_no_jinja_is_left(default_project):
    left = re.compile(r"(?<!\$)\{\{-?\s*\w*cookiecutter|\{%|\{#|\bcookiecutter\s*[.\[]\s*[\"'_a-z]")
    found = {
        f"{name}: {match.group()}"
        for name, text in texts_of(default_project).items()
        if (match := left.search(text))
    }
    assert found == set()


def test_no_date_is_written(bake):
    """Or two bakes would differ, and `cruft update` would find a change every year."""
    year = str(datetime.date.today().year)
    for license_name in LICENSES:
        project = bake(license=license_name)
        for name in ("LICENSE", "README.md", "pyproject.toml"):
            assert year not in (project / name).read_text(encoding="utf-8"), name
    clocks = re.compile(r"\{%-?\s*now\b|\{\{[^}]*(uuid4|random_ascii_string|strftime)")
    for path in files_of(TEMPLATE):
        assert not clocks.search((TEMPLATE / path).read_bytes().decode("utf-8", "replace")), path


def test_two_bakes_are_byte_identical(bake):
    answers = {"project_name": HOSTILE_TEXT, "project_slug": "same", "author_name": HOSTILE_TEXT}
    one, two = bake(**answers), bake(**answers)
    assert files_of(one) == files_of(two)
    for path in files_of(one):
        assert (one / path).read_bytes() == (two / path).read_bytes(), path
        assert (one / path).stat().st_mode == (two / path).stat().st_mode, path


def test_every_text_ends_with_one_newline_and_has_unix_line_ends(default_project):
    for name, text in texts_of(default_project).items():
        assert "\r" not in text, name
        assert text == "" or (text.endswith("\n") and not text.endswith("\n\n")), name
        assert not re.search(r"[ \t]+$", text, re.MULTILINE), f"{name}: blanks at a line's end"


@pytest.mark.parametrize("slug", [DEFAULT_SLUG, "a", "z", LONGEST_SLUG])
def test_ruff_finds_nothing_whatever_the_slug(bake, slug):
    project = bake(project_slug=slug)
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
        done = subprocess.run(ruff, cwd=project, capture_output=True, text=True, encoding="utf-8")
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_python_file_compiles_and_every_yaml_file_loads(default_project):
    for name, text in texts_of(default_project).items():
        if name.endswith(".py"):
            compile(text, name, "exec")
        if name.endswith((".yaml", ".yml")):
            yaml.safe_load(text)


@pytest.mark.parametrize("text", [HOSTILE_TEXT, "Ünïcødé 'n' \"such\"", '"', "'", "\\", "x\\'"])
def test_pyproject_says_exactly_what_was_answered(bake, text):
    project = bake(project_name=text, project_slug="net", description=text, author_name=text)
    declared = read_pyproject(project)["project"]
    assert declared["description"] == text
    assert declared["authors"] == [{"name": text}]
    assert declared["name"] == "net"
    assert text in (project / "LICENSE").read_text(encoding="utf-8")


def test_the_slug_is_the_only_answer_in_python_files(bake):
    project = bake(
        project_name="Wombat name", project_slug="net", description="Wombat", author_name="Wombat"
    )
    told = {name for name, text in texts_of(project).items() if "Wombat" in text}
    assert told <= {"LICENSE", "README.md", "pyproject.toml"}


def test_the_package_is_copied_as_it_stands_in_the_template(bake):
    """No Jinja inside: the code can be read, edited and linted where it is written."""
    project, package = bake(project_slug="net"), TEMPLATE / TEMPLATE.name
    for path in files_of(package):
        assert (project / "net" / path).read_bytes() == (package / path).read_bytes(), path


def test_git_ignores_weights_and_runs_but_no_evidence(bake):
    project = bake()
    if not (project / ".git").exists():
        pytest.skip("git is not installed")
    ignored = [
        "runs/overfit/1/history.jsonl",
        "artifacts/squeeze/bundle/model.safetensors",
        "wandb/offline-run/x",
        ".venv/bin/python",
        f"{DEFAULT_SLUG}/__pycache__/x.pyc",
    ]
    kept = [
        "artifacts/data_audit/gate.json",
        "artifacts/data_audit/report.md",
        "artifacts/data_audit/figures/classes.png",
        "artifacts/squeeze/bundle/card.json",
        "artifacts/test_ledger.jsonl",
        "configs/data/digits.yaml",
        f"{DEFAULT_SLUG}/data.py",
    ]
    command = ["git", "check-ignore", "--stdin"]
    text = "\n".join(ignored + kept)
    done = subprocess.run(command, cwd=project, input=text, capture_output=True, text=True)
    assert done.stdout.splitlines() == ignored
