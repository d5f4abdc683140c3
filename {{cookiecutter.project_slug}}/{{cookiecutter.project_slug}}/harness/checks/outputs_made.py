"""What the model itself hands to the loss: logits or real numbers, not something squashed."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from . import Finding, Pipeline, probe


def findings(pipeline: Pipeline, num_models: int) -> Iterator[Finding]:
    """Over several initialisations; over trained ones too where untrained outputs say little."""
    rows = probe.few_rows(pipeline.train, 64)
    made = _outputs(pipeline, pipeline.make_model, rows["x"], num_models)
    real = pipeline.task.targets == "real"
    if _all_equal(made) or (real and _lowest(made) >= 0):  # a last layer that starts at zero
        made = _outputs(pipeline, functools.partial(probe.warmed, pipeline), rows["x"], num_models)
    if _all_equal(made):
        yield from _cut_to_zero(pipeline, made)
        return
    if real:
        yield from _one_sided(made, rows["y"], num_models)
    else:
        yield from _squashed(pipeline, made, num_models)


def _outputs(pipeline: Pipeline, make, x, num_models: int) -> list[torch.Tensor]:
    models = [make(seed).eval() for seed in range(num_models)]
    with torch.no_grad():
        return [probe.forward(pipeline, model, x) for model in models]


def _lowest(made: list[torch.Tensor]) -> float:
    return min(z.min().item() for z in made)


def _all_equal(made: list[torch.Tensor]) -> bool:
    return _lowest(made) == max(z.max().item() for z in made)


def _cut_to_zero(pipeline: Pipeline, made: list[torch.Tensor]) -> Iterator[Finding]:
    """Outputs of 0 from a network whose last bias is not."""
    shifts = [p for p in pipeline.make_model(0).parameters() if p.shape == made[0].shape[1:]]
    if _lowest(made) == 0 and any(bool((p < 0).any()) for p in shifts):
        because = "the model's outputs are all 0, although its last bias is negative"
        yield Finding(0.0, 0.0, because, ("a ReLU stands between the model and the loss",))


def _one_sided(made: list[torch.Tensor], y: torch.Tensor, num_models: int) -> Iterator[Finding]:
    """Real outputs are never negative although targets are."""
    negative = (y < 0).double().mean().item()
    if _lowest(made) < 0 or negative < 0.05:
        return
    because = (
        f"the model's outputs are never negative (over {num_models} models), {negative:.3g} of the "
        "targets are"
    )
    yield Finding(_lowest(made), 0.0, because, ("the model ends in ReLU or another squashing",))


def _squashed(pipeline: Pipeline, made: list[torch.Tensor], num_models: int) -> Iterator[Finding]:
    axis = made[0].ndim - 1 if pipeline.task.targets == "tokens" else 1
    others = [i for i in range(made[0].ndim) if i != axis]
    lowest, highest = _lowest(made), max(z.max().item() for z in made)
    powers = [z.exp() for z in made] if highest <= 0 else []
    for wrong in [i for i in others if powers and _sums_to_one(powers, i)][:1]:
        cause = f"the model ends in log_softmax over {_axis_name(wrong)}"
        because = f"the model's outputs are logs of shares over {_axis_name(wrong)}"
        yield Finding(highest, 0.0, because, (cause,))
    if lowest < 0:
        return
    simplex = _sums_to_one(made, axis)
    form = "sum to one per row" if simplex else "are never negative"
    cause = "the model ends in ReLU, sigmoid or another squashing: hand raw logits to the loss"
    if simplex:
        cause = "the model ends in softmax: hand raw logits to the loss"
    elif any(_sums_to_one(made, i) for i in others):
        wrong = next(i for i in others if _sums_to_one(made, i))
        cause = f"the model ends in softmax over {_axis_name(wrong)}"
    because = f"the model's outputs {form} (lowest {lowest:.3g} over {num_models} models)"
    yield Finding(lowest, 0.0, because, (cause,))


def _sums_to_one(made: list[torch.Tensor], axis: int) -> bool:
    return all((z.sum(dim=axis) - 1).abs().max().item() < 0.02 for z in made)  # bf16: two digits


def _axis_name(axis: int) -> str:
    return "the batch axis" if axis == 0 else f"axis {axis}, not the classes"
