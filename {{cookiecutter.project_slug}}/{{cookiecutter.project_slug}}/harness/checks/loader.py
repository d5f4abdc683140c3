"""What the loaders hand to the model: the batch on the line above `model(x)`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from . import Check, Finding, Pipeline, probe, shut_if_any, undisturbed
from .pairing import labels_closed, round_trip, rows_paired

FIGURE = "last_seam.png"


def last_seam(
    pipeline: Pipeline,
    *,
    max_rows: int = 1024,
    max_mean_gap: float = 0.2,
    min_std_ratio: float = 0.8,
    max_std_ratio: float = 1.25,
    max_declared_gap: float = 0.1,
    max_round_trip_gap: float = 1e-3,
    min_picture_correlation: float = 0.8,
) -> Check:
    """The inputs as the model gets them in the project's own step and evaluation.

    Finite, of one shape and type; per channel (axis 1) as preprocessing declares, mean 0 and sd 1
    after normalisation, within `max_declared_gap` (the train-validation limits where the loader
    augments) or 4 standard errors; train against validation within `max_mean_gap` sd and the ratio
    of sd, or 4 standard errors; no constant channel; labels are whole, in range, every output owns
    one, none is new in validation; rows keep their record and label; decoding and encoding again
    changes nothing. Inputs are float32 before autocast: the limits hold in fp32 and bf16.
    """
    name = "last_seam"
    found = list(labels_closed(pipeline)) or list(_raw_form(pipeline, max_rows))
    if found:  # the step or the evaluation would raise on these
        return shut_if_any(found, Check(name, "open", None, None, "", ""))
    train = _captured(pipeline, "train", max_rows)
    validation = _captured(pipeline, "validation", max_rows)
    found = list(_form(train["x"], validation["x"]))
    if not found:
        limits = [min_std_ratio, max_std_ratio]
        found = [
            *_declared(pipeline, train["x"], max_declared_gap, max_mean_gap, limits),
            *_drift(train["x"], validation["x"], max_mean_gap, limits),
            *_constant(pipeline, train["x"]),
        ]
    found += [
        *rows_paired(pipeline),
        *round_trip(pipeline, max_round_trip_gap, min_picture_correlation),
    ]
    gap = _largest_gap(train["x"], validation["x"]) if not found else None
    because = (
        f"The model gets {_in_words(train['x'])}; train and validation differ by {gap or 0:.2g} sd."
    )
    figure = FIGURE if hasattr(pipeline.task, "draw") else None
    good = Check(name, "open", gap, max_mean_gap, "sd", because, (), figure)
    checked = shut_if_any(found, good)
    columns = _constant_columns(train["x"]) if checked.verdict == "open" else 0
    if columns:
        because = f"{because[:-1]}; {columns} columns never vary."
        causes = ("a column that carries nothing", "a column overwritten by its mean")
        return Check(name, "warn", float(columns), 0.0, "columns", because, causes, figure)
    return checked


def seam_batch(pipeline: Pipeline, *, num_rows: int = 12) -> dict[str, dict]:
    """The first rows of each split as the model gets them: {"train": {"x", "y", "id"}, ...}, for a
    contact sheet. Leaves every generator and loader as it was."""
    with undisturbed(pipeline):
        return {split: _captured(pipeline, split, num_rows) for split in ("train", "validation")}


def _captured(pipeline: Pipeline, split: str, max_rows: int) -> dict:
    """x as `model(x)` got it in real steps or a real evaluation, with the y and id beside it."""
    loader, model = getattr(pipeline, split), pipeline.make_model(0)
    if split == "validation":
        loader = probe.few(loader, max_rows)
    batches = probe.batches_of(loader, min_rows=max_rows)
    optimizer = pipeline.make_optimizer(model)
    with probe.seam(model) as seen:
        if split == "train":
            for batch in batches:
                pipeline.train_step(model, optimizer, batch)
        else:
            pipeline.evaluate(model, loader)
    x = probe.join([{"x": x} for x in seen.inputs])["x"]
    rows = {**probe.join([{"y": b["y"], "id": b["id"]} for b in batches]), "x": x}
    return probe.take_rows(
        rows, torch.arange(min(max_rows, len(rows["y"])), device=rows["y"].device)
    )


# ---- form and statistics ------------------------------------------------------------------------


def _in_words(x: Any) -> str:
    words = []
    for part, values in probe.tensors(x).items():
        sample = values[:256].flatten()[:65536]
        kind = str(values.dtype).removeprefix("torch.")
        shape = "x".join(map(str, values.shape[1:])) or "1"
        low, high = values.min().item(), values.max().item()
        words.append(
            f"{part} {shape} {kind} from {low:.3g} to {high:.3g} ({len(sample.unique())} distinct "
            "values)"
        )
    return ", ".join(words)


def _raw_form(pipeline: Pipeline, max_rows: int) -> Iterator[Finding]:
    """The same of the batches, before any model has seen them."""
    sides = [
        probe.join(probe.batches_of(probe.few(loader, max_rows), min_rows=max_rows))
        for loader in (pipeline.train, pipeline.validation)
    ]
    yield from _form(sides[0]["x"], sides[1]["x"])


def _form(train: Any, validation: Any) -> Iterator[Finding]:
    left, right = probe.tensors(train), probe.tensors(validation)
    for part, values in left.items():
        other = right.get(part)
        if other is None or values.shape[1:] != other.shape[1:] or values.dtype != other.dtype:
            shape = None if other is None else (tuple(other.shape[1:]), other.dtype)
            because = f"{part} is {tuple(values.shape[1:])} {values.dtype} in training and {shape} "
            yield Finding(None, None, because + "in validation", ("splits prepared differently",))
            return
        if values.is_complex() or values.dtype == torch.bool:
            continue
        broken = sum(int((~torch.isfinite(v.float())).sum()) for v in (values, other))
        if broken:
            because = f"{broken} values of {part} are not finite"
            causes = ("gaps in the data", "a constant column divided by its sd of zero")
            yield Finding(float(broken), 0.0, because, causes)
            return
        if values.shape[0] > 1 and len(values.flatten(1).unique(dim=0)) == 1:
            because = f"{part} is the same in every row"
            causes = ("inputs are blanked", "the loader repeats one record")
            yield Finding(0.0, None, because, causes)
            return


def _channels(values: torch.Tensor) -> torch.Tensor | None:
    """`(N, C, K)`: K values per row and channel (axis 1); None for what is no measurement."""
    if not values.is_floating_point():
        return None
    values = values.cpu().double()  # not every device has float64
    return values.reshape(len(values), values.shape[1] if values.ndim > 1 else 1, -1)


def _moments(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Per channel: mean, sd, standard error of the mean, standard error of log sd. Rows are the
    unit of sampling: the values of one row belong together."""
    rows = math.sqrt(len(values))
    by_row = values.mean(dim=2)
    mean = by_row.mean(dim=0)
    square = ((values - mean[:, None]) ** 2).mean(dim=2)
    variance = square.mean(dim=0)
    safe = variance.clamp_min(1e-30)
    return mean, variance.sqrt(), by_row.std(dim=0) / rows, 0.5 * square.std(dim=0) / rows / safe


def _declared(
    pipeline: Pipeline, x: Any, limit: float, wide_mean: float, wide_std: list[float]
) -> Iterator[Finding]:
    """Normalised values have mean 0 and sd 1 in training (or what `expected_mean`, `expected_std`
    of preprocessing say, for constants that were not fitted on this data)."""
    declares = pipeline.preprocessing
    values = None if isinstance(x, dict) else _channels(x)
    if values is None or getattr(declares, "std", None) is None:
        return
    wide = getattr(pipeline.train, "augment", None) is not None
    room = wide_mean if wide else limit
    low, high = wide_std if wide else (1 - limit, 1 + limit)
    asked_mean = _vector(getattr(declares, "expected_mean", 0.0), values)
    asked_std = _vector(getattr(declares, "expected_std", 1.0), values)
    mean, std, error, log_error = (part.cpu() for part in _moments(values))
    off = (mean - asked_mean).abs() - torch.maximum(room * asked_std, 4 * error)
    ratio = (std / asked_std).clamp_min(1e-30).log()
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


def _vector(value: Any, values: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64).expand(values.shape[1])


def _drift(train: Any, validation: Any, limit: float, ratios: list[float]) -> Iterator[Finding]:
    for part, left in probe.tensors(train).items():
        one, other = _channels(left), _channels(probe.tensors(validation)[part])
        if one is None or len(one) < 2 or len(other) < 2:
            continue
        mean, std, error, log_error = _moments(one)
        mean_, std_, error_, log_error_ = _moments(other)
        scale = std.clamp_min(1e-12)
        gap = (mean - mean_).abs() / scale
        room = torch.maximum(torch.full_like(gap, limit), 4 * (error**2 + error_**2).sqrt() / scale)
        ratio = (std_.clamp_min(1e-12) / scale).log()
        # A rare value may be missing on one side: no error is smaller than the other side's says.
        size, size_ = math.sqrt(len(one)), math.sqrt(len(other))
        largest = torch.maximum(log_error * size, log_error_ * size_)
        noise = 4 * largest * math.sqrt(1 / len(one) + 1 / len(other))
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
            causes = (
                "validation is normalised or scaled differently",
                "the splits come from different sources",
                "augmentation changes the range",
            )
            yield Finding(gap[worst].item(), limit, because, causes)


def _largest_gap(train: Any, validation: Any) -> float:
    gaps = [0.0]
    for part, left in probe.tensors(train).items():
        one, other = _channels(left), _channels(probe.tensors(validation)[part])
        if one is not None:
            mean, std = _moments(one)[:2]
            gaps.append(((mean - _moments(other)[0]).abs() / std.clamp_min(1e-12)).max().item())
    return max(gaps)


def _constant(pipeline: Pipeline, x: Any) -> Iterator[Finding]:
    """A channel that preprocessing saw vary and the model does not."""
    declares = getattr(pipeline.preprocessing, "std", None)
    values = None if isinstance(x, dict) or declares is None else _channels(x)
    if values is None:
        return
    flat = (values.amax(dim=(0, 2)) == values.amin(dim=(0, 2))).cpu()
    lost = flat & (_vector(declares, values) > 0)
    if lost.any():
        because = f"{int(lost.sum())} of {len(lost)} channels never vary at the model's input"
        yield Finding(float(lost.sum()), 0.0, because, ("a channel is overwritten or lost",))


def _constant_columns(x: Any) -> int:
    """Columns without variation in rows of single values (not positions of a picture)."""
    columns = [_channels(v) for v in probe.tensors(x).values() if v.ndim == 2]
    return sum(int((c.std(dim=0) == 0).sum()) for c in columns if c is not None and len(c) > 1)
