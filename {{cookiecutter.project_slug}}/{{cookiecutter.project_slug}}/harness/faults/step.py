"""Faults of the step, the optimizer and the loop around them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..checkpoints import cpu_state
from ..checks import Pipeline
from .plant import NotPlantable, before_update, gradients, needs, with_batches, with_steps

# ---- optimizer ----------------------------------------------------------------------------------


def _with_optimizer(pipeline: Pipeline, change: Callable[[torch.optim.Optimizer], Any]) -> Pipeline:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = pipeline.make_optimizer(model)
        change(optimizer)
        return optimizer

    make_optimizer(pipeline.make_model(0))  # a fault with no place is found here
    return replace(pipeline, make_optimizer=make_optimizer)


def optimizer_missing_a_tensor(pipeline: Pipeline) -> Pipeline:
    def forget(optimizer: torch.optim.Optimizer) -> None:
        group = max(optimizer.param_groups, key=lambda group: len(group["params"]))
        if len(optimizer.param_groups) > 1:
            optimizer.param_groups.pop()
        elif len(group["params"]) > 1:
            group["params"] = group["params"][1:]
        else:
            raise NotPlantable("the optimizer holds one tensor alone")

    return _with_optimizer(pipeline, forget)


def optimizer_of_another_model(pipeline: Pipeline) -> Pipeline:
    """Made before the model was replaced."""
    return replace(
        pipeline, make_optimizer=lambda model: pipeline.make_optimizer(copy.deepcopy(model))
    )


def rate_of_a_group_lost(pipeline: Pipeline) -> Pipeline:
    def lose(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[-1]["lr"] = 0.0

    return _with_optimizer(pipeline, lose)


def huge_rate(pipeline: Pipeline) -> Pipeline:
    return _scaled_rate(pipeline, 1e3)


def tiny_rate(pipeline: Pipeline) -> Pipeline:
    return _scaled_rate(pipeline, 1e-5)


def _scaled_rate(pipeline: Pipeline, factor: float) -> Pipeline:
    def scale(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    return _with_optimizer(pipeline, scale)


def huge_decay(pipeline: Pipeline) -> Pipeline:
    """Weights lose a twentieth of themselves per step."""

    def shrink(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.05 / float(group["lr"])

    return _with_optimizer(pipeline, shrink)


# ---- the lines of the step ----------------------------------------------------------------------


def zero_grad_missing(pipeline: Pipeline) -> Pipeline:
    def wrap(step: Callable) -> Callable:
        def faulty(model, optimizer, batch, *parts):
            for owner in (model, optimizer):
                owner.zero_grad = lambda set_to_none=True: None
            try:
                return step(model, optimizer, batch, *parts)
            finally:
                for owner in (model, optimizer):
                    del owner.zero_grad

        return faulty

    return with_steps(pipeline, wrap)


def zero_grad_misplaced(pipeline: Pipeline) -> Pipeline:
    """Between backward and the update."""
    return before_update(pipeline, lambda model, optimizer: optimizer.zero_grad())


def gradient_ascended(pipeline: Pipeline) -> Pipeline:
    return before_update(pipeline, lambda model, optimizer: _scale(model, -1.0))


def _scale(model: nn.Module, factor: float) -> None:
    for gradient in gradients(model):
        gradient.mul_(factor)


def stepped_twice(pipeline: Pipeline) -> Pipeline:
    def wrap(step: Callable) -> Callable:
        def faulty(model, optimizer, batch, *parts):
            output = step(model, optimizer, batch, *parts)
            optimizer.step()
            return output

        return faulty

    return with_steps(pipeline, wrap)


def tiny_clip(pipeline: Pipeline) -> Pipeline:
    """Declared and applied, and so small that next to nothing of a gradient is left."""
    norm = 1e-5
    clipped = before_update(
        pipeline, lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), norm)
    )
    return replace(clipped, clip_norm=norm)


def accumulation_not_divided(pipeline: Pipeline) -> Pipeline:
    step = needs(pipeline.accumulate_step, "`accumulate_step`")

    def faulty(model, optimizer, batch, num_parts=pipeline.accumulate):
        def hook(*_: Any) -> None:
            _scale(model, float(num_parts))

        handle = optimizer.register_step_pre_hook(hook)
        try:
            return step(model, optimizer, batch, num_parts)
        finally:
            handle.remove()

    parts = {"train_step": faulty} if pipeline.accumulate > 1 else {}
    return replace(pipeline, accumulate_step=faulty, **parts)


def step_in_evaluation_mode(pipeline: Pipeline) -> Pipeline:
    def wrap(step: Callable) -> Callable:
        def faulty(model, *others):
            model.eval()
            return step(model, *others)

        return faulty

    return with_steps(pipeline, wrap)


def precision_not_as_declared(pipeline: Pipeline) -> Pipeline:
    """bf16 is asked for and autocast is not applied; or the other way round."""
    other = "bf16" if pipeline.precision == "fp32" else "fp32"
    return replace(pipeline, precision=other)


# ---- the loop around it -------------------------------------------------------------------------


def _with_fit(pipeline: Pipeline, wrap: Callable[[Callable], Callable]) -> Pipeline:
    return replace(pipeline, fit=wrap(needs(pipeline.fit, "`fit`")))


def schedule_ends_early(pipeline: Pipeline) -> Pipeline:
    """Planned for a third of the run, in the wrong unit: then the rate stays at zero."""

    def wrap(fit: Callable) -> Callable:
        def faulty(model, optimizer, train, validation, num_epochs):
            planned, done = math.ceil(num_epochs * len(train) / 3), 0

            def late(loader: Any, batches: Iterator[dict]) -> Iterator[dict]:
                nonlocal done
                for batch in batches:
                    done += 1
                    for group in optimizer.param_groups if done > planned else ():
                        group["lr"] = 0.0
                    yield batch

            return fit(model, optimizer, with_batches(train, late), validation, num_epochs)

        return faulty

    return _with_fit(pipeline, wrap)


def best_by_reference(pipeline: Pipeline) -> Pipeline:
    """The best weights were kept without a copy: they are those of the last step."""

    def wrap(fit: Callable) -> Callable:
        def faulty(model, *others):
            result = fit(model, *others)
            last = cpu_state(model)
            return replace(result, best_state=last, best_validation_state=last)

        return faulty

    return _with_fit(pipeline, wrap)
