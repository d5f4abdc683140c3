"""Can the project's own step learn a handful of examples by heart?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from . import Check, Pipeline, inconclusive, layout, probe, undisturbed
from .memorise import PARTS, Examples, Recipe, Trial, attempt, attempts, examples, longer, present

FIGURE = "overfit_one_batch.png"
MAX_LOSS_SHARE, RATES = 0.05, (1e-3, 1e-2)  # of one attempt, and what is tried after its own rate
MIN_OWN_FALL = 0.05  # relative, of the loss at the project's own rate
MAX_DECAY_SHARE = 1e-3  # of the weights, per step
NEEDED = ("optimum_loss", "metric", "metric_name", "metric_direction", "metric_bounds")


def overfit_one_batch(
    pipeline: Pipeline,
    *,
    num_rows: int = 8,
    num_steps: int = 300,
    max_loss_share: float = MAX_LOSS_SHARE,
    rates: tuple[float, ...] = RATES,
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
    given = examples(pipeline, num_rows)
    if given is None:
        because = "Fewer than 4 distinct examples of two classes without conflicts were found."
        return inconclusive(name, because, ("training rows repeat", "there is only one class"))
    recipe = Recipe(frozenset(PARTS), num_steps, max_loss_share)
    trials = list(attempts(pipeline, given, recipe, rates, num_models))
    if not trials[-1].passed:
        trials += list(longer(pipeline, given, recipe, trials))
    last = trials[-1]
    limit = given.target(last.start, max_loss_share)
    count = len(given.rows["y"])
    because = f"{count} examples reach a loss of {last.score:.3g} from {last.start:.3g}"
    because += f" and {pipeline.task.metric_name} {last.metric:.3g} in {len(last.losses)} steps"
    if last.passed and len(trials) > 1:
        return _late(given, name, trials, limit, because)
    if last.passed:
        return _shrinking(
            pipeline, Check(name, "open", last.score, limit, "", because + ".", (), FIGURE)
        )
    best = min(trials, key=lambda trial: trial.score)
    return _failed(pipeline, name, given, recipe, rates, best)


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


def _late(given: Examples, name: str, trials: list[Trial], limit: float, because: str) -> Check:
    """Learned by heart, but not at the project's own rate: said, and judged where the own rate
    does harm or next to nothing."""
    own, last = trials[0], trials[-1]
    because += f" at a rate of {last.rate:.2g}; at its own, {own.rate:.2g}, it is at "
    because += f"{own.score:.3g} after {len(own.losses)}."
    if last.rate < own.rate and not own.score <= given.target(own.start, 0.25):
        causes = ("the learning rate is far too high",)
        return Check(name, "shut", own.score, limit, "", because, causes, FIGURE)
    if own.score > (1 - MIN_OWN_FALL) * own.start:
        causes = ("the learning rate is far too low for this optimizer",)
        return Check(name, "warn", own.score, limit, "", because, causes, FIGURE)
    return Check(name, "open", last.score, limit, "", because, (), FIGURE)


def one_batch(pipeline: Pipeline, *, num_rows: int = 8, num_steps: int = 300) -> Trial | None:
    """The last attempt on the first model, for a figure: at the project's rate, or at the first
    other one that passes. None without enough examples. Leaves every generator and loader as it
    was."""
    with undisturbed(pipeline):
        given = examples(pipeline, num_rows)
        if given is None:
            return None
        recipe = Recipe(frozenset(PARTS), num_steps, MAX_LOSS_SHARE)
        return list(attempts(pipeline, given, recipe, RATES, 1))[-1]


def _failed(
    pipeline: Pipeline, name: str, given: Examples, recipe: Recipe, rates: tuple, best: Trial
) -> Check:
    limit = given.target(best.start, recipe.max_share)
    because = f"{len(given.rows['y'])} examples stall at a loss of {best.score:.4g} from "
    because += f"{best.start:.4g} with {pipeline.task.metric_name} {best.metric:.3g} at every rate"
    stall = fingerprint(pipeline.task, best)
    neutral = list(attempts(pipeline, given, replace(recipe, parts=frozenset()), rates, 1))[-1]
    if not neutral.passed:
        causes = (*stall, "the model or the loss: a neutral step fails too")
        return Check(name, "shut", best.score, limit, "", f"{because}.", causes, FIGURE)
    guilty = []
    for part in (part for part in PARTS if present(pipeline, part)):
        with_part = replace(recipe, parts=frozenset({part}))
        if not attempt(pipeline, given, with_part, 0, neutral.rate, patient=True).passed:
            guilty.append(part)
    causes = (*(PARTS[part] for part in guilty), *stall)
    named = ", ".join(causes[: len(guilty)]) or "several parts together"
    because += f", while a neutral step learns them: the cause is in the step ({named})."
    return Check(name, "shut", best.score, limit, "", because, causes, FIGURE)


# ---- what a stall points to ---------------------------------------------------------------------


def fingerprint(task: Any, trial: Trial) -> tuple[str, ...]:
    """What the value of the stall (within 5 %) and the outputs at its end point to."""
    if trial.score < task.optimum_loss() - 1e-3:
        return ("below the lowest possible: the sign is flipped, or NLL is taken of raw logits",)
    stalls = {"exclusive": _of_classes, "multilabel": _of_labels, "real": _of_numbers}
    named = stalls.get(task.targets, _of_tokens)(task, trial)
    named += [(trial.start, "nothing moves: the graph is cut, or no update is made")]
    found = [text for value, text in named if math.isclose(trial.score, value, rel_tol=0.05)]
    return (*_alike(trial), *found)


def _of_classes(task: Any, trial: Trial) -> list[tuple[float, str]]:
    n = getattr(task, "num_outputs", 0)
    if n < 2:
        return []
    return [
        (math.log(math.e + n - 1) - 1, "softmax or sigmoid before the loss"),
        (math.log(1 + (n - 1) * math.exp(-2)), "tanh before the loss"),
        (_entropy(trial.y), "a constant output: only the last bias learns, units are dead"),
        (math.log(n), "no gradient reaches the weights"),
    ]


def _of_labels(task: Any, trial: Trial) -> list[tuple[float, str]]:
    share = trial.y.double().mean(dim=0)
    entropy = -(torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share)).mean().item()
    on = share.mean().item()
    twice = on * math.log(1 + math.exp(-1)) + (1 - on) * math.log(2)
    return [
        (twice, "sigmoid before the loss"),
        (entropy, "a constant output: only the last bias learns, units are dead"),
        (math.log(2), "no gradient reaches the weights"),
    ]


def _of_numbers(task: Any, trial: Trial) -> list[tuple[float, str]]:
    y = trial.y.double()
    text = "the variance of the targets: a constant output, or one broadcast against the targets"
    if trial.outputs.shape != trial.y.shape:
        shapes = f"{tuple(trial.outputs.shape)} against {tuple(trial.y.shape)}"
        text = f"outputs are broadcast against the targets ({shapes})"
    return [((y - y.mean(dim=0)).square().mean().item(), text)]


def _of_tokens(task: Any, trial: Trial) -> list[tuple[float, str]]:
    told = trial.y[layout.supervised(task, trial.y)]
    return [
        (_entropy(told), "a constant output: only the last bias learns, units are dead"),
        (math.log(max(2, trial.outputs.shape[-1])), "no gradient reaches the weights"),
    ]


def _entropy(y: torch.Tensor) -> float:
    counts = y.unique(return_counts=True)[1].double()
    return -torch.xlogy(counts / counts.sum(), counts / counts.sum()).sum().item()


def _alike(trial: Trial) -> tuple[str, ...]:
    """Examples that the model cannot tell apart although others can be: their stall is the share
    of such rows times ln 2."""
    flat = trial.outputs.double().reshape(len(trial.y), -1)
    gaps = (flat[:, None] - flat[None]).abs().amax(dim=2)
    near = gaps <= 1e-3 * gaps.max()
    labels = trial.y.reshape(len(trial.y), -1)
    other = (labels[:, None] != labels[None]).any(dim=2)
    count = int((near & other).any(dim=1).sum())
    if not count or near.all():
        return ()
    return (f"conflicting duplicates: {count} of {len(flat)} examples look the same to the model",)
