"""Attempts to learn a handful of examples by heart, and which examples they are."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import torch
from torch import nn

from ..instruments import NonFiniteLoss
from ..loop import take
from . import Pipeline, answers, counting, layout, probe
from .step import reference_step

EVERY_STEPS = 20
IDLE_STEPS = 120  # a rate that has moved nothing by then is given up for the next
PARTS = {
    "train_step": "the project's train_step",
    "decay": "weight decay",
    "clip": "the clip",
    "dropout": "dropout",
    "augment": "augmentation",
}


@dataclass(frozen=True)
class Examples:
    """The examples, and what can be reached on them."""

    rows: dict = field(repr=False)
    floor: float  # lowest loss; above the task's own where one input has several answers
    ceiling: float  # loss of the best constant number; inf for other targets
    top: float | None  # metric of right answers; None where it cannot be asked on so few

    def target(self, start: float, share: float) -> float:
        """The loss that is reached when only `share` is left of what can be learned."""
        return self.floor + share * (min(start, self.ceiling) - self.floor)


@dataclass(frozen=True)
class Trial:
    """One attempt to learn the examples by heart."""

    seed: int
    rate: float
    start: float
    losses: list[float]
    score: float  # the better of the lower quartile of the last losses and the evaluation loss
    metric: float
    passed: bool
    outputs: torch.Tensor = field(repr=False)  # (B, ...) of the evaluation at the end
    y: torch.Tensor = field(repr=False)


@dataclass(frozen=True)
class Recipe:
    """Which parts of the project's training take part; all of them, or the neutral step."""

    parts: frozenset[str]
    num_steps: int
    max_share: float


# ---- attempts ---------------------------------------------------------------------------------


def attempts(
    pipeline: Pipeline, given: Examples, recipe: Recipe, rates: tuple[float, ...], num_models: int
) -> Iterator[Trial]:
    """Until one passes: the project's rate, then the others, on the first model, then the next.
    SGD gets one rate more: what serves it lies about ten times higher."""
    optimizer = pipeline.make_optimizer(pipeline.make_model(0))
    own = probe.base_rate(optimizer)
    more = (10 * max(rates),) if isinstance(optimizer, torch.optim.SGD) else ()
    tried = (own, *(r for r in (*rates, *more) if not math.isclose(r, own)))
    for seed in range(num_models):
        for rate in tried:
            trial = attempt(pipeline, given, recipe, seed, rate, patient=rate == max(tried))
            yield trial
            if trial.passed:
                return


def attempt(
    pipeline: Pipeline, given: Examples, recipe: Recipe, seed: int, rate: float, *, patient: bool
) -> Trial:
    model = pipeline.make_model(seed).train()
    if "dropout" not in recipe.parts:
        probe.without_dropout(model)
    optimizer = pipeline.make_optimizer(model)
    probe.set_rate(optimizer, rate)
    if "decay" not in recipe.parts:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
    augment = "augment" in recipe.parts
    size = len(given.rows["y"])
    loader = probe.rebatch(pipeline.train, rows=given.rows, batch_size=size, augment=augment)
    losses: list[torch.Tensor] = []
    found = None
    for batch in probe.endless(loader):
        try:
            losses.append(_step(pipeline, model, optimizer, batch, recipe))
        except NonFiniteLoss:
            losses.append(torch.tensor(math.inf, device=pipeline.device))
        done = len(losses) >= recipe.num_steps or not math.isfinite(float(losses[-1]))
        if done or len(losses) % EVERY_STEPS == 0:
            found = _judge(pipeline, model, loader, losses, given, recipe.max_share, (seed, rate))
            idle = len(losses) >= IDLE_STEPS and min(found.losses) > 0.98 * found.start
            if found.passed or done or (idle and not patient):
                break
    return found


def _step(pipeline: Pipeline, model: nn.Module, optimizer: Any, batch: dict, recipe: Recipe) -> Any:
    """The project's step, or the neutral one with a clip if asked; returns the loss."""
    if "train_step" in recipe.parts:
        return pipeline.train_step(model, optimizer, batch).loss.detach()
    clip_norm = pipeline.clip_norm if "clip" in recipe.parts else None
    loss, _ = reference_step(pipeline, model, optimizer, batch, clip_norm)
    return torch.tensor(loss, device=pipeline.device)


def _judge(
    pipeline: Pipeline,
    model: nn.Module,
    loader: Any,
    losses: list[torch.Tensor],
    given: Examples,
    share: float,
    way: tuple[int, float],
) -> Trial:
    values = torch.stack(losses).tolist()
    tail = sorted(values[-EVERY_STEPS:])
    loss, metric, outputs, y = _evaluated(pipeline, model, loader)
    score, top = min(tail[len(tail) // 4], loss if math.isfinite(loss) else math.inf), given.top
    if top is not None and not math.isclose(metric, top):
        other = _in_training(pipeline, model, loader)
        metric = max((metric, other), key=lambda m: -abs(m - top))
    passed = score <= given.target(values[0], share) and (top is None or math.isclose(metric, top))
    passed = passed and score >= pipeline.task.optimum_loss() - 1e-3
    return Trial(*way, values[0], values, score, metric, passed, outputs, y)


def _evaluated(pipeline: Pipeline, model: nn.Module, loader: Any) -> tuple:
    """Loss, metric (NaN if it cannot be computed on so few rows), outputs and targets."""
    try:
        found = pipeline.evaluate(model, copy.copy(loader))
        return found.loss, found.metric, found.outputs, found.y
    except ValueError:
        batch = next(iter(copy.copy(loader)))
        with torch.no_grad():
            outputs = probe.forward(pipeline, copy.deepcopy(model).eval(), batch["x"])
            loss = pipeline.task.loss(outputs, batch["y"]).item()
        return loss, math.nan, outputs.cpu(), batch["y"].cpu()


def _in_training(pipeline: Pipeline, model: nn.Module, loader: Any) -> float:
    """The metric in training mode: with BatchNorm, evaluation may lag behind."""
    batch = next(iter(copy.copy(loader)))
    with torch.no_grad():
        outputs = probe.forward(pipeline, copy.deepcopy(model).train(), batch["x"])
    return counting.score(pipeline.task, outputs, batch["y"])


def longer(
    pipeline: Pipeline, given: Examples, recipe: Recipe, trials: list[Trial]
) -> Iterator[Trial]:
    """Slow is not stuck: the best attempt, if it was still falling at its end, gets four times the
    steps, and ten times the rate (little is trained on top of a frozen trunk)."""
    best = min(trials, key=lambda trial: trial.score)
    late = best.losses[len(best.losses) // 2 :]
    if not mean(late[-EVERY_STEPS:]) < 0.95 * mean(late[:EVERY_STEPS]):
        return
    patient = replace(recipe, num_steps=4 * recipe.num_steps)
    for rate in (best.rate, 10 * best.rate):
        trial = attempt(pipeline, given, patient, best.seed, rate, patient=True)
        yield trial
        if trial.passed:
            return


def present(pipeline: Pipeline, part: str) -> bool:
    """Whether the project's training has that part at all."""
    if part == "train_step":
        return True
    if part == "clip":
        return pipeline.clip_norm is not None
    if part == "augment":
        return getattr(pipeline.train, "augment", None) is not None
    model = pipeline.make_model(0)
    if part == "dropout":
        inside = (getattr(module, "dropout", None) for module in model.modules())
        return bool(probe.dropouts(model)) or any(isinstance(p, float) and p > 0 for p in inside)
    groups = pipeline.make_optimizer(model).param_groups
    return any(group.get("weight_decay", 0) for group in groups)


# ---- examples ---------------------------------------------------------------------------------


def examples(pipeline: Pipeline, num_rows: int) -> Examples | None:
    """Stored rows, distinct in x (so none conflict), with targets that differ, spread over classes
    where there are any; fewer for a model of few parameters; None if there are not even four."""
    rows = probe.few_rows(pipeline.train, 512)
    flat = [v.flatten(1) for v in probe.tensors(rows["x"]).values()]
    told = layout.supervised(pipeline.task, rows["y"]).reshape(len(rows["y"]), -1).any(dim=1)
    num_rows = min(num_rows, max(4, _capacity(pipeline, rows["y"])))
    quotas = _quotas(pipeline.task, rows["y"], num_rows)
    chosen: list[int] = []
    for quota in quotas:
        for i in told.nonzero().flatten().tolist():
            full = len(chosen) >= num_rows
            if full or i in chosen or any(_equal(flat, i, j) for j in chosen):
                continue
            if sum(torch.equal(rows["y"][j], rows["y"][i]) for j in chosen) < quota:
                chosen.append(i)
    picked = take(rows, torch.tensor(chosen, device=rows["y"].device, dtype=torch.long))
    if len(chosen) < 4 or len(picked["y"].unique(dim=0)) < 2:
        return None
    return _reachable(pipeline.task, picked)


def _quotas(task: Any, y: torch.Tensor, num_rows: int) -> tuple[int, int]:
    """Examples with the same target: few at first, then, where others are rare, any number."""
    if task.targets == "exclusive":
        return max(1, num_rows // max(1, len(y.unique()))), num_rows
    return num_rows // 2, num_rows


def _capacity(pipeline: Pipeline, y: torch.Tensor) -> int:
    """Rows that half of the parameters can hold, one number per target."""
    count = sum(p.numel() for p in pipeline.make_model(0).parameters() if p.requires_grad)
    return count // (2 * (y[:1].numel() if pipeline.task.targets == "real" else 1))


def _reachable(task: Any, rows: dict) -> Examples:
    y, floor, ceiling, top = rows["y"], task.optimum_loss(), math.inf, None
    if task.targets == "tokens" and getattr(task, "causal", True):
        floor += _conflict(task, rows)
    if task.targets == "real":
        ceiling = float(task.prior_loss(task.prior(y))) if hasattr(task, "prior_loss") else ceiling
    elif task.targets != "tokens" or floor == task.optimum_loss():
        top = _top(task, y)
    return Examples(rows, floor, ceiling, top)


def _top(task: Any, y: torch.Tensor) -> float | None:
    low, high = task.metric_bounds
    top = high if task.metric_direction == "max" else low
    if task.targets == "exclusive" or not hasattr(task, "ideal_outputs"):
        return top if math.isfinite(top) else None
    top = counting.score(task, answers.right(task, y), y)
    return top if math.isfinite(top) else None


def _conflict(task: Any, rows: dict) -> float:
    """Mean entropy in nats of targets whose inputs up to there are the same: no model that reads
    from the left can tell them apart."""
    y, told = rows["y"].cpu(), layout.supervised(task, rows["y"]).cpu()
    steps = [v.cpu() for v in probe.tensors(rows["x"]).values() if v.shape[:2] == y.shape]
    total = 0.0
    for t in range(y.shape[1] if steps else 0):
        before: dict[bytes, list[int]] = {}
        for i in range(len(y)):
            key = b"".join(v[i, : t + 1].numpy().tobytes() for v in steps)
            before.setdefault(key, []).append(i)
        if len(before) == len(y):
            break
        for same in before.values():
            counts = y[same, t][told[same, t]].unique(return_counts=True)[1].double()
            total -= (counts * (counts / counts.sum()).log()).sum().item()
    return total / max(1, int(told.sum()))


def _equal(flat: list[torch.Tensor], i: int, j: int) -> bool:
    return all(torch.equal(values[i], values[j]) for values in flat)
