"""The metric: does it count what a person would, on every row, however the rows are batched?"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from . import Check, Finding, Pipeline, not_applicable, probe, shut_if_any

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

    A constant predictor scores chance, right answers the best value, corrupting them lowers it step
    by step down to the worst; scikit-learn agrees within `max_gap` where the task names a function
    of it; batches of any of `batch_sizes` give one score and loss; rows counted are rows listed; a
    second call gives the first's answer. Known answers are float32: one limit in fp32 and bf16.
    """
    name = "human_metric"
    needed = ("metric", "predict", "ideal_outputs", "constant_outputs", "chance", "prior")
    missing = probe.lacking(name, pipeline, targets=("exclusive",), task=needed)
    if missing:
        return missing
    task = pipeline.task
    found = list(_known_answers(task, probe.labels(pipeline.train), max_gap))
    if not found:  # a metric that cannot count would only raise inside the evaluation
        found = [
            *_counted(pipeline),
            *_repeated(pipeline, max_rows),
            *_evaluated(pipeline, batch_sizes, max_rows, max_gap, max_loss_gap),
        ]
    num_rows = len(probe.labels(pipeline.validation))
    because = (
        f"{task.metric_name} gives a constant answer its chance, right answers the best score and "
        f"corrupted ones less, the same in batches of {' and '.join(map(str, batch_sizes))}, over "
        f"all {num_rows} held-out rows, twice"
    )
    because += f", and as {task.sklearn_metric} does." if _reference(task) else "."
    return shut_if_any(found, Check(name, "open", 0.0, max_gap, "", because))


def _reference(task: Any) -> Any:
    """The function of scikit-learn the task names, or None."""
    from sklearn import metrics

    return getattr(metrics, getattr(task, "sklearn_metric", None) or "", None)


def _score(task: Any, outputs: torch.Tensor, y: torch.Tensor) -> float:
    """NaN when the metric raises: it cannot count, whatever the reason."""
    try:
        return float(task.metric(outputs, y))
    except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError):
        return math.nan


def _known_answers(task: Any, y: torch.Tensor, limit: float) -> Iterator[Finding]:
    scores = [_score(task, _corrupted(task, y, share), y) for share in (0.0, 0.1, 0.5, 1.0)]
    low, high = task.metric_bounds
    best, worst = (high, low) if task.metric_direction == "max" else (low, high)
    if not abs(scores[0] - best) <= limit:
        because = f"right answers score {scores[0]:.4g} instead of {best:.4g}"
        causes = ("argmax over the wrong axis", "another class map")
        if abs(scores[0] - worst) <= limit:
            causes = ("a score or threshold is inverted", *causes)
        yield Finding(scores[0], best, because, causes)
    sign = 1 if task.metric_direction == "max" else -1
    falls = all(sign * (a - b) > 0 for a, b in itertools.pairwise(scores))
    bounded = math.isfinite(worst)
    if not falls or (bounded and not abs(scores[-1] - worst) <= limit):
        listed = ", ".join(f"{score:.3g}" for score in scores)
        because = f"0, 10, 50 and 100 % wrong answers score {listed}"
        yield Finding(scores[-1], worst if bounded else None, because, ("answers are not counted",))
    reference = _reference(task)
    for share in (0.1, 0.5) if reference else ():
        outputs = _corrupted(task, y, share)
        ours, theirs = _score(task, outputs, y), _sklearn(task, reference, outputs, y)
        if not abs(ours - theirs) <= limit:
            because = f"it says {ours:.6g} where {task.sklearn_metric} says {theirs:.6g}"
            yield Finding(ours, theirs, because, ("an averaging other than the one declared",))
            return
    shares = probe.shares(task, y)
    constant = _score(task, task.constant_outputs(task.prior(y), len(y)).to(y.device), y)
    chance = task.chance(shares)
    if not abs(constant - chance) <= limit and shares.min() > 0:
        because = f"a constant answer scores {constant:.4g} instead of {chance:.4g}"
        yield Finding(
            constant,
            chance,
            because,
            ("an averaging other than the one declared", "a wrong chance"),
        )


def _corrupted(task: Any, y: torch.Tensor, share: float) -> torch.Tensor:
    """Right outputs, those of the first `share` of the rows for the next class."""
    answers = y.clone()
    wrong = round(share * len(y))
    answers[:wrong] = (y[:wrong] + 1) % task.num_outputs
    return task.ideal_outputs(answers).to(y.device)


def _sklearn(task: Any, reference: Any, outputs: torch.Tensor, y: torch.Tensor) -> float:
    try:
        predicted = task.predict(outputs).cpu().numpy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that are predicted and absent
            return float(reference(y.cpu().numpy(), predicted))
    except (RuntimeError, ValueError, IndexError):
        return math.nan


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
    answers = _corrupted(task, rows["y"][backwards], 0.1)[backwards]
    metric, loss = _score(task, answers, rows["y"]), task.loss(answers, rows["y"]).item()
    whole = _evaluate_as(pipeline, rows, answers, len(rows["y"]))
    batched = ("a mean of batch means", "state kept between batches")
    for size in sizes:
        found = _evaluate_as(pipeline, rows, answers, size)
        if not abs(found.metric - metric) <= limit:
            because = f"in batches of {size} evaluation says {found.metric:.6g} for {metric:.6g}"
            other = ("rows or targets are changed, lost or reordered in evaluation",)
            causes = batched if abs(whole.metric - metric) <= limit else other
            yield Finding(found.metric, metric, because, causes)
            return
        room = loss_limit * max(abs(loss), 1.0)
        if not abs(found.loss - loss) <= room:
            because = f"in batches of {size} the held-out loss is {found.loss:.6g} for {loss:.6g}"
            other = ("evaluation uses another loss",)
            causes = batched if abs(whole.loss - loss) <= room else other
            yield Finding(found.loss, loss, because, causes)
            return


def _evaluate_as(pipeline: Pipeline, rows: dict, answers: torch.Tensor, size: int) -> Any:
    """The project's evaluation with `answers` in the place of the model's outputs."""
    model, start = pipeline.make_model(0), 0

    def replace(outputs: torch.Tensor, call: int) -> torch.Tensor:
        nonlocal start
        start += len(outputs)
        return answers[start - len(outputs) : start].to(outputs.device)

    loader = probe.rebatch(pipeline.validation, rows=rows, batch_size=size)
    with probe.seam(model, replace=replace, inputs=False):
        return pipeline.evaluate(model, loader)


def _repeated(pipeline: Pipeline, max_rows: int) -> Iterator[Finding]:
    """One model scores the same again, also after another has been scored in between."""
    model, loader = pipeline.make_model(0), probe.few(pipeline.validation, max_rows)
    models = (model, pipeline.make_model(1), model)
    first, _, last = (pipeline.evaluate(each, loader).metric for each in models)
    if first != last:
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
