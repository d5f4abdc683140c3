"""Clauses of `last_seam`: as many values at the model as in the record; ids that did not wrap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..loop import take
from . import Check, Finding, Pipeline, probe


def values_lost(pipeline: Pipeline, limit: float) -> Iterator[Finding]:
    """Whole numbers where the record has many more values (a cast before scaling), and negative ids
    where the record has none (a small integer type wrapped)."""
    for part, raw, x, back in _beside(pipeline):
        kept, had = len(np.unique(x)), len(np.unique(raw))
        whole = any(v is not None and (v == np.round(v)).all() for v in (x, back))
        if x.dtype.kind == "f" and whole and 2 < kept < limit * had:
            because = f"{part} holds {kept} distinct values, all whole, its records {had}"
            causes = ("cast to whole numbers before or after scaling",)
            yield Finding(kept / had, limit, because, causes)
        if x.dtype.kind == "i" and raw.dtype.kind in "iu" and x.min() < 0 <= raw.min():
            because = f"ids of {part} reach {x.min()}, those of its records {raw.min()}"
            causes = ("ids overflow a small integer type",)
            yield Finding(float(x.min()), 0.0, because, causes)


def fewer_values(pipeline: Pipeline, limit: float) -> Iterator[Check]:
    """A warning where the model gets far fewer distinct values than the record has: binning or
    clipping can be meant."""
    for part, raw, x, _ in _beside(pipeline):
        kept, had = len(np.unique(x)), len(np.unique(raw))
        if had >= 8 and kept < limit * had:
            because = f"{part} has {kept} distinct values where its records have {had}"
            causes = ("values are cast, clipped or binned on the way",)
            yield Check("last_seam", "warn", kept / had, limit, "of values", because, causes)


def _beside(pipeline: Pipeline) -> Iterator[tuple]:
    """(part, values of 32 records, the same rows at the loader, those decoded or None) as arrays,
    where a record is numbers of as many values as the row."""
    if pipeline.raw is None or not hasattr(pipeline.train, "rows"):
        return
    rows = probe.few_rows(pipeline.train, 32)
    raws = [pipeline.raw(int(row)) for row in rows["id"]]
    for part, x in probe.tensors(rows["x"]).items():
        own = [raw.get(part) if isinstance(raw, dict) else raw for raw in raws]
        arrays = [_numbers(raw) for raw in own]
        if any(a is None or a.size != x[0].numel() for a in arrays):
            continue
        raw = np.stack([a.ravel() for a in arrays])
        back = None if isinstance(rows["x"], dict) else _decoded(pipeline, rows)
        yield part, raw, x.detach().cpu().numpy(), back


def _numbers(raw: Any) -> np.ndarray | None:
    if isinstance(raw, torch.Tensor):
        raw = raw.detach().cpu().numpy()
    if not isinstance(raw, (np.ndarray, list, tuple)):
        return None
    array = np.asarray(raw)
    return array if array.dtype.kind in "uif" and array.size else None


def _decoded(pipeline: Pipeline, rows: dict) -> np.ndarray | None:
    decode = getattr(pipeline.preprocessing, "inverse", None)
    if decode is None:
        return None
    found = [np.asarray(decode(take(rows["x"], i)), np.float32) for i in range(len(rows["y"]))]
    return np.stack(found)
