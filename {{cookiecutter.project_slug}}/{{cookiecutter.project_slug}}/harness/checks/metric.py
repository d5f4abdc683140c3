"""The metric: does it count what a person would, on every row, however the rows are batched?"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch

from . import Check, Finding, Pipeline, answers, counting, not_applicable, probe, shut_if_any

KINDS = ("measured", "published", "inter-rater", "impossible")


def human_metric(
    pipeline: Pipeline,
    *,
    max_gap: float = 1e-6,
    max_loss_gap: float = 1e-4,
    batch_sizes: tuple[int, ...] = (7, 64),
    max_rows: int = 512,
) -> Check:
    """The metric on answers whose score is known, and the project's own evaluation of them.

    A constant predictor scores chance, right answers the best value (also when right by little),
    corrupting them lowers it step by step; scikit-learn agrees within `max_gap` where the task
    names a function of it; neither the order of the rows nor ignored positions matter; batches of
    any of `batch_sizes` give one score and loss; rows counted are rows listed; a second call gives
    the first's answer. Known answers are float32: one limit in fp32 and bf16.
    """
    name = "human_metric"
    needed = ("metric", "metric_bounds", "metric_direction", "ideal_outputs", "constant_outputs")
    needed += ("prior", *(("predict", "chance") if pipeline.task.targets == "exclusive" else ()))
    missing = probe.lacking(name, pipeline, targets=answers.KINDS, task=needed)
    if missing:
        return missing
    task, y = pipeline.task, probe.labels(pipeline.train)
    y = answers.few(y, getattr(task, "num_outputs", 1))
    found = list(counting.known_answers(task, y, max_gap))
    if not found:  # a metric that cannot count would only raise inside the evaluation
        found = [
            *_counted(pipeline),
            *_repeated(pipeline, max_rows),
            *_evaluated(pipeline, batch_sizes, max_rows, max_gap, max_loss_gap),
        ]
    num_rows = len(probe.labels(pipeline.validation))
    because = (
        f"{getattr(task, 'metric_name', 'the metric')} gives a constant answer its chance, right "
        f"answers the best score and corrupted ones less, the same in batches of "
        f"{' and '.join(map(str, batch_sizes))}, over all {num_rows} held-out rows, twice"
    )
    function = counting.reference(task)
    because += f", and as {function.__name__} does." if function else "."
    return shut_if_any(found, Check(name, "open", 0.0, max_gap, "", because))


def _counted(pipeline: Pipeline) -> Iterator[Finding]:
    """Every listed row is evaluated once."""
    found = pipeline.evaluate(pipeline.make_model(0), copy.copy(pipeline.validation))
    listed = len(probe.labels(pipeline.validation))
    distinct = len(found.ids.unique())
    if not found.num_rows == len(found.y) == len(found.outputs) == listed == distinct:
        because = f"{found.num_rows} rows are counted ({distinct} distinct) of {listed} listed"
        causes = ("the last batch is dropped", "only some batches are evaluated", "rows are padded")
        yield Finding(float(found.num_rows), float(listed), because, causes)


def _evaluated(
    pipeline: Pipeline, sizes: tuple[int, ...], max_rows: int, limit: float, loss_limit: float
) -> Iterator[Finding]:
    """The project's evaluation of answers that are wrong in the last tenth of the rows only: a mean
    of batch means, a lost batch or a last state kept shows."""
    rows, task = probe.few_rows(pipeline.validation, max_rows), pipeline.task
    backwards = torch.arange(len(rows["y"]) - 1, -1, -1, device=rows["y"].device)
    given = answers.corrupted(task, rows["y"][backwards], 0.1)[backwards]
    metric, loss = counting.score(task, given, rows["y"]), task.loss(given, rows["y"]).item()
    whole = _evaluate_as(pipeline, rows, given, len(rows["y"]))
    batched = ("a mean of batch means", "state kept between batches")
    for size in sizes:
        found = _evaluate_as(pipeline, rows, given, size)
        if not counting.close(found.metric, metric, limit):
            because = f"in batches of {size} evaluation says {found.metric:.6g} for {metric:.6g}"
            other = ("rows or targets are changed, lost or reordered in evaluation",)
            causes = batched if counting.close(whole.metric, metric, limit) else other
            yield Finding(found.metric, metric, because, causes)
            return
        room = loss_limit * max(abs(loss), 1.0)
        if not abs(found.loss - loss) <= room:
            because = f"in batches of {size} the held-out loss is {found.loss:.6g} for {loss:.6g}"
            other = ("evaluation uses another loss",)
            causes = batched if abs(whole.loss - loss) <= room else other
            yield Finding(found.loss, loss, because, causes)
            return


def _evaluate_as(pipeline: Pipeline, rows: dict, given: torch.Tensor, size: int) -> Any:
    """The project's evaluation with `given` in the place of the model's outputs."""
    model, start = pipeline.make_model(0), 0

    def replace(outputs: torch.Tensor, call: int) -> torch.Tensor:
        nonlocal start
        start += len(outputs)
        return given[start - len(outputs) : start].to(outputs.device)

    loader = probe.rebatch(pipeline.validation, rows=rows, batch_size=size)
    with probe.seam(model, replace=replace, inputs=False):
        return pipeline.evaluate(model, loader)


def _repeated(pipeline: Pipeline, max_rows: int) -> Iterator[Finding]:
    """One model scores the same again, also after another has been scored in between."""
    model, loader = pipeline.make_model(0), probe.few(pipeline.validation, max_rows)
    models = (model, pipeline.make_model(1), model)
    first, _, last = (pipeline.evaluate(each, loader).metric for each in models)
    if first != last and not math.isnan(first + last):
        because = f"a second evaluation says {last:.6g} after {first:.6g}"
        causes = ("the metric keeps state", "evaluation is not in evaluation mode")
        yield Finding(last, first, because, causes)


def human_reference(pipeline: Pipeline) -> Check:
    """How well a person does the task: without it nobody can say how good a score is."""
    name, given = "human_reference", pipeline.human_reference
    if not given or not given.get("kind"):
        because = (
            "How well a person does this task is not stated: no score can be called good or bad."
        )
        return Check(name, "warn", None, None, "", because, ("human_reference is not filled in",))
    kind, value, count = given["kind"], given.get("value"), given.get("num_samples")
    if kind not in KINDS:
        because = f"human_reference.kind is {kind!r}, it must be one of {', '.join(KINDS)}."
        return Check(name, "shut", None, None, "", because, ("human_reference is mistyped",))
    if kind == "impossible":
        return not_applicable(name, "A person cannot do this task, the owner states.")
    low, high = getattr(pipeline.task, "metric_bounds", (-math.inf, math.inf))
    metric = getattr(pipeline.task, "metric_name", "the metric")
    if value is None or not count or not low <= value <= high:
        because = f"A person scores {value} on {count or 'an unknown number of'} samples"
        because += f", which is no {metric} from {low:g} to {high:g} with its number of samples."
        return Check(name, "warn", value, [low, high], "", because, ("the entry is incomplete",))
    because = f"A person scores {value:g} in {metric} ({kind}, on {count} samples)."
    return Check(name, "open", float(value), [low, high], "", because)
