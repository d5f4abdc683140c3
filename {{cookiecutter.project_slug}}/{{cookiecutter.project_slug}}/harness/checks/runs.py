"""Short training runs with the project's own step, scored row by row on held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
from torch import nn

from ..instruments import NonFiniteLoss
from . import Pipeline, answers, layout, probe

EVERY_STEPS = 25  # held-out rows are scored so often
FIRST_STEPS = 5


@dataclass(frozen=True)
class Run:
    """The best of one short training run, row by row on held-out data."""

    rows: torch.Tensor  # (N,) held-out losses at its best step
    start: float  # mean held-out loss before the first step
    train_start: float  # mean training loss of the first steps
    train_end: float  # median training loss of the last steps
    steps: int

    @property
    def train_fall(self) -> float:
        """Relative fall of the training loss."""
        return (self.train_start - self.train_end) / max(abs(self.train_start), 1e-12)


@dataclass(frozen=True)
class Way:
    """How a run is trained: by which optimizer, and on how many rows (None: all)."""

    how: str
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    few_rows: int | None = None
    augment: bool = True


def adam(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)


# ---- losses by row ------------------------------------------------------------------------------


def constant_losses(pipeline: Pipeline, known: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`(N,)` losses on `y` of the answer that is best for the labels `known`."""
    task = pipeline.task
    return _per_row(task, answers.constant(task, task.prior(known), y), y)


def held_out_labels(held_out: Any) -> torch.Tensor:
    return probe.join(probe.batches_of(held_out, min_rows=held_out.num_rows))["y"]


def _per_row(task: Any, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`(N,)` losses of the rows that have a target, float64 on the CPU; not finite is very bad."""
    rows = task.loss_per_row(outputs, y).cpu().double()
    rows = rows.reshape(len(y), -1).mean(dim=1).nan_to_num(1e6, 1e6, -1e6)
    return rows[layout.supervised(task, y).reshape(len(y), -1).any(dim=1).cpu()]


def gain(baseline: torch.Tensor, rows: torch.Tensor, floor: float) -> tuple[float, float]:
    """Relative gain above the floor of the loss, and the z of the paired difference."""
    difference = baseline - rows
    gain = (difference.mean() / (baseline.mean() - floor).clamp_min(1e-12)).item()
    return gain, (difference.mean() / max(_error(difference), 1e-12)).item()


def _error(difference: torch.Tensor) -> float:
    return (difference.std() / math.sqrt(len(difference))).item() if len(difference) > 1 else 0.0


# ---- training -----------------------------------------------------------------------------------


def train(
    pipeline: Pipeline,
    way: Way,
    seed: int,
    held_out: Any,
    num_steps: int,
    *,
    blank: Callable[[Any], Any] | None = None,
    enough: Callable[[torch.Tensor], bool] = lambda rows: False,
) -> Run:
    model = pipeline.make_model(seed).train()
    optimizer = way.make_optimizer(model)
    best = first = _score(pipeline, model, held_out, blank)
    losses: list[torch.Tensor] = []
    loader = pipeline.train if way.few_rows is None else probe.few(pipeline.train, way.few_rows)
    loader = loader if way.augment else probe.rebatch(loader, augment=False)
    for batch in probe.endless(loader):
        if len(losses) >= num_steps:
            break
        given = batch if blank is None else {**batch, "x": blank(batch["x"])}
        try:
            losses.append(pipeline.train_step(model, optimizer, given).loss)
        except NonFiniteLoss:
            if len(losses) < FIRST_STEPS:
                raise  # not the learning rate: the data or the loss
            losses += [torch.full_like(losses[0], math.inf)] * EVERY_STEPS
            break
        if len(losses) % EVERY_STEPS == 0 or len(losses) == num_steps:
            rows = _score(pipeline, model, held_out, blank)
            best = rows if rows.mean() < best.mean() else best
            if enough(best):
                break
    values = [v if math.isfinite(v) else 1e6 for v in torch.stack(losses).tolist()]
    start, end = mean(values[:FIRST_STEPS]), median(values[-EVERY_STEPS:])
    return Run(best, first.mean().item(), start, end, len(losses))


def _score(pipeline: Pipeline, model: nn.Module, held_out: Any, blank: Callable | None) -> Any:
    """`(N,)` held-out losses."""
    if blank is not None and probe.batch_statistics(model):
        outputs, y = _on_blanks(pipeline, model, held_out, blank)
    else:
        if blank is not None:
            rows = probe.few_rows(held_out, held_out.num_rows)
            held_out = probe.rebatch(held_out, rows={**rows, "x": blank(rows["x"])})
        found = pipeline.evaluate(model, held_out)
        outputs, y = found.outputs, found.y
    return _per_row(pipeline.task, outputs, y)


def _on_blanks(pipeline: Pipeline, model: nn.Module, held_out: Any, blank: Callable) -> Any:
    """Outputs by the statistics of the batch, without dropout; the running ones stay."""
    statistics = probe.batch_statistics(model)
    kept = [{k: b.clone() for k, b in module.named_buffers()} for module in statistics]
    model.eval()
    for module in statistics:
        module.train()
    batches = probe.batches_of(held_out, min_rows=held_out.num_rows)
    with torch.no_grad():
        outputs = torch.cat([probe.forward(pipeline, model, blank(b["x"])) for b in batches])
        for module, buffers in zip(statistics, kept, strict=True):
            for key, value in module.named_buffers():
                value.copy_(buffers[key])
    model.train()
    return outputs, torch.cat([batch["y"] for batch in batches])


def blanks(pipeline: Pipeline) -> Callable[[Any], Any]:
    """Every row becomes the mean training row; where a part of x is no measurement, whole rows are
    permuted instead, so that lengths and masks stay plausible."""
    x = probe.few_rows(pipeline.train, 4096)["x"]
    parts = probe.tensors(x)
    if all(value.is_floating_point() for value in parts.values()):
        means = {key: value.mean(dim=0, keepdim=True) for key, value in parts.items()}
        return lambda x: probe.like(
            x, {key: means[key].expand_as(value) for key, value in probe.tensors(x).items()}
        )

    def permuted(x: Any) -> Any:
        values = probe.tensors(x)
        num_rows = len(next(iter(values.values())))
        order = torch.randperm(num_rows).to(next(iter(values.values())).device)
        return probe.like(x, {key: value[order] for key, value in values.items()})

    return permuted
