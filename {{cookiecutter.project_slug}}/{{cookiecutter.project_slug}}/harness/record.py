"""The folder of one launch, and where it came from: what a stage gets besides its configuration."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "scikit-learn", "hydra-core", "optuna", "safetensors", "pillow")


@dataclass
class Run:
    """One launch of one stage.

    `handoff` is what becomes artifacts/<stage>/ once the stage has ended; until then nothing of
    the evidence has changed. `artifacts` is where the earlier stages' hand-offs are read.
    """

    stage: str
    mode: str  # recorded | scratch | job (one of a multirun)
    folder: Path
    artifacts: Path
    runs: Path
    device: Any
    reaffirm: bool = False
    public: bool = False  # may pictures of samples be committed?
    verify: Callable[[Any], None] = lambda now: None  # raises Refused if the data has changed
    data: Any = None  # DataNow: set once the data was read
    sections: list[str] = field(default_factory=list)  # of report.md
    took: Counter[str] = field(default_factory=Counter)  # CPU seconds of each check
    waived: frozenset[str] = frozenset()  # names of checks that configs/waivers.yaml lets pass
    closing: list[str] = field(default_factory=list)  # printed below the table of checks

    def has_read(self, now: Any) -> None:
        """To be called with the identity of the data read, before anything is done with it."""
        self.verify(now)
        self.data = now

    @property
    def handoff(self) -> Path:
        return self.folder / "handoff"

    def result(self, name: str) -> Path:
        """A file of this stage's own hand-off; when only checks are rerun, the recorded one."""
        folder = self.artifacts / self.stage if self.reaffirm else self.handoff
        return folder / name

    def earlier(self, stage: str, name: str) -> Path:
        """A file that an earlier stage handed over."""
        return self.artifacts / stage / name

    def figure(self, name: str) -> Path:
        """Where to draw something that shows no sample of the data."""
        return self._drawing(self.handoff / "figures", name)

    def sample_figure(self, name: str) -> Path:
        """Where to draw samples: beside the evidence only if they may be committed."""
        folder = self.handoff / "figures" if self.public else self.folder / "samples"
        return self._drawing(folder, name)

    def _drawing(self, folder: Path, name: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def is_blocked(self, checks: Iterable[Any]) -> bool:
        """Whether these checks alone keep the gate shut, waived ones aside."""
        bad = (check.name for check in checks if check.verdict in ("shut", "inconclusive"))
        return any(name not in self.waived for name in bad)

    def tell(self, markdown: str) -> None:
        """A section of the report."""
        self.sections.append(markdown)


def make_folder(runs: Path, stage: str) -> Path:
    """A new folder runs/<stage>/<time>: two launches in one moment get two folders."""
    for attempt in range(1000):
        name = datetime.now().strftime("%Y-%m-%d_%H-%M-%S") + (f"_{attempt}" if attempt else "")
        folder = runs / stage / name
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{runs / stage} has a thousand folders of this very second")


def forget(run: Run) -> None:
    """Remove the folder of a launch that ended before it did anything; a job's folder stays."""
    if run.mode == "job" or {path.name for path in run.folder.iterdir()} != {"config.json"}:
        return
    shutil.rmtree(run.folder)
    with contextlib.suppress(OSError):  # other launches of the stage have left theirs
        run.folder.parent.rmdir()


def pick_device(asked: str) -> Any:
    """The torch device for `asked`; auto takes cuda, then mps, then cpu.

    Raises ValueError if the device asked for is not there: none is picked instead of it.
    """
    import torch

    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    present["cpu"] = True
    name = next(key for key in present if present[key]) if asked == "auto" else asked
    if not present[name]:
        others = ", ".join(key for key in present if present[key])
        raise ValueError(f"device={name} is not available here; there is {others}.")
    return torch.device(name)


def prepare_torch(seed: int, num_threads: int) -> None:
    """One seed, one thread count, deterministic kernels: equal runs give equal losses."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what CUDA needs for that
    import torch

    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(seed)


def provenance(root: Path, config: dict, device: str, started: float) -> dict:
    """Who, what, where, when: everything about a run that its evidence must not depend on."""
    return {
        "seed": config["seed"],
        "command": " ".join(["python", *sys.argv]),
        "config": config,
        "git": _git(root),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hardware": {
            "machine": platform.machine(),
            "system": platform.system(),
            "cores": os.cpu_count(),
            "device": device,
            "num_threads": config["num_threads"],
        },
        "started": datetime.fromtimestamp(started, timezone.utc).isoformat(timespec="seconds"),
        "duration_s": round(time.time() - started, 2),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path) -> dict:
    """Commit, and if the tree differs from it the digest of the difference (artifacts aside)."""
    try:
        commit = _ask_git(root, "rev-parse", "--verify", "HEAD").strip() or None
        scope = ["--", ".", ":(exclude)artifacts"]
        diff = _ask_git(root, "diff", "HEAD", *scope) if commit else ""
        new = _ask_git(root, "ls-files", "--others", "--exclude-standard", *scope)
    except OSError:
        return {"commit": None, "dirty": None}
    dirty = bool(diff or new) if commit else None
    digest = hashlib.sha256((diff + new).encode()).hexdigest() if dirty else None
    return {"commit": commit, "dirty": dirty, "difference": digest}


def _ask_git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, encoding="utf-8", check=False
    )
    return done.stdout if done.returncode == 0 else ""
