"""The checkpoint that the loop keeps: is it the best, and is it a copy of what was evaluated?"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from ..instruments import NonFiniteLoss
from . import Check, Finding, Pipeline, not_applicable, probe, shut_if_any
from .dryrun import Counted, small

KEPT = (  # fields of a FitResult that belong together
    ("best_validation_epoch", "best_validation_loss", "best_validation_state"),
    ("best_epoch", "best_loss", "best_state"),
)
DRIVE = (1e-2, 1e-3)  # rates of Adam: the second where the first is too high for the model


def best_checkpoint(
    pipeline: Pipeline,
    *,
    num_epochs: int = 12,
    max_relative_difference: float | None = None,
) -> Check:
    """`fit` on a few rows, by Adam at a rate that moves the losses: once as it is, where it must
    not stop early while every epoch is better; once with the labels of validation permuted, so that
    what is learned makes it worse and the best epoch is an early one.

    Open when the best epoch has the best of the recorded values, and the state that is kept is the
    one evaluated there or gives that value again, within 1e-5 (bf16 1e-2).
    """
    name = "best_checkpoint"
    if pipeline.fit is None:
        return not_applicable(name, "The pipeline has no `fit`: hand over the whole loop.")
    tight = 1e-5 if pipeline.precision == "fp32" else 1e-2
    limit = tight if max_relative_difference is None else max_relative_difference
    learning = _drive(pipeline, num_epochs, permuted=False)
    spoiled = _drive(pipeline, max(4, num_epochs // 2), permuted=True)
    if _still_improving(spoiled):  # a model that learns slowly
        spoiled = _drive(pipeline, 2 * num_epochs, permuted=True)
    kept = [fields for fields in KEPT if all(_has(spoiled.result, key) for key in fields)]
    if not kept or not (getattr(spoiled.result, "epochs", None) or []):
        because = "What `fit` returns has no epochs with losses, or no best epoch, loss and state."
        return not_applicable(name, because)
    found = [
        *_chosen(pipeline, spoiled.result, kept),
        *(f for fields in kept for f in _again(pipeline, spoiled, fields, limit)),
    ]
    found += _stopped(learning, num_epochs)
    found = found or [*_chosen(pipeline, learning.result, kept)]
    best, last = getattr(spoiled.result, kept[0][0]), len(spoiled.result.epochs)
    because = f"Epoch {best} of {last} on permuted labels has the best value, and the state kept "
    because += "is the one evaluated there"
    if not found and best == last:
        because += "; it is the last one, so that a copy cannot be told from the live weights."
        return Check(name, "warn", None, limit, "", because, ("the state kept may be no copy",))
    return shut_if_any(found, Check(name, "open", 0.0, limit, "", because + "."))


class _Drive:
    """A short run that moves, with a copy of the model's state at each evaluation."""

    def __init__(self, pipeline: Pipeline, rate: float, num_epochs: int, *, permuted: bool):
        train, validation = small(pipeline, 3)
        if permuted:
            y = validation.rows["y"]
            rows = {**validation.rows, "y": y.roll(len(y) // 2, dims=0)}
            validation = probe.rebatch(validation, rows=rows)
        self.model = pipeline.make_model(0).train()
        self.start, self.states = _state(self.model), []
        self.validation = validation
        seen = Counted(validation, lambda: self.states.append(_state(self.model)))
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trainable, lr=rate)
        self.result = pipeline.fit(self.model, optimizer, train, seen, num_epochs)


def _drive(pipeline: Pipeline, num_epochs: int, *, permuted: bool) -> _Drive:
    try:
        return _Drive(pipeline, DRIVE[0], num_epochs, permuted=permuted)
    except NonFiniteLoss:
        return _Drive(pipeline, DRIVE[1], num_epochs, permuted=permuted)


def _still_improving(drive: _Drive) -> bool:
    rows = getattr(drive.result, "epochs", None) or []
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    return bool(losses) and losses[-1] == min(losses)


def _state(model: Any) -> dict[str, torch.Tensor]:
    return {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}


def _has(result: Any, key: str) -> bool:
    return getattr(result, key, None) is not None


def _series(pipeline: Pipeline, rows: list[dict]) -> dict[str, tuple[list[float], float]]:
    """What the epochs record of losses and of the metric: values, and 1 where lower is better."""
    metric = getattr(pipeline.task, "metric_name", "metric")
    up = getattr(pipeline.task, "metric_direction", "max") == "max"
    found = {}
    for key in rows[0]:
        way = 1.0 if key.endswith("loss") else -1.0 if up else 1.0
        if key.endswith(("loss", metric)) and not key.startswith("running"):
            found[key] = ([float(row[key]) for row in rows], way)
    return found


def _stopped(drive: _Drive, asked: int) -> Iterator[Finding]:
    rows = drive.result.epochs
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    falls = all(b < a for a, b in itertools.pairwise(losses))
    if len(rows) < asked and len(losses) > 2 and falls and losses[-1] < 0.95 * losses[0]:
        because = f"the run stops after {len(rows)} of {asked} epochs, each better than the last"
        causes = ("early stopping watches in the wrong direction, or the wrong value",)
        yield Finding(float(len(rows)), float(asked), because, causes)


def _chosen(pipeline: Pipeline, result: Any, kept: list[tuple]) -> Iterator[Finding]:
    """The recorded best must be at its epoch, and the best there is of what it is a value of."""
    series = _series(pipeline, result.epochs)
    places = {row.get("epoch", i): i for i, row in enumerate(result.epochs, start=1)}
    for epoch_key, value_key, _ in kept:
        epoch, value = getattr(result, epoch_key), float(getattr(result, value_key))
        place = places.get(epoch)
        if place is None or not math.isfinite(value):
            because = f"{epoch_key} is {epoch}, which is no epoch of the run"
            yield Finding(None, None, because, ("nothing ever counts as better: the comparison",))
            continue
        is_it = [k for k, (v, _) in series.items() if math.isclose(v[place - 1], value)]
        is_it = [k for k in is_it if k.startswith("validation")] or is_it
        if not is_it:
            because = f"{value_key} is {value:.4g}, which epoch {epoch} did not record"
            yield Finding(value, None, because, ("value and epoch are not of the same moment",))
            continue
        values, way = series[is_it[0]]
        ranked = [way * v for v in values]
        spread = max(ranked) - min(ranked)
        if ranked[place - 1] > min(ranked) + 0.01 * spread and spread > 0:
            best = 1 + ranked.index(min(ranked))
            because = f"{epoch_key} is {epoch} with a {is_it[0]} of {value:.4g}, epoch {best} has "
            causes = ("the best is taken in the wrong direction", "another value is watched")
            yield Finding(value, values[best - 1], because + f"{values[best - 1]:.4g}", causes)


def _again(pipeline: Pipeline, drive: _Drive, fields: tuple, limit: float) -> Iterator[Finding]:
    """The kept state, loaded into a fresh model and evaluated again."""
    epoch, value, state = (getattr(drive.result, key) for key in fields)
    rows, state_key = drive.result.epochs, fields[-1]
    if not state:
        because = f"{state_key} is empty after {len(rows)} epochs"
        yield Finding(None, None, because, ("the best state is never kept",))
        return
    aligned = len(drive.states) == len(rows) and 1 <= epoch <= len(rows)
    if aligned and _equal(state, drive.states[epoch - 1]):
        return
    if epoch < len(rows) and _equal(state, _state(drive.model)):
        because = f"{state_key} of epoch {epoch} is the state of the last epoch"
        yield Finding(None, None, because, ("a reference to the live weights is kept, no copy",))
        return
    stale = [
        key
        for key, start in drive.start.items()
        if "running_" in key
        and torch.equal(state[key].cpu(), start)
        and not torch.equal(_state(drive.model)[key], start)
    ]
    if stale:
        because = f"{len(stale)} running statistics in {state_key} are those of the start"
        causes = ("an averaged copy does not take over the buffers",)
        yield Finding(float(len(stale)), 0.0, because, causes)
        return
    model = pipeline.make_model(1)
    model.load_state_dict(state)
    found = pipeline.evaluate(model, copy.copy(drive.validation))
    values = [found.loss, found.metric]
    near = min(abs(v - value) / max(abs(value), 1e-12) for v in values)
    if near > limit:
        because = f"{state_key} evaluates to {found.loss:.5g}, while {value:.5g} was recorded"
        causes = ("the state kept is of another moment", "it was evaluated in another mode")
        yield Finding(near, limit, because, causes)


def _equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k].cpu(), b[k]) for k in a)
