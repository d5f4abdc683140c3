"""A copy of this project, and its commands as a user types them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from {{cookiecutter.project_slug}} import stages

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = stages.__name__.partition(".")[0]
ORDER = stages.ORDER

# A launch of a few seconds, in which nothing trains well: the limits are loosened with it.
SMALL = {
    "overfit": [
        "stage.num_epochs=2",
        "stage.num_seeds=2",
        "stage.capacity_epochs=1",
        "stage.lr_range_steps=40",
        "stage.limits.max_train_loss=100",
        "stage.limits.min_lr_range_drop=0",
    ],
    "regularize": [
        "stage.num_epochs=2",
        "stage.limits.min_gain_in_standard_errors=-1e9",
        "stage.limits.max_inactive_share=1",
    ],
    "tune": [
        "stage.num_epochs=2",
        "stage.num_trials=8",
        "stage.trial_epochs=1",
        "stage.num_seeds=2",
        "stage.limits.max_loss_in_pooled_spreads=1e9",
    ],
    "squeeze": ["stage.candidates=[ensemble]"],
}
DATA = "data=digits"  # embedded, so that these tests run wherever your own data does not lie


def copy_project(target: Path) -> Path:
    """What a launch needs of the project, and none of its evidence."""
    for name in ("run.py", "serve.py"):
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    for name in ("configs", PACKAGE):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    return target


def launch(project: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`python run.py ...`, byte code left out."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("FORCE_COLOR", None)
    return subprocess.run(
        [sys.executable, "run.py", *arguments],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=600,
    )


def small(project: Path, stage: str, *more: str) -> subprocess.CompletedProcess:
    return launch(project, f"stage={stage}", DATA, *SMALL.get(stage, []), *more)


def ended(done: subprocess.CompletedProcess, code: int = 0) -> subprocess.CompletedProcess:
    """`done`, if it has this exit code and shows no traceback."""
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done


def gate(project: Path, stage: str) -> dict:
    path = project / "artifacts" / stage / "gate.json"
    return json.loads(path.read_text(encoding="utf-8"))


def files_below(project: Path) -> set[str]:
    return {path.relative_to(project).as_posix() for path in project.rglob("*")}
