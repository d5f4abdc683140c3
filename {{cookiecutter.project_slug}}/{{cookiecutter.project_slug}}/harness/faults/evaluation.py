"""Faults of the evaluation and of the metric."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from torch import nn

from ..checks import Pipeline
from .plant import NotPlantable, measured, needs, needs_measurements, with_batches


def _with_evaluate(pipeline: Pipeline, wrap: Callable[[Callable], Callable]) -> Pipeline:
    return replace(pipeline, evaluate=wrap(pipeline.evaluate))


# ---- the mode of the model ----------------------------------------------------------------------


def eval_never_called(pipeline: Pipeline) -> Pipeline:
    def wrap(evaluate: Callable) -> Callable:
        def faulty(model: nn.Module, loader: Any) -> Any:
            model.eval = lambda: model
            model.train = lambda mode=True: model
            try:
                return evaluate(model, loader)
            finally:
                del model.eval, model.train

        return faulty

    return _with_evaluate(pipeline, wrap)


def train_never_restored(pipeline: Pipeline) -> Pipeline:
    def wrap(evaluate: Callable) -> Callable:
        def faulty(model: nn.Module, loader: Any) -> Any:
            found = evaluate(model, loader)
            model.eval()
            return found

        return faulty

    return _with_evaluate(pipeline, wrap)


def inputs_scaled_in_evaluation(pipeline: Pipeline) -> Pipeline:
    needs_measurements(pipeline)

    def halve(loader: Any, batches: Iterator[dict]) -> Iterator[dict]:
        for batch in batches:
            yield {**batch, "x": measured(batch["x"], lambda values: 0.5 * values)}

    def wrap(evaluate: Callable) -> Callable:
        def faulty(model: nn.Module, loader: Any) -> Any:
            return evaluate(model, with_batches(loader, halve))

        return faulty

    return _with_evaluate(pipeline, wrap)


# ---- what is counted ----------------------------------------------------------------------------


def rows_dropped_in_evaluation(pipeline: Pipeline) -> Pipeline:
    """The rows that fill no batch of 64 are left out, or the last one."""

    def cut(found: Any, loader: Any) -> Any:
        kept = max(1, len(found.y) - max(1, len(found.y) % 64))
        z, y, ids = found.outputs[:kept], found.y[:kept], found.ids[:kept]
        score = pipeline.task.metric(z, y)
        return replace(found, metric=score, num_rows=kept, outputs=z, y=y, ids=ids)

    return _with_result(pipeline, cut)


def mean_of_batch_means(pipeline: Pipeline) -> Pipeline:
    def average(found: Any, loader: Any) -> Any:
        size = getattr(loader, "batch_size", None) or 64
        parts = zip(found.outputs.split(size), found.y.split(size), strict=True)
        return replace(found, metric=mean(pipeline.task.metric(z, y) for z, y in parts))

    return _with_result(pipeline, average)


def metric_keeps_state(pipeline: Pipeline) -> Pipeline:
    seen: list[float] = []

    def remember(found: Any, loader: Any) -> Any:
        seen.append(found.metric)
        return replace(found, metric=mean(seen))

    return _with_result(pipeline, remember)


def targets_reordered_in_evaluation(pipeline: Pipeline) -> Pipeline:
    def roll(found: Any, loader: Any) -> Any:
        y = found.y.roll(1, 0)
        loss = pipeline.task.loss(found.outputs, y).item()
        return replace(found, loss=loss, metric=pipeline.task.metric(found.outputs, y), y=y)

    return _with_result(pipeline, roll)


def _with_result(pipeline: Pipeline, change: Callable[[Any, Any], Any]) -> Pipeline:
    """What an evaluation found goes through `change(found, loader)`."""
    return _with_evaluate(
        pipeline, lambda evaluate: lambda model, loader: change(evaluate(model, loader), loader)
    )


def metric_inverted(pipeline: Pipeline) -> Pipeline:
    low, high = needs(getattr(pipeline.task, "metric_bounds", None), "`metric_bounds` in the task")
    if not torch.tensor([low, high], dtype=torch.float64).isfinite().all():
        raise NotPlantable("the metric has no two bounds to turn around")
    task, score = copy.copy(pipeline.task), pipeline.task.metric
    task.metric = lambda outputs, y: low + high - score(outputs, y)
    return replace(pipeline, task=task)
