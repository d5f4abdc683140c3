"""What a training step costs as `fit` does it, against the same step bare.

    python bench/step.py    prints the table, writes bench/results/step.json, exits 1 above a limit

Ours is `train_epoch` with everything `fit` adds: the guard against a loss that is not finite, the
loss of every step kept for the history, gradient norm and update ratio every 20 steps. Bare is
zero_grad, forward, loss, backward, clip, optimizer step, and nothing else. Both train a network of
their own from one seed on the same batches, in turns of 20 steps within one process, on one
thread; the figures are CPU time. A turn of ours holds exactly one reading of the instruments, so
the ratio of two neighbouring turns is the cost; the median over many pairs does not feel what else
the machine is doing.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "step.json"
LIMITS = {"convnet": 1.05, "mlp": 1.10}
PAIRS = {"convnet": 60, "mlp": 400}
STEPS = 20  # per turn: what fit waits between two readings of its instruments
WARM_UP_PAIRS = 5
BATCH_SIZE, CLIP_NORM, LR = 64, 10.0, 3e-3


def load_project() -> SimpleNamespace:
    """The template's own modules by path: they hold no Jinja, so nothing need be baked."""
    sys.dont_write_bytecode = True  # a bake would copy what lies in the template's folders
    package = ROOT / "{{cookiecutter.project_slug}}" / "{{cookiecutter.project_slug}}"
    spec = importlib.util.spec_from_file_location(
        "project", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    sys.modules["project"] = importlib.util.module_from_spec(spec)
    names = {"model": "model", "loop": "harness.loop", "instruments": "harness.instruments"}
    return SimpleNamespace(
        **{name: importlib.import_module(f"project.{path}") for name, path in names.items()}
    )


def networks(project: SimpleNamespace) -> dict[str, tuple[Callable[[], nn.Module], tuple]]:
    """Name -> (how to build it, shape of one input)."""
    image = (1, 8, 8)
    return {
        "convnet": (lambda: project.model.ConvNet(image, 10), image),
        "mlp": (
            lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
            (64,),
        ),
    }


def make(project: SimpleNamespace, build: Callable) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = build().train()
    settings = SimpleNamespace(name="adam", lr=LR, betas=(0.9, 0.999))
    groups = project.model.parameter_groups(network, LR, 0.0)
    return network, project.loop.make_optimizer(settings, groups, torch.device("cpu"))


def our_turn(project: SimpleNamespace, build: Callable) -> Callable[[list[dict]], None]:
    network, optimizer = make(project, build)
    task = SimpleNamespace(loss=F.cross_entropy)
    settings = project.loop.FitSettings(num_epochs=1, clip_norm=CLIP_NORM)
    step = project.loop.bind_step(network, optimizer, task, settings)
    recorder = project.instruments.StepRecorder(network, optimizer, STEPS)

    def turn(batches: list[dict]) -> None:
        project.loop.train_epoch(step, batches, recorder)
        recorder.epoch_loss()

    return turn


def bare_turn(project: SimpleNamespace, build: Callable) -> Callable[[list[dict]], None]:
    network, optimizer = make(project, build)

    def turn(batches: list[dict]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(network(batch["x"]), batch["y"])
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), CLIP_NORM)
            optimizer.step()

    return turn


def cpu_seconds(turn: Callable, batches: list[dict]) -> float:
    started = time.process_time()
    turn(batches)
    return time.process_time() - started


def measure(project: SimpleNamespace, build: Callable, shape: tuple, num_pairs: int) -> dict:
    """Median CPU time per step of both, in microseconds, and the median of the paired ratios."""
    draw = torch.Generator().manual_seed(1)
    batches = [
        {
            "x": torch.randn(BATCH_SIZE, *shape, generator=draw),
            "y": torch.randint(10, (BATCH_SIZE,), generator=draw),
        }
        for _ in range(STEPS)
    ]
    turns = {"ours": our_turn(project, build), "bare": bare_turn(project, build)}
    spent: dict[str, list[float]] = {"ours": [], "bare": []}
    for pair in range(WARM_UP_PAIRS + num_pairs):
        for name in ("ours", "bare") if pair % 2 else ("bare", "ours"):
            spent[name].append(cpu_seconds(turns[name], batches))
    ours, bare = spent["ours"][WARM_UP_PAIRS:], spent["bare"][WARM_UP_PAIRS:]
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quarters[0], 4), round(quarters[2], 4)],
        "bare_us": round(statistics.median(bare) / STEPS * 1e6, 1),
        "ours_us": round(statistics.median(ours) / STEPS * 1e6, 1),
        "num_pairs": num_pairs,
    }


def main() -> int:
    torch.set_num_threads(1)
    project = load_project()
    found = {}
    print(f"{'network':<9}{'bare us':>9}{'ours us':>9}{'ratio':>8}{'quartiles':>18}{'limit':>8}")
    for name, (build, shape) in networks(project).items():
        row = measure(project, build, shape, PAIRS[name]) | {"limit": LIMITS[name]}
        low, high = row["ratio_quartiles"]
        print(
            f"{name:<9}{row['bare_us']:>9.1f}{row['ours_us']:>9.1f}{row['ratio']:>8.3f}"
            f"{f'{low:.3f} to {high:.3f}':>18}{row['limit']:>8.2f}",
            flush=True,
        )
        found[name] = row
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8", newline="\n")
    missed = [name for name, row in found.items() if row["ratio"] > row["limit"]]
    print(f"above the limit: {', '.join(missed)}" if missed else "within the limits")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
