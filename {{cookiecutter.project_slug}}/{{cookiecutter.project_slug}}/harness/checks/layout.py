"""How the outputs and targets of each kind lie: where the classes are, and which targets count."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

CLASSES = ("exclusive", "tokens", "dense")  # one class per target
KINDS = (*CLASSES, "multilabel", "real")
ONE_TARGET = {"tokens": (1,), "dense": (1, 1)}  # the positions of a row with one target


def flat_outputs(task: Any, outputs: torch.Tensor) -> torch.Tensor:
    """One line per target: `(num_targets, num_outputs)`, positions of a row one after another."""
    axis = -1 if task.targets == "tokens" else 1
    return outputs.movedim(axis, -1).flatten(0, -2)


def shaped(task: Any, flat: torch.Tensor, positions: tuple[int, ...]) -> torch.Tensor:
    """The reverse: outputs as the model would hand them out, `positions` targets per row."""
    outputs = flat.reshape(-1, *positions, flat.shape[-1])
    return outputs if task.targets == "tokens" else outputs.movedim(-1, 1)


def supervised(task: Any, y: torch.Tensor) -> torch.Tensor:
    """Of each target, whether it counts: bool, shape of `y`."""
    ignored = getattr(task, "ignore_index", None)
    return torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored


def supervised_outputs(task: Any, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The outputs of the targets that count, in the task's own layout as if they were one row (of
    exclusive classes: one row each)."""
    if task.targets not in CLASSES:
        return outputs
    flat = flat_outputs(task, outputs)[supervised(task, y).flatten().to(outputs.device)]
    positions = {"exclusive": (), "tokens": (len(flat),), "dense": (len(flat), 1)}[task.targets]
    return shaped(task, flat, positions)


def shares(task: Any, y: torch.Tensor) -> np.ndarray:
    """What `task.prior` says of exactly these targets; class shares without its smoothing."""
    if task.targets not in CLASSES:
        return task.prior(y)
    told = y[supervised(task, y)].cpu()
    counts = torch.bincount(told, minlength=task.num_outputs).double()
    return (counts / counts.sum()).numpy()


def exact_prior(task: Any, y: torch.Tensor) -> np.ndarray:
    """The same, and of labels that do not exclude each other without smoothing too."""
    if task.targets == "multilabel":
        return y.double().mean(dim=0).cpu().numpy()
    return shares(task, y)


def single(task: Any, row: torch.Tensor) -> torch.Tensor:
    """`(1, num_outputs)` as the outputs of one row with one target."""
    positions = ONE_TARGET.get(task.targets)
    return row if positions is None else shaped(task, row, positions)


def num_rows_for(y: torch.Tensor, min_targets: int, min_rows: int = 64) -> int:
    """Rows that hold at least `min_targets` targets, and no fewer than `min_rows`."""
    return max(min(min_rows, min_targets), math.ceil(min_targets / max(y[0].numel(), 1)))


def columns(task: Any, values: torch.Tensor, max_columns: int = 32) -> list[torch.Tensor]:
    """Real values `(B, ...)` one column at a time, `(B,)` each: one mean and variance do not
    describe several columns. Everything else is one part, as it is."""
    if task.targets != "real" or values[0].numel() < 2:
        return [values]
    flat = values.reshape(len(values), -1)
    chosen = torch.linspace(0, flat.shape[1] - 1, min(flat.shape[1], max_columns)).long()
    return [flat[:, int(at)] for at in chosen]


def expected_loss(task: Any, outputs: torch.Tensor, y: torch.Tensor) -> float:
    """The task's formula for these outputs and targets, the mean over columns of real ones."""
    parts = zip(columns(task, outputs), columns(task, y), strict=True)
    costs = [task.expected_loss(z, shares(task, targets)) for z, targets in parts]
    return sum(costs) / len(costs)
