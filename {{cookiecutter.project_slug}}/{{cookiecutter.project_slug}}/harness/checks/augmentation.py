"""Clauses of `loader`: augmentation that is drawn anew for each row, batch and epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from . import Check, Finding, probe
from .epochs import Epoch, own

NUM_BATCHES = 4
CAUSES = (
    "the augmentation's generator starts anew (one seed for every worker, batch or epoch)",
    "augmentation is drawn once, when the data is read",
)


def augmentation_frozen(side: Any, epochs: list[Epoch]) -> Iterator[Finding]:
    """Augmented inputs are finite, differ from the stored ones and between epochs."""
    if getattr(side, "augment", None) is None:
        return
    broken = sum(int((~values.isfinite()).sum()) for values in epochs[0].x.values())
    if broken:
        because = f"augmentation makes {broken} values that are not finite"
        yield Finding(float(broken), 0.0, because, ("a scale of zero", "a logarithm of zero"))
        return
    stored = probe.stored_at(side, epochs[0].ids)
    if stored is not None and _changed(stored["x"], epochs[0].x) < 0.01:
        because = "the loader augments and its rows are those stored"
        yield Finding(0.0, None, because, ("the result of the augmentation is discarded",))
        return
    if len(epochs[0].ids) == len(epochs[1].ids) == len(epochs[0].ids.unique()):
        same = len(epochs[0].ids) - epochs[0].differs(epochs[1])
        if same > 0.99 * len(epochs[0].ids) and torch.isin(epochs[0].ids, epochs[1].ids).all():
            because = f"{same} of {len(epochs[0].ids)} augmented rows are the same in both epochs"
            yield Finding(float(same), 0.0, because, CAUSES)


def _changed(stored: Any, given: dict) -> float:
    """The share of rows that differ in any part."""
    parts = probe.tensors(stored).items()
    if any(part not in given for part, _ in parts):
        return 1.0
    wrong = [probe.rows_differ(values.cpu(), given[part]) for part, values in parts]
    return torch.stack(wrong).any(dim=0).double().mean().item()


# ---- one row in every place: what differs then is the augmentation alone ------------------------


def repeated_draws(draws: tuple[list, list] | None) -> Iterator[Finding]:
    """Two batches, or two epochs, do not draw the same for the same place of a batch."""
    if draws is None:
        return
    first, second = draws
    pairs = [("two batches", a, b) for a, b in pairwise(first)]
    pairs += [("the same batch of two epochs", a, b) for a, b in zip(first, second, strict=True)]
    chance = (torch.cat(first).unique(return_counts=True)[1] / sum(map(len, first))) ** 2
    for where in ("two batches", "the same batch of two epochs"):
        chosen = [(a, b) for name, a, b in pairs if name == where and len(a) == len(b)]
        places = sum(len(a) for a, _ in chosen)
        alike = sum(int((a == b).sum()) for a, b in chosen)
        unlikely = places * math.log(max(chance.sum().item(), 1e-12)) < math.log(1e-6)
        if places and alike >= 0.95 * places and unlikely:
            because = f"one row in every place: {alike} of {places} places are augmented alike in "
            yield Finding(alike / places, 0.95, because + where, CAUSES)
            return


def one_draw(draws: tuple[list, list] | None) -> Iterator[Check]:
    """A warning where a whole batch shares one draw."""
    if draws is None:
        return
    batches = [batch for batch in draws[0] if len(batch) > 3]
    kinds = len(torch.cat(batches).unique()) if batches else 0
    if kinds > 1 and all(len(batch.unique()) == 1 for batch in batches):
        because = "All rows of a training batch are augmented by one draw."
        causes = ("random numbers are drawn per batch, not per row",)
        yield Check("loader", "warn", 1.0, None, "draws", because, causes)


def draws_of_one_row(side: Any) -> tuple[list, list] | None:
    """Per batch of two epochs, for each place a number that says how the same row came out; None
    where augmentation cannot be seen on equal rows (it mixes rows, or rarely does anything)."""
    rows = getattr(side, "rows", None)
    if rows is None or getattr(side, "augment", None) is None:
        return None
    count = min(len(rows["y"]), 64 * NUM_BATCHES)
    varied = max(range(min(count, 32)), key=lambda row: _spread(rows["x"], row))
    same = {name: _repeat(value, varied) for name, value in probe.tensors(rows["x"]).items()}
    probed = own(side)
    probed.rows = {**probed.rows, "x": probe.like(rows["x"], same)}
    codes = _codes([*_some(probed), *_some(probed)])
    half = len(codes) // 2
    if not codes or len(torch.cat(codes).unique()) < 2:
        return None
    return codes[:half], codes[half : 2 * half]


def _some(side: Any) -> list[dict]:
    found = []
    for batch in side:
        found.append({name: v.cpu() for name, v in probe.tensors(batch["x"]).items()})
        if len(found) == NUM_BATCHES:
            break
    return found


def _spread(x: Any, row: int) -> float:
    parts = [value[row].double() for value in probe.tensors(x).values()]
    return sum(part.std().item() for part in parts if part.numel() > 1)


def _repeat(values: torch.Tensor, row: int) -> torch.Tensor:
    return values[row : row + 1].expand_as(values).clone()


def _codes(batches: list[dict]) -> list[torch.Tensor]:
    """One number per row: equal for equal outcomes."""
    seen: dict[tuple, int] = {}

    def code(batch: dict, row: int) -> int:
        content = tuple(values[row].numpy().tobytes() for values in batch.values())
        return seen.setdefault(content, len(seen))

    sizes = [len(next(iter(batch.values()))) for batch in batches]
    return [
        torch.tensor([code(batch, row) for row in range(size)])
        for batch, size in zip(batches, sizes, strict=True)
    ]


# ---- over epochs --------------------------------------------------------------------------------


def drifting(epochs: list[Epoch], limit: float) -> Iterator[Finding]:
    """Mean and sd of a whole epoch go neither up nor down, epoch by epoch."""
    for part in epochs[0].x:
        values = [one.x[part] for one in epochs]
        if not values[0].is_floating_point():
            continue
        means = torch.tensor([v.double().mean() for v in values])
        stds = torch.tensor([v.double().std() for v in values])
        rows = min(len(v) for v in values)
        by_row = values[0].double().flatten(1)
        noise = 8 * by_row.mean(dim=1).std().item() / math.sqrt(rows) if rows > 1 else math.inf
        scale = max(stds[0].item(), 1e-12)
        ratio = (stds[-1] / stds[0].clamp_min(1e-12)).clamp_min(1e-12).log().abs().item()
        moved = abs((means[-1] - means[0]).item())
        same_rows = torch.equal(epochs[0].ids.sort().values, epochs[-1].ids.sort().values)
        off = _one_way(means) and moved > max(limit * scale, 0 if same_rows else noise)
        wide = _one_way(stds) and ratio > math.log(1 + 2 * limit) and same_rows
        if off or wide:
            because = (
                f"{part} has mean {means[0]:.3g} and sd {stds[0]:.3g} in the first epoch, "
                f"{means[-1]:.3g} and {stds[-1]:.3g} in epoch {len(epochs)}"
            )
            causes = ("normalisation or augmentation writes into the stored rows",)
            yield Finding(moved / scale, limit, because, causes)
            return


def _one_way(values: torch.Tensor) -> bool:
    steps = values.diff()
    return bool((steps > 0).all() or (steps < 0).all())
