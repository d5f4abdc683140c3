"""Does the model learn anything from its input? Against the best that sees none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from . import Check, Pipeline, inconclusive, probe, runs
from .runs import Run, Way

NEUTRAL_RATES = (1e-3, 1e-2)  # of Adam, tried when the project's own optimizer gains too little
FEW_ROWS = 256


@dataclass(frozen=True)
class Limits:
    min_gain: float
    min_weak_gain: float
    min_z: float
    min_fall: float
    max_leak_gain: float
    max_growth: float
    min_augmented_share: float
    num_steps: int


@dataclass(frozen=True)
class Comparison:
    gain: float  # relative, above the lowest value the loss can reach
    z: float  # of the paired difference
    real: Run
    baseline: float  # mean held-out loss of the best predictor without input
    train_prior: float  # training loss of the constant prior
    ahead: float  # relative gain of the run on blanks over the best constant for held-out labels
    ahead_z: float
    way: Way


def input_independent_baseline(
    pipeline: Pipeline,
    *,
    num_steps: int = 200,
    max_rows: int = 1024,
    min_gain: float = 0.10,
    min_weak_gain: float = 0.01,
    min_z: float = 3.0,
    min_fall: float = 0.05,
    max_leak_gain: float = 0.05,
    max_growth: float = 2.0,
    min_augmented_share: float = 0.7,
) -> Check:
    """Held-out loss after at most `num_steps` project steps, against the better of the best
    constant for training's labels and the same model trained as long on blanked inputs.

    Blank: the mean training input; inputs that are no measurements are permuted across rows.
    Models with batch statistics are scored with those of the batch on blanks: running ones explode
    there and make a broken model look good. Each run is taken at its best scored step. A run that
    gains too little is repeated with Adam, and then on two more models (the median counts). A weak
    signal is a gain above `min_weak_gain` and twice of what chance gives. Where
    training augments, less than `min_augmented_share` of the gain without it warns, less than half
    of that shuts. Losses are means over hundreds of rows: one limit in fp32 and bf16.
    """
    name = "input_independent_baseline"
    needed = ("prior", "constant_outputs", "loss_per_row", "optimum_loss")
    missing = probe.lacking(name, pipeline, task=needed)
    if missing:
        return missing
    limits = Limits(
        min_gain=min_gain,
        min_weak_gain=max(min_weak_gain, 2 * _gain_by_chance(pipeline)),
        min_z=min_z,
        min_fall=min_fall,
        max_leak_gain=max_leak_gain,
        max_growth=max_growth,
        min_augmented_share=min_augmented_share,
        num_steps=num_steps,
    )
    held_out = probe.few(pipeline.validation, max_rows)
    tried = _ways(pipeline, held_out, limits)
    found = max(tried, key=lambda comparison: comparison.gain)
    if not _good(found, limits):
        again = [_compare(pipeline, found.way, held_out, seed, limits) for seed in (1, 2)]
        found = sorted([found, *again], key=lambda comparison: comparison.gain)[1]
    verdict = _verdict(name, found, tried, limits)
    return _augmented(pipeline, verdict, found, held_out, limits)


def _verdict(name: str, c: Comparison, tried: list[Comparison], limits: Limits) -> Check:
    loss, own = c.real.rows.mean().item(), tried[0].real
    highest = limits.max_growth * max(own.train_start, c.train_prior)
    because = (
        f"After {c.real.steps} steps{c.way.how} the held-out loss is {loss:.4g}, against "
        f"{c.baseline:.4g} of the best predictor without input (gain {c.gain:.1%}, z {c.z:.2g})"
    )
    numbers = (c.gain, limits.min_gain, "relative gain")
    if c.ahead > limits.max_leak_gain and c.ahead_z > limits.min_z:
        because += f"; the model without input beats every constant answer by {c.ahead:.1%}."
        causes = ("the label reaches the model or the loss around the input",)
        ahead = (c.ahead, limits.max_leak_gain, "relative gain")
        return Check(name, "shut", *ahead, because, causes)
    if _good(c, limits) and not own.train_end > highest:
        return Check(name, "open", *numbers, because + ".")
    if _good(c, limits):
        because += f"; by its own optimizer the training loss grew to {own.train_end:.3g}."
        causes = ("the update goes uphill", "the learning rate is far too high")
        return Check(name, "shut", own.train_end, highest, "", because, causes)
    if c.gain > limits.min_weak_gain and c.z > limits.min_z:
        causes = ("inputs say little about the labels", "too little training", "most labels wrong")
        return Check(name, "warn", *numbers, because + ": weak signal.", causes)
    if c.gain > limits.min_gain:
        because += f": more held-out rows are needed for z > {limits.min_z:g}."
        return inconclusive(name, because)
    fall = max(other.real.train_fall for other in tried)
    if fall < limits.min_fall and loss > (1 - limits.min_fall) * c.real.start:
        because += f"; no run moves by {limits.min_fall:.0%}: see overfit_one_batch."
        return inconclusive(name, because, ("the model does not train",))
    because += f"; the training loss fell by up to {fall:.0%}."
    return Check(name, "shut", *numbers, because, _causes(c, tried))


def _gain_by_chance(pipeline: Pipeline) -> float:
    """Relative gain that means nothing. Permuted labels: a table from true to permuted classes has
    (C-1)^2 free entries, each fitted to N rows worth 1/2N nats (Wilks). Tokens: rows of another
    length than their targets differ a little from rows that are permuted (1.7 % where it was seen;
    twice this value is asked for)."""
    y = probe.labels(pipeline.train)
    if pipeline.task.targets == "tokens":
        return 0.015
    if pipeline.task.targets != "exclusive" or not hasattr(pipeline.task, "prior_loss"):
        return 0.0
    entropy = pipeline.task.prior_loss(pipeline.task.prior(y)) - pipeline.task.optimum_loss()
    return (pipeline.task.num_outputs - 1) ** 2 / (2 * len(y)) / max(entropy, 1e-12)


def _causes(c: Comparison, tried: list[Comparison]) -> tuple[str, ...]:
    """Trained well and wrong on held-out rows from the start, or never learned anything general?"""
    labels = "inputs do not belong to their labels (permuted, or reordered in the batch)"
    blank = "inputs are blanked or destroyed"
    held_out = "validation has other labels or another preprocessing"
    if any(t.real.train_fall > 0.5 and not t.way.few_rows for t in tried):
        return (held_out, labels, blank)
    return (labels, blank, held_out)


# ---- augmentation -----------------------------------------------------------------------------


def _augmented(
    pipeline: Pipeline, verdict: Check, found: Comparison, held_out: Any, limits: Limits
) -> Check:
    """Augmentation may slow learning; where most of what is learned without it is lost, it destroys
    what the labels depend on. Both are trained equally long, the better of two models counts."""
    if getattr(pipeline.train, "augment", None) is None:
        return verdict
    y = runs.held_out_labels(held_out)
    prior = runs.constant_losses(pipeline, probe.labels(pipeline.train), y)
    floor = pipeline.task.optimum_loss()

    def gain(augment: bool, seed: int, num_steps: int) -> float:
        way = replace(found.way, augment=augment)
        rows = runs.train(pipeline, way, seed, held_out, num_steps).rows
        return runs.gain(prior, rows, floor)[0]

    own = runs.gain(prior, found.real.rows, floor)[0]
    without = gain(False, 0, found.real.steps)
    if own >= limits.min_augmented_share * without or without < limits.min_gain:
        return verdict
    own, without = gain(True, 0, limits.num_steps), gain(False, 0, limits.num_steps)
    if own < limits.min_augmented_share * without:
        own = max(own, gain(True, 1, 2 * limits.num_steps))
    share = own / without
    if share >= limits.min_augmented_share:
        return verdict
    because = f"{verdict.because[:-1]}; without augmentation the gain over the label shares is "
    because += f"{without:.1%}, with it {own:.1%}."
    causes = ("augmentation destroys what the label depends on, or is far too strong",)
    worse = verdict.verdict in ("shut", "inconclusive") or share < limits.min_augmented_share / 2
    numbers = (share, limits.min_augmented_share, "share of the gain without augmentation")
    return Check(verdict.name, "shut" if worse else "warn", *numbers, because, causes)


# ---- runs -------------------------------------------------------------------------------------


def _ways(pipeline: Pipeline, held_out: Any, limits: Limits) -> list[Comparison]:
    """The project's optimizer; while the input gains too little, Adam at two rates; at last few
    rows, which are learned by heart soon: if that too says nothing about others, nothing will."""
    ways = [Way("", pipeline.make_optimizer)]
    ways += [Way(f" of Adam at {rate:g}", runs.adam(rate)) for rate in NEUTRAL_RATES]
    ways += [Way(f" of Adam on {FEW_ROWS} rows", runs.adam(NEUTRAL_RATES[-1]), FEW_ROWS)]
    tried: list[Comparison] = []
    for way in ways:
        tried.append(_compare(pipeline, way, held_out, 0, limits))
        if _good(tried[-1], limits):
            break
    return tried


def _good(found: Comparison, limits: Limits) -> bool:
    return found.gain > limits.min_gain and found.z > limits.min_z


def _compare(pipeline: Pipeline, way: Way, held_out: Any, seed: int, limits: Limits) -> Comparison:
    """One run on inputs and, if it gains anything, one as long on blanks."""
    y = runs.held_out_labels(held_out)
    known, floor = probe.labels(pipeline.train), pipeline.task.optimum_loss()
    prior = runs.constant_losses(pipeline, known, y)
    train_prior = runs.constant_losses(pipeline, known, known)

    def enough(rows: torch.Tensor) -> bool:
        gain, z = runs.gain(prior, rows, floor)
        return gain > 3 * limits.min_gain and z > 2 * limits.min_z

    real = runs.train(pipeline, way, seed, held_out, limits.num_steps, enough=enough)
    gain, z = runs.gain(prior, real.rows, floor)
    if gain <= limits.min_gain:
        means = prior.mean().item(), train_prior.mean().item()
        return Comparison(gain, z, real, *means, 0.0, 0.0, way)
    blank = runs.train(pipeline, way, seed, held_out, real.steps, blank=runs.blanks(pipeline))
    ahead = (0.0, 0.0)  # several targets per row: their positions may say more than any constant
    if y.ndim == 1 or pipeline.task.targets == "multilabel":
        ahead = runs.gain(runs.constant_losses(pipeline, y, y), blank.rows, floor)
    baseline = blank.rows if blank.rows.mean() < prior.mean() else prior
    gain, z = runs.gain(baseline, real.rows, floor)
    means = baseline.mean().item(), train_prior.mean().item()
    return Comparison(gain, z, real, *means, *ahead, way)
