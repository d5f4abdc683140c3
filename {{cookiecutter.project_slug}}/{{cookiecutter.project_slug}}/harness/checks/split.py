"""Two splits: the same preparation for both, and nothing of one in the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..loop import Loader, take
from . import Check, Finding, Pipeline, inconclusive, not_applicable, probe, shut_if_any
from .copies import moved_copies, near_copies
from .epochs import unaugmented
from .overlap import SPOILED, conflicts, keys_apart, rows_in_both, stored


def split_hygiene(
    pipeline: Pipeline,
    *,
    max_rows: int = 2000,
    max_overlap: float = 0.0,
    max_conflicts: float = 0.05,
    max_near_excess: float = 0.1,
) -> Check:
    """Nothing of the validation split is known from training: no row is in both (equal, or equal up
    to rounding), no `pipeline.group` is, no `pipeline.time` of training lies after the first of
    validation. Inputs that occur twice with two labels warn above a fifth of `max_conflicts` of the
    training rows, and shut above it.

    Moved copies: the middle of a picture or series stands in a training row, up to two steps aside
    or mirrored (in a series: a quarter of its length aside), in 1 % of the rows and more. Near
    copies: per row, the distance to its nearest training row against that one's own nearest.
    Validation rows are below half as often as training rows are among themselves; a larger share
    warns (by 2 %, 4 standard units), and shuts above `max_near_excess` and 6. At most `max_rows`
    rows are compared so, floats only. What occurs in both because few inputs exist at all (short
    sequences, a handful of categories) warns. The same in fp32 and bf16.
    """
    name = "split_hygiene"
    train, validation = stored(pipeline.train), stored(pipeline.validation)
    if spoiled := train.num_spoiled() + validation.num_spoiled():
        return inconclusive(name, f"{spoiled} rows hold values that are not finite.", SPOILED)
    found = [
        *keys_apart(pipeline, train, validation),
        *rows_in_both(train, validation, max_overlap),
    ]
    found += conflicts(pipeline.task, train, max_conflicts)
    if not any(clause.shuts for clause in found):
        found += moved_copies(train, validation, max_rows)
    if not any(clause.shuts for clause in found):
        found += near_copies(train, validation, max_rows, max_near_excess)
    shut = [clause.finding for clause in found if clause.shuts]
    because = (
        f"None of {len(validation)} validation rows is among {len(train)} training rows"
        f"{_keys_in_words(pipeline)}."
    )
    good = Check(name, "open", 0.0, max_overlap, "of rows", because)
    if shut or not found:
        return shut_if_any(shut, good)
    first = found[0].finding
    because = "; ".join(clause.finding.because for clause in found) + "."
    causes = dict.fromkeys(cause for clause in found for cause in clause.finding.suspect)
    return Check(name, "warn", first.value, first.limit, "of rows", because, tuple(causes))


def _keys_in_words(pipeline: Pipeline) -> str:
    known = [key for key in ("group", "time") if getattr(pipeline, key) is not None]
    lacks = [key for key in ("group", "time") if getattr(pipeline, key) is None]
    text = f"; {' and '.join(known)} apart" if known else ""
    return text + (f"; no {' or '.join(lacks)} is given, so none is judged" if lacks else "")


# ---- the same preparation -----------------------------------------------------------------------


def split_parity(pipeline: Pipeline, *, max_difference: float = 0.0) -> Check:
    """The same raw records through the path of each split, randomness off, are equal: as prepared,
    and as the model gets them in a training step and in an evaluation. Exact in fp32 and bf16
    (inputs are made before autocast).
    """
    name = "split_parity"
    if pipeline.prepare is None:
        because = "There is no `prepare` that makes the tensors of given records for each split."
        return not_applicable(name, because + " Hand it over.")
    train, validation = pipeline.prepare("train"), pipeline.prepare("validation")
    again = pipeline.prepare("train")
    found = list(_compare(train, again, "prepared twice for training", max_difference))
    if not found:
        found = list(_compare(train, validation, "as prepared", max_difference))
    if not found:
        seen = _both(_fed(pipeline, train, "train"), _fed(pipeline, validation, "validation"))
        found = list(_compare(*seen, "as the model gets them", max_difference))
    because = f"{len(train['y'])} raw records give equal tensors on the train and validation path."
    return shut_if_any(found, Check(name, "open", 0.0, max_difference, "", because))


def _fed(pipeline: Pipeline, rows: dict, split: str) -> dict:
    """What the model gets of these rows, in the order of their ids (`id` counts from 0): all of
    them, or those that a sampler with replacement draws, once each."""
    model = pipeline.make_model(0)
    rows = {**rows, "id": torch.arange(len(rows["y"]))}
    rows = {key: _on(value, pipeline.device) for key, value in rows.items()}
    loader = getattr(pipeline, split)
    loader = probe.rebatch(unaugmented(loader), rows=rows, batch_size=len(rows["y"]))
    try:
        batches = probe.batches_of(loader, min_rows=len(rows["y"]))
    except (IndexError, RuntimeError):  # a sampler with a weight for each of its own rows
        batches = probe.batches_of(Loader(rows, len(rows["y"])), min_rows=1)
    ids = torch.cat([batch["id"] for batch in batches])
    order = torch.stack([(ids == row).nonzero()[0, 0] for row in ids.unique()])
    with probe.seam(model) as seen:
        if split == "train":
            for batch in batches:
                pipeline.train_step(model, pipeline.make_optimizer(model), batch)
        else:
            pipeline.evaluate(model, loader)
    x = probe.join([{"x": x} for x in seen.inputs])["x"]
    y = torch.cat([batch["y"] for batch in batches])
    return take({"x": x, "y": y, "id": ids}, order)


def _both(one: dict, other: dict) -> tuple[dict, dict]:
    """The rows that are on both sides."""
    common = [torch.isin(a["id"], b["id"]) for a, b in ((one, other), (other, one))]
    return take(one, common[0]), take(other, common[1])


def _on(value: Any, device: torch.device) -> Any:
    parts = {key: part.to(device) for key, part in probe.tensors(value).items()}
    return probe.like(value, parts)


def _compare(one: dict, other: dict, where: str, limit: float) -> Iterator[Finding]:
    """The largest difference of x and y."""
    pairs = [(key, one[key], other[key]) for key in ("x", "y")]
    for key, a, b in pairs:
        for part, left in probe.tensors(a).items():
            right = probe.tensors(b).get(part)
            label = part if key == "x" else "y"
            if right is None or left.shape != right.shape or left.dtype != right.dtype:
                because = f"{label} differs in shape or type {where}"
                yield Finding(None, limit, because, ("the splits are prepared differently",))
                return
            difference = (left.cpu().double() - right.cpu().double()).abs().max().item()
            if not difference <= limit:
                because = f"{label} differs by up to {difference:.3g} {where}"
                reordered = _signatures(left).allclose(_signatures(right))
                yield Finding(difference, limit, because, _causes(where, reordered))
                return


def _signatures(values: torch.Tensor) -> torch.Tensor:
    """One number per row, sorted: equal when the same rows stand in another order."""
    flat = values.cpu().double().reshape(len(values), -1)
    generator = torch.Generator().manual_seed(0)
    return (flat @ torch.randn(flat.shape[1], generator=generator).double()).sort().values


def _causes(where: str, reordered: bool) -> tuple[str, ...]:
    if reordered:
        return ("rows are reordered, their ids and labels are not",)
    if "twice" in where:
        return ("preparing draws random numbers: augmentation belongs to the loader",)
    if "gets" in where:
        return ("a loader, the step or the evaluation changes the inputs",)
    return (
        "one split is normalised, resized or encoded differently",
        "statistics are fitted on each split",
    )
