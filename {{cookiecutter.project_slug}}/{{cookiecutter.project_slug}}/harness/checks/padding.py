"""Padding: what a row says must not depend on how far it was padded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..loop import take
from . import Check, Finding, Pipeline, not_applicable, positions, probe, shut_if_any

TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}  # of the outputs' norm, between different shapes
_RAISES = (IndexError, RuntimeError, ValueError, AssertionError)


def pad_invariance(
    pipeline: Pipeline,
    *,
    max_relative_change: float | None = None,
    nums: tuple[int, ...] = (1, 3, 8),
    max_rows: int = 8,
) -> Check:
    """Rows as they are against the same rows padded by `task.pad(x, num)`, and the short rows of a
    batch against each alone without its padding: outputs at real positions stay within
    `max_relative_change` of their norm (default 1e-4 in fp32, 1e-2 in bf16: other shapes round
    otherwise). On a fresh model and on one after a few steps, since some branches start at zero.
    """
    name, limit = "pad_invariance", max_relative_change or TOLERANCE[pipeline.precision]
    if not hasattr(pipeline.task, "pad"):
        return not_applicable(
            name, "The task does not say how a row is padded: hand over task.pad(x, num)."
        )
    batch = probe.join(probe.batches_of(pipeline.train, min_rows=4 * max_rows))
    x = _varied(pipeline, batch["x"], max_rows)
    worst, words, tried = 0.0, "", 0
    for model in _models(pipeline):
        for change, how in _changes(pipeline, model, x, nums):
            tried += 1
            worst, words = max((worst, words), (change, how), key=lambda pair: pair[0])
    if not tried:
        because = "The model takes rows of one length only: rows padded further cannot be tried."
        return not_applicable(name, because)
    because = f"padding moves the outputs of real positions by at most {worst:.2g} of them"
    found = []
    if worst > limit:
        causes = (
            "padding reaches attention or pooling: the mask is missing or dropped",
            "positions are counted from the padding: left padding without position ids",
            "a norm or convolution over padded positions",
        )
        found.append(Finding(worst, limit, f"{words} moves outputs by {worst:.2g} of them", causes))
    good = Check(name, "open", worst, limit, "", f"{because.capitalize()} ({tried} comparisons).")
    return shut_if_any(found, good)


def _models(pipeline: Pipeline) -> Iterator[nn.Module]:
    yield probe.without_dropout(copy.deepcopy(pipeline.make_model(0))).eval()
    yield probe.without_dropout(probe.warmed(pipeline, 0)).eval()


def _varied(pipeline: Pipeline, x: Any, max_rows: int) -> Any:
    """The rows with least and most padding; the first ones where nothing tells."""
    num_rows = len(next(iter(probe.tensors(x).values())))
    index = torch.arange(num_rows)
    kept = _real(pipeline, x)
    if kept is not None:
        index = kept.sum(dim=1).cpu().argsort(stable=True)
    half = max_rows // 2
    if num_rows > max_rows:
        index = torch.cat([index[:half], index[half - max_rows :]])
    return take(x, index.to(next(iter(probe.tensors(x).values())).device))


def _real(pipeline: Pipeline, x: Any) -> torch.Tensor | None:
    lengths = [v.shape[1] for v in probe.tensors(x).values() if v.ndim >= 2]
    kept = [positions.real(pipeline.task, x, length) for length in lengths]
    return next((real for real in kept if real is not None), None)


def _changes(
    pipeline: Pipeline, model: nn.Module, x: Any, nums: tuple[int, ...]
) -> Iterator[tuple[float, str]]:
    """(relative change, what was done) for each comparison that the model takes."""
    longer = list(_padded_further(pipeline, model, x, nums))
    if not longer:  # a model of fixed length: shorten the rows, then pad them back
        for num in nums:
            longer += list(_padded_further(pipeline, model, _shortened(x, num), (num,)))
    yield from longer
    yield from _alone(pipeline, model, x)


def _padded_further(
    pipeline: Pipeline, model: nn.Module, x: Any, nums: tuple[int, ...]
) -> Iterator[tuple[float, str]]:
    kept = _real(pipeline, x)
    for num in nums:
        padded = pipeline.task.pad(x, num)
        try:
            with torch.no_grad():
                short = positions.run(pipeline, model, x)
                long = positions.run(pipeline, model, padded)
        except _RAISES:  # more positions than the model has
            continue
        yield _change(short, _unpadded(pipeline, long, num, short), kept), f"padding by {num}"


def _unpadded(
    pipeline: Pipeline, long: torch.Tensor, num: int, short: torch.Tensor
) -> torch.Tensor:
    if hasattr(pipeline.task, "unpad"):
        return pipeline.task.unpad(long, num)
    return long if long.shape == short.shape else long[:, : short.shape[1]]


def _shortened(x: Any, num: int) -> Any:
    """The rows without their last `num` positions."""
    parts = probe.tensors(x)
    length = max(v.shape[1] for v in parts.values() if v.ndim >= 2)
    cut = {
        key: value[:, : max(1, length - num)]
        if value.ndim >= 2 and value.shape[1] == length
        else value
        for key, value in parts.items()
    }
    return probe.like(x, cut)


def _alone(pipeline: Pipeline, model: nn.Module, x: Any) -> Iterator[tuple[float, str]]:
    """The short rows of a mixed batch, each alone without its padding."""
    kept = _real(pipeline, x)
    if kept is None or bool(kept.all()):
        return
    length = kept.shape[1]
    with torch.no_grad():
        together = positions.run(pipeline, model, x)
        for row in torch.where(~kept.all(dim=1) & kept.any(dim=1))[0].tolist():
            places = torch.where(kept[row])[0]
            index = torch.arange(int(places[0]), int(places[-1]) + 1, device=kept.device)
            mine = take(x, torch.tensor([row], device=kept.device))
            own = {
                key: value[:, index] if value.ndim >= 2 and value.shape[1] == length else value
                for key, value in probe.tensors(mine).items()
            }
            try:
                alone = positions.run(pipeline, model, probe.like(x, own))
            except _RAISES:  # rows of one length only
                return
            before, real = together[row : row + 1], kept[row : row + 1, index]
            if before.ndim >= 3 and before.shape[1] == length:
                before = before[:, index]
            if before.shape == alone.shape:
                how = f"{length - len(index)} padded positions beside longer rows"
                yield _change(alone, before, real), how


def _change(right: torch.Tensor, other: torch.Tensor, kept: torch.Tensor | None) -> float:
    """Largest change of a row at its real positions, relative to the outputs' mean norm."""
    if right.shape != other.shape:
        return float("inf")
    if kept is not None and right.ndim >= 3 and right.shape[1] == kept.shape[1]:
        weight = kept.reshape(*kept.shape, *[1] * (right.ndim - 2)).to(right.device)
        right, other = right.where(weight, 0), other.where(weight, 0)
    right, other = right.reshape(len(right), -1), other.reshape(len(other), -1)
    size = right.norm(dim=1).mean().clamp_min(1e-12)
    return ((other - right).norm(dim=1) / size).nan_to_num(float("inf")).max().item()
