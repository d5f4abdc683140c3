"""Bakes: projects made from the working tree, in temporary folders, with nobody's settings."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import walking
from bakes import ROOT
from cookiecutter.main import cookiecutter


@pytest.fixture(scope="session")
def config_file(tmp_path_factory) -> Path:
    """A cookiecutter configuration that keeps answers and clones out of the home folder."""
    home = tmp_path_factory.mktemp("cookiecutter")
    path = home / "config.yaml"
    text = f"replay_dir: '{home / 'replay'}'\ncookiecutters_dir: '{home / 'templates'}'\n"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def bake(config_file, tmp_path_factory) -> Callable[..., Path]:
    """`bake(output=None, **answers)` makes a project with these answers and returns its folder."""

    def bake(output: Path | None = None, **answers: str) -> Path:
        folder = cookiecutter(
            str(ROOT),
            no_input=True,
            extra_context=answers,
            output_dir=str(output or tmp_path_factory.mktemp("bake")),
            config_file=str(config_file),
        )
        return Path(folder)

    return bake


@pytest.fixture(scope="session")
def default_project(bake) -> Path:
    """One bake with the default answers, shared by all tests: read it, never write into it."""
    return bake()


@pytest.fixture
def run_cookiecutter(config_file, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """The command as a user types it. Its output folder is `tmp_path / "out"`, made empty."""
    output = tmp_path / "out"
    output.mkdir()

    def run(*options: str, **kwargs) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "cookiecutter", str(ROOT), "--no-input"]
        command += ["--config-file", str(config_file), "--output-dir", str(output), *options]
        settings = {"capture_output": True, "text": True, "encoding": "utf-8", "timeout": 120}
        return subprocess.run(command, **(settings | kwargs))

    return run


# ---- the walk -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def walks(bake) -> tuple[walking.Walk, walking.Walk]:
    """Two bakes with the default settings: one walked to the end, one as far as overfit, at once.

    Read them, never launch anything in them."""
    first, second = bake(), bake()
    return tuple(
        walking.together(
            lambda: walking.walk(first), lambda: walking.walk(second, walking.STAGES[:3])
        )
    )


@pytest.fixture
def copies(tmp_path) -> Iterator[Callable[[Path], Path]]:
    """`copies(project)` is a copy to launch in and to break; it is gone after the test."""
    made = []

    def copy(project: Path) -> Path:
        made.append(tmp_path / f"copy-{len(made)}" / project.name)
        return walking.copy(project, made[-1])

    yield copy
    for path in made:
        shutil.rmtree(path)


@pytest.fixture
def walked(walks, copies) -> Path:
    """A copy of the project that walked all six stages."""
    return copies(walks[0].project)


@pytest.fixture
def fresh(default_project, copies) -> Path:
    """A copy of a bake that has not been launched yet."""
    return copies(default_project)
