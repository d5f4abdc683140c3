"""Names that would break the project are refused with a way out; all others work."""

import importlib.metadata
import keyword
import os
import re
import subprocess
import sys

import pytest
from bakes import DEFAULT_SLUG, ROOT, files_of
from cookiecutter.utils import create_env_with_context
from packaging.requirements import Requirement

# One of each kind that the hook refuses by its letters or by its meaning.
REFUSED_SLUGS = {
    "class": "keyword",
    "match": "keyword",
    "random": "standard library",
    "test": "standard library",
    "imp": "standard library",
    "torch": "dependency",
    "hydra": "dependency",
    "sklearn": "dependency",
    "scikit_learn": "dependency",
    "pytest": "dependency",
    "wandb": "dependency",
    "tests": "the project itself",
    "configs": "the project itself",
    "run": "the project itself",
    "serve": "the project itself",
    "artifacts": "the project itself",
    "harness": "the project itself",
    "license": "the project itself",
    "print": "built-in",
    "con": "Windows",
    "lpt1": "Windows",
    "1net": "digit",
    "123 net": "character ' '",
    "my-net": "character '-'",
    "my.net": "character '.'",
    "my net": "character ' '",
    "Net": "upper case",
    "nét": "character",
    "模型": "character",
    "__init__": "begins or ends with _",
    "_net": "begins or ends with _",
    "net_": "begins or ends with _",
    "$(touch x)": "character",
    "'; import os #": "character",
    '"': "character",
    "x" * 41: "at most 40",
}

# Not the name of one new folder: these must be stopped before any folder is made.
REFUSED_PATHS = [
    "",
    " ",
    ".",
    "..",
    "a/b",
    "a/b/c",
    "a/",
    "/",
    "../x",
    "../../x",
    "..\\x",
    "a\\b",
    "C:x",
    "C:\\x",
    "a\nb",
    "a\tb",
    "a\x1bb",
    "a\x7fb",
    "x" * 300,
    "模" * 100,
]

REFUSED_TEXTS = {
    "project_name": ["Two\nlines", "Bell\x07", "Line\u2028separator", "   "],
    "description": ["Two\r\nlines", "Escape \x1b[31m", "Next\x85line", "Delete\x7f"],
    "author_name": ["Two\nlines", "Tab\tbed", ""],
}

# Everything here is a fine name for a project.
WORKING_NAMES = {
    'It\'s "quoted"': "it_s_quoted",
    "Überraschung 模型": "uberraschung_mo_xing",
    "Привет мир": "privet_mir",
    "مرحبا": "mrhb",
    "Café — 100 % réel": "cafe_100_reel",
    "🐐 Goat": "goat",
    "C:\\new\\table": "c_new_table",
    "$HOME & `whoami`": "home_whoami",
    "a {brace} [bracket] <tag>": "a_brace_bracket_tag",
    "%s %(x)d {}": "s_x_d",
    "'''": None,
    '""" + x + """': "x",
    "x" * 500: "x" * 40,
    "word " * 50: "word_word_word_word_word_word_word_word",
    "#!/usr/bin/env": "usr_bin_env",
    "../../etc/passwd": "etc_passwd",
    "A": "a",
}


def assert_nothing_is_left(tmp_path):
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == []


def suggestion(output: str) -> str:
    """What a refusal says to use instead: the rest of its line, or up to the quote around it."""
    return re.search(r"Use: ([^\n\"']*)", output).group(1)


def filled_hook(text: str) -> dict:
    """The names in pre_gen_project.py after cookiecutter has put `text` in for every answer."""
    source = (ROOT / "hooks" / "pre_gen_project.py").read_text(encoding="utf-8")
    answers = dict.fromkeys(("project_name", "project_slug", "description", "author_name"), text)
    context = {"cookiecutter": answers}
    filled = create_env_with_context(context).from_string(source).render(**context)
    space = {"__name__": "pre_gen_project"}
    exec(compile(filled.encode("utf-8"), "pre_gen_project.py", "exec"), space)
    return space


@pytest.fixture(scope="module")
def hook() -> dict:
    return filled_hook("net")


@pytest.mark.parametrize("slug", REFUSED_SLUGS)
def test_a_bad_slug_is_refused_in_the_first_line_and_the_suggestion_works(
    run_cookiecutter, bake, tmp_path, slug
):
    done = run_cookiecutter(f"project_slug={slug}")
    assert done.returncode != 0
    first = done.stderr.splitlines()[0]
    assert first.startswith("project_slug ")
    assert REFUSED_SLUGS[slug] in first
    assert_nothing_is_left(tmp_path)
    assert bake(project_slug=suggestion(first)).is_dir()


@pytest.mark.parametrize("slug", REFUSED_PATHS)
def test_a_slug_that_is_a_path_makes_no_folder_anywhere(run_cookiecutter, bake, tmp_path, slug):
    done = run_cookiecutter(f"project_slug={slug}")
    assert done.returncode != 0
    assert "does not name one new folder" in done.stderr
    assert_nothing_is_left(tmp_path)
    assert bake(project_slug=suggestion(done.stderr.splitlines()[-1])).is_dir()


def test_an_absolute_slug_makes_no_folder_and_removes_none(run_cookiecutter, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    for slug in (kept, kept / "x", kept / "x" / "y"):
        assert run_cookiecutter(f"project_slug={slug}").returncode != 0
    assert sorted(os.listdir(tmp_path)) == ["kept", "out"]
    assert os.listdir(kept) == []


@pytest.mark.parametrize("slug", ["a/b", "../x", ".."])
def test_a_path_is_refused_without_hooks_and_with_overwriting_too(run_cookiecutter, tmp_path, slug):
    done = run_cookiecutter("--accept-hooks", "no", "-f", f"project_slug={slug}")
    assert done.returncode != 0
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("slug", [path for path in REFUSED_PATHS if len(path) < 40])
def test_the_hook_knows_paths_as_well(hook, slug):
    """A replayed answer does not pass the check in cookiecutter.json."""
    assert hook["problem_with_slug"](slug)


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name in REFUSED_TEXTS for text in REFUSED_TEXTS[name]]
)
def test_control_characters_and_blanks_are_refused(run_cookiecutter, bake, tmp_path, name, text):
    done = run_cookiecutter(f"{name}={text}", "project_slug=net")
    assert done.returncode != 0
    first = done.stderr.splitlines()[0]
    assert re.match(rf"{name} '.*' (has the control character U\+[0-9A-F]{{4}}|is blank)", first)
    assert_nothing_is_left(tmp_path)
    assert bake(**{name: suggestion(first), "project_slug": "net"}).is_dir()


def test_a_folder_that_was_there_before_a_refusal_stays(run_cookiecutter, tmp_path):
    mine = tmp_path / "out" / "torch" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert run_cookiecutter("-f", "project_slug=torch").returncode != 0
    assert mine.read_text() == "mine"
    assert os.listdir(mine.parent) == ["mine.txt"]


@pytest.mark.parametrize("name", WORKING_NAMES)
def test_names_with_quotes_accents_and_other_alphabets_work(bake, name):
    slug = WORKING_NAMES[name]
    project = bake(project_name=name, **({} if slug else {"project_slug": "net"}))
    assert project.name == (slug or "net")
    assert files_of(project)


def test_a_name_made_of_symbols_alone_asks_for_a_slug(run_cookiecutter, tmp_path):
    done = run_cookiecutter("project_name=🐐")
    assert done.returncode != 0
    assert suggestion(done.stderr) == "my_project"
    assert_nothing_is_left(tmp_path)


def test_every_reserved_word_is_refused_and_has_a_suggestion(hook):
    words = {*keyword.kwlist, *keyword.softkwlist, *sys.stdlib_module_names, *hook["STDLIB"]}
    words |= hook["DEPENDENCIES"] | hook["OWN_NAMES"] | hook["WINDOWS_DEVICES"]
    for word in words:
        assert hook["problem_with_slug"](word), word
        suggested = hook["suggest_slug"](word)
        assert hook["problem_with_slug"](suggested) is None, (word, suggested)


def test_everything_the_project_installs_is_a_reserved_name(hook):
    """By import name and by distribution name, through all that the dependencies pull in."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    waiting = [line for line in lines if line and not line.startswith("#")]
    distributions = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = requirement.name.lower().replace("_", "-")
        if name in distributions or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        distributions.add(name)
        waiting += importlib.metadata.requires(name) or []

    names = {name.replace("-", "_").replace(".", "_") for name in distributions}
    for module, owners in importlib.metadata.packages_distributions().items():
        if distributions & {owner.lower().replace("_", "-") for owner in owners}:
            names.add(module.lower())
    free = {name for name in names if hook["problem_with_slug"](name) is None}
    assert free == set()


def test_every_file_and_module_of_the_project_is_a_reserved_name(hook, default_project):
    names = {path.parts[0].split(".")[0].lower() for path in files_of(default_project)}
    package = default_project / DEFAULT_SLUG
    names |= {path.parts[0].split(".")[0] for path in files_of(package)}
    names -= {"", DEFAULT_SLUG, "__init__"}
    assert {name for name in names if hook["problem_with_slug"](name) is None} == set()


def test_the_hook_reads_every_answer_back_exactly():
    nasty = "'\"\\\n\u2028\x00🐐模{x}</script>&\udc80"
    space = filled_hook(nasty)
    assert space["SLUG"] == nasty
    assert set(space["TEXTS"].values()) == {nasty}
    assert len(list(space["refusals"]())) == 4


def test_the_project_is_a_git_repository_on_main_with_nothing_committed(run_cookiecutter, tmp_path):
    assert run_cookiecutter().returncode == 0
    project = tmp_path / "out" / DEFAULT_SLUG
    if not (project / ".git").exists():
        pytest.skip("git is not installed")
    assert (project / ".git" / "HEAD").read_text().strip() == "ref: refs/heads/main"
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=project, capture_output=True, text=True
    )
    assert status.returncode == 0
    assert {line[:2] for line in status.stdout.splitlines()} == {"??"}


def test_the_next_commands_are_printed_and_can_be_typed(run_cookiecutter, tmp_path):
    done = run_cookiecutter(cwd=tmp_path, env=os.environ | {"PWD": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    commands = [line.strip() for line in done.stdout.splitlines() if line.startswith("    ")]
    assert commands[:3] == [f"cd {os.path.join('out', DEFAULT_SLUG)}", "make install", "make walk"]
    assert commands[-1].endswith("python run.py")
    assert '-c constraints.txt -e ".[test]"' in done.stdout


def test_a_folder_with_a_space_is_printed_in_quotes(bake, tmp_path, capfd):
    project = bake(tmp_path / "two words")
    assert f'cd "{project}"' in capfd.readouterr().out


def test_without_git_the_project_is_baked_and_the_reader_is_told(run_cookiecutter, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run_cookiecutter(env=os.environ | {"PATH": str(empty)})
    assert done.returncode == 0, done.stderr
    assert "No git repository was made" in done.stdout
    assert "make walk" in done.stdout
    assert not (tmp_path / "out" / DEFAULT_SLUG / ".git").exists()
    assert (tmp_path / "out" / DEFAULT_SLUG / "pyproject.toml").exists()


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for git is a shell script")
def test_a_git_that_fails_does_not_undo_the_project(run_cookiecutter, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "git").write_text("#!/bin/sh\nexit 128\n")
    (folder / "git").chmod(0o755)
    done = run_cookiecutter(env=os.environ | {"PATH": str(folder)})
    assert done.returncode == 0, done.stderr
    assert "git init failed with 128" in done.stdout
    assert (tmp_path / "out" / DEFAULT_SLUG / "pyproject.toml").exists()


def test_inside_another_repository_the_project_gets_its_own(run_cookiecutter, tmp_path):
    outer = tmp_path / "out"
    try:
        subprocess.run(["git", "init", "--quiet", str(outer)], check=True)
    except OSError:
        pytest.skip("git is not installed")
    before = sorted(path.name for path in (outer / ".git").iterdir())
    # As in a git hook of the outer repository, where git exports its own folder.
    done = run_cookiecutter(env=os.environ | {"GIT_DIR": str(outer / ".git")})
    assert done.returncode == 0, done.stderr
    assert (outer / DEFAULT_SLUG / ".git").is_dir()
    assert sorted(path.name for path in (outer / ".git").iterdir()) == before


@pytest.mark.skipif(os.name == "nt", reason="needs a pipe that can be closed")
def test_an_output_that_nobody_reads_does_not_undo_the_project(run_cookiecutter, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = run_cookiecutter(capture_output=False, stdout=writer, stderr=subprocess.DEVNULL)
    os.close(writer)
    assert done.returncode == 0
    assert (tmp_path / "out" / DEFAULT_SLUG / "pyproject.toml").exists()
