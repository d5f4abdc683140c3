"""The model from outside: one row's output depends on that row, and on it alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from ..loop import take
from . import Check, Finding, Pipeline, inconclusive, probe, shut_if_any

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}  # of the output's norm, at equal shapes


@dataclass(frozen=True)
class Coupling:
    """Relative figures for the sample of a batch that is worst."""

    gradient: float  # of other rows, against that of the own row
    others: float  # change of the output when all other rows are replaced
    own: float  # change of the output when its own row is replaced


def sample_boundary(
    pipeline: Pipeline,
    *,
    model: nn.Module | None = None,
    max_leak: float | None = None,
    min_own_change: float = 1e-6,
    max_rows: int = 16,
    num_models: int = 3,
) -> Check:
    """First, middle and last row of a batch in evaluation mode: no gradient of a random projection
    of the output reaches another row, replacing all other rows leaves the output (within
    `max_leak` of its norm; default 1e-5 in fp32, 1e-3 in bf16), replacing the row itself changes
    it. In training mode coupling is information where batch statistics explain it, else shut.

    Without `model`, fresh ones; hand a trained one over to look again: some leaks start at zero.
    """
    name, limit = "sample_boundary", max_leak or TOLERANCE[pipeline.precision]
    batch = probe.join(probe.batches_of(pipeline.train, min_rows=max_rows))
    num_rows = min(max_rows, len(batch["y"]))
    x = take(batch["x"], torch.arange(num_rows, device=batch["y"].device))
    if num_rows < 2:
        return inconclusive(name, "A batch of one row has no neighbours: it needs at least two.")
    given = model is not None
    models = [model] if given else [pipeline.make_model(seed) for seed in range(num_models)]
    models = [probe.without_dropout(copy.deepcopy(each)).eval() for each in models]
    outputs = probe.forward(pipeline, models[0], x)
    if outputs.ndim == 0 or len(outputs) != num_rows:
        because = f"{num_rows} rows go in and outputs of shape {tuple(outputs.shape)} come out."
        causes = ("the batch axis is mixed by a reshape or squeeze",)
        return Check(name, "shut", None, None, "", because, causes)
    quiet = [_couple(pipeline, each, x) for each in models]
    if not given and median(c.own for c in quiet) < min_own_change:
        # A last layer that starts at zero hides everything: look again after a few steps.
        models = [
            probe.without_dropout(probe.warmed(pipeline, s)).eval() for s in range(num_models)
        ]
        quiet = [_couple(pipeline, each, x) for each in models]
    found = _judge(quiet, limit, min_own_change)
    leak = max(max(c.gradient, c.others) for c in quiet)
    trained, explained = _in_training(pipeline, models[0], x)
    because = (
        f"Other rows move an output by at most {leak:.2g} of it, its own row by "
        f"{median(c.own for c in quiet):.2g}"
    )
    if not found and trained > limit and not explained:
        because_ = f"in training mode other rows move an output by {trained:.2g} of it, and no "
        causes = ("a statistic over the batch outside of BatchNorm", "softmax over the batch axis")
        found.append(Finding(trained, limit, because_ + "batch norm explains it", causes))
    elif trained > limit:
        because += f"; in training batch statistics couple rows ({trained:.2g}), as designed"
    return shut_if_any(found, Check(name, "open", leak, limit, "", because + "."))


def _judge(found: list[Coupling], limit: float, min_own: float) -> list[Finding]:
    findings = []
    worst = max(found, key=lambda c: max(c.gradient, c.others))
    if max(worst.gradient, worst.others) > limit:
        because = (
            f"in evaluation mode other rows move an output by {worst.others:.2g} of it and have "
            f"{worst.gradient:.2g} of its gradient"
        )
        causes = (
            "the batch axis is mixed by a reshape, view or transpose",
            "softmax, norm or mean over the batch axis",
            "a recurrent layer that takes the batch for time (batch_first)",
        )
        findings.append(Finding(max(worst.gradient, worst.others), limit, because, causes))
    own = median(c.own for c in found)
    if own < min_own:
        because = f"another input moves its output by {own:.2g} of it only"
        causes = ("units are dead from the start", "the input is not used", "a constant output")
        findings.append(Finding(own, min_own, because, causes))
    return findings


def _couple(pipeline: Pipeline, model: nn.Module, x: Any) -> Coupling:
    """The figures of one model, in the mode it is in."""
    num_rows = len(next(iter(probe.tensors(x).values())))
    places = sorted({0, num_rows // 2, num_rows - 1})
    strange = _strange(x)
    with torch.no_grad():
        base = _run(pipeline, model, x)
        others, own = [], []
        for i in places:
            mine, theirs = _mixed(strange, x, i), _mixed(x, strange, i)
            others.append(_change(base[i], _run(pipeline, model, mine)[i]))
            own.append(_change(base[i], _run(pipeline, model, theirs)[i]))
    gradients = [_leak(pipeline, model, x, i) for i in places]
    return Coupling(max(gradients), max(others), min(own))


def _run(pipeline: Pipeline, model: nn.Module, x: Any) -> torch.Tensor:
    torch.manual_seed(0)  # what draws inside draws the same each time
    return probe.forward(pipeline, model, x)


def _change(before: torch.Tensor, after: torch.Tensor) -> float:
    change = (after - before).norm() / before.norm().clamp_min(1e-12)
    return change.nan_to_num(float("inf")).item()


def _strange(x: Any) -> Any:
    """Other rows of the same kind: turned round, and three times as far out where they are
    measurements, so that maxima and routes change as well."""
    parts = {key: value.flip(0) for key, value in probe.tensors(x).items()}
    wide = {key: -3 * v + 1 if v.is_floating_point() else v for key, v in parts.items()}
    for key, value in wide.items():
        same = (value == probe.tensors(x)[key]).flatten(1).all(dim=1)
        if not value.is_floating_point() and same.any():
            wide[key] = probe.tensors(x)[key].roll(1, 0)
    return probe.like(x, wide)


def _mixed(x: Any, own: Any, i: int) -> Any:
    """The rows of `x`, with row `i` of `own`."""
    parts = {}
    for key, value in probe.tensors(x).items():
        parts[key] = value.clone()
        parts[key][i] = probe.tensors(own)[key][i]
    return probe.like(x, parts)


def _leak(pipeline: Pipeline, model: nn.Module, x: Any, i: int) -> float:
    """Largest gradient at another row / largest at row i, of a random projection of output i (a
    sum of outputs is blind behind softmax or LayerNorm). 0 where inputs have no gradient."""
    leaves = {
        key: value.detach().clone().requires_grad_(value.is_floating_point())
        for key, value in probe.tensors(x).items()
    }
    floating = [value for value in leaves.values() if value.requires_grad]
    if not floating:
        return 0.0
    output = _run(pipeline, model, probe.like(x, leaves))[i]
    if not output.requires_grad:
        return 0.0
    generator = torch.Generator().manual_seed(i)
    weights = torch.randn(output.shape, generator=generator).to(output.device)
    gradients = torch.autograd.grad((output * weights).sum(), floating, allow_unused=True)
    sizes = [g.abs().flatten(1).amax(dim=1) for g in gradients if g is not None]
    if not sizes:
        return 0.0
    size = torch.stack(sizes).amax(dim=0)
    own, size[i] = size[i].clone(), 0
    return (size.max() / own.clamp_min(1e-12)).item() if size.max() > 0 else 0.0


def _in_training(pipeline: Pipeline, model: nn.Module, x: Any) -> tuple[float, bool]:
    """(coupling in training mode, whether it vanishes once batch statistics are held still)."""
    model = copy.deepcopy(model).train()
    coupled = _couple(pipeline, model, x).others
    for module in probe.batch_statistics(model):
        module.eval()
    return coupled, _couple(pipeline, model, x).others <= TOLERANCE[pipeline.precision]
