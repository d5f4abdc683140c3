"""Rates: how far does a step move each weight matrix, and which units get no gradient at all?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import torch
from torch import nn

from ..instruments import NonFiniteLoss
from . import Check, Finding, Pipeline, not_applicable, probe, shut_if_any

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # dimension 0 of the weight counts units
LAST_STEPS = 5  # whose losses are compared
HIGHER, LOWER = (1e3, 1e2), (1e-2,)  # rates tried where the own one is outside the band
FAR = 10.0  # times outside the band no healthy pipeline was met, whatever other rates do
SLOW_GROUP = 0.2  # of the highest rate: a group at or below was given its own rate on purpose
DAMPED, LOST = 0.5, 0.1  # what epsilon leaves of an adaptive step: worth a look; worth a word
EPSILON = 1e-8  # what the adaptive optimizers start from
MIN_UNITS = 4  # in narrower layers a dead unit or two is chance


@dataclass
class _Run:
    """What a few steps on a fresh model did."""

    losses: list[float] = field(default_factory=list)  # one per step; inf where not finite
    ratios: dict[str, float] = field(default_factory=dict)  # matrix -> median update / size
    dead: dict[str, float] = field(default_factory=dict)  # layer -> share of units
    slow: set[str] = field(default_factory=set)  # matrices in groups with a smaller rate
    damping: float = 1.0  # median over entries of root(v) / (root(v) + eps)


def update_ratio(
    pipeline: Pipeline,
    *,
    num_warmup: int = 5,
    num_steps: int = 20,
    min_ratio: float = 3e-5,
    max_ratio: float = 1e-1,
    max_dead_share: float = 0.5,
    min_gain: float = 0.05,
) -> Check:
    """Update norm / size of each trainable weight matrix, median over `num_steps` of the project's
    steps after `num_warmup`; its size is its norm at the start, or that of a default init where it
    starts smaller. And the share of units of each layer whose weights get no gradient in any step.

    Outside the band the steps are repeated at a rate 100 times lower, or 100 and 1000 times higher:
    shut when that ends lower by `min_gain` of the starting loss (twice that for a lower rate), or
    when ten times outside the band, else
    `warn`. An adaptive optimizer whose epsilon takes half of its steps and more is compared with
    the usual epsilon in the same way.
    Groups with a fifth of the highest rate or less can only warn; what is frozen is not judged.
    The same limits hold in fp32 and bf16.
    """
    name = "update_ratio"
    count = num_warmup + num_steps
    batches = list(itertools.islice(probe.endless(pipeline.train), count))
    own = _run(pipeline, batches, num_warmup)
    if not own.ratios:
        return not_applicable(name, "The model has no trainable weight matrix of two dimensions.")
    judged = {key: value for key, value in own.ratios.items() if key not in own.slow} or own.ratios
    low, high = min(judged.values()), max(judged.values())
    because = f"A step moves each of {len(judged)} weight matrices by {low:.2g} to {high:.2g} of it"
    because += f", and at most {max(own.dead.values(), default=0.0):.0%} of a layer's units get no "
    good = Check(name, "open", low, [min_ratio, max_ratio], "", because + "gradient.")
    band = (min_ratio, max_ratio)
    finding, proven = _outside(pipeline, own, judged, band, batches, min_gain)
    dead = list(_dead(own, max_dead_share))
    if dead and finding and "high" not in finding.suspect[0]:
        finding = None  # what is dead does not move, at any rate
    found = [finding] if finding and proven else []
    found += dead
    if found or finding is None:
        return shut_if_any(found, good)
    because = finding.because + "; a run at another rate does not show that this is wrong."
    return Check(name, "warn", finding.value, finding.limit, "", because, finding.suspect)


def _outside(
    pipeline: Pipeline, own: _Run, judged: dict, band: tuple, batches: list, min_gain: float
) -> tuple[Finding | None, bool]:
    """The finding, and whether it is proven: by what another setting reaches, or by its size."""
    (lowest, highest), limit = band, list(band)
    top, least = max(judged, key=judged.get), min(own.ratios, key=own.ratios.get)
    centre, broken = median(judged.values()), not math.isfinite(own.losses[-1])
    if broken or judged[top] > highest:
        because = f"a step moves {top} by {judged[top]:.2g} of it"
        because += ", until the loss is not finite" if broken else ""
        finding = Finding(judged[top], limit, because, ("the learning rate is far too high",))
        proof = _reaches(pipeline, own, batches, LOWER, 2 * min_gain)  # a hot start may pay later
        return _with(finding, proof, proven=judged[top] > FAR * highest)
    if own.damping < DAMPED:
        proof = _reaches(pipeline, own, batches, (None,), min_gain)
        because = f"the epsilon of the optimizer leaves {own.damping:.2g} of its steps"
        finding = Finding(own.damping, LOST, because, ("eps is far too large",))
        if proof or own.damping < LOST:
            return _with(finding, proof)
    if centre < lowest:
        because = f"a step moves the weight matrices by {centre:.2g} of them (median)"
        causes = ("the learning rate is far too low", "a clip, or a scaler that skips steps")
        finding = Finding(centre, limit, because, causes)
        proof = _reaches(pipeline, own, batches, HIGHER, min_gain)
        return _with(finding, proof, proven=centre < lowest / FAR)
    if own.ratios[least] < lowest:
        because = f"a step moves {least} by {own.ratios[least]:.2g} of it"
        causes = ("its group has a far smaller rate", "hardly any gradient reaches it")
        return Finding(own.ratios[least], limit, because, causes), False
    return None, False


def _with(finding: Finding, proof: str, *, proven: bool = False) -> tuple[Finding, bool]:
    because = finding.because + proof
    return Finding(finding.value, finding.limit, because, finding.suspect), bool(proof) or proven


def _reaches(pipeline: Pipeline, own: _Run, batches: list, factors: tuple, min_gain: float) -> str:
    """In words, the first factor of the rate (None: the usual epsilon) at which the same steps end
    clearly lower; empty if none does."""
    size = max(abs(own.losses[0] - _floor(pipeline)), 1e-12)
    here = mean(own.losses[-LAST_STEPS:])
    for factor in factors:
        other = _run(pipeline, batches, 0, _usual_epsilon if factor is None else _scaled(factor))
        there = mean(other.losses[-LAST_STEPS:])
        if math.isfinite(there) and (here - there) / size > min_gain:
            what = "epsilon 1e-8" if factor is None else f"the rate times {factor:g}"
            return f"; with {what}, {len(batches)} steps end at {there:.3g} instead of {here:.3g}"
    return ""


def _floor(pipeline: Pipeline) -> float:
    optimum = getattr(pipeline.task, "optimum_loss", None)
    return float(optimum()) if optimum is not None else 0.0


def _scaled(factor: float) -> Callable[[torch.optim.Optimizer], None]:
    return lambda optimizer: probe.set_rate(optimizer, probe.base_rate(optimizer) * factor)


def _usual_epsilon(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["eps"] = EPSILON


def _dead(own: _Run, limit: float) -> Iterator[Finding]:
    if not own.dead:
        return
    worst = max(own.dead, key=own.dead.get)  # of several equal ones the first
    if own.dead[worst] > limit:
        because = f"{own.dead[worst]:.0%} of the units of {worst} get no gradient in any step"
        causes = ("units are dead: a bias far below zero, or a rate that killed them",)
        yield Finding(own.dead[worst], limit, because, causes)


# ---- measuring --------------------------------------------------------------------------------


def _run(
    pipeline: Pipeline,
    batches: list[dict],
    num_warmup: int,
    change: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
) -> _Run:
    """The project's steps on these batches; measured after the first `num_warmup`."""
    model = pipeline.make_model(0).train()
    optimizer = pipeline.make_optimizer(model)
    for group in optimizer.param_groups:  # a warm-up starts low: judged is the rate it leads to
        group["lr"] = max(group["lr"], group.get("initial_lr", 0.0))
    change(optimizer)
    matrices = _matrices(model, optimizer)
    sizes = {key: _size(p) for key, p in matrices.items()}
    run, moves, alive = _Run(slow=_slow(matrices, optimizer)), [], _watch_units(model, matrices)
    for index, batch in enumerate(batches):
        before = [p.detach().clone() for p in matrices.values()]
        handles = alive.listen() if index >= num_warmup else []
        try:
            run.losses.append(float(pipeline.train_step(model, optimizer, batch).loss))
        except NonFiniteLoss:
            if index == 0:
                raise
            run.losses.append(math.inf)
            break
        finally:
            for handle in handles:
                handle.remove()
        if index >= num_warmup or index == len(batches) - 1:
            pairs = zip(matrices.values(), before, strict=True)
            moves.append([(p.detach() - b).float().norm() for p, b in pairs])
    for column, key in enumerate(matrices):
        steps = [float(row[column]) / sizes[key] for row in moves] or [0.0]
        run.ratios[key] = median(value if math.isfinite(value) else math.inf for value in steps)
    run.dead = alive.shares() if moves and math.isfinite(run.losses[-1]) else {}
    run.damping = _damping(optimizer)
    return run


def _matrices(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Trainable weights of two and more dimensions that the optimizer holds."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = model.named_parameters()
    return {k: p for k, p in named if p.requires_grad and p.ndim >= 2 and id(p) in held}


def _size(weight: torch.Tensor) -> float:
    """Its norm, or that of torch's default init (uniform, variance 1 / (3 fan_in)) if larger: what
    starts at or near zero is not judged by its first steps."""
    return max(weight.detach().float().norm().item(), math.sqrt(len(weight) / 3))


def _slow(matrices: dict, optimizer: torch.optim.Optimizer) -> set[str]:
    top = probe.base_rate(optimizer)
    groups = [group for group in optimizer.param_groups if group["lr"] <= SLOW_GROUP * top]
    slow = {id(p) for group in groups for p in group["params"]}
    return {key for key, p in matrices.items() if id(p) in slow}


@dataclass
class _Units:
    """Which units of each layer got a gradient that is not zero, at the weights' own hooks."""

    weights: dict[str, nn.Parameter]
    alive: dict[str, torch.Tensor] = field(default_factory=dict)

    def listen(self) -> list[Any]:
        return [p.register_hook(self._watcher(key)) for key, p in self.weights.items()]

    def _watcher(self, key: str) -> Callable[[torch.Tensor], None]:
        def watch(gradient: torch.Tensor) -> None:
            now = gradient.detach().flatten(1).ne(0).any(dim=1)
            self.alive[key] = self.alive[key] | now if key in self.alive else now

        return watch

    def shares(self) -> dict[str, float]:
        found = {key: self.alive[key] for key in self.weights if key in self.alive}
        return {key: 1.0 - alive.float().mean().item() for key, alive in found.items()}


def _watch_units(model: nn.Module, matrices: dict[str, nn.Parameter]) -> _Units:
    """Embeddings are left out: rows that no batch names get no gradient by design."""
    layers = {id(m.weight) for m in model.modules() if isinstance(m, LAYERS)}
    wide = {k: p for k, p in matrices.items() if id(p) in layers and len(p) >= MIN_UNITS}
    return _Units(wide)


def _damping(optimizer: torch.optim.Optimizer) -> float:
    """Median over all entries with a gradient of root(v) / (root(v) + eps); 1 if not adaptive."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            squares = state.get("exp_avg_sq", state.get("square_avg"))
            if squares is None or "eps" not in group:
                continue
            decay = group["betas"][1] if "betas" in group else group.get("alpha", 0.0)
            share = 1 - decay ** float(state.get("step", 1))
            root = (squares[squares > 0].float() / share).sqrt()
            found.append(root / (root + group["eps"]))
    values = torch.cat(found) if found else torch.ones(1)
    return values.median().item() if len(values) else 1.0
