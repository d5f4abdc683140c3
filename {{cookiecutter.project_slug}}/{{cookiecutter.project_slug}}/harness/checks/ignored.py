"""Targets that are not supervised: without influence on the loss, and all others with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..instruments import NonFiniteLoss
from . import Finding, Pipeline, layout, probe
from .asking import Ask, Given, Known, in_place


def ignored_targets(pipeline: Pipeline, given: Given, limit: float) -> Iterator[Finding]:
    """Every second target is made one to ignore, with outputs that would cost much.

    Needs a declared `ignore_index`, and outputs that stand where their targets do.
    """
    task, known, ask = given.task, given.known, given.ask
    index = getattr(task, "ignore_index", None)
    if task.targets not in layout.CLASSES or index is None or not in_place(task, known):
        return
    outputs, y, told = _every_second(task, known, index)
    answer = ask(outputs, y)
    pull = layout.flat_outputs(task, answer.gradient).norm(dim=1)
    loud, silent = pull[~told].count_nonzero().item(), (pull[told] == 0).sum().item()
    if loud:
        because = f"{loud} of {len(pull) - told.sum().item()} ignored targets have a gradient"
        causes = ("the mask of the ignored targets is lost", "the mask is inverted or shifted")
        yield Finding(float(loud), 0.0, because, causes[:: -1 if silent else 1])
    elif silent:
        because = f"{silent} of {told.sum().item()} supervised targets have no influence"
        causes = ("the mask leaves out too much", "ignore_index is a real class")
        yield Finding(float(silent), 0.0, because, causes)
    else:
        yield from _mean(task, known, outputs, y, answer.loss - given.penalty, limit)
    yield from _none_left(pipeline, ask, outputs, y, index)


def _every_second(
    task: Any, known: Known, index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, targets and which of them count (flat), in twice as many rows."""
    targets = known.y.flatten()
    generator = torch.Generator().manual_seed(2)
    flat = torch.randn(2 * len(targets), task.num_outputs, generator=generator).to(targets.device)
    y = torch.full((2 * len(targets),), index, dtype=targets.dtype, device=targets.device)
    told = torch.arange(len(y), device=y.device) % 2 == 0
    y[told], flat[~told] = targets, flat[~told] * 3
    return layout.shaped(task, flat, known.positions), y.reshape(-1, *known.positions), told


def _mean(
    task: Any, known: Known, outputs: torch.Tensor, y: torch.Tensor, loss: float, limit: float
) -> Iterator[Finding]:
    """The mean runs over the targets that count: the loss of those alone."""
    told = layout.supervised_outputs(task, outputs, y)
    expected = _alone(task, told, known)
    if not math.isclose(loss, expected, rel_tol=5 * limit):
        because = (
            f"with half of the targets ignored the others cost {loss:.4g}, alone {expected:.4g}"
        )
        causes = ("the mean also runs over the ignored targets",)
        yield Finding(loss / expected, [1 - 5 * limit, 1 + 5 * limit], because, causes)


def _alone(task: Any, told: torch.Tensor, known: Known) -> float:
    """The task's own loss on the supervised targets and nothing else, in rows as before."""
    flat = layout.flat_outputs(task, told)
    return task.loss(layout.shaped(task, flat, known.positions), known.y).item()


def _none_left(
    pipeline: Pipeline, ask: Ask, outputs: torch.Tensor, y: torch.Tensor, index: int
) -> Iterator[Finding]:
    """Where batches without any supervised target are to be expected, their loss is a number."""
    rows = probe.few_rows(pipeline.train, 512)["y"]
    empty = ~layout.supervised(pipeline.task, rows).reshape(len(rows), -1).any(dim=1)
    size = max(1, getattr(pipeline.train, "batch_size", 64) // max(pipeline.accumulate, 1))
    per_epoch = len(pipeline.train) * empty.double().mean().item() ** size
    if per_epoch < 0.01:
        return
    try:
        loss = ask(outputs, torch.full_like(y, index)).loss
    except NonFiniteLoss:
        loss = math.nan
    if not math.isfinite(loss):
        because = f"a batch without any target that counts costs {loss}, {per_epoch:.2g} per epoch"
        causes = ("the loss divides by the number of targets, which can be 0",)
        yield Finding(None, None, because, causes)
