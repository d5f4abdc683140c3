"""Faults of records, loaders, splits and preprocessing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..checks import Pipeline, probe
from ..loop import take
from .plant import (
    NotPlantable,
    each,
    first_batch,
    measured,
    needs,
    needs_measurements,
    needs_targets,
    with_batches,
    with_rows,
)

# ---- labels -------------------------------------------------------------------------------------


def labels_rolled(pipeline: Pipeline) -> Pipeline:
    """In training batches each input stands beside its neighbour's label."""

    def roll(loader: Any, batches: Iterator[dict]) -> Iterator[dict]:
        return ({**batch, "y": batch["y"].roll(1, 0)} for batch in batches)

    return replace(pipeline, train=with_batches(pipeline.train, roll))


def labels_permuted(pipeline: Pipeline) -> Pipeline:
    """Once, for all training rows."""
    needs_targets(pipeline, "exclusive", "multilabel", "real", "dense")
    return replace(pipeline, train=with_rows(pipeline.train, _permuted))


def labels_permuted_in_validation(pipeline: Pipeline) -> Pipeline:
    return replace(pipeline, validation=with_rows(pipeline.validation, _permuted))


def _permuted(rows: dict) -> dict:
    order = torch.randperm(len(rows["y"]), generator=torch.Generator().manual_seed(1))
    return {**rows, "y": rows["y"][order.to(rows["y"].device)]}


def classes_swapped_in_validation(pipeline: Pipeline) -> Pipeline:
    """The two most frequent classes have each other's number there: another class map."""
    needs_targets(pipeline, "exclusive")
    needs(pipeline.task.num_outputs > 2, "third class")

    def swap(rows: dict) -> dict:
        first, second = rows["y"].bincount().topk(2).indices
        other = torch.where(rows["y"] == first, second, rows["y"])
        return {**rows, "y": torch.where(rows["y"] == second, first, other)}

    return replace(pipeline, validation=with_rows(pipeline.validation, swap))


def labels_count_from_one(pipeline: Pipeline) -> Pipeline:
    needs_targets(pipeline, "exclusive")
    return _both(pipeline, lambda rows: {**rows, "y": rows["y"] + 1})


def _both(pipeline: Pipeline, change: Any) -> Pipeline:
    train, validation = pipeline.train, pipeline.validation
    return replace(
        pipeline, train=with_rows(train, change), validation=with_rows(validation, change)
    )


def targets_not_shifted(pipeline: Pipeline) -> Pipeline:
    """Each token is asked for itself instead of the next one."""
    needs_targets(pipeline, "tokens")
    skip = getattr(pipeline.task, "ignore_index", None)

    def shift(rows: dict) -> dict:
        y = next(x for x in probe.tensors(rows["x"]).values() if x.shape == rows["y"].shape)
        kept = y if skip is None else torch.where(rows["y"] == skip, rows["y"], y)
        return {**rows, "y": kept}

    return _both(pipeline, shift)


def most_targets_ignored(pipeline: Pipeline) -> Pipeline:
    skip = needs(getattr(pipeline.task, "ignore_index", None), "`ignore_index` in the task")

    def ignore(rows: dict) -> dict:
        y = rows["y"].clone()
        y[1:] = skip
        return {**rows, "y": y}

    return replace(pipeline, train=with_rows(pipeline.train, ignore))


# ---- inputs -------------------------------------------------------------------------------------


def inputs_blanked(pipeline: Pipeline) -> Pipeline:
    return _both(
        pipeline,
        lambda rows: {**rows, "x": each(rows["x"], torch.zeros_like)},
    )


def one_label_leaked(pipeline: Pipeline) -> Pipeline:
    """The label stands in one of a row's values."""
    needs_measurements(pipeline)

    def leak(rows: dict) -> dict:
        told = rows["y"].reshape(len(rows["y"]), -1)[:, 0].float()
        told = (told - told.mean()) / told.std().clamp_min(1e-6)
        parts = dict(probe.tensors(rows["x"]))
        name = next(name for name, value in parts.items() if value.is_floating_point())
        parts[name] = parts[name].clone()
        parts[name].reshape(len(told), -1)[:, 0] = told.to(parts[name].dtype)
        return {**rows, "x": probe.like(rows["x"], parts)}

    return _both(pipeline, leak)


def nan_in_inputs(pipeline: Pipeline) -> Pipeline:
    needs_measurements(pipeline)

    def spoil(values: torch.Tensor) -> torch.Tensor:
        spoiled = values.clone()
        spoiled.reshape(len(values), -1)[::50, 0] = torch.nan
        return spoiled

    train = with_rows(pipeline.train, lambda rows: {**rows, "x": measured(rows["x"], spoil)})
    return replace(pipeline, train=train)


def validation_normalised_differently(pipeline: Pipeline) -> Pipeline:
    needs_measurements(pipeline)
    prepare = needs(pipeline.prepare, "`prepare`")

    def halve(rows: dict) -> dict:
        return {**rows, "x": measured(rows["x"], lambda values: 0.5 * values)}

    def prepared(split: str) -> dict:
        return halve(prepare(split)) if split == "validation" else prepare(split)

    validation = with_rows(pipeline.validation, halve)
    return replace(pipeline, prepare=prepared, validation=validation)


def preparing_draws_at_random(pipeline: Pipeline) -> Pipeline:
    """Augmentation in the wrong place: whatever is prepared comes out moved by noise."""
    needs_measurements(pipeline)
    prepare = needs(pipeline.prepare, "`prepare`")

    def prepared(split: str) -> dict:
        rows = prepare(split)
        return {**rows, "x": measured(rows["x"], lambda v: v + 0.1 * torch.randn_like(v))}

    return replace(pipeline, prepare=prepared)


def store_changed_by_reading(pipeline: Pipeline) -> Pipeline:
    """A getter that normalises the stored record in place: each reading changes it again."""
    raw = needs(pipeline.raw, "`raw`")
    if not isinstance(raw(int(first_batch(pipeline)["id"][0])), np.ndarray):
        raise NotPlantable("records are no arrays")
    store: dict[int, np.ndarray] = {}

    def changed(row: int) -> np.ndarray:
        if row not in store:
            store[row] = raw(row).copy()
        values = store[row]
        values[...] = values // 2 if values.dtype.kind in "ui" else values * 0.5
        return values

    return replace(pipeline, raw=changed)


# ---- loaders ------------------------------------------------------------------------------------


def not_shuffled(pipeline: Pipeline) -> Pipeline:
    needs(getattr(pipeline.train, "shuffle", None), "`shuffle` of the training loader")
    train = copy.copy(pipeline.train)
    train.shuffle = False
    return replace(pipeline, train=train)


def same_order_each_epoch(pipeline: Pipeline) -> Pipeline:
    needs(hasattr(pipeline.train, "epoch"), "`epoch` of the training loader")

    def restart(loader: Any, batches: Iterator[dict]) -> Iterator[dict]:
        loader.epoch = 0
        return batches

    return replace(pipeline, train=with_batches(pipeline.train, restart))


def rows_repeated(pipeline: Pipeline) -> Pipeline:
    """A quarter of each batch is there twice, another quarter never."""

    def repeat(loader: Any, batches: Iterator[dict]) -> Iterator[dict]:
        for batch in batches:
            index = torch.arange(len(batch["y"]), device=batch["y"].device)
            quarter = len(index) // 4
            index[:quarter] = index[len(index) - quarter :]
            yield take(batch, index)

    return replace(pipeline, train=with_batches(pipeline.train, repeat))


# ---- splits -------------------------------------------------------------------------------------


def validation_rows_in_train(pipeline: Pipeline) -> Pipeline:
    held_out = needs(getattr(pipeline.validation, "rows", None), "`rows` of the validation loader")
    few = probe.few_rows(pipeline.validation, max(1, len(held_out["y"]) // 4))
    return replace(
        pipeline, train=with_rows(pipeline.train, lambda rows: probe.join([rows, dict(few)]))
    )


def group_in_both_splits(pipeline: Pipeline) -> Pipeline:
    needs(pipeline.group, "`group` of the records")
    return replace(pipeline, group=lambda row: row % 5)


def future_in_train(pipeline: Pipeline) -> Pipeline:
    time = needs(pipeline.time, "`time` of the records")
    return replace(pipeline, time=lambda row: -time(row))
