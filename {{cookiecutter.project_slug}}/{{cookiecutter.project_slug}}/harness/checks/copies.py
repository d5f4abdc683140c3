"""Clauses of `split_hygiene`: validation rows that are changed copies of training rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from . import Finding
from .overlap import COPIED, Clause, Rows

MOST_VALUES = 20_000_000  # of a split that are compared: some 0.2 s per offset

# ---- moved copies -------------------------------------------------------------------------------


def moved_copies(train: Rows, validation: Rows, max_rows: int) -> Iterator[Clause]:
    """Validation rows of which the middle stands in a training row, aside or mirrored. Of floats
    `(C, H, W)` and `(C, T)`; a middle of fewer than 8 distinct values says nothing."""
    for part, one in train.x.items():
        other = validation.x[part]
        if (
            not one.is_floating_point()
            or one.ndim not in (3, 4)
            or one.shape[1:] != other.shape[1:]
        ):
            continue
        count = min(max_rows // 2, MOST_VALUES // one[0].numel())
        one, other = _some(one, count), _some(other, count)
        margin = _margin(one)
        if margin is None:
            continue
        known = {crop for crops in _crops(one, margin) for crop in crops}
        telling = _telling(_middle(other, margin))
        hits = torch.zeros(len(other), dtype=torch.bool)
        for view in (other, other.flip(-1)):
            hits |= torch.tensor([crop in known for crop in _bytes(_middle(view, margin))])
        count = int((hits & telling).sum())
        if count >= max(3, 0.01 * len(other)):
            because = (
                f"{count} of {len(other)} validation rows hold the middle of a training row, moved "
                "or mirrored"
            )
            causes = (
                "crops or windows of one record are in both splits",
                "augmented copies were made before the split",
            )
            yield Clause(Finding(count / len(other), 0.01, because, causes), True)
            return


def _margin(x: torch.Tensor) -> tuple[int, ...] | None:
    """Steps to either side, per axis; None where too little would be left."""
    if x.ndim == 3:
        return (x.shape[2] // 4,) if x.shape[2] >= 16 else None
    sides = tuple(min(2, side // 8) for side in x.shape[2:])
    return sides if min(sides) > 0 else None


def _middle(x: torch.Tensor, margin: tuple[int, ...]) -> torch.Tensor:
    for axis, steps in enumerate(margin, start=2):
        x = x.narrow(axis, steps, x.shape[axis] - 2 * steps)
    return x


def _crops(x: torch.Tensor, margin: tuple[int, ...]) -> Iterator[list[bytes]]:
    """The crops of that size at every offset, row by row."""
    offsets = torch.cartesian_prod(*[torch.arange(2 * steps + 1) for steps in margin])
    for offset in offsets.reshape(-1, len(margin)).tolist():
        crop = x
        for axis, (start, steps) in enumerate(zip(offset, margin, strict=True), start=2):
            crop = crop.narrow(axis, start, x.shape[axis] - 2 * steps)
        yield _bytes(crop)


def _bytes(x: torch.Tensor) -> list[bytes]:
    """A key per row: equal for equal rows, and hardly ever for others (two sums in float64)."""
    flat = x.double().reshape(len(x), -1)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(1, 2**20, (flat.shape[1], 2), generator=generator).double()
    return [row.tobytes() for row in (flat @ weights).float().numpy()]


def _telling(x: torch.Tensor) -> torch.Tensor:
    """`(N,)`: rows of at least 8 distinct values."""
    ordered = x.reshape(len(x), -1).sort(dim=1).values
    return (ordered.diff(dim=1) != 0).sum(dim=1) >= 7


# ---- near copies --------------------------------------------------------------------------------


def near_copies(train: Rows, validation: Rows, max_rows: int, limit: float) -> Iterator[Clause]:
    """The share of validation rows that lie beside a training row, less that of training rows."""
    one, other = train.floats(), validation.floats()
    if one is None or other is None or one.shape[1] != other.shape[1] or len(one) < 50:
        return
    if any(not values.is_floating_point() for values in train.x.values()):
        return
    one = _some(one, max_rows * 3 // 4)
    other = _some(other, max_rows // 4)
    one, other = _narrow(one, other)
    within = torch.cdist(one, one).fill_diagonal_(math.inf)
    nearest, partner = within.min(dim=1)
    far, beside = torch.cdist(other, one).min(dim=1)
    shares = [_beside(far, nearest[beside]), _beside(nearest, _without(within, partner))]
    counts = len(other), len(one)
    excess = shares[0] - shares[1]
    pooled = (shares[0] * counts[0] + shares[1] * counts[1]) / sum(counts)
    error = math.sqrt(max(pooled * (1 - pooled), 1 / sum(counts)) * (1 / counts[0] + 1 / counts[1]))
    if excess > 0.02 and excess > 4 * error:
        because = (
            f"{shares[0]:.1%} of the validation rows lie twice as near to a training row as "
            f"that one to any other; {shares[1]:.1%} of the training rows do"
        )
        causes = ("changed copies (noise, crops, compression) of training rows", *COPIED)
        shuts = excess > limit and excess > 6 * error
        yield Clause(Finding(excess, limit, because, causes), shuts)


def _beside(far: torch.Tensor, scale: torch.Tensor) -> float:
    return (far < 0.5 * scale).double().mean().item()


def _without(within: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
    """For each row: how far its nearest row is from its own nearest, that row left out."""
    rows = within[partner].clone()
    rows[torch.arange(len(rows)), torch.arange(len(rows))] = math.inf
    return rows.min(dim=1).values


def _some(values: torch.Tensor, count: int) -> torch.Tensor:
    if len(values) <= count:
        return values
    return values[torch.linspace(0, len(values) - 1, count).round().long()]


def _narrow(*sides: torch.Tensor, width: int = 256) -> Iterator[torch.Tensor]:
    """At most `width` columns, by a random projection that keeps distances within some percent."""
    every = -(-sides[0].shape[1] // 4096)  # of large pictures a part of the pixels will do
    sides = tuple(side[:, ::every] for side in sides)
    columns = sides[0].shape[1]
    if columns <= width:
        yield from sides
        return
    generator = torch.Generator().manual_seed(0)
    onto = torch.randn(columns, width, generator=generator) / math.sqrt(width)
    yield from (side @ onto for side in sides)
