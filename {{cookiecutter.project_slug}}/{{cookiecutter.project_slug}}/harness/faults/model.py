"""Faults of the model: planted in every fresh one by hooks, or in its weights as they start."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..checks import Pipeline, probe
from ..instruments import RECTIFIED
from .plant import (
    NotPlantable,
    each,
    first_batch,
    layers,
    measured,
    needs,
    needs_measurements,
    needs_targets,
    with_inputs,
    with_models,
    with_outputs,
)

# ---- outputs ------------------------------------------------------------------------------------


def softmax_before_loss(pipeline: Pipeline) -> Pipeline:
    kind = needs_targets(pipeline, "exclusive", "multilabel", "tokens", "dense")
    if kind == "multilabel":
        return with_outputs(pipeline, torch.sigmoid)
    axis = -1 if kind == "tokens" else 1
    return with_outputs(pipeline, lambda outputs: outputs.softmax(dim=axis))


def softplus_on_outputs(pipeline: Pipeline) -> Pipeline:
    needs_targets(pipeline, "exclusive", "multilabel", "tokens", "dense")
    return with_outputs(pipeline, F.softplus)


def tanh_on_outputs(pipeline: Pipeline) -> Pipeline:
    needs_targets(pipeline, "exclusive", "multilabel", "tokens", "dense")
    return with_outputs(pipeline, torch.tanh)


def dropout_always_on(pipeline: Pipeline) -> Pipeline:
    return with_outputs(pipeline, lambda outputs: F.dropout(outputs, 0.5, training=True))


def batch_statistic_in_outputs(pipeline: Pipeline) -> Pipeline:
    return with_outputs(pipeline, lambda outputs: outputs - outputs.mean(dim=0))


def future_seen(pipeline: Pipeline) -> Pipeline:
    """Each position answers with what the model says one position later."""
    needs(getattr(pipeline.task, "causal", False), "causal order of positions declared by the task")
    return with_outputs(pipeline, lambda outputs: outputs.roll(-1, dims=1))


def padding_counted(pipeline: Pipeline) -> Pipeline:
    """A mean over positions that divides by their number, padded ones among them."""
    needs(getattr(pipeline.task, "pad", None), "`pad` in the task")

    def hook(module: nn.Module, args: tuple, outputs: torch.Tensor) -> torch.Tensor:
        return outputs * (8 / next(iter(probe.tensors(args[0]).values())).shape[1])

    return with_models(pipeline, lambda model: model.register_forward_hook(hook))


# ---- inputs -------------------------------------------------------------------------------------


def batch_mixed_by_reshape(pipeline: Pipeline) -> Pipeline:
    """A view where a permute was meant: values of one row land in others."""

    def mix(values: torch.Tensor) -> torch.Tensor:
        return values.flatten(1).t().reshape(values.shape) if values.ndim > 1 else values

    return with_inputs(pipeline, lambda x: each(x, mix))


def inputs_scaled_on_the_way(pipeline: Pipeline) -> Pipeline:
    """Normalised a second time, with constants of other data."""
    needs_measurements(pipeline)
    needs(getattr(pipeline.preprocessing, "std", None), "`std` declared by preprocessing")
    return with_inputs(pipeline, lambda x: measured(x, lambda values: 3 * values + 1))


def field_unused(pipeline: Pipeline) -> Pipeline:
    """The last part of a dict x, or the last half of each row, never reaches the model."""
    if not isinstance(first_batch(pipeline)["x"], dict):
        needs_measurements(pipeline)

    def blank(x: Any) -> Any:
        if isinstance(x, dict):
            last = list(x)[-1]
            return {**x, last: torch.zeros_like(x[last])}
        kept = x.clone()
        kept.reshape(len(x), -1)[:, x[0].numel() // 2 :] = 0
        return kept

    return with_inputs(pipeline, blank)


# ---- features -----------------------------------------------------------------------------------


def axes_mixed_by_reshape(pipeline: Pipeline) -> Pipeline:
    """Channels and positions of a layer change places by a view instead of a permute."""
    seen: list[bool] = []

    def hook(module: nn.Module, args: tuple, outputs: Any) -> Any:
        if not torch.is_tensor(outputs) or outputs.ndim < 3:
            return outputs
        channels, positions = outputs.flatten(2).shape[1:]
        seen.append(channels != positions)
        turned = outputs.flatten(2).reshape(len(outputs), positions, channels)
        return turned.transpose(1, 2).reshape(outputs.shape)

    def mix(model: nn.Module) -> None:
        for layer in layers(model, at_least=2)[:-1]:
            layer.register_forward_hook(hook)

    broken = with_models(pipeline, mix)
    with torch.no_grad():
        probe.forward(broken, broken.make_model(0).eval(), first_batch(pipeline)["x"])
    needs(any(seen), "layer whose channels and positions differ in number")
    return broken


# ---- parameters ---------------------------------------------------------------------------------


def trunk_detached(pipeline: Pipeline) -> Pipeline:
    """What the first layer returns and what the last one gets is cut from the graph."""

    def detached(values: Any) -> Any:
        if isinstance(values, tuple):
            return tuple(map(detached, values))
        return values.detach() if torch.is_tensor(values) else values

    def cut(model: nn.Module) -> None:
        found = layers(model, at_least=2)
        found[0].register_forward_hook(lambda module, args, outputs: detached(outputs))
        found[-1].register_forward_pre_hook(lambda module, args: detached(args))

    return with_models(pipeline, cut)


def head_frozen(pipeline: Pipeline) -> Pipeline:
    def freeze(model: nn.Module) -> None:
        layers(model, at_least=2)[-1].requires_grad_(False)

    return with_models(pipeline, freeze)


def layers_in_a_list(pipeline: Pipeline) -> Pipeline:
    """A part kept where neither `parameters()` nor the optimizer finds it."""

    def hide(model: nn.Module) -> None:
        layers(model, at_least=2)
        own = [name for name, part in model.named_children() if list(part.parameters())]
        if isinstance(model, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) or len(own) < 2:
            raise NotPlantable("the model has no two named parts, of which one could be hidden")
        model.__dict__[own[0]] = model._modules.pop(own[0])

    return with_models(pipeline, hide)


def all_zero_init(pipeline: Pipeline) -> Pipeline:
    return with_models(pipeline, lambda model: _fill(model, 0.0))


def constant_init(pipeline: Pipeline) -> Pipeline:
    return with_models(pipeline, lambda model: _fill(model, 0.02))


def _fill(model: nn.Module, value: float) -> None:
    """All but the bias of the last layer, which may hold the label shares."""
    head = layers(model, at_least=2)[-1]
    spared = {id(p) for p in head.parameters(recurse=False) if p.ndim < 2}
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in spared:
                parameter.fill_(value)


def dead_units(pipeline: Pipeline) -> Pipeline:
    """Units of rectified layers that never fire."""

    def kill(model: nn.Module) -> None:
        for unit in needs([m for m in model.modules() if isinstance(m, RECTIFIED)], "ReLU module"):
            unit.register_forward_hook(lambda module, args, outputs: outputs * 0)

    return with_models(pipeline, kill)


def statistics_frozen(pipeline: Pipeline) -> Pipeline:
    def stop(model: nn.Module) -> None:
        kinds = nn.modules.batchnorm._BatchNorm
        for norm in needs([m for m in model.modules() if isinstance(m, kinds)], "BatchNorm"):
            norm.momentum = 0.0

    return with_models(pipeline, stop)
