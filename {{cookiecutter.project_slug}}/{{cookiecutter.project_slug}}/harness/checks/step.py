"""The training step: does it do what five plain lines would?"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..loop import autocast, take
from . import Check, Finding, Pipeline, probe, shut_if_any
from .leftovers import carried_state, kept_graph


def reference_step(
    pipeline: Pipeline,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict,
    clip_norm: float | None,
) -> tuple[float, float]:
    """The five lines every training step should equal; returns loss and gradient norm."""
    optimizer.zero_grad(set_to_none=True)
    with autocast(pipeline.device, pipeline.precision):
        outputs = model(batch["x"])
    loss = pipeline.task.loss(outputs.float(), batch["y"])
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)
    optimizer.step()
    return loss.item(), norm.item()


def step_oracle(
    pipeline: Pipeline,
    *,
    num_steps: int = 3,
    max_relative_difference: float = 1e-2,
    max_accumulation_difference: float = 1e-3,
    min_clip_scale: float = 1e-2,
    num_parts: int = 3,
) -> Check:
    """The project's step against a five-line reference on a copy of the same model.

    Compared are the updates after `num_steps` steps, with the project's optimizer, with plain SGD
    (adaptive ones hide a wrong scale) and with outputs so large that a declared clip is active.
    `num_parts` micro-batches of unequal size must equal one batch (batch statistics and dropout
    off). The returned loss has no graph, and the outputs of a batch do not depend on the one that
    came before it. Both sides run the same arithmetic, so the limits hold in fp32 and bf16; only
    sums over micro-batches in bf16, whose gradients have 8 bits each, get 5 times and 30 times the
    room, and where the loss is no mean over rows (class weights) parts can only be near the whole:
    0.5.
    """
    name = "step_oracle"
    batches = list(itertools.islice(probe.endless(pipeline.train), num_steps))
    norms: list[float] = []
    found, worst, room = [], 0.0, max_relative_difference
    if pipeline.accumulate > 1:
        room = _room(pipeline, batches[0], room * (5 if pipeline.precision == "bf16" else 1))
    for way in _ways(pipeline, norms):
        difference = _difference(pipeline, way, batches, norms)
        worst = max(worst, difference)
        if difference > room and not found:
            found.append(_name_it(pipeline, way, difference, batches[0], room))
    found += _clip(pipeline, norms[num_steps : 2 * num_steps], min_clip_scale)  # of plain SGD
    found += carried_state(pipeline, _settle(pipeline.make_model(0).train()), batches)
    found += kept_graph(pipeline, pipeline.make_model(0).train(), batches[0])
    parts, split = _parts(pipeline, batches[0], num_parts, max_accumulation_difference, norms[0])
    because = (
        f"{num_steps} steps of the project differ from a plain reference by at most {worst:.2g} of "
        f"the update{parts}."
    )
    return shut_if_any([*found, *split], Check(name, "open", worst, room, "", because))


@dataclass(frozen=True)
class _Way:
    """How the two steps are compared."""

    words: str
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    gain: float = 1.0  # of the model's outputs


def _ways(pipeline: Pipeline, norms: list[float]) -> Iterator[_Way]:
    """`norms` holds the norms of the gradients seen so far."""
    yield _Way("its own optimizer", pipeline.make_optimizer)
    yield _Way("plain SGD", _sgd(norms[0]))
    clip, gain = pipeline.clip_norm, 100.0
    if clip is not None:
        words = "outputs 100 times larger, so that the clip is active"
        yield _Way(words, _sgd(min(clip, gain * norms[0])), gain)


def _sgd(norm: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Plain SGD: its update is the gradient; a gradient of this norm moves the weights by 1e-3 of
    theirs, which no rounding hides and no model explodes by."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        size = _flat(model).norm().item()
        trainable = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=1e-3 * max(size, 1e-3) / max(norm, 1e-6))

    return make


def _difference(pipeline: Pipeline, way: _Way, batches: list[dict], norms: list[float]) -> float:
    """Norm of the difference of two updates / norm of the reference's."""
    ours = pipeline.make_model(0).train()
    if pipeline.accumulate > 1:
        _settle(ours)
    theirs, start = copy.deepcopy(ours), _flat(ours)
    own, reference = way.make_optimizer(ours), way.make_optimizer(theirs)
    with _amplified(ours, way.gain), _amplified(theirs, way.gain):
        for index, batch in enumerate(batches):
            torch.manual_seed(index)  # one mask of dropout for both
            pipeline.train_step(ours, own, batch)
            torch.manual_seed(index)
            _, norm = reference_step(pipeline, theirs, reference, batch, pipeline.clip_norm)
            norms.append(norm)
    counts = _with_signal(theirs)
    update = (_flat(theirs) - start) * counts
    made = (_flat(ours) - start) * counts
    return ((made - update).norm() / update.norm().clamp_min(1e-30)).item()


def _with_signal(model: nn.Module) -> torch.Tensor:
    """1 for the entries of tensors whose gradient is more than rounding, else 0: adaptive
    optimizers blow up the rounding of a gradient that cancels (a bias before BatchNorm)."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    sizes = [0.0 if p.grad is None else p.grad.norm().item() for p in trainable]
    keep = [float(size > 1e-6 * max(sizes)) for size in sizes]
    return torch.cat(
        [
            torch.full((p.numel(),), k, dtype=torch.float64)
            for p, k in zip(trainable, keep, strict=True)
        ]
    )


def _amplified(model: nn.Module, gain: float) -> Any:
    return probe.seam(model, replace=lambda outputs, call: outputs * gain, inputs=False)


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat(
        [p.detach().flatten().cpu().double() for p in model.parameters() if p.requires_grad]
    )


def _settle(model: nn.Module) -> nn.Module:
    """No dropout and fixed batch statistics: what makes a batch differ from its parts by design."""
    for module in probe.batch_statistics(probe.without_dropout(model)):
        module.eval()
        module.train = lambda mode=True: None  # a step that calls model.train() leaves it so
    return model


def _name_it(
    pipeline: Pipeline, way: _Way, difference: float, batch: dict, limit: float
) -> Finding:
    """The first step alone, with plain SGD, says which part of the step is wrong."""
    norm = _gradient_norm(pipeline, batch, way.gain)
    scale, rest = _first_step(pipeline, batch, way.gain, norm, settled=True)
    plain = pipeline.accumulate > 1
    plain = plain or _first_step(pipeline, batch, way.gain, norm, settled=False)[1] < limit
    causes = [
        (
            scale == rest == 0,
            "nothing is updated: zero_grad stands between backward and step, or step is missing",
        ),
        (
            rest < limit and abs(scale - 1) < limit and not plain,
            "the mode of the model is changed in the step, or random numbers are drawn",
        ),
        (
            rest < limit and abs(scale - 1) < limit,
            "only later steps differ: zero_grad is missing, or the step keeps state",
        ),
        (rest < limit and scale < 0, "the sign of the loss or gradient is flipped"),
        (
            rest < limit and scale < 1,
            f"the gradient is scaled by {scale:.3g}: a clip that is not declared, a clip of "
            "gradients that are still scaled (before unscale), or a factor",
        ),
        (
            rest < limit and way.gain > 1,
            f"a clip that does not act, the gradient is {scale:.3g} times too large: it stands "
            "before backward, or is missing",
        ),
        (
            rest < limit,
            f"the gradient is scaled by {scale:.3g}: summed instead of averaged, a clip "
            "that does not act, or accumulation not divided",
        ),
        (
            True,
            "another loss, batch, mode or order of the lines than forward, backward, clip, step",
        ),
    ]
    cause = next(text for holds, text in causes if holds)
    because = (
        f"with {way.words}, the update differs from a plain reference by {difference:.3g} of it"
    )
    return Finding(difference, limit, because, (cause,))


def _gradient_norm(pipeline: Pipeline, batch: dict, gain: float) -> float:
    """As the reference would apply it."""
    model = _settle(pipeline.make_model(0).train())
    with _amplified(model, gain):
        _, norm = reference_step(pipeline, model, _sgd(1.0)(model), batch, None)
    return min(norm, pipeline.clip_norm or math.inf)


def _first_step(
    pipeline: Pipeline, batch: dict, gain: float, norm: float, *, settled: bool
) -> tuple[float, float]:
    """(factor between the project's update and the reference's, what else differs), by SGD."""
    ours = pipeline.make_model(0).train()
    if settled:
        _settle(ours)
    theirs, start = copy.deepcopy(ours), _flat(ours)
    with _amplified(ours, gain), _amplified(theirs, gain):
        torch.manual_seed(0)
        pipeline.train_step(ours, _sgd(norm)(ours), batch)
        torch.manual_seed(0)
        reference_step(pipeline, theirs, _sgd(norm)(theirs), batch, pipeline.clip_norm)
    made, asked = _flat(ours) - start, _flat(theirs) - start
    size = (made.norm() / asked.norm().clamp_min(1e-30)).item()
    if size < 1e-3:  # what is left of the direction is rounding
        return size, 0.0
    scale = (made @ asked / (asked @ asked).clamp_min(1e-30)).item()
    return scale, ((made - scale * asked).norm() / made.norm()).item()


def _clip(pipeline: Pipeline, norms: list[float], limit: float) -> Iterator[Finding]:
    if pipeline.clip_norm is None:
        return
    scale = pipeline.clip_norm / max(sorted(norms)[len(norms) // 2], 1e-30)
    if scale < limit:
        because = f"the clip at {pipeline.clip_norm:g} leaves {scale:.2g} of the gradient"
        yield Finding(scale, limit, because, ("clip_norm is far below the norm of the gradient",))


def _parts(
    pipeline: Pipeline, batch: dict, num_parts: int, limit: float, norm: float
) -> tuple[str, list[Finding]]:
    """Micro-batches of unequal size against one batch, by plain SGD."""
    step, num_rows = pipeline.accumulate_step, len(batch["y"])
    if step is None or num_rows <= num_parts:
        return "", []
    odd = num_rows - (num_rows % num_parts == 0)  # an odd number of rows cannot be cut evenly
    index = torch.arange(odd, device=batch["y"].device)
    rows = take(batch, index)
    whole = _settle(pipeline.make_model(0).train())
    parted, start = copy.deepcopy(whole), _flat(whole)
    step(whole, _sgd(norm)(whole), rows, 1)
    step(parted, _sgd(norm)(parted), rows, num_parts)
    update = _flat(whole) - start
    difference = ((_flat(parted) - start - update).norm() / update.norm().clamp_min(1e-30)).item()
    room = _room(pipeline, rows, limit * (1 if pipeline.precision == "fp32" else 30))
    because = f"{num_parts} unequal micro-batches differ from one batch by {difference:.2g}"
    if difference <= room:
        return f", {because}", []
    causes = ("accumulation is not divided", "means of unequal parts are averaged")
    return "", [Finding(difference, room, because, causes)]


def _room(pipeline: Pipeline, batch: dict, limit: float) -> float:
    """`limit`, or 0.5 for a loss whose parts do not add up to the whole by their rows."""
    model, num_rows = _settle(pipeline.make_model(0).train()), len(batch["y"])
    with torch.no_grad():
        outputs = probe.forward(pipeline, model, batch["x"]).clone()
        outputs[: num_rows // 2] += 10 * torch.randn_like(outputs[: num_rows // 2])  # lose far more
        halves = torch.arange(num_rows, device=batch["y"].device).tensor_split(2)
        whole = pipeline.task.loss(outputs, batch["y"])
        parts = [
            pipeline.task.loss(outputs[half], batch["y"][half]) * (len(half) / num_rows)
            for half in halves
            if len(half)
        ]
    gap = abs(torch.stack(parts).sum().item() / whole.item() - 1) if whole.item() else 0.0
    return limit if gap < 1e-4 else max(limit, 0.5)
