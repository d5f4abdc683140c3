"""Does the model learn anything from its input? Against the best that sees none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
from torch import nn

from ..instruments import NonFiniteLoss
from . import Check, Pipeline, inconclusive, probe

EVERY_STEPS = 25  # held-out rows are scored so often
NEUTRAL_RATES = (1e-3, 1e-2)  # of Adam, tried when the project's own optimizer gains too little
FEW_ROWS = 256
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


@dataclass(frozen=True)
class Limits:
    min_gain: float
    min_weak_gain: float
    min_z: float
    min_fall: float
    max_leak_gain: float
    max_growth: float
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
) -> Check:
    """Held-out loss after at most `num_steps` project steps, against the better of the label shares
    of training and the same model trained as long on blanked inputs.

    Blank: the mean training input; inputs that are no measurements are permuted across rows.
    Models with batch statistics are scored with those of the batch on blanks: running ones explode
    there and make a broken model look good. Each run is taken at its best scored step. A run that
    gains too little is repeated with Adam, and then on two more models (the median counts). Losses
    are means over hundreds of rows: one limit in fp32 and bf16.
    """
    name = "input_independent_baseline"
    needed = ("prior", "constant_outputs", "loss_per_row", "optimum_loss")
    missing = probe.lacking(name, pipeline, task=needed)
    if missing:
        return missing
    min_weak_gain = max(min_weak_gain, 2 * _gain_by_chance(pipeline))
    limits = Limits(min_gain, min_weak_gain, min_z, min_fall, max_leak_gain, max_growth, num_steps)
    held_out = probe.few(pipeline.validation, max_rows)
    tried = _ways(pipeline, held_out, limits)
    found = max(tried, key=lambda comparison: comparison.gain)
    if not _good(found, limits):
        again = [_compare(pipeline, found.way, held_out, seed, limits) for seed in (1, 2)]
        found = sorted([found, *again], key=lambda comparison: comparison.gain)[1]
    return _verdict(name, found, tried, limits)


def _verdict(name: str, c: Comparison, tried: list[Comparison], limits: Limits) -> Check:
    loss, own = c.real.rows.mean().item(), tried[0].real
    wild = own.train_end > limits.max_growth * max(own.train_start, c.train_prior)
    because = (
        f"After {c.real.steps} steps{c.way.how} the held-out loss is {loss:.4g}, against "
        f"{c.baseline:.4g} of the best predictor without input (gain {c.gain:.1%}, z {c.z:.2g})"
    )
    numbers = (c.gain, limits.min_gain, "relative gain")
    if c.ahead > limits.max_leak_gain and c.ahead_z > limits.min_z:
        because += f"; the model without input beats every constant answer by {c.ahead:.1%}."
        causes = ("the label reaches the model or the loss around the input",)
        return Check(name, "shut", *numbers, because, causes)
    if _good(c, limits) and not wild:
        return Check(name, "open", *numbers, because + ".")
    if _good(c, limits):
        because += f"; by its own optimizer the training loss grew to {own.train_end:.3g}."
        causes = ("the learning rate is far too high",)
        return Check(name, "shut", *numbers, because, causes)
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
    """Relative gain that permuted labels can show: a table from true to permuted classes has
    (C-1)^2 free entries, each fitted to N rows worth 1/2N nats (Wilks)."""
    y = probe.labels(pipeline.train)
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


# ---- runs -------------------------------------------------------------------------------------


def _ways(pipeline: Pipeline, held_out: Any, limits: Limits) -> list[Comparison]:
    """The project's optimizer; while the input gains too little, Adam at two rates; at last few
    rows, which are learned by heart soon: if that too says nothing about others, nothing will."""
    ways = [Way("", pipeline.make_optimizer)]
    ways += [Way(f" of Adam at {rate:g}", _adam(rate)) for rate in NEUTRAL_RATES]
    ways += [Way(f" of Adam on {FEW_ROWS} rows", _adam(NEUTRAL_RATES[-1]), FEW_ROWS)]
    tried: list[Comparison] = []
    for way in ways:
        tried.append(_compare(pipeline, way, held_out, 0, limits))
        if _good(tried[-1], limits):
            break
    return tried


def _good(found: Comparison, limits: Limits) -> bool:
    return found.gain > limits.min_gain and found.z > limits.min_z


def _adam(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)


def _compare(pipeline: Pipeline, way: Way, held_out: Any, seed: int, limits: Limits) -> Comparison:
    """One run on inputs and, if it gains anything, one as long on blanks."""
    y = probe.join(probe.batches_of(held_out, min_rows=held_out.num_rows))["y"]
    known, floor = probe.labels(pipeline.train), pipeline.task.optimum_loss()
    prior, train_prior = _constant(pipeline, known, y), _constant(pipeline, known, known)

    def enough(rows: torch.Tensor) -> bool:
        gain, z = _gain(prior, rows, floor)
        return gain > 3 * limits.min_gain and z > 2 * limits.min_z

    real = _train(pipeline, way, seed, held_out, limits.num_steps, enough=enough)
    gain, z = _gain(prior, real.rows, floor)
    if gain <= limits.min_gain:
        means = prior.mean().item(), train_prior.mean().item()
        return Comparison(gain, z, real, *means, 0.0, 0.0, way)
    blank = _train(pipeline, way, seed, held_out, real.steps, blank=_blank(pipeline))
    ahead = _gain(_constant(pipeline, y, y), blank.rows, floor)
    baseline = blank.rows if blank.rows.mean() < prior.mean() else prior
    gain, z = _gain(baseline, real.rows, floor)
    means = baseline.mean().item(), train_prior.mean().item()
    return Comparison(gain, z, real, *means, *ahead, way)


def _constant(pipeline: Pipeline, known: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`(N,)` losses on `y` of the answer that is best for the labels `known`."""
    task = pipeline.task
    outputs = task.constant_outputs(task.prior(known), len(y)).to(y.device)
    return task.loss_per_row(outputs, y).cpu().double()


def _gain(baseline: torch.Tensor, rows: torch.Tensor, floor: float) -> tuple[float, float]:
    """Relative gain above the floor of the loss, and the z of the paired difference."""
    difference = baseline - rows
    gain = (difference.mean() / (baseline.mean() - floor).clamp_min(1e-12)).item()
    return gain, (difference.mean() / max(_error(difference), 1e-12)).item()


def _error(difference: torch.Tensor) -> float:
    return (difference.std() / math.sqrt(len(difference))).item() if len(difference) > 1 else 0.0


def _train(
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
    """`(N,)` held-out losses, float64 on the CPU; not finite counts as very bad."""
    if blank is not None and probe.batch_statistics(model):
        outputs, y = _on_blanks(pipeline, model, held_out, blank)
    else:
        if blank is not None:
            rows = probe.few_rows(held_out, held_out.num_rows)
            held_out = probe.rebatch(held_out, rows={**rows, "x": blank(rows["x"])})
        found = pipeline.evaluate(model, held_out)
        outputs, y = found.outputs, found.y
    return pipeline.task.loss_per_row(outputs, y).cpu().double().nan_to_num(1e6, 1e6, -1e6)


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


def _blank(pipeline: Pipeline) -> Callable[[Any], Any]:
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
