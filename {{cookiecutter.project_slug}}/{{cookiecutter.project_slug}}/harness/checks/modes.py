"""Training and evaluation mode, where it matters: at the moment the model is called."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import Check, Finding, Pipeline, probe, shut_if_any

FEW_ROWS = 4  # per part of a batch: so few make statistics of a batch that no other one has
NUM_STEPS = 30  # until running statistics have forgotten their start (0.9 ** 30 is 4 %)


def modes(pipeline: Pipeline, *, max_rows: int = 256, max_gap: float = 1.0) -> Check:
    """Every submodule is in evaluation mode in `evaluate` and in training mode in `train_step`
    (except what the model itself keeps back when told to train); two evaluations are bit-equal;
    weights and buffers stay as they are in evaluation, running statistics move in training, and
    those of a frozen layer do not. Where a part of a batch has so few rows that their statistics
    are chance, outputs of both modes on the same rows further apart than `max_gap` of their spread
    (after 30 steps) warn. Equality is exact in fp32 and bf16 on the CPU, within 1e-6
    elsewhere.
    """
    model = pipeline.make_model(0).train()
    expected = _flags(model)  # a model may hold frozen parts back in its own train()
    held_out = probe.few(pipeline.validation, max_rows)
    before = _state(model)
    with _watched(model) as in_evaluate:
        first = _evaluate(pipeline, model, held_out, seed=1)
        second = _evaluate(pipeline, model, held_out, seed=2)
    moved = [key for key, value in _state(model).items() if not _same(value, before[key])]
    after_evaluate, restored = _state(model), _flags(model) == expected
    optimizer = pipeline.make_optimizer(model)
    with _watched(model) as in_step:
        for batch in probe.batches_of(pipeline.train, min_rows=2 * 64)[:2]:
            pipeline.train_step(model, optimizer, batch)
    found = [
        *_wrong_flags(in_evaluate, in_step, expected, restored),
        *_unequal(pipeline, first, second),
        *_moved_in_evaluation(moved),
        *_statistics(model, after_evaluate, expected),
    ]
    num_modules, num_buffers = len(expected), len(list(model.buffers()))
    because = (
        f"All {num_modules} modules are in the right mode in step and evaluation, two evaluations "
        f"are equal, and the {num_buffers} buffers move in training only."
    )
    gap = None if found else _gap(pipeline)
    if gap is not None and gap > max_gap:
        because = f"After {NUM_STEPS} steps outputs of training and evaluation mode on the same "
        because += f"rows are {gap:.2g} of their spread apart: too few rows for batch statistics."
        causes = ("BatchNorm with so few rows: a larger batch, or GroupNorm",)
        return Check("modes", "warn", gap, max_gap, "", because, causes)
    return shut_if_any(found, Check("modes", "open", 0.0, 0.0, "", because))


def _flags(model: nn.Module) -> dict[str, bool]:
    return {path: module.training for path, module in model.named_modules()}


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else a.equal(b)


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[list[dict[str, bool]]]:
    """The modes of all submodules at each call of the model."""
    seen: list[dict[str, bool]] = []
    handle = model.register_forward_pre_hook(lambda module, args: seen.append(_flags(model)))
    try:
        yield seen
    finally:
        handle.remove()


def _evaluate(pipeline: Pipeline, model: nn.Module, loader: Any, *, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)  # another one each time: whatever draws in evaluation shows
    return pipeline.evaluate(model, loader).outputs


def _wrong_flags(
    in_evaluate: list, in_step: list, expected: dict[str, bool], restored: bool
) -> Iterator[Finding]:
    training = {path for flags in in_evaluate for path, flag in flags.items() if flag}
    if training:
        because = f"{len(training)} of {len(expected)} modules are in training mode in evaluation"
        causes = ("model.eval() is not called before evaluating", "a part switches itself back")
        yield Finding(float(len(training)), 0.0, because, causes)
    wrong = {p for flags in in_step for p, flag in flags.items() if flag != expected.get(p, flag)}
    if wrong:
        because = f"{len(wrong)} of {len(expected)} modules are in the wrong mode in the step"
        left = "evaluation does not put the modes back and the step does not call model.train()"
        causes = ("the step calls model.eval()",) if restored else (left,)
        yield Finding(float(len(wrong)), 0.0, because, causes)


def _unequal(pipeline: Pipeline, first: torch.Tensor, second: torch.Tensor) -> Iterator[Finding]:
    if first.shape == second.shape:
        difference = (first - second).abs().max().item()
        room = 0.0 if pipeline.device.type == "cpu" else 1e-6 * first.abs().max().item()
        if difference <= room:
            return
        because = f"two evaluations of one model differ by up to {difference:.3g}"
    else:
        difference, because = None, "two evaluations of one model differ in shape"
    causes = ("functional dropout without the training flag", "evaluation is not in eval mode")
    yield Finding(difference, 0.0, because, causes)


def _moved_in_evaluation(moved: list[str]) -> Iterator[Finding]:
    if moved:
        because = f"{len(moved)} tensors of the model change in evaluation ({moved[0]})"
        causes = ("batch statistics are updated in evaluation", "evaluation trains")
        yield Finding(float(len(moved)), 0.0, because, causes)


def _statistics(
    model: nn.Module, before: dict[str, torch.Tensor], expected: dict[str, bool]
) -> Iterator[Finding]:
    """Running statistics: learn where the layer learns, stay where it is frozen."""
    stuck, drifting = [], []
    paths = {id(module): path for path, module in model.named_modules()}
    for module in probe.batch_statistics(model):
        path = paths[id(module)]
        own = {k: v for k, v in module.named_buffers(recurse=False) if v.is_floating_point()}
        changed = any(
            not _same(value, before[f"{path}.{key}".lstrip(".")]) for key, value in own.items()
        )
        parameters = list(module.parameters(recurse=False))
        frozen = bool(parameters) and not any(p.requires_grad for p in parameters)
        if own and expected[path] and not frozen and not changed:
            stuck.append(path)
        if frozen and changed:
            drifting.append(path)
    if stuck:
        because = f"running statistics of {len(stuck)} layers do not move in training ({stuck[0]})"
        causes = ("momentum 0 of BatchNorm", "the layer is in evaluation mode in the step")
        yield Finding(float(len(stuck)), 0.0, because, causes)
    if drifting:
        because = f"running statistics of {len(drifting)} frozen layers move ({drifting[0]})"
        causes = ("frozen BatchNorm is left in training mode: put it in eval() in train()",)
        yield Finding(float(len(drifting)), 0.0, because, causes)


def _gap(pipeline: Pipeline) -> float | None:
    """How far apart the outputs of the two modes are, relative to their spread over the rows, for
    layers with batch statistics and few rows; None where that does not apply."""
    model = pipeline.make_model(0).train()
    first = next(iter(copy.copy(pipeline.train)))
    size = len(first["y"]) // pipeline.accumulate
    layers = [m for m in probe.batch_statistics(model) if m.training]
    if not layers or not 2 <= size <= FEW_ROWS:
        return None
    optimizer = pipeline.make_optimizer(model)
    batches = list(itertools.islice(probe.endless(pipeline.train), NUM_STEPS))
    for batch in batches:
        pipeline.train_step(model, optimizer, batch)
    probe.without_dropout(model)
    outputs = {}
    for mode in (False, True):
        model.train(mode)
        with torch.no_grad():
            parts = [probe.forward(pipeline, model, b["x"]) for b in batches if len(b["y"]) > 1]
        outputs[mode] = torch.cat(parts)
    spread = (outputs[False] - outputs[False].mean(dim=0)).norm().clamp_min(1e-12)
    return ((outputs[True] - outputs[False]).norm() / spread).item()
