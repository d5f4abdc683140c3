"""What several faults are planted with: copies of a pipeline's parts with one thing wrapped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..checks import Pipeline, probe


class NotPlantable(ValueError):
    """This pipeline has no place for the fault; the message says what is missing."""


def needs_targets(pipeline: Pipeline, *kinds: str) -> str:
    """The kind of targets. Raises NotPlantable for another than these."""
    kind = getattr(pipeline.task, "targets", None)
    if kind not in kinds:
        raise NotPlantable(f"it is made for {' or '.join(kinds)} targets, the task has {kind}")
    return kind


def needs(part: Any, what: str) -> Any:
    """`part` itself. Raises NotPlantable where there is none."""
    if part is None or part is False or part == []:
        raise NotPlantable(f"there is no {what}")
    return part


# ---- model --------------------------------------------------------------------------------------


def with_models(pipeline: Pipeline, change: Callable[[nn.Module], Any]) -> Pipeline:
    """Every fresh model goes through `change(model)`, which works in place.

    It is tried once, so that a model with no place for the fault is found here.
    """

    def make_model(seed: int) -> nn.Module:
        model = pipeline.make_model(seed)
        change(model)
        return model

    make_model(0)
    return replace(pipeline, make_model=make_model)


def with_outputs(pipeline: Pipeline, change: Callable[[torch.Tensor], torch.Tensor]) -> Pipeline:
    """The model's outputs go through `change`; its parameters keep their names."""
    return with_models(
        pipeline,
        lambda model: model.register_forward_hook(lambda module, args, outputs: change(outputs)),
    )


def with_inputs(pipeline: Pipeline, change: Callable[[Any], Any]) -> Pipeline:
    """The model's first argument goes through `change`."""

    def hook(module: nn.Module, args: tuple) -> tuple:
        return (change(args[0]), *args[1:])

    return with_models(pipeline, lambda model: model.register_forward_pre_hook(hook))


def each(x: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Every tensor of `x` changed."""
    return probe.like(x, {name: change(value) for name, value in probe.tensors(x).items()})


def measured(x: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Every tensor of measurements changed; ids stay."""
    return each(x, lambda value: change(value) if value.is_floating_point() else value)


def needs_measurements(pipeline: Pipeline) -> None:
    """Raises NotPlantable where x holds nothing but ids."""
    parts = probe.tensors(first_batch(pipeline)["x"]).values()
    needs(any(value.is_floating_point() for value in parts), "measurement in x, only ids")


def layers(model: nn.Module, at_least: int = 1) -> list[nn.Module]:
    """Modules with parameters of their own, in order. NotPlantable if there are fewer."""
    found = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    if len(found) < at_least:
        raise NotPlantable(f"the model has {len(found)} layer with parameters, not {at_least}")
    return found


# ---- step ---------------------------------------------------------------------------------------


def with_steps(pipeline: Pipeline, wrap: Callable[[Callable], Callable]) -> Pipeline:
    """The training step, and its form with a number of parts, wrapped."""
    parts = {"train_step": wrap(pipeline.train_step)}
    if pipeline.accumulate_step is not None:
        parts["accumulate_step"] = wrap(pipeline.accumulate_step)
    return replace(pipeline, **parts)


def with_hook(pipeline: Pipeline, register: Callable[..., Any]) -> Pipeline:
    """`register(model, optimizer, batch)` sets a hook for the time of one step, and returns its
    handle."""

    def wrap(step: Callable) -> Callable:
        def faulty(model, optimizer, batch, *parts):
            handle = register(model, optimizer, batch)
            try:
                return step(model, optimizer, batch, *parts)
            finally:
                handle.remove()

        return faulty

    return with_steps(pipeline, wrap)


def before_update(
    pipeline: Pipeline, change: Callable[[nn.Module, torch.optim.Optimizer], Any]
) -> Pipeline:
    """`change(model, optimizer)` runs between backward and the optimizer's step."""
    return with_hook(
        pipeline,
        lambda model, optimizer, batch: optimizer.register_step_pre_hook(
            lambda *_: change(model, optimizer)
        ),
    )


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


# ---- loaders ------------------------------------------------------------------------------------


def first_batch(pipeline: Pipeline) -> dict:
    return probe.batches_of(pipeline.train, min_rows=1)[0]


def with_rows(loader: Any, change: Callable[[dict], dict]) -> Any:
    """A copy of the loader over `change(rows)`; the rows themselves are left alone."""
    if not hasattr(loader, "rows"):
        raise NotPlantable("the loader does not keep its rows in `.rows`")
    return probe.rebatch(loader, rows=change(dict(loader.rows)))


def with_batches(loader: Any, change: Callable[[Any, Iterator[dict]], Iterator[dict]]) -> Any:
    """A copy of the loader, of its own class, that hands out `change(loader, batches)`."""
    other, kind = copy.copy(loader), type(loader)

    def iterate(self: Any) -> Iterator[dict]:
        return change(self, iter(kind.__iter__(self)))

    try:
        other.__class__ = type(kind.__name__, (kind,), {"__iter__": iterate})
    except TypeError:
        raise NotPlantable(f"a loader of type {kind.__name__} cannot be wrapped") from None
    return other
