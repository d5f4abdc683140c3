"""What a run tells while it trains: history.jsonl always, a bar on a terminal, wandb when asked.

None of it may stop a run: training needs no account, no network and no screen.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from . import files

INIT_TIMEOUT_S = 10  # wandb waits 90 for a network that is not there
FINISH_TIMEOUT_S = 60  # what is not uploaded by then lies in the run's folder: wandb sync DIR
_failed: set[str] = set()  # ways to start wandb that failed in this process: not waited for again


def plan(model: Any, optimizer: Any, train: Any, settings: Any) -> str:
    """What the configuration does not show, before the first step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    rate = optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"])
    return (
        f"{type(model).__name__}: {sum(p.numel() for p in trained):,} parameters, "
        f"{train.num_rows:,} training rows, {len(train)} batches per epoch, at most "
        f"{settings.num_epochs * len(train):,} steps ({settings.num_epochs} epochs), "
        f"{type(optimizer).__name__} lr {rate:.2e}, {trained[0].device} {settings.precision}"
    )


@contextlib.contextmanager
def history(folder: Path | None, *tables: list[dict]) -> Iterator[Callable[[], None]]:
    """A call appends the rows that are new in `tables` to history.jsonl; so does leaving, so that a
    run which breaks off has told all it knew. Without a folder nothing is written."""
    done = [0] * len(tables)

    def write() -> None:
        fresh = [row for table, start in zip(tables, done, strict=True) for row in table[start:]]
        done[:] = map(len, tables)
        if folder is not None and fresh:
            files.append_jsonl(folder / "history.jsonl", fresh)

    try:
        yield write
    finally:
        write()


@contextlib.contextmanager
def progress(num_epochs: int) -> Iterator[Callable[[dict], None]]:
    """A bar of epochs with the last losses, gone when training ends; nothing where no one looks."""
    if not sys.stdout.isatty():
        yield lambda row: None
        return
    columns = ("epoch", MofNCompleteColumn(), BarColumn(), "{task.description}")
    bar = Progress(
        *columns, TimeRemainingColumn(), console=Console(), transient=True, auto_refresh=False
    )
    with bar:  # redrawn once per epoch: a thread that redraws would take time from the training
        line = bar.add_task("", total=num_epochs)

        def show(row: dict) -> None:
            told = f"loss {row['running_train_loss']:.4f}, validation {row['validation_loss']:.4f}"
            bar.update(line, advance=1, description=told, refresh=True)

        yield show


# ---- wandb --------------------------------------------------------------------------------------


class Tracker:
    """Tells nobody: history.jsonl is written in any case."""

    def log(self, row: dict) -> None:
        """One epoch's row."""

    def finish(self) -> None:
        """To be called once, also when training broke off."""


class WandbTracker(Tracker):
    """Hands the rows to wandb. From its first failure on it is silent."""

    def __init__(self, run: Any):
        self._run = run

    def log(self, row: dict) -> None:
        self._try("log", row)

    def finish(self) -> None:
        self._try("finish")

    def _try(self, what: str, *arguments: Any) -> None:
        if self._run is None:
            return
        try:
            getattr(self._run, what)(*arguments)
        except Exception as error:  # whatever it is, the training goes on
            print(f"wandb could not {what} ({_reason(error)}): going on without it.", flush=True)
            self._run = None


def open_tracker(settings: Any, run: Any, config: dict, name: str) -> Tracker:
    """What `settings` (name, project, mode) ask for, for the one training run called `name`.

    wandb that is not installed, has no account or no network costs a printed line: online falls
    back to offline, and that to no tracker at all.
    """
    if settings.name == "none":
        return Tracker()
    for mode in dict.fromkeys([settings.mode, "offline"]):
        if mode in _failed:
            continue
        try:
            return WandbTracker(_start(mode, settings, run, config, name))
        except Exception as error:  # an account, a network, a disk: none of it may stop a run
            _failed.add(mode)
            then = "trying offline" if mode == "online" else "going on without it"
            print(f"wandb {mode}: {_reason(error)}; {then}.", flush=True)
    return Tracker()


def _start(mode: str, settings: Any, run: Any, config: dict, name: str) -> Any:
    import wandb

    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise RuntimeError("no account (wandb login)")
    return wandb.init(
        mode=mode,
        project=settings.project or run.artifacts.parent.name,
        name=name,
        group=run.stage,
        config=public(config),
        dir=str(run.folder),
        reinit="create_new",
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
        ),
    )


def public(config: dict) -> dict:
    """The configuration without what may hold a password (the URL of the study's database)."""
    inside = {k: public(v) if isinstance(v, dict) else v for k, v in config.items()}
    return {key: value for key, value in inside.items() if key != "storage"}


def _reason(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "not installed (pip install -e .[wandb])"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
