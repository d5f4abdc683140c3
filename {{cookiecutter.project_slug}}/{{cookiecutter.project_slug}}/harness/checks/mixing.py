"""Clauses of `loader`: the order of the rows and the labels of the batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from . import Finding, Pipeline
from .epochs import Epoch, declared_sampler, listed


def order(side: Any, epochs: list[Epoch]) -> Iterator[Finding]:
    """The rows come in another order each epoch. One batch per epoch has no order to judge."""
    one, two = epochs[0], epochs[1]
    if len(one.sizes) < 2 or len(one.ids) < 6 or declared_sampler(side) == "streamed":
        return
    if len(one.ids) != len(two.ids):
        return
    if torch.equal(one.ids, two.ids):
        known = listed(side)
        kept = known is not None and torch.equal(one.ids, known[: len(one.ids)])
        because = f"{len(one.ids)} training rows come in the same order in both epochs"
        because += ", the stored one" if kept else ""
        causes = (
            "training is not shuffled" if kept else "the generator starts anew each epoch",
            "the loader's epoch never advances",
        )
        yield Finding(1.0, 0.5, because, causes)
        return
    share = _followers_kept(one.ids, two.ids)
    if share > 0.5:
        because = f"{share:.0%} of the training rows are followed by the same row in both epochs"
        causes = ("only whole blocks are moved: rows always meet the same rows",)
        yield Finding(share, 0.5, because, causes)


def _followers_kept(one: torch.Tensor, two: torch.Tensor) -> float:
    """The share of neighbours in the first order that are so in the second, either way round."""
    if len(one.unique()) < len(one) or not torch.equal(one.sort().values, two.sort().values):
        return 0.0
    sorted_ids, where = two.sort()
    place = where[torch.searchsorted(sorted_ids, one)]
    steps = place.diff()
    return max((steps == 1).double().mean().item(), (steps == -1).double().mean().item())


def label_mix(pipeline: Pipeline, epochs: list[Epoch], limit: float) -> Iterator[Finding]:
    """The labels of the batches scatter about those of the whole as chance has it."""
    columns = _columns(pipeline.task, epochs[0].y)
    if columns is None:
        return
    total, freedom = 0.0, 0.0
    for one in epochs:
        values = _columns(pipeline.task, one.y)
        expected = values.mean(dim=0) * max(one.sizes)
        if pipeline.task.targets == "exclusive":
            values = values[:, expected >= 1]  # a class met once in many batches has no chi-square
        if not values.shape[1] or len(one.sizes) < 2:
            return
        spread = values.var(dim=0)
        values, spread = values[:, spread > 0], spread[spread > 0]
        if not len(spread):
            return
        means = torch.stack([part.mean(dim=0) for part in values.split(one.sizes)])
        sizes = torch.tensor(one.sizes, dtype=torch.float64)[:, None]
        total += (sizes * (means - values.mean(dim=0)) ** 2 / spread).sum().item()
        freedom += (len(one.sizes) - 1) * len(spread)
    ratio = total / freedom
    # Columns of one target depend on each other: as many freedoms as batches, at the least.
    free = max(freedom / columns.shape[1], 1.0)
    certain = (ratio ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    if ratio > limit and certain > 6:
        because = (
            f"the labels of training batches vary {ratio:.1f} times as much as chance has "
            f"it, in batches of {max(epochs[0].sizes)}"
        )
        causes = (
            "rows are sorted by label and not (or hardly) shuffled",
            "a shuffle buffer far smaller than the data",
        )
        yield Finding(ratio, limit, because, causes)


def _columns(task: Any, y: torch.Tensor) -> torch.Tensor | None:
    """`(N, D)` numbers to average: class indicators, labels or values; None for sequences."""
    if task.targets == "exclusive" and y.ndim == 1 and not y.is_floating_point() and y.min() >= 0:
        return torch.nn.functional.one_hot(y, max(task.num_outputs, int(y.max()) + 1)).double()
    if task.targets in ("multilabel", "real"):
        return y.double().flatten(1) if y.ndim > 1 else y.double()[:, None]
    return None
