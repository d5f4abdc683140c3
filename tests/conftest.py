"""Bakes: projects made from the working tree, in temporary folders, with nobody's settings."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
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
