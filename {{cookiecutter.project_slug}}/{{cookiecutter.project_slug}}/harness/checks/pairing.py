"""Clauses of `last_seam`: labels, records and inputs that still belong together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..loop import take
from . import Finding, Pipeline, probe


def labels_closed(pipeline: Pipeline) -> Iterator[Finding]:
    """Labels are whole and in range, every output owns one, none is new in validation."""
    task = pipeline.task
    if task.targets != "exclusive":
        return
    both = torch.cat([probe.labels(pipeline.train), probe.labels(pipeline.validation)])
    if both.is_floating_point() or both.min() < 0 or both.max() >= task.num_outputs:
        because = f"labels run from {both.min().item():g} to {both.max().item():g} as {both.dtype}"
        because += f", outputs from 0 to {task.num_outputs - 1}"
        causes = ("labels count from 1", "ids of another map", "labels were interpolated")
        yield Finding(float(both.max()), float(task.num_outputs - 1), because, causes)
        return
    known = set(probe.labels(pipeline.train).unique().tolist())
    unowned = sorted(set(range(task.num_outputs)) - known)
    new = sorted(set(probe.labels(pipeline.validation).unique().tolist()) - known)
    if unowned or new:
        names = ", ".join(str(task.class_names[c]) for c in (unowned or new)[:5])
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
        batch = probe.join(probe.batches_of(probe.rebatch(loader, augment=False), min_rows=256))
        ids = loader.rows["id"]
        if len(ids.unique()) < len(ids):
            continue
        order = ids.argsort()
        place = torch.searchsorted(ids[order], batch["id"]).clamp_max(len(ids) - 1)
        rows = probe.take_rows(loader.rows, order[place])
        wrong = (rows["id"] != batch["id"]) | _differs(rows["y"], batch["y"])
        for part, values in probe.tensors(rows["x"]).items():
            wrong |= _differs(values, probe.tensors(batch["x"])[part])
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


def _differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape != b.shape:
        return torch.ones(len(b), dtype=torch.bool, device=b.device)
    return (a != b).reshape(len(b), -1).any(dim=1)


def round_trip(pipeline: Pipeline, limit: float, correlation: float) -> Iterator[Finding]:
    """encode(decode(x)) is x; and the decoded picture is the record's, where both can be drawn."""
    encode, decode = pipeline.preprocessing, getattr(pipeline.preprocessing, "inverse", None)
    if decode is None:
        return
    rows = probe.few_rows(pipeline.train, 16)
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
