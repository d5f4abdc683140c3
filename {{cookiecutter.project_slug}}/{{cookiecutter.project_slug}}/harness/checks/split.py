"""One raw record, two paths: training and validation must make the same tensor of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import Check, Finding, Pipeline, not_applicable, probe, shut_if_any


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
        seen = _fed(pipeline, train, "train"), _fed(pipeline, validation, "validation")
        found = list(_compare(*seen, "as the model gets them", max_difference))
    because = f"{len(train['y'])} raw records give equal tensors on the train and validation path."
    return shut_if_any(found, Check(name, "open", 0.0, max_difference, "", because))


def _fed(pipeline: Pipeline, rows: dict, split: str) -> dict:
    """What the model gets of these rows, in the order of their ids."""
    model = pipeline.make_model(0)
    rows = {**rows, "id": torch.arange(len(rows["y"]))}
    rows = {key: _on(value, pipeline.device) for key, value in rows.items()}
    loader = getattr(pipeline, split)
    loader = probe.rebatch(loader, rows=rows, batch_size=len(rows["y"]), augment=False)
    batches = probe.batches_of(loader, min_rows=len(rows["y"]))
    order = torch.cat([batch["id"] for batch in batches]).argsort()
    with probe.seam(model) as seen:
        if split == "train":
            for batch in batches:
                pipeline.train_step(model, pipeline.make_optimizer(model), batch)
        else:
            pipeline.evaluate(model, loader)
    x = probe.join([{"x": x} for x in seen.inputs])["x"]
    y = torch.cat([batch["y"] for batch in batches])
    return probe.take_rows({"x": x, "y": y}, order)


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
