"""How the tests of the walk launch a project's commands, copy what was walked, and break it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from bakes import DEFAULT_SLUG, files_of

STAGES = ("data_audit", "skeleton", "overfit", "regularize", "tune", "squeeze")
OPEN, FAILED, SHUT, REFUSED = 0, 1, 3, 4
TIMEOUT_S = 1200  # a hang, on the slowest machine

# Small settings where the property tested does not depend on how well anything trains.
TINY = {
    "overfit": "num_epochs=2 num_seeds=2 capacity_epochs=1 lr_range_steps=40",
    "regularize": "num_epochs=2",
    "tune": "num_epochs=2 trial_epochs=1 num_trials=8 num_seeds=2",
    "squeeze": "longer_factor=3.0",
}
LOOSE = {
    "overfit": "max_train_loss=100 min_lr_range_drop=0",
    "regularize": "min_gain_in_standard_errors=-1e9 max_inactive_share=1",
    "tune": "max_loss_in_pooled_spreads=1e9",
}


def tiny(stage: str, *, loose: bool = True) -> list[str]:
    """The settings of a launch of a few seconds; `loose`: its gate opens all the same."""
    limits = LOOSE.get(stage, "").split() if loose else []
    settings = [f"stage.{text}" for text in TINY.get(stage, "").split()]
    return [f"stage={stage}", *settings, *(f"stage.limits.{text}" for text in limits)]


# ---- launching ----------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """One thread, no screen, and no byte code left in the copies that tests edit."""
    told = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": "1"}
    dropped = ("FORCE_COLOR", "COLUMNS", "PYTHONPATH", "HYDRA_FULL_ERROR")
    return {k: v for k, v in os.environ.items() if k not in dropped} | told


def command(*arguments: str) -> list[str]:
    return [sys.executable, "run.py", *arguments]


def launch(project: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`python run.py ...` in the project's folder."""
    return run(project, command(*arguments))


def run(project: Path, words: Sequence[str]) -> subprocess.CompletedProcess:
    settings = {"capture_output": True, "text": True, "encoding": "utf-8", "timeout": TIMEOUT_S}
    return subprocess.run(words, cwd=project, env=environment(), **settings)


def start(project: Path, *arguments: str) -> subprocess.Popen:
    """The same without waiting for it, its output line by line."""
    words = [sys.executable, "-u", *command(*arguments)[1:]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    settings = {"text": True, "encoding": "utf-8", "env": environment()}
    return subprocess.Popen(words, cwd=project, **pipes, **settings)


def together(*calls: Callable) -> list:
    """The results of these calls, two at a time: each waits for a process of its own."""
    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def succeed(done: subprocess.CompletedProcess, code: int = OPEN) -> subprocess.CompletedProcess:
    """`done`, if it ended with this exit code and no traceback."""
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


@dataclass(frozen=True)
class Walk:
    """A project and what each launch of its stages printed."""

    project: Path
    launches: dict[str, subprocess.CompletedProcess]


def walk(project: Path, stages: Sequence[str] = STAGES) -> Walk:
    """The stages by command line, in order, as far as they exit with 0."""
    launches = {}
    for stage in stages:
        launches[stage] = launch(project, f"stage={stage}")
        if launches[stage].returncode != OPEN:
            break
    return Walk(project, launches)


def board(project: Path, *arguments: str) -> dict[str, str]:
    """stage -> status and why, as the board prints them, and under "next" its last words."""
    text = succeed(launch(project, *arguments)).stdout
    rows: dict[str, str] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name in STAGES:
            rows[name] = rest.strip()
        elif rows and line.startswith("   "):  # a reason too long for one line
            rows[list(rows)[-1]] += f" {line.strip()}"
    assert tuple(rows) == STAGES, text
    return {**rows, "next": " ".join(text.strip().split("\n\n")[-1].split())}


def statuses(project: Path, *arguments: str) -> list[str]:
    found = board(project, *arguments)
    return [found[stage].split()[0] for stage in STAGES]


# ---- reading ------------------------------------------------------------------------------------


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def gate(project: Path, stage: str) -> dict:
    return read_json(project / "artifacts" / stage / "gate.json")


def checks(found: dict) -> dict[str, dict]:
    """name -> check of a gate."""
    return {check["name"]: check for check in found["checks"]}


def shut(found: dict) -> list[str]:
    return [check["name"] for check in found["checks"] if check["verdict"] == "shut"]


def newest(project: Path, stage: str) -> Path:
    """The folder of the last launch of a stage."""
    return max((project / "runs" / stage).iterdir(), key=lambda path: path.stat().st_mtime_ns)


def history(folder: Path) -> list[dict]:
    """The rows of history.jsonl, without the columns that tell the time."""
    lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.endswith("_s")} for row in rows]


def tree(folder: Path) -> dict[str, str]:
    """Every file (byte code and git aside) with the digest of its content, and every folder."""
    files = {path.as_posix(): sha256((folder / path).read_bytes()).hexdigest()
             for path in files_of(folder)}  # fmt: skip
    folders = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()}
    kept = {name for name in folders if not re.search(r"(^|/)(\.git|__pycache__)(/|$)", name)}
    return files | dict.fromkeys(kept, "folder")


# ---- changing -----------------------------------------------------------------------------------


def copy(project: Path, target: Path) -> Path:
    """The project without its git history, and of its runs only what later launches look up."""
    left_out = {".git", *STAGES, "multirun"}

    def ignored(folder: str, names: list[str]) -> set[str]:
        here = Path(folder)
        return left_out.intersection(names) if here in (project, project / "runs") else set()

    return Path(shutil.copytree(project, target, ignore=ignored))


def source(project: Path, name: str) -> Path:
    return project / DEFAULT_SLUG / name


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8", newline="\n")


def substitute(path: Path, pattern: str, new: str, *, count: int = 0) -> None:
    """Replace a regular expression that must be there."""
    text, found = re.subn(pattern, new, path.read_text(encoding="utf-8"), count=count)
    assert found, f"{pattern!r} is not in {path.name}: adapt the test"
    path.write_text(text, encoding="utf-8", newline="\n")


def flip_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
