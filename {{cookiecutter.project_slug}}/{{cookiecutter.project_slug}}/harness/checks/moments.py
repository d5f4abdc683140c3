"""Clauses of `last_seam`: means, spreads and row statistics of what the model gets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from . import Finding, Pipeline, probe

DIFFERENT = (
    "validation is normalised or scaled differently",
    "the splits come from different sources",
    "augmentation changes the range",
)


def channels(values: torch.Tensor) -> torch.Tensor | None:
    """`(N, C, K)`: K values per row and channel (axis 1); None for what is no measurement."""
    if not values.is_floating_point():
        return None
    values = values.cpu().double()  # not every device has float64
    return values.reshape(len(values), values.shape[1] if values.ndim > 1 else 1, -1)


# ---- weights: a sampler or a split with another mix of classes is no fault of the inputs --------


def weights_to(pipeline: Pipeline, y: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """`(N,)`, sum 1: rows weighted until their classes have the shares of `target` (other labels).
    Flat where classes do not exclude each other."""
    if pipeline.task.targets != "exclusive" or target is None or not len(target):
        return torch.full((len(y),), 1 / len(y), dtype=torch.float64)
    y, count = y.cpu(), pipeline.task.num_outputs
    wanted = torch.bincount(target.cpu(), minlength=count).double()
    weights = (wanted / torch.bincount(y, minlength=count).clamp_min(1))[y]
    if weights.sum() == 0:
        return torch.full((len(y),), 1 / len(y), dtype=torch.float64)
    return weights / weights.sum()


def matched(pipeline: Pipeline, one: torch.Tensor, other: torch.Tensor) -> tuple:
    """Weights of the rows of both sides under which both have the same classes."""
    if pipeline.task.targets != "exclusive":
        return weights_to(pipeline, one, None), weights_to(pipeline, other, None)
    count = pipeline.task.num_outputs
    counts = [torch.bincount(y.cpu(), minlength=count) for y in (one, other)]
    common = torch.arange(count).repeat_interleave(torch.minimum(*counts))
    return weights_to(pipeline, one, common), weights_to(pipeline, other, common)


def moments(values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Per channel: mean, sd, standard error of the mean, standard error of log sd. Rows are the
    unit of sampling: the values of one row belong together."""
    by_row = values.mean(dim=2)
    mean = weights @ by_row
    square = ((values - mean[:, None]) ** 2).mean(dim=2)
    variance = weights @ square
    error = (weights**2 @ (by_row - mean) ** 2).sqrt()
    log_error = 0.5 * (weights**2 @ (square - variance) ** 2).sqrt() / variance.clamp_min(1e-30)
    return mean, variance.sqrt(), error, log_error


def _size(weights: torch.Tensor) -> float:
    """How many equally weighted rows would be as certain."""
    return 1 / (weights**2).sum().item()


def as_stored(pipeline: Pipeline, seen: dict, max_rows: int) -> dict:
    """Training rows in the shares in which they are stored, where the model gets them as they are
    stored: a sampler that leaves out the one extreme row is no fault of the inputs. Else `seen`."""
    stored = probe.stored_at(pipeline.train, seen["id"])
    if stored is None:
        return seen
    given = probe.tensors(seen["x"])
    for part, values in probe.tensors(stored["x"]).items():
        if part not in given or not torch.equal(values, given[part]):
            return seen
    return probe.few_rows(pipeline.train, max_rows)


# ---- clauses ------------------------------------------------------------------------------------


def declared(
    pipeline: Pipeline, train: dict, limit: float, wide_mean: float, wide_std: list[float]
) -> Iterator[Finding]:
    """Normalised values have mean 0 and sd 1 in training (or what `expected_mean`, `expected_std`
    of preprocessing say, for constants that were not fitted on this data)."""
    declares = pipeline.preprocessing
    values = None if isinstance(train["x"], dict) else channels(train["x"])
    if values is None or getattr(declares, "std", None) is None:
        return
    wide = getattr(pipeline.train, "augment", None) is not None
    room = wide_mean if wide else limit
    low, high = wide_std if wide else (1 - limit, 1 + limit)
    asked_mean = vector(getattr(declares, "expected_mean", 0.0), values)
    asked_std = vector(getattr(declares, "expected_std", 1.0), values)
    weights = weights_to(pipeline, train["y"], probe.labels(pipeline.train))
    mean, std, error, log_error = moments(values, weights)
    varies = values.amax(dim=(0, 2)) > values.amin(dim=(0, 2))  # see `constant` for the others
    off = ((mean - asked_mean).abs() - torch.maximum(room * asked_std, 4 * error)) * varies
    ratio = (std / asked_std).clamp_min(1e-30).log() * varies
    wrong = (ratio > torch.maximum(torch.tensor(high).log(), 4 * log_error)) | (
        ratio < torch.minimum(torch.tensor(low).log(), -4 * log_error)
    )
    if not (off > 0).any() and not wrong.any():
        return
    worst = int(((mean - asked_mean).abs() / asked_std + ratio.abs()).argmax())
    because = (
        f"channel {worst} has mean {mean[worst]:.3g} and sd {std[worst]:.3g} in training where "
        f"preprocessing declares {asked_mean[worst]:.3g} and {asked_std[worst]:.3g}"
    )
    causes = (
        "inputs are not normalised, or twice",
        "cast to whole numbers before scaling",
        "the constants belong to other data",
    )
    yield Finding(mean[worst].item(), room, because, causes)


def vector(value: Any, values: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64).expand(values.shape[1])


def drift(
    pipeline: Pipeline, train: dict, validation: dict, limit: float, ratios: list[float]
) -> Iterator[Finding]:
    """Mean and sd per channel, train against validation, at the same mix of classes."""
    weights, weights_ = matched(pipeline, train["y"], validation["y"])
    for part, left in probe.tensors(train["x"]).items():
        one, other = channels(left), channels(probe.tensors(validation["x"])[part])
        if one is None or len(one) < 2 or len(other) < 2:
            continue
        mean, std, error, log_error = moments(one, weights)
        mean_, std_, error_, log_error_ = moments(other, weights_)
        scale = std.clamp_min(1e-12)
        gap = (mean - mean_).abs() / scale
        room = torch.maximum(torch.full_like(gap, limit), 4 * (error**2 + error_**2).sqrt() / scale)
        ratio = (std_.clamp_min(1e-12) / scale).log()
        # A rare value may be missing on one side: no error is smaller than the other side's says.
        size, size_ = _size(weights), _size(weights_)
        largest = torch.maximum(log_error * math.sqrt(size), log_error_ * math.sqrt(size_))
        noise = 4 * largest * math.sqrt(1 / size + 1 / size_)
        wide = (ratio > noise.clamp_min(math.log(ratios[1]))) | (
            ratio < -noise.clamp_min(-math.log(ratios[0]))
        )
        wide &= ((std > 0) | (std_ > 0)) & (noise < 1)
        bad = (gap > room) | wide
        if bad.any():
            worst = int((gap / room + ratio.abs() * wide).argmax())
            because = (
                f"channel {worst} of {part} has mean {mean[worst].item():.3g} and sd "
                f"{std[worst].item():.3g} in training, {mean_[worst].item():.3g} and "
                f"{std_[worst].item():.3g} in validation"
            )
            yield Finding(gap[worst].item(), limit, because, DIFFERENT)


def largest_gap(pipeline: Pipeline, train: dict, validation: dict) -> float:
    """The largest difference of a channel's mean between the splits, in sd."""
    weights, weights_ = matched(pipeline, train["y"], validation["y"])
    gaps = [0.0]
    for part, left in probe.tensors(train["x"]).items():
        one, other = channels(left), channels(probe.tensors(validation["x"])[part])
        if one is not None:
            mean, std = moments(one, weights)[:2]
            far = (mean - moments(other, weights_)[0]).abs() / std.clamp_min(1e-12)
            gaps.append(far.max().item())
    return max(gaps)


def corrupted(pipeline: Pipeline, max_rows: int, limit: float) -> Iterator[Finding]:
    """Some rows of one split are of another kind (noise, blocks of zeros) although the averages
    agree: the distribution over rows of their mean, sd and roughness, at the same mix of classes
    (Kolmogorov-Smirnov distance above `limit` and 3 standard units). Stored rows: augmentation and
    samplers are out of it."""
    train, validation = (
        probe.few_rows(loader, max_rows) for loader in (pipeline.train, pipeline.validation)
    )
    weights, weights_ = matched(pipeline, train["y"], validation["y"])
    sizes = _size(weights), _size(weights_)
    certain = math.sqrt(sizes[0] * sizes[1] / (sizes[0] + sizes[1]))
    for part, left in probe.tensors(train["x"]).items():
        right = probe.tensors(validation["x"])[part]
        if not left.is_floating_point() or left[0].numel() < 8:
            continue
        pairs = zip(_row_statistics(left).items(), _row_statistics(right).values(), strict=True)
        for (name, one), other in pairs:
            far = _distance(one, other, weights, weights_)
            if far > limit and far * certain > 3:
                because = (
                    f"the {name} within a row of {part} is distributed differently in training and "
                    f"validation (distance {far:.2f} of 1)"
                )
                causes = ("rows of one split are corrupt, noisy or of another source", *DIFFERENT)
                yield Finding(far, limit, because, causes)
                return


def _row_statistics(values: torch.Tensor) -> dict[str, torch.Tensor]:
    flat = values.cpu().double().flatten(1)
    rough = values.cpu().double().reshape(len(values), -1, values.shape[-1]).diff(dim=2).abs()
    return {
        "mean": flat.mean(dim=1),
        "sd": flat.std(dim=1),
        "roughness": rough.flatten(1).mean(dim=1),
    }


def _distance(one: torch.Tensor, other: torch.Tensor, *weights: torch.Tensor) -> float:
    """Largest gap between two weighted cumulative distributions."""
    values = torch.cat([one, other])
    order = values.argsort()
    steps = torch.cat([weights[0], -weights[1]])[order].cumsum(0)
    last = torch.cat([values[order].diff() > 1e-9, torch.tensor([True])])  # ends of ties
    return steps[last].abs().max().item()


# ---- columns and rows without variation ---------------------------------------------------------


def constant(pipeline: Pipeline, seen: dict) -> Iterator[Finding]:
    """A channel that preprocessing saw vary and the stored rows do not; or one that the model gets
    without the variation it has in the same stored rows."""
    declares = getattr(pipeline.preprocessing, "std", None)
    x = seen["x"]
    if isinstance(x, dict) or declares is None or not x.is_floating_point():
        return
    std = torch.as_tensor(declares, dtype=torch.float64)
    declared = (std > 1e-6) & (std != 1)  # a scaler puts 1, or next to nothing, for no variation
    stored = probe.stored_at(pipeline.train, seen["id"])
    flat = _flat(x) & declared if stored is None else _flat(x) & ~_flat(stored["x"])
    if stored is not None:  # all rows: a sample may miss the only one that differs
        flat |= _flat(pipeline.train.rows["x"]) & declared
    if flat.any():
        because = f"{int(flat.sum())} of {len(flat)} channels never vary at the model's input"
        yield Finding(float(flat.sum()), 0.0, because, ("a channel is overwritten or lost",))


def _flat(x: torch.Tensor) -> torch.Tensor:
    """`(C,)`: channels (axis 1) of one value throughout."""
    values = x.reshape(len(x), x.shape[1] if x.ndim > 1 else 1, -1)
    return (values.amax(dim=(0, 2)) == values.amin(dim=(0, 2))).cpu()


def constant_columns(x: Any) -> int:
    """Columns without variation in rows of single values (not positions of a picture)."""
    columns = [channels(v) for v in probe.tensors(x).values() if v.ndim == 2]
    return sum(int((c.std(dim=0) == 0).sum()) for c in columns if c is not None and len(c) > 1)


def blank_rows(x: Any) -> float:
    """The share of rows whose values are all one value, where most rows vary; else 0."""
    share = 0.0
    for values in probe.tensors(x).values():
        flat = values.flatten(1)
        if flat.shape[1] >= 8 and flat.dtype != torch.bool:
            blank = (flat == flat[:, :1]).all(dim=1).double().mean().item()
            share = max(share, blank if blank < 0.5 else 0.0)
    return share
