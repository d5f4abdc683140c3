"""Clauses of `last_seam`: labels, records and inputs that still belong together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..loop import take
from . import Finding, Pipeline, layout, probe
from .epochs import unaugmented


def labels_closed(pipeline: Pipeline) -> Iterator[Finding]:
    """Targets are what the task declares: class ids whole and in range (`ignore_index` aside),
    labels between 0 and 1, numbers finite; they are not all the same; every output owns one, and
    none is new in validation."""
    kind = getattr(pipeline.task, "targets", None)
    sides = [_supervised(pipeline, probe.labels(s)) for s in (pipeline.train, pipeline.validation)]
    if not all(len(side) for side in sides):
        return
    both = torch.cat(sides)
    found = list(_legal(pipeline.task, kind, both))
    found = found or list(_all_the_same(kind, sides[0]))
    if not found and kind in ("exclusive", "dense"):
        found = list(_owned(pipeline.task, *sides))
    yield from found


def _supervised(pipeline: Pipeline, y: torch.Tensor) -> torch.Tensor:
    """The targets that count, `(N,)` for class ids."""
    y = y.detach().cpu()
    if pipeline.task.targets not in layout.CLASSES:
        return y
    return y[layout.supervised(pipeline.task, y)]


def _legal(task: Any, kind: str, y: torch.Tensor) -> Iterator[Finding]:
    if kind == "multilabel" and not (
        torch.isfinite(y.float()).all() and 0 <= y.min() <= y.max() <= 1
    ):
        because = f"labels run from {y.min().item():g} to {y.max().item():g} instead of 0 to 1"
        causes = ("labels are coded -1 and 1, or as percent", "gaps in the labels")
        yield Finding(float(y.max()), 1.0, because, causes)
    if kind == "real" and not torch.isfinite(y.double()).all():
        count = int((~torch.isfinite(y.double())).sum())
        causes = ("gaps in the targets", "a logarithm of zero", "a constant target divided by sd 0")
        yield Finding(float(count), 0.0, f"{count} targets are not finite", causes)
    if kind not in layout.CLASSES:
        return
    outputs = getattr(task, "num_outputs", None)
    above = outputs is not None and y.max() >= outputs
    if y.is_floating_point() or y.min() < 0 or above:
        because = f"labels run from {y.min().item():g} to {y.max().item():g} as {y.dtype}"
        because += "" if outputs is None else f", outputs from 0 to {outputs - 1}"
        causes = ("labels count from 1", "ids of another map", "labels were interpolated")
        if y.min() == -100:
            causes = ("ignored targets: declare ignore_index in the task", *causes)
        limit = None if outputs is None else float(outputs - 1)
        yield Finding(float(y.max()), limit, because, causes)


def _all_the_same(kind: str, y: torch.Tensor) -> Iterator[Finding]:
    if kind in ("multilabel", "real", "tokens") and len(y) > 1 and (y == y[:1]).all():
        causes = ("targets are blanked", "the wrong column is read as the target")
        yield Finding(0.0, None, f"all {len(y)} training targets are the same", causes)


def _owned(task: Any, train: torch.Tensor, validation: torch.Tensor) -> Iterator[Finding]:
    known = set(train.unique().tolist())
    unowned = sorted(set(range(getattr(task, "num_outputs", 0))) - known)
    new = sorted(set(validation.unique().tolist()) - known)
    if unowned or new:
        every = getattr(task, "class_names", None) or [*range(task.num_outputs)]
        names = ", ".join(str(every[c]) for c in (unowned or new)[:5])
        because = f"{len(unowned)} of {task.num_outputs} classes have no training row ({names})"
        because += f" and {len(new)} of them occur in validation" if new else ""
        causes = ("labels count from 1", "an empty class folder", "a class lost in the split")
        yield Finding(float(len(unowned)), 0.0, because, causes)


def rows_paired(pipeline: Pipeline) -> Iterator[Finding]:
    """Each row of a batch still has the label and the input of its record."""
    for split in ("train", "validation"):
        loader = getattr(pipeline, split)
        if not hasattr(loader, "rows"):
            continue
        batch = probe.join(probe.batches_of(unaugmented(loader), min_rows=256))
        rows = probe.stored_at(loader, batch["id"])
        if rows is None:
            continue
        wrong = (rows["id"] != batch["id"]) | probe.rows_differ(rows["y"], batch["y"])
        for part, values in probe.tensors(rows["x"]).items():
            wrong |= probe.rows_differ(values, probe.tensors(batch["x"])[part])
        if wrong.any():
            because = (
                f"{int(wrong.sum())} of {len(wrong)} rows of {split} batches do not carry the "
            )
            causes = ("batches reorder inputs but not labels", "the loader changes its rows")
            yield Finding(
                wrong.double().mean().item(),
                0.0,
                because + "input and label of their record",
                causes,
            )


def round_trip(pipeline: Pipeline, limit: float, correlation: float) -> Iterator[Finding]:
    """encode(decode(x)) is x; and the decoded picture is the record's, where both can be drawn."""
    encode, decode = pipeline.preprocessing, getattr(pipeline.preprocessing, "inverse", None)
    if decode is None:
        return
    rows = probe.few_rows(pipeline.train, 16)
    if isinstance(rows["x"], dict):  # several parts: nobody has said which one is decoded
        return
    raws = [decode(take(rows["x"], torch.tensor(i))) for i in range(len(rows["y"]))]
    gaps = [
        (encode(raw).to(x.device, x.dtype) - x).abs().max().item()
        for raw, x in zip(raws, rows["x"], strict=True)
    ]
    if not max(gaps) <= limit:
        because = f"decoding and encoding a row again changes it by up to {max(gaps):.3g}"
        causes = ("another order of axes or operations", "an inverse that does not match")
        yield Finding(max(gaps), limit, because, causes)
        return
    found = [
        _correlation(pipeline.task.draw(raw), pipeline.draw(int(row)))
        for raw, row in zip(raws, rows["id"], strict=True)
        if pipeline.draw is not None and hasattr(pipeline.task, "draw")
    ]
    known = [value for value in found if value is not None]
    if known and np.median(known) < correlation:
        because = (
            f"decoded inputs resemble their record with a correlation of {np.median(known):.2g}"
        )
        causes = ("axes are mixed by a reshape", "inputs belong to other records")
        yield Finding(float(np.median(known)), correlation, because, causes)


def _correlation(one: Any, other: Any) -> float | None:
    """None where the two cannot be laid over each other (resized, constant)."""
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if a.shape != b.shape or a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])
