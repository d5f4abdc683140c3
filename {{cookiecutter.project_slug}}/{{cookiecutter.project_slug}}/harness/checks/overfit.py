"""Can the project's own step learn a handful of examples by heart?"""

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
from . import Check, Pipeline, inconclusive, probe, undisturbed
from .step import reference_step

FIGURE = "overfit_one_batch.png"
EVERY_STEPS = 20
MIN_OWN_FALL = 0.05  # relative, of the loss at the project's own rate
MAX_DECAY_SHARE = 1e-3  # of the weights, per step
NEEDED = ("optimum_loss", "metric", "metric_name", "metric_direction", "metric_bounds")
IDLE_STEPS = 120  # a rate that has moved nothing by then is given up for the next
PARTS = {
    "train_step": "the project's train_step",
    "decay": "weight decay",
    "clip": "the clip",
    "dropout": "dropout",
    "augment": "augmentation",
}


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
class _Recipe:
    """Which parts of the project's training take part; all of them, or the neutral step."""

    parts: frozenset[str]
    num_steps: int
    max_share: float


def overfit_one_batch(
    pipeline: Pipeline,
    *,
    num_rows: int = 8,
    num_steps: int = 300,
    max_loss_share: float = 0.05,
    rates: tuple[float, ...] = (1e-3, 1e-2),
    num_models: int = 2,
) -> Check:
    """`num_rows` distinct examples of at least two classes, through the project's own loader and
    step, at its own learning rate and then `rates`.

    Open when the loss falls below `max_loss_share` of its start above the lowest it can reach, and
    the metric is at its maximum. If not, a neutral step (no decay, clip, dropout, augmentation)
    tries the same: if that passes, the parts are added back one at a time and the guilty one is
    named. The same limits hold in fp32 and bf16.
    """
    name = "overfit_one_batch"
    missing = probe.lacking(name, pipeline, task=NEEDED)
    if missing:
        return missing
    rows = _examples(pipeline, num_rows)
    if rows is None:
        because = "Fewer than 4 distinct examples of two classes without conflicts were found."
        return inconclusive(name, because, ("training rows repeat", "there is only one class"))
    recipe = _Recipe(frozenset(PARTS), num_steps, max_loss_share)
    trials = list(_attempts(pipeline, rows, recipe, rates, num_models))
    if not trials[-1].passed:
        trials += list(_longer(pipeline, rows, recipe, trials))
    last = trials[-1]
    limit = _target(pipeline, last.start, max_loss_share)
    count = len(rows["y"])
    because = f"{count} examples reach a loss of {last.score:.3g} from {last.start:.3g}"
    because += f" and {pipeline.task.metric_name} {last.metric:.3g} in {len(last.losses)} steps"
    if last.passed and len(trials) > 1:
        return _late(pipeline, name, trials, limit, because)
    if last.passed:
        return _shrinking(
            pipeline, Check(name, "open", last.score, limit, "", because + ".", (), FIGURE)
        )
    best = min(trials, key=lambda trial: trial.score)
    return _failed(pipeline, name, rows, recipe, rates, best)


def _longer(
    pipeline: Pipeline, rows: dict, recipe: _Recipe, trials: list[Trial]
) -> Iterator[Trial]:
    """Slow is not stuck: the best attempt, if it was still falling at its end, gets four times the
    steps, and ten times the rate (little is trained on top of a frozen trunk)."""
    best = min(trials, key=lambda trial: trial.score)
    late = best.losses[len(best.losses) // 2 :]
    if not mean(late[-EVERY_STEPS:]) < 0.95 * mean(late[:EVERY_STEPS]):
        return
    patient = replace(recipe, num_steps=4 * recipe.num_steps)
    for rate in (best.rate, 10 * best.rate):
        trial = _attempt(pipeline, rows, patient, best.seed, rate, patient=True)
        yield trial
        if trial.passed:
            return


def _shrinking(pipeline: Pipeline, passed: Check) -> Check:
    """Learned by heart; but weights that decay within a few hundred steps keep nothing they learn
    from the rest of the data (learning rate x weight decay, per step; 1e-4 is usual)."""
    groups = pipeline.make_optimizer(pipeline.make_model(0)).param_groups
    share = max(float(g["lr"]) * float(g.get("weight_decay") or 0.0) for g in groups)
    if share <= MAX_DECAY_SHARE:
        return passed
    because = f"{passed.because[:-1]}, but weight decay takes {share:.1%} of the weights per step."
    verdict = "shut" if share > 5 * MAX_DECAY_SHARE else "warn"
    causes = ("weight_decay is far too high for this learning rate",)
    limit = MAX_DECAY_SHARE
    return Check(passed.name, verdict, share, limit, "per step", because, causes, FIGURE)


def _late(pipeline: Pipeline, name: str, trials: list[Trial], limit: float, because: str) -> Check:
    """Learned by heart, but not at the project's own rate: said, and judged where the own rate
    does harm or next to nothing."""
    own, last = trials[0], trials[-1]
    because += f" at a rate of {last.rate:.2g}; at its own, {own.rate:.2g}, it is at "
    because += f"{own.score:.3g} after {len(own.losses)}."
    if last.rate < own.rate and not own.score <= _target(pipeline, own.start, 0.25):
        causes = ("the learning rate is far too high",)
        return Check(name, "shut", own.score, limit, "", because, causes, FIGURE)
    if own.score > (1 - MIN_OWN_FALL) * own.start:
        causes = ("the learning rate is far too low for this optimizer",)
        return Check(name, "warn", own.score, limit, "", because, causes, FIGURE)
    return Check(name, "open", last.score, limit, "", because, (), FIGURE)


def one_batch(pipeline: Pipeline, *, num_rows: int = 8, num_steps: int = 300) -> Trial | None:
    """The first attempt at the project's own rate, for a figure; None without enough examples.
    Leaves every generator and loader as it was."""
    with undisturbed(pipeline):
        rows = _examples(pipeline, num_rows)
        if rows is None:
            return None
        recipe = _Recipe(frozenset(PARTS), num_steps, 0.05)
        return list(_attempts(pipeline, rows, recipe, (1e-3, 1e-2), 1))[-1]


def _failed(
    pipeline: Pipeline, name: str, rows: dict, recipe: _Recipe, rates: tuple, best: Trial
) -> Check:
    limit = _target(pipeline, best.start, recipe.max_share)
    because = f"{len(rows['y'])} examples stall at a loss of {best.score:.4g} from {best.start:.4g}"
    because += f" with {pipeline.task.metric_name} {best.metric:.3g} at every rate"
    stall = _fingerprint(pipeline, best, rows["y"])
    neutral = list(_attempts(pipeline, rows, replace(recipe, parts=frozenset()), rates, 1))[-1]
    if not neutral.passed:
        causes = (*stall, "the model or the loss: a neutral step fails too")
        return Check(name, "shut", best.score, limit, "", f"{because}.", causes, FIGURE)
    guilty = []
    for part in (part for part in PARTS if _present(pipeline, part)):
        with_part = replace(recipe, parts=frozenset({part}))
        if not _attempt(pipeline, rows, with_part, 0, neutral.rate, patient=True).passed:
            guilty.append(part)
    causes = (*(PARTS[part] for part in guilty), *stall)
    named = ", ".join(causes[: len(guilty)]) or "several parts together"
    because += f", while a neutral step learns them: the cause is in the step ({named})."
    return Check(name, "shut", best.score, limit, "", because, causes, FIGURE)


def _fingerprint(pipeline: Pipeline, trial: Trial, y: torch.Tensor) -> tuple[str, ...]:
    """What the value of the stall points to, within 5 %."""
    n, stall = getattr(pipeline.task, "num_outputs", 0), trial.score
    named = [(trial.start, "nothing moves: the graph is cut, or no update is made")]
    if pipeline.task.targets == "exclusive" and n > 1:
        shares = torch.bincount(y.cpu(), minlength=n).double() / len(y)
        entropy = -torch.xlogy(shares, shares).sum().item()
        named = [
            (math.log(math.e + n - 1) - 1, "softmax or sigmoid before the loss"),
            (math.log(1 + (n - 1) * math.exp(-2)), "tanh before the loss"),
            (entropy, "a constant output: only the last bias learns, units are dead"),
            (math.log(n), "no gradient reaches the weights"),
            *named,
        ]
    if stall < pipeline.task.optimum_loss() - 1e-3:
        return ("below the lowest possible: the sign is flipped, or NLL is taken of raw logits",)
    return tuple(text for value, text in named if math.isclose(stall, value, rel_tol=0.05))


# ---- attempts ---------------------------------------------------------------------------------


def _attempts(
    pipeline: Pipeline, rows: dict, recipe: _Recipe, rates: tuple[float, ...], num_models: int
) -> Iterator[Trial]:
    """Until one passes: the project's rate, then the others, on the first model, then the next.
    SGD gets one rate more: what serves it lies about ten times higher."""
    optimizer = pipeline.make_optimizer(pipeline.make_model(0))
    own = probe.base_rate(optimizer)
    more = (10 * max(rates),) if isinstance(optimizer, torch.optim.SGD) else ()
    tried = (own, *(r for r in (*rates, *more) if not math.isclose(r, own)))
    for seed in range(num_models):
        for rate in tried:
            trial = _attempt(pipeline, rows, recipe, seed, rate, patient=rate == max(tried))
            yield trial
            if trial.passed:
                return


def _attempt(
    pipeline: Pipeline, rows: dict, recipe: _Recipe, seed: int, rate: float, *, patient: bool
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
    loader = probe.rebatch(pipeline.train, rows=rows, batch_size=len(rows["y"]), augment=augment)
    losses: list[torch.Tensor] = []
    found = None
    for batch in probe.endless(loader):
        try:
            losses.append(_step(pipeline, model, optimizer, batch, recipe))
        except NonFiniteLoss:
            losses.append(torch.tensor(math.inf, device=pipeline.device))
        done = len(losses) >= recipe.num_steps or not math.isfinite(float(losses[-1]))
        if done or len(losses) % EVERY_STEPS == 0:
            found = _judge(pipeline, model, loader, losses, recipe.max_share, (seed, rate))
            idle = len(losses) >= IDLE_STEPS and min(found.losses) > 0.98 * found.start
            if found.passed or done or (idle and not patient):
                break
    return found


def _step(
    pipeline: Pipeline, model: nn.Module, optimizer: Any, batch: dict, recipe: _Recipe
) -> Any:
    """The project's step, or the neutral one with a clip if asked; returns the loss."""
    if "train_step" in recipe.parts:
        return pipeline.train_step(model, optimizer, batch).loss.detach()
    clip_norm = pipeline.clip_norm if "clip" in recipe.parts else None
    loss, _ = reference_step(pipeline, model, optimizer, batch, clip_norm)
    return torch.tensor(loss, device=pipeline.device)


def _judge(
    pipeline: Pipeline, model: nn.Module, loader: Any, losses: list, share: float, way: tuple
) -> Trial:
    values = torch.stack(losses).tolist()
    tail = sorted(values[-EVERY_STEPS:])
    found = pipeline.evaluate(model, copy.copy(loader))
    score = min(tail[len(tail) // 4], found.loss if math.isfinite(found.loss) else math.inf)
    low, high = pipeline.task.metric_bounds
    top = high if pipeline.task.metric_direction == "max" else low
    metric = found.metric
    if not math.isclose(metric, top):  # with BatchNorm, evaluation may lag behind training
        with torch.no_grad():
            batch = next(iter(copy.copy(loader)))
            outputs = probe.forward(pipeline, copy.deepcopy(model).train(), batch["x"])
            metric = max(
                (metric, pipeline.task.metric(outputs, batch["y"])), key=lambda m: -abs(m - top)
            )
    target = _target(pipeline, values[0], share)
    passed = score <= target and (math.isinf(top) or math.isclose(metric, top))
    passed = passed and score >= pipeline.task.optimum_loss() - 1e-3
    return Trial(*way, values[0], values, score, metric, passed, found.outputs, found.y)


def _target(pipeline: Pipeline, start: float, share: float) -> float:
    floor = pipeline.task.optimum_loss()
    return floor + share * (start - floor)


def _present(pipeline: Pipeline, part: str) -> bool:
    """Whether the project's training has that part at all."""
    if part == "train_step":
        return True
    if part == "clip":
        return pipeline.clip_norm is not None
    if part == "augment":
        return getattr(pipeline.train, "augment", None) is not None
    model = pipeline.make_model(0)
    if part == "dropout":
        return bool(probe.dropouts(model))
    groups = pipeline.make_optimizer(model).param_groups
    return any(group.get("weight_decay", 0) for group in groups)


# ---- examples ---------------------------------------------------------------------------------


def _examples(pipeline: Pipeline, num_rows: int) -> dict | None:
    """Stored rows, distinct in x (so none conflict), spread over the classes; None if too few."""
    rows = probe.few_rows(pipeline.train, 512)
    flat = [v.flatten(1) for v in probe.tensors(rows["x"]).values()]
    exclusive = pipeline.task.targets == "exclusive"
    chosen: list[int] = []
    per_class = max(1, num_rows // max(1, len(rows["y"].unique()))) if exclusive else num_rows
    for quota in (per_class, num_rows):
        for i in range(len(rows["y"])):
            full = len(chosen) >= num_rows
            if full or i in chosen or any(_equal(flat, i, j) for j in chosen):
                continue
            if not exclusive or sum(bool(rows["y"][j] == rows["y"][i]) for j in chosen) < quota:
                chosen.append(i)
    index = torch.tensor(chosen, device=rows["y"].device)
    picked = probe.take_rows(rows, index)
    if len(chosen) < 4 or (exclusive and len(picked["y"].unique()) < 2):
        return None
    return picked


def _equal(flat: list[torch.Tensor], i: int, j: int) -> bool:
    return all(torch.equal(values[i], values[j]) for values in flat)
