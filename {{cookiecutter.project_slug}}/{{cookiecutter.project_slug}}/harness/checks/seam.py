"""What the loaders hand to the model: the batch on the line above `model(x)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..loop import take
from . import Check, Finding, Pipeline, probe, shut_if_any, undisturbed
from .epochs import own
from .moments import (
    as_stored,
    blank_rows,
    constant,
    constant_columns,
    corrupted,
    declared,
    drift,
    largest_gap,
)
from .pairing import labels_closed, round_trip, rows_paired
from .values import fewer_values, values_lost

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
    max_row_distance: float = 0.25,
    min_values_share: float = 0.5,
    max_blank_share: float = 0.01,
) -> Check:
    """The inputs as the model gets them in the project's own step and evaluation.

    Finite, of one shape and type; per channel (axis 1) as preprocessing declares, mean 0 and sd 1
    after normalisation, within `max_declared_gap` (the train-validation limits where the loader
    augments) or 4 standard errors; train against validation within `max_mean_gap` sd and the ratio
    of sd, or 4 standard errors, at the same mix of classes; no constant channel; no rows of another
    kind in one split; as many distinct values as the record (`pipeline.raw`) where both have the
    same size; ids that the model has an entry for; targets whole and in range (0 to 1, finite),
    every output owns one, none is new in validation; rows keep their record and label; decoding and
    encoding again changes nothing. Inputs are float32 before autocast: the limits hold in fp32 and
    bf16. Not decided: a feature that is bimodal because two sources use two units.
    """
    name = "last_seam"
    found = list(labels_closed(pipeline)) or list(_raw_form(pipeline, max_rows))
    if found:  # the step or the evaluation would raise on these
        return shut_if_any(found, Check(name, "open", None, None, "", ""))
    try:
        train = _captured(pipeline, "train", max_rows)
        validation = _captured(pipeline, "validation", max_rows)
    except IndexError as error:
        found = list(_no_entry(pipeline, error))
        if not found:
            raise
        return shut_if_any(found, Check(name, "open", None, None, "", ""))
    found = list(_form(train["x"], validation["x"]))
    seen, train = train, as_stored(pipeline, train, max_rows)
    if not found:
        limits = [min_std_ratio, max_std_ratio]
        found = [
            *declared(pipeline, train, max_declared_gap, max_mean_gap, limits),
            *drift(pipeline, train, validation, max_mean_gap, limits),
            *constant(pipeline, seen),
            *values_lost(pipeline, min_values_share),
        ]
        found = found or list(corrupted(pipeline, max_rows, max_row_distance))
    found += [
        *rows_paired(pipeline),
        *round_trip(pipeline, max_round_trip_gap, min_picture_correlation),
    ]
    gap = largest_gap(pipeline, train, validation) if not found else None
    because = (
        f"The model gets {_in_words(train['x'])}; train and validation differ by {gap or 0:.2g} sd."
    )
    figure = FIGURE if hasattr(pipeline.task, "draw") else None
    good = Check(name, "open", gap, max_mean_gap, "sd", because, (), figure)
    checked = shut_if_any(found, good)
    doubts = [*_doubts(train["x"], max_blank_share), *fewer_values(pipeline, min_values_share)]
    return _warned(checked, doubts) if checked.verdict == "open" else checked


def seam_batch(pipeline: Pipeline, *, num_rows: int = 12) -> dict[str, dict]:
    """The first rows of each split as the model gets them: {"train": {"x", "y", "id"}, ...}, for a
    contact sheet. Leaves every generator and loader as it was."""
    with undisturbed(pipeline):
        return {split: _captured(pipeline, split, num_rows) for split in ("train", "validation")}


def _captured(pipeline: Pipeline, split: str, max_rows: int) -> dict:
    """x as `model(x)` got it in real steps or a real evaluation, with the y and id beside it."""
    loader, model = own(getattr(pipeline, split)), pipeline.make_model(0)
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
    return take(rows, torch.arange(min(max_rows, len(rows["y"])), device=rows["y"].device))


# ---- form ---------------------------------------------------------------------------------------


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
        probe.join(probe.batches_of(probe.few(own(loader), max_rows), min_rows=max_rows))
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
        if values.shape[0] > 1 and (values == values[:1]).all():
            because = f"{part} is the same in every row"
            causes = ("inputs are blanked", "the loader repeats one record")
            yield Finding(0.0, None, because, causes)
            return


def _no_entry(pipeline: Pipeline, error: IndexError) -> Iterator[Finding]:
    """The forward pass found no entry for an id: say which ids there are and what the model has."""
    model = pipeline.make_model(0)
    tables = [m.num_embeddings for m in model.modules() if hasattr(m, "num_embeddings")]
    sides = [probe.few_rows(loader, 1024)["x"] for loader in (pipeline.train, pipeline.validation)]
    for part, values in probe.tensors(sides[0]).items():
        if not tables or values.is_floating_point() or values.dtype == torch.bool:
            continue
        both = torch.cat([values.flatten(), probe.tensors(sides[1])[part].flatten()])
        low, high = both.min().item(), both.max().item()
        if low < 0 or high >= max(tables):
            because = f"ids of {part} run from {low} to {high}, the model has {max(tables)} entries"
            causes = (
                "another vocabulary, or special tokens added after the model was built",
                "ids overflow a small integer type",
            )
            yield Finding(float(high), float(max(tables) - 1), because, causes)


# ---- what a person should look at ---------------------------------------------------------------


def _doubts(x: Any, max_blank_share: float) -> Iterator[Check]:
    name = "last_seam"
    columns, blank = constant_columns(x), blank_rows(x)
    if columns:
        causes = ("a column that carries nothing", "a column overwritten by its mean")
        because = f"{columns} columns never vary"
        yield Check(name, "warn", float(columns), 0.0, "columns", because, causes)
    if blank > max_blank_share:
        because = f"{blank:.1%} of the rows hold one value throughout"
        causes = ("empty records kept as examples", "files that could not be read")
        yield Check(name, "warn", blank, max_blank_share, "of rows", because, causes)


def _warned(good: Check, doubts: list[Check]) -> Check:
    """`good` with what a person should look at; itself when there is nothing."""
    if not doubts:
        return good
    because = "; ".join([good.because.rstrip("."), *(doubt.because for doubt in doubts)]) + "."
    first = doubts[0]
    suspects = dict.fromkeys(cause for doubt in doubts for cause in doubt.suspect)
    return Check(
        *(good.name, "warn", first.value, first.limit, first.unit, because),
        tuple(suspects),
        good.figure,
    )
