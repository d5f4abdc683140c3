"""Bakes, copies and edits of a project, and a command run in one: what came of it and its cost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import yaml
from recipes import BASE, Edit, Recipe
from warm import Warm

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", "runs", "artifacts", "tests", "__pycache__", ".*_cache")
# What no training and no split depends on: an edit there leaves both as they are.
ONLY_JUDGES = ("harness/checks/", "harness/figures/", "harness/faults/", "harness/report.py")
TRAINING_STAGES = ("stages/__init__.py", "stages/setup.py", "stages/data_audit.py")


# ---- the project --------------------------------------------------------------------------------


def bake(folder: Path) -> Path:
    """A project from the working tree, with the default answers and nobody's settings."""
    folder.mkdir(parents=True)
    home = folder / "cookiecutter"
    config = folder / "cookiecutter.yaml"
    text = f"replay_dir: '{home / 'replay'}'\ncookiecutters_dir: '{home / 'templates'}'\n"
    config.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "cookiecutter", str(ROOT), "--no-input"]
    command += ["--config-file", str(config), "--output-dir", str(folder / "baked")]
    subprocess.run(command, check=True, capture_output=True)
    (project,) = (folder / "baked").iterdir()
    return project


@contextlib.contextmanager
def planted(project: Path, recipe: Recipe, bases: Path) -> Iterator[Path]:
    """A copy of the project with the recipe's base and edits in it, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(shutil.copytree(project, Path(folder) / project.name, ignore=LEFT_OUT))
        if recipe.base != BASE:
            overlay(bases / recipe.base, copy)
        for path, text in edited(copy, recipe.edits, recipe.id).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        yield copy


def overlay(base: Path, project: Path) -> None:
    """The files of a base over those of the project; paths are as in an edit, see `place`."""
    for path in sorted(base.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            target = place(project, path.relative_to(base).as_posix())
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def place(project: Path, name: str) -> Path:
    """configs/ and prepare.py stand beside the package, all else in it."""
    outside = name.startswith("configs/") or name == "prepare.py"
    return project / name if outside else project / project.name / name


def edited(project: Path, edits: Iterable[Edit], name: str) -> dict[Path, str]:
    """path -> new text, the edits made one after the other. Raises ValueError that names the
    recipe where `old` does not stand exactly once."""
    texts: dict[Path, str] = {}
    for edit in edits:
        path = place(project, edit.file)
        if edit.old == "" and not path.exists() and path not in texts:
            texts[path] = edit.new
            continue
        if path not in texts and not path.exists():
            raise ValueError(f"{name}: {edit.file} is not there to be edited.")
        text = texts[path] if path in texts else path.read_text(encoding="utf-8")
        times = text.count(edit.old) if edit.old else 0
        if times != 1:
            raise ValueError(f"{name}: {edit.old!r} stands {times} times in {edit.file}, not once.")
        texts[path] = text.replace(edit.old, edit.new)
    return texts


# ---- digests ------------------------------------------------------------------------------------


def digest(*parts: object) -> str:
    """Of anything that JSON can hold."""
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]


def sources(project: Path) -> dict[str, str]:
    """path -> digest of all that decides what a launch does, in a bake; and the versions."""
    package = project / project.name
    paths = [project / "run.py", *package.rglob("*.py"), *(project / "configs").rglob("*.yaml")]
    found = {p.relative_to(project).as_posix(): sha256(p.read_bytes()).hexdigest() for p in paths}
    versions = {name: metadata.version(name) for name in ("torch", "scikit-learn", "numpy")}
    return found | versions | {"python": sys.version.split()[0]}


def training_sources(project: Path) -> dict[str, str]:
    """Those of them on which splits and training depend: no check, no limit of a check."""
    inside = f"{project.name}/"

    def trains(path: str) -> bool:
        name = path.removeprefix(inside)
        if name.startswith("stages/"):
            return name in TRAINING_STAGES
        return path != "configs/config.yaml" and not name.startswith(ONLY_JUDGES)

    found = {path: value for path, value in sources(project).items() if trains(path)}
    config = yaml.safe_load((project / "configs" / "config.yaml").read_text(encoding="utf-8"))
    config.pop("checks", None)
    return found | {"configs/config.yaml": digest(config)}


def files_digest(folder: Path) -> str:
    """Of the content of every file below a folder; "" where there is none."""
    if not folder.is_dir():
        return ""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return digest([[p.relative_to(folder).as_posix(), p.read_bytes().hex()] for p in paths])


# ---- running ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """One script: its exit code (negative: the signal), what it said, CPU and wall seconds."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    wall_s: float
    timed_out: bool


def environment() -> dict[str, str]:
    """One thread, no screen, and no byte code left behind."""
    told = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": "1"}
    dropped = ("FORCE_COLOR", "COLUMNS", "PYTHONPATH", "HYDRA_FULL_ERROR")
    return {k: v for k, v in os.environ.items() if k not in dropped} | told


def run(words: Sequence[str], project: Path, limit_s: float) -> Done:
    """A script and its arguments in the project's folder, killed at the time limit.

    Seconds are user and system time without the imports of libraries: see warm.py.
    """
    with tempfile.TemporaryDirectory(prefix="said-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        found = _warm().run(words, project, out, err, limit_s)
        said = [
            path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            for path in (out, err)
        ]
    return Done(found["code"], *said, found["seconds"], found["wall_s"], found["timed_out"])


_OF_THREAD = threading.local()


def _warm() -> Warm:
    """This thread's own warm process: each runs one script at a time."""
    if not hasattr(_OF_THREAD, "warm"):
        _OF_THREAD.warm = Warm(environment())
    return _OF_THREAD.warm
