"""The model from outside: one row's output depends on that row, and on it alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from ..loop import take
from . import Check, Finding, Pipeline, causal, inconclusive, positions, probe, shut_if_any

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
    Gradients are taken at the inputs, or at the embeddings of integer ones.

    Where the task is `causal`, the same holds for positions: all cut points up to 128, else 16
    random ones and the edges of blocks. Documents packed into a row ("document" ids in `x`) are
    samples too.

    Without `model`, fresh ones; hand a trained one over to look again: some leaks start at zero.
    """
    name, limit = "sample_boundary", max_leak or TOLERANCE[pipeline.precision]
    batch = probe.join(probe.batches_of(pipeline.train, min_rows=max_rows))
    num_rows = _num_rows(batch["x"], min(max_rows, len(batch["y"])))
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
        models = [_warm(pipeline, seed) for seed in range(num_models)]
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
    if not found:  # positions share forward passes, which only separate rows allow
        inner, words, unclear = _inside(pipeline, models[0], batch["x"], outputs, limit, given)
        found, because = inner, because + words
        if unclear and not inner:
            return inconclusive(name, f"{because}. {unclear}")
    return shut_if_any(found, Check(name, "open", leak, limit, "", because + "."))


def _num_rows(x: Any, most: int) -> int:
    """As many rows as may be, but a number that no other axis of the inputs has."""
    taken = {size for value in probe.tensors(x).values() for size in value.shape[1:]}
    return next((rows for rows in range(most, most // 2, -1) if rows not in taken), most)


def _warm(pipeline: Pipeline, seed: int) -> nn.Module:
    return probe.without_dropout(probe.warmed(pipeline, seed)).eval()


def _inside(
    pipeline: Pipeline, model: nn.Module, x: Any, outputs: torch.Tensor, limit: float, given: bool
) -> tuple[list[Finding], str, str]:
    """(what is wrong between positions of a row, words for the good case, why it is unclear)."""
    is_causal, packed = getattr(pipeline.task, "causal", False), "document" in probe.tensors(x)
    if not is_causal and not packed:
        return [], "", ""
    length = _length(x, outputs)
    if length is None:
        shapes = [tuple(value.shape) for value in probe.tensors(x).values()]
        return [], "", f"Inputs {shapes} and outputs {tuple(outputs.shape)} share no positions."
    found, words = [], ""
    if is_causal:
        sight = causal.see(pipeline, model, x, length, limit)
        if not given and not sight.leaking and not sight.remembers():
            model = _warm(pipeline, 0)  # branches that start at zero hide what they will mix
            sight = causal.see(pipeline, model, x, length, limit)
        found += causal.judge(sight, limit)
        words = f"; none sees a later position at {len(sight.cuts)} cut points"
    for again in (False, True) if packed and not given else (False,):
        apart = causal.documents(pipeline, _warm(pipeline, 0) if again else model, x, length)
        if apart is None:
            break
        leak = max(apart.change.max().item(), apart.gradient.max().item())
        if leak > limit:
            because = f"other documents packed into a row move an output by {leak:.2g} of it"
            causes = ("the attention mask ignores the documents", "state is not reset between them")
            return [*found, Finding(leak, limit, because, causes)], "", ""
    return found, words, ""


def _length(x: Any, outputs: torch.Tensor) -> int | None:
    """Number of positions on axis 1 of the inputs, if the outputs have as many (or one less or
    more: a last one that predicts nothing, a first one that stands for the start)."""
    if outputs.ndim < 2:
        return None
    lengths = [value.shape[1] for value in probe.tensors(x).values() if value.ndim >= 2]
    near = [n for n in lengths if n > 1 and abs(n - outputs.shape[1]) <= 1]
    return min(near, key=lambda n: abs(n - outputs.shape[1])) if near else None


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
        base = positions.run(pipeline, model, x)
        others, own = [], []
        for i in places:
            mine, theirs = _mixed(strange, x, i), _mixed(x, strange, i)
            others.append(_change(base[i], positions.run(pipeline, model, mine)[i]))
            own.append(_change(base[i], positions.run(pipeline, model, theirs)[i]))
    gradients = [_leak(pipeline, model, x, i) for i in places]
    return Coupling(max(gradients), max(others), min(own))


def _change(before: torch.Tensor, after: torch.Tensor) -> float:
    change = (after - before).norm() / before.norm().clamp_min(1e-12)
    return change.nan_to_num(float("inf")).item()


def _strange(x: Any) -> Any:
    """Other rows of the same kind: turned round, and three times as far out where they are
    measurements, so that maxima and routes change as well. Fields of a row stay together."""
    parts = probe.tensors(x)
    turned = {key: value.flip(0) for key, value in parts.items()}
    same = torch.stack(
        [(turned[k] == v).reshape(len(v), -1).all(1).cpu() for k, v in parts.items()]
    )
    if same.all(dim=0).any():
        turned = {key: value.roll(1, 0) for key, value in parts.items()}
    wide = {key: -3 * v + 1 if _measured(key, v) else v for key, v in turned.items()}
    return probe.like(x, wide)


def _measured(key: str, value: torch.Tensor) -> bool:
    """Whether a field holds measurements, which may be stretched, and not a mask."""
    if not value.is_floating_point() or positions.STRUCTURE.search(key):
        return False
    return key == "x" or not bool(((value == 0) | (value == 1)).all())


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
    num_rows = len(next(iter(leaves.values())))
    with positions.embedded(model) as found:
        output = positions.run(pipeline, model, probe.like(x, leaves))[i]
    sources = [(value, 0) for value in leaves.values() if value.requires_grad]
    sources += [(out, ids.index(num_rows)) for ids, out in found if ids.count(num_rows) == 1]
    if not sources or not output.requires_grad:
        return 0.0
    generator = torch.Generator().manual_seed(i)
    weights = torch.randn(output.shape, generator=generator).to(output.device)
    places = [value for value, _ in sources]
    gradients = torch.autograd.grad((output * weights).sum(), places, allow_unused=True)
    sizes = [
        g.abs().transpose(0, axis).reshape(g.shape[axis], -1).amax(dim=1)
        for g, (_, axis) in zip(gradients, sources, strict=True)
        if g is not None
    ]
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
