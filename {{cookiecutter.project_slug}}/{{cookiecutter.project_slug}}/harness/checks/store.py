"""Clauses of `record_store`: what is stored is the same after reading as before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from . import Finding, Pipeline, probe
from .epochs import batches, own

WRITES = ("normalisation or augmentation writes into the stored array (an in-place operation)",)


def rows_kept(side: Any, split: str) -> Iterator[Finding]:
    """The rows a loader keeps are the same bytes after an epoch. Reads a copy with its own rows."""
    if not hasattr(side, "rows"):
        return
    read = own(side)
    for _ in batches(read):
        pass
    for name, before in side.rows.items():
        after = probe.tensors(read.rows[name])
        for part, values in probe.tensors(before).items():
            changed = _changed(values, after[part])
            if changed:
                label = name if part == "x" else f"{name}.{part}"
                because = (
                    f"an epoch changes {changed} of {len(values)} stored {split} rows of {label}: "
                    f"{_drift(values, after[part])}"
                )
                yield Finding(float(changed), 0.0, because, WRITES)
                return


def as_recorded(pipeline: Pipeline, limit: float, num_rows: int = 64) -> Iterator[Finding]:
    """Stored rows come of the records they name, by the project's own preprocessing. What is done
    to all rows besides (a scale, a clip) is no matter; other records, mixed axes or rows that lost
    their content are."""
    if pipeline.raw is None or not callable(pipeline.preprocessing):
        return
    for split in ("train", "validation"):
        if not hasattr(getattr(pipeline, split), "rows"):
            continue
        rows = probe.few_rows(getattr(pipeline, split), num_rows)
        made = _made(pipeline, rows)
        if made is None:
            return
        x = rows["x"].detach().cpu().double().reshape(len(made), -1)
        exact = (x - made).abs().amax(dim=1) <= 1e-4
        if exact.all() or not (x - x[0]).any():  # of equal rows `last_seam` tells
            continue
        likeness = _likeness(x, made)
        if exact.any():  # some rows go another way
            odd = ~exact & (likeness < limit)
            if odd.double().mean() >= 0.05:
                because = (
                    f"{int(odd.sum())} of {len(odd)} {split} rows are not what preprocessing makes "
                    "of their record, others are"
                )
                causes = ("some rows are overwritten, blank or of another record",)
                yield Finding(odd.double().mean().item(), 0.05, because, causes)
                return
        elif likeness.median() < limit:
            because = (
                f"{split} rows resemble what preprocessing makes of their record with a "
                f"correlation of {likeness.median():.2g}"
            )
            causes = (
                "row numbers name other records",
                "inputs are reordered, or their axes mixed by a reshape",
            )
            yield Finding(likeness.median().item(), limit, because, causes)
            return


def _made(pipeline: Pipeline, rows: dict) -> torch.Tensor | None:
    """`(N, D)`: the records of these rows, encoded; None where that has another size."""
    if isinstance(rows["x"], dict) or not rows["x"].is_floating_point():
        return None
    try:
        made = [pipeline.preprocessing(copy.deepcopy(pipeline.raw(int(row)))) for row in rows["id"]]
        made = torch.stack([torch.as_tensor(value).double().flatten() for value in made])
    except Exception:  # an encoding of whole splits, or ids of rows that no record has
        return None
    return made if made[0].numel() == rows["x"][0].numel() and len(made) > 7 else None


def _likeness(x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """`(N,)`: correlation of each pair of rows, each less the average row of its side."""
    a, b = x - x.mean(dim=0), made - made.mean(dim=0)
    scale = a.norm(dim=1) * b.norm(dim=1)
    found = (a * b).sum(dim=1) / scale.clamp_min(1e-12)
    return found.where(b.norm(dim=1) > 1e-9, torch.ones(()).double())


def _changed(a: torch.Tensor, b: torch.Tensor) -> int:
    if a.shape != b.shape or a.dtype != b.dtype:
        return len(a)
    return int(probe.rows_differ(a, b).sum())


def raw_kept(pipeline: Pipeline, max_rows: int) -> Iterator[Finding]:
    """The same records, read again: at once, after preparing, after an epoch of each loader."""
    if pipeline.raw is None:
        return
    ids = _some_ids(pipeline.train, max_rows)
    first = [pipeline.raw(row) for row in ids]
    kept = [copy.deepcopy(record) for record in first]
    try:
        for when, act in _readings(pipeline):
            act()
            again = [pipeline.raw(row) for row in ids]
            wrong = [i for i, (a, b) in enumerate(zip(kept, again, strict=True)) if not same(a, b)]
            if wrong:
                drift = _drift(kept[wrong[0]], again[wrong[0]])
                because = f"{len(wrong)} of {len(ids)} records read differently {when}: {drift}"
                causes = ("reading draws random numbers",) if when == "a second time" else ()
                yield Finding(float(len(wrong)), 0.0, because, (*WRITES, *causes))
                return
    finally:
        for record, original in zip(first, kept, strict=True):
            _restore(record, original)


def _readings(pipeline: Pipeline) -> Iterator[tuple]:
    yield "a second time", lambda: None
    if pipeline.prepare is not None:
        yield (
            "after they were prepared",
            lambda: [pipeline.prepare(s) for s in ("train", "validation")],
        )
    sides = pipeline.train, pipeline.validation
    yield "after an epoch", lambda: [list(batches(own(side))) for side in sides]


def _some_ids(side: Any, max_rows: int) -> list[int]:
    """The first rows (those that `prepare` takes) and half as many spread over all."""
    if not hasattr(side, "rows"):
        return probe.few_rows(side, max_rows)["id"][:max_rows].tolist()
    ids = side.rows["id"]
    first, rest = ids[:max_rows].tolist(), probe.few_rows(side, max_rows // 2)["id"].tolist()
    return list(dict.fromkeys([*first, *rest]))


def same(a: Any, b: Any) -> bool:
    """Equal in content, whatever a record is made of."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and not _changed(a[None], b[None])
    if isinstance(a, np.ndarray):
        real = a.dtype.kind in "fc"
        return np.array_equal(a, b, equal_nan=real)
    if isinstance(a, (str, bytes, int, float, type(None))):
        return a == b or (a != a and b != b)
    return True  # an object of its own kind: nothing is known about equality


def _restore(record: Any, original: Any) -> None:
    """Write the first content back into arrays that reading changed."""
    if isinstance(record, dict):
        for key, value in original.items():
            _restore(record[key], value)
    elif isinstance(record, (list, tuple)):
        for part, value in zip(record, original, strict=False):
            _restore(part, value)
    elif isinstance(record, np.ndarray) and record.flags.writeable and not same(record, original):
        record[...] = original
    elif isinstance(record, torch.Tensor) and not same(record, original):
        record.copy_(original)


def prepared_alike(pipeline: Pipeline) -> Iterator[Finding]:
    """Preparing again leaves mean and sd where they were. (Draws of random numbers, which do, are
    for `split_parity`.)"""
    if pipeline.prepare is None:
        return
    one, two = pipeline.prepare("train"), pipeline.prepare("train")
    for part, left in probe.tensors(one["x"]).items():
        right = probe.tensors(two["x"])[part]
        if not left.is_floating_point() or left.shape != right.shape or torch.equal(left, right):
            continue
        scale = left.double().std().clamp_min(1e-12)
        gap = (left.double().mean() - right.double().mean()).abs() / scale
        ratio = (right.double().std() / scale).clamp_min(1e-12).log().abs()
        if max(gap, ratio) > 0.02:
            because = f"the same records prepared again: {part} {_drift(left, right)}"
            yield Finding(max(gap, ratio).item(), 0.02, because, WRITES)
            return


def _drift(before: Any, after: Any) -> str:
    """What happened to the numbers, in words."""
    pair = [_numbers(value) for value in (before, after)]
    if any(values is None for values in pair):
        return "another content"
    (mean, std), (mean_, std_) = [(v.mean(), v.std()) for v in pair]
    return f"mean {mean:.3g} and sd {std:.3g} before, {mean_:.3g} and {std_:.3g} after"


def _numbers(value: Any) -> np.ndarray | None:
    if isinstance(value, dict):
        found = [_numbers(part) for part in value.values()]
        found = [part.ravel() for part in found if part is not None]
        return np.concatenate(found) if found else None
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().double().numpy()
    array = np.asarray(value) if isinstance(value, (np.ndarray, float, int)) else None
    return None if array is None or array.dtype.kind not in "uif" else array.astype(np.float64)
